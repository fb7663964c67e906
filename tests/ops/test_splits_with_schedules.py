"""Calls with splits run the schedule that they are given: by its name, or changed by hand, on hosts and as kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from ragged_work import room_for, round_trip
from rank_pools import interpreted_ranks

import weft
from weft.core.problem import Op, RaggedProblem
from weft.core.schedule import (
    Flag,
    GroupedGemm,
    Lane,
    Schedule,
    Segment,
    SegmentCopies,
    SegmentCopy,
    SegmentProduct,
    ShareCounts,
    Signal,
    Step,
    Wait,
)
from weft.kernels.segments import MOVE_FIELDS, TILE_FIELDS
from weft.runtime.bound import BoundProgram
from weft.runtime.groups import GROUPS
from weft.runtime.ragged import RaggedCall
from weft.runtime.ragged_kernels import RankOrders
from weft.runtime.ranks import Ranks
from weft.schedules import ragged

interpreted = interpreted_ranks([2], slow=[4])
EXPERTS, MOST, SEED = 2, 90, 165
"""SEED: segments of one rank take different numbers of tiles."""


def _programs() -> list[BoundProgram]:
    return GROUPS.state(dist.group.WORLD.group_name).bound()  # type: ignore[union-attr]


def _named(dtype: torch.dtype) -> None:
    weft.close()
    round_trip("random", EXPERTS, 16, 8, dtype, 1, schedules=("sequential", "sequential"))
    round_trip("one_to_all", EXPERTS, 16, 8, dtype, 2, schedules=("sequential", "planned"))
    assert {program.schedule.name for program in _programs()} == {"sequential", "fused"}
    weft.close()


@pytest.mark.ranks
def test_by_name_on_hosts(ranks: RankFixture) -> None:
    ranks(3).run(_named, torch.float32)


@pytest.mark.ranks
def test_by_name_as_kernels(interpreted: Ranks) -> None:
    interpreted.run(_named, torch.float16)


# One change each, of rank 0 alone, which keeps a schedule right.

Parts = Sequence[SegmentCopy | SegmentProduct]


def _with_steps(schedule: Schedule, rank: int, change: Callable[[Step], Sequence[Step]]) -> Schedule:
    """Of one rank alone."""
    (lane,) = schedule.ranks[rank]
    steps = tuple(new for step in lane.steps for new in change(step))
    ranks = (*schedule.ranks[:rank], (replace(lane, steps=steps),), *schedule.ranks[rank + 1 :])
    return replace(schedule, ranks=ranks)


def _regrouped(schedule: Schedule, change: Callable[[list[Any], list[Any]], Parts]) -> Schedule:
    """Rank 0's GroupedGemm with other parts, of its copies and its products."""

    def changed(step: Step) -> Sequence[Step]:
        if not isinstance(step, GroupedGemm):
            return (step,)
        copies = [part for part in step.parts if isinstance(part, SegmentCopy)]
        products = [part for part in step.parts if isinstance(part, SegmentProduct)]
        return (GroupedGemm(tuple(change(copies, products))),)

    return _with_steps(schedule, 0, changed)


def _in_order(schedule: Schedule, copies: list[Any], products: list[Any]) -> Parts:
    assert isinstance(schedule.problem, RaggedProblem)
    return [*copies, *products] if schedule.problem.dispatches else [*products, *copies]


def unchanged(schedule: Schedule) -> Schedule:
    return schedule


def copies_reversed(schedule: Schedule) -> Schedule:
    return _regrouped(schedule, lambda copies, products: _in_order(schedule, copies[::-1], products))


def products_reversed(schedule: Schedule) -> Schedule:
    return _regrouped(schedule, lambda copies, products: _in_order(schedule, copies, products[::-1]))


