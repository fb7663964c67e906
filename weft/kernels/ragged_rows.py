"""These device functions move the rows of a ragged all-to-all. They push, pull, wait for and signal rows.

    push_rows   pull_rows         copy units of segments, by a step's table of moves (weft.kernels.segments)
    await_rows  publish_rows      wait for, or signal, the segments that a tile has rows of
    copy_rows   store_rows   fill_rows   fill_below
    copy_scales fill_scales       the scales of FP8 rows
    push_kernel pull_kernel       a step that only pushes, or only pulls
    collect_kernel                copies rows that landed to the caller's tensor, zeros below them
    await_kernel                  one block; waits for the flags that a lane waits for

weft.kernels.ragged has the multiplying kernels, which call these functions; weft.kernels.exchange launches all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.kernels.segments import GROUP_FIELDS, MOVE_FIELDS, PART_FIELDS, TILE_FIELDS, move_of, tile_of
from weft.triton.functions import get, peer_pointer, put, signal, wait


class StepTables(NamedTuple):
    """StepTables holds a step's tables, counters and flags on this rank (weft.kernels.segments).

    Fields that the step's kernel does not read are None.

    gates: the counters that its copies or tiles wait for.
    counters: each segment's counter on the rank that its rows go to, or -1.
    turns: its first entry is the number of rows that arrive.
    turn: the counters from which the step's blocks draw work.
    """

    groups: Any = None
    parts: Any = None
    moves: Any = None
    tiles: Any = None
    gates: Any = None
    counters: Any = None
    turns: Any = None
    turn: Any = None
    goals: Any = None
    notes: Any = None


class Moving(NamedTuple):
    """Moving holds the parameters that a row-moving kernel is compiled for: its constexpr argument M.

    W, E, Q: as in weft.kernels.segments.LayoutSizes.
    GATES: the counters that a segment waits for.
    ROWS, COLS: the rows and columns that a block moves together, with STAGES - 1 loads in flight.
    ALIGN, COPY_ALIGN: the elements of one access to results, and to copied rows.
    TILE_ROWS: the rows of a product's tile.
    SCALES: the columns of scales that a block copies together. 0 unless rows are FP8, which are copied as bytes.
    """

    W: int
    E: int
    Q: int
    GATES: int
    ROWS: int
    COLS: int
    STAGES: int
    ALIGN: int
    TILE_ROWS: int
    COPY_ALIGN: int
    SCALES: int = 0


class CopiedScales(NamedTuple):
    """CopiedScales describes the float32 scales of FP8 rows that are copied.

    source: the scales to read.
    width: the number of scales of a row.
    target: the tensor to store them in on this rank.
    peers: int64 [world_size], the address of each rank's target, if rows are sent to peers.
    """

    source: Any
    width: Any
    target: Any
    peers: Any = None


@triton.jit
def copy_rows(src_ptr, src_row, dst_ptr, dst_row, valid, width, M: tl.constexpr):
    """Copy up to ROWS rows from one contiguous matrix to another, either here or at a peer."""
    src_ptr += src_row.to(tl.int64) * width
    dst_ptr += dst_row.to(tl.int64) * width
    rows = tl.arange(0, M.ROWS)[:, None]
    for col in tl.range(0, width, M.COLS, num_stages=M.STAGES):
        cols = col + tl.arange(0, M.COLS)[None, :]
        there = (rows < valid) & (cols < width)
        put(dst_ptr, rows * width + cols, get(src_ptr, rows * width + cols, there, 0, M.COPY_ALIGN), there, M.COPY_ALIGN)


@triton.jit
def copy_scales(src_ptr, src_row, dst_ptr, dst_row, valid, width, plus, M: tl.constexpr):
    """Copy the scales of up to ROWS rows. plus: added to each scale."""
    src_ptr += src_row.to(tl.int64) * width
    dst_ptr += dst_row.to(tl.int64) * width
    rows = tl.arange(0, M.ROWS)[:, None]
    for col in range(0, width, M.SCALES):
        cols = col + tl.arange(0, M.SCALES)[None, :]
        there = (rows < valid) & (cols < width)
        put(dst_ptr, rows * width + cols, get(src_ptr, rows * width + cols, there) + plus, there)


@triton.jit
def fill_scales(dst_ptr, row, valid, width, fill, M: tl.constexpr):
    """Fill the scales of up to ROWS rows with one value."""
    rows = tl.arange(0, M.ROWS)[:, None]
    for col in range(0, width, M.SCALES):
        cols = col + tl.arange(0, M.SCALES)[None, :]
        there = (rows < valid) & (cols < width)
        first_ptr = dst_ptr + row.to(tl.int64) * width
        put(first_ptr, rows * width + cols, tl.full((M.ROWS, M.SCALES), 0, tl.float32) + fill, there)


@triton.jit
def store_rows(base_ptr, row, acc, low, high, col, N, ALIGN: tl.constexpr):
    """Store rows [low, high) of a tile whose first row is `row` of a contiguous matrix."""
    rows = tl.arange(0, acc.shape[0])[:, None]
    cols = col + tl.arange(0, acc.shape[1])[None, :]
    first = row.to(tl.int64) * N
    # Rows above `low` may be outside the matrix, so offsets start at the first stored row.
    put(base_ptr + first + low * N, (rows - low) * N + cols, acc, (rows >= low) & (rows < high) & (cols < N), ALIGN)


@triton.jit
def in_time(notes_ptr):
    """Return 1, or 0 once a wait has given up. Results are then NaN, because the caller may read them before a later call
    raises."""
    return (tl.load(notes_ptr) == 0).to(tl.int32)


@triton.jit
def fill_of(came):
    """Return the value that is stored below the rows that arrive, and added to these: 0, or NaN after a wait gave up."""
    return tl.where(came != 0, 0.0, float("nan"))


@triton.jit
def fill_rows(dst_ptr, row, valid, width, fill, M: tl.constexpr):
    """Fill up to ROWS rows of a contiguous matrix with one value."""
    rows = tl.arange(0, M.ROWS)[:, None]
    for col in range(0, width, M.COLS):
        cols = col + tl.arange(0, M.COLS)[None, :]
        there = (rows < valid) & (cols < width)
        first_ptr, offsets = dst_ptr + row.to(tl.int64) * width, rows * width + cols
        put(first_ptr, offsets, tl.full((M.ROWS, M.COLS), 0, tl.float32) + fill, there, M.ALIGN)


@triton.jit
def fill_below(out_ptr, first, max_rows, N, unit, stride, times, fill, M: tl.constexpr):
    """Fill `times` units of ROWS x COLS from row `first` on, every stride-th one, with a value; return the next unit."""
    across = tl.cdiv(N, M.COLS)
    for _ in range(times):
        row = first + unit // across * M.ROWS
        rows, cols = tl.arange(0, M.ROWS)[:, None], unit % across * M.COLS + tl.arange(0, M.COLS)[None, :]
        there = (row + rows < max_rows) & (cols < N)
        first_ptr, offsets = out_ptr + row.to(tl.int64) * N, rows * N + cols
        put(first_ptr, offsets, tl.full((M.ROWS, M.COLS), 0, tl.float32) + fill, there, M.ALIGN)
        unit += stride
    return unit


@triton.jit
def push_rows(block, blocks, a_ptr, landing, scales, arrived, tables, rank, K, keep_own, M: tl.constexpr):
    """Push rows of a to their destinations, unit by unit, and signal each.

    This rank's own rows are pushed if they share a tile with rows of other ranks, or if keep_own.
    scales: CopiedScales of FP8 rows.
    """
    for unit in range(block, tl.load(tables.moves + MOVE_FIELDS * (M.Q - 1)), blocks):
        fields, within = move_of(tables.moves, unit, M.Q)
        at = within * M.ROWS
        peer = tl.load(fields + 4)
        landing_ptr = peer_pointer(landing.local, landing.peers, peer)
        here, there, rows = tl.load(fields + 2) + at, tl.load(fields + 3) + at, tl.load(fields + 1) - at
        group = tables.groups + GROUP_FIELDS * tl.load(fields + 5)
        top = tl.load(group)
        # All rows of the tiles that have rows of this unit.
        first = top + (there - top) // M.TILE_ROWS * M.TILE_ROWS
        last = top + ((there + tl.minimum(rows, M.ROWS) - 1 - top) // M.TILE_ROWS + 1) * M.TILE_ROWS
        shared = (first < there - at) | (tl.minimum(last, top + tl.load(group + 1)) > there + rows)
        if (peer != rank) | shared | (keep_own != 0):
            copy_rows(a_ptr, here, landing_ptr, there, rows, K, M)
            if M.SCALES > 0:
                target_ptr = peer_pointer(scales.target, scales.peers, peer)
                copy_scales(scales.source, here, target_ptr, there, rows, scales.width, 0.0, M)
        word = tl.load(fields + 6)
        if word >= 0:
            signal(peer_pointer(arrived.local, arrived.peers, peer) + word)


@triton.jit
def pull_rows(out_ptr, product, arrived_ptr, tables, tries, N, M: tl.constexpr):
    """Pull products of peers for this rank, unit by unit, each after its segment's gates. Blocks draw units from a counter."""
    units = tl.load(tables.moves + MOVE_FIELDS * (M.Q - 1))
    unit = tl.atomic_add(tables.turn, 1, sem="relaxed", scope="gpu")
    while unit < units:
        fields, within = move_of(tables.moves, unit, M.Q)
        at = within * M.ROWS
        peer = tl.load(fields + 4)
        segment = tl.load(fields + 5) * M.W + peer
        came = await_gates(segment, in_time(tables.notes), arrived_ptr, tables, tries, M.GATES)
        product_ptr = peer_pointer(product.local, product.peers, peer)
        here, there, rows = tl.load(fields + 2) + at, tl.load(fields + 3) + at, tl.load(fields + 1) - at
        if came != 0:
            copy_rows(product_ptr, here, out_ptr, there, rows, N, M)
        else:
            fill_rows(out_ptr, there, rows, N, float("nan"), M)
        unit = tl.atomic_add(tables.turn, 1, sem="relaxed", scope="gpu")


