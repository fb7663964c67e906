"""Families of schedules as a user registers them: those of flag_gated, whose GEMM takes its parts in reverse order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import weft
from weft.core.schedule import Gemm, Lane, Schedule, Wait
from weft.schedule import Request
from weft.schedules import FAMILIES
from weft.schedules.builder import Build

NAME = "backwards"


def backwards(request: Request) -> Schedule:
    """Multiply the parts in reverse order."""
    schedule = weft.schedule.build(request.problem, "flag_gated", request.chunks, fan_out=request.fan_out)
    ranks = tuple(tuple(_reversed(lane) for lane in lanes) for lanes in schedule.ranks)
    return replace(schedule, name=request.name, ranks=ranks)


def _reversed(lane: Lane) -> Lane:
    steps = [replace(step, parts=step.parts[::-1]) if isinstance(step, Gemm) else step for step in lane.steps]
    return replace(lane, steps=tuple(steps))


def forwards(request: Request) -> Schedule:
    """Another program, in which the parts have their usual order."""
    return replace(weft.schedule.build(request.problem, "flag_gated", request.chunks), name=request.name)


def without_free(request: Request) -> Schedule:
    """Without the wait until peers have read what the call before brought them. With one rank nothing is missing."""
    schedule = backwards(request)
    return replace(schedule, ranks=tuple(tuple(_without_waits_for_free(lane) for lane in lanes) for lanes in schedule.ranks))


def _without_waits_for_free(lane: Lane) -> Lane:
    return replace(lane, steps=tuple(step for step in lane.steps if not (isinstance(step, Wait) and step.on_previous_call)))


@contextmanager
def registered(builder: Build = backwards, name: str = NAME, **options: Any) -> Iterator[None]:
    """A family that is gone afterwards, which is for tests alone: what has been built by its name may be kept somewhere."""
    weft.schedule.register(name, builder, **{"ops": "all_gather_matmul", **options})
    try:
        yield
    finally:
        del FAMILIES[name]
