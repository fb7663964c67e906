"""What CPU ranks of different nodes exchange: messages of a process group of their own, by torch's backend for CPUs.

Sends and receives of one step go on together. They wait on a thread of their own, so that the lane meanwhile looks after its
peers: a rank that is lost ends the wait at once, and what still waits then ends with the connection, or at the bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from weft.errors import PeerLost
from weft.execute.bindings import Where
from weft.team import Team

Messages = Sequence[tuple[torch.Tensor, int]]
"""Contiguous tensors, each with the rank at its other end."""
_NAMED_S = 2.0
"""How long after a connection has broken its reason may take to come: which rank is lost."""


class HostWire:
    """Messages between the ranks of a team. Collective, as is `close`."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._ranks = dist.get_process_group_ranks(team.group)
        self._group = dist.new_group(
            self._ranks, timedelta(seconds=team.timeout_s), backend="gloo", use_local_synchronization=True
        )

    def exchange(self, sends: Messages, receives: Messages, where: Where) -> None:
        """Send and receive all of these. Raises PeerLost or WaitTimeout."""
        done, broken = threading.Event(), list[RuntimeError]()

        def work() -> None:
            try:
                under_way = [dist.isend(sent, self._ranks[to], self._group) for sent, to in sends]
                under_way += [dist.irecv(got, self._ranks[source], self._group) for got, source in receives]
                for one in under_way:
                    assert one is not None, "this rank is in its own group"
                    one.wait()
            except RuntimeError as error:
                broken.append(error)
            done.set()

        threading.Thread(target=work, name=f"weft-wire-{self.team.rank}", daemon=True).start()
        peers = sorted({rank for _, rank in (*sends, *receives)})
        self.team.until(done.is_set, lambda: f"{where}: expected messages of ranks {peers}; not all have come")
        if broken:
            self._explain(broken[0], where)

    def _explain(self, error: RuntimeError, where: Where) -> None:
        """Raise PeerLost with the reason, if it comes soon."""
        deadline = time.monotonic() + _NAMED_S
        while time.monotonic() < deadline:
            self.team.check_peers()
            time.sleep(0.02)
        raise self.team.fail(PeerLost(f"{where}: {error}"))

    def share(self, mine: torch.Tensor, theirs: Sequence[torch.Tensor], where: Where) -> None:
        """Give a tensor to every rank, and fill theirs, by rank, with what they give."""
        others = [rank for rank in range(self.team.world_size) if rank != self.team.rank]
        mine = mine.contiguous()
        theirs[self.team.rank].copy_(mine)
        sends = [(mine, rank) for rank in others if mine.numel()]
        self.exchange(sends, [(theirs[rank], rank) for rank in others if theirs[rank].numel()], where)

    def close(self) -> None:
        with suppress(ValueError, RuntimeError):  # gone with all groups of the process
            dist.destroy_process_group(self._group)
