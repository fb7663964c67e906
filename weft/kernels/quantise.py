"""This kernel quantises rows and stores them at their destinations. It is the Push of a problem whose scaling quantises a.

    _quantise_kernel   persistent blocks; tiles of ROWS rows, each read from HBM once
    quantise()         its launcher; QuantiseTables  the copies in the form that the kernel reads, computed once

The destinations of a tile are all ranks that its rows go to, this rank included. A block computes the scales of its rows
(rowwise: in a first pass over K, which leaves the rows in the cache), divides, rounds, and stores elements and scales at each
destination. Then it adds one to the flag of each destination. A part of the Push is complete when its flag has reached the
number of its tiles.

    block 0: tile 0   largest magnitudes -> scales -> FP8 -> store here, at rank 1, ... -> barrier -> count 1 at each (release)
    block 1: tile 1   ...                                     ~> peer: flag has grown by all tiles: the part is there

Order, as in weft.kernels.push: all stores of a tile precede the block's barrier, which precedes the release of each flag.
The result has the same bits as weft.runtime.products.quantise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import triton
import triton.language as tl

from weft.core.problem import SCALE_BLOCK, Scaling
from weft.core.schedule import Flag, Region, Store
from weft.kernels.launch import Launcher
from weft.kernels.scaled import largest, quantised, scale_of
from weft.triton.flags import table

ROWS = 4
"""The number of rows of a tile."""
TILE_FIELDS, PLACE_FIELDS = map(tl.constexpr, (4, 3))
"""The number of columns of the tables tiles and places of QuantiseTables."""
_COLUMNS, _WARPS = 2048, 8


@dataclass(frozen=True, kw_only=True)
class QuantiseTables:
    """QuantiseTables holds copies in the form that the kernel reads, on the device.

    tiles: for each tile: its first row in the source, the number of its rows, and its places [first, last).
    places: for each destination of a tile: the addresses of its first element, of its first scale, and of its flag.
    count: the number of tiles.
    columns: the number of columns of the source.
    pitches: the row strides of elements and of scales, in elements, at every destination.
    blockwise: whether each block of SCALE_BLOCK columns has a scale. Otherwise each row has one.
    """

    tiles: torch.Tensor
    places: torch.Tensor
    count: int
    columns: int
    pitches: tuple[int, int]
    blockwise: bool


def tiles_of_rows(region: Region) -> int:
    """Return the number of tiles of a copy of this shape, by which its flag grows in a call."""
    return -(-region.shape[0] // ROWS)


def quantise_tables(
    parts: Sequence[Store],
    *,
    scaling: Scaling,
    device: torch.device,
    elements: Callable[[Region], torch.Tensor],
    scales: Callable[[Region], torch.Tensor],
    count_address: Callable[[Flag], int],
) -> QuantiseTables:
    """Build the tables of a Push's parts. Parts with the same rows share tiles.

    elements, scales: return the elements and the scales of a destination.
    """
    tiles: list[tuple[int, int, int, int]] = []
    places: list[tuple[int, int, int]] = []
    pitches = set[tuple[int, int]]()
    for src, same in groupby(sorted(parts, key=lambda part: part.src.rows), key=lambda part: part.src):
        targets = [(elements(part.dst), scales(part.dst), count_address(part.count)) for part in same]
        pitches |= {(data.stride(0), of.stride(0)) for data, of, _ in targets if data.shape[0] > 1}
        for at in range(0, src.shape[0], ROWS):
            tiles.append((src.rows[0] + at, min(ROWS, src.shape[0] - at), len(places), len(places) + len(targets)))
            places += [(data[at:].data_ptr(), of[at:].data_ptr(), flag) for data, of, flag in targets]
    assert len(pitches) < 2, f"destinations differ in the distance from row to row: {pitches}"
    columns = parts[0].src.shape[1]
    width = scaling.scales_shape("a", 1, columns)[1]
    return QuantiseTables(
        tiles=table(tiles, torch.int64, device),
        places=table(places, torch.int64, device),
        count=len(tiles),
        columns=columns,
        pitches=next(iter(pitches), (columns, width)),
        blockwise=scaling.recipe == "blockwise",
    )


def quantise(
    plan: QuantiseTables,
    source: torch.Tensor,
    *,
    sms: int,
    silent: bool = False,
    launched_by: Launcher | None = None,
    stream: int | None = None,
) -> None:
    """Make the copies of `plan`, and count finished tiles.

    source: [rows, columns], with contiguous rows.
    sms: the number of blocks.
    silent: do not count, for a rehearsal.
    launched_by, stream: as for weft.kernels.gemm.gemm.
    """
    if not plan.count:
        return
    constants = {
        "COLUMNS": min(_COLUMNS, triton.next_power_of_2(plan.columns)),
        "BLOCK": SCALE_BLOCK if plan.blockwise else 0,
        "ROWS": ROWS,
    }
    (launched_by or Launcher())(
        _quantise_kernel,
        min(sms, plan.count),
        (source, plan.tiles, plan.places, source.stride(0), plan.columns, *plan.pitches, int(not silent), plan.count),
        constants,
        key=(source.dtype, source.data_ptr() % 16, source.stride(0) % 16, plan.columns, plan.pitches),
        stream=stream,
        num_warps=_WARPS,
    )


@triton.jit
def _quantise_kernel(
    source_ptr, tiles_ptr, places_ptr, stride, columns, pitch, scale_pitch, count_by, tiles,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, COLUMNS)[None, :]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        fields = tiles_ptr + TILE_FIELDS * tile
        first, rows = tl.load(fields), tl.load(fields + 1)
        begin, end = tl.load(fields + 2).to(tl.int32), tl.load(fields + 3).to(tl.int32)
        base_ptr = source_ptr + (first + row) * stride
        scale = tl.full((ROWS, 1), 0, tl.float32)
        if BLOCK == 0:
            for at in range(0, columns, COLUMNS):
                col = at + lane
                some = tl.load(base_ptr + col, mask=(row < rows) & (col < columns), other=0).to(tl.float32)
                scale = tl.maximum(scale, largest(some, 1)[:, None], propagate_nan=tl.PropagateNan.ALL)
            scale = scale_of(scale)
            for place in range(begin, end):
                scales_ptr = tl.load(places_ptr + PLACE_FIELDS * place + 1).to(tl.pointer_type(tl.float32))
                tl.store(scales_ptr + row * scale_pitch, scale, mask=row < rows)
        for at in range(0, columns, COLUMNS):
            col = at + lane
            inside = (row < rows) & (col < columns)
            some = tl.load(base_ptr + col, mask=inside, other=0).to(tl.float32)
            if BLOCK == 0:
                data = quantised(some, tl.broadcast_to(scale, (ROWS, COLUMNS)))
            else:
                blocks = some.reshape(ROWS, COLUMNS // BLOCK, BLOCK)
                factor = scale_of(largest(blocks, 2))
                data = quantised(blocks, tl.broadcast_to(factor[:, :, None], (ROWS, COLUMNS // BLOCK, BLOCK)))
                data = data.reshape(ROWS, COLUMNS)
                block = at // BLOCK + tl.arange(0, COLUMNS // BLOCK)[None, :]
                for place in range(begin, end):
                    scales_ptr = tl.load(places_ptr + PLACE_FIELDS * place + 1).to(tl.pointer_type(tl.float32))
                    inside_blocks = (row < rows) & (block * BLOCK < columns)
                    tl.store(scales_ptr + row * scale_pitch + block, factor, mask=inside_blocks)
            for place in range(begin, end):
                there_ptr = tl.load(places_ptr + PLACE_FIELDS * place).to(tl.pointer_type(tl.int8))
                tl.store(tl.multiple_of(there_ptr, 16) + row * pitch + col, data, mask=inside)
        # All stores of the tile before the releases that publish them.
        tl.debug_barrier()
        if count_by != 0:
            for place in range(begin, end):
                flag_ptr = tl.load(places_ptr + PLACE_FIELDS * place + 2).to(tl.pointer_type(tl.int32))
                tl.atomic_add(flag_ptr, count_by, sem="release", scope="sys")
