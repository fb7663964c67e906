"""Whom an error names: not the rank that a wait is for, where that one waits itself, but the last one of the chain."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

import weft
from weft.core.fused_collective import spelled_out
from weft.core.schedule import Flag, Schedule, signalled_flags, waits
from weft.runtime.bound import flag_writers
from weft.runtime.host import WAIT_DONE, HostProgram
from weft.runtime.launches import WaiterWords


class Words:
    """A rank's words: all flags are low, and no lane has begun."""

    def __init__(self) -> None:
        self.seen: defaultdict[int, int] = defaultdict(int)

    def load(self, slot: int) -> int:
        return self.seen[slot]


def program_of(schedule: Schedule) -> Any:
    """A rank's program without memory."""
    made: Any = HostProgram.__new__(HostProgram)
    made.schedule, made.rank, made.flags, made._signal_values = schedule, 0, WaiterWords(schedule), {}
    made.writers = flag_writers(schedule)
    made.words = {rank: Words() for rank in range(schedule.problem.world_size)}
    made._progress = [{lane.name: made.flags.words + at for at, lane in enumerate(lanes)} for lanes in schedule.ranks]
    return made


def waits_at_its_first_gate(made: Any, rank: int, *, passed: bool = False) -> None:
    """Where every lane of a rank is: at its first step that waits for a flag of this call, which it has passed or not."""
    for lane in made.schedule.ranks[rank]:
        for position, step in enumerate(lane.steps):
            if any(not wait.on_previous_call for wait in waits(step)):
                made.words[rank].seen[made._progress[rank][lane.name]] = position + 1 | (WAIT_DONE if passed else 0)
                break


def raised_by(schedule: Schedule, rank: int) -> list[Flag]:
    return [flag for lane in schedule.ranks[rank] for step in lane.steps for flag in signalled_flags(step)]


@pytest.mark.parametrize("family", ["two_shot", "track_and_trigger", "direct_store"])
def test_the_last_rank_of_a_chain_is_named(family: str) -> None:
    """Rank 1 raises some flags of rank 0 only after rank 2 has told it something."""
    op: Any = "matmul_all_reduce" if family == "two_shot" else "matmul_reduce_scatter"
    schedule = weft.schedule.build(weft.Problem(op=op, m=12, n=12, k=12, world_size=3), family)
    schedule = spelled_out(schedule).schedule
    made = program_of(schedule)
    mine = [flag for flag in raised_by(schedule, 1) if flag.rank == 0]
    for flag in mine:
        assert made.raiser(flag).startswith("rank 1's lane ")
        assert "waits for" not in made.raiser(flag), "rank 1 has not begun"
    waits_at_its_first_gate(made, 1, passed=True)
    assert not any("waits for" in made.raiser(flag) for flag in mine), "rank 1 computes"
    waits_at_its_first_gate(made, 1)
    messages = [made.raiser(flag) for flag in raised_by(schedule, 1) if flag.rank == 0]
    behind = [text for text in messages if "which waits for" in text]
    assert all(
        text.startswith("rank 1's lane ") and ("; rank 2's lane " in text or "; rank 0's lane " in text) for text in behind
    )
    assert behind or family != "two_shot"


def test_ranks_that_wait_for_each_other_are_named_once() -> None:
    schedule = weft.schedule.build(weft.Problem(op="matmul_all_reduce", m=12, n=12, k=12, world_size=3), "two_shot")
    schedule = spelled_out(schedule).schedule
    made = program_of(schedule)
    for rank in range(3):
        waits_at_its_first_gate(made, rank)
    for flag in raised_by(schedule, 1):
        assert len(made.raiser(flag)) < 2000
