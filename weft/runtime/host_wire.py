"""HostWire sends messages between CPU ranks through gloo, on connections of its own.

Messages connect nodes, and they move data that no schedule describes: gradients of lookups, and rows whose numbers only the
hosts know. They do not use the caller's process group. If an error ends a call between two exchanges, ranks may have begun
different exchanges, and on a shared process group the next call would receive data of the failed one. These connections are
closed with the group, and the next group makes new ones.

A message has one sender and one receiver, so an error can name the late rank. A collective could not.
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
from weft.runtime.peer_waits import bounded, name_lost_rank

Messages = Sequence[tuple[torch.Tensor, int]]
"""Contiguous tensors, each with the rank that sends or receives it."""
AllToAll = Callable[[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]], Callable[[], None]]
"""Begins an exchange (taken, given, elements from each rank, elements to each rank) of flat tensors. Returns a function that
waits."""
_LATER_S = 5.0
"""gloo's bound is this much later than weft's, because gloo's error does not name a rank."""


class HostWire:
    """A HostWire sends messages between the ranks of a group. To construct it is a collective operation."""

    def __init__(self, rank_group: RankGroup) -> None:
        self.rank_group = rank_group
        self._backend: Any = _connect(rank_group, rank_group.open_store("wire"))

    def begin(self, sends: Messages, receives: Messages, what: object) -> Callable[[], None]:
        """Begin to send and receive messages. Return a function that waits for them, and raises PeerLost or WaitTimeout.

        Empty messages are skipped on both sides. what: the name of the exchange in errors.
        """
        waiting = [""]
        under_way = list[tuple[str, Any]]()
        with name_lost_rank(self.rank_group, lambda: f"{what}: connections are broken"):
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
        """Send and receive messages, and wait for them. Raises PeerLost or WaitTimeout."""
        self.begin(sends, receives, what)()

    def share(self, mine: torch.Tensor, theirs: Sequence[torch.Tensor], what: object) -> None:
        """Gather the tensors of all ranks. mine: this rank's tensor. theirs: the tensors that are filled, by rank."""
        others = [rank for rank in range(self.rank_group.world_size) if rank != self.rank_group.rank]
        mine = mine.contiguous()
        theirs[self.rank_group.rank].copy_(mine)
        self.exchange([(mine, rank) for rank in others], [(theirs[rank], rank) for rank in others], what)

    def all_to_all(self, given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor], what: object) -> Callable[[], None]:
        """Send given[rank] to each rank, and receive taken[rank] from it. Return a function that waits, like `begin`.

        All tensors are contiguous.
        """
        rank = self.rank_group.rank
        others = [other for other in range(self.rank_group.world_size) if other != rank]
        taken[rank].copy_(given[rank])
        return self.begin([(given[other], other) for other in others], [(taken[other], other) for other in others], what)

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """A process group for gloo's collectives, on connections of its own. Its first use is a collective operation.

        It has no name in torch, and is closed with this object.
        """
        store = self.rank_group.open_store("collectives")
        return nameless_group(store, self.rank_group.rank, self.rank_group.world_size, _connect(self.rank_group, store))

    def close(self) -> None:
        """Close all connections.

        gloo waits until its collectives have ended, which after a failure is at their bound. A thread waits for that.
        """
        held = [self._backend, self.__dict__.pop("group", None)]
        self._backend = None
        if self.rank_group.broken is not None and held[1] is not None:
            threading.Thread(target=held.clear, name=f"weft-closes-{self.rank_group.rank}", daemon=True).start()
        else:
            held.clear()


def _connect(rank_group: RankGroup, store: Any) -> Any:
    """Return gloo connections between the ranks of a group. Collective."""
    return bounded(
        rank_group,
        lambda: f"rank {rank_group.rank}: expected connections of all ranks; not all have come",
        lambda: connections(store, rank_group.rank, rank_group.world_size, rank_group.timeout_s + _LATER_S),
    )
