"""Schedules that no family builds, though the checker proves them right: what kernels cannot do has to go step by step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_work import here, whole

import weft
from weft.core.problem import Op, Problem
from weft.core.schedule import (
    Buffer,
    Collective,
    Copy,
    Flag,
    FusedCollective,
    Gemm,
    Lane,
    Part,
    Push,
    Reduce,
    Region,
    Schedule,
    Signal,
    Step,
    Store,
    Sum,
    Wait,
)

M, N, K = 64, 96, 64


def steps_of(schedule: Schedule, name: str, steps: Callable[[int, Lane], Iterator[Step]]) -> Schedule:
    """The same with other steps in each lane."""
    ranks = tuple(
        tuple(replace(lane, steps=tuple(steps(rank, lane))) for lane in lanes) for rank, lanes in enumerate(schedule.ranks)
    )
    return replace(schedule, name=name, ranks=ranks)


def _gated(step: Gemm, gates: tuple[Wait, ...]) -> Gemm:
    return replace(step, parts=tuple(replace(part, gates=(*part.gates, *gates)) for part in step.parts))


def by_columns(problem: Problem) -> Schedule:
    """A gated GEMM as two, each of half the columns."""

    def steps(rank: int, lane: Lane) -> Iterator[Step]:
        for step in lane.steps:
            if not isinstance(step, Gemm):
                yield step
                continue
            low, high = step.b.cols
            for cols in ((low, (low + high) // 2), ((low + high) // 2, high)):
                parts = tuple(replace(part, out=replace(part.out, cols=cols)) for part in step.parts)
                yield replace(step, b=replace(step.b, cols=cols), parts=parts)

    return steps_of(weft.schedule.build(problem, "flag_gated", 1), "by_columns", steps)


def slices_gated(problem: Problem) -> Schedule:
    """Slices of K, each a GEMM that waits itself for its columns; all but the first add to what is there."""

    def steps(rank: int, lane: Lane) -> Iterator[Step]:
        held: list[Wait] = []
        for step in lane.steps:
            if lane.kind == "compute" and isinstance(step, Wait):
                held.append(step)
            elif isinstance(step, Gemm):
                yield _gated(step, tuple(held))
                held = []
            else:
                yield step

    return steps_of(weft.schedule.build(problem, "uniform_fused_2d", 2), "slices_gated", steps)


def two_results(problem: Problem) -> Schedule:
    """A sum whose second half of rows goes by a buffer of its own."""
    schedule = weft.schedule.build(problem, "hetero_unfused_1d", 1)
    (out,) = (buffer for buffer in schedule.buffers if buffer.name == "out")
    schedule = replace(schedule, buffers=(*schedule.buffers, Buffer("half", "local", out.rows, out.cols)))

    def cut(region: Region, first: int, last: int) -> Region:
        return replace(region, rows=(region.rows[0] + first, region.rows[0] + last))

    def steps(rank: int, lane: Lane) -> Iterator[Step]:
        for step in lane.steps:
            if not isinstance(step, Reduce):
                yield step
                continue
            (part,) = step.parts
            rows = part.out.shape[0]
            half = Region("half", rank, (0, rows - rows // 2), part.out.cols)
            above = replace(part, srcs=tuple(cut(src, 0, rows // 2) for src in part.srcs), out=cut(part.out, 0, rows // 2))
            below = replace(part, srcs=tuple(cut(src, rows // 2, rows) for src in part.srcs), out=half)
            yield replace(step, parts=(above, below))
            yield Reduce((Sum((half,), cut(part.out, rows // 2, rows)),))

    return steps_of(schedule, "two_results", steps)


def own_first(problem: Problem) -> Schedule:
    """The own rows, which are the caller's result, before those that copies take to peers."""

    def steps(rank: int, lane: Lane) -> Iterator[Step]:
        for step in lane.steps:
            yield replace(step, parts=(step.parts[-1], *step.parts[:-1])) if isinstance(step, Gemm) else step

    return steps_of(weft.schedule.build(problem, "track_and_trigger", 1), "own_first", steps)


def counted_at_the_end(problem: Problem) -> Schedule:
    """What is gathered is free once the tiles that read it have been counted, for which the lane waits after the GEMM."""

    def steps(rank: int, lane: Lane) -> Iterator[Step]:
        if lane.kind != "compute":
            yield from lane.steps
            return
        gemm, signal = lane.steps
        assert isinstance(gemm, Gemm)
        assert isinstance(signal, Signal)
        *others, last = gemm.parts
        read = Flag("read", rank)
        yield replace(gemm, parts=(*others, replace(last, count=read)))
        yield Wait(read)
        yield signal

    return steps_of(weft.schedule.build(problem, "flag_gated", 1), "counted_at_the_end", steps)


