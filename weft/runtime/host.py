"""The CPU executor: a Schedule on CPUs, one process for each rank.

Symmetric buffers are POSIX shared memory that every rank maps. A region of a peer is a tensor over the peer's memory. Flags are
words in the same memory, stored with release and loaded with acquire. The compute lane runs on the caller's thread. Every other
lane is a thread, so that a copy lane really runs beside the matmuls: torch releases the interpreter lock while it works.

    caller's thread (compute)       thread (copy)
    steps ...                       steps ...
    signal made  ---------------->  wait made
    join  <-----------------------  end                 a call returns when all lanes of the rank have ended

A call, from the bound program to torch.matmul: `HostProgram.play` binds its tensors, weft.runtime.interpret walks each lane
step by step, weft.runtime.arithmetic puts the matmuls of a step together, and `HostProgram.matmul` runs them.

On several nodes, ranks share memory with those of their own node. Messages and collectives go through gloo
(weft.runtime.host_wire).

All schedules of a process group share one piece of memory for data (weft.comm.symmetric_heap), which grows when one of them
needs more. Each schedule has a piece of its own for flags. The data can be shared because `RankGroup.enter` of a call shows
that every peer has ended the call before: no peer still reads what another schedule put there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from weft.comm.symmetric_heap import HostAllocation
from weft.compat.cpu import multiplies
from weft.core.errors import PeerLost, WaitTimeout
from weft.core.problem import RaggedProblem
from weft.core.schedule import Collective, Flag, Gemm, Lane, Lookup, Reduce, Schedule, SendReceive, Step, Wait, advances, waits
from weft.core.span import Span
from weft.core.work import span
from weft.runtime.bindings import Bindings, Where
from weft.runtime.bound import NOTHING, BoundProgram, Inputs, Outputs
from weft.runtime.host_space import INTERPRETED_BLOCKS, HostSpace
from weft.runtime.interpret import Device, Program
from weft.runtime.ragged import RowCounts


class HostProgram(BoundProgram, Device):
    """A schedule on one CPU rank. Its memory for flags has one more word, for the barriers of collectives."""

    def __init__(self, space: HostSpace, schedule: Schedule) -> None:
        self._mailboxes: list[HostAllocation] = []
        self.space = space
        super().__init__(space, schedule)
        schedule = self.schedule  # in which a FusedCollective is spelled out where the device has no kernel for it
        self._program = Program(schedule, self, self.growth_of)
        self._keep_pushes_that_need_no_lane_of_this_call()
        self._flags = space.heap.allocate(8 * (self.words_needed + 1))
        self._words = {rank: self._flags.words(rank, self.words_needed + 1) for rank in self._flags.ranks}
        self._flag_addresses = dict(zip(self._flags.ranks, self._flags.addresses, strict=True))
        self._meetings = 0
        self._waiting: dict[str, Callable[[], str]] = {}
        self._wire = space.wire if self.rank_group.nodes else None
        self._row_counts: RowCounts | None = None
        if isinstance(schedule.problem, RaggedProblem) and self.ragged is None:
            self._row_counts = RowCounts(schedule.problem, self.rank, space.heap)

    def _keep_pushes_that_need_no_lane_of_this_call(self) -> None:
        """Triton interprets one kernel at a time in a process, so lanes of blocks run before all others (`run_lanes`). One
        that waits for this call's compute lane cannot: its copies are made step by step."""
        late = {
            lane.name
            for lane in self.schedule.ranks[self.rank]
            if lane.kind == "blocks" and any(wait.at_least for step in lane.steps for wait in waits(step))
        }
        self.pushes = {key: push for key, push in self.pushes.items() if key[0] not in late}

    def prepare(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name != "b" and (self.pushes or self.fused_collectives or self.rank_group.nodes):
            return tensor.contiguous()
        if name == "b" and not (multiplies(tensor.dtype) or self.space.runs_kernels(tensor.dtype)):
            return tensor.float()
        return tensor

    def close(self) -> None:
        for piece in (self._flags, *self._mailboxes):
            self.space.heap.free(piece)
        if self._row_counts is not None:
            self._row_counts.close()

    def mailbox(self, nbytes: int) -> tuple[list[int], torch.Tensor]:
        self._mailboxes.append(self.space.heap.allocate(nbytes))
        return self._mailboxes[-1].addresses, self._mailboxes[-1].local[:nbytes]

    def wait(self, flag: Flag, value: int, where: Where) -> None:
        """Wait, bounded. The error also names what the other lanes wait for, since this lane may wait for one of them."""
        words, slot = self._words[flag.rank], self.slots[flag]

        def missing() -> str:
            return f"{where}: {flag}: expected {value}, seen {words.load(slot)}; {self.raiser(flag)}"

        def explain() -> str:
            others = [other() for lane, other in tuple(self._waiting.items()) if lane != where.lane]
            return "\n".join((missing(), *others))

        self._waiting[where.lane] = missing
        try:
            self.rank_group.until(lambda: words.load(slot) >= value, explain)
        finally:
            del self._waiting[where.lane]

    def raiser(self, flag: Flag) -> str:
        """Who advances a flag, and what that lane waits for itself, from rank to rank. The last rank named is the late one."""
        line, seen, behind = super().raiser(flag), {flag}, self._behind(flag)
        while behind is not None and behind not in seen:
            line += f", which waits for {behind}; {super().raiser(behind)}"
            seen.add(behind)
            behind = self._behind(behind)
        return line

    def _behind(self, flag: Flag) -> Flag | None:
        """The flag that the lane which advances this one waits for in this call; None where it has all that it needs."""
        for lane in (lane for lanes in self.schedule.ranks for lane in lanes):
            signals = [at for at, step in enumerate(lane.steps) if flag in advances(step)]
            for wait in (wait for step in lane.steps[: max(signals, default=-1) + 1] for wait in waits(step)):
                needed = self._program.absolute(self.epoch, wait)
                if self._words[wait.flag.rank].load(self.slots[wait.flag]) < needed:
                    return wait.flag
        return None

    def signal(self, flag: Flag, value: int) -> None:
        self._words[flag.rank].store(self.slots[flag], value)

    def gate_address(self, flag: Flag, where: Where) -> int:
        return self._flag_addresses[flag.rank] + 8 * self.slots[flag]

    def count_address(self, flag: Flag) -> int:
        return self._flag_addresses[flag.rank] + 8 * self.slots[flag]

    def gate_need(self, wait: Wait) -> tuple[int, int]:
        first = self._program.absolute(0, wait)
        return self._program.absolute(1, wait) - first, first

    def symmetric(self, rank: int, offset: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        assert self.space.data is not None
        return self.space.data.view(rank, offset, rows, cols, dtype)

    def scratch(self, name: str, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        return self.space.scratch(name, rows, cols, dtype)

    def run(
        self,
        inputs: Inputs,
        *,
        outputs: Outputs | None = None,
        reached: Mapping[str, Sequence[torch.Tensor]] = NOTHING,
        invalidated: Sequence[torch.Tensor] = (),
        spans: list[Span] | None = None,
    ) -> Outputs:
        self.space.reserve(self.layout.nbytes)
        return super().run(inputs, outputs=outputs, reached=reached, invalidated=invalidated, spans=spans)

    def play(self, inputs: Inputs, outputs: Outputs) -> None:
        if self.ragged is not None:
            self.ragged.check_before(inputs["a"][0])
        self._program.run(self.epoch, self.bind(inputs, outputs))

    def fused(self, step: Gemm | Reduce | Lookup, bindings: Bindings, epoch: int, where: Where) -> bool:
        kernel = self.kernels.get(id(step))
        if kernel is None or not kernel.runs(bindings):
            return False
        kernel.launch(bindings, epoch, silent=False, tries=self.space.tries, sms=INTERPRETED_BLOCKS)
        try:
            kernel.raise_if_late(str(where), self.raiser)
        except WaitTimeout:
            self.rank_group.check_peers()
            raise
        return True

    def pushed(self, where: Where, bindings: Bindings) -> bool:
        push = self.pushes.get((where.lane, where.position))
        if push is not None:
            push.launch(bindings, silent=False, sms=INTERPRETED_BLOCKS)
        return push is not None

    def fused_collective(self, where: Where, bindings: Bindings) -> None:
        kernel = self.fused_collectives[where.lane, where.position]
        kernel.launch(bindings, silent=False, tries=self.space.tries)
        kernel.raise_if_late(self.rank_group.check_peers)

    def ragged_kernel(self, step: Step, where: Where, bindings: Bindings) -> bool:
        if self.ragged is not None:
            self.ragged.launch(step, where, bindings)
        return self.ragged is not None

    @property
    def row_counts(self) -> RowCounts:
        assert self._row_counts is not None, "the schedule of a problem whose row counts are known"
        return self._row_counts

    def refuse(self, why: str) -> None:
        self.refused = ValueError(why)

    def matmul(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None:
        # A float32 result is not rounded to the dtype of the operands on the way.
        wide = torch.promote_types(b.dtype, out.dtype)
        a, b = a.to(wide), b.to(wide)
        if out.dtype == a.dtype and not accumulate:
            torch.mm(a, b, out=out)
        elif accumulate:
            out += torch.mm(a, b)
        else:
            out.copy_(torch.mm(a, b))

    def collective(self, step: Collective, src: torch.Tensor, dst: torch.Tensor, where: Where) -> None:
        """Every rank puts its source into shared memory, waits for the others, reads theirs, and waits for them again. On
        several nodes every rank sends its source to all others."""
        wire = self._wire
        if wire:
            staged = [
                torch.empty(self._staged_shape(step, rank), dtype=self.dtype) for rank in range(self.rank_group.world_size)
            ]
            wire.share(src, staged, where)
        else:
            staged = [self._staged(step, rank) for rank in range(self.rank_group.world_size)]
            staged[self.rank].copy_(src)
            self._meet(where)
        mine = self.schedule.problem.shards
        if step.op == "all_to_all_columns":
            for cols, pooled in zip(self.schedule.problem.blocks, staged, strict=True):
                dst[:, slice(*cols)].copy_(pooled[slice(*mine[self.rank])])
        elif step.op == "all_gather":
            for (low, high), shard in zip(mine, staged, strict=True):
                dst[low:high].copy_(shard)
        elif step.op == "all_to_all":
            for src_rank, source in enumerate(staged):
                low, high = self.schedule.problem.arrivals(src_rank, self.rank)
                dst[low:high].copy_(source[slice(*mine[self.rank])])
        else:
            rows = slice(*mine[self.rank]) if step.op == "reduce_scatter" else slice(None)
            total = staged[0][rows].to(torch.float32, copy=True)
            for partial in staged[1:]:
                total += partial[rows]
            dst.copy_(total / step.divide_by if step.divide_by != 1 else total)
        if not wire:
            self._meet(where)

    def send_receive(self, step: SendReceive, bindings: Bindings, where: Where) -> None:
        assert self._wire, f"{where} on one node"
        sends = [(bindings.view(send.src), send.to) for send in step.sends]
        self._wire.exchange(sends, [(bindings.view(got.dst), got.source) for got in step.receives], where)

    def _staged(self, step: Collective, rank: int) -> torch.Tensor:
        """The shared memory into which a rank puts its source."""
        return self.symmetric(rank, self.layout.staging, *self._staged_shape(step, rank), self.dtype)

    def _staged_shape(self, step: Collective, rank: int) -> tuple[int, int]:
        """Of a rank's source: its own shard's rows for an all-gather, else all rows."""
        problem = self.schedule.problem
        low, high = problem.shards[rank]
        rows = high - low if step.op == "all_gather" else step.src.shape[0]
        left, right = problem.blocks[rank] if step.op == "all_to_all_columns" else step.src.cols
        return rows, right - left

    def _meet(self, where: Where) -> None:
        """Wait until every rank has come here: a barrier on a word of each."""
        self._meetings += 1
        last = self._words[self.rank].count - 1
        self._words[self.rank].store(last, self._meetings)
        for rank, words in self._words.items():
            self.rank_group.until(
                lambda w=words: w.load(last) >= self._meetings,  # type: ignore[misc]
                lambda r=rank, w=words: (  # type: ignore[misc]
                    f"{where}: meet[0]@{r}: expected {self._meetings}, seen {w.load(last)}; rank {r} raises it"
                ),
            )

    def run_lanes(self, lanes: Sequence[tuple[Lane, Callable[[], None]]]) -> None:
        """Run the compute lane here, and the others on their threads. Returns when all have ended; raises the first error.

        Lanes of blocks that are interpreted kernels run here too, before all others.
        """
        pushed = {name for name, _ in self.pushes}
        first = [item for item in lanes if item[0].kind == "blocks" and item[0].name in pushed]
        for _, work in first:
            self._guarded(work)()
        lanes = sorted((item for item in lanes if item not in first), key=lambda item: item[0].kind != "compute")
        started = [self.space.thread(lane.name) for lane, _ in lanes[1:]]
        for thread, (_, work) in zip(started, lanes[1:], strict=True):
            thread.start(self._guarded(work))
        errors: list[BaseException | None] = []
        try:
            for _, work in lanes[:1]:
                self._guarded(work)()
        except BaseException as error:
            errors.append(error)
        errors += [thread.join() for thread in started]
        raised = [error for error in errors if error is not None]
        if raised:
            # A lane that stopped because another one failed only repeats its error: raise the reason itself.
            raise next((e for e in raised if e is self.rank_group.broken), raised[0])

    def _guarded(self, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except PeerLost:
                raise
            except BaseException as error:
                raise self.rank_group.fail(error) from None

        return run

    def record(self, where: Where, work: Callable[[], None]) -> None:
        if self.spans is None:
            work()
            return
        start = time.perf_counter_ns()
        work()
        end = time.perf_counter_ns()
        self.spans.append(span(self.schedule, self.rank, where.lane, where.step, start / 1e3, end / 1e3))
