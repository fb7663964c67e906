"""The first stage of the check: each step by itself, and the agreement of flags and collectives.

`compile_schedule` raises `ScheduleError` for the first step that uses an unknown name, has shapes that do not match, accesses
memory that it may not, or waits for a signal that cannot come. Otherwise it returns the schedule in numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, ClassVar, NoReturn

from weft.checker.program import Access, Action, CompiledSchedule, Do, Op, Place, ScheduleError, area, describe_step, overlap
from weft.checker.shapes import (
    bags_fault,
    check_collectives,
    check_messages,
    collective_fault,
    gemm_fault,
    message_fault,
    norm_fault,
    reachable_outputs,
    region_fault,
    scales_fault,
    sum_fault,
)
from weft.core.fused_collective import SpelledOut
from weft.core.schedule import (
    Bags,
    Collective,
    Copy,
    Flag,
    Gemm,
    GroupedGemm,
    Lane,
    LaneKind,
    Lookup,
    Norm,
    Part,
    Push,
    Reduce,
    Region,
    SegmentCopies,
    SendReceive,
    ShareCounts,
    Signal,
    Step,
    Store,
    Sum,
    UserCall,
    Wait,
)

_WAIT, _SIGNAL, _WORK, _COLLECTIVE, _COPY, _GEMM, _ADD, _EXCHANGE, _MESSAGES, _ADD_ALL, *_OTHERS = Do
_EXCHANGE_COLUMNS, _OF_TRANSPOSE, _NORM = _OTHERS
_COLLECTS = {
    "all_gather": _COPY,
    "reduce_scatter": _ADD,
    "all_reduce": _ADD_ALL,
    "all_to_all": _EXCHANGE,
    "all_to_all_columns": _EXCHANGE_COLUMNS,
}


_NO_PLACE: dict[LaneKind, str] = {
    "network": "a network lane runs sends and receives, waits and signals; this step needs another lane",
    "copy": "a copy engine runs copies, waits and signals; this step needs a lane of kind compute or blocks",
}
"""The messages for steps that lanes of a kind do not run."""


def compile_schedule(compiler: Compiler) -> CompiledSchedule:
    """Return the compiler's schedule in numbers. Raises ScheduleError."""
    spelled_out, schedule = compiler.spelled_out, compiler.schedule
    ops = tuple(compiler.lanes(rank, lanes) for rank, lanes in enumerate(schedule.ranks))
    flags, owners, waiters = tuple(compiler.flags), tuple(compiler.owners), tuple(compiler.waiters)
    memories, shared = tuple(compiler.memories), compiler.shared
    program = CompiledSchedule(spelled_out, ops, flags, owners, waiters, memories, shared, compiler.describe)
    _check_waits(program, compiler.counted)
    check_collectives(schedule)
    check_messages(schedule)
    return program


def _check_waits(program: CompiledSchedule, counted: set[int]) -> None:
    """Check that every flag that a step waits for is signalled, and that no two steps wait for a flag that a kernel
    counts by tiles."""
    for number, (flag, owner, waiters) in enumerate(zip(program.flags, program.owners, program.waiters, strict=True)):
        missing = next((place for place, on_previous_call in waiters.items() if owner is None and not on_previous_call), None)
        if missing is not None:
            raise ScheduleError(f"{program.where(*missing)}: it waits for {flag}, which nothing signals")
        if number in counted and len(waiters) > 1:
            others = " and ".join(program.where(*place) for place in waiters)
            raise ScheduleError(f"{flag} is counted by a kernel, but {others} wait for it; give each a flag of its own")


def check_counts(program: CompiledSchedule) -> None:
    """Check that a step waits for each flag that a kernel counts by tiles: the kernel adds to the word of that step.

    This check runs last. A forgotten wait usually also causes a race or a wrong result, and those errors are more helpful.
    """
    for rank, lanes in enumerate(program.ops):
        for index, ops in enumerate(lanes):
            for position, op in enumerate(ops):
                number = next(
                    (each.counts for each in op.actions if each.counts >= 0 and not program.waiters[each.counts]), None
                )
                if number is not None:
                    raise ScheduleError(
                        f"{program.where(rank, index, position)}: it counts {program.flags[number]}, for which no step waits; "
                        "let one step wait for it, or leave the count out"
                    )


