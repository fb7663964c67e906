"""FP8 operands for tests: quantised as torchao and DeepSeek do, and the float64 product of what they stand for."""

from __future__ import annotations

from typing import Literal

import torch

from weft.core.problem import Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Operand = Literal["a", "b"]


def quantise(
    matrix: torch.Tensor, recipe: Recipe, operand: Operand, dtype: torch.dtype = E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements, of b column by column, and their scales as weft takes them."""
    rows = matrix if operand == "a" else matrix.t().contiguous()
    if recipe == "tensorwise":
        amax = rows.abs().amax().reshape(1, 1)
    elif recipe == "rowwise":
        amax = rows.abs().amax(-1, keepdim=True)
    else:
        high = 1 if operand == "a" else 128
        blocks = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % 128, *((0, -rows.shape[0] % high) if high > 1 else ())))
        amax = blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] // high, high, blocks.shape[-1] // 128, 128).abs()
        amax = amax.amax(-1).amax(-2)
    scales = (amax.clamp(min=1e-6) / torch.finfo(dtype).max).float()
    elements = (rows / spread(scales, rows.shape, recipe, operand)).clamp(*_range(dtype)).to(dtype)
    if operand == "a":
        return elements, scales.reshape(-1) if recipe == "tensorwise" else scales
    return elements.t(), scales.reshape(-1) if recipe == "tensorwise" else scales.t()


def spread(scales: torch.Tensor, shape: torch.Size, recipe: Recipe, operand: Operand) -> torch.Tensor:
    """The scale of each element of a matrix whose last dimension is K."""
    if recipe != "blockwise":
        return scales
    if operand == "b":
        scales = scales.repeat_interleave(128, -2)[..., : shape[-2], :]
    return scales.repeat_interleave(128, -1)[..., : shape[-1]]


def dequantised(elements: torch.Tensor, scales: torch.Tensor, recipe: Recipe, operand: Operand) -> torch.Tensor:
    """What the elements stand for, in float64."""
    if operand == "b":
        found = (
            elements.t().double()
            * spread(scales.t() if scales.dim() == 2 else scales, elements.t().shape, recipe, "b").double()
        )
        return found.t()
    return elements.double() * spread(scales, elements.shape, recipe, "a").double()


def _range(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.finfo(dtype)
    return info.min, info.max
