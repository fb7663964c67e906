"""Small valid schedules of every family, and changes that know no kind of step: they change what a step consists of."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import damage_messages
import random_schedules
from damage import DAMAGES, Damage, places, step_at, with_step
from families import CASES

import weft
from weft.core.concurrent import ConcurrentProblem
from weft.core.problem import COLLECTIVE_OPS, OPS, CollectiveProblem, ColumnProblem, LookupProblem, Problem, RaggedProblem
from weft.core.schedule import Flag, Region, Schedule, Segment, Wait
from weft.schedules import build, names, unfit

Path = tuple[str | int, ...]
"""Names of fields and places in tuples, from a step inwards."""
CONCURRENT = sorted({spec for op, spec, _ in CASES if op == "concurrent"})


def any_schedule(rng: random.Random) -> Schedule:
    """A small valid one of any operator and family."""
    kind = rng.choice(("matmul", "matmul", "nodes", "fused", "lookup", "columns", "alone", "concurrent", "ragged", "ragged"))
    if kind == "matmul":
        return random_schedules.random_schedule(rng)
    if kind == "nodes":
        return damage_messages.random_schedule(rng)
    if kind == "ragged":
        return weft.schedule.build(_ragged(rng), rng.choice(("fused", "sequential")))
    if kind == "concurrent":
        return _concurrent(rng)
    problem = {"fused": _matmul, "lookup": _lookup, "columns": _columns, "alone": _alone}[kind](rng)
    able = [name for name in names(problem.op) if not unfit(name, problem)]
    whole_sums = ("one_shot", "two_shot", "sequential_stores", "token_split")
    kernels = [name for name in able if name in whole_sums] if kind == "fused" else []
    return build(problem, rng.choice(kernels or able), rng.choice((1, 1, 2)))


def _matmul(rng: random.Random) -> Problem:
    op = rng.choice(OPS)
    norm_eps = 1e-5 if op == "matmul_all_reduce" and rng.random() < 0.5 else None
    sizes = {"m": rng.randrange(1, 7), "n": rng.randrange(1, 7), "k": rng.randrange(1, 4)}
    more: dict[str, Any] = {"norm_eps": norm_eps, "residual_sharded": norm_eps is not None and rng.random() < 0.5}
    if op == "matmul_all_reduce":
        more["addends"] = rng.choice(((), ("residual",), ("bias", "residual")))
    return Problem(op=op, **sizes, world_size=rng.choice((2, 3)), **more)


def _lookup(rng: random.Random) -> LookupProblem:
    dims = tuple(tuple(rng.choice((4, 8)) for _ in range(rng.choice((0, 1, 2)))) for _ in range(rng.choice((2, 3))))
    return LookupProblem.of(batch=rng.randrange(1, 8), dims=dims if any(dims) else ((4,), *dims[1:]), pooling=2)


def _columns(rng: random.Random) -> ColumnProblem:
    size, (m, n, k) = rng.choice((2, 3)), (rng.randrange(1, 4) for _ in range(3))
    if rng.random() < 0.5:
        return ColumnProblem(op="matmul_all_to_all_columns", m=m, n=n * size, k=k, world_size=size)
    return ColumnProblem(op="all_to_all_columns_matmul", m=m * size, n=n, k=k * size, world_size=size)


def _alone(rng: random.Random, size: int = 0, *, reachable: bool | None = None) -> CollectiveProblem:
    size = size or rng.choice((2, 3))
    op = rng.choice(COLLECTIVE_OPS)
    if op == "all_reduce" and reachable is None and rng.random() < 0.5:
        rows: dict[str, Any] = {"m": rng.randrange(1, 7), "n": rng.randrange(2, 7), "norm_eps": rng.choice((None, 1e-5))}
        return CollectiveProblem(op=op, world_size=size, addends=rng.choice(((), ("residual",))), **rows)
    at_will = rng.random() < 0.3 if reachable is None else reachable
    return CollectiveProblem(op=op, m=size * rng.choice((4, 8, 12)), world_size=size, dtype="float32", reachable=at_will)


def _ragged(rng: random.Random) -> RaggedProblem:
    op = rng.choice(("ragged_all_to_all_matmul", "ragged_matmul_all_to_all"))
    received = op == "ragged_all_to_all_matmul" and rng.random() < 0.5
    k = rng.choice((1, 2))
    size, n, experts = rng.choice((2, 2, 3)), rng.choice((k, k, 3)), rng.choice((1, 2))
    return RaggedProblem(
        op=op,
        m=rng.choice((5, 12)),
        n=n,
        k=k,
        capacity=rng.choice((5, 12)),
        experts=experts,
        world_size=size,
        return_received=received,
    )


def _concurrent(rng: random.Random) -> Schedule:
    size = rng.choice((2, 3))
    problem = ConcurrentProblem(
        collectives=tuple(_alone(rng, size, reachable=False) for _ in range(rng.choice((1, 2)))),
        world_size=size,
        compute_us=10.0,
    )
    while True:
        try:
            return weft.schedule.build(problem, rng.choice(CONCURRENT))
        except ValueError:  # not of these collectives
            continue


def _nodes(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """A step and all that it consists of, with the way there."""
    yield path, value
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _nodes(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, tuple):
        for number, one in enumerate(value):
            yield from _nodes(one, (*path, number))


def _with(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    head, *rest = path
    if isinstance(head, int):
        return (*value[:head], _with(value[head], tuple(rest), new), *value[head + 1 :])
    return dataclasses.replace(value, **{head: _with(getattr(value, head), tuple(rest), new)})


def _changed(value: Any, schedule: Schedule, rng: random.Random) -> Any:
    """Something else of its type; the same where it cannot be changed."""
    size = schedule.problem.world_size
    if isinstance(value, Region):
        axis, (low, high) = rng.choice(("rows", "cols")), rng.choice(((1, 1), (-1, -1), (1, 0), (0, -1), (0, 1), (-1, 0)))
        old = getattr(value, axis)
        buffers = [buffer.name for buffer in schedule.buffers]
        return rng.choice(
            (
                dataclasses.replace(value, **{axis: (old[0] + low, old[1] + high)}),
                dataclasses.replace(value, buffer=rng.choice(buffers)),
                dataclasses.replace(value, rank=rng.randrange(size)),
            )
        )
    if isinstance(value, Segment):
        field = rng.choice(("buffer", "rank", "src", "dst", "expert"))
        buffers = [buffer.name for buffer in schedule.buffers]
        return dataclasses.replace(value, **{field: rng.choice(buffers) if field == "buffer" else rng.randrange(size)})
    if isinstance(value, Flag):
        return rng.choice(schedule.flags)
    if isinstance(value, Wait):
        return dataclasses.replace(value, on_previous_call=not value.on_previous_call)
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        one, two = rng.randrange(len(value)), rng.randrange(len(value))
        parts = list(value)
        parts[one], parts[two] = parts[two], parts[one]
        return tuple(parts) if one != two and rng.random() < 0.5 else (*value[:one], *value[one + 1 :])
    return value


def _anything(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Change one thing that a step consists of."""
    found = places(schedule, lambda step: True)
    if not found:
        return None
    place = rng.choice(found)
    step = step_at(schedule, place)
    kinds = (Region, Segment, Flag, Wait, tuple)
    able = [(path, value) for path, value in _nodes(step) if path and isinstance(value, kinds)]
    if not able:
        return None
    path, value = rng.choice(able)
    return with_step(schedule, place, _with(step, path, _changed(value, schedule, rng)))


