"""Tiles of several buffers, on several GPUs, under one TMA descriptor.

TMA stores through descriptors, which a launch takes as arguments, one a tensor. Results that lie at peers would need one for
each. But all of them have rows of one width and stride, and a GPU maps its peers' memory into its own addresses: so row tiles
are places of one tensor [places, rows, N], which strides over whatever lies between them.

    address   base            base + pitch              base + 2 pitch        ...
              row tile 0      (not ours, never touched)  row tile 1, at a peer

Nothing is read or written between places: a store names a place, and has no more rows than a tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

_MOST_PITCH_BYTES, _MOST_PLACES = 1 << 40, 1 << 31
"""Bounds of TMA: a stride, and a coordinate."""


@dataclass(frozen=True, kw_only=True)
class Far:
    """Place p begins `pitch` * p elements behind the first row of `base`, the tile that has the lowest address."""

    base: torch.Tensor
    pitch: int
    places: int

    def descriptor(self, block: list[int]) -> TensorDescriptor:
        """block: rows and columns that are stored at once; a place has as many rows."""
        rows, cols = block
        width, stride = self.base.shape[1], self.base.stride(0)
        return TensorDescriptor(self.base, [self.places, rows, width], [self.pitch, stride, 1], [1, rows, cols])


def far_places(tiles: Sequence[torch.Tensor]) -> tuple[Far | None, list[int]]:
    """One tensor for all tiles, and the place of each; None, and -1 for each, where TMA cannot have it so.

    tiles: from the first row of each on, of one dtype, width and stride. Strides of a TMA tensor are multiples of 16 bytes and
    of those of the dimension within.
    """
    if not tiles:
        return None, []
    base = min(tiles, key=lambda tile: tile.data_ptr())
    gaps = [tile.data_ptr() - base.data_ptr() for tile in tiles]
    row_bytes = base.stride(0) * base.element_size()
    apart = math.gcd(*gaps) or row_bytes
    places = [gap // apart for gap in gaps]
    aligned = base.data_ptr() % 16 == row_bytes % 16 == apart % row_bytes == 0
    if not aligned or apart >= _MOST_PITCH_BYTES or max(places) >= _MOST_PLACES:
        return None, [-1] * len(tiles)
    return Far(base=base, pitch=apart // base.element_size(), places=max(places) + 1), places
