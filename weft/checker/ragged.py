"""Compile and check schedules whose row counts are known only on devices, for every assignment of counts at once.

The steps name whole segments (src, dst, expert). In a buffer of a rank the segments are contiguous, and their order does not
depend on the counts. So two segments never share a row, and a segment that is cut at the capacity ends there. Whatever the
counts are, two accesses conflict only if they name the same segment of the same buffer. So the checker models a buffer as one
row of one element for each segment, in the order of the segments. An empty segment moves no data, and its flags are signalled
nevertheless.

The counts are a separate memory on each rank, with one row for each rank that shares its counts. The begin of a segment depends
on all counts, so each part of a kernel reads all rows when the kernel starts. The memory has two places, which calls
use in turn (`weft.checker.memory.AlternatingMemory`).

The next call may have other counts, so that one of its segments occupies rows of another segment of this call. The model does
not show this conflict, and it cannot happen: a kernel runs after the counts of all ranks for its call, and each rank shares
those after all of its lanes have ended the previous call. So a call accesses segments only after all accesses of the previous
call.
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
"""The name of the memory of the counts. No buffer has this name."""
SegmentName = tuple[int, int, int]
"""The source rank, destination rank and expert of a segment."""


def _list_segments(problem: RaggedProblem, buffer: str, rank: int) -> tuple[SegmentName, ...]:
    """Return the segments of a buffer, in the order in which they lie there."""
    return problem.sent_order(rank) if buffer in ("a", "product") else problem.received_order(rank)


class RaggedCompiler(Compiler):
    """Compiles the steps of a RaggedProblem. Each row of counts and each segment is one row of one element."""

    def __init__(self, spelled_out: SpelledOut) -> None:
        super().__init__(spelled_out)
        assert isinstance(self.problem, RaggedProblem), f"{self.problem} has no segments"
        self.ragged_problem = self.problem
        self.first_memory[COUNTS] = len(self.memories)
        self.memories += [(COUNTS, rank) for rank in range(self.world_size)]
        self.shared |= {self.counts_access(rank, 0)[0] for rank in range(self.world_size)}
        self.segment_rects = {
            (name, rank): {
                segment: (row, row + 1, 0, 1) for row, segment in enumerate(_list_segments(self.ragged_problem, name, rank))
            }
            for name in self.buffers
            for rank in range(self.world_size)
        }
        """The rectangle of each segment, by buffer and rank."""

    def lanes(self, rank: int, lanes: tuple[Lane, ...]) -> tuple[tuple[Op, ...], ...]:
        kinds = [lane.kind for lane in lanes]
        if not kinds or set(kinds) - {"compute", "blocks"}:
            raise ScheduleError(
                f"rank {rank} has lanes of kinds {kinds}; use one lane of kind compute, and lanes of kind blocks"
            )
        if len(list(steps_of(ShareCounts, lanes))) > 1:
            raise ScheduleError(f"rank {rank} shares its counts in several steps; use one")
        return super().lanes(rank, lanes)

    def refuse_step(self, step: Step) -> NoReturn:
        self.fail(f"{self.ragged_problem.op} does not support this step")

    def gate(self, wait: Wait) -> tuple[int, bool]:
        if wait.on_previous_call:
            self.fail(f"it waits for {wait.flag} of the previous call, which calls with row counts on devices cannot do")
        return super().gate(wait)

    def compile_share_counts(self, step: ShareCounts) -> tuple[Action, ...]:
        """Return the writes of this rank's counts to all ranks, and then one action that waits for the counts of the others.

        The step waits after it has written and signalled everywhere, so the writes have no gates.
        """
        waiting = Action(Do.WAIT, tuple(map(self.gate, step.gates)), -1, (), None, False, 1)
        return *map(self.compile_count, step.flags), waiting

    def compile_segments(self, step: SegmentCopies | GroupedGemm) -> tuple[Action, ...]:
        if not any(steps_of(ShareCounts, [self.lane])):
            self.fail("it needs the row counts of its call; put it on the lane that has the ShareCounts step")
        return tuple(map(self.compile_part, step.parts))

    def counts_access(self, rank: int, source: int) -> Access:
        """Return the access to the counts of rank `source` on `rank`."""
        return self.first_memory[COUNTS] + rank, (source, source + 1, 0, 1)

    def compile_count(self, flag: Flag) -> Action:
        """Return the write of this rank's counts to the rank of a flag."""
        number, write = self.advance(flag), self.counts_access(flag.rank, self.rank)
        return Action(Do.COPY, (), number, (), write, False, 1)

    def compile_part(self, part: SegmentCopy | SegmentProduct) -> Action:
        source, target = part.ends
        self.check_part(part, source, target)
        read, write = self.segment_access(source), self.segment_access(target)
        self.disjoint((read,), write)
        do = Do.COPY if isinstance(part, SegmentCopy) else Do.GEMM
        counts = tuple([self.counts_access(self.rank, rank) for rank in range(self.world_size)])
        # The counts are read when the kernel starts, and the segment once the gates are open.
        return self.action(do, counts, write, part.gates, part.count)._replace(adds=(read,), late=True)

    def segment_access(self, segment: Segment) -> Access:
        return self.first_memory[segment.buffer] + segment.rank, self.segment_rects[segment.buffer, segment.rank][segment.name]

    def check_part(self, part: SegmentCopy | SegmentProduct, source: Segment, target: Segment) -> None:
        if source.name != target.name:
            self.fail(f"{source} is a different segment from {target}")
        for side in (source, target):
            buffer = self.buffers.get(side.buffer)
            if buffer is None:
                self.fail(f"{side} is in a buffer that does not exist")
            if side.name not in self.segment_rects.get((side.buffer, side.rank), ()):
                self.fail(f"{side.buffer} of rank {side.rank} does not hold {side}")
            if side.rank != self.rank and buffer.kind != "symmetric":
                self.fail(f"{side} is on another rank, but its buffer is not symmetric")
        source_cols, target_cols = (self.buffers[side.buffer].cols[side.rank] for side in (source, target))
        wanted = (source_cols, source_cols) if isinstance(part, SegmentCopy) else (self.ragged_problem.k, self.ragged_problem.n)
        if (source_cols, target_cols) != wanted:
            self.fail(
                f"{source} has {source_cols} columns and {target} has {target_cols}; it needs {wanted[0]} and {wanted[1]}"
            )
        self.check_operands(part, source, target)
        if self.rank not in (source.rank, target.rank):
            self.fail("neither segment is on the rank that runs the step")
        if isinstance(part, SegmentProduct):
            owner = source.dst if self.ragged_problem.dispatches else source.src
            if source.rank != self.rank or owner != self.rank:
                self.fail(f"the expert of {source} is not on rank {self.rank}")
        if self.buffers[target.buffer].kind == "input":
            self.fail(f"it writes {target}, which is an input")

    def check_operands(self, part: SegmentCopy | SegmentProduct, source: Segment, target: Segment) -> None:
        """Fail unless copies move FP8 elements together with their scales, and products have the right dtypes."""
        read, written = (self.buffers[side.buffer].operand for side in (source, target))
        if isinstance(part, SegmentCopy):
            if read != written:
                self.fail(f"only one of {source} and {target} has FP8 elements with scales; both must have them, or neither")
            return
        scaled = self.ragged_problem.scaling is not None
        if bool(read) != scaled or written:
            needs = "FP8 elements and their scales" if scaled else "the problem's dtype"
            self.fail(
                f"it multiplies {source}, which must be of {needs}, and writes {target}, which must be of the problem's dtype"
            )

    def describe(self, access: Access) -> str:
        """Return the name of what is accessed: a segment, the counts of a rank, or a whole buffer."""
        (name, rank), (row, end, *_) = self.memories[access[0]], access[1]
        if name == COUNTS:
            return f"the counts of rank {row} on rank {rank}"
        return (
            str(Segment(name, rank, *_list_segments(self.ragged_problem, name, rank)[row]))
            if end - row == 1
            else f"{name}@{rank}"
        )

    STEPS: ClassVar = {
        **dict.fromkeys(Compiler.STEPS, refuse_step),
        **{kind: Compiler.STEPS[kind] for kind in (Wait, Signal)},
        ShareCounts: as_kernel(compile_share_counts),
        **dict.fromkeys((SegmentCopies, GroupedGemm), as_kernel(compile_segments)),
    }


