"""This module chooses the tile shape of a GEMM step: by weft.perf.shapes on GPUs, small ones under Triton's interpreter."""

from __future__ import annotations

import torch

from weft.compat.device import capabilities
from weft.core.machine import Machine
from weft.core.problem import SCALE_BLOCK, Scaling
from weft.core.schedule import Gemm
from weft.perf.shapes import TileShape, shape_of

INTERPRETED = TileShape(m=32, n=32, k=32, warps=4, stages=1, halves=True)
"""The tile shape under the interpreter, which runs element by element."""
INTERPRETED_FP8 = TileShape(m=32, n=32, k=SCALE_BLOCK, warps=4, stages=1, halves=True, pairs=True, itemsize=1)
"""The tile shape under the interpreter for FP8 operands. A step over K is one block of scales."""


def blocks_for(step: Gemm, device: torch.device, machine: Machine, scaling: Scaling | None = None) -> TileShape:
    """Return the tile shape for a step.

    machine: the profile that all ranks share.
    scaling: the scaling of FP8 operands.
    """
    if device.type == "cuda":
        return shape_of(step, capabilities(device), machine, scaling)
    return INTERPRETED if scaling is None else INTERPRETED_FP8
