"""ScaledProducts multiplies FP8 operands, out = (a * scales of a) @ (b * scales of b), for one lane of one program.

On GPUs torch multiplies by cuBLAS or CUTLASS, or weft's GEMM kernel does if torch has no kernel for the dtypes or sizes. On
CPUs, and on GPUs without matrix units for FP8, the operands are dequantised and multiplied in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Literal

import torch

from weft.compat.cublas import scaled_mm, takes
from weft.compat.device import capabilities
from weft.core.machine import Machine
from weft.core.problem import LEAST_MAGNITUDE, SCALE_BLOCK, Scaling
from weft.runtime.bindings import FactorScales
from weft.runtime.nearest import nearest_profile

if TYPE_CHECKING:
    from weft.kernels.gemm import PlainGemm


def dequantised(matrix: torch.Tensor, scales: torch.Tensor, scaling: Scaling, operand: Literal["a", "b"]) -> torch.Tensor:
    """Return the elements of an operand times their scales, in float32. scales: of the shape that Scaling names."""
    if scaling.recipe == "blockwise":
        if operand == "b":
            scales = scales.repeat_interleave(SCALE_BLOCK, 0)[: matrix.shape[0]]
        scales = scales.repeat_interleave(SCALE_BLOCK, 1)[:, : matrix.shape[1]]
    return matrix.float() * scales


def quantise(matrix: torch.Tensor, elements: torch.Tensor, scales: torch.Tensor, scaling: Scaling) -> None:
    """Write a matrix as FP8 elements and their scales, rowwise or by blocks of 128 columns.

    A scale is the largest magnitude of its elements, but at least LEAST_MAGNITUDE, over the largest value of the dtype.
    """
    rows, most = matrix.float(), torch.finfo(elements.dtype).max
    blocks = rows.view(matrix.shape[0], scales.shape[1], matrix.shape[1] // scales.shape[1])
    magnitudes = blocks.abs().amax(-1).clamp(min=LEAST_MAGNITUDE)
    # It divides by a tensor, because on GPUs torch's division by a number multiplies by the inverse.
    torch.div(magnitudes, torch.full_like(magnitudes, most), out=scales)
    elements.copy_((blocks / scales[..., None]).clamp(-most, most).view_as(rows))


def multiply_dequantised(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scales: FactorScales) -> None:
    """Compute out = a @ b in float32, on any device."""
    out.copy_(dequantised(a, scales.a, scales.scaling, "a") @ dequantised(b, scales.b, scales.scaling, "b"))


@cache
def products_on(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, FactorScales], None]:
    """Return a function (a, b, out, scales) that computes out = a @ b for FP8 operands outside of a program."""
    return ScaledProducts(device).multiply if device.type == "cuda" else multiply_dequantised


class ScaledProducts:
    """ScaledProducts multiplies FP8 operands on a GPU.

    machine: the profile by which tile shapes are chosen, by default the nearest.
    """

    def __init__(self, device: torch.device, machine: Machine | None = None) -> None:
        self._device, self._machine = device, machine
        self._kernels: dict[tuple[int, int, int, Scaling], PlainGemm | None] = {}
        """The kernels, by M, N, K and scaling. They live as long as the program, because graphs contain addresses of their
        tables."""

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scales: FactorScales) -> None:
        """Compute out = a @ b on torch's current stream."""
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
        """Return weft's kernel, or None if the GPU has no matrix units for FP8, or TMA cannot load the operands."""
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