class _InputSegments(Constant):
    """An input buffer, whose segments hold the rows of the call."""

    def __init__(self, order: tuple[SegmentName, ...]) -> None:
        self.order = order

    def read(self, rect: Rect, node: int, ancestors: int) -> Cells:
        return [(rect, ("the rows", self.order[rect[0]]))]


class RaggedEffects(Effects):
    """The effects of the steps. The content of a segment is (what, name): the rows of that segment, or their product."""

    CALLS = 4
    """The number of calls to check: counts use the same place of their memory again two calls later."""
    UNIT = "segments"

    @property
    def ragged_problem(self) -> RaggedProblem:
        assert isinstance(self.problem, RaggedProblem), f"{self.problem} has no segments"
        return self.problem

    def _memory(self, number: int, name: str, rank: int) -> Memory | Constant | AliasedInput:
        if name == COUNTS:
            return AlternatingMemory(number, self.nodes)
        is_input = self.program.schedule.buffer[name].kind == "input"
        return _InputSegments(_list_segments(self.ragged_problem, name, rank)) if is_input else Memory(number)

    def _result(self, action: Action, cells: list[Cells], old: Cells | None) -> Cells:
        assert action.write is not None
        if not action.adds:
            return [(action.write[1], ("the counts",))]
        ((_, (what, name)),) = cells[-1]
        return [(action.write[1], (what if action.do is Do.COPY else f"the product of {what}", name))]

    def check_outputs(self, rank: int) -> None:
        for number, (name, owner) in enumerate(self.program.memories):
            if owner == rank and name in ("out", "received"):
                what, order = (
                    ("the product of the rows" if name == "out" else "the rows"),
                    self.ragged_problem.received_order(rank),
                )
                wanted = [((row, row + 1), (what, segment)) for row, segment in enumerate(order)]
                self._check_output(number, (0, len(order), 0, 1), wanted)

    def _describe(self, content: Content | None, rect: Rect) -> str:
        what, (src, dst, expert) = content or ("nothing", (0, 0, 0))
        return f"{what} of {src}->{dst}, expert {expert}"
