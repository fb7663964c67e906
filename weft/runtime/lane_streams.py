"""A program's lanes have streams that fork from the caller's stream when a call begins and join it when the call ends.

    caller's stream (compute)  fork ---------------------------- join
    a lane's stream                 \\-> launches of the lane ---/
    side stream                            \\-> signals --------/      forked where the compute lane raises them

The compute lane sends signals to the side stream while it has more work. A write into a peer's memory takes 10 us or more when
the links are full, and the next matmul need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from weft.core.schedule import Lane
from weft.runtime.cuda_resources import CudaResources
from weft.runtime.launches import FlagOperations


class LaneStreams:
    """LaneStreams forks and joins the streams of a program's lanes.

    flags_by_memory_operations: the lanes whose flag operations must run without an SM, because waiting blocks may hold all SMs.
    """

    def __init__(self, resources: CudaResources, lanes: Iterable[Lane], flags_by_memory_operations: frozenset[str]) -> None:
        self._resources, self._driver = resources, resources.driver
        self._without_kernels = flags_by_memory_operations
        event = self._driver.event
        self._events = {lane.name: (event(), event()) for lane in lanes if lane.kind != "compute"}
        """The events of the fork and of the join, by lane."""
        self._aside_events = event(), event()
        self._forked: list[str] = []
        self._has_asides = False

    def __len__(self) -> int:
        """The number of lanes that run concurrently with the caller's stream."""
        return len(self._events)

    def fork(self, caller: int) -> None:
        """Order all later work of the lanes' streams after the work that the caller's stream has now."""
        self._has_asides = False
        self._forked = []
        for name, (fork, _) in self._events.items():
            self._forked.append(name)
            self._driver.after(self._resources.stream(name).cuda_stream, caller, fork)

    def join(self, caller: int) -> None:
        """Make the caller's stream wait for all streams that `fork` has forked.

        It must also be called after an exception. Lanes may still write the caller's memory, which the allocator reuses in the
        order of the caller's stream. A capture cannot end before its streams are joined. Only forked streams are joined,
        because during a capture any other stream is outside the graph.
        """
        for name in self._forked:
            self._driver.after(caller, self._resources.stream(name).cuda_stream, self._events[name][1])
        if self._has_asides:
            self._driver.after(caller, self._resources.aside.cuda_stream, self._aside_events[1])

    def prepare(self, operations: FlagOperations) -> Callable[[int], None]:
        """Return a function that enqueues flag operations, as one kernel or as memory operations of the stream."""
        by_kernel = not operations.aside and operations.where.lane not in self._without_kernels
        return self._resources.words(operations.words, by_kernel=by_kernel)

    def aside(self, stream: int) -> int:
        """Return the side stream for signals, ordered after the work that `stream` has now."""
        side = self._resources.aside.cuda_stream
        self._driver.after(side, stream, self._aside_events[0])
        self._has_asides = True
        return side

    def close(self) -> None:
        """Destroy the events."""
        for event in chain(self._aside_events, *self._events.values()):
            self._driver.forget(event)
