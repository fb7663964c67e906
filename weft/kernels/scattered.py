"""ScatteredTiles puts tiles of several buffers, on several GPUs, under one TMA descriptor.

TMA stores through descriptors, and a launch takes one for each tensor. Results at several peers would need one descriptor each.
But all of them have the same row width and stride, and a GPU maps its peers' memory into its own address space. So the row
tiles are slices of one tensor [slots, rows, N], whose first stride skips the memory between them.

    address   base            base + pitch              base + 2 pitch        ...
              row tile 0      (not ours, never touched)  row tile 1, at a peer

Memory between tiles is never accessed: a store names a slot and has at most a tile's rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

_MOST_PITCH_BYTES, _MOST_SLOTS = 1 << 40, 1 << 31
"""TMA's bounds of a stride and of a coordinate."""


@dataclass(frozen=True, kw_only=True)
class ScatteredTiles:
    """ScatteredTiles describes tiles at several addresses as one tensor.

    base: the tile with the lowest address.
    pitch: slot i begins i * `pitch` elements after base.
    slots: the number of slots.
    """

    base: torch.Tensor
    pitch: int
    slots: int

    def descriptor(self, block: list[int]) -> TensorDescriptor:
        """Return the TMA descriptor. block: the rows and columns of one store. A slot has as many rows."""
        rows, cols = block
        width, stride = self.base.shape[1], self.base.stride(0)
        return TensorDescriptor(self.base, [self.slots, rows, width], [self.pitch, stride, 1], [1, rows, cols])


def index_tiles(tiles: Sequence[torch.Tensor]) -> tuple[ScatteredTiles | None, list[int]]:
    """Return one tensor for all tiles, and the slot of each tile. Return None and slots -1 if TMA cannot address them.

    A TMA tensor's strides must be multiples of 16 bytes and of the stride of the next inner dimension.

    tiles: a view of each tile that starts at its first row. All have one dtype, width and stride.
    """
    if not tiles:
        return None, []
    base = min(tiles, key=lambda tile: tile.data_ptr())
    gaps = [tile.data_ptr() - base.data_ptr() for tile in tiles]
    row_bytes = base.stride(0) * base.element_size()
    pitch_bytes = math.gcd(*gaps) or row_bytes
    slots = [gap // pitch_bytes for gap in gaps]
    aligned = base.data_ptr() % 16 == row_bytes % 16 == pitch_bytes % row_bytes == 0
    if not aligned or pitch_bytes >= _MOST_PITCH_BYTES or max(slots) >= _MOST_SLOTS:
        return None, [-1] * len(tiles)
    return ScatteredTiles(base=base, pitch=pitch_bytes // base.element_size(), slots=max(slots) + 1), slots
