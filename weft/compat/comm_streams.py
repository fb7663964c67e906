"""Streams for communication: their priority, and which of two streams starts first.

Resource-aware overlap's second control (arXiv 2606.09200). Where blocks of two kernels wait for room on an SM, those of the
stream of higher priority get it first; blocks that run are not stopped. So priority alone lets a collective start only as
blocks of the compute kernel end, and a cap on that kernel's residency (weft.overlap.controls.shape) lets it start concurrently.

Numbers are CUDA's: 0 is every stream's usual priority, and lower ones come first. The same holds on ROCm, untested.

All streams of weft's come from here, and have one user at a time. torch has 32 of each priority and hands them out in turn, so
that two lanes may get one; then a lane that waits for a flag holds up the one that would raise it:

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
"""normal: 0. high: the highest that the device has."""

_LANES: ContextVar[Priority] = ContextVar("weft.overlap.controls.lane_priority", default=-1)


class StreamPool:
    """The streams of weft's on one device. Made by the driver when they are needed, and never destroyed: torch remembers each
    stream that memory was used on, and asks it later. What is given back is taken again."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._free: dict[int, list[torch.cuda.Stream]] = {}
        self._taken: dict[int, int] = {}

    def take(self, priority: int) -> torch.cuda.Stream:
        """priority: CUDA's number."""
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
    """A device's primary context is this thread's, and a graph that is captured now is not disturbed. The context is retained
    once more, for as long as the process: so are its streams."""
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
    """A stream of this priority, which nobody else has. device: default, the current one. Raises ValueError for a priority that
    the device lacks.

    Keep it, or give it back (`give_back`): it lives as long as the process.
    """
    number = priority_number(priority)
    return _streams_of(_index(device)).take(number)


def give_back(stream: torch.cuda.Stream) -> None:
    """Let another user have a stream of comm_stream's. What was enqueued on it must not wait for anything any more.

    Raises ValueError for another stream, and for one that was given back.
    """
    _streams_of(_index(stream.device)).give(stream)


def _index(device: torch.device | int | None) -> int:
    index = device if device is None or isinstance(device, int) else device.index
    return torch.cuda.current_device() if index is None else index


def priority_number(priority: Priority) -> int:
    """CUDA's number for a priority. Raises ValueError for one that the device lacks."""
    if not torch.cuda.is_available():
        raise ValueError(f"priority is {priority!r}, but there is no GPU here whose streams could have one")
    lowest, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg, unused-ignore]
    number = {"normal": 0, "high": highest}.get(priority, priority)  # type: ignore[arg-type]
    if not isinstance(number, int) or not highest <= number <= lowest:
        raise ValueError(f'priority is {priority!r}; use "normal", "high", or one of {highest} (first) to {lowest} (last)')
    return number


@contextmanager
def lane_priority(priority: Priority) -> Iterator[None]:
    """Groups that run their first schedule of weft's within have lanes of this priority in addition to the compute lane:
    copies, and blocks that communicate. Elsewhere it is -1.

    A group keeps what it has, also after the context, until `weft.close(group)`. The compute lane is the caller's stream.
    Raises ValueError for a priority that is not above 0: a lane that waits may share no hardware queue with the caller.
    """
    if priority == "normal" or (isinstance(priority, int) and priority >= 0):
        raise ValueError(f'priority is {priority!r}; lanes need a priority above that of the stream of a call: "high", or -1')
    token = _LANES.set(priority)
    try:
        yield
    finally:
        _LANES.reset(token)


def current_lane_priority() -> int:
    """What a group's lanes get now, as CUDA's number."""
    return priority_number(_LANES.get())


def launch_order(first: torch.cuda.Stream, then: torch.cuda.Stream) -> None:
    """What is enqueued on `then` from here on starts no earlier than what is enqueued on `first` from here on could.

    Waits for what `first` has before, not for what comes: enqueue the collective on `first`, then the compute kernel on `then`,
    and the collective's blocks are placed while there is room. Waits on the device only; graphs may capture it.
    """
    then.wait_event(first.record_event())