def gathered_beside(problem: Problem) -> Schedule:
    """Rank 0 sends its rows and gathers on a lane of blocks, which rank 1 enters after a signal of rank 0's compute lane."""
    built = weft.schedule.build(problem, "sequential")
    (full,) = (buffer for buffer in built.buffers if buffer.name == "a_full")
    buffers = (*built.buffers, replace(full, name="sent"))
    go, sent, done, free = Flag("go", 1), Flag("sent", 1), Flag("done", 0), Flag("free", 0)
    (gather, gemm), (gather_1, gemm_1) = (rank[0].steps[:2] for rank in built.ranks)
    assert isinstance(gather, Collective)
    rows = Region("sent", 1, gather.src.rows, gather.src.cols)
    push = Push((Store(gather.src, rows, sent),))
    ranks = (
        (
            Lane("compute", "compute", (Signal(go), Wait(done), gemm)),
            Lane("blocks", "blocks", (Wait(free, on_previous_call=True), push, gather, Signal(done))),
        ),
        (Lane("compute", "compute", (Wait(go), gather_1, gemm_1, Wait(sent), Signal(free))),),
    )
    return replace(built, name="gathered_beside", buffers=buffers, ranks=ranks)


def _at(buffer: str, rank: int, rows: int, cols: int, corner: tuple[int, int] = (0, 0)) -> Region:
    top, left = corner
    return Region(buffer, rank, (top, top + rows), (left, left + cols))


def from_parts(problem: Problem, corner: tuple[int, int], hops: int, *, multiplies: bool) -> Schedule:
    """Every matrix that the kernel reads, but for the addends, lies at `corner` of a larger buffer."""
    m, n, size = problem.m, problem.n, problem.world_size
    inner = problem.k // size
    scatters = problem.op == "matmul_reduce_scatter"
    shapes = {"a_part": (m, inner), "b_part": (inner, n)} if multiplies else {"partial": (m, n)}
    ranks = []
    for rank in range(size):
        a, b = _at("a", rank, m, inner), _at("b", rank, inner, n)
        factors = tuple(_at(name, rank, *shape, corner) for name, shape in shapes.items())
        before: list[Step] = [Gemm(b, (Part(a, factors[0]),))]
        if multiplies:
            before = [Copy(a, factors[0]), Copy(b, factors[1])]
        heights = {"bias": 1, "residual": m}
        low, high = problem.shards[rank] if scatters else (0, m)
        step = FusedCollective(
            "reduce_scatter" if scatters else "all_reduce",
            factors,
            _at("out", rank, high - low, n),
            hops,
            tuple(_at(name, rank, heights[name], n) for name in problem.addends),
        )
        ranks.append((Lane("compute", "compute", (*before, step)),))
    larger = {name: (rows + 2 * corner[0] + 3, cols + 2 * corner[1] + 5) for name, (rows, cols) in shapes.items()}
    given = (buffer for buffer in weft.schedule.build(problem, "one_shot").buffers if buffer.kind in ("input", "output"))
    local = (Buffer(name, "local", (rows,) * size, (cols,) * size) for name, (rows, cols) in larger.items())
    return Schedule(problem=problem, name="from_parts", buffers=(*given, *local), ranks=tuple(ranks))


CORNERS = ((0, 0), (17, 0), (0, 6), (5, 3))
"""(row, column). No row of the larger buffers is a multiple of 16 bytes long."""


