"""Which tile shape a GEMM step takes: the one that is estimated to end first.

A step without gates, or whose gates are late (`Part.adds`): waves of tiles, times a tile's time. A step whose tiles wait for
chunks: tiles run block by block in the kernel's order, each no sooner than its chunk may have arrived. Then smaller tiles, or
fewer row tiles that share their columns, can end first: with one wave of large tiles, all of the last chunk's work starts
when it arrives (512 rows on 4 GPUs: 153 us against 135 for the sequential program).

What is computed depends on the step alone, so that ranks which wait for tiles that another one counts know how many there
are. Rates were measured on H200 (docs/log.md); on other GPUs the order of shapes is a guess.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import torch

from weft.schedule import Gemm, Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Tile shape, how a block runs, and the rate of full tiles relative to the best shape: rate where TMA stores them,
    stored_rate where threads do, since they count, add, or go to peers. group: row tiles that take turns on the same
    columns."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    rate: float = 1.0
    stored_rate: float = 1.0
    group: int = 8


SHAPES = (
    Blocks(m=128, n=256, k=64, warps=8, stages=3),
    Blocks(m=128, n=128, k=64, warps=8, stages=5, rate=0.93, stored_rate=0.87),
    Blocks(m=64, n=256, k=64, warps=4, stages=4, rate=0.95, stored_rate=0.81),
    Blocks(m=64, n=128, k=64, warps=4, stages=5, rate=0.72, stored_rate=0.66),
)
"""What GPUs run, the best for large sizes first."""
INTERPRETED = Blocks(m=32, n=32, k=32, warps=4, stages=1)
"""What the interpreter runs, element by element."""
_SMS = 132
_SM_FLOP_PER_US = 5.3e6
_COPY_US, _COPY_BYTES_PER_US = 7.0, 3.0e5
_L2_BYTES, _HBM_BYTES_PER_US = 4.0e7, 3.8e6
_ITEMSIZE = 2


def tiles_of(part: Part, blocks: Blocks) -> int:
    """Tiles of one part: how far its count grows in a call."""
    rows, cols = part.out.shape
    return -(-rows // blocks.m) * -(-cols // blocks.n)


def blocks_for(step: Gemm, device: torch.device) -> Blocks:
    """The tile shape for a step."""
    if device.type != "cuda":
        return INTERPRETED
    shapes = tuple((part.out.shape, not part.adds and any(g.at_least for g in part.gates)) for part in step.parts)
    gated = any(waits for _, waits in shapes)
    return _gated_blocks(shapes, step.b.shape[0]) if gated else min(SHAPES, key=lambda blocks: _waves(step, blocks))


def _waves(step: Gemm, blocks: Blocks) -> float:
    tiles = sum(tiles_of(part, blocks) for part in step.parts)
    by_threads = any(part.count or part.adds or part.out.rank != step.b.rank for part in step.parts)
    return -(-tiles // _SMS) * blocks.m * blocks.n / (blocks.stored_rate if by_threads else blocks.rate)


@lru_cache(maxsize=1024)
def _gated_blocks(parts: tuple[tuple[tuple[int, int], bool], ...], inner: int) -> Blocks:
    """parts: by part, (rows, columns), and whether it waits for a chunk of as many rows. inner: K."""
    choices = [dataclasses.replace(blocks, group=group) for blocks in SHAPES for group in (8, 4, 2, 1)]
    return min(choices, key=lambda blocks: _gated_us(parts, inner, blocks))


def _gated_us(parts: tuple[tuple[tuple[int, int], bool], ...], inner: int, blocks: Blocks) -> float:
    """When the last tile ends, if chunks arrive one after the other from the start on."""
    arrives, row_tiles = 0.0, []
    for (rows, _), gated in parts:
        arrives += (_COPY_US + rows * inner * _ITEMSIZE / _COPY_BYTES_PER_US) if gated else 0.0
        row_tiles += [arrives if gated else 0.0] * -(-rows // blocks.m)
    columns = parts[0][0][1]
    col_tiles = -(-columns // blocks.n)
    tile_us = 2 * blocks.m * blocks.n * inner / _SM_FLOP_PER_US / blocks.rate
    free = [0.0] * _SMS
    tile = 0
    for first in range(0, len(row_tiles), blocks.group):
        for _ in range(col_tiles):
            for ready in row_tiles[first : first + blocks.group]:
                free[tile % _SMS] = max(free[tile % _SMS], ready) + tile_us
                tile += 1
    b_bytes = columns * inner * _ITEMSIZE
    passes = -(-len(row_tiles) // blocks.group) if b_bytes > _L2_BYTES else 1
    return max(*free, passes * b_bytes / _HBM_BYTES_PER_US)
