"""Effects applies the steps of a schedule to memory, in the order of the walk. It detects races and tracks contents.

The walk passes actions in an order that is consistent with happens-before, each with the set of its ancestors (an int with one
bit for each node). Three errors are raised: an access that is not ordered after one that it conflicts with, a read of elements
that were never written (both as `Conflict`, which `explain` turns into a message), and a wrong element of a result (as
`ScheduleError`).

Contents are tracked in the first call only. If no read of the first call finds unwritten memory and no two calls race, every
later call behaves like the first: a read that finds stale data in a later call would find no data in the first. Buffers that
are not symmetric need no check in later calls, because a call begins after all lanes of its rank have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import chain
from operator import or_

from weft.checker.content import (
    ADDED,
    ZERO,
    Cells,
    Content,
    added,
    describe,
    divided,
    moved,
    normalised,
    product,
    total,
    transposed,
)
from weft.checker.memory import AliasedInput, Conflict, Constant, Memory
from weft.checker.program import CALLER, Access, Action, CompiledSchedule, Do, Rect, ScheduleError, overlap
from weft.checker.shapes import reachable_outputs
from weft.core.problem import EXCHANGES, LOOKUP_OPS, CollectiveProblem, ColumnProblem, Span1D

At = tuple[int, int, int, int, int]
"""A rank, lane, position, part and call."""


class Effects:
    """Effects holds the memories of all ranks.

    CALLS: the number of successive calls that show every error that any call can show.
    """

    CALLS = 2
    UNIT = "elements"
    """The unit of results, for messages."""

    def __init__(self, program: CompiledSchedule) -> None:
        self.program = program
        self.problem = program.schedule.problem
        self.nodes: list[At] = []
        self.aliased: dict[int, AliasedInput] = {}
        """The input that may share memory with a result, by the result's memory."""
        self.memories = [self._memory(number, name, rank) for number, (name, rank) in enumerate(program.memories)]

    def _memory(self, number: int, name: str, rank: int) -> Memory | Constant | AliasedInput:
        is_input = self.program.schedule.buffer[name].kind == "input"
        return self._input_memory(number, name, rank) if is_input else Memory(number)

    def _input_memory(self, number: int, name: str, rank: int) -> Constant | AliasedInput:
        content = self._input(name, rank)
        alias = self.problem.alias(rank) if isinstance(self.problem, CollectiveProblem) else None
        if alias is None:
            return Constant(content)
        rows, cols = self.program.schedule.buffer[name].whole(rank).shape
        aliased = self.aliased[self._result_of(rank)] = AliasedInput(number, content, (0, rows, 0, cols), alias)
        return aliased

    def _result_of(self, rank: int) -> int:
        return self.program.memories.index(("out", rank))

    def _input(self, name: str, rank: int) -> Content:
        """Return the content of an input, in the coordinates of the whole matrices.

        In an all-to-all, the whole A has all ranks' a below each other (side by side if they are received so), and the whole B
        has all ranks' b side by side.
        """
        if name == "bags":
            return ("P", 0, self._first_column(rank))
        if name in ADDED:
            return ("AB", None if name == "bias" else self._first_row(rank), 0, (ADDED[name],), 1)
        if name == "norm_weight":
            return ("W", 0, 0)
        if isinstance(self.problem, CollectiveProblem):
            # The whole A has all ranks' elements below each other. If ranks are summed, the rank is the k of a product.
            if self.problem.sums:
                return ("AB", 0, 0, ((rank, rank + 1),), 1)
            return ("A", rank * self.problem.m if self.problem.op == "all_to_all" else self.problem.shards[rank][0], 0)
        if isinstance(self.problem, ColumnProblem) and not self.problem.sends_columns:
            return ("A", 0, self.problem.blocks[rank][0]) if name == "a" else ("B", 0, rank * self.problem.n)
        if self.problem.op in (*EXCHANGES, "matmul_all_to_all_columns"):
            return ("A", rank * self.problem.m, 0) if name == "a" else ("B", 0, rank * self.problem.n)
        if self.problem.op == "all_gather_matmul":
            offset = self.problem.shards[rank][0] if name == "a" else self._first_column(rank)
            return ("A", offset, 0) if name == "a" else ("B", 0, offset)
        if name == "x":
            return ("X", self.problem.shards[rank][0] if self.problem.weight_gradients == "shard" else 0, 0)
        offset = self._first_inner(rank)
        return ("A", 0, offset) if name == "a" else ("B", offset, 0)

    def _first_inner(self, rank: int) -> int:
        return sum(self.problem.inner(r) for r in range(rank))

    def _first_column(self, rank: int) -> int:
        if self.problem.op not in ("all_gather_matmul", *LOOKUP_OPS):
            return 0
        return sum(self.problem.columns(r) for r in range(rank))

    def add_node(self, at: At) -> int:
        """Add a node to the happens-before relation, and return its number."""
        self.nodes.append(at)
        return len(self.nodes) - 1

    def act(self, action: Action, at: At, ancestors: int, started: int, behind: Sequence[int] = ()) -> int:
        """Apply an action to memory. Return its ancestors with the nodes of the action added.

        started: the ancestors of the start of its kernel.
        behind: the ancestors that each inner gate adds.
        """
        if action.write is None and not action.reads and not action.adds:
            return reduce(or_, behind, ancestors)
        node = self.add_node(at)
        cells = self._read(action.reads, node, started if action.late else ancestors)
        for number, more in enumerate(behind):
            # Reads after an inner gate are a separate access, after all reads before it.
            ancestors |= 1 << node | more
            node = self.add_node(at)
            cells += self._read(action.slices[number : number + 1], node, ancestors)
        if action.late:
            # With late gates, a and b are read before the gates open, so the read of the addends is a separate access.
            ancestors |= 1 << node
            node = self.add_node(at)
            cells += self._read(action.adds, node, ancestors)
        if action.write is not None:
            memory, rect = action.write
            old = self.memories[memory].read(rect, node, ancestors) if action.accumulate else None
            self._write(action, None if at[4] else self._result(action, cells, old), node, ancestors)
        return ancestors | 1 << node

    def _read(self, accesses: tuple[Access, ...], node: int, ancestors: int) -> list[Cells]:
        return [self.memories[m].read(rect, node, ancestors) for m, rect in accesses]

    def _write(self, action: Action, cells: Cells | None, node: int, ancestors: int, *, by_collective: bool = False) -> None:
        """Write the cells of an action. The result may share memory with an input.

        cells: the cells to write, or None in calls after the first.
        by_collective: a collective writes. It may write a copy of a rectangle to itself, which executors leave out for other
        copies.
        """
        assert action.write is not None
        number, rect = action.write
        memory = self.memories[number]
        assert isinstance(memory, Memory)
        if cells is None:
            memory.write(rect, None, node, ancestors)
            return
        for part, content in cells:
            memory.write(part, content, node, ancestors)
        aliased = self.aliased.get(number)
        place = aliased and aliased.place(rect)
        if aliased and place and (by_collective or action.do is not Do.COPY or action.reads != ((aliased.number, place),)):
            aliased.overwrite(place, node, ancestors, by_collective=by_collective)

    def collect(self, actions: list[Action], ats: list[At], ancestors: list[int]) -> list[int]:
        """Apply a collective, once all ranks have started it. Each list has one entry for each rank. Return each rank's new
        ancestors."""
        nodes = [self.add_node(at) for at in ats]
        accesses = zip(actions, nodes, ancestors, strict=True)
        found = [list(chain(*self._read(action.reads, node, before))) for action, node, before in accesses]
        for rank, (action, node) in enumerate(zip(actions, nodes, strict=True)):
            if action.write is not None:
                cells = None if ats[rank][4] else self._collected(actions, found, rank, action.write[1])
                self._write(action, cells, node, ancestors[rank], by_collective=True)
        return [1 << node for node in nodes]

    def post(self, action: Action, at: At, ancestors: int) -> tuple[Cells, int]:
        """Read the cells to send. Return them, and the ancestors with the node of the read added."""
        node = self.add_node(at)
        return list(chain(*self._read(action.reads, node, ancestors))), ancestors | 1 << node

    def deliver(self, action: Action, at: At, ancestors: int, sent: Action, cells: Cells) -> int:
        """Write the received cells, which `sent` has read. Return the ancestors with the node of the write added."""
        node = self.add_node(at)
        if action.write is not None:
            landed = None if at[4] else moved(cells, sent.reads[0][1], action.write[1])
            self._write(action, landed, node, ancestors)
        return ancestors | 1 << node

    def _collected(self, actions: list[Action], found: list[Cells], rank: int, dst: Rect) -> Cells:
        """Return the cells that a collective writes on `rank`.

        These are all shards below each other, the sum over ranks of its own rows or of all rows, or its own shard of every
        rank.
        """
        if actions[rank].do is Do.COPY:
            landed: Cells = []
            for (low, high), action, cells in zip(self.problem.shards, actions, found, strict=True):
                if action.reads:
                    landed += moved(cells, action.reads[0][1], (dst[0] + low, dst[0] + high, dst[2], dst[3]))
            return landed
        if actions[rank].do in (Do.EXCHANGE, Do.EXCHANGE_COLUMNS):
            return self._exchanged(actions, found, rank, dst)
        shards = self.problem.shards
        low, high = (0, shards[-1][1]) if actions[rank].do is Do.ADD_ALL else shards[rank]
        parts = []
        for action, cells in zip(actions, found, strict=True):
            own, cut = _rows_of(action, cells, low, high)
            parts.append(moved(cut, own, dst))
        return divided(total(parts), actions[rank].divide_by)

    def _exchanged(self, actions: list[Action], found: list[Cells], rank: int, dst: Rect) -> Cells:
        """Return the shard of `rank` of every rank: below each other, or with columns side by side."""
        landed: Cells = []
        for src_rank, (action, cells) in enumerate(zip(actions, found, strict=True)):
            if action.reads:
                own, cut = _rows_of(action, cells, *self.problem.shards[rank])
                landed += moved(cut, own, self._landing(action.do, src_rank, rank, dst))
        return landed

    def _landing(self, do: Do, src_rank: int, rank: int, dst: Rect) -> Rect:
        """Return the rectangle on `rank` where the rows that `src_rank` sends to it arrive."""
        if do is Do.EXCHANGE_COLUMNS:
            left, right = self.problem.blocks[src_rank]
            return dst[0], dst[1], dst[2] + left, dst[2] + right
        first, last = self.problem.arrivals(src_rank, rank)
        return dst[0] + first, dst[0] + last, dst[2], dst[3]

    def pass_to_caller(self, rank: int, call: int, ancestors: int) -> int:
        """Record that the caller accesses the results between two calls, if peers can reach them.

        Return the ancestors with that node added.
        """
        if not reachable_outputs(self.program.schedule):
            return ancestors
        at = (rank, *CALLER, 0, call)
        node = self.add_node(at)
        memory = self.memories[self._result_of(rank)]
        assert isinstance(memory, Memory)
        memory.give_back(node, ancestors)
        return ancestors | 1 << node

    def check_outputs(self, rank: int) -> None:
        """Check that the caller of `rank` finds the whole result."""
        for number, (name, owner) in enumerate(self.program.memories):
            buffer = self.program.schedule.buffer[name]
            if owner == rank and buffer.kind == "output" and buffer.whole(rank).size:
                self._check_output(number, (0, buffer.rows[rank], 0, buffer.cols[rank]), self._expected_rows(name, rank))

    def _expected_rows(self, name: str, rank: int) -> list[tuple[Span1D, Content]]:
        """Return the contents that ranges of rows must have."""
        problem, rows = self.problem, (0, self.program.schedule.buffer[name].rows[rank])
        if problem.op in EXCHANGES or problem.op == "all_to_all":
            return [self._expected_arrivals(name, src_rank, rank) for src_rank in range(problem.world_size)]
        if isinstance(problem, ColumnProblem):
            return _expected_columns(problem, name, rank)
        if isinstance(problem, CollectiveProblem):
            if problem.op == "all_reduce":
                return [(rows, self._whole_sum(name, problem.world_size, problem.divide_by))]
            low, every = problem.shards[rank][0], ((0, problem.world_size),)
            return [(rows, ("AB", low, 0, every, problem.divide_by) if problem.sums else ("A", 0, 0))]
        if problem.op in LOOKUP_OPS:
            return [(rows, ("P", problem.shards[rank][0], 0))]
        if name == "gathered":
            return [(rows, ("A", 0, 0))]
        if name == "gradients":
            return [(rows, ("XA", 0, self._first_inner(rank), ((0, problem.m),), 1) if problem.m else ZERO)]
        every_k = ((0, problem.k),)
        if problem.op == "all_gather_matmul":
            return [(rows, ("AB", 0, self._first_column(rank), every_k, 1))]
        if problem.op == "matmul_all_reduce":
            return [(rows, self._whole_sum(name, problem.k, first=self._first_row(rank)))]
        divide_by = problem.world_size if problem.reduce_op == "avg" else 1
        return [(rows, ("AB", problem.shards[rank][0], 0, every_k, divide_by))]

    def _first_row(self, rank: int) -> int:
        """Return the row of the whole sum at which the residual and the result of a rank begin."""
        return self.problem.shards[rank][0] if self.problem.residual_sharded else 0

    def _whole_sum(self, name: str, k: int, divide_by: int = 1, first: int = 0) -> Content:
        """Return the content of the sum over all k and the addends, or of its norm. first: the row at which the sum begins."""
        ks = (*sorted(ADDED[addend] for addend in self.problem.addends), (0, k))
        return ("N", 0, 0, ("AB", ks, divide_by)) if name == "normed" else ("AB", first, 0, ks, divide_by)

    def _expected_arrivals(self, name: str, src_rank: int, rank: int) -> tuple[Span1D, Content]:
        """Return the rows of an all-to-all that `rank` has from `src_rank`, and their content.

        In `out` they are multiplied by the b of the rank that multiplies.
        """
        problem = self.problem
        rows = problem.arrivals(src_rank, rank)
        first = src_rank * problem.m + problem.shards[rank][0]
        if name == "gathered" or problem.op == "all_to_all":
            return rows, ("A", first - rows[0], 0)
        multiplier = src_rank if problem.op == "matmul_all_to_all" else rank
        return rows, ("AB", first - rows[0], multiplier * problem.n, ((0, problem.k),), 1)

    def _check_output(self, number: int, whole: Rect, wanted: list[tuple[Span1D, Content]]) -> None:
        memory = self.memories[number]
        assert isinstance(memory, Memory)
        missing = whole[1] * whole[3]
        for rect, fragment in memory.fragments.items():
            missing -= (rect[1] - rect[0]) * (rect[3] - rect[2])
            wrong = next((w for rows, w in wanted if rows[0] < rect[1] and rect[0] < rows[1] and w != fragment.content), None)
            if wrong is not None:
                has, right = self._describe(fragment.content, rect), self._describe(wrong, rect)
                by = self.program.where(*self.nodes[fragment.writer][:4])
                raise ScheduleError(
                    f"{by}: it leaves {self.program.describe((number, rect))} with {has}; the result there is {right}"
                )
        if missing:
            name, rank = self.program.describe((number, whole)), self.program.memories[number][1]
            raise ScheduleError(f"rank {rank}: {missing} {self.UNIT} of {name} are never written")

    def _describe(self, content: Content | None, rect: Rect) -> str:
        return describe(content, rect)

    def _result(self, action: Action, cells: list[Cells], old: Cells | None) -> Cells:
        return _result(action, cells, old)

    def explain(self, conflict: Conflict) -> ScheduleError:
        """Return the error that describes a conflict."""
        at = self.nodes[conflict.node]
        where, region = self.program.where(*at[:4]), self.program.describe(conflict.access)
        if conflict.other is None:
            return ScheduleError(f"{where}: it reads {region}, but no write of all of it is ordered before that")
        other = self.nodes[conflict.other]
        they = self.program.where(*other[:4])
        if conflict.aliased:
            late, early = f"where {they} may have written the result", f"which {they} reads, and nothing orders the two"
            what = f"it touches {region}, {late}" if conflict.wrote else f"the result touches {region}, {early}"
            return ScheduleError(f"{where}: {what}, since out may be the memory of a")
        if other[1:3] == CALLER:
            return ScheduleError(f"{where}: it touches {region}, which {they} has between two calls; nothing orders that")
        they += " of the call before" if other[4] < at[4] else ""
        does = "has its result between two calls, and may write" if at[1:3] == CALLER else "it touches"
        verb = "writes" if conflict.wrote else "reads"
        return ScheduleError(f"{where}: {does} {region}, which {they} {verb}; nothing orders the two")


