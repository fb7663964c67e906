"""Schedules of collectives alone as values: right for any size and room, in place, and refused once anything is damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from weft.core import codec, machine
from weft.core.problem import COLLECTIVE_OPS, CollectiveProblem, Op
from weft.core.schedule import Copy, Lane, Reduce, Schedule, Step, Sum
from weft.perf import run
from weft.planner import plan
from weft.runtime.bound import layout
from weft.schedules import candidates, names, unfit

OVERLAPS = [(op, name, False) for op in COLLECTIVE_OPS for name in names(op) if name.startswith("copy_engine")]
OVERLAPS += [(op, "copy_engine", True) for op in COLLECTIVE_OPS if op != "reduce_scatter"]


@st.composite
def problems(draw: st.DrawFn) -> CollectiveProblem:
    op, size = draw(st.sampled_from(COLLECTIVE_OPS)), draw(st.sampled_from((1, 2, 3, 4, 8)))
    part = draw(st.sampled_from((0, 1, 7, 64, 1000, 20_001)))
    sums = op in ("reduce_scatter", "all_reduce")
    return CollectiveProblem(
        op=op,
        m=part * size + (draw(st.integers(0, 20)) if op == "all_reduce" else 0),
        world_size=size,
        dtype=draw(st.sampled_from(("bfloat16", "float32", *([] if sums else ["uint8"])))),
        reduce_op=draw(st.sampled_from(("sum", "avg"))) if sums else "sum",
        staging_bytes=draw(st.sampled_from((1 << 16, 100_000, 1 << 20, 1 << 28))),
        reachable=draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems(), st.sampled_from((1, 2, 5)), st.booleans())
def test_every_schedule_is_proved_and_keeps_to_its_room(problem: CollectiveProblem, chunks: int, fan_out: bool) -> None:
    for name in [one for one in names(problem.op) if not unfit(one, problem)]:
        schedule = weft.schedule.build(problem, name, chunks, fan_out=fan_out)
        weft.schedule.check(schedule)
        assert codec.loads(Schedule, codec.dumps(schedule)) == schedule
        # A part begins at a multiple of 256 bytes: that is all there may be beyond the bound.
        assert layout(schedule).staging <= problem.staging_bytes + 2 * 256


SMALL = {op: CollectiveProblem(op=op, m=9000, world_size=3, dtype="float32", staging_bytes=1 << 16) for op in COLLECTIVE_OPS}


def changed(schedule: Schedule, rank: int, lane: str, at: int, *steps: Step) -> Schedule:
    """The schedule with the step at a position of a lane replaced."""
    lanes = [replace(one, steps=(*one.steps[:at], *steps, *one.steps[at + 1 :])) if one.name == lane else one for one in
             schedule.ranks[rank]]  # fmt: skip
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(lanes), *schedule.ranks[rank + 1 :]))


def places(schedule: Schedule, kind: type[Step]) -> list[tuple[int, Lane, int]]:
    return [(rank, lane, at) for rank, lane, at, step in schedule if isinstance(step, kind)]


@pytest.mark.parametrize(("op", "name", "reachable"), OVERLAPS)
def test_a_copy_to_another_place_is_noticed(op: Op, name: str, reachable: bool) -> None:
    schedule = weft.schedule.build(replace(SMALL[op], reachable=reachable), name, 4)
    for rank, lane, at in places(schedule, Copy):
        step = lane.steps[at]
        assert isinstance(step, Copy)
        low, high = step.dst.rows
        moved = replace(step, dst=replace(step.dst, rows=(low + 4, high + 4)))
        with pytest.raises(weft.schedule.ScheduleError):
            weft.schedule.check(changed(schedule, rank, lane.name, at, moved))


def _reordered(schedule: Schedule, change: str) -> Schedule:
    """Sums that leave out a rank, or add one twice."""
    rank, lane, at = places(schedule, Reduce)[1]
    step = lane.steps[at]
    assert isinstance(step, Reduce)
    (part,) = step.parts
    srcs = part.srcs[1:] if change == "less" else (*part.srcs[:-1], part.srcs[0])
    return changed(schedule, rank, lane.name, at, Reduce((Sum(srcs, part.out),), step.divide_by))


@pytest.mark.parametrize("op", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("change", ["less", "twice"])
def test_a_rank_left_out_of_a_sum_or_added_twice_is_noticed(op: Op, change: str) -> None:
    with pytest.raises(weft.schedule.ScheduleError, match=r"the result there is \(A @ B\).* over K of 0:3|K summed twice"):
        weft.schedule.check(_reordered(weft.schedule.build(SMALL[op], "copy_engine", 2), change))


def test_what_is_right_only_apart_is_refused() -> None:
    """An all_reduce of two ranks that clears nothing up: rank 0 keeps its own part of a, which it has yet to push, in out."""
    problem = CollectiveProblem(op="all_gather", m=64, world_size=2, dtype="float32")
    schedule = weft.schedule.build(problem, "copy_engine", 1)
    lane, at = next((lane, at) for rank, lane, at in places(schedule, Copy) if lane.name == "copy" and rank == 0)
    step = lane.steps[at]
    assert isinstance(step, Copy)
    # Rank 0 writes what it gets over its own part first, and its own part back afterwards: apart from a that does no harm.
    wrong = Copy(replace(step.src, rows=(16, 32)), replace(step.src, buffer="out", rows=(0, 16)))
    compute = next(lane for lane in schedule.ranks[0] if lane.name == "compute")
    damaged = changed(schedule, 0, "compute", 0, wrong, compute.steps[0])
    with pytest.raises(weft.schedule.ScheduleError, match=r"touches a@0\["):
        weft.schedule.check(damaged)
    # In an all-to-all the two are never one: the same is allowed.
    separate = weft.schedule.build(replace(problem, op="all_to_all"), "copy_engine", 1)
    compute = next(lane for lane in separate.ranks[0] if lane.name == "compute")
    weft.schedule.check(changed(separate, 0, "compute", 0, wrong, compute.steps[0]))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"m": 10}, "m is 10; all_gather needs a multiple of world_size, 3"),
        ({"staging_bytes": 100}, "staging_bytes is 100; it must be a whole number of at least 65536"),
        ({"sms": 0}, "sms is 0"),
        ({"n": 2}, "all_gather has m alone"),
        ({"reduce_op": "avg"}, "all_gather sums nothing"),
        ({"op": "all_reduce", "dtype": "uint8"}, "all_reduce sums bfloat16, float16, float32"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_problems_that_are_none_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CollectiveProblem(**{"op": "all_gather", "m": 9, "world_size": 3, "dtype": "float32", **changes})  # type: ignore[arg-type]


def test_too_little_room_is_named() -> None:
    problem = CollectiveProblem(op="all_reduce", m=1 << 26, world_size=2, staging_bytes=1 << 16)
    with pytest.raises(ValueError, match=r"staging_bytes is 65536.* use at least (\d+) bytes") as raised:
        weft.schedule.build(problem, "copy_engine", 1)
    least = int(str(raised.value).split("use at least ")[1].split()[0])
    weft.schedule.build(replace(problem, staging_bytes=least), "copy_engine", 1)


def test_the_planner_prefers_nccl_for_small_ones_and_says_what_it_takes() -> None:
    h200 = machine.load("h200x8")
    small = plan(CollectiveProblem(op="all_gather", m=1 << 16, world_size=8, dtype="uint8"), h200)
    assert small.chosen.schedule == "sequential"
    assert "NCCL's all-gather takes" in small.why
    for op in COLLECTIVE_OPS:
        problem = CollectiveProblem(op=op, m=1 << 26, world_size=4, dtype="float32")
        found = [(schedule.name, run(schedule, h200).total_us) for schedule in candidates(problem)]
        fastest = {name: min(us for other, us in found if other == name) for name, _ in found}
        by_engines = min(us for name, us in fastest.items() if name != "sequential")
        assert 0.7 < by_engines / fastest["sequential"] < 1.5, (op, fastest)


def test_more_sms_sum_faster_up_to_the_memory() -> None:
    def us(sms: int) -> float:
        problem = CollectiveProblem(op="reduce_scatter", m=1 << 26, world_size=4, dtype="float32", sms=sms)
        return run(weft.schedule.build(problem, "copy_engine", 4), machine.load("h200x8")).total_us

    assert us(1) > 2 * us(4) > us(16)
    assert us(64) < 1.01 * us(128)
