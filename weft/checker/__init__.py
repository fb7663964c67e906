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

Collectives that run concurrently with a user's computation are proved each by itself, and then the rules that they share. They
are also correct together. They share no memory. They are called one after the other, in one order on all ranks,
and the steps of a part wait for no other part. So those of the first one complete, and then the next one's do. The call of the
computation delays later calls of its lane, and the proof of a part holds for any delay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.checker.effects import Effects
from weft.checker.fused_collective import check_room, check_shapes
from weft.checker.program import ScheduleError
from weft.checker.ragged import RaggedCompiler, RaggedEffects
from weft.checker.shapes import check_buffers
from weft.checker.starvation import check_starvation, find_crowded_ranks
from weft.checker.structure import Compiler, check_counts, compile_schedule
from weft.checker.walk import Walk
from weft.core.concurrent import ConcurrentProblem, OpaqueCollective
from weft.core.errors import require
from weft.core.fused_collective import spelled_out
from weft.core.parts import runs_by_library
from weft.core.problem import RaggedProblem
from weft.core.schedule import Lane, Schedule, UserCall

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


def check_concurrent(schedule: Schedule, problem: ConcurrentProblem, check: Callable[[Schedule], None]) -> None:
    """Check a schedule of several collectives and a computation. Raises ScheduleError.

    check: proves the schedule of one collective.
    """
    count = len(problem.collectives)
    if len(schedule.ranks) != problem.world_size:
        raise ScheduleError(f"the schedule has {len(schedule.ranks)} ranks; its problem has {problem.world_size}")
    if schedule.buffers:
        raise ScheduleError(f"the schedule has buffers {sorted(schedule.buffer)}; leave them to its parts")
    if len(schedule.parts) != count:
        raise ScheduleError(f"the schedule has {len(schedule.parts)} parts; its problem has {count} collectives")
    callers = [_check_lanes(rank, lanes, schedule) for rank, lanes in enumerate(schedule.ranks)]
    for rank, lane in enumerate(callers):
        # With different numbers, NCCL would use two communicators, which would wait for each other forever.
        if lane.ctas != callers[0].ctas:
            raise ScheduleError(
                f"ctas is {lane.ctas} on rank {rank}, lane {lane.name}, and {callers[0].ctas} on rank 0, lane "
                f"{callers[0].name}; use one number"
            )
    for number, (one, part) in enumerate(zip(problem.collectives, schedule.parts, strict=True)):
        if isinstance(one, OpaqueCollective) or part is None:
            if not (isinstance(one, OpaqueCollective) and part is None):
                raise ScheduleError(f"part {number} is {part}, for {one}; only collectives that are not described have None")
            continue
        blocks = one.sms if runs_by_library(part) else callers[0].ctas or one.sms
        if part.problem != replace(one, sms=blocks):
            raise ScheduleError(f"part {number} is for {part.problem}; the collective is {one}, with {blocks} SMs")
        try:
            check(part)
        except ScheduleError as error:
            raise ScheduleError(f"collective {number}: {error}") from None


def _check_lanes(rank: int, lanes: tuple[Lane, ...], schedule: Schedule) -> Lane:
    """Check that the compute lane calls the computation once, and that one lane calls all collectives, one after the other.

    Returns that lane.
    """
    calls = []
    for lane in lanes:
        for position, step in enumerate(lane.steps):
            if not isinstance(step, UserCall):
                raise ScheduleError(f"rank {rank}, lane {lane.name}, step {position} ({step}): lanes have calls alone")
            calls.append((lane, step.collective))
    computing = [lane for lane, number in calls if number is None]
    if len(computing) != 1 or computing[0].kind != "compute":
        where = ", ".join(f"{lane.name} of kind {lane.kind}" for lane in computing) or "no lane"
        raise ScheduleError(f"rank {rank} calls the computation on {where}; it needs one call, on a lane of kind compute")
    callers = [lane for lane in lanes if any(one is lane and number is not None for one, number in calls)]
    if len(callers) > 1:
        names = ", ".join(sorted(lane.name for lane in callers))
        raise ScheduleError(
            f"rank {rank} calls collectives on lanes {names}; use one lane, so that they run one after the other"
        )
    numbers = [number for _, number in calls if number is not None]
    if numbers != [*range(len(schedule.parts))]:
        raise ScheduleError(f"rank {rank} calls collectives {numbers}; it has to call {len(schedule.parts)} in their order")
    by_library = {runs_by_library(part) for part in schedule.parts}
    kinds = ("compute", "network") if by_library == {True} else ("copy",) if by_library == {False} else ()
    if callers[0].kind not in kinds:
        raise ScheduleError(
            f"rank {rank} calls collectives on lane {callers[0].name} of kind {callers[0].kind}; lanes of kind compute and "
            "network call NCCL's, and lanes of kind copy all others: use NCCL for all collectives or for none"
        )
    return callers[0]