@triton.jit
def await_gates(segment, came, arrived_ptr, tables, tries, GATES: tl.constexpr):
    """Wait for a segment's counters. Return whether they and all earlier ones were reached in time."""
    for at in tl.static_range(GATES):
        word = tl.load(tables.gates + segment * GATES + at)
        if word >= 0:
            came = came & wait(arrived_ptr + word, tl.load(tables.goals + word), tries, tables.notes).to(tl.int32)
    return came


@triton.jit
def await_rows(row, valid, expert, known, came, arrived_ptr, tables, tries, M: tl.constexpr):
    """Wait for the counters of all segments that have rows of [row, row + valid). Return known and came, updated.

    known: the bits of the segments that this block has waited for, if there are at most 64 segments.
    came: whether all waits ended in time.
    """
    for other in range(M.W):
        segment = expert * M.W + other
        part = tables.parts + PART_FIELDS * segment
        first, rows = tl.load(part), tl.load(part + 1)
        if tl.maximum(first, row) < tl.minimum(first + rows, row + valid):
            bit = tl.full((), 1, tl.int64) << (segment % 64)
            if (M.W * M.E > 64) | ((known & bit) == 0):
                came = await_gates(segment, came, arrived_ptr, tables, tries, M.GATES)
                known = known | bit
    return known, came