def _expected_columns(problem: ColumnProblem, name: str, rank: int) -> list[tuple[Span1D, Content]]:
    every_k = ((0, problem.k),)
    if problem.sends_columns:
        left = problem.blocks[rank][0]
        sources = range(problem.world_size)
        return [(problem.arrivals(src, rank), ("AB", 0, src * problem.n + left, every_k, 1)) for src in sources]
    first, rows = problem.shards[rank][0], (0, problem.out_rows(rank))
    return [(rows, ("A", first, 0) if name == "gathered" else ("AB", first, rank * problem.n, every_k, 1))]


def _rows_of(action: Action, cells: Cells, low: int, high: int) -> tuple[Rect, Cells]:
    """Return the location and the content of rows [low, high) of a rank's input to a collective."""
    src = action.reads[0][1]
    own = (src[0] + low, src[0] + high, src[2], src[3])
    return own, [(common, content) for rect, content in cells if (common := overlap(rect, own))]


def _result(action: Action, cells: list[Cells], old: Cells | None) -> Cells:
    """Return the cells that an action leaves in the rectangle that it writes."""
    assert action.write is not None
    out, rects = action.write[1], [rect for _, rect in (*action.reads, *action.adds)]
    if action.do is Do.COPY:
        return moved(cells[0], rects[0], out)
    if action.do is Do.ADD:
        return divided(total([moved(c, rect, out) for c, rect in zip(cells, rects, strict=True)]), action.divide_by)
    if action.do is Do.NORM:
        return normalised((rects[0], cells[0]), (rects[1], cells[1]), out)
    if action.do is Do.GEMM_OF_TRANSPOSE:
        return product(transposed((rects[0], cells[0])), (rects[1], cells[1]), out) if action.reads else [(out, ZERO)]
    fresh = product(_merge_slices(action, cells), (rects[1], cells[1]), out) if action.reads else [(out, ZERO)]
    if action.adds:
        first = len(action.reads)
        more = [moved(c, rect, out) for c, rect in zip(cells[first:], rects[first:], strict=True)]
        return divided(total([fresh, *more]), action.divide_by)
    return added(old, fresh) if old is not None else fresh


def _merge_slices(action: Action, cells: list[Cells]) -> tuple[Rect, Cells]:
    """Return everything that a product reads of `a`: its slices, which are adjacent, as one."""
    rect = action.reads[0][1]
    if not action.slices:
        return rect, cells[0]
    rect = (*rect[:3], action.slices[-1][1][3])
    found = [cell for part in (cells[0], *cells[2:]) for cell in part]
    content = found[0][1]
    return rect, [(rect, content)] if all(other == content for _, other in found) else found
