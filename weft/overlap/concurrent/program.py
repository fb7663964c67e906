"""The part of a checked schedule that one rank runs: its own lanes, in the order in which they are enqueued.

    lane of kind compute     NCCL's collectives before the computation, the computation, NCCL's collectives after it
    lane of kind network     NCCL's collectives on a separate stream
    all other lanes          the steps of each collective, as a schedule of its own (weft.schedules.concurrent.alone), which the
                             runtime binds and runs as weft.collectives does. They start from a separate stream

A lane that is listed after the computation's lane is enqueued after the computation. Collectives run one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.concurrent import ConcurrentProblem
from weft.core.schedule import Lane, Schedule, UserCall, places_of
from weft.schedules.concurrent import alone, numbers


@dataclass(frozen=True)
class CollectivePart:
    """One collective of a program.

    number: its index among the collectives of the call.
    steps: its own schedule, or None if NCCL runs it.
    ctas: the number of NCCL's blocks. With 0 NCCL chooses it.
    """

    number: int
    steps: Schedule | None = None
    ctas: int = 0


@dataclass(frozen=True)
class SideStream:
    """Collectives that run on a separate stream.

    late: they are enqueued after the computation.
    """

    parts: tuple[CollectivePart, ...]
    priority: bool
    late: bool


@dataclass(frozen=True, kw_only=True)
class Program:
    """One rank's part of a schedule.

    name: the name of the schedule.
    computation: the user's call, with the limits that it keeps.
    before, after: collectives on the caller's stream.
    side_stream: collectives on a separate stream, if there are any.
    """

    name: str
    computation: UserCall
    before: tuple[CollectivePart, ...] = ()
    after: tuple[CollectivePart, ...] = ()
    side_stream: SideStream | None = None

    @property
    def parts(self) -> tuple[CollectivePart, ...]:
        return (*self.before, *(self.side_stream.parts if self.side_stream else ()), *self.after)

    @property
    def priority(self) -> bool:
        return self.side_stream is not None and self.side_stream.priority


def program_of(schedule: Schedule, rank: int) -> Program:
    """Return the program of a rank. `schedule` is checked, and solves a ConcurrentProblem."""
    lanes = schedule.ranks[rank]
    compute, position, computation = next(place for place in places_of(UserCall, lanes) if place[2].collective is None)
    at = lanes.index(compute)
    others = [(index > at, lane) for index, lane in enumerate(lanes) if index != at and lane.steps]
    side_stream = None
    if others:
        late, lane = others[0]
        parts = _nccl_parts(lane, 0, len(lane.steps)) if lane.kind == "network" else _moved(schedule)
        side_stream = SideStream(parts, lane.priority, late)
    return Program(
        name=schedule.name,
        computation=computation,
        before=_nccl_parts(compute, 0, position),
        after=_nccl_parts(compute, position + 1, len(compute.steps)),
        side_stream=side_stream,
    )


def _nccl_parts(lane: Lane, begin: int, end: int) -> tuple[CollectivePart, ...]:
    return tuple(CollectivePart(next(numbers(step)), ctas=lane.ctas) for step in lane.steps[begin:end])


def _moved(schedule: Schedule) -> tuple[CollectivePart, ...]:
    assert isinstance(schedule.problem, ConcurrentProblem)
    return tuple(CollectivePart(number, alone(schedule, number)) for number, _ in schedule.problem.known)
