"""Additional rules for a FusedCollective. Its result is proved by the steps that it stands for.

check_shapes      every rank runs the same ones, on its compute lane, over whole matrices of the problem; each mailbox has
                  enough copies that no rank writes a place before its owner has emptied it, in any number of calls
check_room        no other lane of the rank needs SMs while the kernel's blocks wait
"""

from __future__ import annotations

from weft.checker.program import CompiledSchedule, Do, Op, ScheduleError, overlap
from weft.checker.shapes import norm_fault, region_fault
from weft.core.fused_collective import SpelledOut
from weft.core.problem import CollectiveProblem, ColumnProblem, LookupProblem, Problem, RaggedProblem
from weft.core.schedule import FusedCollective, Region, Schedule, places_of

MOST_COPIES = 16
"""The largest number of copies. Three are enough, and each copy takes memory on every rank."""


def check_shapes(schedule: Schedule) -> None:
    """Check the FusedCollective steps of all ranks, as the module text says. Raises ScheduleError."""
    first: list[tuple[object, ...]] = []
    for rank, lanes in enumerate(schedule.ranks):
        mine = []
        for lane, position, step in places_of(FusedCollective, lanes):
            fault = _fault(schedule, rank, step)
            if lane.kind != "compute":
                fault = f"it is on a lane of kind {lane.kind}; it needs a lane of kind compute"
            if fault:
                raise ScheduleError(f"rank {rank}, lane {lane.name}, step {position} ({step}): {fault}")
            mine.append(_common(step))
        mailboxes = [common[0] for common in mine]
        if len(mailboxes) > len(set(mailboxes)):
            raise ScheduleError(f"rank {rank} has two kernels with one mailbox, of {mailboxes}; give each a name of its own")
        first = mine if rank == 0 else first
        if mine != first:
            what = "mailbox, copies, op, hops, multiplies, addends, divide_by, norm"
            raise ScheduleError(f"rank {rank} has other fused collectives ({what}) than rank 0: {mine}, not {first}")
    _check_names(schedule, [f"{common[0]}." for common in first])


def _check_names(schedule: Schedule, reserved: list[str]) -> None:
    """Check that no buffer or flag of the schedule has a name that `spelled_out` may give to a mailbox's substitutes."""
    for name in (*schedule.buffer, *(flag.name for flag in schedule.flags)) if reserved else ():
        prefix = next((prefix for prefix in reserved if name.startswith(prefix)), None)
        if prefix is not None:
            mailbox = prefix.removesuffix(".")
            raise ScheduleError(f"{name} is a name of mailbox {mailbox}'s own; no buffer or flag may begin with {prefix}")


def _common(step: FusedCollective) -> tuple[object, ...]:
    """Return the properties that must be the same on every rank."""
    addends = tuple(region.buffer for region in step.addends)
    return step.mailbox, step.copies, step.op, step.hops, step.multiplies, addends, step.divide_by, step.norm is not None


def _fault(schedule: Schedule, rank: int, step: FusedCollective) -> str:
    """Return a fault of a step as text, or ""."""
    problem = schedule.problem
    if isinstance(problem, (ColumnProblem, LookupProblem, RaggedProblem)):
        return f"{problem.op} has no product whose sum over ranks a kernel could make"
    if isinstance(problem, CollectiveProblem) and (problem.op != "all_reduce" or step.multiplies):
        return f"{problem.op} is no sum over ranks of products; a kernel sums an all_reduce's a"
    if step.hops not in ((1, 2) if step.op == "all_reduce" else (1,)):
        return f"hops is {step.hops}; an all_reduce has 1 or 2, a reduce_scatter 1"
    if not 1 <= step.copies <= MOST_COPIES:
        return f"copies is {step.copies}; a mailbox has 1 to {MOST_COPIES}, and 3 are enough"
    if len(step.factors) not in (1, 2):
        return f"it has {len(step.factors)} factors; it takes a and b, or one partial result"
    m, n, (low, high) = problem.m, problem.n, problem.shards[rank]
    inner = step.factors[0].shape[1]
    wanted = [(m, inner), (inner, n)] if step.multiplies else [(m, n)]
    wanted.append((m, n) if step.op == "all_reduce" else (high - low, n))
    for region, shape in zip((*step.factors, step.out), wanted, strict=True):
        if region.shape != shape:
            return f"{region} has shape {region.shape}; for {problem} it is {shape} on rank {rank}"
    return (
        _addends_fault(step)
        or _norm_fault(step, problem)
        or _place_fault(schedule, rank, step)
        or written_too_early(step, problem.world_size)
    )


def _addends_fault(step: FusedCollective) -> str:
    for region in step.addends:
        if region.shape != step.out.shape and region.shape != (1, step.out.shape[1]):
            return f"{region} has shape {region.shape}, but it is added to {step.out} of shape {step.out.shape}"
    return ""


