"""This is the device code of the GEMM kernel, whose persistent blocks take tiles in order. weft.kernels.gemm launches it.

gemm_kernel          all whole tiles, then the halves of the remaining ones
  locate_tile        row tile and column tile of a tile
  _compute_tile      one tile: wait, multiply, add, store
    multiply             product, summed by tensor cores
    _multiply_promoted   product, summed in float32, for FP8 operands
    _store_by_tma        store a tile, also at a peer
  _publish           add to the flag of a tile's part

To publish a tile is to add to its flag, so that waiters may read it. A block publishes a tile `publish_step` steps into the
loop over K of its next tile (weft.kernels.gemm computes the number), or immediately if there is no next tile. By then the TMA
stores have normally completed, here or at a peer, and `_publish` does not stall:

    tile 0: load, dot ... -> store ..........> written
    tile 1:                  load, dot, dot ... -> publish tile 0 -> dot ... -> store

Hopper's tensor cores sum products of FP8 operands with about 14 bits. Where sums need float32 precision, or each block of K has
scales, each step of 128 is a separate product, which CUDA cores scale and add in float32. Two steps alternate (PAIRS), so that
tensor cores multiply meanwhile:

    tensor cores    even step        odd step       |  even step
    CUDA cores      (wait)      +odd  +even, loads  |  (wait)      +odd ...
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.kernels.scaled import column_in_block, operand, rows_in_block, scale_rows, scaled
from weft.triton.flags import wait_gates

ROW_FIELDS, SLICE_FIELDS, OUT_FIELDS, ADD_FIELDS = map(tl.constexpr, (7, 3, 2, 5))
"""The number of columns of the tables rows, slices, outs and adds. weft.kernels.gemm.Tables lists the columns in order."""


class Variant(NamedTuple):
    """A Variant holds the parameters that the kernel is compiled for: its constexpr argument V.

    BLOCK_M: the rows of a tile.
    BLOCK_N: the columns of a tile.
    BLOCK_K: the length of a step over K.
    GROUP: the number of row tiles that take turns on the same columns.
    TWO_SOURCES: a is in two tensors, and each row tile reads one of them.
    B_TRANSPOSED: b is stored with K as its contiguous dimension.
    GATED: tiles wait for flags.
    INNER: tiles also wait for flags between slices of K.
    ADDED: the product of another a and b is added.
    COUNTED: tiles add to flags when they are done.
    ADDRESSED: row tiles may be stored at addresses outside `out`.
    OUT_TMA: tiles whose rows are all valid are stored by TMA.
    ASYNCHRONOUS: descriptors move tiles by TMA hardware, which other accesses of a thread are not ordered with.
    ALIGN_BYTES: a number that divides the addresses of all stored rows.
    ADDS: tiles add data that this rank has received.
    ADD_STAGES: one more than the number of loads of added data in flight.
    DIVIDE_BY: the divisor of the results of tiles that add.
    HALVES: the tiles of the last wave are computed as left and right halves.
    RECIPE: the recipe of the scales of FP8 operands; empty for other operands.
    PROMOTED: each step over K is added to the sum in float32 by CUDA cores.
    PAIRS: an iteration of the loop over K computes two steps.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP: int
    TWO_SOURCES: bool
    B_TRANSPOSED: bool
    GATED: bool
    INNER: bool
    ADDED: bool
    COUNTED: bool
    ADDRESSED: bool
    OUT_TMA: bool
    ASYNCHRONOUS: bool
    ALIGN_BYTES: int
    ADDS: bool
    ADD_STAGES: int
    DIVIDE_BY: int
    HALVES: bool
    RECIPE: str = ""
    PROMOTED: bool = False
    PAIRS: bool = False


class Pointers(NamedTuple):
    """Pointers to the tables of a step (weft.kernels.gemm.Tables), and to the status that records a wait which gave up."""

    adds: Any
    rows: Any
    slices: Any
    outs: Any
    gates: Any
    needs: Any
    counts: Any
    status: Any


class Descriptors(NamedTuple):
    """Descriptors holds the TMA descriptors for tiles of one width.

    The kernel builds this tuple, because Triton 3.6 accepts no tuple of descriptors from the host.
    """

    a0: Any
    a1: Any
    b: Any
    added_a: Any
    added_b: Any
    out: Any
    scattered: Any
    adds: Any


