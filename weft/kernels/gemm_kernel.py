"""The GEMM kernel's device code: persistent blocks that take tiles in order (weft.kernels.gemm launches them).

gemm_kernel    all whole tiles, then the halves of the remaining ones
_tile          one tile: wait, multiply, add, store             _put        store a whole tile by TMA, also at peers
place_of       position of a tile                               _publish    add to the flag of a tile's part
_multiply      product, summed by tensor cores                  promote     product, summed in float32, for FP8 operands

A block publishes a tile `publish_at` steps into the loop over K of its next tile (weft.kernels.gemm computes the number), or
immediately if there is no next tile. By then the TMA stores have normally completed, here or at a peer, and `_publish` does not
stall:

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
"""Columns of the tables rows, slices, outs and adds of weft.kernels.gemm.Tables."""


class Variant(NamedTuple):
    """What the kernel is compiled for: its constexpr argument V.

    RECIPE: of the scales of FP8 operands; empty for other operands. PROMOTED: each step over K is added to the sum in float32.
    PAIRS: two steps in each iteration.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP: int
    TWO_SOURCES: bool
    B_TRANSPOSED: bool
    GATED: bool
    INNER: bool
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
    """The tables of a step (weft.kernels.gemm.Tables), and the status that records waits which gave up."""

    adds: Any
    rows: Any
    slices: Any
    outs: Any
    gates: Any
    needs: Any
    counts: Any
    status: Any


class Descriptors(NamedTuple):
    """The TMA descriptors for tiles of one width. The kernel builds this tuple, because Triton 3.6 accepts no tuple of
    descriptors from the host."""

    a0: Any
    a1: Any
    b: Any
    out: Any
    far: Any
    adds: Any


class Unpublished(NamedTuple):
    """The tile that a block stored last: the address of its flag, the number to add, and the step over K of the next tile at
    which to add it."""

    flag: Any
    by: Any
    step: Any


@triton.jit
def place_of(tile, row_tiles, col_tiles, GROUP: tl.constexpr):
    """Return the row tile and the column tile of a tile. Row tiles take turns in groups, so that concurrent blocks share rows
    of a and columns of b in the L2 cache."""
    group = tile // (GROUP * col_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = tile - group * GROUP * col_tiles
    return group * GROUP + within % height, within // height


@triton.jit
def _wait(pair_ptr, tables, tries, ASYNCHRONOUS: tl.constexpr):
    """Wait for the gates [first, last); both numbers are stored at pair_ptr."""
    wait_gates(tables.gates, tables.needs, tl.load(pair_ptr), tl.load(pair_ptr + 1), tries, tables.status, ASYNCHRONOUS)


@triton.jit
def _publish(flag, by, ASYNCHRONOUS: tl.constexpr):
    """Add `by` to the flag at an address after all earlier stores of this block have been written. Address 0: no flag."""
    if ASYNCHRONOUS:
        # Each thread waits until the TMA stores that it issued have been written. Triton itself only waits until they have been
        # read from shared memory. Then the block synchronises. This is one piece of assembly, because Triton does not hoist
        # loads in a loop that contains one of its own barriers.
        tl.inline_asm_elementwise("cp.async.bulk.wait_group 0; bar.sync 0; mov.b32 $0, $1;", "=r,r", [by], tl.int32, False, 1)
    else:
        tl.debug_barrier()
    if flag != 0:
        tl.atomic_add(flag.to(tl.pointer_type(tl.int32)), by, sem="release", scope="sys")


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
def _product(a_desc, b_desc, acc, a_row, k, expert, col, V: tl.constexpr):
    """Return `acc` plus the product of one step over K: rows of a from a_row on, columns of a from k on, columns of b from col
    on."""
    return tl.dot(operand(a_desc.load([a_row, k])), load_b(b_desc, expert, k, col, V), acc)


@triton.jit
def _multiply(a_desc, b_desc, acc, a_row, col, first, last, unpublished, V: tl.constexpr):
    """Return `acc` plus a tile's product over steps [first, last) of K: rows from a_row on, columns from col on."""
    for step in range(first, last):
        if V.COUNTED:  # noqa: SIM102 - a constexpr, then a value of the device
            if (step == unpublished.step) & (unpublished.flag != 0):
                _publish(unpublished.flag, unpublished.by, V.ASYNCHRONOUS)
        acc = _product(a_desc, b_desc, acc, a_row, step * V.BLOCK_K, None, col, V)
    return acc


