"""Runs the lanes of one rank with torch operations, step by step. What differs between devices is behind `Device`.

    Program(schedule, device)         once: flag values, step by step
    Program.run(epoch, bindings)      each call: every lane, on the device's lanes

A part of a GEMM with gates is multiplied once its gates are open; a part with inner gates slice by slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from weft.core.problem import LookupProblem, RaggedProblem
from weft.core.schedule import (
    Collective,
    Copy,
    Flag,
    FusedCollective,
    Gemm,
    GroupedGemm,
    Lane,
    Lookup,
    Part,
    Push,
    Reduce,
    Region,
    Schedule,
    SegmentCopies,
    SegmentCopy,
    SendReceive,
    ShareCounts,
    Signal,
    Step,
    Wait,
    advances,
    waits,
)
from weft.runtime.arithmetic import Sliced, add_up, groups, multiply, multiply_gated
from weft.runtime.bags import look_up
from weft.runtime.bindings import Bindings, Where
from weft.runtime.ragged import RowCounts, RowsOfCall


class Device(Protocol):
    """What an executor adds to torch: flags, collectives, and lanes that run beside each other."""

    rank: int

    def wait(self, flag: Flag, value: int, where: Where) -> None: ...

    def signal(self, flag: Flag, value: int) -> None: ...

    def collective(self, step: Collective, src: torch.Tensor, dst: torch.Tensor, where: Where) -> None: ...

    def send_receive(self, step: SendReceive, bindings: Bindings, where: Where) -> None: ...

    def matmul(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None: ...

    def fused(self, step: Gemm | Reduce | Lookup, bindings: Bindings, epoch: int, where: Where) -> bool:
        """Run a step as one kernel, gates and counts included; False if this device multiplies it part by part."""
        ...

    def pushed(self, where: Where, bindings: Bindings) -> bool:
        """Run a push as one kernel, if this device has it."""
        ...

    def fused_collective(self, where: Where, bindings: Bindings) -> None: ...

    def ragged_kernel(self, step: Step, where: Where, bindings: Bindings) -> bool:
        """Run a step whose row counts live on the device as one kernel, if this device has it."""
        ...

    @property
    def row_counts(self) -> RowCounts:
        """Where the row counts of all ranks lie, for steps that are no kernels."""
        ...

    def refuse(self, why: str) -> None:
        """What all ranks alike are to say after the call."""

    def run_lanes(self, lanes: Sequence[tuple[Lane, Callable[[], None]]]) -> None: ...

    def record(self, where: Where, work: Callable[[], None]) -> None: ...


class Program:
    """One rank's side of a schedule, ready to run call after call.

    growth_of: how far one advance moves a flag's word.
    """

    def __init__(self, schedule: Schedule, device: Device, growth_of: Callable[[Flag], int]) -> None:
        self.schedule, self.device = schedule, device
        self._base: Mapping[Flag, int] = schedule.signals_per_call
        self._growth_of = growth_of
        self._ordinals = self._number_signals()

    def _number_signals(self) -> dict[tuple[str, int], list[int]]:
        """By lane and position of a step, the values that its advances bring their flags to within a call."""
        seen: Counter[Flag] = Counter()
        numbers = {}
        for lane in self.schedule.ranks[self.device.rank]:
            for position, step in enumerate(lane.steps):
                values = []
                for flag in advances(step):
                    seen[flag] += 1
                    values.append(seen[flag])
                if values:
                    numbers[lane.name, position] = values
        return numbers

    def run(self, epoch: int, bindings: Bindings) -> None:
        """Run every lane of this rank once. epoch: calls before this one."""

        def lane_runner(lane: Lane) -> Callable[[], None]:
            return lambda: _LaneRun(self, epoch, bindings, lane).run()

        self.device.run_lanes([(lane, lane_runner(lane)) for lane in self.schedule.ranks[self.device.rank]])

    def absolute(self, epoch: int, wait: Wait) -> int:
        """The word's value that a wait of this epoch needs."""
        return (epoch * self._base.get(wait.flag, 0) + wait.at_least) * self._growth_of(wait.flag)

    def values(self, epoch: int, lane: str, position: int, step: Step) -> list[tuple[Flag, int]]:
        """(flag, value to store) for each advance of a step."""
        advanced = zip(advances(step), self._ordinals.get((lane, position), ()), strict=True)
        return [(flag, (epoch * self._base[flag] + n) * self._growth_of(flag)) for flag, n in advanced]


