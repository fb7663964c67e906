"""Runs one rank's lanes of a Schedule with torch operations. What differs between devices is behind `Device`.

    Program(schedule, device)         once: flag values, step by step
    Program.run(epoch, bindings)      each call: every lane, on the device's lanes

A step's arithmetic is the same everywhere: matmuls by torch.mm, partial sums in float32, one rounding at the end. Parts of
a GEMM that share no gate and no count are multiplied together; a gated part is multiplied when its gates open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch

from weft.problem import Span1D
from weft.schedule import Collective, Copy, Flag, Gemm, Lane, Part, Reduce, Region, Schedule, Signal, Step, Sum, Wait, advances

Columns = Sequence[tuple[torch.Tensor, Span1D]]
"""Matrices side by side: each with the columns of the buffer that it holds."""


class Device(Protocol):
    """What an executor adds to torch: flags, collectives, and lanes that run beside each other."""

    rank: int

    def wait(self, flag: Flag, value: int, where: Where) -> None: ...

    def signal(self, flag: Flag, value: int) -> None: ...

    def collective(self, step: Collective, src: torch.Tensor, dst: torch.Tensor, where: Where) -> None: ...

    def matmul(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None: ...

    def fused(self, step: Gemm | Reduce, bindings: Bindings, epoch: int, where: Where) -> bool:
        """Run a step as one kernel, gates and counts included; False if this device multiplies it part by part."""
        ...

    def run_lanes(self, lanes: Sequence[tuple[Lane, Callable[[], None]]]) -> None: ...

    def record(self, where: Where, work: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class Where:
    """A step of this rank, for messages and spans."""

    rank: int
    lane: str
    position: int
    step: Step

    def __str__(self) -> str:
        return f"rank {self.rank}, lane {self.lane}, step {self.position} ({self.step})"


@dataclass(slots=True)
class Bindings:
    """The tensors of one call: by (buffer, rank), the matrices side by side that make up the buffer."""

    tensors: dict[tuple[str, int], Columns] = field(default_factory=dict)

    def bind(self, buffer: str, rank: int, *matrices: torch.Tensor) -> None:
        columns, at = [], 0
        for matrix in matrices:
            columns.append((matrix, (at, at + matrix.shape[1])))
            at += matrix.shape[1]
        self.tensors[buffer, rank] = columns

    def view(self, region: Region) -> torch.Tensor:
        """The region as one strided matrix; it must lie within one of the matrices side by side."""
        ((view, _),) = self.pieces(region)
        return view

    def pieces(self, region: Region) -> Columns:
        """The region cut at the borders of its matrices: (view, columns relative to the region)."""
        rows, (low, high) = slice(*region.rows), region.cols
        columns = self.tensors[region.buffer, region.rank]
        if len(columns) == 1:
            return [(columns[0][0][rows, low:high], (0, high - low))]
        cut = [(t, first, max(low, first), min(high, last)) for t, (first, last) in columns]
        return [(t[rows, lo - first : hi - first], (lo - low, hi - low)) for t, first, lo, hi in cut if hi > lo or low == high]


class Program:
    """One rank's side of a schedule, ready to run call after call.

    growth: by flag, how far one advance moves its word, where that is not one (kernels count tiles).
    """

    def __init__(self, schedule: Schedule, device: Device, growth: Mapping[Flag, int] | None = None) -> None:
        self.schedule, self.device = schedule, device
        self._base: Mapping[Flag, int] = schedule.signals_per_call
        self._growth = growth or {}
        self._ordinals = self._number_signals()

    def _number_signals(self) -> dict[tuple[str, int], list[int]]:
        """The values, within a call, that each step's advances bring their flags to."""
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

    def growth_of(self, flag: Flag) -> int:
        """How far one advance moves the flag's word."""
        return self._growth.get(flag, 1)

    def absolute(self, epoch: int, wait: Wait) -> int:
        """The word's value that a wait of this epoch needs."""
        return (epoch * self._base.get(wait.flag, 0) + wait.at_least) * self.growth_of(wait.flag)

    def values(self, epoch: int, lane: str, position: int, step: Step) -> list[tuple[Flag, int]]:
        """(flag, value to store) for each advance of a step."""
        advanced = zip(advances(step), self._ordinals.get((lane, position), ()), strict=True)
        return [(flag, (epoch * self._base[flag] + n) * self.growth_of(flag)) for flag, n in advanced]


