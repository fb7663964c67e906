"""What one rank runs of a checked schedule: its own lanes, in the order in which they are enqueued.

    lane of kind compute     collectives of NCCL's ahead of the computation, the computation, collectives behind it
    lane of kind network     collectives of NCCL's on a stream of their own
    all other lanes          the steps of each collective: a schedule by itself (weft.schedules.concurrent.alone), which the
                             runtime binds and runs as weft.collectives does. They start from a stream of their own

A lane that is listed behind the one of the computation is enqueued after the computation. Collectives run one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.concurrent import ConcurrentProblem
from weft.core.schedule import Lane, Schedule, UserCall, places_of
from weft.schedules.concurrent import alone, numbers


@dataclass(frozen=True)
class CollectivePart:
    """The collective of this number. steps: its own schedule; None where it is NCCL's. ctas: NCCL's blocks, 0 for its own
    choice."""

    number: int
    steps: Schedule | None = None
    ctas: int = 0


@dataclass(frozen=True)
class SideStream:
    """Collectives that have a stream of their own. late: they are enqueued after the computation."""

    parts: tuple[CollectivePart, ...]
    priority: bool
    late: bool


@dataclass(frozen=True, kw_only=True)
class Program:
    """One rank's part of a schedule. name: the schedule's. before, after: on the caller's stream. computation: what it
    keeps to."""

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
    """What a rank runs. schedule: checked, and for a ConcurrentProblem."""
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
