"""The proof of collectives beside a user's computation: each collective by itself, and what they have in common.

Every buffer and flag belongs to one collective (`weft.core.concurrent.number_of`), and in each lane the steps of a collective
come before those of the next. So each collective's steps are a schedule, which is proved as any other, and together they are
right: they share no memory; and the first collective's steps, which wait for nothing of the others', come to their end,
after which the next one's do. A UserCall touches none of the schedule's buffers; it delays what is behind it in its lane, and
the proof of a collective holds for any delay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from weft.checker.program import ScheduleError
from weft.core.concurrent import ConcurrentProblem, OpaqueCollective, number_of, plain
from weft.core.problem import CollectiveProblem
from weft.core.schedule import Collective, Lane, Schedule, Step, UserCall, advances, regions, waits
from weft.schedules.concurrent import renamed


def check_concurrent(schedule: Schedule, problem: ConcurrentProblem, check: Callable[[Schedule], None]) -> None:
    """check: proves the schedule of one collective. Raises ScheduleError."""
    if len(schedule.ranks) != problem.world_size:
        raise ScheduleError(f"the schedule has {len(schedule.ranks)} ranks; its problem has {problem.world_size}")
    for rank, lanes in enumerate(schedule.ranks):
        _check_calls(rank, lanes, problem)
        for lane in lanes:
            _check_order(rank, lane, problem)
    for buffer in schedule.buffers:
        if number_of(buffer.name) >= len(problem.collectives):
            raise ScheduleError(f"buffer {buffer.name} belongs to no collective; the problem has {len(problem.collectives)}")
    for number, one in problem.known:
        try:
            check(_alone(schedule, number, one))
        except ScheduleError as error:
            raise ScheduleError(f"collective {number}: {error}") from None


def _check_calls(rank: int, lanes: tuple[Lane, ...], problem: ConcurrentProblem) -> None:
    """The computation is called once, on the compute lane, and so is each collective that is not described, on one lane."""
    found = [(lane, step) for lane in lanes for step in lane.steps if isinstance(step, UserCall)]
    computing = [lane for lane, step in found if step.collective is None]
    if len(computing) != 1 or computing[0].kind != "compute":
        where = ", ".join(f"{lane.name} of kind {lane.kind}" for lane in computing) or "no lane"
        raise ScheduleError(f"rank {rank} calls the computation on {where}; it needs one call, on a lane of kind compute")
    opaque = [i for i, one in enumerate(problem.collectives) if isinstance(one, OpaqueCollective)]
    called = sorted(step.collective for _, step in found if step.collective is not None)
    if called != opaque:
        raise ScheduleError(f"rank {rank} calls collectives {called}; those that are not described are {opaque}")
    vendors = {lane.name for lane in lanes for step in lane.steps if isinstance(step, Collective)}
    vendors |= {lane.name for lane, step in found if step.collective is not None}
    if len(vendors) > 1:
        raise ScheduleError(f"rank {rank} has the vendor's collectives on lanes {', '.join(sorted(vendors))}; use one lane")


def _check_order(rank: int, lane: Lane, problem: ConcurrentProblem) -> None:
    last = 0
    for position, step in enumerate(lane.steps):
        where = f"rank {rank}, lane {lane.name}, step {position} ({step})"
        numbers = set(_numbers(step))
        if len(numbers) > 1:
            raise ScheduleError(f"{where}: it touches buffers or flags of collectives {sorted(numbers)}; use a step for each")
        number = next(iter(numbers), last)
        if not last <= number < len(problem.collectives):
            raise ScheduleError(f"{where}: it is of collective {number}, behind a step of {last}; they run in their order")
        last = number


def _numbers(step: Step) -> Iterator[int]:
    """Of the collectives that a step belongs to."""
    if isinstance(step, UserCall):
        yield from () if step.collective is None else (step.collective,)
    yield from (number_of(region.buffer) for region in regions(step))
    yield from (number_of(wait.flag.name) for wait in waits(step))
    yield from (number_of(flag.name) for flag in advances(step))


def _alone(schedule: Schedule, number: int, problem: CollectiveProblem) -> Schedule:
    """The part of a schedule that is one collective's, as a schedule of that problem."""
    buffers = (buffer for buffer in schedule.buffers if number_of(buffer.name) == number)
    return Schedule(
        problem=problem,
        name=schedule.name,
        buffers=tuple(replace(buffer, name=plain(buffer.name)) for buffer in buffers),
        ranks=tuple(tuple(_own(lane, number) for lane in lanes) for lanes in schedule.ranks),
    )


def _own(lane: Lane, number: int) -> Lane:
    """A network lane has the vendor's collectives here, which are kernels as any: they need SMs."""
    steps = (step for step in lane.steps if not isinstance(step, UserCall) and number in _numbers(step))
    kind = "blocks" if lane.kind == "network" else lane.kind
    return Lane(lane.name, kind, tuple(renamed(step, plain) if number else step for step in steps))
