"""The CPU executor runs a Schedule on CPUs, with one process for each rank.

Symmetric buffers are POSIX shared memory that every rank maps. A region of a peer is a tensor over the peer's memory. The words
of flags are in such memory, too. They are stored with release and loaded with acquire semantics. A rank issues the launches
that a GPU would (weft.runtime.launch_plan). The compute lane runs on the caller's thread. Every other lane is a thread, so that
a copy lane really runs concurrently with the matmuls: torch releases the interpreter lock while it works. Under Triton's
interpreter, lanes of blocks that are kernels run on the caller's thread, before all others.

    caller's thread (compute)       thread (copy)
    launches ...                    launches ...
    signal made  ---------------->  wait made, lower it
    join  <-----------------------  end                 a call returns when all lanes of the rank have ended

On several nodes, ranks share memory with those of their own node. Messages and collectives go through gloo
(weft.runtime.host_resources).

All schedules of a process group share one piece of memory for data (weft.comm.symmetric_heap), which grows when one of them
needs more. Each schedule has words of its own. The data can be shared because on CPUs every call waits until all ranks have
begun it (`RankGroup.agree_on_call` in a first call, `RankGroup.await_same_call` in a later one). A rank that has begun a call
has ended the previous one, and no longer reads what another schedule put there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import torch

from weft.comm.symmetric_heap import HostAllocation
from weft.compat.dispatch import multiplies
from weft.compat.streams import Word
from weft.core.errors import PeerLost, WaitTimeout
from weft.core.problem import RaggedProblem, Scaling
from weft.core.schedule import (
    Collective,
    Flag,
    FusedCollective,
    Lane,
    Push,
    Region,
    Schedule,
    SendReceive,
    Step,
    signalled_flags,
    waits,
)
from weft.core.work import span
from weft.runtime.bindings import Bindings, FactorScales, Inputs, Outputs, Where
from weft.runtime.bound import BoundProgram, ScratchName
from weft.runtime.host_resources import INTERPRETED_BLOCKS, HostResources, HostRows
from weft.runtime.launches import FlagOperations, IssuedCall, Launch, StepKernel
from weft.runtime.network import may_wait_for
from weft.runtime.products import multiply_dequantised, quantise

WAIT_DONE = 1 << 30
"""Bit that is set in a lane's progress word once the wait at that step is over."""


