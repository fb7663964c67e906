"""Grouped GEMMs whose rows go all to all, in numbers that only devices know. See weft.kernels.segments for where they go.

    dispatch_kernel   some blocks push rows, the others multiply what arrives
    combine_kernel    tiles are stored at the peer, its own last
    collect_kernel    what has landed, to where the caller has it; zeros below it

weft.kernels.exchange launches them.

    rank r, pushing block             rank p, multiplying block
    push 32 rows of a segment  ~~~>   own rows first, from a
    signal arrived, next one   ~~~>   wait until all rows of a segment are there; multiply its tiles

A tile has rows of one segment, so it knows its expert, and a segment's last tile may be partly empty: segments should have
some 128 rows. Blocks that wait are behind blocks that never do (pushing ones come first; a combining block waits for nothing),
here and on every peer: what is waited for comes.

b has three dimensions, expert by expert; both of its last two may be the contiguous one. Legend: N, K of each GEMM.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.gemm_kernel import _place
from weft.kernels.segments import segment_of
from weft.triton.device import get, peer_pointer, put, signal, wait


@triton.jit
def _multiply(
    a_desc,
    b_desc,
    row,
    expert,
    col,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
):
    """One tile in float32, by the expert's b."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        a = a_desc.load([row, step * BLOCK_K])
        if B_TRANSPOSED:
            acc = tl.dot(a, b_desc.load([expert, col, step * BLOCK_K]).reshape(BLOCK_N, BLOCK_K).T, acc)
        else:
            acc = tl.dot(a, b_desc.load([expert, step * BLOCK_K, col]).reshape(BLOCK_K, BLOCK_N), acc)
    return acc


@triton.jit
def _store(base_ptr, row, acc, valid, col, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr):
    """The valid part of a tile, from `row` of a contiguous matrix on, here or at a peer."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = col + tl.arange(0, BLOCK_N)[None, :]
    put(base_ptr + row.to(tl.int64) * N, rows * N + cols, acc, (rows < valid) & (cols < N), ALIGN)


@triton.jit
def _copy_rows(src_ptr, src_row, dst_ptr, dst_row, valid, width, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr):
    """Up to ROWS rows from one contiguous matrix to another, either here or at a peer."""
    src_ptr += src_row.to(tl.int64) * width
    dst_ptr += dst_row.to(tl.int64) * width
    rows = tl.arange(0, ROWS)[:, None]
    for col in range(0, width, COLS):
        cols = col + tl.arange(0, COLS)[None, :]
        there = (rows < valid) & (cols < width)
        put(dst_ptr, rows * width + cols, get(src_ptr, rows * width + cols, there, 0, ALIGN), there, ALIGN)


@triton.jit
def _zero_rows(dst_ptr, dst_row, valid, width, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr):
    dst_ptr += dst_row.to(tl.int64) * width
    rows = tl.arange(0, ROWS)[:, None]
    for col in range(0, width, COLS):
        cols = col + tl.arange(0, COLS)[None, :]
        zeros = tl.zeros((ROWS, COLS), dst_ptr.dtype.element_ty)
        put(dst_ptr, rows * width + cols, zeros, (rows < valid) & (cols < width), ALIGN)


@triton.jit
def _push(
    block,
    blocks,
    a_ptr,
    landing_ptr,
    landing_peers_ptr,
    arrived_ptr,
    arrived_peers_ptr,
    send_ptr,
    rank,
    K,
    E: tl.constexpr,
    Q: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Rows of a to where they land, unit by unit, each with a signal."""
    for unit in range(block, tl.load(send_ptr + WIDTH * (Q - 1)), blocks):
        fields, within = segment_of(send_ptr, unit, Q, WIDTH)
        at = within * ROWS
        peer = tl.load(fields + 4)
        landing = peer_pointer(landing_ptr, landing_peers_ptr, peer)
        here, there = tl.load(fields + 2) + at, tl.load(fields + 3) + at
        _copy_rows(a_ptr, here, landing, there, tl.load(fields + 1) - at, K, ROWS, COLS, ALIGN)
        signal(peer_pointer(arrived_ptr, arrived_peers_ptr, peer) + rank * E + tl.load(fields + 5))


