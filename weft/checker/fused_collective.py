"""What a FusedCollective adds to the proof. What it computes is proved of the steps that it stands for.

    check_shapes      every rank runs the same ones, on its compute lane, over whole matrices of the problem
    check_mailboxes   no rank writes a place of a mailbox that its owner has not emptied, in any number of calls
    check_room        no other lane of the rank needs SMs while the kernel's blocks wait

A mailbox has some copies, and call c uses copy c mod copies. In a call each rank does, tile by tile, what `protocol` lists: it
sends its tiles to all ranks, itself among them; it empties the places that it has read in the call before; it waits for all
ranks' tiles. A second hop sends and waits again. So a place that is written in call c is read in call c, emptied in call c +
1, and written again in call c + copies. Messages are all that orders two ranks:

    rank p, call c + 1                rank p, call c + 2       rank r, call c + 2          rank r, call c + 3
    send, empty (what c has brought)  send  ~~~~~~~~~~~~~~~~>  send, empty, wait (for p)   send: p's place of call c is empty

With two copies rank r sends in call c + 2 to the same place, and knows of p only that it has sent in call c + 1, not that it
has emptied the place. A second hop does not help: p sends its sums after it has emptied its places, but some threads of a block
empty while others go on, and no fence orders what they store. So a rank knows that p has emptied only if it has the end of that
call of p behind it.
"""

from __future__ import annotations

from itertools import chain, pairwise

from weft.checker.program import CompiledSchedule, Do, Op, ScheduleError, overlap
from weft.checker.shapes import region_fault
from weft.core.fused_collective import SpelledOut, protocol
from weft.core.problem import CollectiveProblem, ColumnProblem, LookupProblem, RaggedProblem
from weft.core.schedule import FusedCollective, Region, Schedule, places_of, steps_of

MOST_COPIES = 16
"""Three are enough. The proof looks at so many calls, so that a schedule may not name any number."""
Event = tuple[int, int, str]
"""(call, rank, what it does): one entry of the protocol."""


def check_shapes(schedule: Schedule) -> None:
    """Raises ScheduleError."""
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
            what = "mailbox, copies, op, hops, multiplies, addends, divide_by"
            raise ScheduleError(f"rank {rank} has other fused collectives ({what}) than rank 0: {mine}, not {first}")
    _check_names(schedule, [f"{common[0]}." for common in first])


def _check_names(schedule: Schedule, reserved: list[str]) -> None:
    """No buffer or flag of the schedule has a name that `spelled_out` may give to what stands for a mailbox."""
    for name in (*schedule.buffer, *(flag.name for flag in schedule.flags)) if reserved else ():
        prefix = next((prefix for prefix in reserved if name.startswith(prefix)), None)
        if prefix is not None:
            mailbox = prefix.removesuffix(".")
            raise ScheduleError(f"{name} is a name of mailbox {mailbox}'s own; no buffer or flag may begin with {prefix}")


def _common(step: FusedCollective) -> tuple[object, ...]:
    """What must be the same on every rank."""
    addends = tuple(region.buffer for region in step.addends)
    return step.mailbox, step.copies, step.op, step.hops, step.multiplies, addends, step.divide_by


def _fault(schedule: Schedule, rank: int, step: FusedCollective) -> str:
    """What is wrong with a step, in words."""
    problem = schedule.problem
    if isinstance(problem, (CollectiveProblem, ColumnProblem, LookupProblem, RaggedProblem)):
        return f"{problem.op} has no product whose sum over ranks a kernel could make"
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
    return _addends_fault(step) or _place_fault(schedule, rank, step)


def _addends_fault(step: FusedCollective) -> str:
    for region in step.addends:
        if region.shape != step.out.shape and region.shape != (1, step.out.shape[1]):
            return f"{region} has shape {region.shape}, but it is added to {step.out} of shape {step.out.shape}"
    return ""


