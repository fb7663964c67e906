"""Products of FP8 operands by torch: out = (a * scales of a) @ (b * scales of b).

On GPUs these are torch's scaled products, which are cuBLAS's and CUTLASS's. Where torch has none for the dtypes, the elements
are multiplied in float32 first, and then scaled; blockwise they are dequantised. On CPUs the operands are dequantised, and
multiplied in float32.
"""

from __future__ import annotations

from typing import Literal

import torch

from weft.compat.scaled_mm import scaled_mm, takes, unscaled_mm
from weft.core.problem import SCALE_BLOCK, Scaling
from weft.runtime.launches import Scales


def dequantised(matrix: torch.Tensor, scales: torch.Tensor, scaling: Scaling, operand: Literal["a", "b"]) -> torch.Tensor:
    """The elements of an operand times their scales, in float32. scales: as Scaling has them."""
    if scaling.recipe == "blockwise":
        if operand == "b":
            scales = scales.repeat_interleave(SCALE_BLOCK, 0)[: matrix.shape[0]]
        scales = scales.repeat_interleave(SCALE_BLOCK, 1)[:, : matrix.shape[1]]
    return matrix.float() * scales


def multiply_scaled(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scales: Scales) -> None:
    """out = a @ b, of FP8 operands. On a GPU on torch's current stream."""
    scaling = scales.scaling
    if a.is_cuda and takes(a, b, out, scaling.recipe):
        scaled_mm(a, b, scales.a, scales.b, out, recipe=scaling.recipe, use_fast_accum=scaling.use_fast_accum)
    elif a.is_cuda and scaling.recipe != "blockwise":
        product = unscaled_mm(a, b, use_fast_accum=scaling.use_fast_accum)
        out.copy_(product.mul_(scales.a).mul_(scales.b))
    else:
        out.copy_(dequantised(a, scales.a, scaling, "a") @ dequantised(b, scales.b, scaling, "b"))
