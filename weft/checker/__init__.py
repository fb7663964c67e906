"""The schedule checker: proves, before anything runs, that a schedule computes its problem. Standard library only.

`check(schedule)` is silent, or raises `ScheduleError` with the first thing wrong, naming rank, lane, step and region or
flag. What it proves, for any number of calls in a row and any speed of lanes, ranks and copies:

    structure     every step names what exists, in matching shapes; peers touch symmetric memory only; every flag is
                  signalled by one lane; no wait is for more signals than a call has; collectives and messages agree between
                  ranks; nothing but messages goes from node to node
    no deadlock   every wait comes true, even if kernels with gates fill the SMs of their rank with waiting blocks
    no race       any two accesses to one element, of which one writes, are ordered by lanes, flags, collectives or calls
    the result    every element of the outputs is the whole sum, each k once, of the right rows and columns, of this call

Of races, deadlocks and results it refuses exactly those schedules that can go wrong: tests/checker/test_check_damage.py holds
it, in both directions, against a brute-force interpreter that tries directed interleavings of small schedules. Structure also
has rules of weft's own, which a lucky schedule may break: kernels stay off copy lanes, a product reads local memory only, a
copy touches the rank that runs it, a push reads one local buffer and signals only its receivers, nothing narrower than float32
is added to, only local buffers are wider than the problem's dtype, and a rank has one lane of kind compute. The one thing
left open is a schedule whose kernels share the SMs of a rank in more orders than `weft.checker.starvation` tries; it is
refused with that reason.

Where row counts live on devices, steps access segments and counts; `weft.checker.ragged` models them.

The proof is one walk through two calls, or four where row counts live on devices (`weft.checker.walk`). It does no work per
element: its cost is that of steps, parts and gates, whatever M, N and K are. 8 ranks with chunks=8, so that the matrix moves in
64 chunks, take 8 to 16 ms a schedule, every family whose chunks are free, both operators, best of five; with chunks=64, which
is 512 chunks, 110 to 230 ms.
"""

from __future__ import annotations

from weft.checker.concurrent import check_concurrent
from weft.checker.effects import Effects
from weft.checker.fused_collective import check_room, check_shapes
from weft.checker.program import ScheduleError
from weft.checker.ragged import RaggedCompiler, RaggedEffects
from weft.checker.shapes import check_buffers
from weft.checker.starvation import check_starvation, find_crowded_ranks
from weft.checker.structure import Compiler, compile_schedule
from weft.checker.walk import Walk
from weft.core.concurrent import ConcurrentProblem
from weft.core.errors import require
from weft.core.fused_collective import spelled_out
from weft.core.problem import RaggedProblem
from weft.core.schedule import Schedule

__all__ = ["ScheduleError", "check"]


def check(schedule: Schedule) -> None:
    """Prove the schedule right. Raises ScheduleError, a ValueError, that names rank, lane, step and region or flag."""
    require("schedule", schedule, Schedule, "use a weft.schedule.Schedule, as weft.schedule.build makes")
    if isinstance(schedule.problem, ConcurrentProblem):
        check_concurrent(schedule, schedule.problem, check)
        return
    check_buffers(schedule)
    check_shapes(schedule)
    spelled = spelled_out(schedule)
    ragged = isinstance(schedule.problem, RaggedProblem)
    program = compile_schedule(RaggedCompiler(spelled) if ragged else Compiler(spelled))
    crowded = find_crowded_ranks(program)
    walk = Walk(program, RaggedEffects(program) if ragged else Effects(program), crowded)
    walk.run()
    if crowded:
        check_starvation(program, walk.sm_steps)
    check_room(program, spelled)
