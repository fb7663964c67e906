"""Proves collectives that run concurrently with a user's computation: each collective by itself, then their common rules.

Every buffer and flag belongs to one collective (`weft.core.concurrent.number_of`), and in each lane the steps of a collective
come before those of the next. So the steps of each collective are a schedule, which is proved as any other. The collectives are
also correct together. They share no memory. The first collective's steps wait for no other's, so they complete, and then the
next collective's do. A UserCall accesses none of the schedule's buffers. It delays later steps of its lane, and the proof of a
collective holds for any delay.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.checker.program import ScheduleError
from weft.core.concurrent import ConcurrentProblem, OpaqueCollective, number_of
from weft.core.schedule import Collective, Lane, Schedule, Step, UserCall, collective_numbers, steps_of
from weft.schedules.concurrent import alone, numbers


def check_concurrent(schedule: Schedule, problem: ConcurrentProblem, check: Callable[[Schedule], None]) -> None:
    """Check a schedule of several collectives and a computation. Raises ScheduleError.

    check: proves the schedule of one collective.
    """
    if len(schedule.ranks) != problem.world_size:
        raise ScheduleError(f"the schedule has {len(schedule.ranks)} ranks; its problem has {problem.world_size}")
    for rank, lanes in enumerate(schedule.ranks):
        _check_calls(rank, lanes, problem)
        _check_lanes(rank, lanes)
        for lane in lanes:
            _check_order(rank, lane, problem)
    _check_blocks(schedule)
    for buffer in schedule.buffers:
        if number_of(buffer.name) >= len(problem.collectives):
            raise ScheduleError(f"buffer {buffer.name} belongs to no collective; the problem has {len(problem.collectives)}")
    for number, _ in problem.known:
        try:
            check(alone(schedule, number))
        except ScheduleError as error:
            raise ScheduleError(f"collective {number}: {error}") from None


def _check_calls(rank: int, lanes: tuple[Lane, ...], problem: ConcurrentProblem) -> None:
    """Check that the compute lane calls the computation once, and that one lane calls each opaque collective once."""
    found = [(lane, step) for lane in lanes for step in steps_of(UserCall, [lane])]
    computing = [lane for lane, step in found if step.collective is None]
    if len(computing) != 1 or computing[0].kind != "compute":
        where = ", ".join(f"{lane.name} of kind {lane.kind}" for lane in computing) or "no lane"
        raise ScheduleError(f"rank {rank} calls the computation on {where}; it needs one call, on a lane of kind compute")
    opaque = [i for i, one in enumerate(problem.collectives) if isinstance(one, OpaqueCollective)]
    called = sorted(step.collective for _, step in found if step.collective is not None)
    if called != opaque:
        raise ScheduleError(f"rank {rank} calls collectives {called}; those that are not described are {opaque}")


def _check_lanes(rank: int, lanes: tuple[Lane, ...]) -> None:
    """Check that collectives run one after the other.

    NCCL's run on one lane of kind compute or network, which has nothing else. The steps of others run on other lanes, which are
    enqueued together.
    """
    by_nccl = [lane for lane in lanes if any(map(_is_nccl, lane.steps))]
    moving = [lane for lane in lanes if lane.steps and lane.kind not in ("compute", "network")]
    if len(by_nccl) > 1:
        raise ScheduleError(f"rank {rank} has NCCL's collectives on lanes {_names(by_nccl)}; use one lane")
    if by_nccl and moving:
        raise ScheduleError(
            f"rank {rank} has NCCL's collectives on lane {_names(by_nccl)}, and other steps on {_names(moving)}; use NCCL "
            "for all collectives or for none, so that they run one after the other"
        )
    for lane in lanes:
        for position, step in enumerate(lane.steps):
            if (lane.kind in ("compute", "network")) != isinstance(step, (Collective, UserCall)):
                raise ScheduleError(
                    f"rank {rank}, lane {lane.name}, step {position} ({step}): lanes of kind compute and network have NCCL's "
                    "collectives and calls of the user's own, and other lanes have all other steps"
                )
    at = next(at for at, lane in enumerate(lanes) if any(call.collective is None for call in steps_of(UserCall, [lane])))
    if len({(lane.priority, lanes.index(lane) > at) for lane in moving}) > 1:
        raise ScheduleError(
            f"rank {rank} has lanes {_names(moving)}, which are enqueued together; give all the same priority, and list all "
            f"before lane {lanes[at].name} or all after it"
        )


def _check_blocks(schedule: Schedule) -> None:
    """Check that a collective's kernels have the same number of blocks on all ranks.

    With different numbers, NCCL would use two communicators, which would wait for each other forever.
    """
    found: dict[bool, tuple[int, str]] = {}
    for rank, lanes in enumerate(schedule.ranks):
        for lane in lanes:
            by_nccl = any(map(_is_nccl, lane.steps))
            if not by_nccl and (lane.kind != "blocks" or not lane.steps):
                continue
            first, where = found.setdefault(by_nccl, (lane.ctas, f"rank {rank}, lane {lane.name}"))
            if lane.ctas != first:
                raise ScheduleError(
                    f"ctas is {lane.ctas} on rank {rank}, lane {lane.name}, and {first} on {where}; use one number"
                )


def _is_nccl(step: Step) -> bool:
    return isinstance(step, Collective) or bool(collective_numbers(step))


def _names(lanes: list[Lane]) -> str:
    return ", ".join(sorted(lane.name for lane in lanes))


def _check_order(rank: int, lane: Lane, problem: ConcurrentProblem) -> None:
    last = 0
    for position, step in enumerate(lane.steps):
        where = f"rank {rank}, lane {lane.name}, step {position} ({step})"
        found = set(numbers(step))
        if len(found) > 1:
            raise ScheduleError(f"{where}: it touches buffers or flags of collectives {sorted(found)}; use a step for each")
        number = next(iter(found), last)
        if not last <= number < len(problem.collectives):
            raise ScheduleError(f"{where}: it is of collective {number}, behind a step of {last}; they run in their order")
        last = number
