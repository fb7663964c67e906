"""These kernels fuse grouped GEMMs with an all-to-all of their rows, whose counts are known only on devices.

    dispatch_kernel   some blocks push rows first; then all blocks multiply rows that arrived
    combine_kernel    most blocks multiply, and signal the owners of the rows; the others pull this rank's products from peers,
                      and multiplying blocks join them when they have no tiles left

weft.kernels.segments computes the layout, and weft.kernels.exchange launches the kernels. weft.kernels.ragged_rows moves rows,
waits for them and signals them.

    dispatch                                           combine
    rank r, pushing block        rank p                rank r, multiplying block        rank p, pulling block
    push a unit of a segment                           tile -> product
    signal arrived  ~~~~~~~~~~>  wait: all units       signal arrived  ~~~~~~~~~~~~~~>  wait: all tiles of a segment
    ... then tiles               of a tile's segments  own rows -> out                  product of r -> out
                                 multiply -> out

A tile has rows of one expert, from any ranks, and signals or waits for each of these ranks. Only an expert's last tile may be
short. In a dispatch, a tile with only this rank's rows reads a. This rank's rows that share a tile with other ranks' rows are
also pushed into its own landing buffer, so that a tile's rows are contiguous. Free blocks draw the last tiles of a dispatch
from a counter, because pushing blocks finish before multiplying blocks.

Whole tiles are stored by TMA. In a combine, the stores overlap with the multiplication of the next tile, and a block publishes
a tile after that. It still waits for the stores first.

A waiting block never delays the work that it waits for. Pushing blocks do not wait until they have pushed everything, here and
on every peer. Multiplying blocks of a combine never wait, and precede pulling blocks. They join in pulling at the end, if all
of them have started.

Zeros below the rows that arrive are stored between tiles, when memory is idle. Once a wait has given up, late rows and
everything after them are NaN, since only a later call raises the error.

b is [experts, ., .]; either of the last two dimensions may be contiguous. A gated dispatch multiplies by 2 N columns and stores
silu(left half) * right half. One block computes both tiles, which saves writing and reading the product (3 x 235 MB for a
Mixtral layer's 8192 rows). FP8 rows are sent with their scales, under the same flags, and are multiplied as in
weft.kernels.gemm_kernel.
Legend: N columns are stored, K is each GEMM's.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from weft.kernels.gemm_kernel import (
    add_product,
    finish_before_next_product,
    load_b,
    load_factors,
    locate_tile,
    multiply,
)
from weft.kernels.ragged_rows import (
    await_rows,
    fill_below,
    fill_of,
    in_time,
    publish_rows,
    pull_rows,
    push_rows,
    store_rows,
)
from weft.kernels.scaled import operand, scale_rows, scaled, scales_of_expert
from weft.kernels.segments import PART_FIELDS, TILE_FIELDS, tile_of
from weft.triton.flags import descriptors_too


class GroupedProduct(NamedTuple):
    """GroupedProduct holds the parameters that a multiplying kernel is compiled for: its constexpr argument P.

    BLOCK_M: equals TILE_ROWS of M.
    GATED: the kernel stores silu(left half) * right half.
    COUNTED: False, because these kernels publish no tile within the multiplication of the next one.

    The other fields are as in weft.kernels.gemm_kernel.Variant.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP: int
    B_TRANSPOSED: bool
    GATED: bool
    ASYNCHRONOUS: bool
    RECIPE: str = ""
    PROMOTED: bool = False
    PAIRS: bool = False
    COUNTED: bool = False


@triton.jit
def _multiply(a_desc, b_desc, row, expert, col, N, K, scales, rows, P: tl.constexpr):
    """Return one tile of the product with the expert's b in float32. scales, rows: FP8 scales of the expert and of the tile's
    rows."""
    acc, steps = tl.full((P.BLOCK_M, P.BLOCK_N), 0, tl.float32), tl.cdiv(K, P.BLOCK_K)
    acc = multiply(a_desc, b_desc, acc, row, expert, col, 0, steps, K, scales, rows, None, P.BLOCK_N, P)
    if P.RECIPE == "rowwise":
        cols = col + tl.arange(0, P.BLOCK_N)
        acc = scaled(acc, scales, rows, cols, cols < N)
    return acc