class _LaneRun:
    """One lane in one call."""

    def __init__(self, program: Program, epoch: int, bindings: Bindings, lane: Lane) -> None:
        self.program, self.epoch, self.bindings, self.lane = program, epoch, bindings, lane
        self.device = program.device

    def run(self) -> None:
        for position, step in enumerate(self.lane.steps):
            where = Where(self.device.rank, self.lane.name, position, step)
            self.device.record(where, lambda s=step, w=where: self._step(s, w))  # type: ignore[misc]

    def _step(self, step: Step, where: Where) -> None:
        if isinstance(step, Wait):
            self._wait(step, where)
        elif isinstance(step, Signal):
            self._advance(where, 0)
        elif isinstance(step, Copy):
            for (dst, _), (src, _) in zip(self.bindings.pieces(step.dst), self.bindings.pieces(step.src), strict=True):
                dst.copy_(src)
        elif isinstance(step, Gemm):
            self._gemm(step, where)
        elif isinstance(step, Reduce):
            self._reduce(step, where)
        else:
            self._collective(step, where)

    def _wait(self, wait: Wait, where: Where) -> None:
        value = self.program.absolute(self.epoch, wait)
        if value > 0:
            self.device.wait(wait.flag, value, where)

    def _advance(self, where: Where, nth: int) -> None:
        self.device.signal(*self.program.values(self.epoch, where.lane, where.position, where.step)[nth])

    def _gemm(self, step: Gemm, where: Where) -> None:
        if self.device.fused(step, self.bindings, self.epoch, where):
            return
        counts = 0
        for group in _groups(step.parts):
            for gate in group[0].gates:
                self._wait(gate, where)
            self._multiply(step, group)
            if group[-1].count is not None:
                self._advance(where, counts)
                counts += 1

    def _multiply(self, step: Gemm, parts: Sequence[Part]) -> None:
        """The parts as one matmul; rows that do not lie together are gathered before it and scattered after it."""
        a = self._rows([p.a for p in parts])
        adjacent = _adjacent([p.out for p in parts])
        for b, cols in self.bindings.pieces(step.b):
            outs = [self.bindings.view(_columns(p.out, cols)) for p in parts] if adjacent is None else []
            if adjacent is not None:
                out = self.bindings.view(_columns(adjacent, cols))
                self.device.matmul(a, b, out, accumulate=step.accumulate)
            elif step.accumulate:
                for out, rows in zip(outs, torch.split(a, [o.shape[0] for o in outs]), strict=True):
                    self.device.matmul(rows, b, out, accumulate=True)
            else:
                product = torch.empty(a.shape[0], b.shape[1], dtype=outs[0].dtype, device=a.device)
                self.device.matmul(a, b, product, accumulate=False)
                for out, rows in zip(outs, torch.split(product, [o.shape[0] for o in outs]), strict=True):
                    out.copy_(rows)

    def _rows(self, regions: Sequence[Region]) -> torch.Tensor:
        adjacent = _adjacent(regions)
        return self.bindings.view(adjacent) if adjacent else torch.cat([self.bindings.view(r) for r in regions])

    def _reduce(self, step: Reduce, where: Where) -> None:
        if self.device.fused(step, self.bindings, self.epoch, where):
            return
        counts = 0
        for part in step.parts:
            for gate in part.gates:
                self._wait(gate, where)
            self._sum(part, step.divide_by)
            if part.count is not None:
                self._advance(where, counts)
                counts += 1

    def _sum(self, part: Sum, divide_by: int) -> None:
        for out, cols in self.bindings.pieces(part.out):
            total = self.bindings.view(_columns(part.srcs[0], cols)).to(torch.float32, copy=True)
            for src in part.srcs[1:]:
                total += self.bindings.view(_columns(src, cols))
            if divide_by != 1:
                total /= divide_by
            out.copy_(total)

    def _collective(self, step: Collective, where: Where) -> None:
        self.device.collective(step, self.bindings.view(step.src), self.bindings.view(step.dst), where)


def _groups(parts: Sequence[Part]) -> list[list[Part]]:
    """Consecutive parts that may be multiplied together: none waits, or counts, in between."""
    groups: list[list[Part]] = []
    for part in parts:
        if groups and not part.gates and groups[-1][-1].count is None:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _adjacent(regions: Sequence[Region]) -> Region | None:
    """The one region that they make up if their rows follow each other, else None."""
    first, last = regions[0], regions[-1]
    for one, next_one in pairwise(regions):
        if (one.buffer, one.rank, one.cols, one.rows[1]) != (next_one.buffer, next_one.rank, next_one.cols, next_one.rows[0]):
            return None
    return Region(first.buffer, first.rank, (first.rows[0], last.rows[1]), first.cols)


def _columns(region: Region, cols: Span1D) -> Region:
    """Columns of a region, counted from its own first."""
    low = region.cols[0]
    return Region(region.buffer, region.rank, region.rows, (low + cols[0], low + cols[1]))
