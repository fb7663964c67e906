"""The CUDA executor: a Schedule on GPUs of one host, one process a GPU.

Lanes are streams: the compute lane is the caller's, every other lane has one of its own that is forked from it and joined
to it. A wait is a stream memory operation (cuStreamWaitValue32, >=), a signal is cuStreamWriteValue32 into the memory of the
rank that waits: neither takes an SM, so that a kernel can never keep a flag from being raised. Symmetric buffers are torch's
symmetric memory; no multicast.

    caller's stream (compute)       copy stream
    fork  ----------------------->  wait made
    gemm, write made  ~~~~~~~~~~~>  peer copy, write arrived at the peer
    join  <-----------------------

A GEMM with gates, counts or stores to peers is one kernel (weft.kernels.gemm) for 16-bit types whose rows TMA can load; else
each part is a GEMM of its own behind its waits.

A call returns when its lanes have ended, or at the team's bound: then every flag of this rank is raised so that no stream
stays blocked, and the error says which wait was stuck. Words of 32 bits are compared cyclically, so they may wrap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from weft.errors import WaitTimeout, WeftError
from weft.execute.bound import BoundProgram
from weft.execute.interpret import Bindings, Where
from weft.schedule import Collective, Flag, Lane, Schedule, waits
from weft.span import Kind, Span
from weft.team import Team

if TYPE_CHECKING:
    from weft.execute.fused import FusedGemm

_RELEASED = 0x3FFFFFFF
"""What every flag is set to after a failure: past anything that a wait asks for, short of where the comparison wraps."""

_LOOKS_PER_S = 1_000_000
"""About how often a block looks at a flag in a second."""


def _driver() -> Any:
    """cuda-bindings' driver API. Raises ValueError if it is missing."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise ValueError("device is cuda: stream flags need cuda-bindings; pip install cuda-bindings") from None
    return driver


def _checked(result: tuple[Any, ...]) -> None:
    if int(result[0]) != 0:
        raise WeftError(f"CUDA driver: {result[0]}")


