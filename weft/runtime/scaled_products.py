"""Products of FP8 operands: out = (a * scales of a) @ (b * scales of b), of one lane of one program.

On GPUs these are torch's scaled products, which are cuBLAS's and CUTLASS's. Where torch has none for the dtypes or the sizes,
weft's GEMM kernel multiplies. On CPUs, and on GPUs without matrix units for FP8, the operands are dequantised and multiplied in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Literal

import torch

from weft.compat.device import capabilities
from weft.compat.scaled_mm import scaled_mm, takes
from weft.core.machine import Machine
from weft.core.problem import LEAST_MAGNITUDE, SCALE_BLOCK, Scaling
from weft.runtime.launches import FactorScales
from weft.runtime.nearest import nearest_profile

if TYPE_CHECKING:
    from weft.kernels.gemm import PlainGemm


def dequantised(matrix: torch.Tensor, scales: torch.Tensor, scaling: Scaling, operand: Literal["a", "b"]) -> torch.Tensor:
    """The elements of an operand times their scales, in float32. scales: as Scaling has them."""
    if scaling.recipe == "blockwise":
        if operand == "b":
            scales = scales.repeat_interleave(SCALE_BLOCK, 0)[: matrix.shape[0]]
        scales = scales.repeat_interleave(SCALE_BLOCK, 1)[:, : matrix.shape[1]]
    return matrix.float() * scales


def quantise(matrix: torch.Tensor, elements: torch.Tensor, scales: torch.Tensor, scaling: Scaling) -> None:
    """Write a matrix as FP8 elements and their scales, rowwise or by blocks of 128 columns: a scale is the largest magnitude
    that it is for, at least LEAST_MAGNITUDE, over the largest of the elements' dtype."""
    rows, most = matrix.float(), torch.finfo(elements.dtype).max
    blocks = rows.view(matrix.shape[0], scales.shape[1], matrix.shape[1] // scales.shape[1])
    magnitudes = blocks.abs().amax(-1).clamp(min=LEAST_MAGNITUDE)
    # By a tensor, because torch's division by a number multiplies by its inverse on GPUs.
    torch.div(magnitudes, torch.full_like(magnitudes, most), out=scales)
    elements.copy_((blocks / scales[..., None]).clamp(-most, most).view_as(rows))


def multiply_dequantised(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scales: FactorScales) -> None:
    """out = a @ b in float32, on any device."""
    out.copy_(dequantised(a, scales.a, scales.scaling, "a") @ dequantised(b, scales.b, scales.scaling, "b"))


@cache
def products_on(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, FactorScales], None]:
    """What multiplies FP8 operands outside of a program: out = a @ b, of (a, b, out, scales)."""
    return ScaledProducts(device).multiply if device.type == "cuda" else multiply_dequantised


class ScaledProducts:
    """Those of a GPU. machine: the profile that tile shapes are chosen by, by default the nearest."""

    def __init__(self, device: torch.device, machine: Machine | None = None) -> None:
        self._device, self._machine = device, machine
        self._kernels: dict[tuple[int, int, int, Scaling], PlainGemm | None] = {}
        """By M, N, K and scaling. Graphs keep addresses of their tables: they live as long as the program."""

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scales: FactorScales) -> None:
        """out = a @ b on torch's current stream."""
        scaling = scales.scaling
        if takes(a, b, out, scaling.recipe):
            scaled_mm(a, b, scales.a, scales.b, out, recipe=scaling.recipe, use_fast_accum=scaling.use_fast_accum)
            return
        kernel = self._kernel(a, b, scaling)
        if kernel is None:
            multiply_dequantised(a, b, out, scales)
        else:
            kernel.multiply(a, b, out, scales.a, scales.b, scaling)

    def _kernel(self, a: torch.Tensor, b: torch.Tensor, scaling: Scaling) -> PlainGemm | None:
        """None where the GPU has no matrix units for FP8, or TMA cannot load the operands."""
        from weft.kernels.gemm import PlainGemm, fits  # needs Triton
        from weft.kernels.shapes import shapes_for

        if not fits(a, b):
            return None
        size = a.shape[0], b.shape[1], a.shape[1]
        key = (*size, scaling)
        if key not in self._kernels:
            found = shapes_for(capabilities(self._device), scaling)
            machine = self._machine or nearest_profile(self._device)
            self._kernels[key] = PlainGemm(size, self._device, machine, scaling) if found else None
        return self._kernels[key]
