"""Which tile shape a GEMM step takes on a device: that of weft.perf.shapes on GPUs; small tiles under the interpreter."""

from __future__ import annotations

import torch

from weft.compat.device import capabilities
from weft.core.machine import Machine
from weft.core.schedule import Gemm
from weft.perf.shapes import SHAPES, TileShape, push_sms, shape_of, shapes_for, tiles_of, whole_tiles

__all__ = ["INTERPRETED", "SHAPES", "TileShape", "blocks_for", "push_sms", "shapes_for", "tiles_of", "whole_tiles"]
INTERPRETED = TileShape(m=32, n=32, k=32, warps=4, stages=1, halves=True)
"""What the interpreter runs, element by element."""


def blocks_for(step: Gemm, device: torch.device, machine: Machine) -> TileShape:
    """The tile shape for a step. machine: the profile that all ranks have."""
    return shape_of(step, capabilities(device), machine) if device.type == "cuda" else INTERPRETED
