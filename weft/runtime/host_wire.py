"""What CPU ranks of different nodes exchange: gloo's messages, on connections of a team's own.

Sends and receives of one step go on together. They wait on a thread of their own, so that the lane meanwhile looks after its
peers: a rank that is lost ends the wait at once, and what still waits then ends with the connection, or at the bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import ProcessGroupGloo

from weft.comm.team import Team
from weft.core.errors import PeerLost
from weft.runtime.bindings import Where

Messages = Sequence[tuple[torch.Tensor, int]]
"""Contiguous tensors, each with the rank at its other end."""
_NAMED_S = 2.0
"""How long after a connection has broken its reason may take to come: which rank is lost."""


class HostWire:
    """Messages between the ranks of a team. Collective."""

    def __init__(self, team: Team) -> None:
        self.team = team
        # No group that torch knows by name: names of groups that some ranks make on their own are used again.
        bound = timedelta(seconds=team.timeout_s)
        self._backend: Any = ProcessGroupGloo(team.store("wire"), team.rank, team.world_size, bound)

    def exchange(self, sends: Messages, receives: Messages, where: Where) -> None:
        """Send and receive all of these. Raises PeerLost or WaitTimeout."""
        done, broken = threading.Event(), list[RuntimeError]()

        def work() -> None:
            try:
                under_way = [self._backend.send([sent], to, 0) for sent, to in sends]
                under_way += [self._backend.recv([got], source, 0) for got, source in receives]
                for one in under_way:
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
        self._backend = None
