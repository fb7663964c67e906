"""HostRows exchanges the counts of calls with splits on CPUs through shared memory, and computes the places of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.comm.symmetric_heap import HostAllocation, HostHeap
from weft.core.experts import refused_index
from weft.core.problem import RaggedProblem
from weft.core.schedule import Segment, SegmentCopy, SegmentProduct
from weft.runtime.arithmetic import multiply_gated
from weft.runtime.bindings import Bindings, FactorScales, scales_name
from weft.runtime.launches import Matmul

Name = tuple[int, int, int]
"""The name of a segment: (src, dst, expert)."""


class HostRows:
    """HostRows moves and multiplies the rows of calls with splits whose counts hosts read. To construct it is a collective
    operation.

    Each rank writes its counts into the memory of all others. They have two tables, one for even calls and one for odd calls.

    refused: the error that all ranks report for the counts of the last call, or "" if they fit.
    """

    def __init__(self, problem: RaggedProblem, rank: int, heap: HostHeap) -> None:
        self._problem, self._rank, self._heap = problem, rank, heap
        self._width = problem.experts * problem.world_size + 1
        """The width of a table's row: the counts of a rank's segments, and the number of rows of its a."""
        self._memory: HostAllocation = heap.allocate(8 * 2 * problem.world_size * self._width)
        self._calls = 0
        self._rows: RowsOfCall | None = None
        self.refused = ""

    def _table(self, rank: int) -> torch.Tensor:
        """Return a rank's table of counts for this call. It has one row for each rank."""
        size = self._problem.world_size
        whole = self._memory.view(rank, 0, 2 * size, self._width, torch.int64)
        return whole[self._calls % 2 * size :][:size]

    def share(self, bindings: Bindings, ranks: Sequence[int]) -> None:
        """Write this rank's counts into the tables of these ranks."""
        (splits,), ((a, _),) = bindings.loose["splits"], bindings.tensors["a", self._rank]
        mine = torch.cat([splits.long().flatten(), torch.tensor([a.shape[0]])])
        for rank in ranks:
            self._table(rank)[self._rank].copy_(mine)

    def lay_out(self, bindings: Bindings) -> None:
        """Compute the places of all segments of the call, after every rank has written its counts."""
        found = self._table(self._rank).tolist()
        self._calls += 1
        self._rows = RowsOfCall(self._problem, self._rank, [row[:-1] for row in found], [row[-1] for row in found], bindings)
        self._rows.finish()
        self.refused = self._rows.wrong

    def run(self, part: SegmentCopy | SegmentProduct, bindings: Bindings, matmul: Matmul) -> None:
        """Copy a segment, or multiply it."""
        assert self._rows is not None, "the checker lets no step come before the counts"
        if isinstance(part, SegmentCopy):
            for there, here in zip(self._rows.moved(part.dst), self._rows.moved(part.src), strict=True):
                there.copy_(here)
            return
        (b,), expert = bindings.loose["b"], part.a.expert
        (out,), (rows, *of_rows), scales = self._rows.moved(part.out), self._rows.moved(part.a), None
        if self._problem.scaling is not None:
            scales = FactorScales(of_rows[0], bindings.loose[scales_name("b")][0][expert], self._problem.scaling)
        if self._problem.gated:
            multiply_gated(rows, b[expert], out, matmul, scales)
        else:
            matmul(rows, b[expert], out, accumulate=False, scales=scales)

    def close(self) -> None:
        self._heap.free(self._memory)


class RowsOfCall:
    """RowsOfCall finds the rows of each segment of one call.

    counts: the counts of each rank's segments, in the order in which the rank sends them.
    rows: the number of rows of each rank's a.
    wrong: the error that all ranks report for counts that do not fit, or "" if they fit.
    """

    def __init__(
        self, problem: RaggedProblem, rank: int, counts: Sequence[Sequence[int]], rows: Sequence[int], bindings: Bindings
    ) -> None:
        self._problem, self._rank, self._bindings = problem, rank, bindings
        asked = dict[Name, int]()
        for sender, row in enumerate(counts):
            asked |= dict(zip(problem.sent_order(sender), row, strict=True))
        counted = {name: max(count, 0) for name, count in asked.items()}
        self._places = problem.places(counted, rows)
        self.wrong = _wrong(problem, counts, rows, self._arriving(counted, rows))

    def _arriving(self, counted: dict[Name, int], rows: Sequence[int]) -> list[int]:
        """Return the number of rows sent to each rank, including rows for which it has no room."""
        unbounded = self._problem.places(counted, rows, room=sum(counted.values()))
        return [sum(unbounded[name][2] for name in self._problem.received_order(rank)) for rank in range(len(rows))]

    def moved(self, segment: Segment) -> list[torch.Tensor]:
        """Return the rows of a segment and, for FP8, their scales."""
        sent_at, landed_at, rows = self._places[segment.name]
        first = sent_at if segment.buffer in ("a", "product") else landed_at
        return [whole[first : first + rows] for whole in self._whole(segment.buffer, segment.rank)]

    def _whole(self, buffer: str, rank: int) -> list[torch.Tensor]:
        """Return a whole buffer and, for FP8, its scales."""
        ((matrix, _),) = self._bindings.tensors[buffer, rank]
        return [matrix, *self._bindings.scales.get((buffer, rank), ())]

    def finish(self) -> None:
        """Write the counts of the rows that arrive at this rank, and zeros into the unused rows of its results."""
        rows = [self._places[name][2] for name in self._problem.received_order(self._rank)]
        (counts,) = self._bindings.loose["counts"]
        counts.copy_(torch.tensor(rows, dtype=torch.int32).view_as(counts))
        for buffer in ("out", "received"):
            if (buffer, self._rank) in self._bindings.tensors:
                for whole in self._whole(buffer, self._rank):
                    whole[sum(rows) :].zero_()


def _wrong(problem: RaggedProblem, counts: Sequence[Sequence[int]], rows: Sequence[int], arriving: Sequence[int]) -> str:
    for rank, (mine, held) in enumerate(zip(counts, rows, strict=True)):
        if min(mine) < 0:
            return below_zero(min(mine), problem, f"on rank {rank}")
        if sum(mine) > held:
            return f"splits add up to {sum(mine)} on rank {rank}, but a has {held} rows; {sum(mine) - held} were not sent"
    for rank, arrive in enumerate(arriving):
        if arrive > problem.m:
            return no_room(problem, arrive, f"at rank {rank}")
    return ""


def below_zero(count: int, problem: RaggedProblem, where: str) -> str:
    """Return the error for a negative number of rows, which may stand for a wrong expert index."""
    index = refused_index(count)
    if index is None:
        return f"splits has {count} {where}; it must be numbers of rows, 0 or more"
    experts = problem.experts * problem.world_size
    return f"top_k_index has {index} {where}; of {experts} experts it must be 0 to {experts - 1}, or -1 for none"


def no_room(problem: RaggedProblem, arrived: int, where: str) -> str:
    """Return the error for rows for which a rank has no room."""
    room = f"{problem.limit} leaves room for {problem.m} rows" if problem.limit else f"max_rows is {problem.m}"
    return f"{room}, but {arrived} rows arrived {where}; {arrived - problem.m} of them were dropped"
