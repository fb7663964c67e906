"""A Schedule as a value costs a call what a name costs, and is forgotten with its owner."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from conftest import RankFixture
from instructions import instructions

import weft
from weft.core.problem import Problem
from weft.core.schedule import Copy, Gemm, Schedule, Step
from weft.ops.common import schedule_to_spec
from weft.runtime.groups import GROUPS, Groups
from weft.schedules import build

PROBLEM = Problem(op="all_gather_matmul", m=64, n=16, k=8, world_size=2, dtype="float32")


def _instructions(schedule: str | Schedule) -> int:
    """What a call does with its schedule before it looks for the program."""
    return instructions(lambda: schedule_to_spec(schedule, "all_gather_matmul"))


def test_a_value_costs_what_a_name_costs() -> None:
    value = build(dataclasses.replace(PROBLEM, m=4096, world_size=8), "flag_gated", 8)
    schedule_to_spec(value, "all_gather_matmul")
    assert _instructions(value) < _instructions("flag_gated:8") + 100


def test_values_that_nobody_has_are_forgotten() -> None:
    groups = Groups()
    specs = {groups.keep(build(dataclasses.replace(PROBLEM, m=2 + 2 * number), "shard_p2p")) for number in range(1000)}
    assert len(specs) == 1000
    gc.collect()
    assert len(groups.values) == 0


def _what_is_left_of_a_call() -> tuple[bool, bool]:
    """Whether a Schedule value lives after its caller has dropped it, before and after the program is closed, too."""
    weft.close()
    a, b = torch.ones(32, 8), torch.ones(8, 8)
    schedule = build(PROBLEM, "flag_gated", 4)
    for _ in range(3):
        assert (weft.all_gather_matmul(a, b, schedule=schedule) == 8).all()
    alive = weakref.ref(schedule)
    del schedule
    state = GROUPS.state(torch.distributed.group.WORLD.group_name)
    gc.collect()
    before = alive() is not None
    state.forget(state.bound())
    weft.all_gather_matmul(a, b, schedule="flag_gated:4")  # the threads of lanes refer to their last call
    gc.collect()
    return before, alive() is not None


@pytest.mark.ranks
def test_a_value_lives_as_long_as_its_program_and_not_longer(ranks: RankFixture) -> None:
    assert ranks(2).run(_what_is_left_of_a_call) == [(True, False)] * 2


def test_equal_values_have_one_name() -> None:
    one, two = build(PROBLEM, "flag_gated", 2), build(PROBLEM, "flag_gated", 2)
    assert one is not two
    assert GROUPS.keep(one) == GROUPS.keep(two) != GROUPS.keep(build(PROBLEM, "flag_gated", 1))


def _equal_values() -> int:
    """How many programs two equal values bind."""
    weft.close()
    a, b = torch.ones(32, 8), torch.ones(8, 8)
    for _ in range(2):
        gc.collect()
        assert (weft.all_gather_matmul(a, b, schedule=build(PROBLEM, "flag_gated", 2)) == 8).all()
    state = GROUPS.state(torch.distributed.group.WORLD.group_name)
    return len(state.bound())


@pytest.mark.ranks
def test_equal_values_share_a_program(ranks: RankFixture) -> None:
    assert ranks(2).run(_equal_values) == [1, 1]


def _copied_out(problem: Problem) -> Schedule:
    """Products by way of a buffer, from which copies take them to the result."""
    schedule = build(problem, "shard_p2p", 1)
    out = schedule.buffer["out"]
    through = dataclasses.replace(out, name="through", kind="local")
    ranks = []
    for rank, lanes in enumerate(schedule.ranks):
        changed = []
        for lane in lanes:
            steps: list[Step] = []
            for step in lane.steps:
                if isinstance(step, Gemm):
                    parts = tuple(dataclasses.replace(p, out=dataclasses.replace(p.out, buffer="through")) for p in step.parts)
                    steps.append(dataclasses.replace(step, parts=parts))
                else:
                    steps.append(step)
            if lane.kind == "compute":
                steps.append(Copy(through.whole(rank), out.whole(rank)))
            changed.append(dataclasses.replace(lane, steps=tuple(steps)))
        ranks.append(tuple(changed))
    return dataclasses.replace(schedule, buffers=(*schedule.buffers, through), ranks=tuple(ranks))


def _several_results() -> str:
    schedule = _copied_out(PROBLEM)
    weft.schedule.check(schedule)
    a, b = torch.ones(32, 8), torch.ones(8, 8)
    assert (weft.all_gather_matmul(a, b, schedule=schedule) == 8).all()
    try:
        weft.all_gather_matmul(a, [b[:, :4].contiguous(), b[:, 4:].contiguous()], schedule=schedule)
    except ValueError as error:
        assert (weft.all_gather_matmul(a, b, schedule=schedule) == 8).all()  # the group goes on
        return str(error)
    return ""


@pytest.mark.ranks
def test_copies_of_a_result_that_is_several_matrices_are_refused(ranks: RankFixture) -> None:
    for message in ranks(2).run(_several_results):
        assert "with 2 b the result is 2 matrices" in message
