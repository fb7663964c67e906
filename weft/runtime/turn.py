"""Programs are enqueued one at a time on a GPU, and those whose kernels wait on SMs run one after the other.

Such a kernel may fill the SMs with blocks that wait for a peer. Two of them at once, on two streams, could deadlock across
ranks:

    rank 0    A fills most SMs and waits for rank 1's A | B has the rest: no SM is left for what rank 0 sends for A or B
    rank 1    B fills most SMs and waits for rank 0's B | A has the rest: the same

So the second program begins after the first one has ended, for all streams, threads and groups. A thread takes the
turn and enqueues its program in one step, under a lock, so the order of turns is the order on the GPU. On one stream this costs
nothing. Captured calls are ordered likewise within each capture. The caller orders the replays of graphs.

The lock is taken for every program that is enqueued to run, and for captured ones that wait on SMs. CUDA may wait for all
streams where it loads a kernel, and a call that another thread has half enqueued would never get its
other half. So a thread that loads kernels has the GPU to itself (`alone`).

The lock orders the threads of one rank, and cannot order them as another rank orders its own. If rank 0 enqueues A before B and
rank 1 enqueues B before A, then rank 0's B waits for its A, which waits for rank 1's A, which waits for its B, which waits for
rank 0's B, until the bound. NCCL has the same rule for two communicators: every rank enqueues the programs of the groups that
share its GPU in the same order. An error at the bound names the programs of other groups that are in flight (`others`).

A thread holds the lock only while it enqueues or loads. It has waited for room among the calls in flight before
(`Watchdog.await_room`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakSet

from weft.comm.rank_group import RankGroup
from weft.compat.streams import Driver
from weft.core.errors import WaitTimeout
from weft.runtime.tickets import Tickets
from weft.runtime.watchdog import FIRST_S

T = TypeVar("T")
_LOOKS_S = 0.02
"""A thread that waits for its turn checks its peers every 20 ms."""
_CAPTURES = 64
"""The last call of this many captures is remembered, which is more than the threads that capture concurrently."""


class Branches:
    """Branches orders captured calls. Within one capture they run in the order of the calls, on all of its streams.

    Bad interleaving: two calls on branches that a graph joins later use a program's memory and words at once, or wait for each
    other on SMs. Outside of captures the events of calls prevent that, but a capture cannot wait for them.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._last: OrderedDict[int, tuple[int, Any]] = OrderedDict()
        """The stream of the last call of each capture, and the event after it. Threads may capture concurrently."""

    def enqueue(self, stream: int, call: Callable[[], T]) -> T:
        """Enqueue a call after the last one of the same capture, and return its result."""
        capture = self._driver.capture(stream)
        last, event = self._last.pop(capture, (None, None))
        if last not in (None, stream):
            self._driver.wait(stream, event)
        found = call()
        event = event or self._driver.event()
        self._driver.record(event, stream)
        self._last[capture] = stream, event
        if len(self._last) > _CAPTURES:
            self._driver.forget(self._last.popitem(last=False)[1][1])
        return found

    def close(self) -> None:
        while self._last:
            self._driver.forget(self._last.popitem()[1][1])


class TakenTurn(AbstractContextManager[None]):
    """A TakenTurn is the context of Turn.taken. It is a class because each call enters one, and a generator takes longer."""

    __slots__ = ("_rank_group", "_stream", "_turn", "_waits_on_sms")

    def __init__(self, turn: Turn, stream: int, rank_group: RankGroup, waits_on_sms: bool) -> None:
        self._turn, self._stream, self._rank_group, self._waits_on_sms = turn, stream, rank_group, waits_on_sms

    def __enter__(self) -> None:
        self._turn.acquire(self._rank_group)
        if self._waits_on_sms:
            try:
                self._turn.come_after_the_last(self._stream)
            except BaseException:
                self._turn.give_back()
                raise

    def __exit__(self, *_: object) -> None:
        self._turn.give_back()


