"""The GEMM kernel's device code: persistent blocks that take tiles in order (weft.kernels.gemm launches them).

gemm_kernel    whole tiles, then halves of those that are left
_tile          one of them: wait, multiply, add, store          _put        a whole one by TMA, also at peers
place_of       which tile comes next                            _publish    add to the flag of its part
_multiply      its product, summed by matrix units              promote     in float32, for FP8 operands (weft.kernels.scaled)

A block publishes a tile `publish_at` steps into the multiplication of its next one (weft.kernels.gemm says when), or at once if
there is no next one. By then the stores by TMA have normally completed, here or at a peer, so that `_publish` does not stall:

    tile 0: load, dot ... -> store ..........> written
    tile 1:                  load, dot, dot ... -> publish tile 0 -> dot ... -> store

Hopper's tensor cores add up products of FP8 operands with some 14 bits. So where sums are to be exact, or each block of K has
scales, each step of 128 is a product of its own, which CUDA cores scale and add in float32. Two steps take turns (PAIRS), so
that tensor cores run meanwhile:

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

    RECIPE: of the scales of FP8 operands; empty if operands are none. PROMOTED: each step over K is added in float32 to the sum
    of those before. PAIRS: by two steps a turn.
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
    """The tables of a step (weft.kernels.gemm.Tables), and where waits that ended early are noted."""

    adds: Any
    rows: Any
    slices: Any
    outs: Any
    gates: Any
    needs: Any
    counts: Any
    status: Any


class Descriptors(NamedTuple):
    """How TMA loads and stores tiles of one width. Triton 3.6 takes no tuple of descriptors from the host, so that the kernel
    makes this one."""

    a0: Any
    a1: Any
    b: Any
    out: Any
    far: Any
    adds: Any


class Unpublished(NamedTuple):
    """The tile that a block has stored last: the address of its flag, what to add to that, and before which step of the next
    tile's multiplication."""

    flag: Any
    by: Any
    step: Any


@triton.jit
def place_of(tile, row_tiles, col_tiles, GROUP: tl.constexpr):
    """Row and column of a tile. Row tiles take turns in groups, so that blocks that run together share rows of a and columns of
    b in the L2 cache."""
    group = tile // (GROUP * col_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = tile - group * GROUP * col_tiles
    return group * GROUP + within % height, within // height


@triton.jit
def _wait(pair_ptr, tables, tries, ASYNCHRONOUS: tl.constexpr):
    """Wait for the gates [first, last) whose two numbers lie at pair_ptr."""
    wait_gates(tables.gates, tables.needs, tl.load(pair_ptr), tl.load(pair_ptr + 1), tries, tables.status, ASYNCHRONOUS)


@triton.jit
def _publish(flag, by, ASYNCHRONOUS: tl.constexpr):
    """Add `by` to the flag at an address, if it is one, once all that this block has stored before is written."""
    if ASYNCHRONOUS:
        # Each thread waits for the stores by TMA that it has issued: until they are written, not until they are read from
        # shared memory, which is all that Triton waits for. Then all threads meet. As one piece of assembly, since loads are
        # not moved ahead in a loop that has one of Triton's own barriers.
        tl.inline_asm_elementwise("cp.async.bulk.wait_group 0; bar.sync 0; mov.b32 $0, $1;", "=r,r", [by], tl.int32, False, 1)
    else:
        tl.debug_barrier()
    if flag != 0:
        tl.atomic_add(flag.to(tl.pointer_type(tl.int32)), by, sem="release", scope="sys")


@triton.jit
def load_b(b_desc, expert, k, col, V: tl.constexpr):
    """BLOCK_K x columns of b, from row k and column col on. expert: whose, of a b of three dimensions; else None."""
    if expert is None:
        tile = b_desc.load([col, k]).T if V.B_TRANSPOSED else b_desc.load([k, col])
    elif V.B_TRANSPOSED:
        tile = b_desc.load([expert, col, k]).reshape(V.BLOCK_N, V.BLOCK_K).T
    else:
        tile = b_desc.load([expert, k, col]).reshape(V.BLOCK_K, V.BLOCK_N)
    return operand(tile)


@triton.jit
def _product(a_desc, b_desc, acc, a_row, k, expert, col, V: tl.constexpr):
    """The sum `acc` and the product of one step over K: rows of a from a_row on, columns of a from k on, columns of b from col
    on."""
    return tl.dot(operand(a_desc.load([a_row, k])), load_b(b_desc, expert, k, col, V), acc)


@triton.jit
def _multiply(a_desc, b_desc, acc, a_row, col, first, last, unpublished, V: tl.constexpr):
    """A tile and its product over steps [first, last) of K: rows from a_row on, columns from col on."""
    for step in range(first, last):
        if V.COUNTED:  # noqa: SIM102 - a constexpr, then a value of the device
            if (step == unpublished.step) & (unpublished.flag != 0):
                _publish(unpublished.flag, unpublished.by, V.ASYNCHRONOUS)
        acc = _product(a_desc, b_desc, acc, a_row, step * V.BLOCK_K, None, col, V)
    return acc


@triton.jit
def plus(acc, product, factor, V: tl.constexpr):
    """A sum, and the product of one step over K times the scale of each of its rows, if it has one."""
    if V.RECIPE == "blockwise":
        acc += product * factor[:, None]
    else:
        acc += product
    return acc


@triton.jit
def before_next(acc, V: tl.constexpr):
    """A tile that compilers compute before the next product is issued. Else they add the product of the step before after it,
    which then needs registers of its own, and ptxas waits for each instruction of a product by itself."""
    if V.ASYNCHRONOUS:
        acc = tl.inline_asm_elementwise("", "=f,0", [acc], tl.float32, False, 1)
    return acc