def _norm_fault(step: FusedCollective, problem: Problem) -> str:
    if step.norm is None:
        return ""
    if problem.norm_recipe:
        return f"it has {step.norm}; a kernel does not quantise its norm: make it a step of its own"
    if step.op != "all_reduce" or step.hops != 1 or step.norm.src != step.out:
        return f"it has {step.norm}; a kernel normalises its own result, of an all_reduce in one hop"
    return norm_fault(step.norm, problem)


def _place_fault(schedule: Schedule, rank: int, step: FusedCollective) -> str:
    """Return a fault of the step's regions, or "".

    Regions must be the rank's own, in the problem's dtype, and `out` must not overlap a region that is read, because the kernel
    stores some tiles while it reads others. All rules on regions are here, because the steps that the kernel stands for may
    leave some regions out.
    """
    read: tuple[Region, ...] = (*step.factors, *step.addends)
    outs = [step.out]
    if step.norm is not None:
        read, outs = (*read, step.norm.weight), [step.out, step.norm.out]
    for region in (*read, *outs):
        if region.rank != rank:
            return f"{region} is another rank's; the kernel reads and writes its own, and sends through its mailbox"
        fault = region_fault(region, schedule.buffer, schedule.problem.world_size)
        if fault:
            return fault
        if schedule.buffer[region.buffer].float32:
            return f"{region} holds float32; the kernel takes the problem's dtype"
    for out in outs:
        if schedule.buffer[out.buffer].kind == "input":
            return f"{out} is an input of the caller; no step may write it"
        shared = next((region for region in (*read, *outs) if region is not out and _overlap(region, out)), None)
        if shared:
            return (
                f"out is {out}, which overlaps {shared}, which it reads or writes, too; use a buffer of its own for one of them"
            )
    return ""


def _overlap(one: Region, other: Region) -> bool:
    same = (one.buffer, one.rank) == (other.buffer, other.rank)
    return same and overlap((*one.rows, *one.cols), (*other.rows, *other.cols)) is not None


def written_too_early(step: FusedCollective, world_size: int) -> str:
    """Return what goes wrong if a mailbox has too few copies; an empty text if it has enough.

    Call c uses copy c mod copies. In a call a rank sends its tiles to all ranks, itself among them; it empties the places that
    it has read in the call before; it waits for all ranks' tiles. A second hop sends and waits again. So a place that is
    written in call c is read in call c, emptied in call c + 1, and written again in call c + copies. Some threads of a block
    empty while others go on, and no fence orders what they store: p has emptied its places once its call has ended, no sooner.
    Messages are all that orders two ranks:

        rank p, call c + 1      rank p, call c + 2       rank r, call c + 2      rank r, call c + 3
        send, empty             send  ~~~~~~~~~~~~~~~~>  send, empty, wait       send: p's place of call c is empty

    Three copies are enough: before call c + 3, r has waited for what p sends in call c + 2, when p's call c + 1 has ended. Two
    are too few: when r sends in call c + 2, it knows of p only that it has sent in call c + 1. A second hop does not help: p
    sends its sums in call c + 1, too. A single rank has ended its own call c + 1, so two are enough.

    Calls of other schedules may use the same memory in between. They count as calls of the mailbox, and the argument is the
    same, because a rank waits for every rank in each of them (weft.kernels.all_reduce).
    """
    if step.copies >= (3 if world_size > 1 else 2):
        return ""
    late = f"rank {world_size - 1} may send in call {step.copies} while rank 0 has not emptied the place that call 0 has filled"
    return f"mailbox {step.mailbox} has {step.copies} copies: {late}; use 3"


def check_room(program: CompiledSchedule, spelled_out: SpelledOut) -> None:
    """Check that no other lane of a rank needs SMs while the blocks of such a kernel wait. Raises ScheduleError.

    Lanes of kind blocks have SMs of their own.
    """
    for rank, lanes in enumerate(program.ops):
        users = [(index, next((at for at, op in enumerate(ops) if op.needs_sms), None)) for index, ops in enumerate(lanes)]
        for index, ops in enumerate(lanes):
            ranges = spelled_out.of_lane(rank, program.schedule.ranks[rank][index].name)
            waiting = next((low for low, high in ranges for op in ops[low:high] if _waits(op)), None)
            other, needs = next(((other, at) for other, at in users if at is not None and other != index), (-1, None))
            if waiting is not None and needs is not None:
                kernel = f"the blocks of {program.where(rank, index, waiting)} may fill all while they wait"
                raise ScheduleError(
                    f"{program.where(rank, other, needs)}: it needs SMs, but {kernel}; use a lane of kind blocks"
                )


def _waits(op: Op) -> bool:
    return op.do is Do.WAIT or any(action.waits for action in op.actions)