@triton.jit
def publish_rows(expert, row, valid, arrived, tables, W: tl.constexpr, ASYNCHRONOUS: tl.constexpr):
    """Signal every peer that owns rows of [row, row + valid), after they have been stored."""
    if ASYNCHRONOUS:
        # After a TMA store, Triton waits until shared memory has been read. The data must also have been written.
        tl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [valid], tl.int32, False, 1)
    for other in range(W):
        part, word = tables.parts + PART_FIELDS * (expert * W + other), tl.load(tables.counters + expert * W + other)
        start, rows = tl.load(part), tl.load(part + 1)
        if (word >= 0) & (tl.maximum(start, row) < tl.minimum(start + rows, row + valid)):
            signal(peer_pointer(arrived.local, arrived.peers, other) + word)


@triton.jit(do_not_specialize=["tries", "rank"])
def push_kernel(a_ptr, landing, scales, arrived, tables, rank, K, keep_own, M: tl.constexpr):
    push_rows(tl.program_id(0), tl.num_programs(0), a_ptr, landing, scales, arrived, tables, rank, K, keep_own, M)


@triton.jit(do_not_specialize=["tries"])
def pull_kernel(out_ptr, product, arrived_ptr, tables, tries, N, M: tl.constexpr):
    pull_rows(out_ptr, product, arrived_ptr, tables, tries, N, M)


@triton.jit(do_not_specialize=["count", "tries"])
def await_kernel(words_ptr, count, arrived_ptr, goals_ptr, notes_ptr, tries):
    """Wait for `count` counters."""
    for at in range(count):
        word = tl.load(words_ptr + at)
        wait(arrived_ptr + word, tl.load(goals_ptr + word), tries, notes_ptr)


@triton.jit(do_not_specialize=["tries"])
def collect_kernel(landing_ptr, out_ptr, scales, arrived_ptr, tables, tries, width, max_rows, M: tl.constexpr):
    """Copy rows that landed. scales: CopiedScales of FP8 rows; the scales of late rows are NaN."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    known, came = tl.full((), 0, tl.int64), in_time(tables.notes)
    for row_tile in range(block, tl.load(tables.tiles + TILE_FIELDS * (M.Q - 1)), blocks):
        expert, row, valid = tile_of(tables.tiles, row_tile, M.Q, M.TILE_ROWS, True)
        known, came = await_rows(row, valid, expert, known, came, arrived_ptr, tables, tries, M)
        for at in range(0, valid, M.ROWS):
            if came != 0:
                copy_rows(landing_ptr, row + at, out_ptr, row + at, valid - at, width, M)
            else:
                fill_rows(out_ptr, row + at, valid - at, width, float("nan"), M)
            if M.SCALES > 0:
                copy_scales(scales.source, row + at, scales.target, row + at, valid - at, scales.width, fill_of(came), M)
    below = tl.load(tables.turns)
    units = tl.cdiv(max_rows - below, M.ROWS) * tl.cdiv(width, M.COLS)
    times = tl.cdiv(units - block, blocks)
    fill_below(out_ptr, below, max_rows, width, block, blocks, times, fill_of(came), M)
    if M.SCALES > 0:
        for at in range(block * M.ROWS, max_rows - below, blocks * M.ROWS):
            fill_scales(scales.target, below + at, max_rows - below - at, scales.width, fill_of(came), M)
