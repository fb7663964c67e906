"""Which tile shape a GEMM step takes on a device: that of weft.perf.shapes on GPUs; small tiles under the interpreter."""

from __future__ import annotations

import torch

from weft.compat.device import capabilities
from weft.core.schedule import Gemm
from weft.perf.shapes import SHAPES, Blocks, push_sms, shape_of, shapes_for, tiles_of, whole_tiles

__all__ = ["INTERPRETED", "SHAPES", "Blocks", "blocks_for", "push_sms", "shapes_for", "tiles_of", "whole_tiles"]
INTERPRETED = Blocks(m=32, n=32, k=32, warps=4, stages=1, halves=True)
"""What the interpreter runs, element by element."""


def blocks_for(step: Gemm, device: torch.device) -> Blocks:
    """The tile shape for a step."""
    return shape_of(step, capabilities(device)) if device.type == "cuda" else INTERPRETED