@triton.jit
def plus(acc, product, factor, V: tl.constexpr):
    """Return a sum plus the product of one step over K, multiplied by its rows' scales if it has any."""
    if V.RECIPE == "blockwise":
        acc += product * factor[:, None]
    else:
        acc += product
    return acc


@triton.jit
def before_next(acc, V: tl.constexpr):
    """Return the tile, and make compilers compute it before the next product is issued. Otherwise they add the previous product
    after the next one, which needs more registers, and ptxas waits for each instruction of a product separately."""
    if V.ASYNCHRONOUS:
        acc = tl.inline_asm_elementwise("", "=f,0", [acc], tl.float32, False, 1)
    return acc


@triton.jit
def of_rows(rows, step, last, V: tl.constexpr):
    """Return the blockwise scales of the rows of a step's product. The step is one block of K."""
    factor = tl.full((V.BLOCK_M,), 0, tl.float32)
    if V.RECIPE == "blockwise":
        factor = rows_in_block(rows, step, last)
    return factor


@triton.jit
def with_column(factor, scales, step, last, col, V: tl.constexpr):
    """Return the factor of each row of a step's product: the row's scale times the scale of the block of b."""
    if V.RECIPE == "blockwise":
        factor *= column_in_block(scales, step, last, col)
    return factor


@triton.jit
def factor_of(scales, rows, step, last, col, V: tl.constexpr):
    """Return the factor of each row of a step's product with blockwise scales."""
    return with_column(of_rows(rows, step, last, V), scales, step, last, col, V)


