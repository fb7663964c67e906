"""`weft run` uses this module for FP8 layers: it quantises the operands, and dequantises them for the reference."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from weft.core.problem import LEAST_MAGNITUDE, SCALE_BLOCK, Scaling
from weft.runtime.products import dequantised


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
