"""Proves collectives that run concurrently with a user's computation: each part by itself, then their common rules.

The collectives are also correct together. They share no memory. They are called one after the other, in one order on all ranks,
and the steps of a part wait for no other part. So those of the first one complete, and then the next one's do. The call of the
computation delays later calls of its lane, and the proof of a part holds for any delay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.checker.program import ScheduleError
from weft.core.concurrent import ConcurrentProblem, OpaqueCollective
from weft.core.parts import runs_by_library
from weft.core.schedule import Lane, Schedule, UserCall


def check_concurrent(schedule: Schedule, problem: ConcurrentProblem, check: Callable[[Schedule], None]) -> None:
    """Check a schedule of several collectives and a computation. Raises ScheduleError.

    check: proves the schedule of one collective.
    """
    count = len(problem.collectives)
    if len(schedule.ranks) != problem.world_size:
        raise ScheduleError(f"the schedule has {len(schedule.ranks)} ranks; its problem has {problem.world_size}")
    if schedule.buffers:
        raise ScheduleError(f"the schedule has buffers {sorted(schedule.buffer)}; leave them to its parts")
    if len(schedule.parts) != count:
        raise ScheduleError(f"the schedule has {len(schedule.parts)} parts; its problem has {count} collectives")
    callers = [_check_lanes(rank, lanes, schedule) for rank, lanes in enumerate(schedule.ranks)]
    for rank, lane in enumerate(callers):
        # With different numbers, NCCL would use two communicators, which would wait for each other forever.
        if lane.ctas != callers[0].ctas:
            raise ScheduleError(
                f"ctas is {lane.ctas} on rank {rank}, lane {lane.name}, and {callers[0].ctas} on rank 0, lane "
                f"{callers[0].name}; use one number"
            )
    for number, (one, part) in enumerate(zip(problem.collectives, schedule.parts, strict=True)):
        if isinstance(one, OpaqueCollective) or part is None:
            if not (isinstance(one, OpaqueCollective) and part is None):
                raise ScheduleError(f"part {number} is {part}, for {one}; only collectives that are not described have None")
            continue
        blocks = one.sms if runs_by_library(part) else callers[0].ctas or one.sms
        if part.problem != replace(one, sms=blocks):
            raise ScheduleError(f"part {number} is for {part.problem}; the collective is {one}, with {blocks} SMs")
        try:
            check(part)
        except ScheduleError as error:
            raise ScheduleError(f"collective {number}: {error}") from None


def _check_lanes(rank: int, lanes: tuple[Lane, ...], schedule: Schedule) -> Lane:
    """Check that the compute lane calls the computation once, and that one lane calls all collectives, one after the other.

    Returns that lane.
    """
    calls = []
    for lane in lanes:
        for position, step in enumerate(lane.steps):
            if not isinstance(step, UserCall):
                raise ScheduleError(f"rank {rank}, lane {lane.name}, step {position} ({step}): lanes have calls alone")
            calls.append((lane, step.collective))
    computing = [lane for lane, number in calls if number is None]
    if len(computing) != 1 or computing[0].kind != "compute":
        where = ", ".join(f"{lane.name} of kind {lane.kind}" for lane in computing) or "no lane"
        raise ScheduleError(f"rank {rank} calls the computation on {where}; it needs one call, on a lane of kind compute")
    callers = [lane for lane in lanes if any(one is lane and number is not None for one, number in calls)]
    if len(callers) > 1:
        names = ", ".join(sorted(lane.name for lane in callers))
        raise ScheduleError(
            f"rank {rank} calls collectives on lanes {names}; use one lane, so that they run one after the other"
        )
    numbers = [number for _, number in calls if number is not None]
    if numbers != [*range(len(schedule.parts))]:
        raise ScheduleError(f"rank {rank} calls collectives {numbers}; it has to call {len(schedule.parts)} in their order")
    by_library = {runs_by_library(part) for part in schedule.parts}
    kinds = ("compute", "network") if by_library == {True} else ("copy",) if by_library == {False} else ()
    if callers[0].kind not in kinds:
        raise ScheduleError(
            f"rank {rank} calls collectives on lane {callers[0].name} of kind {callers[0].kind}; lanes of kind compute and "
            "network call NCCL's, and lanes of kind copy all others: use NCCL for all collectives or for none"
        )
    return callers[0]
