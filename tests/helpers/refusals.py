"""What the checker says of a schedule of which a step is changed."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from damage import places, step_at, with_step

from weft.checker import ScheduleError, check
from weft.core.schedule import Region, Schedule


def refused(schedule: Schedule, *words: str) -> str:
    """The checker's message, which holds all the words in this order."""
    with pytest.raises(ScheduleError, match=".*".join(map(re.escape, words))) as error:
        check(schedule)
    return str(error.value)


def refusal(schedule: Schedule) -> str:
    """What the checker says; nothing if it accepts."""
    try:
        check(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


def first(schedule: Schedule, kind: Any, rank: int = 0) -> tuple[int, int, int]:
    return next(p for p in places(schedule, lambda step: isinstance(step, kind)) if p[0] == rank)


def change(schedule: Schedule, kind: Any, **fields: Any) -> Schedule:
    """The first such step of rank 0 with other fields."""
    place = first(schedule, kind)
    return with_step(schedule, place, dataclasses.replace(step_at(schedule, place), **fields))


def change_part(schedule: Schedule, kind: Any, number: int, **fields: Any) -> Schedule:
    step = step_at(schedule, first(schedule, kind))
    parts = list(step.parts)
    parts[number] = dataclasses.replace(parts[number], **fields)
    return change(schedule, kind, parts=tuple(parts))


def region(name: str, rank: int, rows: tuple[int, int], cols: tuple[int, int]) -> Region:
    return Region(name, rank, rows, cols)