class UnpublishedTile(NamedTuple):
    """An UnpublishedTile is the tile that a block has stored last and has yet to publish.

    flag_address: the address of its flag; 0 if there is nothing to publish.
    amount: the number to add to the flag.
    step: the step over K of the next tile at which to add it.
    """

    flag_address: Any
    amount: Any
    step: Any


@triton.jit
def locate_tile(tile, row_tiles, col_tiles, GROUP: tl.constexpr):
    """Return the row tile and the column tile of a tile. Row tiles take turns in groups, so that concurrent blocks share rows
    of a and columns of b in the L2 cache."""
    group = tile // (GROUP * col_tiles)
    group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
    tile_of_group = tile - group * GROUP * col_tiles
    return group * GROUP + tile_of_group % group_rows, tile_of_group // group_rows


@triton.jit
def _wait(gates_ptr, tables, tries, ASYNCHRONOUS: tl.constexpr):
    """Wait for the gates [first, last). Both numbers are stored at gates_ptr."""
    wait_gates(tables.gates, tables.needs, tl.load(gates_ptr), tl.load(gates_ptr + 1), tries, tables.status, ASYNCHRONOUS)


@triton.jit
def _publish(flag_address, amount, ASYNCHRONOUS: tl.constexpr):
    """Add an amount to a flag after all earlier stores of this block have been written. Address 0 means no flag."""
    if ASYNCHRONOUS:
        # Each thread waits until the TMA stores that it issued have been written. Triton itself only waits until they have been
        # read from shared memory. Then the block synchronises. This is one piece of assembly, because Triton does not hoist
        # loads in a loop that contains one of its own barriers.
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; bar.sync 0; mov.b32 $0, $1;", "=r,r", [amount], tl.int32, False, 1
        )
    else:
        tl.debug_barrier()
    if flag_address != 0:
        tl.atomic_add(flag_address.to(tl.pointer_type(tl.int32)), amount, sem="release", scope="sys")


@triton.jit
def load_b(b_desc, expert, k, col, V: tl.constexpr):
    """Load BLOCK_K x columns of b from row k and column col on. expert: the first index of a three-dimensional b, else None."""
    if expert is None:
        tile = b_desc.load([col, k]).T if V.B_TRANSPOSED else b_desc.load([k, col])
    elif V.B_TRANSPOSED:
        tile = b_desc.load([expert, col, k]).reshape(V.BLOCK_N, V.BLOCK_K).T
    else:
        tile = b_desc.load([expert, k, col]).reshape(V.BLOCK_K, V.BLOCK_N)
    return operand(tile)


@triton.jit
def _multiply_step(a_desc, b_desc, acc, a_row, k, expert, col, V: tl.constexpr):
    """Return `acc` plus the product of one step over K: rows of a from a_row on, BLOCK_K of K from k on, columns of b from col
    on."""
    return tl.dot(operand(a_desc.load([a_row, k])), load_b(b_desc, expert, k, col, V), acc)


