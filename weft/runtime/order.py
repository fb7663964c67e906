"""The Order of a GPU knows which calls are in flight, on which stream, and what must come after what.

There is one for each GPU of a process. All process groups that use the GPU share it.

    caller's stream: begun 7 ... done 7      begun 8 ... done 8

**In flight.** Each call has a pair of CUDA events, which say whether the GPU has begun and ended it. Recording an event costs
the GPU nothing. Writing a word into host memory instead took 3.2 us of every call. At most MOST_IN_FLIGHT calls of a group are
in flight.

**After what.** Calls that use the same thing (`Exclusive`) run one after the other, on whatever streams they are:

    a program                      its memory and its flags
    the SMs on which kernels wait  see below
    a cuBLAS workspace             all graphs of a process group share one (weft.runtime.replay.Captures)

A kernel that waits on SMs may fill them with blocks that wait for a peer. Two such kernels at once, on two streams, could
deadlock across ranks:

    rank 0    A fills most SMs and waits for rank 1's A | B has the rest: no SM is left for what rank 0 sends for A or B
    rank 1    B fills most SMs and waits for rank 0's B | A has the rest: the same

So the second program begins after the first one has ended. On one stream this costs nothing. Captured calls are ordered
likewise within each capture, because a capture cannot wait for the events of calls outside of it. The caller orders the replays
of graphs.

**One at a time.** A thread enqueues its program in one step, under `lock`, so the order of `begin` is the order on the GPU.
CUDA may wait for all streams where it loads a kernel, and a call that another thread has half enqueued would never get its
other half. So a thread that loads kernels has the GPU to itself (`alone`). There are two exceptions. A call of torch that the
watchdog watches (`Watchdog.watch`) is not enqueued under the lock. And a thread that holds the lock may find, while it enqueues
a call, that it needs a kernel.

The lock orders the threads of one rank, and cannot order them as another rank orders its own. If rank 0 enqueues A before B and
rank 1 enqueues B before A, then rank 0's B waits for its A, which waits for rank 1's A, which waits for its B, which waits for
rank 0's B, until the bound. NCCL has the same rule for two communicators: every rank enqueues the programs of the groups that
share its GPU in the same order. An error at the bound names the programs of other groups that are in flight (`others`).
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weft.comm.rank_group import RankGroup
from weft.compat.device import living_storage, release_storage, weak_storage
from weft.compat.streams import Driver, checked
from weft.core.errors import WaitTimeout

FIRST_S = 600.0
"""The least bound in s of what ranks do before a first call. One rank may compile a kernel that the others find compiled."""
MOST_IN_FLIGHT = 63
"""The most calls of a group in flight. A stream takes about 1000 launches, and one call makes about ten. A further launch waits
in the driver, where no error can reach the caller. Launches on other streams, also the watchdog's, may wait behind it."""
_LOOKS_S = 0.02
"""A thread that waits for the lock checks its peers every 20 ms."""
_CAPTURES = 64
"""The last call of this many captures is remembered, which is more than the threads that capture concurrently."""