def as_kernel(actions_of: Callable[[Any, Any], tuple[Action, ...]]) -> Callable[[Any, Any], Op]:
    """Return a function that compiles a step to one kernel with these actions."""
    return lambda compiler, step: compiler.kernel(step, actions_of)


class Compiler:
    """Compiles the steps in order. `rank`, `lane`, `position` and `step` are the current ones."""

    def __init__(self, spelled_out: SpelledOut) -> None:
        schedule = self.schedule = spelled_out.schedule
        self.spelled_out, self.world_size = spelled_out, schedule.problem.world_size
        self.problem = schedule.problem
        self.node_of = schedule.problem.node_of
        self.all_wide = schedule.problem.dtype == "float32"
        self.buffers = schedule.buffer
        self.first_memory = {b.name: i * self.world_size for i, b in enumerate(schedule.buffers)}
        self.memories = [(b.name, rank) for b in schedule.buffers for rank in range(self.world_size)]
        self.open = {b.name for b in schedule.buffers if b.kind == "symmetric"} | reachable_outputs(schedule)
        self.shared = {number for number, (name, _) in enumerate(self.memories) if name in self.open}
        self.numbers: dict[Flag, int] = {}
        self.flags: list[Flag] = []
        self.owners: list[tuple[int, int] | None] = []
        self.waiters: list[dict[Place, int]] = []
        self.counted: set[int] = set()

    def lanes(self, rank: int, lanes: tuple[Lane, ...]) -> tuple[tuple[Op, ...], ...]:
        self.rank = rank
        return tuple([self.ops(index, lane) for index, lane in enumerate(lanes)])

    def ops(self, index: int, lane: Lane) -> tuple[Op, ...]:
        self.index, self.lane = index, lane
        ops = []
        for position, step in enumerate(lane.steps):
            self.position, self.step = position, step
            ops.append(self.STEPS[type(step)](self, step))
        return tuple(ops)

    def fail(self, text: str) -> NoReturn:
        where = describe_step(self.spelled_out, self.rank, self.lane.name, self.position, str(self.step))
        raise ScheduleError(f"{where}: {text}")

    def refuse(self, fault: str) -> None:
        """Fail if there is a fault."""
        if fault:
            self.fail(fault)

    def off(self, *kinds: LaneKind) -> None:
        """Fail if the lane is of one of these kinds."""
        if self.lane.kind in kinds:
            self.fail(_NO_PLACE[self.lane.kind])

    def kernel(self, step: Step, actions_of: Callable[[Any, Any], tuple[Action, ...]]) -> Op:
        self.off("network", "copy")
        on_sms, actions = self.lane.kind == "compute", actions_of(self, step)
        previous = dict.fromkeys(flag for action in actions for flag, on_previous_call in action.waits if on_previous_call)
        return Op(_WORK, -1, False, actions, on_sms, on_sms and any(a.waits for a in actions), previous=tuple(previous))

    def number(self, flag: Flag) -> int:
        known = self.numbers.get(flag)
        if known is None:
            if not 0 <= flag.rank < self.world_size:
                self.fail(f"{flag} is on no rank; ranks are 0 to {self.world_size - 1}")
            known = self.numbers[flag] = len(self.flags)
            self.flags.append(flag)
            self.owners.append(None)
            self.waiters.append({})
        return known

    def gate(self, wait: Wait) -> tuple[int, bool]:
        if wait.flag.rank != self.rank:
            self.fail(f"{wait.flag} is waited for from rank {self.rank}; only rank {wait.flag.rank} may wait for it")
        flag = self.number(wait.flag)
        place = (self.rank, self.index, self.position)
        if self.waiters[flag].setdefault(place, wait.on_previous_call) != wait.on_previous_call:
            self.fail(f"it waits for {wait.flag} of this call and of the one before; use two steps, or two flags")
        return flag, wait.on_previous_call

    def advance(self, flag: Flag) -> int:
        number, me = self.number(flag), (self.rank, self.index)
        if self.node_of[flag.rank] != self.node_of[self.rank]:
            self.fail(f"{flag} is on another node, out of reach; send a message, and signal where it is received")
        owner = self.owners[number]
        if owner is None:
            self.owners[number] = me
        elif owner != me:
            self.fail(
                f"{flag} is signalled by rank {owner[0]} (its lane {owner[1]}) too; only one lane of one rank may signal it"
            )
        else:
            self.fail(f"{flag} is signalled by another step, or part, too; a call signals a flag once: use a flag for each")
        return number

    def access(self, region: Region, *, write: bool = False, remote: bool = True) -> Access:
        fault = region_fault(region, self.buffers, self.world_size)
        if fault:
            self.fail(fault)
        buffer, rank = self.buffers[region.buffer], region.rank
        if rank != self.rank:
            if self.node_of[rank] != self.node_of[self.rank]:
                self.fail(f"{region} is on another node, out of reach of loads, stores and copies; send and receive it")
            if not (remote and buffer.name in self.open):
                what = f"buffer {buffer.name} is {buffer.kind}; peers may only touch symmetric buffers"
                self.fail(f"{region} is on a peer; {what if remote else 'this operand must be local'}")
        if buffer.operand:
            self.refuse(scales_fault(region, buffer, self.problem))
        if buffer.by_columns and not (write and isinstance(self.step, Gemm)):
            self.fail(f"{region} is stored by columns; only a product writes such a buffer, and nothing reads it")
        if write and buffer.kind == "input":
            self.fail(f"{region} is an input of the caller; no step may write it")
        return self.first_memory[region.buffer] + rank, (*region.rows, *region.cols)

    def narrow(self, *regions: Region) -> None:
        """Fail if a region holds float32 partial sums, where the problem's dtype is needed."""
        for region in regions:
            if not self.all_wide and self.buffers[region.buffer].float32:
                self.fail(f"{region} holds float32 partial sums; this operand must be of the problem's dtype")

    def plain(self, *regions: Region) -> None:
        """Fail if a region holds FP8 elements and their scales."""
        for region in regions:
            if self.buffers[region.buffer].operand:
                self.fail(f"{region} holds FP8 elements and their scales; only copies, products and norms read or write such")

    def factor(self, region: Region, operand: str) -> None:
        """Fail unless the region can be multiplied as `operand`."""
        self.narrow(region)
        scaled = operand if self.problem.scaling is not None else ""
        if self.buffers[region.buffer].operand != scaled:
            needs = f"FP8 elements of {operand} and their scales" if scaled else "the problem's dtype"
            self.fail(f"{region} is not of {needs}, which the product reads")

    def copy(self, step: Copy) -> Op:
        self.off("network")
        read, write = self.access(step.src), self.access(step.dst, write=True)
        self.check_same_shape(step.src, step.dst)
        if step.src.rank != self.rank and step.dst.rank != self.rank:
            self.fail(f"neither {step.src} nor {step.dst} is on rank {self.rank}, which runs the copy")
        is_kernel = step.src.rank == step.dst.rank and self.lane.kind != "blocks"
        return Op(_WORK, -1, False, (self.action(_COPY, (read,), write),), is_kernel)

    def check_same_shape(self, src: Region, dst: Region, *, pushed: bool = False) -> None:
        """Fail unless one region can be copied to the other. pushed: by a Push, which may quantise whole rows."""
        if src.shape != dst.shape:
            self.fail(f"{src} has shape {src.shape}, {dst} has {dst.shape}; a copy needs them equal")
        one, other, scaling = self.buffers[src.buffer], self.buffers[dst.buffer], self.problem.scaling
        if pushed and scaling is not None and scaling.quantises and other.operand == "a" and not (one.operand or one.float32):
            return
        if one.operand != other.operand or (not self.all_wide and one.float32 != other.float32):
            self.fail(f"{src} and {dst} differ in dtype; a copy moves bytes, a reduce rounds")

    def divisor(self, divide_by: int) -> int:
        if divide_by < 1:
            self.fail(f"divide_by is {divide_by}; it must be at least 1")
        return divide_by

    def push(self, step: Push) -> tuple[Action, ...]:
        if not step.parts:
            self.fail("it has no parts; leave it out")
        return tuple([self.store(part, step.source) for part in step.parts])

    def store(self, part: Store, source: tuple[str, int]) -> Action:
        src, dst = part.src, part.dst
        read, write = self.access(src, remote=False), self.access(dst, write=True)
        self.check_same_shape(src, dst, pushed=True)
        if not src.size:
            self.fail(f"{src} has no element, so that nothing would signal {part.count}; signal it by a step of its own")
        if (src.buffer, src.rank) != source:
            self.fail(f"{src} and {source[0]}@{source[1]} are two sources; a push reads one buffer: make two pushes")
        if (dst.buffer, dst.rank) == source:
            self.fail(f"{dst} is in the buffer that it reads; a push writes none of its source")
        if part.count.rank != dst.rank:
            self.fail(f"{part.count} is not on rank {dst.rank}, which receives {dst}; a push signals only its receivers")
        return self.action(_COPY, (read,), write, (), part.count)

    def gemm(self, step: Gemm) -> tuple[Action, ...]:
        b = self.access(step.b, remote=False)
        self.factor(step.b, "b")
        self.divisor(step.divide_by)
        return tuple([self.gemm_part(step, part, b) for part in step.parts])

    def gemm_part(self, step: Gemm, part: Part, b: Access) -> Action:
        a, out = self.access(part.a, remote=False), self.access(part.out, write=True)
        self.refuse(gemm_fault(step, part))
        self.factor(part.a, "a")
        self.plain(part.out, *part.adds)
        if step.accumulate and not (self.all_wide or self.buffers[part.out.buffer].float32):
            self.fail(f"{part.out} is added to but is not a float32 buffer; it would be rounded at every step")
        action = self.action(
            _OF_TRANSPOSE if step.transposed else _GEMM, (a, b), out, part.gates, part.count, accumulate=step.accumulate
        )
        if part.inner:
            return self.sliced(action, part, a)
        return self.adding(action, part, step.divide_by, out) if part.adds else action

    def sliced(self, action: Action, part: Part, a: Access) -> Action:
        """Return the action with its reads of `a` cut at the part's inner gates."""
        action = action._replace(inner=tuple([self.gate(wait) for _, wait in part.inner]))
        if action.write is None:
            return action
        memory, (top, bottom, left, right) = a
        edges = [left, *(left + column for column, _ in part.inner), right]
        first, *slices = [(memory, (top, bottom, low, high)) for low, high in pairwise(edges)]
        return action._replace(reads=(first, *action.reads[1:]), slices=tuple(slices))

    def adding(self, action: Action, part: Part, divide_by: int, out: Access) -> Action:
        """Return the action with the part's addends."""
        adds = tuple([self.access(add, remote=False) for add in part.adds])
        self.disjoint(adds, out)
        return action if action.write is None else action._replace(adds=adds, late=True, divide_by=divide_by)

    def reduce(self, step: Reduce) -> tuple[Action, ...]:
        divide_by = self.divisor(step.divide_by)
        return tuple([self.sum_part(part, divide_by) for part in step.parts])

    def sum_part(self, part: Sum, divide_by: int) -> Action:
        srcs, out = tuple([self.access(src) for src in part.srcs]), self.access(part.out, write=True)
        self.refuse(sum_fault(part))
        self.plain(part.out, *part.srcs)
        return self.action(_ADD, srcs, out, part.gates, part.count, divide_by=divide_by)

    def norm(self, step: Norm) -> tuple[Action, ...]:
        reads = tuple([self.access(region, remote=False) for region in (step.src, step.weight)])
        out = self.access(step.out, write=True, remote=False)
        self.refuse(norm_fault(step, self.problem))
        self.plain(step.src, step.weight)
        operand = self.buffers[step.out.buffer].operand
        if operand != ("norm" if self.problem.norm_recipe else ""):
            holds = "holds no FP8 elements of a norm and their scales" if self.problem.norm_recipe else "holds FP8 elements"
            self.fail(f"{step.out} {holds}; it is not what the norm of {self.problem} is")
        return (self.action(_NORM, reads, out),)

    def lookup(self, step: Lookup) -> tuple[Action, ...]:
        return tuple([self.bags(part) for part in step.parts])

    def bags(self, part: Bags) -> Action:
        bags, out = self.access(part.bags, remote=False), self.access(part.out, write=True)
        self.refuse(bags_fault(part, self.problem, self.rank))
        return self.action(_COPY, (bags,), out, (), part.count)

    def messages(self, step: SendReceive) -> Op:
        if self.lane.kind != "network":
            self.fail(f"it is on a lane of kind {self.lane.kind}; sends and receives need one of kind network")
        sends = [self.message(send.src, send.to, sent=True) for send in step.sends]
        receives = [self.message(receive.dst, receive.source, sent=False) for receive in step.receives]
        ends = [*((True, send.to) for send in step.sends), *((False, receive.source) for receive in step.receives)]
        accesses = [access for action in (*sends, *receives) for access in (*action.reads, action.write) if access]
        for action in receives:
            assert action.write is not None
            others = list(accesses)
            others.remove(action.write)
            self.disjoint(tuple(others), action.write)
        return Op(_MESSAGES, actions=(*sends, *receives), needs_sms=True, messages=tuple(ends))

    def message(self, region: Region, peer: int, *, sent: bool) -> Action:
        access = self.access(region, write=not sent, remote=False)
        self.refuse(message_fault(region, self.buffers[region.buffer], self.rank, peer, self.world_size))
        return Action(_COPY, (), -1, (access,) if sent else (), None if sent else access, False, 1)

    def collective(self, step: Collective) -> Op:
        self.off("network", "copy")
        src, dst = self.access(step.src, remote=False), self.access(step.dst, write=True, remote=False)
        self.divisor(step.divide_by)
        self.refuse(collective_fault(step, self.problem, self.rank))
        self.narrow(step.src, step.dst)
        if step.op in ("reduce_scatter", "all_reduce"):
            self.plain(step.src, step.dst)
        elif self.buffers[step.src.buffer].operand != self.buffers[step.dst.buffer].operand:
            self.fail(f"{step.src} and {step.dst} differ in dtype; a collective moves bytes")
        action = self.action(_COLLECTS[step.op], (src,), dst, divide_by=step.divide_by, collective=True)
        return Op(_COLLECTIVE, actions=(action,), needs_sms=self.lane.kind == "compute")

    def action(
        self,
        do: Do,
        reads: tuple[Access, ...],
        write: Access,
        gates: tuple[Wait, ...] = (),
        count: Flag | None = None,
        *,
        accumulate: bool = False,
        divide_by: int = 1,
        collective: bool = False,
    ) -> Action:
        """Return an action, after checking its accesses. An action that writes no element reads none, unless it is a
        collective.

        A collective reads, because its peers need the rank's data.
        """
        waits = tuple([self.gate(g) for g in gates]) if gates else ()
        number = -1 if count is None else self.advance(count)
        if number >= 0:
            self.counted.add(number)
        touched = write if area(write[1]) else None
        if touched is None and not collective:
            return Action(do, waits, number, (), None, accumulate, divide_by)
        self.disjoint(reads, write, in_place=do is _ADD or do is _ADD_ALL)
        reads = tuple([r for r in reads if r[1][0] < r[1][1] and r[1][2] < r[1][3]])
        return Action(do, waits, number, reads, touched, accumulate, divide_by)

    def disjoint(self, reads: tuple[Access, ...], write: Access, *, in_place: bool = False) -> None:
        """Fail if an action reads memory that it writes. in_place: it may read exactly the rectangle that it writes."""
        for read in reads:
            if read[0] == write[0] and overlap(read[1], write[1]) and not (in_place and read[1] == write[1]):
                self.fail(f"it reads {self.describe(read)} while it writes {self.describe(write)}, which overlaps")

    def describe(self, access: Access) -> str:
        name, rank = self.memories[access[0]]
        return str(Region(name, rank, access[1][:2], access[1][2:]))

    STEPS: ClassVar[dict[type, Callable[[Any, Any], Op]]] = {
        Wait: lambda compiler, step: Op(_WAIT, *compiler.gate(step)),
        Signal: lambda compiler, step: Op(_SIGNAL, compiler.advance(step.flag)),
        Copy: copy,
        Push: as_kernel(push),
        Gemm: as_kernel(gemm),
        Reduce: as_kernel(reduce),
        Norm: as_kernel(norm),
        Lookup: as_kernel(lookup),
        Collective: collective,
        SendReceive: messages,
        UserCall: lambda compiler, step: compiler.fail(
            "a call of the user's own is for a ConcurrentProblem; this problem has none"
        ),
        **dict.fromkeys(
            (ShareCounts, SegmentCopies, GroupedGemm),
            as_kernel(lambda compiler, step: compiler.fail("its row counts live on devices; only a RaggedProblem has such")),
        ),
    }
    """The function that compiles each type of step. A FusedCollective has been replaced by the steps that it stands for."""
