"""Random schedules: small valid ones of every family, and ones of synchronisation alone, to test what is said of deadlock."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from damage import map_parts, map_steps, with_steps

from weft.core.fused_collective import spelled_out
from weft.core.problem import EXCHANGES, OPS, Problem
from weft.core.schedule import Collective, Copy, Flag, Gemm, Lane, Part, Region, Schedule, Signal, Step, Wait
from weft.schedules import build, names


def random_schedule(rng: random.Random) -> Schedule:
    """A small valid schedule: any operator, family and size, also of extents that divide by nothing or leave ranks empty."""
    op, world_size = rng.choice(OPS), rng.choice((1, 2, 2, 2, 2, 3, 3, 3, 4))
    unit, sizes = rng.choice((1, 1, 1, 2)), ()
    if rng.random() < 0.2 and op not in EXCHANGES:
        sizes = (rng.randrange(1, 4), *(rng.randrange(4) for _ in range(world_size - 1)))
    gather = op == "all_gather_matmul"
    problem = Problem(
        op=op,
        m=rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8)) // unit * unit,
        n=sum(sizes) if sizes and gather else rng.choice((0, 1, 2, 3, 4, 5)),
        k=sum(sizes) if sizes and not gather else rng.choice((1, 2, 3, 4, 5, 6)),
        row_multiple=unit,
        b_sizes=sizes,
        world_size=world_size,
        return_gathered=op in ("all_gather_matmul", "all_to_all_matmul") and rng.random() < 0.3,
        reduce_op="avg" if op == "matmul_reduce_scatter" and rng.random() < 0.3 else "sum",
    )
    chunks = rng.choice((1, 2, 2, 3) if world_size < 4 else (1, 2))
    return spelled_out(build(problem, rng.choice(names(op)), chunks, fan_out=rng.random() < 0.25)).schedule


def random_sync(rng: random.Random) -> Schedule:
    """Steps without data: kernels with gates and counts, copies within a rank, signals and waits, on lanes at random.

    Nothing is computed (the problem has no rows), so that such a schedule is right if and only if it cannot deadlock and
    loses no signal.
    """
    size = rng.choice((1, 1, 2, 2, 3))
    problem = Problem(op="all_gather_matmul", m=0, n=0, k=2, world_size=size)
    names = [(r, i) for r in range(size) for i in range(rng.choice((1, 2, 3, 3)))]
    flags = {lane: [Flag(f"f{lane[0]}{lane[1]}{i}", rng.randrange(size)) for i in range(4)] for lane in names}
    lanes: list[list[Lane]] = [[] for _ in range(size)]
    for rank, index in names:
        # A rank has one lane of kind compute; beside it, copies within the rank are kernels, too.
        kind = rng.choice(("copy", "copy", "copy", "blocks")) if index else "compute"
        heard = [f for found in flags.values() for f in found if f.rank == rank]
        steps = [s for _ in range(rng.randrange(1, 5)) for s in _sync_steps(rng, rank, kind, flags[rank, index], heard)]
        lanes[rank].append(Lane(f"{kind}{index}", kind, tuple(steps)))
    schedule = dataclasses.replace(build(problem, "sequential"), ranks=tuple(map(tuple, lanes)))
    return _only_possible(_once(_with_collective(schedule, rng) if rng.random() < 0.3 else schedule))


def _with_collective(schedule: Schedule, rng: random.Random) -> Schedule:
    """An all-gather of nothing somewhere on every rank, where all have a lane for it."""
    for rank, lanes in enumerate(schedule.ranks):
        able = [i for i, lane in enumerate(lanes) if lane.kind != "copy"]
        if not able:
            return schedule
        index = rng.choice(able)
        steps = list(lanes[index].steps)
        nothing = [Region(name, rank, (0, 0), (0, 2)) for name in ("a", "a_full")]
        steps.insert(rng.randrange(len(steps) + 1), Collective("all_gather", nothing[0], nothing[1]))
        schedule = with_steps(schedule, rank, index, steps)
    return schedule


def _sync_steps(rng: random.Random, rank: int, kind: str, mine: list[Flag], heard: list[Flag]) -> list[Step]:
    nothing, b = Region("a_full", rank, (0, 0), (0, 2)), Region("b", rank, (0, 2), (0, 0))
    here = ("copy", "copy") if kind == "copy" else ("copy", "kernel", "kernel", "kernel")
    what = rng.choice(("wait", "signal", "signal", *here))
    if what == "wait" and heard:
        return [Wait(rng.choice(heard), on_previous_call=rng.random() < 0.25)]
    if what == "kernel" and kind != "copy":
        parts = []
        for count in rng.sample([*mine, None], rng.choice((1, 2))):
            gates = tuple(Wait(rng.choice(heard)) for _ in range(rng.choice((0, 1, 1)))) if heard else ()
            inner = ((1, Wait(rng.choice(heard))),) if heard and rng.random() < 0.3 else ()
            parts.append(Part(nothing, Region("out", rank, (0, 0), (0, 0)), gates, count, inner=inner))
        return [Gemm(b, tuple(parts))]
    return [Copy(nothing, nothing)] if what == "copy" else [Signal(rng.choice(mine))]


def _once(schedule: Schedule) -> Schedule:
    """Without a second signal, or count, of a flag."""
    seen: set[Flag] = set()

    def first(flag: Flag | None) -> bool:
        if flag is None or flag in seen:
            return False
        seen.add(flag)
        return True

    def step(old: Any) -> Any:
        if isinstance(old, Signal):
            return old if first(old.flag) else None
        return map_parts(old, lambda part: part if first(part.count) else dataclasses.replace(part, count=None))

    return map_steps(schedule, step)


def _only_possible(schedule: Schedule) -> Schedule:
    """Without the waits for more signals than there are."""

    def part(old: Any) -> Any:
        possible = {g for g in old.waits if g.on_previous_call or schedule.signals_per_call[g.flag]}
        inner = tuple(each for each in old.inner if each[1] in possible)
        return dataclasses.replace(old, gates=tuple(g for g in old.gates if g in possible), inner=inner)

    def step(old: Any) -> Any:
        if isinstance(old, Wait):
            return old if old.on_previous_call or schedule.signals_per_call[old.flag] else None
        return map_parts(old, part)

    return map_steps(schedule, step)
