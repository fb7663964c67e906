"""Calls with splits, whose row counts only devices know: one call, and where rows lie for given counts.

    RaggedCall      one call, before ranks have agreed: a, b by expert, the counts of its rows, the most rows that may arrive
    RowCounts       on CPUs, the counts of all ranks, in memory that all of a host share
    RowsOfCall      on CPUs, the rows of each segment in a call, as views of the call's tensors

On GPUs, and under Triton's interpreter, the kernels read the counts (weft.runtime.ragged_kernels). What does not fit is left
out on all devices alike, and reported: by the call itself where hosts know the counts of all ranks, else by the next call that
finds it noted, or by `weft.synchronize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weft.comm.symmetric_heap import HostAllocation, HostHeap
from weft.core.experts import refused_index
from weft.core.problem import DType, Problem, RaggedProblem
from weft.core.schedule import Segment
from weft.core.version import __version__
from weft.runtime.bindings import Bindings
from weft.runtime.bound import Inputs
from weft.runtime.calls import Call

_COLUMNS = 8
Name = tuple[int, int, int]
"""A segment: src, dst, expert."""


@dataclass(kw_only=True, slots=True)
class RaggedCall(Call):
    """a: [rows, K]. b: [experts, K, N]. splits: by (expert, dst_rank) for a combine, (dst_rank, expert) for a dispatch. gated:
    a dispatch gives silu(left half) * right half of its product, N / 2 columns. a_rows: the most rows that the a of any rank
    has, on all ranks the same; None if that is not known. limit: as in RaggedProblem."""

    schedule: str = "auto"
    a: torch.Tensor
    b: torch.Tensor
    splits: torch.Tensor
    max_rows: int
    return_received: bool = False
    gated: bool = False
    a_rows: int | None = None
    limit: str = ""

    @property
    def inputs(self) -> Inputs:
        return {"a": (self.a,), "b": (self.b,), "splits": (self.splits,)}

    @property
    def device(self) -> torch.device:
        return self.a.device

    @property
    def tried(self) -> bool:
        return False

    @property
    def share(self) -> int:
        """The rows of a."""
        return int(self.a.shape[0])

    @property
    def key(self) -> tuple[object, ...]:
        """Without the rows of a, which change from call to call, and on each rank for itself."""
        sizes = (self.max_rows, self._products, self.limit, self.b.shape)
        return (self.op, self.gated, self.return_received, sizes, self.a.dtype, self.a.get_device(), self.schedule)

    def describe(self) -> str:
        experts, k, n = self.b.shape
        name = "all_to_all_matmul" if self._dispatches else "matmul_all_to_all"
        lines = (
            f"op: {name} with splits{', gated' * self.gated}",
            f"settings: {self.limit or 'none'}",
            f"{'room for rows' if self.limit else 'max_rows'}: {self.max_rows}",
            f"room for products: {self._products}",
            f"experts: {experts}",
            f"K: {k}",
            f"N: {n}",
            f"{'gradient of experts' if self.limit else 'return_received'}: {self.return_received}",
            f"dtype: {self.a.dtype}",
            f"device: {self.a.device.type}",
            f"schedule: {self.schedule}",
            f"weft: {__version__}",
        )
        return "\n".join(lines)

    def sums_nothing(self, shares: tuple[int, ...]) -> bool:
        return not self.b.shape[1]

    def filled(self, world_size: int) -> RaggedCall:
        """With columns of zeros, as many as the kernels take at once."""
        experts, _, n = self.b.shape
        a, b = self.a.new_zeros(self.a.shape[0], _COLUMNS), self.b.new_zeros(experts, _COLUMNS, n)
        return replace(self, a=a, b=b)

    def problem(self, shares: tuple[int, ...]) -> Problem:
        """Where a_rows is not known, products of a combine have room for an eighth more rows than the longest a has now, or for
        max_rows. Of a dispatch no more rows can arrive than max_rows at each rank, however many a has."""
        experts, k, n = self.b.shape
        capacity = self._products or _rounded(max(9 * max(shares) // 8, self.max_rows))
        dtype: DType = str(self.a.dtype).removeprefix("torch.")  # type: ignore[assignment]
        return RaggedProblem(
            op=self.op,
            m=self.max_rows,
            n=n // 2 if self.gated else n,
            k=k,
            world_size=len(shares),
            dtype=dtype,
            capacity=len(shares) * self.max_rows if self._dispatches else capacity,
            experts=experts,
            gated=self.gated,
            return_received=self.return_received,
            limit=self.limit,
        )

    @property
    def _products(self) -> int | None:
        """The rows for whose products a combine has room, in memory that all ranks share; None where the first call says it."""
        return None if self._dispatches or self.a_rows is None else _rounded(max(self.a_rows, self.max_rows))

    @property
    def _dispatches(self) -> bool:
        return self.op == "ragged_all_to_all_matmul"

    def refusal(self, shares: Sequence[int]) -> str:
        most = max(shares)
        if self.a_rows is None or most <= self.a_rows:
            return ""
        where = f"rank {shares.index(most)}" if len(shares) > 1 else "this rank"
        return (
            f"{self.limit} leaves room for {self.a_rows} rows (tokens times top k) of a rank, but {where} has {most}: "
            "raise max_tokens, or leave it out"
        )


def _rounded(rows: int) -> int:
    """At least so many, and at most an eighth more: few different numbers, since each is a program with memory of its own.

    >>> [_rounded(rows) for rows in (1, 16, 17, 1000)]
    [1, 16, 18, 1024]
    """
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


class RowCounts:
    """The row counts of all ranks, which each rank writes at all others: two places for each rank, that calls take in turn.
    Collective."""

    def __init__(self, problem: RaggedProblem, rank: int, heap: HostHeap) -> None:
        self._problem, self._rank, self._heap = problem, rank, heap
        self._width = problem.experts * problem.world_size + 1
        """The counts of a rank's segments, and how many rows its a has."""
        self._memory: HostAllocation = heap.allocate(8 * 2 * problem.world_size * self._width)

    def _table(self, rank: int, epoch: int) -> torch.Tensor:
        """The counts that a rank has for a call: a row for each rank."""
        size = self._problem.world_size
        whole = self._memory.view(rank, 0, 2 * size, self._width, torch.int64)
        return whole[epoch % 2 * size :][:size]

    def write(self, rank: int, epoch: int, splits: torch.Tensor, rows: int) -> None:
        """Write this rank's counts at a rank."""
        mine = torch.cat([splits.long().flatten(), torch.tensor([rows])])
        self._table(rank, epoch)[self._rank].copy_(mine)

    def read(self, epoch: int, bindings: Bindings) -> RowsOfCall:
        """Where all segments of a call lie. Every rank has written."""
        found = self._table(self._rank, epoch).tolist()
        return RowsOfCall(self._problem, self._rank, [row[:-1] for row in found], [row[-1] for row in found], bindings)

    def close(self) -> None:
        self._heap.free(self._memory)