def _moved(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """A step to another place of its lane, or left out."""
    found = places(schedule, lambda step: True)
    if not found:
        return None
    rank, index, at = rng.choice(found)
    without = with_step(schedule, (rank, index, at))
    steps = list(without.ranks[rank][index].steps)
    if rng.random() < 0.3 or not steps:
        return without
    to = rng.randrange(len(steps))
    return with_step(without, (rank, index, to), schedule.ranks[rank][index].steps[at], steps[to])


CHANGES: tuple[Damage, ...] = (
    _anything,
    _anything,
    _anything,
    _moved,
    _moved,
    *DAMAGES.values(),
    *damage_messages.MESSAGES.values(),
)


def changed(schedule: Schedule, rng: random.Random) -> Schedule:
    """The schedule with one thing changed, or two. Of collectives beside a computation, mostly in one of its parts."""
    number = rng.randrange(len(schedule.parts) + 1) - 1 if schedule.parts else -1
    part = schedule.parts[number] if number >= 0 else None
    if part is not None:
        parts = (*schedule.parts[:number], changed(part, rng), *schedule.parts[number + 1 :])
        return dataclasses.replace(schedule, parts=parts)
    for _ in range(rng.choice((1, 1, 2))):
        if not any(lane.steps for lanes in schedule.ranks for lane in lanes):
            break
        new = None
        while new is None:
            new = rng.choice(CHANGES)(schedule, rng)
        schedule = new
    return schedule