class CudaSpace:
    """The data area in torch's symmetric memory, scratch, and the streams of lanes."""

    def __init__(self, team: Team, device: torch.device) -> None:
        self.team, self.device = team, device
        self.driver = _driver()
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._area: torch.Tensor | None = None
        self._handle: Any = None
        self._scratch: dict[str, torch.Tensor] = {}
        self._streams: dict[str, torch.cuda.Stream] = {}

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, Any]:
        """Zeroed symmetric memory and its handle. Collective."""
        area = symmetric_memory.empty(max(1024, nbytes), dtype=torch.uint8, device=self.device)
        handle = symmetric_memory.rendezvous(area, self.team.group)
        area.zero_()
        torch.cuda.synchronize(self.device)
        dist.barrier(self.team.group)
        return area, handle

    def runs_kernels(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.bfloat16, torch.float16)

    def reserve(self, nbytes: int) -> None:
        if self._area is None or self._area.numel() < nbytes:
            self._area, self._handle = self.allocate(nbytes)

    def symmetric(self, rank: int, offset: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        if rows * cols == 0:
            return torch.empty(rows, cols, dtype=dtype, device=self.device)
        matrix: torch.Tensor = self._handle.get_buffer(rank, (rows, cols), dtype, offset // dtype.itemsize)
        return matrix

    def scratch(self, name: str, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = rows * cols * dtype.itemsize
        if name not in self._scratch or self._scratch[name].numel() < nbytes:
            self._scratch[name] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._scratch[name][:nbytes].view(dtype).view(rows, cols)

    def stream(self, name: str) -> torch.cuda.Stream:
        """A lane's stream. Its priority differs from the caller's, so that the two share no hardware queue."""
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        return self._streams[name]

    def close(self) -> None:
        self._area, self._handle = None, None
        self._scratch, self._streams = {}, {}


class CudaProgram(BoundProgram):
    """A schedule on one GPU. Its flags are 32-bit words in symmetric memory of their own."""

    def __init__(self, space: CudaSpace, schedule: Schedule) -> None:
        super().__init__(space, schedule)
        self.space, self.driver = space, space.driver
        self._flags, handle = space.allocate(4 * self.words_needed)
        self._addresses = [int(pointer) for pointer in handle.buffer_ptrs]
        self._handle = handle
        self._launched: list[tuple[FusedGemm, Where]] = []
        self._silent = False
        self._rehearsed = False
        self._events: list[tuple[Where, Kind, torch.cuda.Event, torch.cuda.Event, int, int]] = []

    def close(self) -> None:
        del self._flags, self._handle

    def rehearse(self, bindings: Bindings) -> None:
        """Run the first call's steps once without flags, on all ranks, and throw the result away.

        CUDA loads a kernel, and the allocator takes memory, at first use, and both may wait for all streams: behind a stream
        that waits for a flag which this thread has yet to enqueue, that would never end.
        """
        if self._rehearsed:
            return
        spans, self.spans, self._silent = self.spans, None, True
        self._program.run(self.epoch, bindings)
        self.spans, self._silent, self._rehearsed = spans, False, True
        dist.barrier(self.team.group)

    def wait(self, flag: Flag, value: int, where: Where) -> None:
        if self._silent:
            return
        mode = self.driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        stream = torch.cuda.current_stream(self.space.device).cuda_stream
        _checked(self.driver.cuStreamWaitValue32(stream, self.flag_address(flag), value & 0xFFFFFFFF, mode))

    def signal(self, flag: Flag, value: int) -> None:
        if self._silent:
            return
        mode = self.driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        stream = torch.cuda.current_stream(self.space.device).cuda_stream
        _checked(self.driver.cuStreamWriteValue32(stream, self.flag_address(flag), value & 0xFFFFFFFF, mode))

    def flag_address(self, flag: Flag) -> int:
        return self._addresses[flag.rank] + 4 * self.slots[flag]

    def prepare_a(self, a: torch.Tensor) -> torch.Tensor:
        # A strided copy is a kernel, and would wait for SMs that a gated GEMM holds; a contiguous one is a copy engine's.
        return a.contiguous()

    def launch(self, kernel: FusedGemm, bindings: Bindings, epoch: int, where: Where) -> None:
        kernel.launch(bindings, epoch, silent=self._silent, tries=int(self.team.timeout_s * _LOOKS_PER_S), sms=self.space.sms)
        self._launched.append((kernel, where))

    def matmul(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None:
        if out.dtype == a.dtype and not accumulate:
            torch.mm(a, b, out=out)
            return
        product = torch.mm(a, b) if out.dtype == a.dtype else torch.mm(a, b, out_dtype=out.dtype)
        if accumulate:
            out += product
        else:
            out.copy_(product)

    def collective(self, step: Collective, src: torch.Tensor, dst: torch.Tensor, where: Where) -> None:
        """NCCL on equal parts; unequal shards are padded to the longest on the way."""
        shards = self.schedule.problem.shards
        longest, size = shards[0][1] - shards[0][0], len(shards)
        even = all(high - low == longest for low, high in shards)
        op = dist.ReduceOp.SUM if step.divide_by == 1 else dist.ReduceOp.AVG
        if step.op == "all_gather" and even:
            dist.all_gather_into_tensor(dst, src.contiguous(), group=self.team.group)
        elif step.op == "all_gather":
            padded = src.new_zeros(longest, src.shape[1])
            padded[: src.shape[0]].copy_(src)
            gathered = src.new_empty(size * longest, src.shape[1])
            dist.all_gather_into_tensor(gathered, padded, group=self.team.group)
            for rank, (low, high) in enumerate(shards):
                dst[low:high].copy_(gathered[rank * longest : rank * longest + high - low])
        elif even:
            dist.reduce_scatter_tensor(dst, src.contiguous(), op=op, group=self.team.group)
        else:
            spread = src.new_zeros(size * longest, src.shape[1])
            for rank, (low, high) in enumerate(shards):
                spread[rank * longest : rank * longest + high - low].copy_(src[low:high])
            reduced = src.new_empty(longest, src.shape[1])
            dist.reduce_scatter_tensor(reduced, spread, op=op, group=self.team.group)
            dst.copy_(reduced[: dst.shape[0]])

    def run_lanes(self, lanes: Sequence[tuple[Lane, Callable[[], None]]]) -> None:
        caller = torch.cuda.current_stream(self.space.device)
        zero_us = time.perf_counter_ns() / 1e3
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record(caller)
        for lane, work in sorted(lanes, key=lambda item: item[0].kind == "compute"):
            stream = caller if lane.kind == "compute" else self.space.stream(lane.name)
            if stream != caller:
                stream.wait_stream(caller)
            with torch.cuda.stream(stream):
                work()
        for lane, _ in lanes:
            if lane.kind != "compute":
                caller.wait_stream(self.space.stream(lane.name))
        end.record(caller)
        self._finish(end)
        self._check_kernels()
        if self.spans is not None:
            self.spans += [self._span(begin, zero_us, item) for item in self._events]
            self._events = []

    def _finish(self, end: torch.cuda.Event) -> None:
        """Wait for the call's end, no longer than the bound; on failure, release what is blocked and say what it was."""
        try:
            self.team.until(lambda: bool(end.query()), self._stuck)  # type: ignore[no-untyped-call]
        except WeftError as error:
            stuck = "" if isinstance(error, WaitTimeout) else f"; meanwhile {self._stuck()}"
            self._release()
            raise type(error)(f"{error}{stuck}") from None

    def _check_kernels(self) -> None:
        """Raise if a kernel of this call gave up on a gate."""
        launched, self._launched = self._launched, []
        for kernel, where in launched:
            try:
                kernel.raise_if_late(str(where), self.raiser)
            except WaitTimeout as error:
                raise self.team.fail(error) from None

    def _stuck(self) -> str:
        """The first wait of each lane whose flag is not there yet."""
        seen = self._read_flags()
        stuck = []
        for lane in self.schedule.ranks[self.rank]:
            for position, step in enumerate(lane.steps):
                missing = [
                    f"{Where(self.rank, lane.name, position, step)}: {wait.flag}: expected {value}, "
                    f"seen {seen[self.slots[wait.flag]]}; {self.raiser(wait.flag)}"
                    for wait in waits(step)
                    if seen[self.slots[wait.flag]] < (value := self._program.absolute(self.epoch, wait))
                ]
                if missing:
                    stuck.append(missing[0])
                    break
        return "\n".join(stuck) or f"rank {self.rank}: no flag is missing, but the GPU has not ended the call"

    def _read_flags(self) -> list[int]:
        """This rank's flags, read beside the blocked streams."""
        with torch.cuda.stream(self.space.stream("rescue")):
            words = self._flags.view(torch.int32).cpu()
        return [int(w) for w in words]

    def _release(self) -> None:
        """Raise every flag of this rank beyond what any wait needs, so that its streams drain."""
        stream = self.space.stream("rescue")
        words = self._flags.numel() // 4
        _checked(self.driver.cuMemsetD32Async(self._flags.data_ptr(), _RELEASED, words, stream.cuda_stream))
        stream.synchronize()

    def record(self, where: Where, kind: Kind, work: Callable[[], None], flops: int, nbytes: int) -> None:
        if self.spans is None:
            work()
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        self._events.append((where, kind, start, end, flops, nbytes))

    def _span(
        self, begin: torch.cuda.Event, zero_us: float, item: tuple[Where, Kind, torch.cuda.Event, torch.cuda.Event, int, int]
    ) -> Span:
        where, kind, start, end, flops, nbytes = item
        first, last = (zero_us + 1e3 * float(begin.elapsed_time(e)) for e in (start, end))
        return Span(
            rank=self.rank,
            lane=where.lane,
            kind=kind,
            name=str(where.step),
            start_us=first,
            end_us=max(first, last),
            flops=flops,
            bytes=nbytes,
        )
