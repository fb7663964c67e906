"""What a GPU call waits for, in words: read from how far each lane has come, and from the flags of the steps there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from weft.core.schedule import Collective, Lane, SendReceive, Wait, places_of, waits
from weft.runtime.bindings import Where

if TYPE_CHECKING:
    from weft.runtime.bound import BoundProgram


def waiting(program: BoundProgram, seen: Sequence[int], reached: Mapping[str, int]) -> list[str]:
    """A line for each lane that waits for a flag. seen: the words of this rank. reached: by lane, the position of its step."""
    lines = []
    for lane in program.schedule.ranks[program.rank]:
        for where, wait in may_wait_for(program.rank, lane, reached[lane.name]):
            value, need = seen[program.flags.slot[wait.flag, lane.name, where.position]], program.signal_value(wait.flag)
            if value < need:
                lines.append(f"{where}: {wait.flag}: expected {need}, seen {value}; {program.raiser(wait.flag)}")
                break
    return lines


def unsent(program: BoundProgram, reached: Mapping[str, int]) -> Iterator[str]:
    """The collectives of the program, and the messages that a lane came to last: nothing says whether they have ended."""
    rank, schedule = program.rank, program.schedule
    others = ", ".join(f"rank {peer}" for peer in range(schedule.problem.world_size) if peer != rank)
    for lane, position, step in places_of(Collective, schedule.ranks[rank]):
        where = Where(rank, lane.name, position, step)
        yield f"{where}: no flag is missing; perhaps not all ranks have begun it ({others})"
    for lane in schedule.ranks[rank]:
        position = reached[lane.name]
        last = lane.steps[position] if position >= 0 else None
        if isinstance(last, SendReceive):
            where = Where(rank, lane.name, position, last)
            yield f"{where}: no flag is missing; perhaps not all of ranks {sorted(last.peers)} have begun their ends"


def may_wait_for(rank: int, lane: Lane, position: int) -> Iterator[tuple[Where, Wait]]:
    """The waits of a lane that has reached `position`: those of that step, and of the steps that it waits for together with
    it."""
    for at in range(position, len(lane.steps) if position >= 0 else position):
        step = lane.steps[at]
        yield from ((Where(rank, lane.name, at, step), wait) for wait in waits(step))
        if not isinstance(step, Wait):
            return
