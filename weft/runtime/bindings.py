"""The tensors of one call, by the names that a Schedule gives them, and the place of a step, for error messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from weft.core.problem import Span1D
from weft.core.schedule import Region, Step

Columns = Sequence[tuple[torch.Tensor, Span1D]]
"""Matrices side by side: each with the columns of the buffer that it holds."""


@dataclass(frozen=True, slots=True)
class Where:
    """A step of this rank, for messages and spans."""

    rank: int
    lane: str
    position: int
    step: Step

    def __str__(self) -> str:
        return f"rank {self.rank}, lane {self.lane}, step {self.position} ({self.step})"


@dataclass(slots=True)
class Bindings:
    """The tensors of one call: by (buffer, rank), the matrices side by side that make up the buffer.

    loose: inputs that are no buffer of the schedule, by name; a lookup's tables and indices.
    """

    tensors: dict[tuple[str, int], Columns] = field(default_factory=dict)
    loose: dict[str, Sequence[torch.Tensor]] = field(default_factory=dict)

    def bind(self, buffer: str, rank: int, *matrices: torch.Tensor) -> None:
        columns, at = [], 0
        for matrix in matrices:
            columns.append((matrix, (at, at + matrix.shape[1])))
            at += matrix.shape[1]
        self.tensors[buffer, rank] = columns

    def view(self, region: Region) -> torch.Tensor:
        """The region as one strided matrix; it must lie within one of the matrices side by side."""
        columns = self.tensors[region.buffer, region.rank]
        if len(columns) == 1:
            whole, (top, bottom), (low, high) = columns[0][0], region.rows, region.cols
            # Taking a view of all of it would take about 5 us.
            return whole if top == low == 0 and whole.shape == (bottom, high) else whole[top:bottom, low:high]
        ((view, _),) = self.pieces(region)
        return view

    def pieces(self, region: Region) -> Columns:
        """The region cut at the borders of its matrices: (view, columns relative to the region)."""
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
