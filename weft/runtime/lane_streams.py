"""A program's lanes have streams that fork from the caller's stream when a call begins and join it when the call ends.

    caller's stream (compute)  fork ---------------------------- join
    a lane's stream                 \\-> launches of the lane ---/
    side stream                            \\-> signals --------/      forked where the compute lane raises them

The compute lane sends signals to the side stream while it has more work. A write into a peer's memory takes 10 us or more when
the links are full, and the next matmul need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
        self._fork_event, self._join_events = event(), {lane.name: event() for lane in lanes if lane.kind != "compute"}
        self._aside_events = event(), event()
        self._lanes: list[tuple[int, Any]] | None = None
        """The stream of each lane and the event of its join. They are made by the first fork."""
        self._forked: Sequence[tuple[int, Any]] = ()
        self._has_asides = False

    def __len__(self) -> int:
        """The number of lanes that run concurrently with the caller's stream."""
        return len(self._join_events)

    def fork(self, caller: int) -> None:
        """Order all later work of the lanes' streams after the work that the caller's stream has now."""
        if self._lanes is None:
            self._lanes = [(self._resources.stream(name).cuda_stream, join) for name, join in self._join_events.items()]
            self._numbers = [stream for stream, _ in self._lanes]
        self._has_asides, self._forked = False, self._lanes
        if self._numbers:
            self._driver.all_after(self._numbers, caller, self._fork_event)

    def join(self, caller: int) -> None:
        """Make the caller's stream wait for all streams that `fork` has forked.

        It must also be called after an exception. Lanes may still write the caller's memory, which the allocator reuses in the
        order of the caller's stream. A capture cannot end before its streams are joined. Only forked streams are joined,
        because during a capture any other stream is outside the graph.
        """
        for stream, event in self._forked:
            self._driver.all_after((caller,), stream, event)
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
        for event in (self._fork_event, *self._aside_events, *self._join_events.values()):
            self._driver.forget(event)
