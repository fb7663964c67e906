"""What the steps of schedules do whose row counts only devices know, for every assignment of counts at once.

Steps name whole segments (src, dst, expert). In one buffer of one rank segments are contiguous, in an order that
does not depend on the counts, so two of them never share a row, and one that is cut at the capacity ends there: whatever the
counts are, two accesses conflict only if they name the same segment of the same buffer. So a buffer is taken to have one row of
one element for each segment, in its order. An empty segment does nothing, and its flags are signalled all the same.

The counts are a memory of their own on each rank, with a row for each rank whose counts they are. Each part of a kernel reads
all rows of its rank where the kernel starts, since where segments begin depends on them. The memory has two places, which calls
take in turn (`weft.checker.memory.AlternatingMemory`).

The next call may have other counts, so a segment may occupy rows of another segment of this call. That is no conflict that the
proof misses: a kernel runs after the counts of all ranks for its call, and each rank shares those after all of its lanes have
ended the previous call. So a call accesses segments only after all accesses of the previous call.
"""

from __future__ import annotations

from typing import ClassVar, NoReturn

from weft.checker.content import Cells, Content
from weft.checker.effects import Effects
from weft.checker.memory import AliasedInput, AlternatingMemory, Constant, Memory
from weft.checker.program import Access, Action, Do, Op, Rect, ScheduleError
from weft.checker.structure import Compiler, as_kernel
from weft.core.fused_collective import SpelledOut
from weft.core.problem import RaggedProblem
from weft.core.schedule import (
    Flag,
    GroupedGemm,
    Lane,
    Segment,
    SegmentCopies,
    SegmentCopy,
    SegmentProduct,
    ShareCounts,
    Signal,
    Step,
    Wait,
    steps_of,
)

COUNTS = "counts"
"""The memory of the counts. No buffer has this name."""
Name = tuple[int, int, int]


def _order(problem: RaggedProblem, buffer: str, rank: int) -> tuple[Name, ...]:
    """Return the segments of a buffer, in their order there."""
    return problem.sent_order(rank) if buffer in ("a", "product") else problem.received_order(rank)