def gates_before(schedule: Schedule) -> Schedule:
    """Rank 0 waits for all that arrives before it multiplies, or for all products before it pulls."""

    def changed(step: Step) -> Sequence[Step]:
        if not isinstance(step, GroupedGemm):
            return (step,)
        waits = [gate for part in step.parts for gate in part.gates]
        copies = [replace(part, gates=()) for part in step.parts if isinstance(part, SegmentCopy)]
        products = [replace(part, gates=()) for part in step.parts if isinstance(part, SegmentProduct)]
        if copies[0].src.buffer == "a":
            return (SegmentCopies(tuple(copies)), *waits, GroupedGemm(tuple(products)))
        return (GroupedGemm(tuple(products)), *waits, SegmentCopies(tuple(copies)))

    return _with_steps(schedule, 0, changed)


def flags_exchanged(schedule: Schedule) -> Schedule:
    """Two flags of rank 0, by those who raise them and by it."""
    first, second = [part.count for part in _parts(schedule) if part.count is not None and part.count.rank == 0][:2]
    assert first is not None
    assert second is not None
    other = {first: second, second: first}

    def changed(step: Step) -> Sequence[Step]:
        if not isinstance(step, GroupedGemm):
            return (step,)
        parts = [
            replace(
                part,
                gates=tuple(Wait(other.get(gate.flag, gate.flag)) for gate in part.gates),
                count=part.count and other.get(part.count, part.count),
            )
            for part in step.parts
        ]
        return (GroupedGemm(tuple(parts)),)

    for rank in range(schedule.problem.world_size):
        schedule = _with_steps(schedule, rank, changed)
    return schedule


def expert_by_expert(schedule: Schedule) -> Schedule:
    """Rank 0 has a GroupedGemm for each expert."""

    def changed(step: Step) -> Sequence[Step]:
        if not isinstance(step, GroupedGemm):
            return (step,)
        by_expert = [[part for part in step.parts if _name(part)[2] == expert] for expert in range(EXPERTS)]
        return tuple(GroupedGemm(tuple(parts)) for parts in by_expert)

    return _with_steps(schedule, 0, changed)


CHANGES = (copies_reversed, products_reversed, gates_before, flags_exchanged, expert_by_expert)


def _parts(schedule: Schedule) -> list[SegmentCopy | SegmentProduct]:
    return [part for _, _, _, step in schedule if isinstance(step, (SegmentCopies, GroupedGemm)) for part in step.parts]


def _name(part: SegmentCopy | SegmentProduct) -> tuple[int, int, int]:
    return (part.dst if isinstance(part, SegmentCopy) else part.out).name


def _problem(op: Op, dtype: torch.dtype, size: int, rows: int, k: int, n: int) -> RaggedProblem:
    """Of a call of round_trip."""
    a, b = torch.empty(rows, k, dtype=dtype), torch.empty(EXPERTS, k, n, dtype=dtype)
    options: dict[str, Any] = {"max_rows": room_for(size, EXPERTS, MOST), "return_received": op == "ragged_all_to_all_matmul"}
    call = RaggedCall(op=op, a=a, b=b, splits=torch.zeros(size * EXPERTS), **options)
    problem = call.problem((rows,) * size)
    assert isinstance(problem, RaggedProblem)
    return problem


def _changed(dtype: torch.dtype) -> dict[str, list[object]]:
    """A round trip by the fused schedules, and by each change of them: what this rank's kernels have walked, dispatch first:
    the other rank and the expert of each copy, the expert of each product, how far its words went, and how many steps moved
    rows."""
    weft.close()
    size, found = dist.get_world_size(), dict[str, list[object]]()
    for change in (unchanged, *CHANGES):
        there, home = (
            replace(change(ragged.build(problem)), name="by hand")
            for problem in (
                _problem("ragged_all_to_all_matmul", dtype, size, 1, 16, 8),
                _problem("ragged_matmul_all_to_all", dtype, size, room_for(size, EXPERTS, MOST), 8, 16),
            )
        )
        for schedule in (there, home):
            weft.schedule.check(schedule)
        round_trip("random", EXPERTS, 16, 8, dtype, SEED, most=MOST, schedules=(there, home))
        programs = {program.schedule: program for program in _programs()}
        found[change.__name__] = [_walked(programs[schedule]) for schedule in (there, home)]
        weft.close()
    return found


