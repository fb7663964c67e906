"""What torch has no name for, straight from the CUDA driver (cuda-bindings): memory operations on streams, copies by address.

Every function here enqueues and returns; none waits for the GPU. Addresses and streams are integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from weft.core.errors import WeftError

_BATCH = 128
"""Memory operations in one submission; the driver takes 256."""


def driver_api() -> Any:
    """cuda-bindings' driver API. Raises ValueError if it is missing."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise ValueError("device is cuda: the driver is called through cuda-bindings; pip install cuda-bindings") from None
    return driver


def checked(result: tuple[Any, ...]) -> Any:
    """What a driver call returned. Raises WeftError if it failed."""
    if result[0]:
        raise WeftError(f"CUDA driver: {result[0]}")
    return result[1] if len(result) > 1 else None


def raw_stream(index: int) -> int:
    """The number of torch's current stream on a GPU, without the object that torch.cuda.current_stream makes."""
    return int(torch._C._cuda_getCurrentRawStream(index))


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


class Driver:
    """The driver calls that schedules need."""

    def __init__(self) -> None:
        self.api = driver_api()
        self._buffer_id = self.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID

    def words(self, words: Sequence[Word]) -> Callable[[int], None]:
        """A function that enqueues these operations, in this order, on a stream. Every write here is as a signal."""
        params = [self._operation(word) for word in words]
        batches = [params[i : i + _BATCH] for i in range(0, len(params), _BATCH)]
        submit = self.api.cuStreamBatchMemOp

        def enqueue(stream: int) -> None:
            for batch in batches:
                checked(submit(stream, len(batch), batch, 0))

        return enqueue

    def _operation(self, word: Word) -> Any:
        kinds, operation = self.api.CUstreamBatchMemOpType, self.api.CUstreamBatchMemOpParams()
        wait = word.kind == "wait"
        kind = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32 if wait else kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
        part = operation.waitValue if wait else operation.writeValue
        operation.operation = part.operation = kind
        part.address, part.value = word.address, self.api.cuuint32_t(word.value)
        part.flags = int(self.api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ) if wait else 0
        return operation

    def copier(self, *, rows: int, row_bytes: int, pitches: tuple[int, int]) -> Callable[[int, int, int], None]:
        """A function (dst, src, stream) that copies `rows` rows; pitches: bytes from row to row, of source and destination.

        A copy engine does it, also for rows that are not adjacent, if one side is on a peer.
        """
        if rows == 1 or pitches == (row_bytes, row_bytes):
            copy, nbytes = self.api.cuMemcpyAsync, rows * row_bytes
            return lambda dst, src, stream: checked(copy(dst, src, nbytes, stream))
        shape = self.api.CUDA_MEMCPY2D()
        shape.srcMemoryType = shape.dstMemoryType = self.api.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        shape.srcPitch, shape.dstPitch = pitches
        shape.WidthInBytes, shape.Height = row_bytes, rows

        def copy_rows(dst: int, src: int, stream: int) -> None:
            shape.srcDevice, shape.dstDevice = src, dst
            checked(self.api.cuMemcpy2DAsync(shape, stream))

        return copy_rows

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        """Set every byte of some memory. It needs no kernel that would have to be loaded."""
        checked(self.api.cuMemsetD8Async(address, byte, nbytes, stream))

    def event(self) -> Any:
        """An event without a time."""
        return checked(self.api.cuEventCreate(self.api.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def forget(self, event: Any) -> None:
        checked(self.api.cuEventDestroy(event))

    def record(self, event: Any, stream: int) -> None:
        """The event is reached when the stream comes here."""
        result = self.api.cuEventRecord(event, stream)
        if result[0]:
            checked(result)

    def wait(self, stream: int, event: Any) -> None:
        """The stream goes on once the event is reached."""
        checked(self.api.cuStreamWaitEvent(stream, event, 0))

    def reached(self, event: Any) -> bool:
        """Whether an event has been reached, as it was recorded last; one that was never recorded has."""
        result = self.api.cuEventQuery(event)[0]
        if not result:
            return True
        if result != self.api.CUresult.CUDA_ERROR_NOT_READY:
            checked((result,))
        return False

    def capture(self, stream: int) -> int:
        """The number of the capture that a stream is in. No other capture of this process has it."""
        error, _, number, *_ = self.api.cuStreamGetCaptureInfo(stream)
        checked((error,))
        return int(number)

    def memory_at(self, address: int) -> int | None:
        """The number of the memory at an address of a GPU's. No other memory of this process ever has it, so it shows whether
        the memory was freed and other memory has the address now. None if the driver has no number."""
        error, number = self.api.cuPointerGetAttribute(self._buffer_id, address)
        return None if error else int(number)

    def memory_behind(self, address: int, nbytes: int) -> list[tuple[int, int]] | None:
        """(an address, the number of the memory there) for all memory within nbytes: several where they were mapped piece
        by piece, as torch's expandable segments are. None where the driver does not say."""
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
        """Let this thread ask for events while another one captures a graph."""
        checked(self.api.cuThreadExchangeStreamCaptureMode(self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))

    def after(self, later: int, earlier: int, event: Any) -> None:
        """Stream `later` goes on once `earlier` has come here. event: used for it, as often as one likes."""
        self.record(event, earlier)
        self.wait(later, event)