@triton.jit
def _multiply_gated(a_desc, b_desc, row, expert, col, N, K, scales, rows, P: tl.constexpr):
    """Return silu of one tile times the tile N columns further right, in float32. scales, rows: as for _multiply."""
    gate = tl.full((P.BLOCK_M, P.BLOCK_N), 0, tl.float32)
    up = tl.full((P.BLOCK_M, P.BLOCK_N), 0, tl.float32)
    if P.PROMOTED:
        gate, up = _promote_gated(a_desc, b_desc, gate, up, row, expert, col, N, K, scales, rows, P)
    else:
        for step in range(tl.cdiv(K, P.BLOCK_K)):
            k = step * P.BLOCK_K
            a = operand(a_desc.load([row, k]))
            gate = tl.dot(a, load_b(b_desc, expert, k, col, P), gate)
            up = tl.dot(a, load_b(b_desc, expert, k, N + col, P), up)
    if P.RECIPE == "rowwise":
        cols = col + tl.arange(0, P.BLOCK_N)
        gate = scaled(gate, scales, rows, cols, cols < N)
        up = scaled(up, scales, rows, N + cols, cols < N)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _promote_gated(a_desc, b_desc, gate, up, row, expert, col, N, K, scales, rows, P: tl.constexpr):
    """Return both sums, scaling and adding each step's products in float32. With PAIRS a step's product for `up` is added in
    the next step, while tensor cores multiply for `gate`."""
    none = tl.full((P.BLOCK_M, P.BLOCK_N), 0, tl.float32)
    late, late_factor = none, tl.full((P.BLOCK_M,), 0, tl.float32)
    steps = tl.cdiv(K, P.BLOCK_K)
    for step in range(steps):
        k = step * P.BLOCK_K
        a = operand(a_desc.load([row, k]))
        factor = load_factors(scales, rows, step, steps, col, P)
        product = tl.dot(a, load_b(b_desc, expert, k, col, P), none)
        if P.PAIRS:
            up = finish_before_next_product(add_product(up, late, late_factor, P), P)
        late_factor = load_factors(scales, rows, step, steps, N + col, P)
        late = tl.dot(a, load_b(b_desc, expert, k, N + col, P), none)
        gate = add_product(gate, product, factor, P)
        if not P.PAIRS:
            up = add_product(up, late, late_factor, P)
    if P.PAIRS:
        up = add_product(up, late, late_factor, P)
    return gate, up


