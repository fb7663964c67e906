"""Schedules whose scratch has names under which the runtime passes the caller's other tensors: scales, tables, weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import embedding_work
import torch
import torch.distributed as dist
from float8 import quantise

import weft
from weft.core import codec
from weft.core.problem import LookupProblem, Problem, Scaling
from weft.core.schedule import Buffer, Copy, Gemm, Lane, Part, Region, Schedule, Step

SCALED = [
    ("matmul_reduce_scatter", "sequential", "partial", "a scales"),
    ("matmul_reduce_scatter", "sequential", "partial", "b scales"),
    ("matmul_reduce_scatter", "shard_p2p", "recv", "scales"),
    ("all_gather_matmul", "sequential", "a_full", "a scales"),
    ("all_gather_matmul", "shard_p2p", "a_full", "gathered scales"),
]
LOOKUPS = ("weights", "indices", "offsets", "tables")


def with_name(schedule: Schedule, old: str, new: str) -> Schedule:
    """The same with another name for a buffer."""
    text = codec.dumps(schedule)
    for key in ("buffer", "name"):
        text = text.replace(f'"{key}": "{old}"', f'"{key}": "{new}"')
    return codec.loads(Schedule, text)


def scaled_call(schedule: Schedule) -> None:
    """Ones, each as an FP8 element of 448 and a scale of 1/448: every element of a product is K."""
    problem, rank = schedule.problem, dist.get_rank()
    rows = problem.shards[rank][1] - problem.shards[rank][0] if problem.op == "all_gather_matmul" else problem.m
    a, scale_a = quantise(torch.ones(rows, problem.inner(rank)), "rowwise", "a")
    b, scale_b = quantise(torch.ones(problem.inner(rank), problem.columns(rank)), "rowwise", "b")
    options: dict[str, Any] = {"scale_a": scale_a, "scale_b": scale_b, "output_dtype": torch.float32}
    if problem.return_gathered:
        options["return_gathered"] = True
    weft.schedule.check(schedule)
    for _ in range(2):
        found = getattr(weft, problem.op)(a, b, schedule=schedule, **options)
        outs = list(found) if problem.return_gathered else [found]
        expected = [torch.full_like(outs[0], problem.k), torch.full_like(outs[-1], 1 / 448)]
        torch.testing.assert_close(outs[0], expected[0])
        if problem.return_gathered:
            torch.testing.assert_close(outs[2], expected[1])


def scaled_problem(op: str) -> Problem:
    size = dist.get_world_size()
    sizes: dict[str, Any] = {"m": 4 * size, "n": 16 * size, "k": 16 * size, "world_size": size, "dtype": "float32"}
    return Problem(op=op, scaling=Scaling(recipe="rowwise"), return_gathered=op == "all_gather_matmul", **sizes)  # type: ignore[arg-type]


def check_scales(op: str, family: str, old: str, new: str) -> None:
    scaled_call(with_name(weft.schedule.build(scaled_problem(op), family), old, new))


def check_scales_of_scratch() -> None:
    """An FP8 buffer `L`, and another one, declared before it, called `L scales`."""
    problem = scaled_problem("matmul_reduce_scatter")
    schedule, size = weft.schedule.build(problem, "sequential"), problem.world_size
    inner = problem.inner(0)
    buffers = (
        Buffer("L scales", "local", (inner,) * size, (problem.n,) * size, operand="b"),
        Buffer("L", "local", (problem.m,) * size, (inner,) * size, operand="a"),
    )

    def steps(rank: int, lane: Lane) -> tuple[Step, ...]:
        gemm, *others = lane.steps
        assert isinstance(gemm, Gemm)
        ((a, out),) = [(part.a, part.out) for part in gemm.parts]
        mine, b = Region("L", rank, a.rows, a.cols), Region("L scales", rank, gemm.b.rows, gemm.b.cols)
        return (Copy(a, mine), Copy(gemm.b, b), replace(gemm, b=b, parts=(Part(mine, out),)), *others)

    ranks = tuple(tuple(replace(lane, steps=steps(rank, lane)) for lane in lanes) for rank, lanes in enumerate(schedule.ranks))
    scaled_call(replace(schedule, name="own", buffers=(*buffers, *schedule.buffers), ranks=ranks))


def check_lookups(name: str) -> None:
    """The pooled rows are in a buffer that is called like one of the caller's tensors."""
    size, rank = dist.get_world_size(), dist.get_rank()
    case = embedding_work.Case(dims=((8, 4),) * size, weighted=True)
    schedule = weft.schedule.build(LookupProblem.of(batch=case.batch, dims=case.dims, pooling=32), "sequential")
    (old,) = [buffer.name for buffer in schedule.buffers if buffer.kind == "local"]
    schedule = with_name(schedule, old, name)
    weft.schedule.check(schedule)
    drawn = embedding_work.draw(case, 0, rank)
    options = embedding_work.options_of(case, drawn)
    out = weft.embedding_bag_all_to_all(drawn.indices, drawn.offsets, drawn.tables, schedule=schedule, **options)
    wanted = embedding_work.expected(case, 0, rank)
    assert (out.double() - wanted).abs().max().item() <= embedding_work.bound(case, wanted)
