"""This kernel runs a Push. A fixed number of blocks store regions at their destinations and count finished tiles.

    _push_kernel   persistent blocks; tiles in the order of the copies
    push()         its launcher; PushTables  the copies in the form that the kernel reads, computed once

A copy is one part of the Push. It is cut into tiles of a fixed number of bytes, counted along its rows, whatever their strides.
So the number of tiles depends on the region's shape alone, and a peer that waits for the copy knows it. A copy's flag grows by
that number in each call. A block adds its finished tiles when it goes on to another copy: publishing waits until the peer has
acknowledged the block's stores, and until then the stores of several tiles overlap.

    block 0: tile 0, 16, 32 of copy 0 -> barrier -> count 3 (release, system) -> tile 48 of copy 1 ...
    block 1: tile 1, 17      of copy 0 -> barrier -> count 2                   -> tile 33 of copy 1 ...
                                                       ~> peer: flag has grown by 5: all of copy 0 is there

Order. Every thread's stores come before the block's barrier, and the barrier before the release. The release comes before the
acquire that sees it, in a kernel's gate (weft.triton.flags) at system scope or in a peer's stream that waits for the word. Each
block's count stands only for its own tiles, so only the full sum shows that the copy is complete. The flag of a later copy may
be full while an earlier copy is still in progress. With two copies on one flag, block 0 could finish both and block 1 neither,
and the flag would show the first copy as complete. So no two copies of a Push share a flag.

The kernel never waits. When its stream reaches it, its sources must be ready and its destinations free. When it has ended, all
of its copies are done.

Legend: a unit is what one thread moves in one access, the widest of 16, 8, 4, 2 and 1 bytes that divides all addresses, strides
and row lengths. A run is a copy whose source and destination rows are contiguous, which the kernel treats as one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.core.schedule import Flag, Region
from weft.kernels.launch import Launcher
from weft.triton.flags import table

_FIELDS = 8
_WARPS = 16
_TILE_BYTES = 32768
"""The bytes of a tile: each of 512 threads has four loads of 16 bytes in flight."""
_INTERPRETED_TILE_BYTES = 1024
_ELEMENTS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@dataclass(frozen=True, kw_only=True)
class PushTables:
    """PushTables holds copies in the form that the kernel reads, on the device.

    tiles: for each tile: the addresses of its source and destination, its units, and the address of its flag or 0. Unless all
        copies are runs, the addresses are those of its first row, and four more fields are in units: the tile's offset in that
        row, the row length, and the strides of source and destination.
    count: the number of tiles.
    unit: the bytes of a unit.
    tile_bytes: the bytes of a whole tile.
    runs: whether all copies are runs.
    """

    tiles: torch.Tensor
    count: int
    unit: int
    tile_bytes: int
    runs: bool


def tile_bytes_on(device: torch.device) -> int:
    """Return the bytes of a tile, which are the same on every rank for all copies."""
    return _TILE_BYTES if device.type == "cuda" else _INTERPRETED_TILE_BYTES


def tiles_of_copy(region: Region, *, itemsize: int, device: torch.device) -> int:
    """Return the number of tiles of a copy, by which its flag grows in a call. itemsize: bytes of an element."""
    return -(-region.size * itemsize // tile_bytes_on(device))


@dataclass(frozen=True, kw_only=True)
class _Move:
    """One copy in bytes: rows of `width` at src and dst, each `stride` after the one before; a run is one row.

    flag: its address, or 0.
    """

    src: int
    dst: int
    rows: int
    width: int
    src_stride: int
    dst_stride: int
    flag: int

    @property
    def unit(self) -> int:
        """The widest unit that divides all sizes of the copy."""
        return math.gcd(16, self.src, self.dst, self.width, self.src_stride, self.dst_stride)

    def tiles(self, unit: int, tile_bytes: int) -> list[tuple[int, ...]]:
        """Return the table's row of each tile. Each tile of a run is described as one row."""
        nbytes = self.rows * self.width
        found = []
        for at in range(0, nbytes, tile_bytes):
            size = min(tile_bytes, nbytes - at)
            if self.rows == 1:
                src, dst, col, width = self.src + at, self.dst + at, 0, size
            else:
                row, col = divmod(at, self.width)
                src, dst, width = self.src + row * self.src_stride, self.dst + row * self.dst_stride, self.width
            inner = (n // unit for n in (col, width, self.src_stride, self.dst_stride))
            found.append((src, dst, size // unit, self.flag, *inner))
        return found


def _move(src: int, dst: int, shape: tuple[int, int], strides: tuple[int, int], flag: int) -> _Move:
    """Return a copy of shape (rows, bytes). It ignores the strides of a single row, for which torch may report any value."""
    rows, width = shape
    if rows == 1 or strides == (width, width):
        return _Move(src=src, dst=dst, rows=1, width=rows * width, src_stride=0, dst_stride=0, flag=flag)
    return _Move(src=src, dst=dst, rows=rows, width=width, src_stride=strides[0], dst_stride=strides[1], flag=flag)


def push_tables(
    copies: Sequence[tuple[Region, Region, Flag | None]],
    *,
    device: torch.device,
    itemsize: int,
    address: Callable[[Region], int],
    stride: Callable[[Region], int],
    count_address: Callable[[Flag], int],
) -> PushTables:
    """Build the tables of copies.

    copies: (source, destination, flag that its tiles add to), in the order of sending. No two copies may share a destination or
        a flag.
    itemsize: bytes of an element.
    address: returns the address of a region's first element.
    stride: returns the bytes from one row of a region to the next. The elements of a row must be adjacent.
    count_address: returns the address of an int32 flag.

    Regions and flags may be on any peer that this device can reach.
    """
    moves = []
    for src, dst, flag in copies:
        assert src.shape == dst.shape, f"copy {src} -> {dst}: shapes differ"
        if src.size:
            shape, strides = (src.shape[0], src.shape[1] * itemsize), (stride(src), stride(dst))
            count = 0 if flag is None else count_address(flag)
            moves.append(_move(address(src), address(dst), shape, strides, count))
    flags = [move.flag for move in moves if move.flag]
    assert len(set(flags)) == len(flags), "two copies of a run share a flag"
    return _lay_out(moves, device)


def _lay_out(moves: Sequence[_Move], device: torch.device) -> PushTables:
    unit, tile_bytes = math.gcd(16, *(move.unit for move in moves)), tile_bytes_on(device)
    runs = all(move.rows == 1 for move in moves)
    tiles = [tile for move in moves for tile in move.tiles(unit, tile_bytes)]
    return PushTables(tiles=table(tiles, torch.int64, device), count=len(tiles), unit=unit, tile_bytes=tile_bytes, runs=runs)


def push(
    plan: PushTables,
    *,
    sms: int,
    silent: bool = False,
    src_base: int = 0,
    launched_by: Launcher | None = None,
    stream: int | None = None,
) -> None:
    """Make the copies of `plan`, and count finished tiles.

    sms: the number of blocks.
    silent: do not count, for a rehearsal.
    src_base: a multiple of 16 that is added to the plan's source addresses, so that one plan serves tensors whose address
        changes between calls.
    launched_by, stream: as for weft.kernels.gemm.gemm.
    """
    assert src_base % 16 == 0, f"src_base is {src_base}, no multiple of 16"
    if not plan.count:
        return
    element = _ELEMENTS[plan.unit]
    lanes = plan.unit * 8 // element.primitive_bitwidth
    units = plan.tile_bytes // plan.unit
    constants = {
        "UNITS": units,
        # Narrow units are moved in rounds: all of them together would need too many registers.
        "ROUND": min(units, plan.tile_bytes // 8),
        "LANES": lanes,
        "UNIT_BYTES": plan.unit,
        "ELEMENT": element,
        "RUNS": plan.runs,
        "FIELDS": _FIELDS,
    }
    (launched_by or Launcher())(
        _push_kernel,
        min(sms, plan.count),
        (plan.tiles, src_base, int(not silent), plan.count),
        constants,
        key=(plan.unit, plan.runs),
        stream=stream,
        num_warps=_WARPS,
    )


@triton.jit
def _pointer(address, ELEMENT: tl.constexpr, UNIT_BYTES: tl.constexpr):
    """Return an address as a pointer. Without the alignment hint, accesses would be one element wide."""
    return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), UNIT_BYTES)


@triton.jit(do_not_specialize=["src_base", "count_by", "tiles"])
def _push_kernel(
    tiles_ptr,
    src_base: tl.int64,
    count_by,
    tiles,
    UNITS: tl.constexpr,
    ROUND: tl.constexpr,
    LANES: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    ELEMENT: tl.constexpr,
    RUNS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    # Masks and rows are computed per unit, so that the compiler sees that a unit's elements share them.
    first = tl.arange(0, ROUND)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    done = 0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        fields = tiles_ptr + FIELDS * tile
        src_ptr = _pointer(src_base + tl.load(fields), ELEMENT, UNIT_BYTES)
        dst_ptr = _pointer(tl.load(fields + 1), ELEMENT, UNIT_BYTES)
        units = tl.load(fields + 2).to(tl.int32)
        for start in range(0, UNITS, ROUND):
            unit = start + first
            if RUNS:
                src_at, dst_at = unit, unit
            else:
                at = tl.load(fields + 4).to(tl.int32) + unit
                width = tl.load(fields + 5).to(tl.int32)
                row = at // width
                col = at - row * width
                src_at = row * tl.load(fields + 6) + col
                dst_at = row * tl.load(fields + 7) + col
            # Bypass this SM's L1 cache, which may hold data of an earlier call.
            data = tl.load(src_ptr + src_at * LANES + lane, mask=unit < units, cache_modifier=".cg")
            tl.store(dst_ptr + dst_at * LANES + lane, data, mask=unit < units)
        done += count_by
        flag = tl.load(fields + 3)
        # Loading the next tile's flag also brings its fields into the cache.
        ahead = tile + tl.num_programs(0)
        next_flag = tl.load(tiles_ptr + FIELDS * ahead + 3, mask=ahead < tiles, other=-1)
        if flag != next_flag:
            # Every thread's stores before the one release that publishes them.
            tl.debug_barrier()
            if flag != 0:
                tl.atomic_add(flag.to(tl.pointer_type(tl.int32)), done, sem="release", scope="sys")
            done = 0
