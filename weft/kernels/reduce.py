"""The reduction kernel sums partial results of this GPU and of its peers in float32.

    _reduce_kernel   persistent blocks; each tile adds up its sources and rounds once
    reduce()         its launcher; ReduceTables  a step's parts in the form that the kernel reads

Sources are addresses in local memory, or in a peer's memory that this GPU can load from. They are added in the order of the
step, so a result has the same bits in each call. The kernel never waits: all its sources are ready when it starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.core.schedule import Reduce, Region
from weft.kernels.launch import Launcher
from weft.triton.flags import table

_FIELDS = 4


@dataclass(frozen=True, kw_only=True)
class ReduceTables:
    """ReduceTables holds a step's parts in the form that the kernel reads.

    tiles: (part, first row, first column within the part) of each tile.
    parts: (row, column, rows, columns) of each part in the result.
    srcs: the addresses of each part's sources.
    sources: the number of sources of a part.
    rows, cols: the shape of a tile.
    align: the elements of one access. Every address, column and width is a multiple of it.
    """

    tiles: torch.Tensor
    parts: torch.Tensor
    srcs: torch.Tensor
    sources: int
    rows: int
    cols: int
    align: int


def reduce_tables(
    step: Reduce,
    *,
    device: torch.device,
    address: Callable[[Region], int],
    itemsize: int,
) -> ReduceTables:
    """Build the tables of a step.

    address: returns the address of a region's first element.
    itemsize: bytes of an element.
    """
    rows, cols = (4, 1024) if device.type == "cuda" else (16, 64)
    tiles: list[tuple[int, int, int]] = []
    parts: list[tuple[int, ...]] = []
    for number, part in enumerate(step.parts):
        height, width = part.out.shape
        parts.append((part.out.rows[0], part.out.cols[0], height, width))
        tiles += [(number, row, col) for row in range(0, height, rows) for col in range(0, width, cols)]
    srcs = [[address(src) for src in part.srcs] for part in step.parts]
    return ReduceTables(
        tiles=table(tiles, torch.int32, device),
        parts=table(parts, torch.int32, device),
        srcs=table(srcs, torch.int64, device),
        sources=len(step.parts[0].srcs),
        rows=rows,
        cols=cols,
        align=_align(step, srcs, itemsize),
    )


def _align(step: Reduce, srcs: list[list[int]], itemsize: int) -> int:
    """Return the largest number of elements, at most 16 bytes, that divides every source address, result column and width."""
    columns = [n for part in step.parts for n in part.out.cols]
    elements = 16 // itemsize
    return math.gcd(elements, *columns, *(_elements(address, itemsize) for row in srcs for address in row))


def _elements(address: int, itemsize: int) -> int:
    return address // itemsize if address % itemsize == 0 else 1


def reduce(
    like: torch.Tensor,
    out: torch.Tensor,
    plan: ReduceTables,
    *,
    divide_by: int,
    sms: int = 1,
    launched_by: Launcher | None = None,
    stream: int | None = None,
) -> None:
    """Store the sums of `plan`, divided by `divide_by`, in out.

    like: a tensor of the sources' dtype and row stride.
    out: the whole result.
    sms: the number of SMs; a launch has up to 8 blocks for each.
    launched_by, stream: as for weft.kernels.gemm.gemm.
    """
    count = plan.tiles.shape[0]
    arguments = (
        like,
        out,
        plan.tiles,
        plan.parts,
        plan.srcs,
        count,
        like.stride(0),
        out.stride(0),
        divide_by,
    )
    align = math.gcd(plan.align, like.stride(0), out.stride(0), out.data_ptr() // out.element_size())
    (launched_by or Launcher())(
        _reduce_kernel,
        min(8 * sms, count),
        arguments,
        {
            "SOURCES": plan.sources,
            "ROWS": plan.rows,
            "COLS": plan.cols,
            "FIELDS": _FIELDS,
            "ALIGN": align,
        },
        key=(align, like.stride(0), like.data_ptr() % 16 == 0, out.stride(0), out.data_ptr() % 16 == 0),
        stream=stream,
        num_warps=8,
    )


@triton.jit
def _reduce_kernel(
    like_ptr,
    out_ptr,
    tiles_ptr,
    parts_ptr,
    srcs_ptr,
    tiles,
    src_stride,
    out_stride,
    divide_by,
    SOURCES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    FIELDS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        part = tl.load(tiles_ptr + 3 * tile)
        fields = parts_ptr + FIELDS * part
        rows = tl.load(tiles_ptr + 3 * tile + 1) + tl.arange(0, ROWS)[:, None]
        # The compiler knows no alignment of values from a table. Without these hints it moves element by element.
        cols = tl.multiple_of(tl.load(tiles_ptr + 3 * tile + 2), COLS) + tl.arange(0, COLS)[None, :]
        inside = (rows < tl.load(fields + 2)) & (cols < tl.multiple_of(tl.load(fields + 3), ALIGN))
        total = tl.zeros((ROWS, COLS), tl.float32)
        for source in tl.static_range(SOURCES):
            src_ptr = tl.load(srcs_ptr + part * SOURCES + source).to(tl.pointer_type(like_ptr.dtype.element_ty))
            src_ptr = tl.multiple_of(src_ptr, ALIGN * like_ptr.dtype.element_ty.primitive_bitwidth // 8)
            # Bypass this SM's L1 cache, which may hold data of an earlier call.
            here = src_ptr + rows.to(tl.int64) * src_stride + cols
            total += tl.load(here, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        total = total / divide_by
        out_row = tl.load(fields).to(tl.int64)
        there = out_ptr + (out_row + rows) * out_stride + tl.multiple_of(tl.load(fields + 1), ALIGN) + cols
        tl.store(there, total.to(out_ptr.dtype.element_ty), mask=inside)
