"""CUDA streams: the driver's operations on them, and the streams of communication.

The driver (cuda-bindings) has what torch lacks: memory operations on streams, and copies by address. Each of these functions
enqueues and returns without waiting for the GPU. Addresses and streams are integers.

Priorities, and which of two streams starts first, are the second control of resource-aware overlap (arXiv 2606.09200). When
blocks of two kernels wait for room on an SM, the stream of higher priority gets it first, but running blocks are not stopped.
So with priority alone, a collective starts as blocks of the compute kernel end. With a cap on that kernel's residency
(weft.overlap.controls.shape) it starts concurrently.

Priorities have CUDA's numbers: 0 is the usual priority, and lower numbers come first. This also holds on ROCm, untested.

All of weft's streams come from here, and have one user at a time. torch has 32 streams of each priority and hands them out in
turn, so two lanes may get the same stream. A lane that waits for a flag could then block the lane that would raise it:

    one stream, lanes of groups A and B      rank 0:  A waits for rank 1's A | B        neither A nor B ever ends: rank 1's A is
                                             rank 1:  B waits for rank 0's B | A        behind a B that waits for rank 0's B
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import c_int, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import torch

from weft.core.errors import WeftError

_BATCH = 128
"""The number of memory operations in one submission. The driver takes 256."""


def driver_api() -> Any:
    """Return cuda-bindings' driver API. Raises ValueError if it is missing."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise ValueError("device is cuda: the driver is called through cuda-bindings; pip install cuda-bindings") from None
    return driver


def checked(result: tuple[Any, ...]) -> Any:
    """Return the result of a driver call. Raises WeftError if the call failed."""
    if result[0]:
        raise WeftError(f"CUDA driver: {result[0]}")
    return result[1] if len(result) > 1 else None


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
"""Returns the number of torch's current stream on a GPU, without the object that torch.cuda.current_stream makes."""

capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
"""Returns whether a CUDA graph captures torch's current stream."""

replay_graph: Callable[[torch.cuda.CUDAGraph], None] = getattr(
    getattr(torch._C, "_CUDAGraph", None), "replay", torch.cuda.CUDAGraph.replay
)
"""Launches a graph on torch's current stream, without the frame of torch's own method."""


@dataclass(frozen=True, slots=True)
class Word:
    """A memory operation on a 32-bit word.

    progress: write which step the lane has reached.
    wait: wait until the word holds at least the value.
    lower: set a word that has been waited for.
    signal: set the word, after all that the stream has done is visible to the whole machine.
    """

    kind: Literal["progress", "wait", "lower", "signal"]
    address: int
    value: int


class _MemoryOperation(ctypes.Structure):
    """A CUstreamBatchMemOpParams of cuda.h that waits for a 32-bit word or writes one. It has 48 bytes."""

    _fields_ = (
        ("operation", c_uint),
        ("address", c_uint64),
        ("value", c_uint64),
        ("flags", c_uint),
        ("alias", c_uint64),
        ("padding", c_uint64),
    )


_WAIT_VALUE_32, _WRITE_VALUE_32, _GREATER_OR_EQUAL = 1, 2, 0
"""CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32 and CU_STREAM_WAIT_VALUE_GEQ. A write with flags 0 is ordered
after all earlier work of the stream."""


def _operation(word: Word) -> _MemoryOperation:
    kind = _WAIT_VALUE_32 if word.kind == "wait" else _WRITE_VALUE_32
    return _MemoryOperation(kind, word.address, word.value, _GREATER_OR_EQUAL)


@cache
def _submit_operations() -> Callable[..., int]:
    """Return the driver's cuStreamBatchMemOp (stream, count, operations, flags). It returns the number of a CUresult."""
    function = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    function.argtypes, function.restype = (c_void_p, c_uint, c_void_p, c_uint), c_int
    return cast("Callable[..., int]", function)


