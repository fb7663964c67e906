"""The checker on schedules with FP8 operands: where scales are stored, and which steps may read them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft import schedules
from weft.checker import ScheduleError, check
from weft.core.problem import Problem, Recipe, Scaling
from weft.core.schedule import Buffer, Copy, Region, Schedule, Step


def problem(recipe: Recipe = "rowwise", **more: bool) -> Problem:
    scaling = Scaling(recipe=recipe, **more)  # type: ignore[arg-type]
    return Problem(op="all_gather_matmul", m=8, n=64, k=512, world_size=2, scaling=scaling)


def with_copy(schedule: Schedule, step: Step, buffer: Buffer) -> Schedule:
    """The schedule with a further buffer, and a further step at the end of the first rank's compute lane."""
    first, *others = schedule.ranks
    lanes = tuple(replace(lane, steps=(*lane.steps, step)) if lane.kind == "compute" else lane for lane in first)
    return replace(schedule, buffers=(*schedule.buffers, buffer), ranks=(lanes, *others))


def copied(recipe: Recipe, columns: tuple[int, int], operand: str = "a") -> Schedule:
    """A sequential schedule that also copies some columns of its own rows."""
    wide = columns[1] - columns[0]
    copied = Buffer("copied", "local", (4, 4), (512, 512), operand=operand)  # type: ignore[arg-type]
    step = Copy(Region("a", 0, (0, 4), columns), Region("copied", 0, (0, 4), (columns[0], columns[0] + wide)))
    return with_copy(schedules.build(problem(recipe), "sequential"), step, copied)


def test_columns_that_share_a_scale_are_not_cut() -> None:
    check(copied("rowwise", (0, 512)))
    check(copied("blockwise", (128, 384)))
    with pytest.raises(ScheduleError, match="has columns 0 to 256 of FP8 elements; its columns must be all 512"):
        check(copied("rowwise", (0, 256)))
    with pytest.raises(
        ScheduleError, match="has columns 64 to 320 of FP8 elements; its columns must begin and end at multiples"
    ):
        check(copied("blockwise", (64, 320)))


def test_a_copy_does_not_change_what_elements_are() -> None:
    with pytest.raises(ScheduleError, match="differ in dtype; a copy moves bytes"):
        check(copied("rowwise", (0, 512), operand=""))


@pytest.mark.parametrize("name", ["a", "b", "gathered"])
def test_the_callers_operands_are_fp8(name: str) -> None:
    gathered = replace(problem(), return_gathered=True)
    schedule = schedules.build(gathered, "sequential")
    plain = tuple(replace(one, operand="") if one.name == name else one for one in schedule.buffers)
    with pytest.raises(ScheduleError, match=f"buffer {name} has operand ''; the problem's scaling needs"):
        check(replace(schedule, buffers=plain))


def test_without_scaling_nothing_is_fp8() -> None:
    schedule = schedules.build(replace(problem(), scaling=None), "sequential")
    buffers = tuple(replace(one, operand="a") if one.name == "a_full" else one for one in schedule.buffers)
    with pytest.raises(ScheduleError, match="buffer a_full has operand 'a', but the problem has no scaling"):
        check(replace(schedule, buffers=buffers))


def test_only_a_push_quantises() -> None:
    """A copy of the rows that a push would quantise is refused."""
    schedule = schedules.build(problem(quantises=True), "sequential")
    check(schedule)
    step = Copy(Region("a", 0, (0, 4), (0, 512)), Region("copied", 0, (0, 4), (0, 512)))
    with pytest.raises(ScheduleError, match="differ in dtype; a copy moves bytes"):
        check(with_copy(schedule, step, Buffer("copied", "local", (4, 4), (512, 512), operand="a")))
