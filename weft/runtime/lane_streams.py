"""The streams of one program's lanes: forked from the caller's stream when a call begins, joined to it when the call ends.

    caller's stream (compute)  fork ---------------------------- join
    a lane's stream                 \\-> launches of the lane ---/
    stream for signals                     \\-> signals --------/      forked from where the compute lane raises them

What the compute lane signals while it has more to do goes to a stream of its own, aside: a write into the memory of a peer
takes 10 us or more where the links are full, and the next matmul need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from weft.core.schedule import Lane
from weft.runtime.cuda_resources import CudaResources
from weft.runtime.launches import FlagOperations


class LaneStreams:
    """The streams of a program's lanes. flags_by_memory_operations: the lanes whose flag operations must need no SM, since
    blocks that wait may hold all of them."""

    def __init__(self, resources: CudaResources, lanes: Iterable[Lane], flags_by_memory_operations: frozenset[str]) -> None:
        self._resources, self._driver = resources, resources.driver
        self._without_kernels = flags_by_memory_operations
        event = self._driver.event
        self._events = {lane.name: (event(), event()) for lane in lanes if lane.kind != "compute"}
        """By lane, the events of its fork and of its join."""
        self._aside_events = event(), event()
        self._forked: list[str] = []
        self._has_asides = False

    def __len__(self) -> int:
        """The number of lanes that run concurrently with the caller's stream."""
        return len(self._events)

    def fork(self, caller: int) -> None:
        """What is enqueued on the lanes' streams from here on comes after what the caller's stream has."""
        self._has_asides = False
        self._forked = []
        for name, (fork, _) in self._events.items():
            self._forked.append(name)
            self._driver.after(self._resources.stream(name).cuda_stream, caller, fork)

    def join(self, caller: int) -> None:
        """The caller's stream goes on after what has been forked.

        Called also where something was raised after the fork. What a lane has yet to write is the caller's memory, which the
        allocator gives to others at once, in the order of the caller's stream; and a capture whose streams are not joined
        cannot end. A stream that was not forked is not joined: in a capture it would be foreign.
        """
        for name in self._forked:
            self._driver.after(caller, self._resources.stream(name).cuda_stream, self._events[name][1])
        if self._has_asides:
            self._driver.after(caller, self._resources.aside.cuda_stream, self._aside_events[1])

    def prepare(self, operations: FlagOperations) -> Callable[[int], None]:
        """A function that enqueues flag operations: one kernel, or memory operations of the stream."""
        by_kernel = not operations.aside and operations.where.lane not in self._without_kernels
        return self._resources.words(operations.words, by_kernel=by_kernel)

    def aside(self, stream: int) -> int:
        """The stream for signals that later work on `stream` does not wait for, after what `stream` has so far."""
        side = self._resources.aside.cuda_stream
        self._driver.after(side, stream, self._aside_events[0])
        self._has_asides = True
        return side

    def close(self) -> None:
        """Destroy the events."""
        for event in chain(self._aside_events, *self._events.values()):
            self._driver.forget(event)
