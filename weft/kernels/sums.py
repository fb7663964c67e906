"""This kernel sums partial results of this GPU and of its peers in float32, in the given order, and rounds once.

    _sum_kernel     persistent blocks; for each tile: load all sources, add, divide, round, store
    sum_regions()   launches it for the parts of a Reduce: rectangles of rows
    sum_runs()      launches it for a collective: one contiguous run of elements of each rank, on a fixed number of SMs
    SumTable        the addresses of the sources

Sources are addresses in local memory, or in a peer's memory that this GPU can load from. They are added in the same order in
each call, so a result has the same bits. The kernel never waits: all its sources are ready when it starts.

What an operator adds to its sum comes last, in the order of weft.core.problem.ADDENDS: a bias, which is one row, and a
residual. They are the caller's, so their addresses are arguments, too.

A collective's sum should occupy few SMs while other kernels run, with many bytes in flight on each. So its blocks have 16
warps, each with two loads of 16 bytes for each source. One of its sources is the caller's own tensor, and the result may be the
caller's, too. Their addresses change from call to call and are arguments. Triton knows only their alignment, of which there are
two variants: all addresses are multiples of 16 bytes, or any. Both are loaded before the first call that may wait
(`load_runs`), because loading a kernel waits for all streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.core.problem import ADDENDS
from weft.core.schedule import Reduce, Region
from weft.kernels.launch import Launcher
from weft.triton.flags import table

_FIELDS = 8
_VECTOR_BYTES = 16
_ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, kw_only=True)
class SumTable:
    """A SumTable describes the sources of a sum.

    addresses: on the device, the addresses of each part's sources, in order.
    sources: the number of sources of a part in the table.
    align: the most elements of one access, at most 16 bytes, that all fixed addresses, columns and strides allow.
    dtype: the dtype of the sources.
    tiles: for each tile: its part's first address, its first row and column within the part, the part's rows and columns, the
        part's row and column in the result, and its row in the residual. None for a run, whose tiles are computed.
    count: the number of tiles.
    stride: the elements from one row of a source to the next.
    own: the number of the caller's source in a run, whose entry in addresses is unused. -1 if all sources are in the table.
    shape: the rows and columns of a tile.
    """

    addresses: torch.Tensor
    sources: int
    align: int
    dtype: torch.dtype
    divide_by: int
    shape: tuple[int, int]
    tiles: torch.Tensor | None = None
    count: int = 0
    stride: int = 0
    own: int = -1

    @property
    def warps(self) -> int:
        return 8 if self.own < 0 else 16


def region_table(
    step: Reduce, *, address: Callable[[Region], int], stride: int, dtype: torch.dtype, device: torch.device
) -> SumTable:
    """Build the table of a Reduce whose parts have the same number of sources, and the same addends (`addends_of`).

    address: returns the address of a region's first element.
    stride: the elements from one row of a source to the next, the same for all sources.
    """
    rows, cols = (4, 1024) if device.type == "cuda" else (16, 64)
    addends = addends_of(step)
    sources = len(step.parts[0].srcs) - len(addends)
    last = -1 if "residual" in addends else 0
    """Where the residual is among the sources of a part. Without one, the row of any source will do."""
    tiles = [
        (number * sources, row, col, *part.out.shape, part.out.rows[0], part.out.cols[0], part.srcs[last].rows[0])
        for number, part in enumerate(step.parts)
        for row in range(0, part.out.shape[0], rows)
        for col in range(0, part.out.shape[1], cols)
    ]
    addresses = [address(src) for part in step.parts for src in part.srcs[:sources]]
    return SumTable(
        addresses=table(addresses, torch.int64, device),
        sources=sources,
        align=_align(addresses, dtype, stride, *(column for part in step.parts for column in part.out.cols)),
        dtype=dtype,
        divide_by=step.divide_by,
        shape=(rows, cols),
        tiles=table(tiles, torch.int32, device),
        count=len(tiles),
        stride=stride,
    )


def addends_of(step: Reduce) -> tuple[str, ...]:
    """Return the addends of the caller that come last among the sources of every part."""
    names = {tuple(src.buffer for src in part.srcs if src.buffer in ADDENDS) for part in step.parts}
    (found,) = names if len(names) == 1 else ((),)
    return found if all(tuple(src.buffer for src in part.srcs[-len(found) :]) == found for part in step.parts) else ()


def run_table(addresses: Sequence[int], *, own: int, dtype: torch.dtype, divide_by: int, device: torch.device) -> SumTable:
    """Build the table of a sum of runs. own: the number of the source whose address is passed at each launch."""
    fixed = [address for number, address in enumerate(addresses) if number != own]
    vector = _VECTOR_BYTES // dtype.itemsize
    return SumTable(
        addresses=table(list(addresses), torch.int64, device),
        sources=len(addresses),
        align=vector if _align(fixed, dtype) == vector else 1,
        dtype=dtype,
        divide_by=divide_by,
        shape=(1, 8192 if device.type == "cuda" else 128),
        own=own,
    )


def _align(addresses: Sequence[int], dtype: torch.dtype, *sizes: int) -> int:
    """Return the largest number of elements, at most 16 bytes, that divides all addresses and all sizes in elements."""
    size = dtype.itemsize
    return math.gcd(_VECTOR_BYTES // size, *sizes, *(at // size if at % size == 0 else 1 for at in addresses))


def sum_regions(
    plan: SumTable,
    out: torch.Tensor,
    *,
    sms: int,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    launched_by: Launcher | None = None,
    stream: int | None = None,
) -> None:
    """Store the sums of a Reduce, divided, in out.

    out: the whole result.
    bias, residual: the addends of the Reduce, whole, with contiguous rows. A bias is [1, columns of out].
    sms: the number of SMs; a launch has up to 8 blocks for each.
    launched_by, stream: as for weft.kernels.gemm.gemm.
    """
    align = math.gcd(plan.align, _align([out.data_ptr()], out.dtype, out.stride(0)))
    addresses, residual_stride = [out.data_ptr()] * 2, 0
    for addend in (bias, residual):
        addresses.append(0 if addend is None else addend.data_ptr())
        if addend is not None:
            align = math.gcd(align, _align([addend.data_ptr()], addend.dtype, addend.stride(0) if addend is residual else 0))
    if residual is not None:
        residual_stride = residual.stride(0)
    strides, blocks = (plan.stride, out.stride(0), residual_stride), min(8 * sms, plan.count)
    _launch(plan, addresses, (0, plan.count), strides, align, out.dtype, blocks, launched_by, stream)


def load_runs(plan: SumTable, *, launched_by: Launcher, address: int) -> None:
    """Compile and load both variants. address: any address, which is not accessed."""
    for align in {1, _VECTOR_BYTES // plan.dtype.itemsize}:
        _launch(plan, (address, address, 0, 0), (0, 0), (0, 0, 0), align, plan.dtype, 1, launched_by, None)


def sum_runs(plan: SumTable, *, own: int, out: int, elements: int, sms: int, launched_by: Launcher, stream: int | None) -> None:
    """Store the sum of the first `elements` of all sources, divided, at out.

    own, out: the addresses of the caller's source and of the result, which may be equal.
    sms: the number of SMs and of blocks.
    launched_by, stream: as for weft.kernels.gemm.gemm.
    """
    assert elements <= 1 << 30, elements
    vector = plan.align if own % _VECTOR_BYTES == out % _VECTOR_BYTES == 0 else 1
    whole = elements // vector * vector
    for first, last, align, most in ((0, whole, vector, sms), (whole, elements, 1, 1)):
        blocks = min(most, -(-(last - first) // plan.shape[1]))
        span, addresses = (first // align, last // align), (own, out, 0, 0)
        _launch(plan, addresses, span, (0, 0, 0), align, plan.dtype, blocks, launched_by, stream)


def _launch(
    plan: SumTable,
    addresses: Sequence[int],
    span: tuple[int, int],
    strides: tuple[int, int, int],
    align: int,
    result: torch.dtype,
    blocks: int,
    launched_by: Launcher | None,
    stream: int | None,
) -> None:
    """Launch the kernel on `blocks` blocks, if that is not 0.

    addresses: those of the caller's source, of the result, of the bias and of the residual; 0 for an addend that there is not.
    span: the first and last tile; for a run the first and last element, divided by align.
    """
    if not blocks:
        return
    constants = {
        "SOURCES": plan.sources,
        "OWN": plan.own,
        "DIVIDE_BY": plan.divide_by,
        "BIAS": bool(addresses[2]),
        "RESIDUAL": bool(addresses[3]),
        "ELEMENT": _ELEMENTS[plan.dtype],
        "RESULT": _ELEMENTS[result],
        "ROWS": plan.shape[0],
        "COLS": plan.shape[1],
        "ALIGN": align,
        "FIELDS": _FIELDS,
    }
    tiles = plan.addresses if plan.tiles is None else plan.tiles
    (launched_by or Launcher())(
        _sum_kernel,
        blocks,
        (tiles, plan.addresses, *addresses, *span, *(stride // align for stride in strides)),
        constants,
        key=(plan.sources, plan.own, plan.divide_by, *map(bool, addresses[2:]), plan.dtype, result, align),
        stream=stream,
        num_warps=plan.warps,
    )


@triton.jit(do_not_specialize=["own", "out", "bias", "residual", "first", "last", "stride", "out_stride", "residual_stride"])
def _sum_kernel(
    tiles_ptr, addresses_ptr, own, out, bias, residual, first, last, stride, out_stride, residual_stride,
    SOURCES: tl.constexpr, OWN: tl.constexpr, DIVIDE_BY: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ELEMENT: tl.constexpr, RESULT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = ALIGN * ELEMENT.primitive_bitwidth // 8
    RESULT_WIDTH: tl.constexpr = ALIGN * RESULT.primitive_bitwidth // 8
    RUN: tl.constexpr = OWN >= 0
    # The compiler accepts no alignment hint on an argument, so they are passed divided by ALIGN.
    low, high = first * ALIGN, last * ALIGN
    for tile in range(tl.program_id(0), tl.cdiv(high - low, COLS) if RUN else last, tl.num_programs(0)):
        if RUN:
            sources_ptr = addresses_ptr
            at = low + tile * COLS + tl.arange(0, COLS)[None, :]
            there, inside = at, at < high
        else:
            fields = tiles_ptr + FIELDS * tile
            sources_ptr = addresses_ptr + tl.load(fields)
            rows = tl.load(fields + 1) + tl.arange(0, ROWS)[:, None]
            # The compiler knows no alignment of values from a table. Without these hints it moves element by element.
            cols = tl.multiple_of(tl.load(fields + 2), COLS) + tl.arange(0, COLS)[None, :]
            inside = (rows < tl.load(fields + 3)) & (cols < tl.multiple_of(tl.load(fields + 4), ALIGN))
            at = rows.to(tl.int64) * (stride * ALIGN) + cols
            out_rows = (tl.load(fields + 5) + rows).to(tl.int64)
            there = out_rows * (out_stride * ALIGN) + tl.multiple_of(tl.load(fields + 6), ALIGN) + cols
        total = tl.zeros((ROWS, COLS), tl.float32)
        for source in tl.static_range(SOURCES):
            address = own if source == OWN else tl.load(sources_ptr + source)
            source_ptr = tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), WIDTH)
            # Bypass this SM's L1 cache, which may hold data of an earlier call.
            total += tl.load(source_ptr + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        if BIAS:
            at = tl.multiple_of(tl.load(fields + 6), ALIGN) + cols
            source_ptr = tl.multiple_of(bias.to(tl.pointer_type(ELEMENT)), WIDTH)
            total += tl.load(source_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL:
            at = (tl.load(fields + 7) + rows).to(tl.int64) * (residual_stride * ALIGN)
            at += tl.multiple_of(tl.load(fields + 6), ALIGN) + cols
            source_ptr = tl.multiple_of(residual.to(tl.pointer_type(ELEMENT)), WIDTH)
            total += tl.load(source_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if DIVIDE_BY != 1:
            total = tl.div_rn(total, DIVIDE_BY * 1.0)
        out_ptr = tl.multiple_of(out.to(tl.pointer_type(RESULT)), RESULT_WIDTH)
        tl.store(out_ptr + there, total.to(RESULT), mask=inside)