@triton.jit
def multiply(
    a_desc, b_desc, acc, a_row, expert, col, first, last, K, scales, rows, unpublished,
    BLOCK_N: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Return `acc` plus a tile's product over steps [first, last) of K, and publish the unpublished tile meanwhile.

    expert: as for load_b. scales, rows: Scales of FP8 operands, and RowScales of the tile's rows.
    """
    if V.PROMOTED:
        return _multiply_promoted(
            a_desc, b_desc, acc, a_row, expert, col, first, last, K, scales, rows, unpublished, BLOCK_N, V
        )
    for step in range(first, last):
        if V.COUNTED:  # noqa: SIM102 - a constexpr, then a value of the device
            if (step == unpublished.step) & (unpublished.flag_address != 0):
                _publish(unpublished.flag_address, unpublished.amount, V.ASYNCHRONOUS)
        acc = _multiply_step(a_desc, b_desc, acc, a_row, step * V.BLOCK_K, expert, col, V)
    return acc


@triton.jit
def add_product(acc, product, factor, V: tl.constexpr):
    """Return a sum plus the product of one step over K, whose rows are multiplied by their factors if scales are blockwise."""
    if V.RECIPE == "blockwise":
        acc += product * factor[:, None]
    else:
        acc += product
    return acc


@triton.jit
def finish_before_next_product(acc, V: tl.constexpr):
    """Return the sum, and make compilers compute it before the next product is issued. Otherwise they add the previous product
    after the next one, which needs more registers, and ptxas waits for each instruction of a product separately."""
    if V.ASYNCHRONOUS:
        acc = tl.inline_asm_elementwise("", "=f,0", [acc], tl.float32, False, 1)
    return acc


@triton.jit
def _load_row_scales(rows, step, last, V: tl.constexpr):
    """Return the blockwise scales of the rows of a step's product; zeros for other recipes. The step is one block of K."""
    factor = tl.full((V.BLOCK_M,), 0, tl.float32)
    if V.RECIPE == "blockwise":
        factor = rows_in_block(rows, step, last)
    return factor


@triton.jit
def _apply_column_scale(factor, scales, step, last, col, V: tl.constexpr):
    """Return the factors of the rows times the scale of the block of b that the columns from col on are in."""
    if V.RECIPE == "blockwise":
        factor *= column_in_block(scales, step, last, col)
    return factor


@triton.jit
def load_factors(scales, rows, step, last, col, V: tl.constexpr):
    """Return the factor of each row of a step's product with blockwise scales: the row's scale times that of the block of b."""
    return _apply_column_scale(_load_row_scales(rows, step, last, V), scales, step, last, col, V)


@triton.jit
def _multiply_promoted(
    a_desc, b_desc, acc, a_row, expert, col, first, last, K, scales, rows, unpublished,
    BLOCK_N: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Do as multiply, but scale and add each step's product in float32."""
    zeros = tl.full((V.BLOCK_M, BLOCK_N), 0, tl.float32)
    odd, odd_factor = zeros, tl.full((V.BLOCK_M,), 0, tl.float32)
    for step in range(first, last, 1 + V.PAIRS):
        if V.COUNTED:  # noqa: SIM102 - a constexpr, then a value of the device
            if (
                (step <= unpublished.step)
                & (unpublished.step < tl.minimum(step + 1 + V.PAIRS, last))
                & (unpublished.flag_address != 0)
            ):
                _publish(unpublished.flag_address, unpublished.amount, V.ASYNCHRONOUS)
        factor = _load_row_scales(rows, step, last, V)
        product = _multiply_step(a_desc, b_desc, zeros, a_row, step * V.BLOCK_K, expert, col, V)
        if V.PAIRS:
            acc = finish_before_next_product(add_product(acc, odd, odd_factor, V), V)
            odd_factor = load_factors(scales, rows, step + 1, last, col, V)
            # An odd step past the last one loads zeros from beyond K.
            k = tl.where(step + 1 < last, (step + 1) * V.BLOCK_K, K)
            odd = _multiply_step(a_desc, b_desc, zeros, a_row, k, expert, col, V)
        # The scale of b is loaded after the odd product: before it, the compiler would scale the even one there, while tensor
        # cores wait.
        acc = add_product(acc, product, _apply_column_scale(factor, scales, step, last, col, V), V)
    if V.PAIRS:
        acc = add_product(acc, odd, odd_factor, V)
    return acc


@triton.jit
def _add_sources(desc, add_entry, acc, col, STAGES: tl.constexpr, DIVIDE_BY: tl.constexpr):
    """Add a tile's sources in order, then divide. A tile without sources is returned unchanged. add_entry: its row of adds."""
    sources = tl.load(add_entry + 2)
    if sources > 0:
        row = tl.load(add_entry + 3)
        # Rows are computed: with a table, the dependent load would halve the number of sources in flight.
        pitch = tl.load(add_entry + 4)
        for source in tl.range(0, sources, num_stages=STAGES):
            acc += desc.load([row + source * pitch, col]).to(tl.float32)
        if DIVIDE_BY != 1:
            acc = acc / DIVIDE_BY
    return acc


@triton.jit
def _store_rows(first_row_ptr, result, valid, col, N, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store the valid rows of a tile. The first one is stored at first_row_ptr."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = col + tl.arange(0, BLOCK_N)[None, :]
    tl.store(first_row_ptr + rows.to(tl.int64) * stride + cols, result, mask=(rows < valid) & (cols < N))


@triton.jit
def _find_first_row(out_entry, out_ptr, out_row, out_stride, ADDRESSED: tl.constexpr, ALIGN_BYTES: tl.constexpr):
    """Return the pointer to a tile's first row: its own address if that is not 0, else its row of out.

    out_entry: its row of the table outs.
    """
    first_row_ptr = out_ptr + out_row.to(tl.int64) * out_stride
    if ADDRESSED:
        # The compiler knows no alignment of an address from a table. Without the hint it stores element by element.
        address = tl.load(out_entry)
        first_row_ptr = tl.where(address == 0, first_row_ptr, address.to(tl.pointer_type(out_ptr.dtype.element_ty)))
        first_row_ptr = tl.multiple_of(first_row_ptr, ALIGN_BYTES)
    return first_row_ptr


@triton.jit
def _store_by_tma(descs, out_entry, out_row, col, result, BLOCK_N: tl.constexpr, V: tl.constexpr):
    """Store a tile by TMA: in its slot of the scattered tiles if it has one (weft.kernels.gemm), else in out.

    out_entry: its row of the table outs.
    """
    if V.ADDRESSED:
        slot = tl.load(out_entry + 1).to(tl.int32)
        # One store serves both cases, so that it needs one buffer in shared memory.
        desc = descs.out
        if slot >= 0:
            desc = descs.scattered
        row = tl.where(slot < 0, out_row, 0)
        desc.store([tl.maximum(slot, 0), row, col], result.reshape(1, V.BLOCK_M, BLOCK_N))
    else:
        descs.out.store([out_row, col], result)


@triton.jit
def _locate_in_order(tile, row_tiles, first_adding, col_tiles, GROUP: tl.constexpr, ADDS: tl.constexpr):
    """Do as locate_tile, with groups that never mix row tiles that add and row tiles that a peer may wait for.

    first_adding: the first row tile that adds. All row tiles from it on add.
    """
    if not ADDS:
        return locate_tile(tile, row_tiles, col_tiles, GROUP)
    adds = tile >= first_adding * col_tiles
    first = tl.where(adds, first_adding, 0)
    tile -= first * col_tiles
    row_tile, col_tile = locate_tile(tile, tl.where(adds, row_tiles - first_adding, first_adding), col_tiles, GROUP)
    return row_tile + first, col_tile


@triton.jit
def _compute_tile(
    row_tile, col, descs, out_ptr, out_stride, N, K, added_K, tables, scales, tries, unpublished,
    BLOCK_N: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Wait, multiply, add and store the tile of a row tile whose first column is `col`; meanwhile publish the previous tile."""
    row_entry = tables.rows + ROW_FIELDS * row_tile
    a_row = tl.load(row_entry + 1)
    valid = tl.load(row_entry + 2)
    out_row = tl.load(row_entry + 3)
    if V.GATED and not V.INNER:
        _wait(row_entry + 4, tables, tries, V.ASYNCHRONOUS)
    # One loop serves both sources: two loops would need two sets of pipeline buffers in shared memory.
    a_desc = descs.a0
    if V.TWO_SOURCES:  # noqa: SIM102 - a constexpr, then a value of the device
        if tl.load(row_entry) == 1:
            a_desc = descs.a1
    acc = tl.full((V.BLOCK_M, BLOCK_N), 0, tl.float32)
    rows = None
    if V.RECIPE != "":
        rows = scale_rows(scales, tl.load(row_entry) == 1, a_row, valid, V.BLOCK_M)
    if V.INNER:
        steps_done = 0
        for number in range(tl.load(row_entry + 4), tl.load(row_entry + 5)):
            slice_entry = tables.slices + SLICE_FIELDS * number
            end = tl.load(slice_entry)
            _wait(slice_entry + 1, tables, tries, V.ASYNCHRONOUS)
            acc = multiply(a_desc, descs.b, acc, a_row, None, col, steps_done, end, K, scales, rows, unpublished, BLOCK_N, V)
            steps_done = end
    elif V.ADDED:
        # One loop serves both products, because two would need two sets of pipeline buffers in shared memory.
        for product in range(2):
            first, second, inner, flag_address = descs.a0, descs.b, K, unpublished.flag_address
            if product == 1:
                first, second, inner = descs.added_a, descs.added_b, added_K
                flag_address = tl.full((), 0, tl.int64)  # the previous tile is published
            once = UnpublishedTile(flag_address, unpublished.amount, unpublished.step)
            steps = tl.cdiv(inner, V.BLOCK_K)
            acc = multiply(first, second, acc, a_row, None, col, 0, steps, inner, scales, rows, once, BLOCK_N, V)
    else:
        steps = tl.cdiv(K, V.BLOCK_K)
        acc = multiply(a_desc, descs.b, acc, a_row, None, col, 0, steps, K, scales, rows, unpublished, BLOCK_N, V)
    if (V.RECIPE == "tensorwise") or (V.RECIPE == "rowwise"):
        cols = col + tl.arange(0, BLOCK_N)
        acc = scaled(acc, scales, rows, cols, cols < N)
    if V.ADDS:
        add_entry = tables.adds + ADD_FIELDS * row_tile
        if V.GATED:
            _wait(add_entry, tables, tries, V.ASYNCHRONOUS)
        acc = _add_sources(descs.adds, add_entry, acc, col, V.ADD_STAGES, V.DIVIDE_BY)
    result = acc.to(out_ptr.dtype.element_ty)
    out_entry = tables.outs + OUT_FIELDS * row_tile
    all_valid = valid == V.BLOCK_M
    if V.OUT_TMA:  # noqa: SIM102 - a constexpr, then a value of the device
        if all_valid:
            _store_by_tma(descs, out_entry, out_row, col, result, BLOCK_N, V)
    if (not V.OUT_TMA) | (not all_valid):
        first_row_ptr = _find_first_row(out_entry, out_ptr, out_row, out_stride, V.ADDRESSED, V.ALIGN_BYTES)
        _store_rows(first_row_ptr, result, valid, col, N, out_stride, V.BLOCK_M, BLOCK_N)


@triton.jit
def _load_flag_address(row_tile, tables):
    """Return the address of a row tile's flag, or 0 if it has none."""
    count = tl.load(tables.rows + ROW_FIELDS * row_tile + 6)
    return tl.load(tables.counts + count, mask=count >= 0, other=0)


@triton.jit(do_not_specialize=["whole_tile_amount", "tries", "publish_step"])
def gemm_kernel(
    a0_desc, a1_desc, b_desc, b_half_desc, added_a_desc, added_b_desc, added_b_half_desc, out_desc, out_half_desc,
    scattered_desc, scattered_half_desc, out_ptr, adds_desc, adds_half_desc, tables, scales, whole_tile_amount, tries,
    publish_step, whole_tiles, row_tiles, first_adding, N, K, added_K, out_stride, V: tl.constexpr,
):  # fmt: skip
    """Compute the first `whole_tiles` tiles as they are, and with HALVES the left and the right half of each remaining tile.

    x_half_desc: descriptors of half tiles.
    tables: Pointers.
    scales: Scales of FP8 operands, or None.
    added_K: K of the product that is added, or 0.
    whole_tile_amount: the number that a whole tile adds to its flag. A half tile adds half of it.
    publish_step: the step over K at which a tile publishes the previous one.
    first_adding: the first row tile that adds; as many as there are row tiles if none does.
    V: a Variant.
    """
    block, blocks = tl.program_id(0), tl.num_programs(0)
    col_tiles = tl.cdiv(N, V.BLOCK_N)
    descs = Descriptors(a0_desc, a1_desc, b_desc, added_a_desc, added_b_desc, out_desc, scattered_desc, adds_desc)
    flag_address, amount = tl.full((), 0, tl.int64), whole_tile_amount
    for tile in range(block, whole_tiles, blocks):
        row_tile, col_tile = _locate_in_order(tile, row_tiles, first_adding, col_tiles, V.GROUP, V.ADDS)
        col, unpublished = col_tile * V.BLOCK_N, UnpublishedTile(flag_address, amount, publish_step)
        _compute_tile(
            row_tile, col, descs, out_ptr, out_stride, N, K, added_K, tables, scales, tries, unpublished, V.BLOCK_N, V
        )
        if V.COUNTED:
            flag_address = _load_flag_address(row_tile, tables)
    if V.HALVES:
        HALF: tl.constexpr = V.BLOCK_N // 2
        descs = Descriptors(
            a0_desc, a1_desc, b_half_desc, added_a_desc, added_b_half_desc, out_half_desc, scattered_half_desc, adds_half_desc
        )
        for tile in range(2 * whole_tiles + block, 2 * row_tiles * col_tiles, blocks):
            row_tile, col_tile = _locate_in_order(tile // 2, row_tiles, first_adding, col_tiles, V.GROUP, V.ADDS)
            col, unpublished = col_tile * V.BLOCK_N + tile % 2 * HALF, UnpublishedTile(flag_address, amount, publish_step)
            if col < N:
                _compute_tile(
                    row_tile, col, descs, out_ptr, out_stride, N, K, added_K, tables, scales, tries, unpublished, HALF, V
                )
            elif V.COUNTED:
                _publish(flag_address, amount, V.ASYNCHRONOUS)
            if V.COUNTED:
                flag_address, amount = _load_flag_address(row_tile, tables), whole_tile_amount // 2
    if V.COUNTED:
        _publish(flag_address, amount, V.ASYNCHRONOUS)