class Driver:
    """Driver makes the driver calls that schedules need."""

    def __init__(self) -> None:
        self.api = driver_api()
        self._buffer_id = self.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        self.memory_number = self.api.cuPointerGetAttribute, self._buffer_id
        """The function behind `memory_at` and its first argument, for callers that count frames. It returns (error, number)."""
        self.record_event: Callable[[Any, int], tuple[Any]] = self.api.cuEventRecord
        """The function behind `record`, likewise. It returns (error,)."""

    def words(self, words: Sequence[Word]) -> Callable[[int], None]:
        """Return a function that enqueues these operations on a stream, in order. Every write is ordered like a signal."""
        # cuda-bindings would copy the operations in each call, so they are in arrays of C, and the driver is called directly.
        parts = [words[i : i + _BATCH] for i in range(0, len(words), _BATCH)]
        batches = [(len(part), (_MemoryOperation * len(part))(*map(_operation, part))) for part in parts]
        submit = _submit_operations()

        def enqueue(stream: int) -> None:
            for count, batch in batches:
                status = submit(stream, count, batch, 0)
                if status:
                    checked((self.api.CUresult(status),))

        return enqueue

    def copier(self, *, rows: int, row_bytes: int, pitches: tuple[int, int]) -> Callable[[int, int, int], None]:
        """Return a function (dst, src, stream) that copies `rows` rows.

        If one side is on a peer, a copy engine copies them, also if rows are not adjacent.

        pitches: the row strides of source and destination in bytes.
        """
        if rows == 1 or pitches == (row_bytes, row_bytes):
            copy, nbytes = self.api.cuMemcpyAsync, rows * row_bytes

            def copy_bytes(dst: int, src: int, stream: int) -> None:
                result = copy(dst, src, nbytes, stream)
                if result[0]:
                    checked(result)

            return copy_bytes
        shape = self.api.CUDA_MEMCPY2D()
        shape.srcMemoryType = shape.dstMemoryType = self.api.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        shape.srcPitch, shape.dstPitch = pitches
        shape.WidthInBytes, shape.Height = row_bytes, rows

        def copy_rows(dst: int, src: int, stream: int) -> None:
            shape.srcDevice, shape.dstDevice = src, dst
            result = self.api.cuMemcpy2DAsync(shape, stream)
            if result[0]:
                checked(result)

        return copy_rows

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        """Set every byte of a range of memory. The driver does not need to load a kernel for it."""
        checked(self.api.cuMemsetD8Async(address, byte, nbytes, stream))

    def event(self) -> Any:
        """Return an event that records no time."""
        return checked(self.api.cuEventCreate(self.api.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def forget(self, event: Any) -> None:
        checked(self.api.cuEventDestroy(event))

    def record(self, event: Any, stream: int) -> None:
        """Record an event on a stream. It is reached when the stream has ended its work so far."""
        result = self.api.cuEventRecord(event, stream)
        if result[0]:
            checked(result)

    def wait(self, stream: int, event: Any) -> None:
        """Make a stream wait until an event is reached."""
        checked(self.api.cuStreamWaitEvent(stream, event, 0))

    def reached(self, event: Any) -> bool:
        """Return whether the last record of an event has been reached. It is true for an event that was never recorded."""
        result = self.api.cuEventQuery(event)[0]
        if not result:
            return True
        if result != self.api.CUresult.CUDA_ERROR_NOT_READY:
            checked((result,))
        return False

    def capture(self, stream: int) -> int:
        """Return the number of the capture that a stream is in. It is unique in this process."""
        error, _, number, *_ = self.api.cuStreamGetCaptureInfo(stream)
        checked((error,))
        return int(number)

    def memory_at(self, address: int) -> int | None:
        """Return the number of the memory at a GPU address, or None if the driver has no number.

        It is unique in this process, so it shows whether the memory was freed and other memory has the address now.
        """
        number = self.api.cuPointerGetAttribute(self._buffer_id, address)[1]  # None after an error
        return None if number is None else int(number)

    def memory_behind(self, address: int, nbytes: int) -> list[tuple[int, int]] | None:
        """Return (address, number of the memory there) for all memory within nbytes, or None if the driver does not say.

        There are several if the memory was mapped piece by piece, like torch's expandable segments.
        """
        found, end = [], address + nbytes
        while address < end:
            number = self.memory_at(address)
            error, base, size = self.api.cuMemGetAddressRange(address)
            if error or number is None:
                return None
            found.append((address, number))
            address = int(base) + int(size)
        return found

    def relax_captures(self) -> None:
        """Let this thread query events while another thread captures a graph."""
        checked(self.api.cuThreadExchangeStreamCaptureMode(self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))

    def after(self, later: int, earlier: int, event: Any) -> None:
        """Make stream `later` wait for the work that `earlier` has now. event: the event to use, which may be used again."""
        self.all_after((later,), earlier, event)

    def all_after(self, later: Sequence[int], earlier: int, event: Any) -> None:
        """Make several streams wait for the work that `earlier` has now."""
        result = self.api.cuEventRecord(event, earlier)
        for stream in later:
            if not result[0]:
                result = self.api.cuStreamWaitEvent(stream, event, 0)
        if result[0]:
            checked(result)


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

    Raises ValueError for a priority that is not above 0: a lane's kernels might begin late, after the caller's.
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
