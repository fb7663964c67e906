"""The schedule checker: proves, before anything runs, that a schedule computes its problem. Standard library only.

`check(schedule)` is silent, or raises `ScheduleError` with the first thing wrong, naming rank, lane, step and region or
flag. What it proves, for any number of calls in a row and any speed of lanes, ranks and copies:

    structure     every step names what exists, in matching shapes; peers touch symmetric memory only; every flag is
                  advanced by one lane; no wait is for more signals than a call has; collectives agree between ranks
    no deadlock   every wait comes true, even if kernels with gates fill the SMs of their rank with waiting blocks
    no race       any two accesses to one element, of which one writes, are ordered by lanes, flags, collectives or calls
    the result    every element of the outputs is the whole sum, each k once, of the right rows and columns, of this call

It refuses nothing else, but for two kinds of step that would come out right by luck: sums of float32 partial results in a
narrower buffer, and kernels on copy lanes. The proof is one walk through two calls (`weft.check.walk`) and costs a few
microseconds a step; it allocates nothing per element. How far the two agree, checker and a brute-force interpreter that
tries directed interleavings of small schedules, is held by tests/test_check_damage.py.
"""

from __future__ import annotations

from weft.check.program import ScheduleError
from weft.check.starvation import check_starvation, crowded_ranks
from weft.check.structure import compile_schedule
from weft.check.walk import Walk
from weft.schedule import Schedule

__all__ = ["ScheduleError", "check"]


def check(schedule: Schedule) -> None:
    """Prove the schedule right. Raises ScheduleError that names rank, lane, step and region or flag."""
    program = compile_schedule(schedule)
    crowded = crowded_ranks(program)
    walk = Walk(program, crowded)
    walk.run()
    if crowded:
        check_starvation(program, walk.occupied)
