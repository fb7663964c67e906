"""The GEMM kernel's device code: persistent blocks that take tiles in order (weft.kernels.gemm launches them).

gemm_kernel    whole tiles, then halves of those that are left
_tile          one of them: wait, multiply, add, store          _put     a whole one by TMA, also at peers
place_of       which tile comes next                            _tell    its part's flag that it is stored

A block tells of a tile `tell_at` steps into the multiplication of its next one (weft.kernels.gemm says when), at once if there
is none. By then what TMA stores has long been written, here or at a peer, and nobody waits for it:

    tile 0: load, dot ... -> store ..........> written
    tile 1:                  load, dot, dot ... -> tell of tile 0 -> dot ... -> store
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.triton.flags import wait_gates


@triton.jit
def place_of(tile, row_tiles, col_tiles, GROUP: tl.constexpr):
    """Row and column of a tile. Row tiles take turns in groups, so that blocks that run together share rows of a and columns of
    b in the L2 cache."""
    group = tile // (GROUP * col_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = tile - group * GROUP * col_tiles
    return group * GROUP + within % height, within // height


@triton.jit
def _tell(flag, by, ASYNCHRONOUS: tl.constexpr):
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
def _multiply(
    a_desc,
    b_desc,
    acc,
    a_row,
    col,
    first,
    last,
    told,
    told_by,
    tell_at,
    BLOCK_K: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    COUNTED: tl.constexpr,
    ASYNCHRONOUS: tl.constexpr,
):
    """A tile and its product over steps [first, last) of K: rows from a_row on, columns from col on. told, told_by, tell_at:
    of the tile before, as for `_tell`, and before which step."""
    for step in range(first, last):
        if COUNTED:  # noqa: SIM102 - a constexpr, then a value of the device
            if (step == tell_at) & (told != 0):
                _tell(told, told_by, ASYNCHRONOUS)
        a = a_desc.load([a_row, step * BLOCK_K])
        if B_TRANSPOSED:
            acc = tl.dot(a, b_desc.load([col, step * BLOCK_K]).T, acc)
        else:
            acc = tl.dot(a, b_desc.load([step * BLOCK_K, col]), acc)
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
def _put(
    out_desc,
    far_desc,
    place_ptr,
    out_row,
    col,
    result,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ADDRESSED: tl.constexpr,
):
    """Store a whole tile by TMA: in out, or elsewhere if it has a place there (weft.kernels.far)."""
    if ADDRESSED:
        far = tl.load(place_ptr + 1).to(tl.int32)
        # One store for both, which has one buffer in shared memory.
        desc = out_desc
        if far >= 0:
            desc = far_desc
        row = tl.where(far < 0, out_row, 0)
        desc.store([tl.maximum(far, 0), row, col], result.reshape(1, BLOCK_M, BLOCK_N))
    else:
        out_desc.store([out_row, col], result)


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
    row_tile,
    col,
    a0_desc,
    a1_desc,
    b_desc,
    out_desc,
    far_desc,
    out_ptr,
    adds_desc,
    adds_ptr,
    rows_ptr,
    slices_ptr,
    outs_ptr,
    gates_ptr,
    needs_ptr,
    status_ptr,
    tries,
    told,
    told_by,
    tell_at,
    N,
    K,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FIELDS: tl.constexpr,
    OUT_FIELDS: tl.constexpr,
    SLICE_FIELDS: tl.constexpr,
    TWO_SOURCES: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    GATED: tl.constexpr,
    INNER: tl.constexpr,
    COUNTED: tl.constexpr,
    ADDRESSED: tl.constexpr,
    OUT_TMA: tl.constexpr,
    ASYNCHRONOUS: tl.constexpr,
    ALIGN_BYTES: tl.constexpr,
    ADDS: tl.constexpr,
    ADD_FIELDS: tl.constexpr,
    ADD_STAGES: tl.constexpr,
    DIVIDE_BY: tl.constexpr,
):
    """Wait, multiply, add and store: the tile of a row tile whose first column is `col`; on the way, tell of the one before."""
    fields = rows_ptr + FIELDS * row_tile
    a_row = tl.load(fields + 1)
    valid = tl.load(fields + 2)
    out_row = tl.load(fields + 3)
    if GATED and not INNER:
        wait_gates(gates_ptr, needs_ptr, tl.load(fields + 4), tl.load(fields + 5), tries, status_ptr, ASYNCHRONOUS)
    # One loop for either source: two loops would hold two sets of pipeline buffers in shared memory.
    a_desc = a0_desc
    if TWO_SOURCES:  # noqa: SIM102 - a constexpr, then a value of the device
        if tl.load(fields) == 1:
            a_desc = a1_desc
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if INNER:
        done = 0
        for number in range(tl.load(fields + 4), tl.load(fields + 5)):
            piece = slices_ptr + SLICE_FIELDS * number
            end = tl.load(piece)
            wait_gates(gates_ptr, needs_ptr, tl.load(piece + 1), tl.load(piece + 2), tries, status_ptr, ASYNCHRONOUS)
            acc = _multiply(
                a_desc, b_desc, acc, a_row, col, done, end, told, told_by, tell_at, BLOCK_K, B_TRANSPOSED, COUNTED, ASYNCHRONOUS
            )
            done = end
    else:
        steps = tl.cdiv(K, BLOCK_K)
        acc = _multiply(
            a_desc, b_desc, acc, a_row, col, 0, steps, told, told_by, tell_at, BLOCK_K, B_TRANSPOSED, COUNTED, ASYNCHRONOUS
        )
    if ADDS:
        late = adds_ptr + ADD_FIELDS * row_tile
        if GATED:
            wait_gates(gates_ptr, needs_ptr, tl.load(late), tl.load(late + 1), tries, status_ptr, ASYNCHRONOUS)
        acc = _add(adds_desc, late, acc, col, ADD_STAGES, DIVIDE_BY)
    result = acc.to(out_ptr.dtype.element_ty)
    place_ptr = outs_ptr + OUT_FIELDS * row_tile
    whole = valid == BLOCK_M
    if OUT_TMA:  # noqa: SIM102 - a constexpr, then a value of the device
        if whole:
            _put(out_desc, far_desc, place_ptr, out_row, col, result, BLOCK_M, BLOCK_N, ADDRESSED)
    if (not OUT_TMA) | (not whole):
        base_ptr = _base(place_ptr, out_ptr, out_row, out_stride, ADDRESSED, ALIGN_BYTES)
        _store(base_ptr, result, valid, col, N, out_stride, BLOCK_M, BLOCK_N)


@triton.jit
def _flag(fields, counts_ptr):
    """The address of a row tile's flag, or 0 where it has none."""
    count = tl.load(fields + 6)
    return tl.load(counts_ptr + count, mask=count >= 0, other=0)


