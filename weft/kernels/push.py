"""The kernel of a Push: a set number of blocks store regions where they belong, and count what has arrived.

    _push_kernel   persistent blocks; tiles in the order of the copies
    push()         its launcher; PushTables  what the copies mean to the kernel, computed once

A copy is one part of the Push. It is cut into tiles of as many bytes, counted along its rows one after the other, wherever
those lie: how many it has depends on the region's shape alone, so that a peer which waits for it knows. Its flag grows by
that number in a call. A block adds what it has finished once it goes on to another copy, not after each tile: to publish, it
must wait until the peer has acknowledged its stores, and a copy is complete only with its last tile. Until then its tiles
overlap.

    block 0: tile 0, 16, 32 of copy 0 -> barrier -> count 3 (release, system) -> tile 48 of copy 1 ...
    block 1: tile 1, 17      of copy 0 -> barrier -> count 2                   -> tile 33 of copy 1 ...
                                                       ~> peer: flag has grown by 5: all of copy 0 is there

Order. Every thread's stores come before the block's barrier, the barrier before the one release, and that before the
acquire which sees it: of a kernel's gate (weft.triton.flags) at system scope, or of a peer's stream that waits for the word.
Each block's count stands for its own tiles alone, so that only the sum of all shows the copy complete; and it shows no
other copy: the flag of a later one may be full while an earlier one is still under way. The bad interleaving is two copies
on one flag: block 0 is done with both, block 1 with neither, and the word says that the first is there. So no two copies
of a Push share a flag.

The kernel waits for nothing. What it reads must be there, and what it overwrites be free, when its stream comes to it. When
its stream has passed it, all of its copies are done.

Legend: a unit is what one thread moves at once, the widest of 16, 8, 4, 2 and 1 bytes that divides all addresses, strides and
row lengths; a run is a copy whose rows follow each other without gaps on both sides: one row to the kernel.
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
"""Four loads of 16 bytes under way in each of 512 threads."""
_INTERPRETED_TILE_BYTES = 1024
_ELEMENTS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@dataclass(frozen=True, kw_only=True)
class PushTables:
    """Copies as the kernel reads them, on the device.

    tiles: for each tile: addresses of its source and destination, units in it, address of its flag or 0; and where not all
    copies are runs, in units: where it begins in its first row (its addresses are that row's), row length, strides of source
    and destination. count: tiles. unit: bytes. tile_bytes: of a whole tile. runs: whether all are.
    """

    tiles: torch.Tensor
    count: int
    unit: int
    tile_bytes: int
    runs: bool


def tile_bytes_on(device: torch.device) -> int:
    """Bytes of a tile: alike on every rank, whatever it sends."""
    return _TILE_BYTES if device.type == "cuda" else _INTERPRETED_TILE_BYTES


def tiles_of_copy(region: Region, *, itemsize: int, device: torch.device) -> int:
    """Tiles of a copy of this shape, source or destination: how far its flag grows in a call. itemsize: bytes."""
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
        """The widest unit that divides it."""
        return math.gcd(16, self.src, self.dst, self.width, self.src_stride, self.dst_stride)

    def tiles(self, unit: int, tile_bytes: int) -> list[tuple[int, ...]]:
        """A row of the table for each tile; a tile of a run is a row of its own."""
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
    """A copy of shape (rows, bytes); the strides of a single row mean nothing: torch gives any."""
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
    """Lay copies out for the kernel: (source, destination, flag that its tiles add to) in the order of sending.

    itemsize: bytes of an element. address: of a region's first element. stride: bytes from a row to the next, elements of
    a row being adjacent. count_address: of an int32 word. Regions and words may lie on any peer that this device can reach;
    neither the copies' destinations nor their flags may be the same.
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


def launcher() -> Launcher:
    """For `push`, call after call."""
    return Launcher(_push_kernel)


def push(
    plan: PushTables,
    *,
    sms: int,
    silent: bool = False,
    src_base: int = 0,
    launched_by: Launcher | None = None,
    stream: int | None = None,
) -> None:
    """Make the copies that `plan` says, and count.

    sms: blocks. silent: do not count, for a rehearsal. src_base: what the plan's source addresses count from, a multiple of
    16, so that a plan serves tensors that move from call to call. launched_by, stream: as for weft.kernels.gemm.gemm.
    """
    assert src_base % 16 == 0, f"src_base is {src_base}, no multiple of 16"
    if not plan.count:
        return
    element = _ELEMENTS[plan.unit]
    lanes = plan.unit * 8 // element.primitive_bitwidth
    units = plan.tile_bytes // plan.unit
    constants = {
        "UNITS": units,
        # Narrow units in rounds: all at once, they would take every register.
        "ROUND": min(units, plan.tile_bytes // 8),
        "LANES": lanes,
        "UNIT_BYTES": plan.unit,
        "ELEMENT": element,
        "RUNS": plan.runs,
        "FIELDS": _FIELDS,
    }
    (launched_by or launcher())(
        min(sms, plan.count),
        (plan.tiles, src_base, int(not silent), plan.count),
        constants,
        key=(plan.unit, plan.runs),
        stream=stream,
        num_warps=_WARPS,
    )


@triton.jit
def _pointer(address, ELEMENT: tl.constexpr, UNIT_BYTES: tl.constexpr):
    """An address as a pointer; without the hint its accesses would be one element wide."""
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
    # Masks and rows by unit, not by element: then the compiler knows that a unit's elements go together.
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
            # Not through this SM's first-level cache: it may hold what lay here in an earlier call.
            data = tl.load(src_ptr + src_at * LANES + lane, mask=unit < units, cache_modifier=".cg")
            tl.store(dst_ptr + dst_at * LANES + lane, data, mask=unit < units)
        done += count_by
        flag = tl.load(fields + 3)
        # This block's next tile; its fields come into the cache meanwhile.
        ahead = tile + tl.num_programs(0)
        next_flag = tl.load(tiles_ptr + FIELDS * ahead + 3, mask=ahead < tiles, other=-1)
        if flag != next_flag:
            # Every thread's stores before the one release that publishes them.
            tl.debug_barrier()
            if flag != 0:
                tl.atomic_add(flag.to(tl.pointer_type(tl.int32)), done, sem="release", scope="sys")
            done = 0
