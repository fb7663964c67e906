"""Joins the parts of a schedule for a ConcurrentProblem into one list of lanes, for timelines and predictions.

    the schedule             lane copy: call 0, call 1      lane compute: call computation
    its parts                0: lanes copy, compute         1: lanes copy, compute
    joined                   lane copy: steps of 0, steps of 1      lane blocks.local: likewise      lane compute

The part of a call that NCCL runs takes the place of the call. All other parts have lanes of their own, on which the steps of a
collective come after those of the one before. The compute lane of such a part is the lane `blocks.local`, because the user's
computation has the compute lane.

The buffers and flags of collective i have names that end in ".i": "a.1", "out.1". Those of the first collective have their own
names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from weft.core.schedule import Collective, Flag, Lane, Region, Schedule, Step, UserCall, steps_of

LOCAL = "blocks.local"
"""The lane for the steps that a part has on its compute lane."""


def runs_by_library(part: Schedule | None) -> bool:
    """Return whether NCCL runs a part: communication that is not described, or one Collective on each rank."""
    if part is None:
        return True
    steps = [[step for lane in lanes for step in lane.steps] for lanes in part.ranks]
    return all(len(own) == 1 and isinstance(own[0], Collective) for own in steps)


def named(name: str, number: int) -> str:
    """Return the name that a buffer or flag of collective `number` has in the joined schedule.

    >>> named("out", 0), named("out", 2)
    ('out', 'out.2')
    """
    return f"{name}.{number}" if number else name


def joined(schedule: Schedule) -> Schedule:
    """Return the schedule with the steps of its parts in place of their calls. One that has no parts is returned as it is."""
    if not schedule.parts:
        return schedule
    buffers = tuple(
        replace(buffer, name=named(buffer.name, number), collective=number)
        for number, part in enumerate(schedule.parts)
        if part is not None
        for buffer in part.buffers
    )
    ranks = tuple(
        tuple(one for lane in lanes for one in _lanes(schedule, rank, lane)) for rank, lanes in enumerate(schedule.ranks)
    )
    return replace(schedule, buffers=buffers, ranks=ranks, parts=())


def _lanes(schedule: Schedule, rank: int, lane: Lane) -> list[Lane]:
    """Return the lanes that have the steps of the parts that a lane calls."""
    numbers = [step.collective for step in steps_of(UserCall, [lane]) if step.collective is not None]
    if all(runs_by_library(schedule.parts[number]) for number in numbers):
        return [replace(lane, steps=tuple(one for step in lane.steps for one in _steps_of_call(schedule, rank, step)))]
    found: dict[str, Lane] = {}
    for number in numbers:
        part = schedule.parts[number]
        for own in part.ranks[rank] if part is not None else ():
            name, kind = (LOCAL, "blocks") if own.kind == "compute" else (own.name, own.kind)
            empty = Lane(name, kind, (), lane.priority, lane.ctas if kind == "blocks" else 0)  # type: ignore[arg-type]
            before = found.setdefault(name, empty)
            found[name] = replace(before, steps=(*before.steps, *_renamed_steps(own, number)))
    return list(found.values())


def _steps_of_call(schedule: Schedule, rank: int, step: Step) -> tuple[Step, ...]:
    """Return the steps of the part that NCCL runs, or the call itself if it is of something that is not described."""
    number = step.collective if isinstance(step, UserCall) else None
    part = schedule.parts[number] if number is not None else None
    if number is None or part is None:
        return (step,)
    return tuple(one for lane in part.ranks[rank] for one in _renamed_steps(lane, number))


def _renamed_steps(lane: Lane, number: int) -> tuple[Step, ...]:
    return tuple(_renamed(step, lambda name: named(name, number)) for step in lane.steps) if number else lane.steps


def _renamed(value: Any, rename: Callable[[str], str]) -> Any:
    """Return a step, or a part of one, with other names for its buffers and flags."""
    if isinstance(value, Region):
        return replace(value, buffer=rename(value.buffer))
    if isinstance(value, Flag):
        return replace(value, name=rename(value.name))
    if isinstance(value, tuple):
        return tuple(_renamed(item, rename) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _renamed(getattr(value, field.name), rename) for field in fields(value)})
    return value
