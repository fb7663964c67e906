"""Losses of a schedule on real ranks, of this machine's CPU or GPUs: what `weft.planner.signature` predicts, measured.

    whole alone      the two steps of the sequential program, recorded (weft.run)
    pieces alone     each matmul of the schedule by itself, one after the other
    transfers alone  the schedule on a problem whose matmul is next to nothing: the extent that does not travel is cut down
                     to one a rank, so that all rows and columns that travel do
    beside           a recorded call of the schedule: its matmuls' and its copies' spans over the same alone

A matmul whose tiles wait holds its waits in its span, and stores from within a kernel have none: there CIL is not told.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from weft.core.fused_collective import spelled_out
from weft.core.problem import LOOKUP_OPS, Problem
from weft.core.schedule import Gemm, Schedule, steps_of
from weft.core.span import Kind, Span
from weft.planner.signature import Signature
from weft.runtime.ranks import Ranks
from weft.schedules import build, parse
from weft.tools.calibrate.common import gemms
from weft.tools.run import Measured, Round, measure_site

_SEED = 1


def shrunk(problem: Problem) -> Problem:
    """The same rows and columns on the way, next to nothing to multiply.

    Raises ValueError for lookups, whose rows are not multiplied.
    """
    if problem.op in LOOKUP_OPS:
        raise ValueError(f"op is {problem.op}; only matmuls are measured, a lookup's losses are simulated")
    extent = "n" if problem.op in ("all_gather_matmul", "all_to_all_matmul") else "k"
    return replace(problem, **{extent: problem.world_size}, b_sizes=())  # type: ignore[arg-type]


def measured(problem: Problem, spec: str, pool: Ranks) -> Signature:
    """One schedule's losses on the ranks of `pool`. Raises ValueError as `shrunk` does, RankFailed if a rank is lost."""
    schedule = build(problem, *parse(spec))
    alone = pool.run(measure_site, shrunk(problem), spec, _SEED, pool.device)
    beside = pool.run(measure_site, problem, spec, _SEED, pool.device)
    pieces_us = _pieces_us(schedule, pool)
    copies_us = _busy_us(alone, "copy")
    return Signature(
        problem=problem,
        spec=spec,
        where=f"{problem.world_size} {pool.device} ranks",
        total_us=_slowest_us(beside, lambda one: one.overlapped_us),
        computation_us=_slowest_us(beside, lambda one: _sum_us(one.sequential_spans, "gemm")),
        communication_us=_slowest_us(beside, lambda one: _sum_us(one.sequential_spans, "collective")),
        pieces_us=pieces_us,
        transfers_us=_slowest_us(alone, lambda one: one.overlapped_us),
        gemm_cil=_busy_us(beside, "gemm") / pieces_us if pieces_us and not _waits(schedule) else None,
        communication_cil=_busy_us(beside, "copy") / copies_us if copies_us else None,
    )


def _slowest_us(ranks: Sequence[Measured], time_us: Callable[[Round], float]) -> float:
    """The median over rounds of the slowest rank's time."""
    return statistics.median(max(map(time_us, found)) for found in zip(*(one.rounds for one in ranks), strict=True))


def _busy_us(ranks: Sequence[Measured], kind: Kind) -> float:
    """The busiest rank's steps of a kind, in the call that was recorded."""
    return max(_sum_us(one.spans, kind) for one in ranks)


def _sum_us(spans: Iterable[Span], kind: Kind) -> float:
    return sum(span.duration_us for span in spans if span.kind == kind)


def _pieces_us(schedule: Schedule, pool: Ranks) -> float:
    """The matmuls of the busiest rank, each by itself."""
    problem = schedule.problem
    shapes = [_shapes(schedule, rank) for rank in range(problem.world_size)]
    known = sorted({shape for found in shapes for shape in found})
    samples = pool.run(gemms, pool.device, known, problem.dtype)[0]
    us = {sample.key: sample.median_us for sample in samples}
    return float(max(sum(count * us[shape] for shape, count in found.items()) for found in shapes))


def _shapes(schedule: Schedule, rank: int) -> Counter[tuple[int, int, int]]:
    """M, N, K of the rank's matmuls that have elements."""
    steps = steps_of(Gemm, spelled_out(schedule).schedule.ranks[rank])
    shapes = ((sum(part.a.shape[0] for part in step.parts), step.b.shape[1], step.b.shape[0]) for step in steps)
    return Counter(shape for shape in shapes if all(shape))


def _waits(schedule: Schedule) -> bool:
    """Whether a matmul's span may hold a wait."""
    steps = steps_of(Gemm, chain(*spelled_out(schedule).schedule.ranks))
    return any(part.waits for step in steps for part in step.parts)
