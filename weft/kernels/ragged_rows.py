"""Rows of a ragged all-to-all on their way: pushed to where they land, pulled from where they were made, waited for, told of.

    push_rows   pull_rows         units of segments, by a step's table of moves (weft.kernels.segments)
    await_rows  tell_of_rows      the segments that a tile has rows of
    copy_rows   store_rows   fill_rows   fill_below
    push_kernel pull_kernel       a step that only pushes, or pulls
    collect_kernel                what has landed, to where the caller has it; zeros below it
    await_kernel                  one block: flags that a lane waits for

weft.kernels.ragged has the kernels that multiply, and says which of their blocks call these; weft.kernels.exchange launches
them all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.segments import move_of, tile_of
from weft.triton.functions import get, peer_pointer, put, signal, wait


@triton.jit
def copy_rows(
    src_ptr,
    src_row,
    dst_ptr,
    dst_row,
    valid,
    width,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Up to ROWS rows from one contiguous matrix to another, either here or at a peer; STAGES - 1 loads under way."""
    src_ptr += src_row.to(tl.int64) * width
    dst_ptr += dst_row.to(tl.int64) * width
    rows = tl.arange(0, ROWS)[:, None]
    for col in tl.range(0, width, COLS, num_stages=STAGES):
        cols = col + tl.arange(0, COLS)[None, :]
        there = (rows < valid) & (cols < width)
        put(dst_ptr, rows * width + cols, get(src_ptr, rows * width + cols, there, 0, ALIGN), there, ALIGN)