@triton.jit(do_not_specialize=["tries", "rank"])
def dispatch_kernel(
    a_desc,
    landing_desc,
    b_desc,
    a_ptr,
    out_ptr,
    landing_ptr,
    landing_peers_ptr,
    arrived_ptr,
    arrived_peers_ptr,
    send_ptr,
    recv_ptr,
    goals_ptr,
    notes_ptr,
    tries,
    rank,
    N,
    K,
    max_rows,
    W: tl.constexpr,
    E: tl.constexpr,
    Q: tl.constexpr,
    WIDTH: tl.constexpr,
    PUSHERS: tl.constexpr,
    PUSH_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
):
    block = tl.program_id(0) - PUSHERS
    blocks = tl.num_programs(0) - PUSHERS
    if block < 0:
        _push(
            block + PUSHERS,
            PUSHERS,
            a_ptr,
            landing_ptr,
            landing_peers_ptr,
            arrived_ptr,
            arrived_peers_ptr,
            send_ptr,
            rank,
            K,
            E,
            Q,
            WIDTH,
            PUSH_ROWS,
            COLS,
            ALIGN,
        )
    else:
        row_tiles, col_tiles = tl.load(recv_ptr + WIDTH * (Q - 1)), tl.cdiv(N, BLOCK_N)
        for tile in range(block, row_tiles * col_tiles, blocks):
            row_tile, col_tile = _place(tile, row_tiles, col_tiles, GROUP)
            fields, within = segment_of(recv_ptr, row_tile, Q, WIDTH)
            at = within * BLOCK_M
            peer, expert = tl.load(fields + 4), tl.load(fields + 5)
            there = tl.load(fields + 3) + at
            row, desc = there, landing_desc
            if peer == rank:
                row, desc = tl.load(fields + 2) + at, a_desc
            else:
                wait(arrived_ptr + peer * E + expert, tl.load(goals_ptr + peer * E + expert), tries, notes_ptr)
            col = col_tile * BLOCK_N
            acc = _multiply(desc, b_desc, row, expert, col, K, BLOCK_M, BLOCK_N, BLOCK_K, B_TRANSPOSED)
            _store(out_ptr, there, acc, tl.load(fields + 1) - at, col, N, BLOCK_M, BLOCK_N, ALIGN)
        rows = tl.load(recv_ptr + WIDTH * Q)
        for unit in range(block, tl.cdiv(max_rows - rows, PUSH_ROWS), blocks):
            first = rows + unit * PUSH_ROWS
            _zero_rows(out_ptr, first, max_rows - first, N, PUSH_ROWS, COLS, ALIGN)


@triton.jit(do_not_specialize=["rank"])
def combine_kernel(
    a_desc,
    b_desc,
    out_ptr,
    landing_ptr,
    landing_peers_ptr,
    arrived_ptr,
    arrived_peers_ptr,
    send_ptr,
    rank,
    N,
    K,
    W: tl.constexpr,
    E: tl.constexpr,
    Q: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
):
    row_tiles, col_tiles = tl.load(send_ptr + WIDTH * (Q - 1)), tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0)):
        row_tile, col_tile = _place(tile, row_tiles, col_tiles, GROUP)
        fields, within = segment_of(send_ptr, row_tile, Q, WIDTH)
        at = within * BLOCK_M
        peer, expert = tl.load(fields + 4), tl.load(fields + 5)
        col = col_tile * BLOCK_N
        here, there = tl.load(fields + 2) + at, tl.load(fields + 3) + at
        acc = _multiply(a_desc, b_desc, here, expert, col, K, BLOCK_M, BLOCK_N, BLOCK_K, B_TRANSPOSED)
        base_ptr = tl.where(peer == rank, out_ptr, peer_pointer(landing_ptr, landing_peers_ptr, peer))
        # The choice of two pointers has no alignment that the compiler knows of.
        base_ptr = tl.multiple_of(base_ptr, 16)
        _store(base_ptr, there, acc, tl.load(fields + 1) - at, col, N, BLOCK_M, BLOCK_N, ALIGN)
        if peer != rank:
            signal(peer_pointer(arrived_ptr, arrived_peers_ptr, peer) + rank * E + expert)


@triton.jit(do_not_specialize=["tries", "rank"])
def collect_kernel(
    a_ptr,
    landing_ptr,
    out_ptr,
    arrived_ptr,
    recv_ptr,
    goals_ptr,
    notes_ptr,
    tries,
    rank,
    width,
    max_rows,
    W: tl.constexpr,
    E: tl.constexpr,
    Q: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    block, blocks = tl.program_id(0), tl.num_programs(0)
    for unit in range(block, tl.load(recv_ptr + WIDTH * (Q - 1)), blocks):
        fields, within = segment_of(recv_ptr, unit, Q, WIDTH)
        peer, expert = tl.load(fields + 4), tl.load(fields + 5)
        rows, there = tl.load(fields + 1), tl.load(fields + 3)
        src_ptr, src_row = landing_ptr, there
        if peer == rank:
            src_ptr, src_row = a_ptr, tl.load(fields + 2)
        else:
            wait(arrived_ptr + peer * E + expert, tl.load(goals_ptr + peer * E + expert), tries, notes_ptr)
        for at in range(within * UNIT, within * UNIT + UNIT, ROWS):
            _copy_rows(src_ptr, src_row + at, out_ptr, there + at, rows - at, width, ROWS, COLS, ALIGN)
    total = tl.load(recv_ptr + WIDTH * Q)
    for unit in range(block, tl.cdiv(max_rows - total, ROWS), blocks):
        first = total + unit * ROWS
        _zero_rows(out_ptr, first, max_rows - first, width, ROWS, COLS, ALIGN)
