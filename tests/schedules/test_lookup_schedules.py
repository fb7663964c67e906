"""Schedules of embedding_bag_all_to_all as values: right for any tables, and refused once anything is taken away or moved."""

from __future__ import annotations

from dataclasses import replace

import pytest

import weft
from weft.core import codec, machine
from weft.core.problem import LookupProblem
from weft.core.schedule import Bags, Lookup, Schedule, Step
from weft.perf import run
from weft.planner import plan
from weft.schedules import candidates, names

TABLES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((8,),),
    ((8, 4), (4,), (16,)),
    ((8,), (), (4, 4), (92,)),
    ((), (3,)),
    ((5, 7),) * 8,
)


@pytest.mark.parametrize("dims", TABLES, ids=str)
@pytest.mark.parametrize("batch", [0, 1, 3, 16])
def test_every_schedule_is_proved_and_goes_to_json_and_back(dims: tuple[tuple[int, ...], ...], batch: int) -> None:
    problem = LookupProblem.of(batch=batch, dims=dims, pooling=3, mode="mean")
    assert codec.loads(LookupProblem, codec.dumps(problem)) == problem
    for schedule in candidates(problem):
        weft.schedule.check(schedule)
        assert codec.loads(Schedule, codec.dumps(schedule)) == schedule
        run(schedule, machine.load("h200x8"))


PROBLEM = LookupProblem.of(batch=8, dims=((4, 2), (8,), (3,)))


def _changed(schedule: Schedule, rank: int, lane: str, change: dict[int, tuple[Step, ...]]) -> Schedule:
    """The schedule with steps of a lane, by position, replaced."""
    lanes = []
    for one in schedule.ranks[rank]:
        steps = [s for i, old in enumerate(one.steps) for s in (change.get(i, (old,)) if one.name == lane else (old,))]
        lanes.append(replace(one, steps=tuple(steps)))
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(lanes), *schedule.ranks[rank + 1 :]))


def _positions(schedule: Schedule, rank: int, lane: str, kind: type) -> list[int]:
    (steps,) = (one.steps for one in schedule.ranks[rank] if one.name == lane)
    return [i for i, step in enumerate(steps) if isinstance(step, kind)]


def _part_changed(part: Bags) -> Schedule:
    schedule = weft.schedule.build(PROBLEM, "direct_store", 1)
    (at,) = _positions(schedule, 0, "compute", Lookup)
    (steps,) = (lane.steps for lane in schedule.ranks[0] if lane.name == "compute")
    parts = steps[at].parts  # type: ignore[union-attr]
    return _changed(schedule, 0, "compute", {at: (Lookup((part, *parts[1:])),)})  # type: ignore[arg-type]


def test_bags_in_the_wrong_place_are_named() -> None:
    schedule = weft.schedule.build(PROBLEM, "direct_store", 1)
    (lookup,) = (s for _, lane, _, s in schedule if isinstance(s, Lookup) and lane is schedule.ranks[0][0])
    part = lookup.parts[0]
    other_rows = replace(part, bags=replace(part.bags, rows=(5, 8)))
    with pytest.raises(weft.schedule.ScheduleError, match=r"leaves out@1\[.*with P\[.*the result there is P\["):
        weft.schedule.check(_part_changed(other_rows))
    cut = replace(part, bags=replace(part.bags, cols=(0, 5)), out=replace(part.out, cols=(0, 5)))
    with pytest.raises(weft.schedule.ScheduleError, match=r"cuts a table; the tables of rank 0 end at columns \[0, 4, 6\]"):
        weft.schedule.check(_part_changed(cut))
    narrow = replace(part, out=replace(part.out, cols=(0, 4)))
    with pytest.raises(weft.schedule.ScheduleError, match=r"has shape .* but it is looked up into"):
        weft.schedule.check(_part_changed(narrow))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mode": "max"}, "mode is 'max'; use 'sum' or 'mean'"),
        ({"dims": ((4, 0), (8,))}, "whole numbers of at least 1"),
        ({"batch": -1}, "m is -1"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_problems_that_are_none_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LookupProblem.of(**{"batch": 8, "dims": ((4, 2), (8,)), **changes})  # type: ignore[arg-type]


def test_sizes_that_do_not_fit_the_tables_are_refused() -> None:
    with pytest.raises(ValueError, match=r"n is 3 .*b_sizes \(\); for these dims they must be 4 and \(4,\)"):
        LookupProblem(m=8, n=3, k=1, world_size=1, dims=((4,),))


@pytest.mark.slow
def test_the_planner_hides_the_exchange_of_large_lookups() -> None:
    large = plan(LookupProblem.of(batch=8192, dims=((128,) * 32,) * 8, pooling=32), machine.load("h200x8"))
    assert large.chosen.schedule == "direct_store"
    assert "the lookup alone takes" in large.why
    assert large.sequential_us > 1.15 * large.chosen.predicted_us
    assert {spec.partition(":")[0] for spec in large.estimates} <= set(names("embedding_bag_all_to_all"))
    small = plan(LookupProblem.of(batch=64, dims=((16,),) * 8), machine.load("h200x8"))
    assert small.chosen.schedule == "sequential"