@triton.jit
def store_rows(base_ptr, row, acc, low, high, col, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr):
    """Rows [low, high) of a tile whose first row is `row` of a contiguous matrix."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = col + tl.arange(0, BLOCK_N)[None, :]
    first = row.to(tl.int64) * N
    # Rows above `low` may lie above the matrix: offsets are those of where they are stored.
    put(base_ptr + first + low * N, (rows - low) * N + cols, acc, (rows >= low) & (rows < high) & (cols < N), ALIGN)


@triton.jit
def in_time(notes_ptr):
    """1, or, once a wait has ended early, 0: then results are NaN. Those that the caller reads before a later call raises would
    else look like results."""
    return (tl.load(notes_ptr) == 0).to(tl.int32)


@triton.jit
def fill_of(came):
    """What is stored where nothing arrives, and added to what does."""
    return tl.where(came != 0, 0.0, float("nan"))


@triton.jit
def fill_rows(dst_ptr, row, valid, width, fill, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr):
    """Up to ROWS rows of a contiguous matrix, all with one value."""
    rows = tl.arange(0, ROWS)[:, None]
    for col in range(0, width, COLS):
        cols = col + tl.arange(0, COLS)[None, :]
        there = (rows < valid) & (cols < width)
        put(dst_ptr + row.to(tl.int64) * width, rows * width + cols, tl.zeros((ROWS, COLS), tl.float32) + fill, there, ALIGN)


@triton.jit
def fill_below(
    out_ptr, first, max_rows, N, unit, stride, times, fill, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr
):
    """One value for `times` units of ROWS x COLS from row `first` on, of which this block has every stride-th; the next one."""
    across = tl.cdiv(N, COLS)
    for _ in range(times):
        row = first + unit // across * ROWS
        rows, cols = tl.arange(0, ROWS)[:, None], unit % across * COLS + tl.arange(0, COLS)[None, :]
        there = (row + rows < max_rows) & (cols < N)
        put(out_ptr + row.to(tl.int64) * N, rows * N + cols, tl.zeros((ROWS, COLS), tl.float32) + fill, there, ALIGN)
        unit += stride
    return unit


@triton.jit
def push_rows(
    block,
    blocks,
    a_ptr,
    landing_ptr,
    landing_peers_ptr,
    arrived_ptr,
    arrived_peers_ptr,
    groups_ptr,
    moves_ptr,
    rank,
    K,
    keep_own,
    Q: tl.constexpr,
    GROUP_FIELDS: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Rows of a to where they land, unit by unit, each with a signal. Of the own rows, those that share a tile with others; all
    if keep_own."""
    for unit in range(block, tl.load(moves_ptr + FIELDS * (Q - 1)), blocks):
        fields, within = move_of(moves_ptr, unit, Q, FIELDS)
        at = within * ROWS
        peer = tl.load(fields + 4)
        landing = peer_pointer(landing_ptr, landing_peers_ptr, peer)
        here, there, rows = tl.load(fields + 2) + at, tl.load(fields + 3) + at, tl.load(fields + 1) - at
        group = groups_ptr + GROUP_FIELDS * tl.load(fields + 5)
        top = tl.load(group)
        # The tiles that have rows of this unit, all of their rows.
        first = top + (there - top) // TILE_ROWS * TILE_ROWS
        last = top + ((there + tl.minimum(rows, ROWS) - 1 - top) // TILE_ROWS + 1) * TILE_ROWS
        shared = (first < there - at) | (tl.minimum(last, top + tl.load(group + 1)) > there + rows)
        if (peer != rank) | shared | (keep_own != 0):
            copy_rows(a_ptr, here, landing, there, rows, K, ROWS, COLS, STAGES, ALIGN)
        word = tl.load(fields + 6)
        if word >= 0:
            signal(peer_pointer(arrived_ptr, arrived_peers_ptr, peer) + word)


@triton.jit
def pull_rows(
    turn_ptr,
    out_ptr,
    product_ptr,
    product_peers_ptr,
    arrived_ptr,
    moves_ptr,
    gates_ptr,
    goals_ptr,
    notes_ptr,
    tries,
    N,
    W: tl.constexpr,
    Q: tl.constexpr,
    GATES: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """What peers have made for this rank to where it belongs, unit by unit, each segment behind its gates; units are drawn."""
    units = tl.load(moves_ptr + FIELDS * (Q - 1))
    unit = tl.atomic_add(turn_ptr, 1, sem="relaxed", scope="gpu")
    while unit < units:
        fields, within = move_of(moves_ptr, unit, Q, FIELDS)
        at = within * ROWS
        peer = tl.load(fields + 4)
        segment = tl.load(fields + 5) * W + peer
        came = await_gates(segment, in_time(notes_ptr), arrived_ptr, gates_ptr, goals_ptr, notes_ptr, tries, GATES)
        product = peer_pointer(product_ptr, product_peers_ptr, peer)
        here, there, rows = tl.load(fields + 2) + at, tl.load(fields + 3) + at, tl.load(fields + 1) - at
        if came != 0:
            copy_rows(product, here, out_ptr, there, rows, N, ROWS, COLS, STAGES, ALIGN)
        else:
            fill_rows(out_ptr, there, rows, N, float("nan"), ROWS, COLS, ALIGN)
        unit = tl.atomic_add(turn_ptr, 1, sem="relaxed", scope="gpu")


@triton.jit
def await_gates(segment, came, arrived_ptr, gates_ptr, goals_ptr, notes_ptr, tries, GATES: tl.constexpr):
    """Wait for the words of a segment; whether they came in time, and all before them."""
    for at in tl.static_range(GATES):
        word = tl.load(gates_ptr + segment * GATES + at)
        if word >= 0:
            came = came & wait(arrived_ptr + word, tl.load(goals_ptr + word), tries, notes_ptr).to(tl.int32)
    return came


@triton.jit
def await_rows(
    row,
    valid,
    expert,
    known,
    came,
    arrived_ptr,
    parts_ptr,
    gates_ptr,
    goals_ptr,
    notes_ptr,
    tries,
    W: tl.constexpr,
    E: tl.constexpr,
    GATES: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Wait for the words of all segments that have rows of [row, row + valid). known: bits of those that this block has waited
    for, if there are at most 64; came: whether all came in time. Both are returned as they are then."""
    for other in range(W):
        part = parts_ptr + FIELDS * (expert * W + other)
        first, rows = tl.load(part), tl.load(part + 1)
        if tl.maximum(first, row) < tl.minimum(first + rows, row + valid):
            segment = expert * W + other
            bit = tl.full((), 1, tl.int64) << (segment % 64)
            if (W * E > 64) | ((known & bit) == 0):
                came = await_gates(segment, came, arrived_ptr, gates_ptr, goals_ptr, notes_ptr, tries, GATES)
                known = known | bit
    return known, came


@triton.jit
def tell_of_rows(
    expert,
    row,
    valid,
    arrived_ptr,
    arrived_peers_ptr,
    parts_ptr,
    tells_ptr,
    W: tl.constexpr,
    FIELDS: tl.constexpr,
    ASYNCHRONOUS: tl.constexpr,
):
    """Signal to every peer that has rows of [row, row + valid), once they are stored. tells: by segment, the word that counts
    it, on the rank that its rows go to, or -1."""
    if ASYNCHRONOUS:
        # What Triton waits for after a store by TMA is that it has been read from shared memory, not that it has been written.
        tl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [valid], tl.int32, False, 1)
    for other in range(W):
        part, word = parts_ptr + FIELDS * (expert * W + other), tl.load(tells_ptr + expert * W + other)
        start, rows = tl.load(part), tl.load(part + 1)
        if (word >= 0) & (tl.maximum(start, row) < tl.minimum(start + rows, row + valid)):
            signal(peer_pointer(arrived_ptr, arrived_peers_ptr, other) + word)


@triton.jit(do_not_specialize=["tries", "rank"])
def push_kernel(
    a_ptr,
    landing_ptr,
    landing_peers_ptr,
    arrived_ptr,
    arrived_peers_ptr,
    groups_ptr,
    moves_ptr,
    rank,
    K,
    keep_own,
    Q: tl.constexpr,
    GROUP_FIELDS: tl.constexpr,
    MOVE_FIELDS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MOVE_ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
):
    push_rows(
        tl.program_id(0),
        tl.num_programs(0),
        a_ptr,
        landing_ptr,
        landing_peers_ptr,
        arrived_ptr,
        arrived_peers_ptr,
        groups_ptr,
        moves_ptr,
        rank,
        K,
        keep_own,
        Q,
        GROUP_FIELDS,
        MOVE_FIELDS,
        TILE_ROWS,
        MOVE_ROWS,
        COLS,
        STAGES,
        ALIGN,
    )


@triton.jit(do_not_specialize=["tries"])
def pull_kernel(
    turn_ptr,
    out_ptr,
    product_ptr,
    product_peers_ptr,
    arrived_ptr,
    moves_ptr,
    gates_ptr,
    goals_ptr,
    notes_ptr,
    tries,
    N,
    W: tl.constexpr,
    Q: tl.constexpr,
    GATES: tl.constexpr,
    MOVE_FIELDS: tl.constexpr,
    MOVE_ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
):
    pull_rows(
        turn_ptr,
        out_ptr,
        product_ptr,
        product_peers_ptr,
        arrived_ptr,
        moves_ptr,
        gates_ptr,
        goals_ptr,
        notes_ptr,
        tries,
        N,
        W,
        Q,
        GATES,
        MOVE_FIELDS,
        MOVE_ROWS,
        COLS,
        STAGES,
        ALIGN,
    )


@triton.jit(do_not_specialize=["count", "tries"])
def await_kernel(words_ptr, count, arrived_ptr, goals_ptr, notes_ptr, tries):
    """Wait for so many words."""
    for at in range(count):
        word = tl.load(words_ptr + at)
        wait(arrived_ptr + word, tl.load(goals_ptr + word), tries, notes_ptr)


@triton.jit(do_not_specialize=["tries"])
def collect_kernel(
    landing_ptr,
    out_ptr,
    arrived_ptr,
    parts_ptr,
    tiles_ptr,
    gates_ptr,
    turns_ptr,
    goals_ptr,
    notes_ptr,
    tries,
    width,
    max_rows,
    W: tl.constexpr,
    E: tl.constexpr,
    Q: tl.constexpr,
    GATES: tl.constexpr,
    PART_FIELDS: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
    MOVE_ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ALIGN: tl.constexpr,
):
    block, blocks = tl.program_id(0), tl.num_programs(0)
    known, came = tl.full((), 0, tl.int64), in_time(notes_ptr)
    for row_tile in range(block, tl.load(tiles_ptr + TILE_FIELDS * (Q - 1)), blocks):
        expert, row, valid = tile_of(tiles_ptr, row_tile, Q, TILE_FIELDS, BLOCK_M, True)
        known, came = await_rows(
            row,
            valid,
            expert,
            known,
            came,
            arrived_ptr,
            parts_ptr,
            gates_ptr,
            goals_ptr,
            notes_ptr,
            tries,
            W,
            E,
            GATES,
            PART_FIELDS,
        )
        for at in range(0, valid, MOVE_ROWS):
            if came != 0:
                copy_rows(landing_ptr, row + at, out_ptr, row + at, valid - at, width, MOVE_ROWS, COLS, STAGES, ALIGN)
            else:
                fill_rows(out_ptr, row + at, valid - at, width, float("nan"), MOVE_ROWS, COLS, ALIGN)
    below = tl.load(turns_ptr)
    units = tl.cdiv(max_rows - below, MOVE_ROWS) * tl.cdiv(width, COLS)
    times = tl.cdiv(units - block, blocks)
    fill_below(out_ptr, below, max_rows, width, block, blocks, times, fill_of(came), MOVE_ROWS, COLS, ALIGN)