def _walked(program: BoundProgram) -> object:
    if program.ragged is None:
        return None
    exchange = program.ragged.exchange
    assert torch.equal(exchange.arrived.local, exchange.goals)
    moves, tiles = exchange.moves[0].tolist(), exchange.tiles[0].tolist()
    words = exchange.arrived.local.tolist()
    return (
        moves[4 :: MOVE_FIELDS.value],
        moves[5 :: MOVE_FIELDS.value],
        tiles[4 :: TILE_FIELDS.value],
        words,
        len(exchange.steps),
    )


@pytest.mark.ranks
def test_what_is_changed_is_what_runs_as_kernels(interpreted: Ranks) -> None:
    rank_0, *others = interpreted.run(_changed, torch.float16)
    for change in CHANGES:
        for before, after in zip(rank_0["unchanged"], rank_0[change.__name__], strict=True):
            assert before != after, change.__name__
        for rank in others:  # which does what it did
            assert rank[change.__name__] == rank["unchanged"], change.__name__


@pytest.mark.ranks
def test_what_is_changed_is_right_on_hosts(ranks: RankFixture) -> None:
    ranks(2).run(_changed, torch.float32)


# What the kernels do not run.

DISPATCH = RaggedProblem(m=32, n=8, k=8, world_size=2, dtype="float16", capacity=64, experts=EXPERTS)
COMBINE = replace(DISPATCH, op="ragged_matmul_all_to_all")


def _first(schedule: Schedule, change: Callable[[Step], Sequence[Step]]) -> Schedule:
    return _with_steps(schedule, 0, change)


def _one_segment_less(step: Step) -> Sequence[Step]:
    if not isinstance(step, GroupedGemm):
        return (step,)
    return (GroupedGemm(step.parts[:-1]), GroupedGemm(step.parts[-1:]))


def _mixed(step: Step) -> Sequence[Step]:
    return (GroupedGemm(step.parts[::-1]),) if isinstance(step, GroupedGemm) else (step,)


def _of_own_rows(step: Step) -> Sequence[Step]:
    if not isinstance(step, GroupedGemm):
        return (step,)
    parts = [
        replace(part, a=Segment("a", 0, *part.a.name), gates=())
        if isinstance(part, SegmentProduct) and part.a.src == 0
        else part
        for part in step.parts
    ]
    return (GroupedGemm(tuple(parts)),)


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (
            _first(ragged.build(DISPATCH), _one_segment_less),
            "1 of the 2 segments of expert 1; tiles are cut",
        ),
        (_first(ragged.build(DISPATCH), _mixed), "its parts are landing -> out, or a -> landing, then landing -> out"),
        (_first(ragged.build(COMBINE), _mixed), "its parts are a -> out, or a -> out, then product -> out"),
        (_first(ragged.build(DISPATCH), _of_own_rows), "its parts are landing -> out"),
        (_first(ragged.build(DISPATCH), lambda step: (step, Signal(Flag("told", 1)))), "flags are signalled by parts alone"),
        (
            _first(ragged.build(DISPATCH), lambda step: (step, step) if isinstance(step, ShareCounts) else (step,)),
            "shares its counts once, in its first step",
        ),
    ],
)
def test_kernels_refuse_what_they_do_not_run(schedule: Schedule, says: str) -> None:
    with pytest.raises(ValueError, match=f"rank 0, lane compute, step .*on GPUs, .*({says})"):
        RankOrders(schedule, 1)


def test_kernels_refuse_a_second_lane() -> None:
    schedule = ragged.build(DISPATCH)
    ranks = ((*schedule.ranks[0], Lane("more", "blocks", ())), *schedule.ranks[1:])
    with pytest.raises(ValueError, match="rank 0 has 2 lanes: on GPUs, a call with splits has one"):
        RankOrders(replace(schedule, ranks=ranks), 1)
