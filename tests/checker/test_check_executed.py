"""What executors do in addition to a schedule's steps, and the checker therefore proves, or refuses: kernels of fused steps,
the one compute lane, NCCL's collectives, sums as kernels, memory of the caller's and of float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from brute import verdict
from damage import step_at, with_step
from rank_pools import interpreted_ranks
from refusals import change, change_part, first, refused, region

import weft
from weft.checker import check, content
from weft.core.problem import CollectiveProblem, ColumnProblem, LookupProblem, Problem
from weft.core.schedule import (
    Buffer,
    Collective,
    Copy,
    Flag,
    Gemm,
    Lane,
    Part,
    Reduce,
    Region,
    Schedule,
    Signal,
    Step,
    Sum,
    Wait,
)
from weft.runtime.fused import adds_pieces
from weft.runtime.ranks import Ranks
from weft.schedules import build

interpreted = interpreted_ranks(2)
SCATTER = Problem(op="matmul_reduce_scatter", m=8, n=4, k=6, world_size=2)
ALONE = CollectiveProblem(op="all_gather", m=2, world_size=2, dtype="float32", reachable=True)


def test_a_row_for_all_rows_is_not_the_rows() -> None:
    schedule = build(SCATTER, "shard_p2p", 1)
    own, received = step_at(schedule, first(schedule, Reduce)).parts[0].srcs
    for srcs in (
        (own, dataclasses.replace(received, rows=(0, 1))),
        (received, dataclasses.replace(own, rows=own.rows[:1] * 2)),
    ):
        low = srcs[1].rows[0]
        damaged = change_part(schedule, Reduce, 0, srcs=(srcs[0], dataclasses.replace(srcs[1], rows=(low, low + 1))))
        refused(damaged, "leaves out@0", "one row of a matrix, the same for all rows; the result there is")
        assert verdict(damaged)
    check(build(Problem(op="matmul_all_reduce", m=4, n=2, k=4, world_size=2, addends=("bias",)), "shard_p2p"))


def test_parts_with_different_divisors_are_no_sum() -> None:
    """Half of K divided by two and the other half by four is no average."""
    halves = [("AB", 0, 0, ((low, low + 4),), divide_by) for low, divide_by in ((0, 2), (4, 4), (4, 2))]
    assert content.add(halves[0], halves[1])[0] == "?"
    assert content.add(halves[0], halves[2]) == ("AB", 0, 0, ((0, 8),), 2)


def _wide(schedule: Schedule, name: str) -> Schedule:
    buffers = tuple(dataclasses.replace(buffer, float32=buffer.name == name) for buffer in schedule.buffers)
    return dataclasses.replace(schedule, buffers=buffers)


def test_only_local_buffers_hold_sums_wider_than_the_problem() -> None:
    """Symmetric memory is laid out in the problem's dtype, and so is what the caller gets."""
    schedule = build(SCATTER, "shard_p2p")
    for name, kind in (("recv", "symmetric"), ("out", "output"), ("a", "input")):
        refused(_wide(schedule, name), f"buffer {name} is {kind} and holds float32, where the problem has bfloat16; only local")
    check(_wide(build(dataclasses.replace(SCATTER, dtype="float32"), "shard_p2p"), "recv"))


def _exchanged(problem: LookupProblem, copies: Callable[[int], list[Copy]]) -> Schedule:
    """Lookups whose columns go all to all as rows below each other, and then to their places."""
    schedule = build(problem, "sequential")
    ranks = []
    for rank in (0, 1):
        look = schedule.ranks[rank][0].steps[0]
        swap = Collective("all_to_all", region("pooled", rank, (0, 2), (0, 2)), region("tmp", rank, (0, 2), (0, 2)))
        ranks.append((Lane("compute", "compute", (look, swap, *copies(rank))),))
    buffers = (*schedule.buffers, Buffer("tmp", "local", (2, 2), (4, 4)))
    return dataclasses.replace(schedule, buffers=buffers, ranks=tuple(ranks))


def test_a_collective_does_what_its_own_name_says() -> None:
    problem = LookupProblem.of(batch=2, dims=((2,), (2,)))
    wide = [Copy(region("tmp", r, (0, 1), (0, 4)), region("out", r, (0, 1), (0, 4))) for r in (0, 1)]
    refused(_exchanged(problem, lambda rank: [wide[rank]]), "it reads tmp@0[0:1, 0:4], but no write of all of it")

    def rows(rank: int) -> list[Copy]:
        return [Copy(region("tmp", rank, (q, q + 1), (0, 2)), region("out", rank, (0, 1), (2 * q, 2 * q + 2))) for q in (0, 1)]

    check(_exchanged(problem, rows))