class RowsOfCall:
    """The rows of each segment in one call, for known counts. counts: by rank, those of its segments in the order in which it
    sends them. rows: by rank, how many its a has. wrong: what all ranks say of counts that do not fit; nothing if all do."""

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
        """How many rows come to each rank, those included for which it has no room."""
        unbounded = self._problem.places(counted, rows, room=sum(counted.values()))
        return [sum(unbounded[name][2] for name in self._problem.received_order(rank)) for rank in range(len(rows))]

    def of(self, segment: Segment) -> torch.Tensor:
        """The rows of a segment in a buffer."""
        sent_at, landed_at, rows = self._places[segment.name]
        first = sent_at if segment.buffer in ("a", "product") else landed_at
        ((whole, _),) = self._bindings.tensors[segment.buffer, segment.rank]
        return whole[first : first + rows]

    def finish(self) -> None:
        """Write the counts of what arrives here, and zeros in the rows of the results that no segment has."""
        rows = [self._places[name][2] for name in self._problem.received_order(self._rank)]
        (counts,) = self._bindings.loose["counts"]
        counts.copy_(torch.tensor(rows, dtype=torch.int32).view_as(counts))
        for buffer in ("out", "received"):
            if (buffer, self._rank) in self._bindings.tensors:
                ((whole, _),) = self._bindings.tensors[buffer, self._rank]
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
    """What is wrong with a number of rows that is less than none."""
    index = refused_index(count)
    if index is None:
        return f"splits has {count} {where}; it must be numbers of rows, 0 or more"
    experts = problem.experts * problem.world_size
    return f"top_k_index has {index} {where}; of {experts} experts it must be 0 to {experts - 1}, or -1 for none"


def no_room(problem: RaggedProblem, arrived: int, where: str) -> str:
    """What is said of rows that a rank had no room for."""
    room = f"{problem.limit} leaves room for {problem.m} rows" if problem.limit else f"max_rows is {problem.m}"
    return f"{room}, but {arrived} rows arrived {where}; {arrived - problem.m} of them were dropped"
