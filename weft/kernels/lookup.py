"""The lookup kernel gathers rows of tables, pools them by bag, and stores each bag at its destination, which may be on a peer.

    _lookup_kernel   blocks of one warp; tiles (a few bags of one table) in the order of the parts
    lookup()         its launcher; LookupTables  a step's parts and this rank's tables in the form that the kernel reads

It replaces torch.nn.functional.embedding_bag for several tables. A warp pools one bag at a time: it loads 4 KiB of rows
together, 16 bytes per thread if the columns allow it, and prefetches the next rows' indices. Sums are in float32, rounded once.
The rate of gathering depends on the bytes in flight: 32 warps per SM with 4 KiB each are 128 KiB, and the memory of an H200
needs about 36 KiB per SM (4.8 TB/s at 1 us).

    block 0: bags 0-3 of part 0 | bags of part 0 ... -> barrier -> count (release, system) | bags of part 1 ...
                 row 0 .. 7 -> row 8 .. 15 -> ... -> store the bag (NVLink, or local)      ~> the peer's copy lane

A block adds its finished tiles of a part when it continues with another part, because publishing waits until the peer has
acknowledged the block's stores. Every thread's stores precede the block's barrier, which precedes the release, which precedes
the acquire that sees it. Each block's count stands for its own tiles, so only the full sum shows that a part is complete.

The kernel never waits, so it cannot deadlock, whatever SMs it holds. Wrong indices and offsets are safe: the kernel reads only
indices within `indices` and rows within their table. An index without a row counts for its bag's length and adds nothing. The
addresses that the kernel stores to do not depend on the caller's indices or offsets.

Legend: a slice is a table, or a part of one that is wider than a block's columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.core.problem import Span1D
from weft.core.schedule import Bags, Flag, Lookup, Region
from weft.kernels.launch import Launcher
from weft.triton.flags import table

ELEMENTS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_PART, _SLICE = 9, 6
"""The number of fields of a part and of a slice."""
_BAGS = 4
"""The number of bags in a tile. Neighbouring bags share an offset. Larger tiles would leave the last blocks uneven."""
_WIDEST = 1024
"""The number of columns that a warp holds, which is 32 sums per thread."""
_ROW_BYTES = 4096
"""The bytes of rows in flight in a warp."""
_WARPS_PER_SM = 32
_REGISTERS = 64
"""Registers per thread, few enough that all these warps are resident. A second wave of warps would double the time."""


@dataclass(frozen=True, kw_only=True)
class LookupTables:
    """LookupTables holds a step and a rank's tables in the form that the kernel reads, on the device.

    parts: for each part: its first tile, the tile after its last, its first sample, samples, tiles of a slice, first slice, the
        address of its first slice's first element or its offset in `out`, whether that is an offset, and bytes from one sample
        to the next.
    flags: the address of each part's flag, or 0.
    slices: for each slice: address, row stride in elements, rows, columns, table, and bytes from the rank's first column.
    tiles: the number of tiles.
    batch: the samples of all ranks.
    width: the columns of a block.
    align: in elements. Every address, stride and column count is a multiple of it.
    item: bytes of an element.
    """

    parts: torch.Tensor
    flags: torch.Tensor
    slices: torch.Tensor
    tiles: int
    batch: int
    width: int
    align: int
    item: int


def slices_of(columns: Sequence[Span1D]) -> list[tuple[int, Span1D]]:
    """Return (table, columns among the rank's) of every slice. columns: the columns of every table.

    >>> slices_of([(0, 8), (8, 1100)])
    [(0, (0, 8)), (1, (8, 1032)), (1, (1032, 1100))]
    """
    return [
        (table, (left, min(left + _WIDEST, high)))
        for table, (low, high) in enumerate(columns)
        for left in range(low, high, _WIDEST)
    ]


def tiles_of_bags(part: Bags, columns: Sequence[Span1D]) -> int:
    """Return the number of tiles of a part, by which its flag grows in a call.

    columns: the columns of every table of the rank that looks up.
    """
    return len(_slices_within(part, columns)) * _groups(part)


def _groups(part: Bags) -> int:
    return -(-part.bags.shape[0] // _BAGS)


def _slices_within(part: Bags, columns: Sequence[Span1D]) -> list[int]:
    low, high = part.bags.cols
    return [i for i, (_, (left, _)) in enumerate(slices_of(columns)) if low <= left < high]


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """An OutputPlace is the destination of a part.

    address: the address of its first element.
    pitch: the row stride in bytes.
    relative: whether address is an offset in `out`.
    """

    address: int
    pitch: int
    relative: bool


def lookup_tables(
    step: Lookup,
    tables: Sequence[torch.Tensor],
    *,
    columns: Sequence[Span1D],
    batch: int,
    device: torch.device,
    target: Callable[[Region], OutputPlace],
    count_address: Callable[[Flag], int],
) -> LookupTables:
    """Build the tables of a step. Destinations and flags may be on any peer that this device can reach.

    tables: the tables of this rank, with contiguous rows.
    columns: the columns of each table among the rank's.
    batch: the samples of all ranks.
    target: returns the destination of a part.
    count_address: returns the address of an int32 flag.
    """
    slices, item = slices_of(columns), tables[0].element_size()
    places = [target(part.out) for part in step.parts]
    parts, tile = [], 0
    for part, place in zip(step.parts, places, strict=True):
        within, tiles = _slices_within(part, columns), tiles_of_bags(part, columns)
        first = within[0] if within else 0
        base = place.address - part.bags.cols[0] * item
        sizes = (part.bags.rows[0], part.bags.shape[0], _groups(part), first)
        parts.append((tile, tile + tiles, *sizes, base, int(place.relative), place.pitch))
        tile += tiles
    rows = [_slice(tables[at], at, cols, columns[at][0]) for at, cols in slices]
    bytes_ = [n for place in places for n in (place.address, place.pitch)]
    bytes_ += [n for t in tables for n in (t.data_ptr(), t.stride(0) * item)] + [n * item for pair in columns for n in pair]
    return LookupTables(
        parts=table(parts, torch.int64, device),
        flags=table([count_address(part.count) if part.count else 0 for part in step.parts], torch.int64, device),
        slices=table(rows, torch.int64, device),
        tiles=tile,
        batch=batch,
        width=triton.next_power_of_2(max(high - low for _, (low, high) in slices)),
        align=math.gcd(16, *bytes_) // item,
        item=item,
    )


def _slice(matrix: torch.Tensor, at: int, cols: Span1D, first: int) -> tuple[int, ...]:
    address = matrix.data_ptr() + (cols[0] - first) * matrix.element_size()
    return address, matrix.stride(0), matrix.shape[0], cols[1] - cols[0], at, cols[0] * matrix.element_size()


def lookup(
    plan: LookupTables,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    mean: bool,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    silent: bool = False,
    load_only: bool = False,
    sms: int = 1,
    launched_by: Launcher | None = None,
    stream: int | None = None,
) -> None:
    """Run the lookups of `plan`.

    indices: [L], rows of the tables, int32 or int64.
    offsets: [tables * batch + 1]. Bag (table, sample) is indices[offsets[table * batch + sample] : offsets[... + 1]].
    weights: [L], a factor for each index.
    mean: divide by a bag's length. An empty bag is zero.
    dtype: the dtype of the tables and of the result.
    out: the tensor of relative destinations.
    silent: do not count, for a rehearsal.
    load_only: launch without tiles, so that CUDA loads the kernel.
    sms: the number of SMs of the device.
    launched_by, stream: as for weft.kernels.gemm.gemm.
    """
    if not plan.tiles:
        return
    out_base = 0 if out is None else out.data_ptr()
    factors = indices if weights is None else weights
    align = _align(plan, out)
    rows = max(1, _ROW_BYTES // (plan.width * dtype.itemsize))
    constants = {
        "WEIGHTED": weights is not None,
        "MEAN": mean,
        "BAGS": _BAGS,
        "ROWS": rows,
        "WIDTH": plan.width,
        "ALIGN": align,
        "ELEMENT": ELEMENTS[dtype],
        "ITEM": dtype.itemsize,
        "PART": _PART,
        "SLICE": _SLICE,
    }
    (launched_by or Launcher())(
        _lookup_kernel,
        min(_WARPS_PER_SM * sms, plan.tiles),
        (
            indices,
            offsets,
            factors,
            plan.parts,
            plan.flags,
            plan.slices,
            out_base,
            indices.numel(),
            plan.batch,
            int(not silent),
            0 if load_only else plan.tiles,
        ),
        constants,
        key=variant(plan, indices, offsets, weights, out, mean=mean),
        stream=stream,
        num_warps=1,
        maxnreg=_REGISTERS,
    )


def variant(
    plan: LookupTables,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor | None,
    *,
    mean: bool,
) -> tuple[object, ...]:
    """Return the key of the compiled kernel that serves a call. The arguments are those of `lookup`."""
    kinds = (indices.dtype, offsets.dtype, None if weights is None else weights.dtype)
    return (*kinds, plan.width, _align(plan, out), plan.item, mean)


def _align(plan: LookupTables, out: torch.Tensor | None) -> int:
    return math.gcd(plan.align, 0 if out is None else out.data_ptr() // plan.item)


@triton.jit
def _offset(offsets_ptr, at, indices):
    """Load an offset, clamped to the number of indices."""
    return tl.minimum(tl.maximum(tl.load(offsets_ptr + at).to(tl.int64), 0), indices)


@triton.jit
def pool(
    indices_ptr,
    weights_ptr,
    table_ptr,
    stride,
    rows,
    start,
    end,
    cols,
    inside,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sum columns `cols` of the rows of indices [start, end) in float32; each row times its weight, if WEIGHTED."""
    slot = tl.arange(0, ROWS)
    total = tl.zeros((WIDTH,), tl.float32)
    index = tl.load(indices_ptr + start + slot, mask=start + slot < end, other=-1).to(tl.int64)
    for at in range(start, end, ROWS):
        # Prefetch the next rows' indices.
        ahead = at + ROWS + slot
        index_ahead = tl.load(indices_ptr + ahead, mask=ahead < end, other=-1).to(tl.int64)
        there = (index >= 0) & (index < rows)
        row_ptr = table_ptr + index[:, None] * stride + cols[None, :]
        data = tl.load(row_ptr, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            data *= tl.load(weights_ptr + at + slot, mask=there, other=0.0).to(tl.float32)[:, None]
        total += tl.sum(data, 0)
        index = index_ahead
    return total


@triton.jit(
    # One kernel serves all alignments of these vectors, which may change from call to call.
    do_not_specialize=["indices_ptr", "offsets_ptr", "weights_ptr", "out_base", "indices", "batch", "count_by", "tiles"]
)
def _lookup_kernel(
    indices_ptr,
    offsets_ptr,
    weights_ptr,
    parts_ptr,
    flags_ptr,
    slices_ptr,
    out_base: tl.int64,
    indices: tl.int64,
    batch: tl.int64,
    count_by,
    tiles,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    BAGS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    ELEMENT: tl.constexpr,
    ITEM: tl.constexpr,
    PART: tl.constexpr,
    SLICE: tl.constexpr,
):
    cols = tl.arange(0, WIDTH)
    part_ptr, flag_ptr = parts_ptr, flags_ptr
    part_end = tl.load(part_ptr + 1)
    done = 0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        while tile >= part_end:
            part_ptr += PART
            flag_ptr += 1
            part_end = tl.load(part_ptr + 1)
        samples, groups = tl.load(part_ptr + 3), tl.load(part_ptr + 4)
        within = tile - tl.load(part_ptr)
        slice_ptr = slices_ptr + SLICE * (tl.load(part_ptr + 5) + within // groups)
        sample = within % groups * BAGS
        # The compiler knows no alignment of values from a table. Without these hints it moves element by element.
        table_ptr = tl.multiple_of(tl.load(slice_ptr).to(tl.pointer_type(ELEMENT)), ALIGN * ITEM)
        stride = tl.multiple_of(tl.load(slice_ptr + 1), ALIGN)
        inside = cols < tl.multiple_of(tl.load(slice_ptr + 3), ALIGN)
        rows = tl.load(slice_ptr + 2)
        bag = tl.load(slice_ptr + 4) * batch + tl.load(part_ptr + 2) + sample
        pitch = tl.load(part_ptr + 8)
        address = tl.load(part_ptr + 6) + tl.load(part_ptr + 7) * out_base + tl.load(slice_ptr + 5) + sample * pitch
        end = _offset(offsets_ptr, bag, indices)
        for i in range(tl.minimum(samples - sample, BAGS)):
            start = end
            end = _offset(offsets_ptr, bag + i + 1, indices)
            total = pool(indices_ptr, weights_ptr, table_ptr, stride, rows, start, end, cols, inside, WEIGHTED, ROWS, WIDTH)
            if MEAN:
                total /= tl.maximum(end - start, 1).to(tl.float32)
            out_ptr = tl.multiple_of((address + i * pitch).to(tl.pointer_type(ELEMENT)), ALIGN * ITEM)
            tl.store(out_ptr + cols, total.to(ELEMENT), mask=inside)
        done += count_by
        # If this block's next tile is of another part, or there is none, publish the finished tiles of this part.
        ahead = tile + tl.num_programs(0)
        flag = tl.load(flag_ptr)
        if (ahead >= part_end) & (flag != 0):
            # Every thread's stores before the one release that publishes them.
            tl.debug_barrier()
            tl.atomic_add(flag.to(tl.pointer_type(tl.int32)), done, sem="release", scope="sys")
        if ahead >= part_end:
            done = 0
