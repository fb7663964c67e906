"""The schedule checker proves, before anything runs, that a schedule computes its problem. It needs only the standard library.

`check(schedule)` returns nothing, or raises `ScheduleError` with the first fault, which names rank, lane, step and region or
flag. It proves the following for any number of calls in a row, and for any speed of lanes, ranks and copies:

    structure     every step names what exists, in matching shapes; peers access only symmetric memory; each flag is
                  signalled by one lane; no wait needs more signals than a call has; collectives and messages agree between
                  ranks; only messages go from node to node
    no deadlock   every wait ends, even if kernels with gates fill the SMs of their rank with waiting blocks
    no race       any two accesses to one element, of which one writes, are ordered by lanes, flags, collectives or calls
    the result    every element of the outputs is the whole sum, each k once, of the right rows and columns, of this call

For races, deadlocks and results it refuses exactly the schedules that can go wrong. tests/checker/test_check_damage.py compares
both directions with a brute-force interpreter that tries directed interleavings of small schedules. Structure also has rules of
weft, which some correct schedules break: copy lanes run no kernels, a product reads only local memory, a copy touches the rank
that runs it, a push reads one local buffer and signals only its receivers, sums are added only to float32, only local buffers
are wider than the problem's dtype, and a rank has one lane of kind compute. There is one exception: a schedule whose kernels
share the SMs of a rank in more orders than `weft.checker.starvation` tries is refused with that reason.

If row counts are known only on devices, steps access segments and counts, which `weft.checker.ragged` models.

The proof is one walk through two calls, or four if row counts are known only on devices (`weft.checker.walk`). Its cost depends
on the number of steps, parts and gates, and is independent of M, N and K. With 8 ranks and chunks=8, so that the matrix moves
in 64 chunks, a schedule takes 8 to 16 ms: every family whose chunks are free, both operators, best of five. With chunks=64,
which is 512 chunks, it takes 110 to 230 ms.
"""

from __future__ import annotations

from weft.checker.concurrent import check_concurrent
from weft.checker.effects import Effects
from weft.checker.fused_collective import check_room, check_shapes
from weft.checker.program import ScheduleError
from weft.checker.ragged import RaggedCompiler, RaggedEffects
from weft.checker.shapes import check_buffers
from weft.checker.starvation import check_starvation, find_crowded_ranks
from weft.checker.structure import Compiler, check_counts, compile_schedule
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
    check_counts(program)
    check_room(program, spelled)
