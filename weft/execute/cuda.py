"""The CUDA executor: a Schedule on GPUs of one host, one process a GPU.

Lanes are streams: the compute lane is the caller's, every other lane has one of its own that is forked from it and joined
to it. Symmetric buffers are torch's symmetric memory; no multicast. A call does not wait for the GPU; the space's watch
bounds it.

Flags are edges. A schedule's flags only grow, but a CUDA graph replays constants. So each (flag, step that waits for it) has
a 32-bit word of its own: a signal writes 1 into each waiter's word (a kernel adds one for each tile), and the waiter, once
past, writes 0. That is the same as growing if a flag is signalled once a call, and not again before its waiters are past it;
`Edges` proves both when a schedule is bound.

    caller's stream (compute)       copy stream
    fork  ----------------------->  wait made >= tiles, write 0
    gemm, count made  ~~~~~~~~~~~>  peer copy, write 1 into the peer's arrived
    join  <-----------------------

A wait is a stream memory operation (cuStreamWaitValue32), a signal is cuStreamWriteValue32 into the memory of the rank that
waits: neither takes an SM, so a kernel can never keep a flag from being raised. A GEMM with gates, counts or stores to peers
is one kernel (weft.kernels.gemm) for 16-bit types whose rows TMA can load; else each part is a GEMM of its own. A sum is one
kernel (weft.kernels.reduce) behind its waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from weft.execute.bound import BoundProgram
from weft.execute.cuda_space import CudaSpace, checked
from weft.execute.edges import Edges
from weft.execute.interpret import Bindings, Where
from weft.schedule import Collective, Flag, Gemm, Lane, Reduce, Schedule, Wait, waits
from weft.span import Span
from weft.work import span

if TYPE_CHECKING:
    from weft.execute.fused import FusedStep

_RELEASED = 0x3FFFFFFF
"""What every word is set to after a failure: past anything that a wait asks for, short of where the comparison wraps."""
_LOOKS_PER_S = 4_000_000
"""More than a block can look at a flag in a second: a kernel gives up after the watch does."""


class CudaProgram(BoundProgram):
    """A schedule on one GPU, with memory of its own: a data area, scratch, and a word for each edge."""

    def __init__(self, space: CudaSpace, schedule: Schedule) -> None:
        self.space, self.driver = space, space.driver
        self.edges = Edges(schedule)
        self._words, self._words_handle = space.allocate(4 * self.edges.words)
        self._addresses = [int(pointer) for pointer in self._words_handle.buffer_ptrs]
        self._scratch: dict[str, torch.Tensor] = {}
        super().__init__(space, schedule)
        self._area, self._area_handle = space.allocate(self.layout.nbytes)
        self._progress_pinned = torch.zeros(len(schedule.ranks[self.rank]) + 1, dtype=torch.int32).pin_memory()
        self._progress = self._progress_pinned.numpy()
        self._lane_index = {lane.name: i for i, lane in enumerate(schedule.ranks[self.rank])}
        self._raised = torch.full((self._words.numel() // 4,), _RELEASED, dtype=torch.int32).pin_memory()
        self._silent = self._rehearsed = False
        self._passed: set[tuple[Flag, str, int]] = set()
        self._last: torch.cuda.Event | None = None
        self._events: list[tuple[Where, torch.cuda.Event, torch.cuda.Event]] = []
        space.keep_releasable(id(self), self._release)

    def symmetric(self, rank: int, offset: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        if rows * cols == 0:
            return torch.empty(rows, cols, dtype=dtype, device=self.space.device)
        matrix: torch.Tensor = self._area_handle.get_buffer(rank, (rows, cols), dtype, offset // dtype.itemsize)
        return matrix

    def scratch(self, name: str, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._scratch:
            self._scratch[name] = torch.empty(rows, cols, dtype=dtype, device=self.space.device)
        return self._scratch[name]

    def close(self) -> None:
        self.space.forget(id(self))
        torch.cuda.synchronize(self.space.device)
        del self._words, self._words_handle, self._area, self._area_handle
        self._scratch = {}

    def rehearse(self, bindings: Bindings) -> None:
        """Run the first call's steps once without flags, on all ranks, and throw the result away.

        CUDA loads a kernel, and the allocator takes memory, at first use, and both may wait for all streams: behind a stream
        that waits for a flag which this thread has yet to enqueue, that would never end.
        """
        if self._rehearsed:
            return
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(f"schedule {self.schedule.name}: call the operator once with these sizes before capturing a graph")
        spans, self.spans, self._silent = self.spans, None, True
        self._program.run(self.epoch, bindings)
        self.spans, self._silent, self._rehearsed = spans, False, True
        self.space.settle()

    def wait(self, flag: Flag, value: int, where: Where) -> None:
        """Hold the current stream until the edge is raised, and lower it. Once a step: parts may share a flag."""
        key = (flag, where.lane, where.position)
        if self._silent or key in self._passed:
            return
        self._passed.add(key)
        self._report(where)
        stream, address = self._stream(), self._address(self.rank, self.edges.slot[key])
        mode = self.driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        checked(self.driver.cuStreamWaitValue32(stream, address, self._program.growth_of(flag), mode))
        self._write(stream, address, 0)

    def _report(self, where: Where) -> None:
        """Before a step may wait: let its lane say in host memory where it is."""
        address = self._progress_pinned.data_ptr() + 4 * self._lane_index[where.lane]
        self._write(self._stream(), address, where.position + 1)

    def signal(self, flag: Flag, value: int) -> None:
        if self._silent:
            return
        stream = self._stream()
        for slot in self.edges.slots[flag]:
            self._write(stream, self._address(flag.rank, slot), self._program.growth_of(flag))

    def _write(self, stream: int, address: int, value: int) -> None:
        mode = self.driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        checked(self.driver.cuStreamWriteValue32(stream, address, value, mode))

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.space.device).cuda_stream)

    def _address(self, rank: int, slot: int) -> int:
        return self._addresses[rank] + 4 * slot

    def gate_address(self, flag: Flag, where: Where) -> int:
        return self._address(self.rank, self.edges.slot[flag, where.lane, where.position])

    def count_address(self, flag: Flag) -> int:
        (slot,) = self.edges.slots[flag]
        return self._address(flag.rank, slot)

    def gate_need(self, wait: Wait) -> tuple[int, int]:
        return 0, self._program.growth_of(wait.flag) if wait.at_least else 0

    def launch(self, kernel: FusedStep, bindings: Bindings, epoch: int, where: Where) -> None:
        """A GEMM's tiles wait for this call's chunks themselves; for all else the stream waits before the kernel.

        What previous calls left may be raised again while the kernel runs. And a sum's blocks would fill every SM while they
        wait: copies of a few KiB, which are kernels, then never ran (a hang on 4 x H200).
        """
        gates = waits(kernel.step)
        inside = [gate for gate in gates if gate.at_least and isinstance(kernel.step, Gemm)]
        for gate in gates:
            if gate not in inside and self._program.absolute(epoch, gate) > 0:
                self.wait(gate.flag, 1, where)
        if inside and not self._silent:
            self._report(where)
        silent = self._silent or isinstance(kernel.step, Reduce)
        kernel.launch(bindings, 0, silent=silent, tries=int(self.team.timeout_s * _LOOKS_PER_S), sms=self.space.sms)
        if inside and not self._silent:
            self._lower([gate.flag for gate in inside], where)

    def _lower(self, flags: list[Flag], where: Where) -> None:
        """Write 0 to a kernel's own gates, which lie together, once it has ended."""
        slots = sorted({self.edges.slot[flag, where.lane, where.position] for flag in flags})
        if slots:
            assert slots[-1] - slots[0] == len(slots) - 1, "edges of one step lie together"
            checked(self.driver.cuMemsetD32Async(self._address(self.rank, slots[0]), 0, len(slots), self._stream()))

    def prepare_a(self, a: torch.Tensor) -> torch.Tensor:
        # A strided copy is a kernel, and would wait for SMs that a gated GEMM holds; a contiguous one is a copy engine's.
        return a.contiguous()

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
        capturing = torch.cuda.is_current_stream_capturing()
        if self._last is not None and not capturing:
            caller.wait_event(self._last)
        self._passed.clear()
        begin, zero_us = self._event(), time.perf_counter_ns() / 1e3
        ticket = 0 if capturing else self.space.begin(caller, self._stuck)
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
        if not capturing:
            self._end(caller, ticket, begin, zero_us)

    def _end(self, caller: torch.cuda.Stream, ticket: int, begin: torch.cuda.Event, zero_us: float) -> None:
        """Put the call under watch. With spans: wait for its end, and read them."""
        self._last = self._event()
        self._last.record(caller)
        self.space.end(caller, ticket)
        if self.spans is not None:
            self.team.until(lambda: self.space.done(ticket), self._stuck)
            caller.synchronize()
            self.spans += [self._span(begin, zero_us, *event) for event in self._events]
            self._events = []

    def _stuck(self) -> str:
        """What each lane waits for: the step that its progress names, and the words of it that are low."""
        with torch.cuda.stream(self.space.stream("rescue")):
            seen = self._words.view(torch.int32).cpu().tolist()
        stuck = []
        for index, lane in enumerate(self.schedule.ranks[self.rank]):
            position = int(self._progress[index]) - 1
            step = lane.steps[position]
            for wait in waits(step) if position >= 0 else ():
                value, need = seen[self.edges.slot[wait.flag, lane.name, position]], self._program.growth_of(wait.flag)
                if value < need:
                    where = Where(self.rank, lane.name, position, step)
                    stuck.append(f"{where}: {wait.flag}: expected {need}, seen {value}; {self.raiser(wait.flag)}")
                    break
        return "\n".join(stuck) or f"rank {self.rank}: no flag is missing, but the GPU has not ended the call"

    def _release(self) -> None:
        """Raise every word of this rank beyond what any wait needs, so that its streams drain.

        From host memory, by a copy engine: a memset is a kernel, and waits for SMs that a spinning kernel may hold.
        """
        stream = self.space.stream("rescue")
        with torch.cuda.stream(stream):
            self._words.view(torch.int32).copy_(self._raised, non_blocking=True)
        stream.synchronize()

    def record(self, where: Where, work: Callable[[], None]) -> None:
        if self.spans is None:
            work()
            return
        start, end = self._event(), self._event()
        start.record()
        work()
        end.record()
        self._events.append((where, start, end))

    @staticmethod
    def _event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]

    def _span(
        self, begin: torch.cuda.Event, zero_us: float, where: Where, start: torch.cuda.Event, end: torch.cuda.Event
    ) -> Span:
        first, last = (zero_us + 1e3 * float(begin.elapsed_time(e)) for e in (start, end))
        return span(self.schedule, self.rank, where.lane, where.step, first, max(first, last))