def _place_fault(schedule: Schedule, rank: int, step: FusedCollective) -> str:
    """Regions are the rank's own, in the problem's dtype, and out is none of what is read: tiles are stored while other tiles
    are still read. The steps that the kernel stands for may leave some of the regions out, so all rules on them are here."""
    read: tuple[Region, ...] = (*step.factors, *step.addends)
    for region in (*read, step.out):
        if region.rank != rank:
            return f"{region} is another rank's; the kernel reads and writes its own, and sends through its mailbox"
        fault = region_fault(region, schedule.buffer, schedule.problem.world_size)
        if fault:
            return fault
        if schedule.buffer[region.buffer].float32:
            return f"{region} holds float32; the kernel takes the problem's dtype"
    if schedule.buffer[step.out.buffer].kind == "input":
        return f"{step.out} is an input of the caller; no step may write it"
    shared = next((region for region in read if _overlap(region, step.out)), None)
    return (
        f"out is {step.out}, which overlaps {shared}, which it reads; use a buffer of its own for one of them" if shared else ""
    )


def _overlap(one: Region, other: Region) -> bool:
    same = (one.buffer, one.rank) == (other.buffer, other.rank)
    return same and overlap((*one.rows, *one.cols), (*other.rows, *other.cols)) is not None


def check_mailboxes(schedule: Schedule) -> None:
    """Raises ScheduleError if a place could be written before it is empty."""
    for step in set(steps_of(FusedCollective, chain(*schedule.ranks[:1]))):
        late = written_too_early(step, schedule.problem.world_size)
        if late:
            raise ScheduleError(f"mailbox {step.mailbox} of {schedule.name} has {step.copies} copies: {late}")


def written_too_early(step: FusedCollective, world_size: int) -> str:
    """A place that may be read before it has been written, or written before it has been emptied, in words; nothing if none
    may.

    Calls are alike, so it is enough to look at what call 0 has brought. A place is safe if its emptying in call 1 comes before
    the next write to it, in call `copies`.
    """
    order = protocol(step)
    sends = [entry for entry in order if entry.startswith("send")]
    unread = next((send for send in sends if _awaited(send) not in order), None)
    if unread or "empty" not in order:
        return f"no rank waits for {unread}" if unread else "no rank empties the places that it has read"
    for owner in range(world_size):
        known = _after((1, owner, "empty"), step, world_size, step.copies)
        for send in sends:
            for sender in range(world_size):
                if (step.copies, sender, send) not in known:
                    what = f"{send.replace('send', 'send hop')} of call {step.copies}"
                    late = f"rank {sender} may {what} while rank {owner} has not emptied the place that call 0 has filled"
                    return f"{late}; use 3"
    return ""


def _after(event: Event, step: FusedCollective, world_size: int, last: int) -> set[Event]:
    """All events up to call `last` that come after one: in the order of each rank, and as messages go. Of what a rank empties
    in a call, only its next call comes after that."""
    order = protocol(step)
    following = dict(pairwise(entry for entry in order if entry != "empty"))
    found, open_ = {event}, [event]
    while open_:
        call, rank, what = open_.pop()
        then: list[Event] = []
        if what in following:
            then.append((call, rank, following[what]))
        elif call < last:
            then.append((call + 1, rank, order[0]))
        if what.startswith("send"):
            then += [(call, peer, _awaited(what)) for peer in range(world_size)]
        open_ += [one for one in then if one not in found]
        found.update(then)
    return found


def _awaited(send: str) -> str:
    """The entry of the protocol that waits for a send."""
    return send.replace("send", "wait")


def check_room(program: CompiledSchedule, spelled_out: SpelledOut) -> None:
    """No other lane of a rank needs SMs while the blocks of such a kernel wait; lanes of kind blocks have SMs of their own.
    Raises ScheduleError."""
    for rank, lanes in enumerate(program.ops):
        for index, ops in enumerate(lanes):
            lane = program.schedule.ranks[rank][index]
            ranges = spelled_out.of_lane(rank, lane.name)
            at = next((low for low, high in ranges for op in ops[low:high] if _waits(op)), None)
            if at is None:
                continue
            for other, theirs in enumerate(lanes):
                needs = next((position for position, op in enumerate(theirs) if op.needs_sms), None)
                if other != index and needs is not None:
                    kernel = f"the blocks of {program.where(rank, index, at)} may fill all while they wait"
                    raise ScheduleError(
                        f"{program.where(rank, other, needs)}: it needs SMs, but {kernel}; use a lane of kind blocks"
                    )


def _waits(op: Op) -> bool:
    return op.do is Do.WAIT or any(action.waits for action in op.actions)
