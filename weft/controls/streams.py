"""Streams for communication: their priority, and which of two streams starts first.

Resource-aware overlap's second control (arXiv 2606.09200). Where blocks of two kernels wait for room on an SM, those of the
stream of higher priority get it first; blocks that run are not stopped. So priority alone lets a collective start only as
blocks of the compute kernel end, and a cap on that kernel's residency (weft.controls.shape) lets it start beside them.

Numbers are CUDA's: 0 is every stream's usual priority, and lower ones come first. The same holds on ROCm, untested.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

Priority = Literal["normal", "high"] | int
"""normal: 0. high: the highest that the device has."""

_LANES: ContextVar[Priority] = ContextVar("weft.controls.lane_priority", default=-1)


def comm_stream(*, priority: Priority = "high", device: torch.device | int | None = None) -> torch.cuda.Stream:
    """A stream of a priority; device: default, the current one. Raises ValueError for a priority that the device lacks.

    torch has 32 streams of each priority, and hands them out in turn: keep the one that you get.
    """
    number = priority_number(priority)
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=number)  # type: ignore[no-untyped-call]
    return stream


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
    """Groups that run their first schedule of weft's within have lanes of this priority beside the compute lane: copies, and
    blocks that communicate. Elsewhere it is -1.

    A group keeps what it has, also after the context, until `weft.close(group)`. The compute lane is the caller's stream.
    Raises ValueError for a priority that is not above 0: a lane that waits may share no hardware queue with the caller.
    """
    if priority == "normal" or (isinstance(priority, int) and priority >= 0):
        raise ValueError(f'priority is {priority!r}; lanes beside the stream of a call need one above its own: "high", or -1')
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