@triton.jit(do_not_specialize=["tries", "rank", "movers", "keep_own"])
def dispatch_kernel(
    a_desc, landing_desc, b_desc, out_desc, a_ptr, pushed_scales, out_ptr, landing, arrived, tables, scales, scales_pitch,
    tries, rank, N, K, max_rows, movers, keep_own, M: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Push rows and multiply rows that arrive.

    pushed_scales: CopiedScales of FP8 rows. scales: Scales of FP8 operands. scales_pitch: elements from the scales of one
    expert's b to the next expert's.
    """
    block, blocks = tl.program_id(0) - movers, tl.num_programs(0)
    if block < 0:
        push_rows(block + movers, movers, a_ptr, landing, pushed_scales, arrived, tables, rank, K, keep_own, M)
    row_tiles, col_tiles = tl.load(tables.tiles + TILE_FIELDS * (M.Q - 1)), tl.cdiv(N, P.BLOCK_N)
    tiles = row_tiles * col_tiles
    # The first tiles are assigned statically, which costs nothing; the last two rounds are drawn from a counter.
    own = tl.maximum(tiles // blocks - 2, 0) * (blocks - movers)
    tile = block
    if (block < 0) | (block >= own):
        tile = own + tl.atomic_add(tables.turn, 1, sem="relaxed", scope="gpu")
    below = tl.load(tables.turns)
    units = tl.cdiv(max_rows - below, M.ROWS) * tl.cdiv(N, M.COLS)
    unit = tl.program_id(0)
    each = tl.cdiv(units, tl.maximum(tiles, 1))
    known, came = tl.full((), 0, tl.int64), in_time(tables.notes)
    while tile < tiles:
        times = tl.minimum(each, tl.cdiv(units - unit, blocks))
        unit = fill_below(out_ptr, below, max_rows, N, unit, blocks, times, fill_of(came), M)
        row_tile, col_tile = locate_tile(tile, row_tiles, col_tiles, P.GROUP)
        expert, row, valid = tile_of(tables.tiles, row_tile, M.Q, M.TILE_ROWS, True)
        part = tables.parts + PART_FIELDS * (expert * M.W + rank)
        first = tl.load(part)
        src_row, src_desc = row, landing_desc
        is_own = (first <= row) & (first + tl.load(part + 1) >= row + valid)
        if is_own:
            src_row, src_desc = tl.load(part + 2) + row - first, a_desc
        else:
            known, came = await_rows(row, valid, expert, known, came, arrived.local, tables, tries, M)
            if P.ASYNCHRONOUS:
                came = descriptors_too(came)
        col, rows, its_scales = col_tile * P.BLOCK_N, None, None
        if P.RECIPE != "":
            rows = scale_rows(scales, is_own == 0, src_row, valid, P.BLOCK_M)
            its_scales = scales_of_expert(scales, expert, scales_pitch)
        if P.GATED:
            acc = _multiply_gated(src_desc, b_desc, src_row, expert, col, N, K, its_scales, rows, P)
        else:
            acc = _multiply(src_desc, b_desc, src_row, expert, col, N, K, its_scales, rows, P)
        acc += fill_of(came)
        if valid == P.BLOCK_M:
            out_desc.store([row, col], acc.to(out_ptr.dtype.element_ty))
        else:
            store_rows(out_ptr, row, acc, 0, valid, col, N, M.ALIGN)
        tile += blocks - movers
        if tile >= own:
            tile = own + tl.atomic_add(tables.turn, 1, sem="relaxed", scope="gpu")
    times = tl.cdiv(units - unit, blocks)
    fill_below(out_ptr, below, max_rows, N, unit, blocks, times, fill_of(came), M)


@triton.jit(do_not_specialize=["tries", "rank", "movers"])
def combine_kernel(
    a_desc, b_desc, product_desc, out_ptr, product, arrived, tables, scales, scales_pitch,
    tries, rank, N, K, max_rows, movers, M: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Multiply rows and pull products. scales, scales_pitch: as for dispatch_kernel."""
    block, blocks = tl.program_id(0), tl.num_programs(0) - movers
    pulls, fill = 1, fill_of(in_time(tables.notes))
    if block < blocks:
        tl.atomic_add(tables.turn + 1, 1, sem="relaxed", scope="gpu")
        row_tiles, col_tiles = tl.load(tables.tiles + TILE_FIELDS * (M.Q - 1)), tl.cdiv(N, P.BLOCK_N)
        tiles = row_tiles * col_tiles
        below = tl.load(tables.turns)
        units = tl.cdiv(max_rows - below, M.ROWS) * tl.cdiv(N, M.COLS)
        unit = block
        each = tl.cdiv(units, tl.maximum(tiles, 1))
        # The previous tile: its expert, first row and number of rows.
        last_expert, last_row, last_rows = 0, 0, 0
        for tile in range(block, tiles, blocks):
            times = tl.minimum(each, tl.cdiv(units - unit, blocks))
            unit = fill_below(out_ptr, below, max_rows, N, unit, blocks, times, fill, M)
            row_tile, col_tile = locate_tile(tile, row_tiles, col_tiles, P.GROUP)
            expert, row, valid = tile_of(tables.tiles, row_tile, M.Q, M.TILE_ROWS, False)
            col, rows, its_scales = col_tile * P.BLOCK_N, None, None
            if P.RECIPE != "":
                rows = scale_rows(scales, False, row, valid, P.BLOCK_M)
                its_scales = scales_of_expert(scales, expert, scales_pitch)
            acc = _multiply(a_desc, b_desc, row, expert, col, N, K, its_scales, rows, P)
            publish_rows(last_expert, last_row, last_rows, arrived, tables, M.W, P.ASYNCHRONOUS)
            last_expert, last_row, last_rows = expert, row, valid
            own = tables.parts + PART_FIELDS * (expert * M.W + rank)
            first, there = tl.load(own), tl.load(own + 2)
            low, high = tl.maximum(first - row, 0), tl.minimum(first + tl.load(own + 1) - row, valid)
            if (low > 0) | (high < valid):
                if valid == P.BLOCK_M:
                    product_desc.store([row, col], acc.to(out_ptr.dtype.element_ty))
                else:
                    store_rows(product.local, row, acc, 0, valid, col, N, M.ALIGN)
            if low < high:
                landing = there + row - first
                store_rows(out_ptr, landing, acc, low, tl.minimum(high, max_rows - landing), col, N, M.ALIGN)
        publish_rows(last_expert, last_row, last_rows, arrived, tables, M.W, P.ASYNCHRONOUS)
        times = tl.cdiv(units - unit, blocks)
        fill_below(out_ptr, below, max_rows, N, unit, blocks, times, fill, M)
        # Pull only once all multiplying blocks are resident: a block that waits here would occupy an SM that they need.
        pulls = (tl.atomic_add(tables.turn + 1, 0, sem="relaxed", scope="gpu") >= blocks).to(tl.int32)
    if pulls != 0:
        pull_rows(out_ptr, product, arrived.local, tables, tries, N, M)
