"""What schedules are made of, and what is done with one: build, check, draw and simulate it.

    schedule = weft.schedule.build(problem, "flag_gated", 2)
    weft.schedule.check(schedule)                         raises ScheduleError unless every execution is right
    print(weft.schedule.timeline(schedule))
    spans = weft.schedule.simulate(schedule, "h200x8")
    weft.schedule.register("mine", builder, ops="all_gather_matmul")     from then on "mine" is a name like "flag_gated"

Operators take a Schedule as `schedule=`. One written by hand consists of the buffers, lanes and steps that are named here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.core.lazy import lazy_names

if TYPE_CHECKING:
    from weft.checker import ScheduleError, check
    from weft.checker.families import register
    from weft.core.concurrent import ConcurrentProblem
    from weft.core.problem import RaggedProblem, Span1D, split
    from weft.core.schedule import (
        Bags,
        Buffer,
        Collective,
        Copy,
        Flag,
        Gemm,
        Lane,
        Lookup,
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
    from weft.core.span import Span, total_us
    from weft.perf import simulate
    from weft.schedules import build
    from weft.schedules.builder import Request
    from weft.schedules.timelines import timeline

__all__ = [
    "Bags",
    "Buffer",
    "Collective",
    "ConcurrentProblem",
    "Copy",
    "Flag",
    "Gemm",
    "Lane",
    "Lookup",
    "Part",
    "Push",
    "RaggedProblem",
    "Reduce",
    "Region",
    "Request",
    "Schedule",
    "ScheduleError",
    "Signal",
    "Span",
    "Span1D",
    "Step",
    "Store",
    "Sum",
    "Wait",
    "build",
    "check",
    "register",
    "simulate",
    "split",
    "timeline",
    "total_us",
]

_HOMES = {
    **dict.fromkeys(__all__, "weft.core.schedule"),
    "ConcurrentProblem": "weft.core.concurrent",
    "RaggedProblem": "weft.core.problem",
    "ScheduleError": "weft.checker",
    "Request": "weft.schedules.builder",
    "Span": "weft.core.span",
    "Span1D": "weft.core.problem",
    "build": "weft.schedules",
    "check": "weft.checker",
    "register": "weft.checker.families",
    "simulate": "weft.perf",
    "split": "weft.core.problem",
    "timeline": "weft.schedules.timelines",
    "total_us": "weft.core.span",
}
"""The module in which each name is defined."""
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
