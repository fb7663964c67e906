"""This module makes streams for communication, and controls their priority and which of two streams starts first.

This is the second control of resource-aware overlap (arXiv 2606.09200). When blocks of two kernels wait for room on an SM, the
stream of higher priority gets it first, but running blocks are not stopped. So with priority alone, a collective starts as
blocks of the compute kernel end. With a cap on that kernel's residency (weft.overlap.controls.shape) it starts concurrently.

Priorities have CUDA's numbers: 0 is the usual priority, and lower numbers come first. This also holds on ROCm, untested.

All of weft's streams come from here, and have one user at a time. torch has 32 streams of each priority and hands them out in
turn, so two lanes may get the same stream. A lane that waits for a flag could then block the lane that would raise it:

    one stream, lanes of groups A and B      rank 0:  A waits for rank 1's A | B        neither A nor B ever ends: rank 1's A is
                                             rank 1:  B waits for rank 0's B | A        behind a B that waits for rank 0's B
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal

import torch

from weft.compat.streams import checked, driver_api

Priority = Literal["normal", "high"] | int
"""The value "normal" is 0, and "high" is the highest priority of the device."""

_LANES: ContextVar[Priority] = ContextVar("weft.overlap.controls.lane_priority", default=-1)


class StreamPool:
    """A StreamPool holds weft's streams on one device.

    The driver makes a stream when one is needed, and streams that were given back are used again. No stream is destroyed,
    because torch remembers each stream that memory was used on, and queries it later.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._free: dict[int, list[torch.cuda.Stream]] = {}
        self._taken: dict[int, int] = {}

    def take(self, priority: int) -> torch.cuda.Stream:
        """Return a stream that nobody uses. priority: CUDA's number."""
        free = self._free.setdefault(priority, [])
        stream = free.pop() if free else self._made(priority)
        self._taken[stream.cuda_stream] = priority
        return stream

    def give(self, stream: torch.cuda.Stream) -> None:
        priority = self._taken.pop(stream.cuda_stream, None)
        if priority is None:
            raise ValueError(f"stream is {stream}, which comm_stream has not made, or was given back; pass one that is taken")
        self._free[priority].append(stream)

    def _made(self, priority: int) -> torch.cuda.Stream:
        if torch.version.hip is not None:
            return torch.cuda.Stream(self._index, priority=priority)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]
        api = driver_api()
        with _context(api, self._index):
            stream = checked(api.cuStreamCreateWithPriority(int(api.CUstream_flags.CU_STREAM_NON_BLOCKING), priority))
        return torch.cuda.ExternalStream(int(stream), device=self._index)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]


@contextmanager
def _context(api: Any, index: int) -> Iterator[None]:
    """Make a device's primary context current in this thread, without disturbing a graph capture.

    The context is retained until the process ends, because its streams are, too.
    """
    mode = checked(api.cuThreadExchangeStreamCaptureMode(api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    checked(api.cuCtxPushCurrent(checked(api.cuDevicePrimaryCtxRetain(checked(api.cuDeviceGet(index))))))
    try:
        yield
    finally:
        checked(api.cuCtxPopCurrent())
        checked(api.cuThreadExchangeStreamCaptureMode(mode))


@cache
def _streams_of(index: int) -> StreamPool:
    return StreamPool(index)


def comm_stream(*, priority: Priority = "high", device: torch.device | int | None = None) -> torch.cuda.Stream:
    """Return a stream of this priority that has no other user. It lives as long as the process, unless you call `give_back`.

    device: by default the current one.
    Raises ValueError for a priority that the device lacks.
    """
    number = priority_number(priority)
    return _streams_of(_index(device)).take(number)


def give_back(stream: torch.cuda.Stream) -> None:
    """Let another user have a stream that comm_stream returned. Its enqueued work must no longer wait for anything.

    Raises ValueError for any other stream, and for one that was already given back.
    """
    _streams_of(_index(stream.device)).give(stream)


def _index(device: torch.device | int | None) -> int:
    index = device if device is None or isinstance(device, int) else device.index
    return torch.cuda.current_device() if index is None else index


def priority_number(priority: Priority) -> int:
    """Return CUDA's number for a priority. Raises ValueError for one that the device lacks."""
    if not torch.cuda.is_available():
        raise ValueError(f"priority is {priority!r}, but there is no GPU here whose streams could have one")
    lowest, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg, unused-ignore]
    number = {"normal": 0, "high": highest}.get(priority, priority)  # type: ignore[arg-type]
    if not isinstance(number, int) or not highest <= number <= lowest:
        raise ValueError(f'priority is {priority!r}; use "normal", "high", or one of {highest} (first) to {lowest} (last)')
    return number


@contextmanager
def lane_priority(priority: Priority) -> Iterator[None]:
    """Set the priority of the lanes of groups that run their first schedule within this context. The default is -1.

    It applies to lanes of copies and of communication kernels. The compute lane is the caller's stream. A group keeps its
    priority, also after the context, until `weft.close(group)`.

    Raises ValueError for a priority that is not above 0, because a lane that waits must not share a hardware queue with the
    caller.
    """
    if priority == "normal" or (isinstance(priority, int) and priority >= 0):
        raise ValueError(f'priority is {priority!r}; lanes need a priority above that of the stream of a call: "high", or -1')
    token = _LANES.set(priority)
    try:
        yield
    finally:
        _LANES.reset(token)


def current_lane_priority() -> int:
    """Return the priority that a group's lanes get now, as CUDA's number."""
    return priority_number(_LANES.get())


def launch_order(first: torch.cuda.Stream, then: torch.cuda.Stream) -> None:
    """Order two streams so that later work on `then` starts no earlier than later work on `first` could.

    `then` waits for the work that `first` has now. So enqueue the collective on `first`, then the compute kernel on `then`, and
    the collective's blocks are placed while there is room. Only the device waits. Graphs may capture this.
    """
    then.wait_event(first.record_event())