@triton.jit(do_not_specialize=["count_by", "tries", "tell_at"])
def gemm_kernel(
    a0_desc,
    a1_desc,
    b_desc,
    b_half_desc,
    out_desc,
    out_half_desc,
    far_desc,
    far_half_desc,
    out_ptr,
    adds_desc,
    adds_half_desc,
    adds_ptr,
    rows_ptr,
    slices_ptr,
    outs_ptr,
    gates_ptr,
    needs_ptr,
    counts_ptr,
    status_ptr,
    count_by,
    tries,
    tell_at,
    whole,
    row_tiles,
    early,
    N,
    K,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    FIELDS: tl.constexpr,
    OUT_FIELDS: tl.constexpr,
    SLICE_FIELDS: tl.constexpr,
    TWO_SOURCES: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    GATED: tl.constexpr,
    INNER: tl.constexpr,
    COUNTED: tl.constexpr,
    ADDRESSED: tl.constexpr,
    OUT_TMA: tl.constexpr,
    ASYNCHRONOUS: tl.constexpr,
    ALIGN_BYTES: tl.constexpr,
    ADDS: tl.constexpr,
    ADD_FIELDS: tl.constexpr,
    ADD_STAGES: tl.constexpr,
    DIVIDE_BY: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Tiles up to `whole` as they are, then, with HALVES, the left and the right half of each that is left."""
    col_tiles = tl.cdiv(N, BLOCK_N)
    # Of the tile before: its flag, and what it counts.
    told = tl.full((), 0, tl.int64)
    told_by = count_by
    for tile in range(tl.program_id(0), whole, tl.num_programs(0)):
        row_tile, col_tile = _place_late(tile, row_tiles, early, col_tiles, GROUP, ADDS)
        _tile(
            row_tile,
            col_tile * BLOCK_N,
            a0_desc,
            a1_desc,
            b_desc,
            out_desc,
            far_desc,
            out_ptr,
            adds_desc,
            adds_ptr,
            rows_ptr,
            slices_ptr,
            outs_ptr,
            gates_ptr,
            needs_ptr,
            status_ptr,
            tries,
            told,
            told_by,
            tell_at,
            N,
            K,
            out_stride,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            FIELDS,
            OUT_FIELDS,
            SLICE_FIELDS,
            TWO_SOURCES,
            B_TRANSPOSED,
            GATED,
            INNER,
            COUNTED,
            ADDRESSED,
            OUT_TMA,
            ASYNCHRONOUS,
            ALIGN_BYTES,
            ADDS,
            ADD_FIELDS,
            ADD_STAGES,
            DIVIDE_BY,
        )
        if COUNTED:
            told = _flag(rows_ptr + FIELDS * row_tile, counts_ptr)
    if HALVES:
        HALF: tl.constexpr = BLOCK_N // 2
        for tile in range(2 * whole + tl.program_id(0), 2 * row_tiles * col_tiles, tl.num_programs(0)):
            row_tile, col_tile = _place_late(tile // 2, row_tiles, early, col_tiles, GROUP, ADDS)
            col = col_tile * BLOCK_N + tile % 2 * HALF
            if col < N:
                _tile(
                    row_tile,
                    col,
                    a0_desc,
                    a1_desc,
                    b_half_desc,
                    out_half_desc,
                    far_half_desc,
                    out_ptr,
                    adds_half_desc,
                    adds_ptr,
                    rows_ptr,
                    slices_ptr,
                    outs_ptr,
                    gates_ptr,
                    needs_ptr,
                    status_ptr,
                    tries,
                    told,
                    told_by,
                    tell_at,
                    N,
                    K,
                    out_stride,
                    BLOCK_M,
                    HALF,
                    BLOCK_K,
                    FIELDS,
                    OUT_FIELDS,
                    SLICE_FIELDS,
                    TWO_SOURCES,
                    B_TRANSPOSED,
                    GATED,
                    INNER,
                    COUNTED,
                    ADDRESSED,
                    OUT_TMA,
                    ASYNCHRONOUS,
                    ALIGN_BYTES,
                    ADDS,
                    ADD_FIELDS,
                    ADD_STAGES,
                    DIVIDE_BY,
                )
            elif COUNTED:
                _tell(told, told_by, ASYNCHRONOUS)
            if COUNTED:
                told, told_by = _flag(rows_ptr + FIELDS * row_tile, counts_ptr), count_by // 2
    if COUNTED:
        _tell(told, told_by, ASYNCHRONOUS)