def _by_sums(op: Any, *, swapped: bool = False) -> Schedule:
    """matmul_all_to_all_columns without its exchange: one rank's product after the other's is summed with zeros of all others,
    and each rank keeps its rows. swapped: in the place of the other rank's."""
    schedule = build(ColumnProblem(op="matmul_all_to_all_columns", m=2, n=4, k=2, world_size=2), "sequential")
    ranks = []
    for rank, (lane,) in enumerate(schedule.ranks):
        *steps, swap = lane.steps
        assert isinstance(swap, Collective)
        nothing, b = region("a", rank, (0, 2), (0, 0)), region("b", rank, (0, 0), (0, 2))
        steps.append(Gemm(b, tuple(Part(nothing, region("zeros", rank, (low, low + 2), (0, 2))) for low in (0, 2))))
        for source in (0, 1):
            src = swap.src if rank == source else region("zeros", rank, (0, 4), (0, 2))
            low = 2 * (1 - source if swapped else source)
            out = region("out", rank, (low, low + 2), (0, 2))
            if op == "reduce_scatter":
                steps.append(Collective(op, src, out))
            else:
                steps.append(Collective(op, src, region("all", rank, (0, 4), (0, 2))))
                steps.append(Copy(region("all", rank, (2 * rank, 2 * rank + 2), (0, 2)), out))
        ranks.append((dataclasses.replace(lane, steps=tuple(steps)),))
    buffers = (*schedule.buffers, *(Buffer(name, "local", (4, 4), (2, 2)) for name in ("zeros", "all")))
    return dataclasses.replace(schedule, buffers=buffers, ranks=tuple(ranks))


@pytest.mark.parametrize("op", ["reduce_scatter", "all_reduce"])
def test_the_rows_that_a_collective_sums_are_those_of_its_name(op: str) -> None:
    """Where a product has world_size * m rows and a shard m, how many rows it has does not tell one from the other."""
    check(_by_sums(op))
    refused(_by_sums(op, swapped=True), "it leaves out@0[", "the result there is")


def test_collectives_that_a_problem_has_no_shape_for() -> None:
    side = ColumnProblem(op="all_to_all_columns_matmul", m=4, n=2, k=4, world_size=2)
    schedule = build(side, "sequential")
    step = step_at(schedule, first(schedule, Collective))
    refused(change(schedule, Collective, op="all_to_all"), "concatenates columns: use all_to_all_columns")
    below = build(Problem(op="all_to_all_matmul", m=4, n=2, k=4, world_size=2), "sequential")
    refused(change(below, Collective, op="all_to_all_columns"), "every rank has all of them: use all_to_all")
    assert step.op == "all_to_all_columns"


def test_a_collective_sums_or_averages() -> None:
    schedule = build(dataclasses.replace(SCATTER, world_size=4, m=4, k=4), "sequential")
    refused(change(schedule, Collective, divide_by=2), "divide_by is 2; an NCCL collective sums (1), or averages (4)")
    check(build(dataclasses.replace(SCATTER, world_size=4, m=4, k=4, reduce_op="avg"), "sequential"))


def _pulled(*, late: bool) -> Schedule:
    """Each rank copies its own row into its result, and takes the peer's from the peer's. late: that one's lane need not wait
    until it has been read."""
    schedule, ranks = build(ALONE, "sequential"), []
    for rank in (0, 1):
        peer = 1 - rank
        here, there = (region("out", r, (peer, peer + 1), (0, 1)) for r in (rank, peer))
        own = Copy(region("a", rank, (0, 1), (0, 1)), region("out", rank, (rank, rank + 1), (0, 1)))
        last = () if late else (Wait(Flag("read", rank)),)
        compute = (Wait(Flag("read", rank), on_previous_call=True), own, Signal(Flag("ready", peer)), *last)
        pull = (Wait(Flag("ready", rank)), Copy(there, here), Signal(Flag("read", peer)))
        ranks.append((Lane("compute", "compute", compute), Lane("copy", "copy", pull)))
    return dataclasses.replace(schedule, ranks=tuple(ranks))


def test_between_calls_a_result_is_its_callers_alone() -> None:
    """The caller may write it, in place or as it likes, while a peer that has not been waited for still reads it."""
    check(_pulled(late=False))
    refused(_pulled(late=True), "rank 0, lane copy, step 1", "touches out@1[1:2, 0:1], which the caller of rank 1 has between")


def test_the_caller_is_named_where_a_lane_of_no_steps_ends_last() -> None:
    schedule = build(ALONE, "copy_engine")

    def without(lane: Lane, *names: str) -> Lane:
        remaining = (step for step in lane.steps if not (isinstance(step, Wait) and step.flag.name in names))
        return dataclasses.replace(lane, steps=tuple(remaining))

    idle = Lane("idle", "copy", ())
    ranks = (
        tuple(without(lane, "open") for lane in schedule.ranks[0]),
        (*(without(lane, "open", "arrived") for lane in schedule.ranks[1]), idle),
    )
    refused(
        dataclasses.replace(schedule, ranks=ranks),
        "the caller of rank 1: has its result between two calls, and may write out@1[0:1, 0:1], which rank 0, lane copy",
        "nothing orders the two",
    )


