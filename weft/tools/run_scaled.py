"""FP8 operands of one layer that `weft run` runs: drawn, quantised, and what they stand for."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from weft.core.problem import LEAST_MAGNITUDE, SCALE_BLOCK, Scaling
from weft.runtime.scaled_products import dequantised


class ScaledInputs(NamedTuple):
    """FP8 operands, and their scales as weft.core.problem.Scaling has them."""

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, scaling: Scaling) -> ScaledInputs:
        """Matrices of float32, quantised."""
        (rows, scale_a), (columns, scale_b) = _quantised(a, scaling, "a"), _quantised(b.t().contiguous(), scaling, "b")
        return cls(rows, columns.t(), scale_a, scale_b.t())

    def dequantised(self, scaling: Scaling) -> tuple[torch.Tensor, torch.Tensor]:
        """a and b in float32."""
        return dequantised(self.a, self.scale_a, scaling, "a"), dequantised(self.b, self.scale_b, scaling, "b")


def _quantised(matrix: torch.Tensor, scaling: Scaling, operand: Literal["a", "b"]) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix with K as its last dimension as FP8, and its scales: the largest magnitude of what shares one, over the largest
    of FP8."""
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
