"""What CPU ranks send each other as messages: gloo's, on connections of a team's own.

Messages go between nodes, and where no schedule describes what moves: rows in numbers that only the ranks' hosts know, and
gradients of lookups. They never go through the process group of the caller's. If a call ends between two exchanges, ranks have
begun different ones; on a shared process group the next call would receive what was meant for the last one. These connections
are abandoned with the team, and the next team makes its own.

A message has a sender and a receiver, so the rank that does not come can be named, which a collective cannot do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import ProcessGroupGloo

from weft.comm.team import Team
from weft.runtime.bounded import bounded

Messages = Sequence[tuple[torch.Tensor, int]]
"""Contiguous tensors, each with the rank at its other end."""


class HostWire:
    """Messages between the ranks of a team. Collective."""

    def __init__(self, team: Team) -> None:
        self.team = team
        # No group that torch knows by name: names of groups that some ranks make on their own are used again.
        store, bound = team.store("wire"), timedelta(seconds=team.timeout_s)
        self._backend: Any = bounded(
            team,
            lambda: f"rank {team.rank}: expected connections of all ranks; not all have come",
            lambda: ProcessGroupGloo(store, team.rank, team.world_size, bound),
        )

    def begin(self, sends: Messages, receives: Messages, what: object) -> Callable[[], None]:
        """Send and receive all of these. Returns a function that waits until that is done, and raises PeerLost or WaitTimeout.
        Empty messages are left out, on both sides. what: for errors."""
        waiting = [""]
        under_way = [(f"a message of rank {rank}", self._backend.recv([one], rank, 0)) for one, rank in receives if one.numel()]
        under_way += [(f"rank {rank} to receive", self._backend.send([one], rank, 0)) for one, rank in sends if one.numel()]

        def wait() -> None:
            for waiting[0], one in under_way:
                one.wait()

        def finish() -> None:
            if under_way:
                bounded(self.team, lambda: f"{what}: expected {waiting[0]}; it has not come to that", wait)

        return finish

    def exchange(self, sends: Messages, receives: Messages, what: object) -> None:
        """Send and receive all of these. Raises PeerLost or WaitTimeout."""
        self.begin(sends, receives, what)()

    def share(self, mine: torch.Tensor, theirs: Sequence[torch.Tensor], what: object) -> None:
        """Give a tensor to every rank, and fill theirs, by rank, with what they give."""
        others = [rank for rank in range(self.team.world_size) if rank != self.team.rank]
        mine = mine.contiguous()
        theirs[self.team.rank].copy_(mine)
        self.exchange([(mine, rank) for rank in others], [(theirs[rank], rank) for rank in others], what)

    def all_to_all(self, given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor], what: object) -> Callable[[], None]:
        """given[rank] goes to each rank, taken[rank] is filled by it: contiguous. Returns a function that waits, as `begin`."""
        rank, others = self.team.rank, [rank for rank in range(self.team.world_size) if rank != self.team.rank]
        taken[rank].copy_(given[rank])
        return self.begin([(given[other], other) for other in others], [(taken[other], other) for other in others], what)

    def close(self) -> None:
        self._backend = None