class _LaneRun:
    """One lane in one call."""

    def __init__(self, program: Program, epoch: int, bindings: Bindings, lane: Lane) -> None:
        self.program, self.epoch, self.bindings, self.lane = program, epoch, bindings, lane
        self.device = program.device
        self._rows: RowsOfCall | None = None

    def run(self) -> None:
        for position, step in enumerate(self.lane.steps):
            where = Where(self.device.rank, self.lane.name, position, step)
            self.device.record(where, lambda s=step, w=where: self._step(s, w))  # type: ignore[misc]

    def _step(self, step: Step, where: Where) -> None:
        if self.device.pushed(where, self.bindings) or self._ran_ragged_kernel(step, where):
            return
        if isinstance(step, Wait):
            self._wait(step, where)
        elif isinstance(step, Signal):
            self._advance(where, 0)
        elif isinstance(step, Copy):
            self._copy(step.src, step.dst)
        elif isinstance(step, Push):
            for nth, part in enumerate(step.parts):
                self._copy(part.src, part.dst)
                self._advance(where, nth)
        elif isinstance(step, Gemm):
            self._gemm(step, where)
        elif isinstance(step, Reduce):
            self._reduce(step, where)
        elif isinstance(step, Lookup):
            self._lookup(step, where)
        elif isinstance(step, FusedCollective):
            self.device.fused_collective(where, self.bindings)
        elif isinstance(step, (ShareCounts, GroupedGemm, SegmentCopies)):
            self._ragged(step, where)
        elif isinstance(step, SendReceive):
            self.device.send_receive(step, self.bindings, where)
        else:
            assert isinstance(step, Collective), "a user's call is none of a bound program"
            self._collective(step, where)

    def _copy(self, src_region: Region, dst_region: Region) -> None:
        for (dst, _), (src, _) in zip(self.bindings.pieces(dst_region), self.bindings.pieces(src_region), strict=True):
            # Where a call works in place, another lane may read meanwhile what would be overwritten with itself.
            if dst.data_ptr() != src.data_ptr():
                dst.copy_(src)

    def _wait(self, wait: Wait, where: Where) -> None:
        value = self.program.absolute(self.epoch, wait)
        if value > 0:
            self.device.wait(wait.flag, value, where)

    def _advance(self, where: Where, nth: int) -> None:
        self.device.signal(*self.program.values(self.epoch, where.lane, where.position, where.step)[nth])

    def _pass_previous(self, step: Gemm | Reduce, where: Where) -> None:
        """Wait for the gates of a kernel on the call before, where the kernel starts, as on GPUs."""
        for wait in dict.fromkeys(wait for wait in waits(step) if not wait.at_least):
            self._wait(wait, where)

    def _gemm(self, step: Gemm, where: Where) -> None:
        self._pass_previous(step, where)
        if self.device.fused(step, self.bindings, self.epoch, where):
            return
        counts = 0
        for group in groups(step.parts):
            for gate in group[0].gates:
                self._wait(gate, where)
            if group[0].inner:
                self._slices(step, group[0], where)
            else:
                multiply(self.bindings, step, group, self.device.matmul)
            if group[-1].count is not None:
                self._advance(where, counts)
                counts += 1

    def _slices(self, step: Gemm, part: Part, where: Where) -> None:
        """A part whose gates are open, each slice behind its inner gate."""
        sliced = Sliced(step, part)
        sliced.multiply(self.bindings, 0, self.device.matmul)
        for number, (_, gate) in enumerate(part.inner, 1):
            self._wait(gate, where)
            sliced.multiply(self.bindings, number, self.device.matmul)

    def _reduce(self, step: Reduce, where: Where) -> None:
        self._pass_previous(step, where)
        if self.device.fused(step, self.bindings, self.epoch, where):
            return
        counts = 0
        for part in step.parts:
            for gate in part.gates:
                self._wait(gate, where)
            add_up(self.bindings, part, step.divide_by)
            if part.count is not None:
                self._advance(where, counts)
                counts += 1

    def _lookup(self, step: Lookup, where: Where) -> None:
        if self.device.fused(step, self.bindings, self.epoch, where):
            return
        problem = self.program.schedule.problem
        assert isinstance(problem, LookupProblem), f"{problem} has no tables"
        counts = 0
        for part in step.parts:
            look_up(self.bindings, part.bags, part.out, problem)
            if part.count is not None:
                self._advance(where, counts)
                counts += 1

    def _collective(self, step: Collective, where: Where) -> None:
        self.device.collective(step, self.bindings.view(step.src), self.bindings.view(step.dst), where)

    def _ran_ragged_kernel(self, step: Step, where: Where) -> bool:
        ragged = isinstance(self.program.schedule.problem, RaggedProblem)
        return ragged and self.device.ragged_kernel(step, where, self.bindings)

    def _ragged(self, step: ShareCounts | GroupedGemm | SegmentCopies, where: Where) -> None:
        """A step whose row counts live on the device: here the host reads them."""
        if isinstance(step, ShareCounts):
            self._rows = self._shared_counts(step, where)
            return
        assert self._rows is not None, "the checker lets no step come before the counts"
        counts = 0
        for part in step.parts:
            for gate in part.gates:
                self._wait(gate, where)
            if isinstance(part, SegmentCopy):
                self._rows.of(part.dst).copy_(self._rows.of(part.src))
            else:
                self._product(self._rows.of(part.a), part.a.expert, self._rows.of(part.out))
            if part.count is not None:
                self._advance(where, counts)
                counts += 1

    def _shared_counts(self, step: ShareCounts, where: Where) -> RowsOfCall:
        counts, (splits,) = self.device.row_counts, self.bindings.loose["splits"]
        ((a, _),) = self.bindings.tensors["a", self.device.rank]
        for nth, flag in enumerate(step.flags):
            counts.write(flag.rank, self.epoch, splits, a.shape[0])
            self._advance(where, nth)
        for gate in step.gates:
            self._wait(gate, where)
        found = counts.read(self.epoch, self.bindings)
        found.finish()
        if found.wrong:
            self.device.refuse(found.wrong)
        return found

    def _product(self, rows: torch.Tensor, expert: int, out: torch.Tensor) -> None:
        (b,) = self.bindings.loose["b"]
        problem = self.program.schedule.problem
        assert isinstance(problem, RaggedProblem), f"{problem} has no experts"
        if problem.gated:
            multiply_gated(rows, b[expert], out, self.device.matmul)
        else:
            self.device.matmul(rows, b[expert], out, accumulate=False)
