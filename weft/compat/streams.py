"""This module calls the CUDA driver (cuda-bindings) for what torch lacks: memory operations on streams, copies by address.

Every function enqueues and returns without waiting for the GPU. Addresses and streams are integers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
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
