"""Whom an error names: not the rank that a wait is for, where that one waits itself, but the last one of the chain."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

import weft
from weft.core.fused_collective import spelled_out
from weft.core.schedule import Flag, Schedule, advances
from weft.runtime.bound import flag_slots, flag_writers
from weft.runtime.host import HostProgram
from weft.runtime.interpret import Program

DONE = 1 << 30


class Words:
    """A rank's flags, all of them raised for good but those that are told."""

    def __init__(self) -> None:
        self.seen: defaultdict[int, int] = defaultdict(lambda: DONE)

    def load(self, slot: int) -> int:
        return self.seen[slot]


def program_of(schedule: Schedule) -> Any:
    """A rank's program without memory, in its second call."""
    made: Any = HostProgram.__new__(HostProgram)
    made.schedule, made.rank, made.epoch = schedule, 0, 1
    made.slots, made.writers = flag_slots(schedule), flag_writers(schedule)
    made._words = {rank: Words() for rank in range(schedule.problem.world_size)}
    made._program = Program(schedule, made, lambda flag: 1)
    return made


def silenced(made: Any, rank: int) -> None:
    """What a rank's lanes raise stays as it was after the first call."""
    for lane in made.schedule.ranks[rank]:
        for step in lane.steps:
            for flag in advances(step):
                made._words[flag.rank].seen[made.slots[flag]] = made.schedule.signals_per_call[flag]


def raised_by(schedule: Schedule, rank: int) -> list[Flag]:
    return [flag for lane in schedule.ranks[rank] for step in lane.steps for flag in advances(step)]


@pytest.mark.parametrize("family", ["two_shot", "track_and_trigger", "direct_store"])
def test_the_last_rank_of_a_chain_is_named(family: str) -> None:
    """Rank 1 raises some flags of rank 0 only after rank 2 has told it something."""
    op: Any = "matmul_all_reduce" if family == "two_shot" else "matmul_reduce_scatter"
    schedule = weft.build(weft.Problem(op=op, m=12, n=12, k=12, world_size=3), family)
    schedule = spelled_out(schedule).schedule
    made = program_of(schedule)
    for flag in (flag for flag in raised_by(schedule, 1) if flag.rank == 0):
        assert made.raiser(flag).startswith("rank 1's lane ")
        assert "waits for" not in made.raiser(flag), "rank 1 has all that it needs"
    silenced(made, 2)
    told = [made.raiser(flag) for flag in raised_by(schedule, 1) if flag.rank == 0]
    behind = [text for text in told if "which waits for" in text]
    assert all(text.startswith("rank 1's lane ") and "; rank 2's lane " in text for text in behind), told
    assert behind or family != "two_shot"


def test_ranks_that_wait_for_each_other_are_named_once() -> None:
    schedule = weft.build(weft.Problem(op="matmul_all_reduce", m=12, n=12, k=12, world_size=3), "two_shot")
    schedule = spelled_out(schedule).schedule
    made = program_of(schedule)
    for rank in range(3):
        silenced(made, rank)
    for flag in raised_by(schedule, 1):
        assert len(made.raiser(flag)) < 2000
