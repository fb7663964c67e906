"""Programs whose kernels wait on SMs take turns on a GPU, in the order in which they are enqueued.

Such a kernel may fill the SMs with blocks that wait for a peer. Two of them at once, on two streams, could hold each other up
across ranks for good:

    rank 0    A fills most SMs and waits for rank 1's A | B has the rest: what rank 0 is to send for A or B finds no SM
    rank 1    B fills most SMs and waits for rank 0's B | A has the rest: the same

So the second begins where the first has ended, whatever streams, threads and groups they are called from. A thread takes the
turn and enqueues its program in one step, under a lock, so the order of turns is the order on the GPU. On one stream this costs
nothing. What a caller's own CUDA graphs replay is ordered within each graph alone.

The lock orders the threads of one rank, and cannot order them as another rank orders its own. If rank 0 enqueues A before B and
rank 1 enqueues B before A, then rank 0's B waits for its A, which waits for rank 1's A, which waits for its B, which waits for
rank 0's B, until the bound. NCCL has the same rule for two communicators: every rank enqueues the programs of the groups that
share its GPU in the same order. An error at the bound names the programs of other groups that are in flight (`others`).

A thread holds the lock only while it enqueues. It has waited for room among the calls in flight before
(`Watchdog.await_room`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from weft.comm.rank_group import RankGroup
from weft.compat.streams import Driver
from weft.core.errors import WaitTimeout
from weft.runtime.tickets import Tickets

_LOOKS_S = 0.02
"""How often a thread that waits for another one to enqueue its program looks at its peers."""


class Turn:
    """Whose turn it is on one GPU, and the calls of all groups that use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stream: int | None = None
        self._driver: Driver | None = None
        self._event: Any = None
        self._groups: WeakSet[Tickets] = WeakSet()
        self._listing = threading.Lock()
        """Held while groups are added, removed and listed."""

    @contextmanager
    def taken(self, stream: int, rank_group: RankGroup) -> Iterator[None]:
        """Within, the caller enqueues a program on `stream`, which comes after the program whose turn it was. Raises PeerLost,
        or WaitTimeout if another thread has not enqueued its program within the bound."""
        self._acquire(rank_group)
        try:
            self._come_after_the_last(stream)
            yield
        finally:
            self._lock.release()

    def _acquire(self, rank_group: RankGroup) -> None:
        if self._lock.acquire(blocking=False):
            return
        deadline = time.monotonic() + rank_group.timeout_s
        while not self._lock.acquire(timeout=_LOOKS_S):
            rank_group.check_peers()
            if time.monotonic() > deadline:
                raise rank_group.fail(
                    WaitTimeout(
                        f"rank {rank_group.rank}: another thread has been enqueueing a program on this GPU for "
                        f"{rank_group.timeout_s:g} s"
                    )
                )

    def _come_after_the_last(self, stream: int) -> None:
        if self._stream not in (None, stream):
            if self._driver is None:
                self._driver = Driver()
                self._event = self._driver.event()
            assert self._stream is not None
            self._driver.after(stream, self._stream, self._event)
        self._stream = stream

    def add(self, tickets: Tickets) -> None:
        """A group begins to use the GPU."""
        with self._listing:
            self._groups.add(tickets)

    def remove(self, tickets: Tickets) -> None:
        """A group's calls have ended."""
        with self._listing:
            self._groups.discard(tickets)

    def others(self, mine: Tickets, what: str) -> str:
        """That calls of other groups are in flight beside one that has not ended, and what to look for; nothing if none is.
        what: names that one."""
        with self._listing:
            groups = [tickets for tickets in self._groups if tickets is not mine]
            oldest = [next(iter(tickets.unfinished()), None) for tickets in groups]
        names = ", ".join(call.what for call in oldest if call is not None)
        return names and (
            f"{what} has not ended, and on the same GPU {names} is in flight: every rank has to call the programs of "
            "groups that share its GPU in the same order"
        )
