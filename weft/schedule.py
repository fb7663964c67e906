"""What schedules are made of, and what is done with one: build, check, draw and simulate it.

    schedule = weft.schedule.build(problem, "flag_gated", 2)
    weft.schedule.check(schedule)                         raises ScheduleError unless every execution is right
    print(weft.schedule.timeline(schedule))
    spans = weft.schedule.simulate(schedule, "h200x8")
    weft.schedule.register("mine", builder, ops="all_gather_matmul")     from then on "mine" is a name like "flag_gated"

Operators take a Schedule as `schedule=`. One written by hand consists of Buffers and of Lanes, which have these steps:

    Copy(src, dst)                       copy a region; one of the two may be on a peer
    Push((Store(src, dst, count), ..))   one kernel that stores regions of a local buffer, at peers too
    Gemm(b, (Part(a, out), ..))          one kernel, out = a @ b for each part; a part may wait, signal, add, store at a peer
    Reduce((Sum(srcs, out), ..))         one kernel that sums in float32, in the order of srcs; sources may be on peers
    Norm(src, weight, out, eps)          one kernel that normalises whole rows, for a problem with norm_eps
    Lookup((Bags(bags, out), ..))        one kernel that looks up and pools rows of embedding tables
    Collective(op, src, dst)             a collective of NCCL over all ranks
    Wait(flag)                           wait for the signal of this call, or of the previous one
    Signal(flag)                         signal a flag of any rank, when the earlier steps of the lane are done

A lane of kind copy runs Copy, Wait and Signal. Lanes of kind compute and blocks run all of them. A Region is a rectangle of a
Buffer on a rank, and a Flag belongs to the rank that waits for it. docs/write-a-schedule.md writes a builder.
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
        Norm,
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
    "Norm",
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