class RaggedCompiler(Compiler):
    """Counts and segments as rows of one element."""

    def __init__(self, spelled_out: SpelledOut) -> None:
        super().__init__(spelled_out)
        assert isinstance(self.problem, RaggedProblem), f"{self.problem} has no segments"
        self.ragged = self.problem
        self.first_memory[COUNTS] = len(self.memories)
        self.memories += [(COUNTS, rank) for rank in range(self.world_size)]
        self.shared |= {self.counts(rank, 0)[0] for rank in range(self.world_size)}
        self.rows = {
            (name, rank): {segment: (row, row + 1, 0, 1) for row, segment in enumerate(_order(self.ragged, name, rank))}
            for name in self.buffers
            for rank in range(self.world_size)
        }
        """By buffer and rank, the place of each segment."""

    def lanes(self, rank: int, lanes: tuple[Lane, ...]) -> tuple[tuple[Op, ...], ...]:
        kinds = [lane.kind for lane in lanes]
        if not kinds or set(kinds) - {"compute", "blocks"}:
            raise ScheduleError(f"rank {rank} has lanes of kinds {kinds}; use one of kind compute, others of kind blocks")
        if len(list(steps_of(ShareCounts, lanes))) > 1:
            raise ScheduleError(f"rank {rank} shares its counts in several steps; use one")
        return super().lanes(rank, lanes)

    def no_such_step(self, step: Step) -> NoReturn:
        self.fail(f"{self.ragged.op} has no such step")

    def gate(self, wait: Wait) -> tuple[int, bool]:
        if wait.on_previous_call:
            self.fail(f"it waits for {wait.flag} of the previous call, which calls with row counts on devices cannot do")
        return super().gate(wait)

    def share(self, step: ShareCounts) -> tuple[Action, ...]:
        """It writes and signals everywhere before it waits: the gates are those of an action that touches nothing."""
        waiting = Action(Do.WAIT, tuple(map(self.gate, step.gates)), -1, (), None, False, 1)
        return *map(self.shared_count, step.flags), waiting

    def segments(self, step: SegmentCopies | GroupedGemm) -> tuple[Action, ...]:
        if not any(steps_of(ShareCounts, [self.lane])):
            self.fail("it needs the counts of its call; put it on the lane that shares them")
        return tuple(map(self.part, step.parts))

    def counts(self, rank: int, source: int) -> Access:
        return self.first_memory[COUNTS] + rank, (source, source + 1, 0, 1)

    def shared_count(self, flag: Flag) -> Action:
        number, write = self.advance(flag), self.counts(flag.rank, self.rank)
        return Action(Do.COPY, (), number, (), write, False, 1)

    def part(self, part: SegmentCopy | SegmentProduct) -> Action:
        source, target = part.ends
        self.check_part(part, source, target)
        read, write = self.segment(source), self.segment(target)
        self.disjoint((read,), write)
        do = Do.COPY if isinstance(part, SegmentCopy) else Do.GEMM
        counts = tuple([self.counts(self.rank, rank) for rank in range(self.world_size)])
        # The counts are read where the kernel starts, and the segment once the gates are open.
        return self.action(do, counts, write, part.gates, part.count)._replace(adds=(read,), late=True)

    def segment(self, segment: Segment) -> Access:
        return self.first_memory[segment.buffer] + segment.rank, self.rows[segment.buffer, segment.rank][segment.name]

    def check_part(self, part: SegmentCopy | SegmentProduct, source: Segment, target: Segment) -> None:
        if source.name != target.name:
            self.fail(f"{source} is not the segment of {target}")
        for side in (source, target):
            buffer = self.buffers.get(side.buffer)
            if buffer is None:
                self.fail(f"{side} is in no buffer of segments")
            if side.name not in self.rows.get((side.buffer, side.rank), ()):
                self.fail(f"{side.buffer} of rank {side.rank} does not hold {side}")
            if side.rank != self.rank and buffer.kind != "symmetric":
                self.fail(f"{side} is another rank's, and not symmetric")
        have, wide = (self.buffers[side.buffer].cols[side.rank] for side in (source, target))
        wanted = (have, have) if isinstance(part, SegmentCopy) else (self.ragged.k, self.ragged.n)
        if (have, wide) != wanted:
            self.fail(f"{source} has {have} columns and {target} has {wide}; it needs {wanted[0]} and {wanted[1]}")
        self.check_operands(part, source, target)
        if self.rank not in (source.rank, target.rank):
            self.fail("neither side is on the rank that runs it")
        if isinstance(part, SegmentProduct):
            owner = source.dst if self.ragged.dispatches else source.src
            if source.rank != self.rank or owner != self.rank:
                self.fail(f"the expert of {source} is not on rank {self.rank}")
        if self.buffers[target.buffer].kind == "input":
            self.fail(f"it writes {target}, an input")

    def check_operands(self, part: SegmentCopy | SegmentProduct, source: Segment, target: Segment) -> None:
        """FP8 rows keep their scales where they are copied, and are multiplied; products are of the problem's dtype."""
        read, written = (self.buffers[side.buffer].operand for side in (source, target))
        if isinstance(part, SegmentCopy):
            if read != written:
                self.fail(f"of {source} and {target} one holds FP8 elements with scales, and the other does not")
            return
        scaled = self.ragged.scaling is not None
        if bool(read) != scaled or written:
            needs = "FP8 elements and their scales" if scaled else "the problem's dtype"
            self.fail(
                f"it multiplies {source}, which must be of {needs}, and writes {target}, which must be of the problem's dtype"
            )

    def describe(self, access: Access) -> str:
        """A segment, the counts of a rank, or a whole buffer."""
        (name, rank), (row, end, *_) = self.memories[access[0]], access[1]
        if name == COUNTS:
            return f"the counts of rank {row} on rank {rank}"
        return str(Segment(name, rank, *_order(self.ragged, name, rank)[row])) if end - row == 1 else f"{name}@{rank}"

    STEPS: ClassVar = {
        **dict.fromkeys(Compiler.STEPS, no_such_step),
        **{kind: Compiler.STEPS[kind] for kind in (Wait, Signal)},
        ShareCounts: as_kernel(share),
        **dict.fromkeys((SegmentCopies, GroupedGemm), as_kernel(segments)),
    }


class _Rows(Constant):
    """An input: segments of rows."""

    def __init__(self, order: tuple[Name, ...]) -> None:
        self.order = order

    def read(self, rect: Rect, node: int, ancestors: int) -> Cells:
        return [(rect, ("the rows", self.order[rect[0]]))]


class RaggedEffects(Effects):
    """A segment holds (what, name): its rows, or their product. CALLS: counts use the same slot again two calls later."""

    CALLS = 4
    UNIT = "segments"

    @property
    def ragged(self) -> RaggedProblem:
        assert isinstance(self.problem, RaggedProblem), f"{self.problem} has no segments"
        return self.problem

    def _memory(self, number: int, name: str, rank: int) -> Memory | Constant | AliasedInput:
        if name == COUNTS:
            return AlternatingMemory(number, self.nodes)
        is_input = self.program.schedule.buffer[name].kind == "input"
        return _Rows(_order(self.ragged, name, rank)) if is_input else Memory(number)

    def _result(self, action: Action, cells: list[Cells], old: Cells | None) -> Cells:
        assert action.write is not None
        if not action.adds:
            return [(action.write[1], ("the counts",))]
        ((_, (what, name)),) = cells[-1]
        return [(action.write[1], (what if action.do is Do.COPY else f"the product of {what}", name))]

    def check_outputs(self, rank: int) -> None:
        for number, (name, owner) in enumerate(self.program.memories):
            if owner == rank and name in ("out", "received"):
                what, order = ("the product of the rows" if name == "out" else "the rows"), self.ragged.received_order(rank)
                wanted = [((row, row + 1), (what, segment)) for row, segment in enumerate(order)]
                self._check_output(number, (0, len(order), 0, 1), wanted)

    def _describe(self, content: Content | None, rect: Rect) -> str:
        what, (src, dst, expert) = content or ("nothing", (0, 0, 0))
        return f"{what} of {src}->{dst}, expert {expert}"
