"""What `weft run` passes to operators: tables and bags of embedding layers, quantised operands, and references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

from weft.core.problem import LEAST_MAGNITUDE, SCALE_BLOCK, LookupProblem, Scaling
from weft.core.span import Span
from weft.runtime.calls import LookupCall
from weft.runtime.products import dequantised

ROWS = 10_000
"""The number of rows of a table. A CPU's caches hold only a small part of such a table."""


@dataclass(frozen=True, kw_only=True)
class LookupInputs:
    """LookupInputs has one rank's tables and bags. A bag has from 0 to twice the problem's K indices."""

    problem: LookupProblem
    tables: list[torch.Tensor]
    indices: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def draw(cls, problem: LookupProblem, rank: int, seed: int, on: torch.device) -> LookupInputs:
        generator = torch.Generator(device=on).manual_seed((seed * 1009 + rank) % 2**62)
        dtype = getattr(torch, problem.dtype)
        tables = [torch.randn(ROWS, dim, generator=generator, device=on).to(dtype) for dim in problem.dims[rank]]
        bags = len(tables) * problem.m
        lengths = torch.randint(0, 2 * problem.k + 1, (bags,), generator=generator, device=on)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        indices = torch.randint(0, ROWS, (int(offsets[-1]),), generator=generator, device=on)
        return cls(problem=problem, tables=tables, indices=indices, offsets=offsets)

    @property
    def device(self) -> torch.device:
        return self.indices.device

    def call(self, spec: str, spans: list[Span] | None) -> LookupCall:
        problem = self.problem
        return LookupCall(
            op="embedding_bag_all_to_all",
            schedule=spec,
            spans=spans,
            tables=self.tables,
            indices=self.indices,
            offsets=self.offsets,
            weights=None,
            batch=problem.m,
            dims=problem.dims,
            mode=problem.mode,
            dtype=getattr(torch, problem.dtype),
            pooling=problem.k,
        )

    def error(self, out: torch.Tensor, rank: int) -> float:
        """Return the largest difference from torch's lookups in float32, relative to their largest element. Collective."""
        low, high = self.problem.shards[rank]
        worst, largest = 0.0, 0.0
        for owner, (left, right) in enumerate(self.problem.b_shards):
            columns = torch.empty(self.problem.m, right - left, device=self.device)
            if owner == rank:
                columns.copy_(self._pooled())
            dist.broadcast(columns, src=owner)
            wanted, got = columns[low:high], out[:, left:right].float()
            if wanted.numel():
                difference = torch.nan_to_num((got - wanted).abs().max(), nan=float("inf"))
                worst, largest = max(worst, float(difference)), max(largest, float(wanted.abs().max()))
        return worst / largest if largest > 0 else worst

    def _pooled(self) -> torch.Tensor:
        """Return the pooled rows of the whole batch, with the columns of all tables side by side."""
        found = [torch.empty(self.problem.m, 0, device=self.device)]
        for at, table in enumerate(self.tables):
            offsets = self.offsets[at * self.problem.m : (at + 1) * self.problem.m + 1]
            indices = self.indices[int(offsets[0]) : int(offsets[-1])]
            starts, mode = offsets - offsets[0], self.problem.mode
            found.append(embedding_bag(indices, table.float(), starts, mode=mode, include_last_offset=True))
        return torch.cat(found, 1)


class ScaledInputs(NamedTuple):
    """ScaledInputs has FP8 operands, and their scales in the shapes that weft.core.problem.Scaling requires."""

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, scaling: Scaling) -> ScaledInputs:
        """Quantise matrices of float32."""
        (rows, scale_a), (columns, scale_b) = _quantised(a, scaling, "a"), _quantised(b.t().contiguous(), scaling, "b")
        return cls(rows, columns.t(), scale_a, scale_b.t())

    def dequantised(self, scaling: Scaling) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a and b in float32."""
        return dequantised(self.a, self.scale_a, scaling, "a"), dequantised(self.b, self.scale_b, scaling, "b")


def _quantised(matrix: torch.Tensor, scaling: Scaling, operand: Literal["a", "b"]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix, whose last dimension is K, in FP8 with its scales.

    A scale is the largest magnitude among the elements that share it, divided by the largest FP8 value."""
    rows, k = matrix.shape
    dtype = getattr(torch, scaling.a if operand == "a" else scaling.b)
    high, wide = {
        "tensorwise": (rows, k),
        "rowwise": (1, k),
        "blockwise": (1 if operand == "a" else SCALE_BLOCK, SCALE_BLOCK),
    }[scaling.recipe]
    if not rows:
        height, width = scaling.scales_shape("a", rows, k)
        return matrix.to(dtype), matrix.new_ones(height, width)
    largest = torch.nn.functional.max_pool2d(matrix.abs()[None], (high, wide), ceil_mode=True)[0]
    scales = largest.clamp(min=LEAST_MAGNITUDE) / torch.finfo(dtype).max
    spread = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :k]
    return (matrix / spread).to(dtype), scales