class HostProgram(BoundProgram):
    """A HostProgram runs a schedule on one CPU rank.

    Its words in shared memory are the flags, the progress of each lane, and a counter for the barriers of collectives.
    """

    sms_for_kernels = sms_for_pushes = INTERPRETED_BLOCKS

    def __init__(self, resources: HostResources, schedule: Schedule) -> None:
        self._pieces: list[HostAllocation] = []
        self.resources = resources
        super().__init__(resources, schedule)
        schedule = self.schedule  # without a kernel for it, a FusedCollective has been replaced by its simpler steps
        self._choose_lanes_that_run_first()
        moving = any(isinstance(kernel.where.step, (Push, FusedCollective)) for kernel in self.kernels.values())
        self._contiguous = moving or bool(self.rank_group.nodes)
        self._lane_names = [lane.name for lane in schedule.ranks[self.rank]]
        scaled = schedule.problem.scaling is not None
        self._widens = "b" in schedule.buffer and not (scaled or multiplies(self.dtype) or resources.runs_kernels(self.dtype))
        """True if matrices b are converted to float32, because this CPU does not multiply their dtype."""
        lanes = [[lane.name for lane in lanes] for lanes in schedule.ranks]
        self._progress = [{name: self.flags.words + at for at, name in enumerate(names)} for names in lanes]
        """The word with the progress of each lane, by rank and lane. It is 0 until the lane reaches a step of this call that
        may wait. Then it is the position of that step plus 1, with WAIT_DONE once the wait is over."""
        self._count = self.flags.words + max(map(len, lanes), default=0) + 1
        self._memory = resources.heap.allocate(8 * self._count)
        self.words = {rank: self._memory.words(rank, self._count) for rank in self._memory.ranks}
        self._addresses = dict(zip(self._memory.ranks, self._memory.addresses, strict=True))
        self._waiter = {slot: key for key, slot in self.flags.slot.items() if key[0].rank == self.rank}
        """The flag, and the lane and position of the step that waits for it, by word of this rank."""
        for slot, value in self.flags_of_previous_calls():
            self.words[self.rank].store(slot, value)
        self._barriers = 0
        self._waiting: dict[str, Callable[[], str]] = {}
        self._wire = resources.wire if self.rank_group.nodes else None
        self._rows: HostRows | None = None
        self._bound: tuple[HostAllocation | None, Bindings] | None = None
        """The bindings of all tensors except the caller's, and the memory for data that they refer to."""
        if isinstance(schedule.problem, RaggedProblem) and self.ragged is None:
            self._rows = HostRows(schedule.problem, self.rank, resources.heap)

    def _choose_lanes_that_run_first(self) -> None:
        """Choose the lanes of blocks that run before all other lanes (`_run_lanes`).

        Triton interprets one kernel at a time in a process, so lanes of blocks whose pushes are kernels run first. A lane that
        waits for another lane of this call, or for peers, cannot run first. Its pushes lose their kernels and are copied part
        by part. Flags of the previous call are there already: a call begins when all ranks have begun it.
        """
        late = {
            lane.name
            for lane in self.schedule.ranks[self.rank]
            if lane.kind == "blocks" and any(_waits_in_call(step) for step in lane.steps)
        }
        pushes = [place for place, kernel in self.kernels.items() if isinstance(kernel.where.step, Push)]
        for place in pushes:
            if place[0] in late:
                del self.kernels[place]
        blocks = {lane.name for lane in self.schedule.ranks[self.rank] if lane.kind == "blocks"}
        self._first = {lane for lane, _ in pushes} & blocks - late
        """The lanes that run before all other lanes."""

    def prepared(self, inputs: Inputs) -> Inputs:
        if not (self._contiguous or self._widens):
            return inputs
        found = dict(inputs)
        for name, some in inputs.items():
            if name != "b" and self._contiguous:
                found[name] = [one.contiguous() for one in some]
            elif name == "b" and self._widens:
                found[name] = [one.float() for one in some]
        return found

    def close(self) -> None:
        for piece in (self._memory, *self._pieces):
            self.resources.heap.free(piece)
        self._give_mailboxes_back()
        if self._rows is not None:
            self._rows.close()

    def mailbox(self, nbytes: int) -> tuple[list[int], torch.Tensor]:
        self._pieces.append(self.resources.heap.allocate(nbytes))
        return self._pieces[-1].addresses, self._pieces[-1].local[:nbytes]

    @property
    def submitter(self) -> HostFlags:
        return HostFlags(self)

    def progress_word(self, where: Where) -> Word:
        return Word("progress", self._address(self.rank, self._progress[self.rank][where.lane]), where.position + 1)

    def waiters(self, flag: Flag) -> list[int]:
        return [self._address(flag.rank, slot) for slot in self.flags.slots[flag]]

    def gate_address(self, flag: Flag, where: Where) -> int:
        return self._address(flag.rank, self.flags.slot[flag, where.lane, where.position])

    def _address(self, rank: int, slot: int) -> int:
        return self._addresses[rank] + 8 * slot

    def word(self, address: int) -> tuple[int, int]:
        """Return the rank whose word has this address, and the word's number on that rank."""
        rank = next(rank for rank, first in self._addresses.items() if first <= address < first + 8 * self._count)
        return rank, (address - self._addresses[rank]) // 8

    def signal(self, rank: int, slot: int, value: int) -> None:
        """Raise a word of a rank."""
        self.words[rank].store(slot, value)

    def wait(self, slot: int, value: int) -> None:
        """Wait, bounded, until a word of this rank has reached a value.

        The error also names what the other lanes wait for, because this lane may depend on them.
        """
        words = self.words[self.rank]
        if words.load(slot) >= value:
            return
        flag, lane, position = self._waiter[slot]
        steps = next(one.steps for one in self.schedule.ranks[self.rank] if one.name == lane)
        where = Where(self.rank, lane, position, steps[position])

        def missing() -> str:
            return f"{where}: {flag}: expected {value}, seen {words.load(slot)}; {self.raiser(flag)}"

        def explain() -> str:
            others = [other() for name, other in tuple(self._waiting.items()) if name != lane]
            return "\n".join((missing(), *others))

        self._waiting[lane] = missing
        try:
            self.rank_group.wait_until(lambda: words.load(slot) >= value, explain)
        finally:
            del self._waiting[lane]

    def raiser(self, flag: Flag) -> str:
        """Return who raises a flag, and what that lane waits for in turn, from rank to rank. The last rank named is late."""
        line, seen, behind = super().raiser(flag), {flag}, self._behind(flag)
        while behind is not None and behind not in seen:
            line += f", which waits for {behind}; {super().raiser(behind)}"
            seen.add(behind)
            behind = self._behind(behind)
        return line

    def _behind(self, flag: Flag) -> Flag | None:
        """Return the flag for which the raiser of this flag waits now, or None if it does not wait or has not begun."""
        for rank, lanes in enumerate(self.schedule.ranks):
            for lane in lanes:
                raises = any(flag in signalled_flags(step) for step in lane.steps)
                if not raises or rank not in self.words:
                    continue
                come_to = self.words[rank].load(self._progress[rank][lane.name])
                if come_to == 0 or come_to & WAIT_DONE:
                    continue
                for where, wait in may_wait_for(rank, lane, come_to - 1):
                    slot = self.flags.slot[wait.flag, lane.name, where.position]
                    if self.words[rank].load(slot) < self.signal_value(wait.flag):
                        return wait.flag
        return None

    def symmetric(self, rank: int, offset: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        assert self.resources.data is not None
        return self.resources.data.view(rank, offset, rows, cols, dtype)

    def scratch(self, name: ScratchName, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        return self.resources.scratch(name, rows, cols, dtype)

    def own_bindings(self) -> Bindings:
        """Return the bindings of all tensors except the caller's. They are rebuilt when the memory for data grows and moves."""
        if self._bound is None or self._bound[0] is not self.resources.data:
            self._bound = self.resources.data, self._fixed_bindings()
        return self._bound[1]

    def copier(self, src: Region, dst: Region) -> Callable[[Bindings, int], None]:
        scaling, becomes = self.schedule.problem.scaling, self.schedule.buffer[dst.buffer].operand
        if scaling is not None and becomes == "a" and not self.schedule.buffer[src.buffer].operand:
            return partial(_quantise, src, dst, scaling)

        def run(bindings: Bindings, stream: int) -> None:
            if bindings.scalings:
                for there, here in zip(bindings.scale_views(dst), bindings.scale_views(src), strict=True):
                    there.copy_(here)
            for (there, _), (here, _) in zip(bindings.pieces(dst), bindings.pieces(src), strict=True):
                # In a call that works in place, both may be the same memory, which another lane may be reading.
                if there.data_ptr() != here.data_ptr():
                    there.copy_(here)

        return run

    def multiply(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulate: bool, scales: FactorScales | None = None
    ) -> None:
        """Compute out = a @ b, or out += a @ b."""
        if scales is not None:
            multiply_dequantised(a, b, out, scales)
            return
        # A float32 result is not rounded to the dtype of the operands.
        wide = torch.promote_types(b.dtype, out.dtype)
        a, b = a.to(wide), b.to(wide)
        if out.dtype == a.dtype and not accumulate:
            torch.mm(a, b, out=out)
        elif accumulate:
            out += torch.mm(a, b)
        else:
            out.copy_(torch.mm(a, b))

    def collective(self, step: Collective, where: Where) -> Callable[[IssuedCall], None]:
        def run(call: IssuedCall) -> None:
            self._collect(step, call.bindings.view(step.src), call.bindings.view(step.dst), where)
            for src, dst in zip(call.bindings.scale_views(step.src), call.bindings.scale_views(step.dst), strict=True):
                self._collect(step, src, dst, where)

        return run

    def messages(self, step: SendReceive, where: Where) -> Callable[[IssuedCall], None]:
        def run(call: IssuedCall) -> None:
            assert self._wire, f"{where} on one node"
            self._wire.exchange(*call.bindings.messages(step), where)

        return run

    @property
    def row_counts(self) -> HostRows:
        return self._rows if self._rows is not None else super().row_counts

    def play(self, inputs: Inputs, outputs: Outputs) -> None:
        if self.ragged is not None:
            self.ragged.check_before(inputs["a"][0])
        self.resources.reserve(self.layout.nbytes)
        for slot in self._progress[self.rank].values():
            self.words[self.rank].store(slot, 0)
        bindings = self.bind(inputs, outputs)
        plan, matmuls = self.plan_of(bindings), dict.fromkeys(self._lane_names, self.multiply)
        call = IssuedCall(bindings=bindings, on_kernel_done=self._raise_if_late, matmuls=matmuls)
        if self.spans is None:
            self._run_lanes([(lane, partial(_issue, launches, call)) for lane, launches in plan.by_lane])
        else:
            lanes = sorted(plan.lanes, key=lambda one: one[0].kind != "compute")
            self._run_lanes([(lane, partial(self._run_timed, launches, call)) for lane, launches in lanes])
        if self._rows is not None and self._rows.refused:
            self.refused = ValueError(self._rows.refused)

    def _raise_if_late(self, kernel: StepKernel) -> None:
        """Raise WaitTimeout if a wait of a kernel that has ended reached its bound, or PeerLost if a peer was lost."""
        try:
            kernel.raise_if_late(self.raiser)
        except WaitTimeout:
            self.rank_group.check_peers()
            raise

    def _run_timed(self, launches: Sequence[Launch], call: IssuedCall) -> None:
        """Issue the launches of a lane, and record when each step ran."""
        times: dict[Where, tuple[int, int]] = {}
        for launch in launches:
            start = time.perf_counter_ns()
            launch.issue(call, 0)
            times[launch.where] = times.get(launch.where, (start, 0))[0], time.perf_counter_ns()
        assert self.spans is not None
        for where, (start, end) in times.items():
            self.spans.append(span(self.schedule, self.rank, where.lane, where.step, start / 1e3, end / 1e3))

    def _collect(self, step: Collective, src: torch.Tensor, dst: torch.Tensor, where: Where) -> None:
        """Run a collective.

        Every rank copies its source to shared memory, waits for the others, reads their sources, and waits for the others
        again. On several nodes, every rank sends its source to all others.
        """
        wire = self._wire
        if wire:
            staged = [
                torch.empty(self._staged_shape(step, rank, src), dtype=src.dtype) for rank in range(self.rank_group.world_size)
            ]
            wire.share(src, staged, where)
        else:
            staged = [self._stage(step, rank, src) for rank in range(self.rank_group.world_size)]
            staged[self.rank].copy_(src)
            self._barrier(where)
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
            self._barrier(where)

    def _stage(self, step: Collective, rank: int, src: torch.Tensor) -> torch.Tensor:
        """Return the shared memory to which a rank copies its source. src: this rank's source, of the same dtype."""
        return self.symmetric(rank, self.layout.staging, *self._staged_shape(step, rank, src), src.dtype)

    def _staged_shape(self, step: Collective, rank: int, src: torch.Tensor) -> tuple[int, int]:
        """Return the shape of a rank's source: the rows of its shard for an all-gather, else all rows."""
        problem = self.schedule.problem
        low, high = problem.shards[rank]
        rows = high - low if step.op == "all_gather" else step.src.shape[0]
        left, right = problem.blocks[rank] if step.op == "all_to_all_columns" else (0, src.shape[1])
        return rows, right - left

    def _barrier(self, where: Where) -> None:
        """Wait until every rank has reached this barrier, which is a word of each rank."""
        self._barriers += 1
        last = self.words[self.rank].count - 1
        self.words[self.rank].store(last, self._barriers)
        for rank, words in self.words.items():
            self.rank_group.wait_until(
                lambda w=words: w.load(last) >= self._barriers,  # type: ignore[misc]
                lambda r=rank, w=words: (  # type: ignore[misc]
                    f"{where}: barrier[0]@{r}: expected {self._barriers}, seen {w.load(last)}; rank {r} raises it"
                ),
            )

    def _run_lanes(self, lanes: Sequence[tuple[Lane, Callable[[], None]]]) -> None:
        """Run the first lane on this thread, and the others on their threads. Return when all have ended, or raise the first
        error.

        Lanes of blocks that are interpreted kernels also run on this thread, before all others.
        """
        if self._first:
            for lane, work in lanes:
                if lane.name in self._first:
                    self._run_guarded(work)
            lanes = [item for item in lanes if item[0].name not in self._first]
        started = []
        for lane, work in lanes[1:]:
            started.append(self.resources.thread(lane.name))
            started[-1].start(partial(self._run_guarded, work))
        errors: list[BaseException] = []
        try:
            for _, work in lanes[:1]:
                self._run_guarded(work)
        except BaseException as error:
            errors.append(error)
        for thread in started:
            if (raised := thread.join()) is not None:
                errors.append(raised)
        if errors:
            # A lane that stopped because another one failed only repeats its error, so raise the original error.
            raise next((error for error in errors if error is self.rank_group.broken), errors[0])

    def _run_guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except PeerLost:
            raise
        except BaseException as error:
            raise self.rank_group.fail(error) from None


def _waits_in_call(step: Step) -> bool:
    return isinstance(step, (Collective, SendReceive)) or any(not wait.on_previous_call for wait in waits(step))


def _quantise(src: Region, dst: Region, scaling: Scaling, bindings: Bindings, stream: int) -> None:
    quantise(bindings.view(src), bindings.view(dst), bindings.scale_views(dst)[0], scaling)


class HostFlags:
    """HostFlags does flag operations at once, on the thread of the lane that issues them."""

    def __init__(self, program: HostProgram) -> None:
        self._program = program

    def prepare(self, operations: FlagOperations) -> Callable[[int], None]:
        """Return a function that does these operations."""
        todo = [self._operation(word) for word in operations.words]
        if any(word.kind == "lower" for word in operations.words):
            comes = [word for word in operations.words if word.kind == "progress"] or [
                self._program.progress_word(operations.where)
            ]
            todo.append(self._operation(Word("progress", comes[-1].address, comes[-1].value | WAIT_DONE)))

        def run(stream: int) -> None:
            for call, target in todo:
                call(target)

        return run

    def _operation(self, word: Word) -> tuple[Callable[[Any], None], object]:
        """Return the call of a method, and the object whose method it is."""
        program = self._program
        rank, slot = program.word(word.address)
        if word.kind == "wait":
            return methodcaller("wait", slot, word.value), program
        if word.kind == "signal":
            return methodcaller("signal", rank, slot, word.value), program
        return methodcaller("store", slot, word.value), program.words[rank]  # progress or lower

    def aside(self, stream: int) -> int:
        """Return the same stream, because a signal is done before its lane continues."""
        return stream


def _issue(launches: Sequence[Launch], call: IssuedCall) -> None:
    for launch in launches:
        launch.issue(call, 0)