def check_from_parts(op: Op, hops: int, multiplies: bool) -> None:
    """As `from_parts` for each corner: proved, and then right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    m, n, k = 18, 24, 8 * size
    addends = ("bias", "residual") if op == "matmul_all_reduce" else ()
    problem = Problem(op=op, m=m, n=n, k=k, world_size=size, dtype="float16", addends=addends)
    for call, corner in enumerate(CORNERS):
        schedule = from_parts(problem, corner, hops, multiplies=multiplies)
        weft.schedule.check(schedule)
        a, b, expected = whole(m, n, k, torch.float16, call)
        mine, more = slice(8 * rank, 8 * rank + 8), {}
        if addends:
            ascending = torch.arange(m * n, device=here()).view(m, n).half()
            more = {"bias": ascending[0] / 8, "residual": ascending / 64}
            expected = expected + more["bias"].double() + more["residual"].double()
        else:
            expected = expected[slice(*problem.shards[rank])]
        out = getattr(weft, op)(a[:, mine].contiguous(), b[mine], schedule=schedule, **more)
        torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=2e-2)
    weft.close()


SCHEDULES: dict[str, tuple[Op, Callable[[Problem], Schedule]]] = {
    "by_columns": ("all_gather_matmul", by_columns),
    "slices_gated": ("all_gather_matmul", slices_gated),
    "two_results": ("matmul_reduce_scatter", two_results),
    "own_first": ("matmul_all_to_all", own_first),
    "counted_at_the_end": ("all_gather_matmul", counted_at_the_end),
    "gathered_beside": ("all_gather_matmul", gathered_beside),
}


def check_local_strided(name: str, calls: int = 3) -> None:
    """Proved, and then right, call after call on new data."""
    op, make = SCHEDULES[name]
    size, rank = dist.get_world_size(), dist.get_rank()
    schedule = make(Problem(op=op, m=M, n=N, k=K, world_size=size, dtype="float16"))
    weft.schedule.check(schedule)
    for call in range(calls):
        generator = torch.Generator().manual_seed(call)
        a = torch.randn(size * M, K, generator=generator).half()
        b = (torch.randn(K, size * N, generator=generator) * K**-0.5).half()
        if op == "all_gather_matmul":
            columns = N // size
            a, b = a[:M], b[:, rank * columns : (rank + 1) * columns].contiguous()
            out, expected = weft.all_gather_matmul(a.chunk(size)[rank], b, schedule=schedule), a.double() @ b.double()
        elif op == "matmul_reduce_scatter":
            a, b, inner = a[:M], b[:, :N], slice(rank * K // size, (rank + 1) * K // size)
            out = weft.matmul_reduce_scatter(a[:, inner].contiguous(), b[inner], schedule=schedule)
            expected = (a.double() @ b.double()).chunk(size)[rank]
        else:
            b = b[:, :N]
            out = weft.matmul_all_to_all(a[rank * M : (rank + 1) * M], b, schedule=schedule)
            sent = [part.chunk(size)[rank] for part in a.chunk(size)]
            expected = torch.cat(sent).double() @ b.double()
        assert (out.double() - expected).abs().max() < 0.01, f"{name}, call {call}"


def tables_made() -> tuple[int, int]:
    """How many tables a kernel has made in calls whose results lie elsewhere, and how many it still has."""
    from weft.runtime import fused

    made: list[Any] = []
    lay_out = fused.FusedGemm._make_tables

    def watched(self: Any, bindings: Any) -> Any:
        tables = lay_out(self, bindings)
        made.append(weakref.ref(tables.outs))
        return tables

    size = dist.get_world_size()
    schedule = own_first(Problem(op="matmul_all_to_all", m=M, n=N, k=K, world_size=size, dtype="float16"))
    a, b = torch.ones(M, K).half(), torch.ones(K, N).half()
    weft.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused.FusedGemm, "_make_tables", watched)
        outs = [weft.matmul_all_to_all(a, b, schedule=schedule) for _ in range(4)]
    assert len({out.data_ptr() for out in outs}) == 4
    gc.collect()
    return len(made), sum(one() is not None for one in made)


def several_b_counted() -> list[tuple[int, int]]:
    """Of a flag that tiles count, what its word holds where the lane has passed it, in two calls with two b, and should."""
    from weft.runtime.host import HostProgram

    size, rank = dist.get_world_size(), dist.get_rank()
    schedule = counted_at_the_end(Problem(op="all_gather_matmul", m=M, n=N * size, k=K, world_size=size, dtype="float16"))
    a, bs = torch.ones(M // size, K).half(), [torch.ones(K, N // 2).half()] * 2
    found: list[tuple[int, int]] = []
    wait = HostProgram.wait

    def watched(self: HostProgram, slot: int, value: int) -> None:
        wait(self, slot, value)
        flag, _, _ = self._waiter[slot]
        if flag.name == "read":
            found.append((self.words[rank].load(slot), self.signal_value(flag)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostProgram, "wait", watched)
        for _ in range(2):
            for out in weft.all_gather_matmul(a, bs, schedule=schedule):
                assert (out == K).all()
    return found
