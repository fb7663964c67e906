"""Bindings maps the buffers of a Schedule to the tensors of one call. Where names the place of a step in error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weft.core.problem import Scaling, Span1D
from weft.core.schedule import Buffer, Region, SendReceive, Step

Messages = Sequence[tuple[torch.Tensor, int]]
"""Contiguous tensors, each with the rank that sends or receives it."""
Columns = Sequence[tuple[torch.Tensor, Span1D]]
"""Matrices that together make up a buffer, each with the columns of the buffer that it holds."""


def scales_name(buffer: str) -> str:
    """Return the name of the scales of a buffer of FP8 elements among the tensors of a call.

    >>> scales_name("a")
    'a scales'
    """
    return f"{buffer} scales"


@dataclass(frozen=True, slots=True)
class Where:
    """Where identifies a step of a rank in messages and spans."""

    rank: int
    lane: str
    position: int
    step: Step

    def __str__(self) -> str:
        return f"rank {self.rank}, lane {self.lane}, step {self.position} ({self.step})"


@dataclass(slots=True)
class Bindings:
    """Bindings holds the tensors of one call.

    tensors: the matrices that make up a buffer, by (buffer, rank).
    stacked: those that make up a buffer one below the other. Only the b of several products do
        (weft.core.problem.Problem.products).
    loose: inputs outside the schedule's buffers, by name, such as a lookup's tables and indices.
    scales: the scales of each matrix of a buffer of FP8 elements.
    scaling: says which elements share a scale.
    buffers: the schedule's buffers, by name.
    """

    tensors: dict[tuple[str, int], Columns] = field(default_factory=dict)
    stacked: dict[tuple[str, int], Sequence[torch.Tensor]] = field(default_factory=dict)
    loose: dict[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    scales: dict[tuple[str, int], Sequence[torch.Tensor]] = field(default_factory=dict)
    scaling: Scaling | None = None
    buffers: Mapping[str, Buffer] = field(default_factory=dict)

    def bind(self, buffer: str, rank: int, *matrices: torch.Tensor) -> None:
        columns, at = [], 0
        for matrix in matrices:
            columns.append((matrix, (at, at + matrix.shape[1])))
            at += matrix.shape[1]
        self.tensors[buffer, rank] = columns

    def products(self, a: Sequence[Region], b: Region) -> list[tuple[Span1D, list[list[torch.Tensor]], Sequence[torch.Tensor]]]:
        """Return what is multiplied where a GEMM multiplies rows of a by b: for each matrix of results its columns, the factors
        a as a list of runs of rows each, and the factors b. The products of each a with its b are added up.

        a: runs of rows, all columns each.
        """
        # Loops, because a comprehension would be one more frame in each call on CPUs.
        rows: list[list[torch.Tensor]] = []
        for run in a:
            for number, (view, _) in enumerate(self.pieces(run)):
                if number == len(rows):
                    rows.append([])
                rows[number].append(view)
        found: list[tuple[Span1D, list[list[torch.Tensor]], Sequence[torch.Tensor]]] = []
        if (b.buffer, b.rank) in self.stacked:
            cols, bs = self._stacked_factors(b)
            found.append((cols, rows, bs))
            return found
        for matrix, cols in self.pieces(b):
            found.append((cols, rows, (matrix,)))
        return found

    def second_factors(self, b: Region) -> Sequence[torch.Tensor]:
        """Return the factors b, whether their products are added up or have results of their own."""
        if (b.buffer, b.rank) in self.stacked:
            return self._stacked_factors(b)[1]
        return [matrix for matrix, _ in self.pieces(b)]

    def _stacked_factors(self, b: Region) -> tuple[Span1D, Sequence[torch.Tensor]]:
        low, high = b.cols
        matrices = self.stacked[b.buffer, b.rank]
        bs = [one if one.shape[1] == high and not low else one[:, low:high] for one in matrices]
        # The a of a b without rows has no columns, and is no piece.
        return (0, high - low), [one for one in bs if one.shape[0]] or bs[:1]

    def scale_views(self, region: Region) -> list[torch.Tensor]:
        """Return the scales of each of the region's `pieces`. The list is empty if the region is not FP8."""
        matrices = self.scales.get((region.buffer, region.rank))
        if matrices is None:
            return []
        columns, found, (low, high) = self.tensors[region.buffer, region.rank], [], region.cols
        for scales, (_, (first, last)) in zip(matrices, columns, strict=True):
            cols = max(low, first) - first, min(high, last) - first
            if cols[1] > cols[0] or len(matrices) == 1:
                found.append(self._scales_of(scales, region, cols))
        return found

    def _scales_of(self, scales: torch.Tensor, region: Region, cols: Span1D) -> torch.Tensor:
        """Return the scales of these columns of one matrix."""
        rows, blocks = self._scale_places(region, cols)
        return scales[slice(*rows), slice(*blocks)]

    def _scale_places(self, region: Region, cols: Span1D) -> tuple[Span1D, Span1D]:
        operand = self.buffers[region.buffer].operand
        assert operand, f"{region} is not of FP8"
        assert self.scaling is not None, "the problem has no scaling"
        return self.scaling.scales_of(operand, region.rows, cols)

    def scale_region(self, region: Region) -> Region:
        """Return where the scales of a region are in the matrix of its buffer's scales."""
        return Region(region.buffer, region.rank, *self._scale_places(region, region.cols))

    def scales_at(self, region: Region) -> torch.Tensor:
        """Return the scales in a region that `scale_region` returned."""
        (matrix,) = self.scales[region.buffer, region.rank]
        return matrix[slice(*region.rows), slice(*region.cols)]

    def messages(self, step: SendReceive) -> tuple[Messages, Messages]:
        """Return the tensors that a step sends and those that it receives, each with its peer."""
        sends = [(one, send.to) for send in step.sends for one in self.moved(send.src)]
        return sends, [(one, receive.source) for receive in step.receives for one in self.moved(receive.dst)]

    def moved(self, region: Region) -> list[torch.Tensor]:
        """Return the tensors that a collective or a message of a region moves. For FP8 they are bytes and scales."""
        scales, view = self.scale_views(region), self.view(region)
        return [view.view(torch.uint8), *scales] if scales else [view]

    def view(self, region: Region) -> torch.Tensor:
        """Return the region as one strided matrix. It must be within one of the matrices of its buffer."""
        columns = self.tensors[region.buffer, region.rank]
        if len(columns) == 1:
            whole, (top, bottom), (low, high) = columns[0][0], region.rows, region.cols
            # A view of the whole matrix would take about 5 us.
            return whole if top == low == 0 and whole.shape == (bottom, high) else whole[top:bottom, low:high]
        ((view, _),) = self.pieces(region)
        return view

    def pieces(self, region: Region) -> Columns:
        """Cut the region at the borders of its matrices. Return (view, columns relative to the region) of each piece."""
        rows, (low, high) = slice(*region.rows), region.cols
        columns = self.tensors[region.buffer, region.rank]
        if len(columns) == 1:
            if columns[0][0].shape == (rows.stop, high) and rows.start == low == 0:
                return columns
            return [(columns[0][0][rows, low:high], (0, high - low))]
        if low == high:
            return [(columns[0][0][rows, :0], (0, 0))]
        cut = [(t, first, max(low, first), min(high, last)) for t, (first, last) in columns]
        return [(t[rows, lo - first : hi - first], (lo - low, hi - low)) for t, first, lo, hi in cut if hi > lo]