@triton.jit
def promote(
    a_desc, b_desc, acc, a_row, expert, col, first, last, K, scales, rows, unpublished,
    BLOCK_N: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Do as _multiply, but scale and add each step's product in float32. expert: as for load_b."""
    none = tl.full((V.BLOCK_M, BLOCK_N), 0, tl.float32)
    odd, odd_factor = none, tl.full((V.BLOCK_M,), 0, tl.float32)
    for step in range(first, last, 1 + V.PAIRS):
        if V.COUNTED:  # noqa: SIM102 - a constexpr, then a value of the device
            if (step <= unpublished.step) & (unpublished.step < tl.minimum(step + 1 + V.PAIRS, last)) & (unpublished.flag != 0):
                _publish(unpublished.flag, unpublished.by, V.ASYNCHRONOUS)
        factor = of_rows(rows, step, last, V)
        product = _product(a_desc, b_desc, none, a_row, step * V.BLOCK_K, expert, col, V)
        if V.PAIRS:
            acc = before_next(plus(acc, odd, odd_factor, V), V)
            odd_factor = factor_of(scales, rows, step + 1, last, col, V)
            # An odd step past the last one loads zeros from beyond K.
            k = tl.where(step + 1 < last, (step + 1) * V.BLOCK_K, K)
            odd = _product(a_desc, b_desc, none, a_row, k, expert, col, V)
        # The scale of b is loaded after the odd product: before it, the compiler would scale the even one there, while tensor
        # cores wait.
        acc = plus(acc, product, with_column(factor, scales, step, last, col, V), V)
    if V.PAIRS:
        acc = plus(acc, odd, odd_factor, V)
    return acc


@triton.jit
def _add(desc, fields, acc, col, STAGES: tl.constexpr, DIVIDE_BY: tl.constexpr):
    """Add a tile's sources in order, then divide. A tile without sources is returned unchanged."""
    sources = tl.load(fields + 2)
    if sources > 0:
        row = tl.load(fields + 3)
        # Rows are computed: with a table, the dependent load would halve the number of sources in flight.
        pitch = tl.load(fields + 4)
        for source in tl.range(0, sources, num_stages=STAGES):
            acc += desc.load([row + source * pitch, col]).to(tl.float32)
        if DIVIDE_BY != 1:
            acc = acc / DIVIDE_BY
    return acc


@triton.jit
def _store(base_ptr, result, valid, col, N, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store the valid rows of a tile from the row at base_ptr on."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = col + tl.arange(0, BLOCK_N)[None, :]
    tl.store(base_ptr + rows.to(tl.int64) * stride + cols, result, mask=(rows < valid) & (cols < N))


@triton.jit
def _base(address_ptr, out_ptr, out_row, out_stride, ADDRESSED: tl.constexpr, ALIGN_BYTES: tl.constexpr):
    """Return the pointer to a tile's first row: its own address if that is not 0, else its row of out."""
    base_ptr = out_ptr + out_row.to(tl.int64) * out_stride
    if ADDRESSED:
        # The compiler knows no alignment of an address from a table. Without the hint it stores element by element.
        address = tl.load(address_ptr)
        base_ptr = tl.where(address == 0, base_ptr, address.to(tl.pointer_type(out_ptr.dtype.element_ty)))
        base_ptr = tl.multiple_of(base_ptr, ALIGN_BYTES)
    return base_ptr


@triton.jit
def _put(descs, place_ptr, out_row, col, result, BLOCK_N: tl.constexpr, V: tl.constexpr):
    """Store a whole tile by TMA: in out, or at its place of `far` if it has one (weft.kernels.far)."""
    if V.ADDRESSED:
        far = tl.load(place_ptr + 1).to(tl.int32)
        # One store serves both cases, so that it needs one buffer in shared memory.
        desc = descs.out
        if far >= 0:
            desc = descs.far
        row = tl.where(far < 0, out_row, 0)
        desc.store([tl.maximum(far, 0), row, col], result.reshape(1, V.BLOCK_M, BLOCK_N))
    else:
        descs.out.store([out_row, col], result)


@triton.jit
def _place_late(tile, row_tiles, early, col_tiles, GROUP: tl.constexpr, ADDS: tl.constexpr):
    """Do as place_of, with groups that never mix row tiles that add and row tiles that a peer may wait for."""
    if not ADDS:
        return place_of(tile, row_tiles, col_tiles, GROUP)
    is_late = tile >= early * col_tiles  # all are where early is 0
    first = tl.where(is_late, early, 0)
    row_tile, col_tile = place_of(tile - first * col_tiles, tl.where(is_late, row_tiles - early, early), col_tiles, GROUP)
    return row_tile + first, col_tile


@triton.jit
def _tile(
    row_tile, col, descs, out_ptr, out_stride, N, K, tables, scales, tries, unpublished,
    BLOCK_N: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Wait, multiply, add and store the tile of a row tile whose first column is `col`; meanwhile publish the previous tile."""
    fields = tables.rows + ROW_FIELDS * row_tile
    a_row = tl.load(fields + 1)
    valid = tl.load(fields + 2)
    out_row = tl.load(fields + 3)
    if V.GATED and not V.INNER:
        _wait(fields + 4, tables, tries, V.ASYNCHRONOUS)
    # One loop serves both sources: two loops would need two sets of pipeline buffers in shared memory.
    a_desc = descs.a0
    if V.TWO_SOURCES:  # noqa: SIM102 - a constexpr, then a value of the device
        if tl.load(fields) == 1:
            a_desc = descs.a1
    acc = tl.full((V.BLOCK_M, BLOCK_N), 0, tl.float32)
    rows = None
    if V.RECIPE != "":
        rows = scale_rows(scales, tl.load(fields) == 1, a_row, valid, V.BLOCK_M)
    if V.INNER:
        done = 0
        for number in range(tl.load(fields + 4), tl.load(fields + 5)):
            piece = tables.slices + SLICE_FIELDS * number
            end = tl.load(piece)
            _wait(piece + 1, tables, tries, V.ASYNCHRONOUS)
            if V.PROMOTED:
                acc = promote(a_desc, descs.b, acc, a_row, None, col, done, end, K, scales, rows, unpublished, BLOCK_N, V)
            else:
                acc = _multiply(a_desc, descs.b, acc, a_row, col, done, end, unpublished, V)
            done = end
    elif V.PROMOTED:
        steps = tl.cdiv(K, V.BLOCK_K)
        acc = promote(a_desc, descs.b, acc, a_row, None, col, 0, steps, K, scales, rows, unpublished, BLOCK_N, V)
    else:
        acc = _multiply(a_desc, descs.b, acc, a_row, col, 0, tl.cdiv(K, V.BLOCK_K), unpublished, V)
    if (V.RECIPE == "tensorwise") or (V.RECIPE == "rowwise"):
        cols = col + tl.arange(0, BLOCK_N)
        acc = scaled(acc, scales, rows, cols, cols < N)
    if V.ADDS:
        late = tables.adds + ADD_FIELDS * row_tile
        if V.GATED:
            _wait(late, tables, tries, V.ASYNCHRONOUS)
        acc = _add(descs.adds, late, acc, col, V.ADD_STAGES, V.DIVIDE_BY)
    result = acc.to(out_ptr.dtype.element_ty)
    place_ptr = tables.outs + OUT_FIELDS * row_tile
    whole = valid == V.BLOCK_M
    if V.OUT_TMA:  # noqa: SIM102 - a constexpr, then a value of the device
        if whole:
            _put(descs, place_ptr, out_row, col, result, BLOCK_N, V)
    if (not V.OUT_TMA) | (not whole):
        base_ptr = _base(place_ptr, out_ptr, out_row, out_stride, V.ADDRESSED, V.ALIGN_BYTES)
        _store(base_ptr, result, valid, col, N, out_stride, V.BLOCK_M, BLOCK_N)


@triton.jit
def _flag(row_tile, tables):
    """Return the address of a row tile's flag, or 0 if it has none."""
    count = tl.load(tables.rows + ROW_FIELDS * row_tile + 6)
    return tl.load(tables.counts + count, mask=count >= 0, other=0)


@triton.jit(do_not_specialize=["count_by", "tries", "publish_at"])
def gemm_kernel(
    a0_desc, a1_desc, b_desc, b_half_desc, out_desc, out_half_desc, far_desc, far_half_desc, out_ptr,
    adds_desc, adds_half_desc, tables, scales, count_by, tries, publish_at, whole, row_tiles, early, N, K, out_stride,
    V: tl.constexpr,
):  # fmt: skip
    """Compute tiles up to `whole` as whole tiles; with HALVES, compute the left and the right half of each remaining tile.

    tables: Pointers. scales: Scales of FP8 operands, or None. count_by: the number that a tile adds to its flag. publish_at:
    Unpublished.step. V: a Variant.
    """
    block, blocks = tl.program_id(0), tl.num_programs(0)
    col_tiles = tl.cdiv(N, V.BLOCK_N)
    descs = Descriptors(a0_desc, a1_desc, b_desc, out_desc, far_desc, adds_desc)
    flag, by = tl.full((), 0, tl.int64), count_by
    for tile in range(block, whole, blocks):
        row_tile, col_tile = _place_late(tile, row_tiles, early, col_tiles, V.GROUP, V.ADDS)
        col, unpublished = col_tile * V.BLOCK_N, Unpublished(flag, by, publish_at)
        _tile(row_tile, col, descs, out_ptr, out_stride, N, K, tables, scales, tries, unpublished, V.BLOCK_N, V)
        if V.COUNTED:
            flag = _flag(row_tile, tables)
    if V.HALVES:
        HALF: tl.constexpr = V.BLOCK_N // 2
        descs = Descriptors(a0_desc, a1_desc, b_half_desc, out_half_desc, far_half_desc, adds_half_desc)
        for tile in range(2 * whole + block, 2 * row_tiles * col_tiles, blocks):
            row_tile, col_tile = _place_late(tile // 2, row_tiles, early, col_tiles, V.GROUP, V.ADDS)
            col, unpublished = col_tile * V.BLOCK_N + tile % 2 * HALF, Unpublished(flag, by, publish_at)
            if col < N:
                _tile(row_tile, col, descs, out_ptr, out_stride, N, K, tables, scales, tries, unpublished, HALF, V)
            elif V.COUNTED:
                _publish(flag, by, V.ASYNCHRONOUS)
            if V.COUNTED:
                flag, by = _flag(row_tile, tables), count_by // 2
    if V.COUNTED:
        _publish(flag, by, V.ASYNCHRONOUS)