class Turn:
    """A Turn orders the threads that enqueue programs on one GPU. It knows the calls of all groups that use the GPU."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads = False
        """True while the thread that holds the lock loads kernels."""
        self._holder: int | None = None
        """The thread that holds the lock."""
        self._stream: int | None = None
        self._groups: WeakSet[Tickets] = WeakSet()
        self._listing = threading.Lock()
        """A lock that is held while groups are added, removed and listed."""

    @cached_property
    def _driver(self) -> Driver:
        return Driver()

    @cached_property
    def _event(self) -> Any:
        return self._driver.event()

    @cached_property
    def _branches(self) -> Branches:
        return Branches(self._driver)

    def taken(self, stream: int, rank_group: RankGroup, *, waits_on_sms: bool) -> TakenTurn:
        """Return a context in which the caller enqueues a program on `stream`.

        A program that waits on SMs comes after the last one that did. Entering it raises PeerLost, or WaitTimeout if another
        thread has not enqueued its program within the bound.
        """
        return TakenTurn(self, stream, rank_group, waits_on_sms)

    def captured(self, stream: int, rank_group: RankGroup, call: Callable[[], None]) -> None:
        """Enqueue a program that waits on SMs on a captured stream, after the last one of the same capture.

        Raises as `taken` does.
        """
        self.acquire(rank_group)
        try:
            self._branches.enqueue(stream, call)
        finally:
            self.give_back()

    @contextmanager
    def alone(self, rank_group: RankGroup) -> Iterator[None]:
        """Return a context in which no call is in flight on the GPU, and no other thread enqueues one.

        Raises PeerLost, or WaitTimeout at the bound of first calls. Contexts of one thread nest.
        """
        if self._holder == threading.get_ident():
            yield
            return
        deadline = time.monotonic() + max(rank_group.timeout_s, FIRST_S)
        # The lock is not held here, because calls in flight may need calls that other threads still must enqueue, also on a
        # peer.
        while True:
            rank_group.wait_until(
                self._idle,
                lambda: f"rank {rank_group.rank}, before kernels are loaded: {', '.join(self._in_flight())} has not ended",
                max(0.0, deadline - time.monotonic()),
            )
            self.acquire(rank_group)
            if self._idle():
                break
            self.give_back()
        self._loads = True
        try:
            yield
        finally:
            self._loads = False
            self.give_back()

    def _idle(self) -> bool:
        with self._listing:
            groups = list(self._groups)
        return all(tickets.has_ended(tickets.last_enqueued) for tickets in groups)

    def acquire(self, rank_group: RankGroup) -> None:
        """Take the lock for this thread, which `give_back` releases. Raises as `taken` says."""
        if not self._lock.acquire(blocking=False):
            self._await_lock(rank_group)
        self._holder = threading.get_ident()

    def _await_lock(self, rank_group: RankGroup) -> None:
        began = time.monotonic()
        while not self._lock.acquire(timeout=_LOOKS_S):
            rank_group.check_peers()
            bound_s = max(rank_group.timeout_s, FIRST_S if self._loads else 0.0)
            if time.monotonic() > began + bound_s:
                raise rank_group.fail(
                    WaitTimeout(
                        f"rank {rank_group.rank}: another thread has been enqueueing a program on this GPU for {bound_s:g} s"
                    )
                )

    def give_back(self) -> None:
        """End the turn of this thread."""
        self._holder = None
        self._lock.release()

    def come_after_the_last(self, stream: int) -> None:
        """Order a stream after the last program that waited on SMs. Call it in this thread's turn."""
        if self._stream not in (None, stream):
            assert self._stream is not None
            self._driver.after(stream, self._stream, self._event)
        self._stream = stream

    def _in_flight(self, but: Tickets | None = None) -> list[str]:
        """Return the name of the oldest call of each group that has not ended. but: a group to skip."""
        with self._listing:
            groups = [tickets for tickets in self._groups if tickets is not but]
            oldest = [next(iter(tickets.list_unfinished()), None) for tickets in groups]
        return [call.what for call in oldest if call is not None]

    def add(self, tickets: Tickets) -> None:
        """Add a group that uses the GPU."""
        with self._listing:
            self._groups.add(tickets)

    def remove(self, tickets: Tickets) -> None:
        """Remove a group whose calls have ended."""
        with self._listing:
            self._groups.discard(tickets)

    def others(self, mine: Tickets, what: str) -> str:
        """Return a text if calls of other groups are in flight with one that has not ended, or "" if there are none.

        what: the name of the call that has not ended.
        """
        names = ", ".join(self._in_flight(mine))
        return names and (
            f"{what} has not ended, and on the same GPU {names} is in flight: every rank has to call the programs of "
            "groups that share its GPU in the same order"
        )
