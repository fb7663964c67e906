"""What CPU ranks send each other as messages: gloo's, on connections of a group's own.

Messages go between nodes, and where no schedule describes what moves: rows in numbers that only the ranks' hosts know, and
gradients of lookups. They never go through the process group of the caller's. If a call ends between two exchanges, ranks have
begun different ones; on a shared process group the next call would receive what was meant for the last one. These connections
are abandoned with the group, and the next group makes its own.

A message has a sender and a receiver, so the rank that does not come can be named, which a collective cannot do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.rank_group import RankGroup
from weft.compat.c10d import connections, nameless_group
from weft.runtime.peer_waits import bounded, named

Messages = Sequence[tuple[torch.Tensor, int]]
"""Contiguous tensors, each with the rank at its other end."""
_LATER_S = 5.0
"""So much after weft's own bound gloo ends a wait, which it does without naming a rank."""


class HostWire:
    """Messages between the ranks of a group. Collective."""

    def __init__(self, rank_group: RankGroup) -> None:
        self.rank_group = rank_group
        self._backend: Any = _connect(rank_group, rank_group.open_store("wire"))

    def begin(self, sends: Messages, receives: Messages, what: object) -> Callable[[], None]:
        """Send and receive all of these. Returns a function that waits until that is done, and raises PeerLost or WaitTimeout.
        Empty messages are left out, on both sides. what: for errors."""
        waiting = [""]
        under_way = list[tuple[str, Any]]()
        with named(self.rank_group, lambda: f"{what}: connections are broken"):
            for one, rank in receives:
                if one.numel():
                    under_way.append((f"a message of rank {rank}", self._backend.recv([one], rank, 0)))
            for one, rank in sends:
                if one.numel():
                    under_way.append((f"rank {rank} to receive", self._backend.send([one], rank, 0)))

        def wait() -> None:
            for waiting[0], one in under_way:
                one.wait()

        def finish() -> None:
            if under_way:
                bounded(self.rank_group, lambda: f"{what}: expected {waiting[0]}; it has not come to that", wait)

        return finish

    def exchange(self, sends: Messages, receives: Messages, what: object) -> None:
        """Send and receive all of these. Raises PeerLost or WaitTimeout."""
        self.begin(sends, receives, what)()

    def share(self, mine: torch.Tensor, theirs: Sequence[torch.Tensor], what: object) -> None:
        """Give a tensor to every rank, and fill theirs, by rank, with what they give."""
        others = [rank for rank in range(self.rank_group.world_size) if rank != self.rank_group.rank]
        mine = mine.contiguous()
        theirs[self.rank_group.rank].copy_(mine)
        self.exchange([(mine, rank) for rank in others], [(theirs[rank], rank) for rank in others], what)

    def all_to_all(self, given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor], what: object) -> Callable[[], None]:
        """given[rank] goes to each rank, taken[rank] is filled by it: contiguous. Returns a function that waits, as `begin`."""
        rank, others = (
            self.rank_group.rank,
            [rank for rank in range(self.rank_group.world_size) if rank != self.rank_group.rank],
        )
        taken[rank].copy_(given[rank])
        return self.begin([(given[other], other) for other in others], [(taken[other], other) for other in others], what)

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The ranks of the group, for gloo's collectives on connections that are abandoned with the group. Collective at its
        first use. torch knows it by no name."""
        store = self.rank_group.open_store("collectives")
        return nameless_group(store, self.rank_group.rank, self.rank_group.world_size, _connect(self.rank_group, store))

    def close(self) -> None:
        """Let go of all connections. gloo waits until its collectives have ended, at their bound if a rank is lost: so that is
        left to a thread then."""
        held = [self._backend, self.__dict__.pop("group", None)]
        self._backend = None
        if self.rank_group.broken is not None and held[1] is not None:
            threading.Thread(target=held.clear, name=f"weft-closes-{self.rank_group.rank}", daemon=True).start()
        else:
            held.clear()


def _connect(rank_group: RankGroup, store: Any) -> Any:
    """Connections of gloo's among a group's ranks. Collective."""
    return bounded(
        rank_group,
        lambda: f"rank {rank_group.rank}: expected connections of all ranks; not all have come",
        lambda: connections(store, rank_group.rank, rank_group.world_size, rank_group.timeout_s + _LATER_S),
    )