Memory = tuple[int, int, int]
"""Memory that a call has returned: a weak reference to its storage, its address, and its bytes. When the caller drops the
tensor, the allocator may give the memory to others, and then it must not be written."""


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return the memory of a contiguous tensor."""
    return weak_storage(tensor), tensor.data_ptr(), tensor.nbytes


def memory_of_outputs(outputs: Mapping[str, Sequence[torch.Tensor]]) -> list[Memory]:
    """Return the memory of the floating-point results among the outputs of a program, which are contiguous."""
    return [memory_of(tensor) for tensors in outputs.values() for tensor in tensors if tensor.is_floating_point()]


def memory_of_results(returned: Any) -> Iterator[Memory]:
    """Yield the memory of floating-point results in nested lists and tuples. Sparse and non-contiguous ones are skipped."""
    if isinstance(returned, torch.Tensor):
        if returned.is_floating_point() and returned.layout == torch.strided and returned.is_contiguous():
            yield memory_of(returned)
    elif isinstance(returned, list | tuple):
        for item in returned:
            yield from memory_of_results(item)


class PendingCall:
    """A PendingCall is a call that is not known to have ended.

    what: its name in messages.
    describe: returns a text that says what the call waits for.
    stream: the caller's stream.
    results: the memory that the call has returned, and that a failure invalidates.
    rehearses: whether it waits for no flag, but may wait for compilers.
    begun, done: the events at its begin and at its end. None if it stands for the replays of calls that a graph has captured.
    enqueued: whether it has been enqueued completely.
    ended: whether the GPU is known to have ended it. Its events may then belong to another call.
    deadline: the latest end of the call by time.monotonic, in seconds. It is set once the GPU has begun the call.
    """

    what = ""
    describe: Callable[[], str]
    stream = 0
    results: Sequence[Memory] = ()
    rehearses = enqueued = ended = False
    deadline = math.inf
    begun: Any
    done: Any = None
    # There is no constructor, because it would be one more frame in each call.

    @classmethod
    def of(cls, what: str, describe: Callable[[], str], stream: int, *, rehearses: bool = False) -> PendingCall:
        """Return a call that has not begun."""
        made = cls()
        made.what, made.describe, made.stream, made.rehearses = what, describe, stream, rehearses
        return made

    def invalidate(self, fill: Callable[[int, int], None]) -> list[Any]:
        """Call fill(address, nbytes) for each result that somebody still holds.

        Returns references that keep this memory alive until it has been filled.
        """
        held = []
        for reference, address, nbytes in self.results:
            alive = living_storage(reference)
            if alive is not None and nbytes:
                fill(address, nbytes)
                held.append(alive)
        return held

    def forget_results(self) -> None:
        for reference, _, _ in self.results:
            release_storage(reference)
        self.results = ()


class Exclusive:
    """An Exclusive stands for something that calls use one after the other.

    last: the last call that uses it.
    """

    __slots__ = ("_in_captures", "last")

    def __init__(self) -> None:
        self.last: PendingCall | None = None
        self._in_captures: OrderedDict[int, tuple[int, Any]] = OrderedDict()
        """The stream of the last call of each capture, and the event after it. Threads may capture concurrently."""

    def come_after(self, driver: Driver, capture: int, stream: int) -> None:
        """Order a captured stream after the last call of the same capture.

        Bad interleaving without this: two calls on branches that a graph joins later use a program's memory and words at once,
        or wait for each other on SMs.
        """
        last, event = self._in_captures.get(capture, (stream, None))
        if last != stream:
            driver.wait(stream, event)

    def captured(self, driver: Driver, capture: int, stream: int) -> None:
        """Record that a captured call has been enqueued on a stream."""
        _, event = self._in_captures.pop(capture, (0, None))
        event = event or driver.event()
        driver.record(event, stream)
        self._in_captures[capture] = stream, event
        if len(self._in_captures) > _CAPTURES:
            driver.forget(self._in_captures.popitem(last=False)[1][1])

    def close(self, driver: Driver) -> None:
        while self._in_captures:
            driver.forget(self._in_captures.popitem()[1][1])


class Order:
    """An Order orders the calls of all process groups on one GPU.

    lock: a thread holds it while it enqueues a program, or loads kernels. It has waited for room before (`await_room`).
    sms: the SMs on which kernels wait.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver, self.lock, self.sms = driver, threading.Lock(), Exclusive()
        self._loads = False
        """True while the thread that holds the lock loads kernels."""
        self._holder: int | None = None
        """The thread that holds the lock by `held` or `alone`."""
        self._calls: dict[RankGroup, deque[PendingCall]] = {}
        self._listing, self._dropping = threading.Lock(), threading.Lock()
        """Locks that are held while groups are added, removed and listed, and while ended calls are dropped."""
        self._events: list[tuple[Any, Any]] = []
        """Pairs of events that no call uses."""

    # Calls in flight.

    def add(self, group: RankGroup) -> deque[PendingCall]:
        """Add a group that uses the GPU. Return its calls that are not known to have ended, the oldest first."""
        with self._listing:
            return self._calls.setdefault(group, deque())

    def remove(self, group: RankGroup) -> None:
        """Remove a group whose calls have ended."""
        with self._listing:
            calls = self._calls.pop(group, deque())
        while calls:
            self._retire(calls.popleft())

    def await_room(self, group: RankGroup, describe: Callable[[], str]) -> None:
        """Wait while too many calls of the group are in flight. Bounded."""
        calls = self._calls[group]
        if len(calls) >= MOST_IN_FLIGHT and not self.make_room(calls):
            # The watchdog bounds each call. All of them together, with other work on the stream, may take longer.
            group.wait_until(lambda: self.make_room(calls), describe, max(group.timeout_s, FIRST_S))

    def make_room(self, calls: deque[PendingCall]) -> bool:
        """Drop the calls that have ended, and return whether another one may be enqueued."""
        self.drop_ended(calls)
        return len(calls) < MOST_IN_FLIGHT

    def begin(self, call: PendingCall, calls: deque[PendingCall], uses: Sequence[Exclusive] = ()) -> PendingCall:
        """Begin a call of a group, after the last calls that use the same things. Hold the lock.

        The call is watched from when its stream reaches this point, also while it is still being enqueued.
        """
        stream, driver = call.stream, self.driver
        call.begun, call.done = self._events.pop() if self._events else (driver.event(), driver.event())
        for thing in uses:
            last = thing.last
            if last is not None and last.stream != stream and not last.ended:
                driver.wait(stream, last.done)
            thing.last = call
        failure = driver.record_event(call.begun, stream)
        if failure[0]:
            checked(failure)
        calls.append(call)
        return call

    def end(self, call: PendingCall) -> None:
        """Record that a call has been enqueued completely. The GPU has ended it when its stream reaches this point."""
        failure = self.driver.record_event(call.done, call.stream)
        if failure[0]:
            checked(failure)
        call.enqueued = True

    def is_running(self, call: PendingCall) -> bool:
        """Return whether the GPU has begun a call and has not ended it."""
        return not call.ended and self.driver.reached(call.begun) and not self.has_ended(call)

    def has_ended(self, call: PendingCall) -> bool:
        """Return whether the GPU has ended a call. A call that is still being enqueued has not ended."""
        return call.ended or (call.enqueued and self.driver.reached(call.done))

    def make_stream_wait(self, stream: int, call: PendingCall) -> None:
        """Make a stream wait until a call has ended. Nothing is enqueued if it is known to have ended."""
        if not call.ended:
            self.driver.wait(stream, call.done)

    def drop_ended(self, calls: deque[PendingCall]) -> bool:
        """Remove the calls that have ended. Return whether there was one. One thread does it at a time."""
        if not self._dropping.acquire(blocking=False):
            return False
        try:
            ended = 0
            while ended < len(calls) and (more := self._count_ended(calls, ended)):
                ended += more
            for _ in range(ended):
                self._retire(calls.popleft())
        finally:
            self._dropping.release()
        return ended > 0

    def _count_ended(self, calls: deque[PendingCall], first: int) -> int:
        """Return how many calls, from number `first` on, have ended on the stream of the first of them.

        A stream ends its calls in order, so one query answers for all earlier calls of a stream.
        """
        stream, end = calls[first].stream, first
        while end < len(calls) and calls[end].stream == stream and calls[end].enqueued:
            end += 1
        low, high = first, end  # the calls before `low` have ended, those from `high` on have not
        while low < high:
            middle = (low + high) // 2
            if self.driver.reached(calls[middle].done):
                low = middle + 1
            else:
                high = middle
        return low - first

    def invalidate(self, call: PendingCall, stream: int, fill: Callable[[int, int], None]) -> list[Any]:
        """Let `stream` wait for the end of a call, and call fill(address, nbytes) for each result that somebody still holds.

        Returns references that keep this memory alive until it has been filled. It does nothing for a call that is still being
        enqueued, because the thread that enqueues it raises the error.
        """
        with self._dropping:
            if call.ended or not call.enqueued or not call.results:
                return []
            if call.done is not None:
                self.make_stream_wait(stream, call)
            return call.invalidate(fill)

    def add_results(self, call: PendingCall, results: Sequence[Memory]) -> None:
        """Add what a captured call returns to what its replays write. What nobody holds any more is dropped."""
        with self._dropping:
            held: list[Memory] = []
            for memory in call.results:
                if living_storage(memory[0]) is None:
                    release_storage(memory[0])
                else:
                    held.append(memory)
            call.results = [*held, *results]

    def forget_results(self, call: PendingCall) -> None:
        """Forget what calls have returned that are not replayed any more."""
        with self._dropping:
            call.forget_results()

    def _retire(self, call: PendingCall) -> None:
        """Give a call's events to later calls. The call is marked as ended before, for those who still refer to it."""
        call.ended = True
        self._events.append((call.begun, call.done))
        call.forget_results()

    def _list_pending(self, group: RankGroup) -> list[PendingCall]:
        """Return the calls of a group that are not known to have ended."""
        return [call for call in tuple(self._calls.get(group, ())) if not call.ended]

    def list_unfinished(self, group: RankGroup) -> list[PendingCall]:
        """Return the calls of a group that have not ended. If the device is lost, return all that are not known to have
        ended."""
        calls = self._list_pending(group)
        try:
            return [call for call in calls if not self.has_ended(call)]
        except RuntimeError:
            return calls

    def others(self, mine: RankGroup, what: str, *, asks_driver: bool = True) -> str:
        """Return a text if calls of other groups are in flight with one that has not ended, or "" if there are none.

        what: the name of the call that has not ended.
        asks_driver: whether the driver may be asked, which may not answer. Otherwise the calls count that the watchdogs have
            not seen end.
        """
        names = ", ".join(self._in_flight(mine, asks_driver=asks_driver))
        return names and (
            f"{what} has not ended, and on the same GPU {names} is in flight: every rank has to call the programs of "
            "groups that share its GPU in the same order"
        )

    def _in_flight(self, but: RankGroup | None = None, *, asks_driver: bool = True) -> list[str]:
        """Return the name of the oldest call of each group that has not ended. but: a group to skip."""
        with self._listing:
            groups = [group for group in self._calls if group is not but]
        list_of = self.list_unfinished if asks_driver else self._list_pending
        oldest = [next(iter(list_of(group)), None) for group in groups]
        return [call.what for call in oldest if call is not None]

    # One thread at a time.

    @contextmanager
    def held(self, group: RankGroup) -> Iterator[None]:
        """Return a context in which this thread holds the lock.

        Entering it raises PeerLost, or WaitTimeout if another thread has not enqueued its program within the bound.
        """
        self.acquire(group)
        try:
            yield
        finally:
            self.release()

    def acquire(self, group: RankGroup) -> None:
        """Take the lock for this thread, until `release`. Raises as `held` does."""
        if not self.lock.acquire(blocking=False):
            self._await_lock(group)
        self._holder = threading.get_ident()

    def release(self) -> None:
        """Give the lock back."""
        self._holder = None
        self.lock.release()

    def _await_lock(self, group: RankGroup) -> None:
        began = time.monotonic()
        while not self.lock.acquire(timeout=_LOOKS_S):
            group.check_peers()
            bound_s = max(group.timeout_s, FIRST_S if self._loads else 0.0)
            if time.monotonic() > began + bound_s:
                raise group.fail(
                    WaitTimeout(
                        f"rank {group.rank}: another thread has been enqueueing a program on this GPU for {bound_s:g} s"
                    )
                )

    @contextmanager
    def alone(self, group: RankGroup) -> Iterator[None]:
        """Return a context for loading kernels: no enqueued call is in flight, and no other thread enqueues a program.

        A thread that holds the lock already gets it at once, and calls may be in flight: a call that is being enqueued may find
        that it needs a kernel. Raises PeerLost, or WaitTimeout at the bound of first calls.
        """
        if self._holder == threading.get_ident():
            loads, self._loads = self._loads, True
            try:
                yield
            finally:
                self._loads = loads
            return
        deadline = time.monotonic() + max(group.timeout_s, FIRST_S)
        # The lock is not held here, because calls in flight may need calls that other threads still must enqueue, also on a
        # peer.
        while True:
            group.wait_until(
                self._is_idle,
                lambda: f"rank {group.rank}, before kernels are loaded: {', '.join(self._in_flight())} has not ended",
                max(0.0, deadline - time.monotonic()),
            )
            self.acquire(group)
            if self._is_idle():
                break
            self.release()
        self._loads = True
        try:
            yield
        finally:
            self._loads = False
            self.release()

    def _is_idle(self) -> bool:
        """Return whether every call that has been enqueued completely has ended."""
        with self._listing:
            calls = [call for some in self._calls.values() for call in tuple(some)]
        return all(not call.enqueued or self.has_ended(call) for call in calls)

    # Captures.

    def capture(self, stream: int, group: RankGroup, uses: Sequence[Exclusive], enqueue: Callable[[], None]) -> None:
        """Enqueue a call on a captured stream, after the last calls of the same capture that use the same things.

        Raises as `held` does.
        """
        with self.held(group):
            capture = self.driver.capture(stream)
            for thing in uses:
                thing.come_after(self.driver, capture, stream)
            enqueue()
            for thing in uses:
                thing.captured(self.driver, capture, stream)