@triton.jit
def of_rows(rows, step, last, V: tl.constexpr):
    """The scales of the rows of a step's product, with blockwise scales. The step is a block of K."""
    factor = tl.full((V.BLOCK_M,), 0, tl.float32)
    if V.RECIPE == "blockwise":
        factor = rows_in_block(rows, step, last)
    return factor


@triton.jit
def with_column(factor, scales, step, last, col, V: tl.constexpr):
    """What each row of a step's product is multiplied by: its own scale, and that of the block of b."""
    if V.RECIPE == "blockwise":
        factor *= column_in_block(scales, step, last, col)
    return factor


@triton.jit
def factor_of(scales, rows, step, last, col, V: tl.constexpr):
    """What each row of a step's product is multiplied by, with blockwise scales."""
    return with_column(of_rows(rows, step, last, V), scales, step, last, col, V)


@triton.jit
def promote(
    a_desc, b_desc, acc, a_row, expert, col, first, last, K, scales, rows, unpublished,
    BLOCK_N: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """As _multiply, where each step's product is scaled and added in float32. expert: as for load_b."""
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
            # An odd step past the last one loads what lies behind K, which is zeros.
            k = tl.where(step + 1 < last, (step + 1) * V.BLOCK_K, K)
            odd = _product(a_desc, b_desc, none, a_row, k, expert, col, V)
        # The scale of b is loaded behind the odd product: before it, the compiler would scale the even one there, while tensor
        # cores wait.
        acc = plus(acc, product, with_column(factor, scales, step, last, col, V), V)
    if V.PAIRS:
        acc = plus(acc, odd, odd_factor, V)
    return acc


@triton.jit
def _add(desc, fields, acc, col, STAGES: tl.constexpr, DIVIDE_BY: tl.constexpr):
    """A tile with its sources added in their order, then divided; as it is if it has none."""
    sources = tl.load(fields + 2)
    if sources > 0:
        row = tl.load(fields + 3)
        # A table of rows would do, but a load that the next load's address comes from halves how far ahead sources are loaded.
        pitch = tl.load(fields + 4)
        for source in tl.range(0, sources, num_stages=STAGES):
            acc += desc.load([row + source * pitch, col]).to(tl.float32)
        if DIVIDE_BY != 1:
            acc = acc / DIVIDE_BY
    return acc


@triton.jit
def _store(base_ptr, result, valid, col, N, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The valid part of a tile, below the row at base_ptr."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = col + tl.arange(0, BLOCK_N)[None, :]
    tl.store(base_ptr + rows.to(tl.int64) * stride + cols, result, mask=(rows < valid) & (cols < N))


@triton.jit
def _base(address_ptr, out_ptr, out_row, out_stride, ADDRESSED: tl.constexpr, ALIGN_BYTES: tl.constexpr):
    """Where a tile's first row is stored: at its address, if it has one that is not 0, else in out."""
    base_ptr = out_ptr + out_row.to(tl.int64) * out_stride
    if ADDRESSED:
        # An address from a table has no alignment that the compiler knows of: without the hint, stores are of one element.
        address = tl.load(address_ptr)
        base_ptr = tl.where(address == 0, base_ptr, address.to(tl.pointer_type(out_ptr.dtype.element_ty)))
        base_ptr = tl.multiple_of(base_ptr, ALIGN_BYTES)
    return base_ptr


@triton.jit
def _put(descs, place_ptr, out_row, col, result, BLOCK_N: tl.constexpr, V: tl.constexpr):
    """Store a whole tile by TMA: in out, or elsewhere if it has a place there (weft.kernels.far)."""
    if V.ADDRESSED:
        far = tl.load(place_ptr + 1).to(tl.int32)
        # One store for both, which has one buffer in shared memory.
        desc = descs.out
        if far >= 0:
            desc = descs.far
        row = tl.where(far < 0, out_row, 0)
        desc.store([tl.maximum(far, 0), row, col], result.reshape(1, V.BLOCK_M, BLOCK_N))
    else:
        descs.out.store([out_row, col], result)


@triton.jit
def _place_late(tile, row_tiles, early, col_tiles, GROUP: tl.constexpr, ADDS: tl.constexpr):
    """As place_of, where no group has row tiles that add and row tiles that a peer may wait for."""
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
    """Wait, multiply, add and store: the tile of a row tile whose first column is `col`; on the way, publish the one before."""
    fields = tables.rows + ROW_FIELDS * row_tile
    a_row = tl.load(fields + 1)
    valid = tl.load(fields + 2)
    out_row = tl.load(fields + 3)
    if V.GATED and not V.INNER:
        _wait(fields + 4, tables, tries, V.ASYNCHRONOUS)
    # One loop for either source: two loops would hold two sets of pipeline buffers in shared memory.
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
    """The address of a row tile's flag, or 0 where it has none."""
    count = tl.load(tables.rows + ROW_FIELDS * row_tile + 6)
    return tl.load(tables.counts + count, mask=count >= 0, other=0)


@triton.jit(do_not_specialize=["count_by", "tries", "publish_at"])
def gemm_kernel(
    a0_desc, a1_desc, b_desc, b_half_desc, out_desc, out_half_desc, far_desc, far_half_desc, out_ptr,
    adds_desc, adds_half_desc, tables, scales, count_by, tries, publish_at, whole, row_tiles, early, N, K, out_stride,
    V: tl.constexpr,
):  # fmt: skip
    """Tiles up to `whole` as they are, then, with HALVES, the left and the right half of each that is left.

    tables: Pointers. scales: Scales of FP8 operands, or None. count_by: what a tile adds to its flag. publish_at:
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
