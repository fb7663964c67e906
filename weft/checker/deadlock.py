"""A deadlock in words: who waits for whom, until the circle closes."""

from __future__ import annotations

from typing import NamedTuple

from weft.checker.program import CompiledSchedule, Do

Place = tuple[int, int]
"""Rank and lane."""


class StuckLane(NamedTuple):
    """Where a lane stands: the step, its part, and the flag that it waits for (-1: for a collective, or messages)."""

    position: int
    part: int
    flag: int


def deadlock(program: CompiledSchedule, stuck: dict[Place, StuckLane]) -> str:
    """The circle among stuck lanes, as a sentence."""
    here, path = min(stuck), list[Place]()
    while here not in path:
        path.append(here)
        here = _blocker(program, stuck, here)
    circle = path[path.index(here) :]
    lines = []
    for place, then in zip(circle, circle[1:] + circle[:1], strict=True):
        position, part, flag = stuck[place]
        what = f"a signal of {program.flags[flag]}" if flag >= 0 else _meeting(program, place, position, part)
        owner = f"rank {then[0]}, lane {program.schedule.ranks[then[0]][then[1]].name}"
        lines.append(f"{program.where(*place, position, part)} waits for {what}, which needs {owner}")
    return "deadlock: " + "; ".join(lines)


def _blocker(program: CompiledSchedule, stuck: dict[Place, StuckLane], here: Place) -> Place:
    """The lane that should let `here` go on; another of its rank where that one waits for the next call."""
    flag = stuck[here].flag
    if flag >= 0:
        owner = program.owners[flag]
        assert owner is not None
        return owner if owner in stuck else _any_of(stuck, owner[0])
    peer = _other_end(program, here, stuck[here].position, stuck[here].part)
    if peer is not None:
        lane = _lane_with(program, peer, Do.MESSAGES)
        return (peer, lane) if (peer, lane) in stuck else _any_of(stuck, peer)
    absent = next(r for r in range(len(program.ops)) if all(p[0] != r or not _meets(program, p, s) for p, s in stuck.items()))
    lane = _lane_with(program, absent, Do.COLLECTIVE)
    return (absent, lane) if (absent, lane) in stuck else _any_of(stuck, absent)


def _lane_with(program: CompiledSchedule, rank: int, do: Do) -> int:
    return next((i for i, ops in enumerate(program.ops[rank]) if any(op.do is do for op in ops)), -1)


def _other_end(program: CompiledSchedule, place: Place, position: int, part: int) -> int | None:
    """The rank that a message waits for; None if it is a collective that waits."""
    op = program.ops[place[0]][place[1]][position]
    return op.messages[part][1] if op.do is Do.MESSAGES else None


def _meeting(program: CompiledSchedule, place: Place, position: int, part: int) -> str:
    peer = _other_end(program, place, position, part)
    return "all ranks to start it" if peer is None else f"rank {peer} to begin its end of message {part}"


def _meets(program: CompiledSchedule, place: Place, stuck: StuckLane) -> bool:
    return program.ops[place[0]][place[1]][stuck.position].do is Do.COLLECTIVE


def _any_of(stuck: dict[Place, StuckLane], rank: int) -> Place:
    return min(place for place in stuck if place[0] == rank)
