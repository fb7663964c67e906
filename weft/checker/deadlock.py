"""Describes a deadlock as the cycle of lanes that wait for each other."""

from __future__ import annotations

from typing import NamedTuple

from weft.checker.program import CompiledSchedule, Do

Place = tuple[int, int]
"""A rank and a lane."""


class StuckLane(NamedTuple):
    """The position of a stuck lane: the step, its part, and the flag that it waits for (-1 for a collective or messages)."""

    position: int
    part: int
    flag: int


def deadlock(program: CompiledSchedule, stuck: dict[Place, StuckLane]) -> str:
    """Return the cycle among stuck lanes as a sentence."""
    here, path, lines = min(stuck), list[Place](), list[str]()
    while here not in path:
        path.append(here)
        what, then = _awaited(program, stuck, here)
        owner = f"rank {then[0]}, lane {program.schedule.ranks[then[0]][then[1]].name}"
        lines.append(f"{program.where(*here, *stuck[here][:2])} waits for {what}, which needs {owner}")
        here = then
    return "deadlock: " + "; ".join(lines[path.index(here) :])


def _awaited(program: CompiledSchedule, stuck: dict[Place, StuckLane], here: Place) -> tuple[str, Place]:
    """Return the text of what `here` waits for, and the lane that should let it continue.

    If that lane has ended its call, return another stuck lane of its rank.
    """
    position, part, flag = stuck[here]
    if flag >= 0:
        owner = program.owners[flag]
        assert owner is not None
        what, (rank, index) = f"a signal of {program.flags[flag]}", owner
    else:
        op = program.ops[here[0]][here[1]][position]
        if op.do is Do.MESSAGES:
            rank = op.messages[part][1]
            what = f"rank {rank} to begin its end of message {part}"
        else:
            arrived = {r for (r, i), lane in stuck.items() if program.ops[r][i][lane.position].do is Do.COLLECTIVE}
            rank = next(r for r in range(len(program.ops)) if r not in arrived)
            what = "all ranks to start it"
        index = next((i for i, ops in enumerate(program.ops[rank]) if any(one.do is op.do for one in ops)), -1)
    return what, (rank, index) if (rank, index) in stuck else min(place for place in stuck if place[0] == rank)