def test_in_place_is_said() -> None:
    """A sum that is done twice: in place, the second finds the first one's result in a."""
    schedule = build(CollectiveProblem(op="reduce_scatter", m=2, world_size=1, dtype="float32"), "copy_engine")
    place = first(schedule, Reduce)
    step = step_at(schedule, place)
    again = with_step(schedule, place, step, dataclasses.replace(step))
    refused(again, "touches a@0[0:2, 0:1], where rank 0", "may have written the result, since out may be the memory of a")


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_collective_in_place_leaves_no_input(op: Any) -> None:
    schedule = build(CollectiveProblem(op=op, m=2, world_size=2, dtype="float32"), "sequential")
    twice = [tuple(dataclasses.replace(lane, steps=lane.steps * 2) for lane in lanes) for lanes in schedule.ranks]
    refused(dataclasses.replace(schedule, ranks=tuple(twice)), "may have written the result, since out may be the memory of a")


def _reduced(change: str) -> Schedule:
    """A reduce_scatter whose sum is not what the kernel of sums does."""
    problem = CollectiveProblem(op="reduce_scatter", m=64, world_size=2, dtype="float32", staging_bytes=1 << 24)
    schedule = build(problem, "copy_engine", 1)
    ranks = []
    for rank, lanes in enumerate(schedule.ranks):
        ranks.append(tuple(dataclasses.replace(lane, steps=_other_sum(change, rank, lane.steps)) for lane in lanes))
    buffers = (*schedule.buffers, Buffer("mine", "local", (32, 32), (1, 1)))
    return dataclasses.replace(schedule, buffers=buffers, ranks=tuple(ranks))


def _other_sum(change: str, rank: int, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    at = next((at for at, step in enumerate(steps) if isinstance(step, Reduce)), None)
    if at is None:
        return steps
    step = steps[at]
    assert isinstance(step, Reduce)
    ((part,), rest) = step.parts, list(steps[at + 1 :])
    if change == "count":
        signal = next(one for one in rest if isinstance(one, Signal))
        rest.remove(signal)
        new: tuple[Step, ...] = (Reduce((dataclasses.replace(part, count=signal.flag),)),)
    elif change == "gates":
        waits = [one for one in steps[:at] if isinstance(one, Wait) and not one.on_previous_call]
        gated = Reduce((dataclasses.replace(part, gates=tuple(waits)),))
        return (*(one for one in steps[:at] if one not in waits), gated, *rest)
    elif change == "two":
        halves = [_half(part, low, low + 16) for low in (0, 16)]
        new = (Reduce(tuple(halves)),)
    else:
        own = next(src for src in part.srcs if src.buffer == "a")
        mine = Region("mine", rank, (0, 32), (0, 1))
        srcs = tuple(mine if src == own else src for src in part.srcs)
        new = (Copy(own, mine), Reduce((dataclasses.replace(part, srcs=srcs),)))
    return (*steps[:at], *new, *rest)


def _half(part: Sum, low: int, high: int) -> Sum:
    def cut(whole: Region) -> Region:
        return dataclasses.replace(whole, rows=(whole.rows[0] + low, whole.rows[0] + high))

    return dataclasses.replace(part, srcs=tuple(map(cut, part.srcs)), out=cut(part.out))


def _sums(change: str) -> None:
    """Calls on new data, one after the other."""
    schedule, rank = _reduced(change), dist.get_rank()
    check(schedule)
    for call in range(6):
        given = [torch.arange(64.0) * (call + 1) + peer for peer in (0, 1)]
        out = torch.empty(32)
        weft.collectives.reduce_scatter_tensor(out, given[rank], schedule=schedule)
        assert torch.equal(out, (given[0] + given[1]).chunk(2)[rank]), (change, call)


@pytest.mark.parametrize("change", ["count", "gates", "two", "none of the caller's"])
def test_sums_that_the_kernel_does_not_do_go_step_by_step(interpreted: Ranks, change: str) -> None:
    interpreted.run(_sums, change)


def test_the_kernel_does_the_sums_of_all_families() -> None:
    for op in ("reduce_scatter", "all_reduce"):
        for name in ("copy_engine", "copy_engine_pull")[: 1 + (op == "all_reduce")]:
            for reachable in (False, True):
                problem = CollectiveProblem(op=op, m=1000, world_size=4, dtype="float16", reachable=reachable)  # type: ignore[arg-type]
                schedule = build(problem, name, 2)
                found = [step for *_, step in schedule if isinstance(step, Reduce)]
                assert found
                assert all(adds_pieces(step, schedule) for step in found)
