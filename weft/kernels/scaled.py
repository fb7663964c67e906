"""GEMM kernels take the scales of FP8 operands as one argument, which these functions make on the host and read for a tile.

scales_of           make the kernel's argument from tensors
specialised         its properties that a kernel is compiled for
operand             convert a tile of FP8 for tl.dot
scaled              multiply a sum by the scales of its rows and columns
scale_rows          find the scales of a tile's rows
block_scales        the scale of each element of a tile, in one block of K
rows_in_block, column_in_block    the scales of rows, and of a block of b, in one block of K
scales_of_expert    the scales with the b of one expert
rounded             convert float32 to FP8
largest, scale_of, quantised    the largest magnitude, the scale that it gives, and the elements divided by that in FP8

    tensorwise, rowwise    out = (sum over K of a b) * scale_a * scale_b      once, on the float32 sum
    blockwise              out = sum over blocks of K of (the block's sum of a b) * (scale_a * scale_b)

A tensorwise scale is treated as a rowwise one whose strides are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.core.problem import FLOAT8, LEAST_MAGNITUDE, SCALE_BLOCK

_LEAST, _MOST = tl.constexpr(LEAST_MAGNITUDE), tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)
FLOAT8_DTYPES = tuple(getattr(torch, name) for name in FLOAT8)
_BLOCK = tl.constexpr(SCALE_BLOCK)


class Scales(NamedTuple):
    """Scales holds the scales of a GEMM's FP8 operands. Strides are in elements, and 0 if the recipe does not use them.

    a0, a1, b: the float32 scales of both sources of a, and of b.
    a0_row, a1_row: the stride from one row of a to the next.
    a0_block, a1_block: the stride from one block of a's columns to the next.
    b_block: the stride from one block of b's rows to the next.
    b_col: the stride from one column of b, or block of columns, to the next.
    """

    a0: Any
    a1: Any
    b: Any
    a0_row: Any
    a0_block: Any
    a1_row: Any
    a1_block: Any
    b_block: Any
    b_col: Any


class RowScales(NamedTuple):
    """RowScales holds the scales of a tile's rows.

    pointers: the address of the first scale of each row.
    mask: whether a row has scales.
    block: the stride from one block of K to the next.
    """

    pointers: Any
    mask: Any
    block: Any


def scales_of(scale_a: Sequence[torch.Tensor], scale_b: torch.Tensor, recipe: str) -> Scales:
    """Return the kernel's argument. Shapes are as in weft.core.problem.Scaling, with any strides.

    scale_a: the scales of each source of a.
    """
    first, last = scale_a[0], scale_a[-1]
    if recipe == "tensorwise":
        return Scales(first, last, scale_b, 0, 0, 0, 0, 0, 0)
    if recipe == "rowwise":
        return Scales(first, last, scale_b, first.stride(0), 0, last.stride(0), 0, 0, scale_b.stride(1))
    return Scales(first, last, scale_b, *first.stride(), *last.stride(), *scale_b.stride())


def specialised(scales: Scales | None) -> tuple[int, ...]:
    """Return the properties of scales that a kernel is compiled for."""
    return tuple(one.data_ptr() % 16 if isinstance(one, torch.Tensor) else one for one in scales or ())


if triton.knobs.runtime.interpret:

    def operand(tile: Any) -> Any:
        """Return an FP8 tile as float32, in which products are exact, for the interpreter. The interpreter's own conversions
        support neither the NaN of float8_e4m3fn nor infinity."""
        if not tile.dtype.is_fp8():
            return tile
        bits = tile.to(tl.uint8, bitcast=True)
        if tile.dtype.is_fp8e5():
            return (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), tile.to(tl.float32))

    def rounded(tile: Any) -> Any:
        """Convert float32 numbers up to 448 to float8_e4m3fn under the interpreter. They are rounded first, because the
        interpreter's own conversion loses the carry of a rounded mantissa."""
        bits = tile.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
        small = (tile + 1.5 * 2**14) - 1.5 * 2**14
        return tl.where(tl.abs(tile) < 2**-6, small, normal).to(tl.float8e4nv)

else:

    @triton.jit
    def operand(tile):
        """Return the tile unchanged: tensor cores multiply FP8."""
        return tile

    @triton.jit
    def rounded(tile):
        """Convert float32 numbers up to 448 to float8_e4m3fn."""
        return tile.to(tl.float8e4nv)


@triton.jit
def largest(values, AXIS: tl.constexpr):
    """Return the largest magnitude along an axis; NaN if any element is NaN."""
    bad = tl.max((values != values).to(tl.int32), AXIS)
    return tl.where(bad > 0, float("nan"), tl.max(tl.abs(values), AXIS))


@triton.jit
def scale_of(magnitude):
    """Return the scale of elements with this largest magnitude, as weft.runtime.products.quantise does."""
    return tl.div_rn(tl.maximum(magnitude, _LEAST, propagate_nan=tl.PropagateNan.ALL), _MOST)


@triton.jit
def quantised(values, scale):
    """Return the bytes of float8_e4m3fn elements. scale: of the shape of `values`."""
    scaled = tl.div_rn(values, scale)
    data = rounded(tl.clamp(scaled, -_MOST, _MOST)).to(tl.int8, bitcast=True)
    return tl.where(scaled != scaled, 0x7F, data).to(tl.int8)


@triton.jit
def scales_of_expert(scales, expert, pitch):
    """Return the scales with b's replaced by those of one expert. pitch: elements from one expert's scales to the next's."""
    return Scales(
        scales.a0,
        scales.a1,
        scales.b + expert.to(tl.int64) * pitch,
        scales.a0_row,
        scales.a0_block,
        scales.a1_row,
        scales.a1_block,
        scales.b_block,
        scales.b_col,
    )


@triton.jit
def scale_rows(scales, second, first, valid, ROWS: tl.constexpr):
    """Return the RowScales of `valid` rows of a from row `first` on. second: whether the rows are in the second source."""
    rows = tl.arange(0, ROWS)
    stride = tl.where(second, scales.a1_row, scales.a0_row)
    block = tl.where(second, scales.a1_block, scales.a0_block)
    base_ptr = tl.where(second, scales.a1, scales.a0) + first.to(tl.int64) * stride
    return RowScales(base_ptr + rows * stride, rows < valid, block)


@triton.jit
def rows_in_block(rows, block, end):
    """Return each row's scale in a block of K; 0 from block `end` on."""
    return tl.load(rows.pointers + block * rows.block, mask=rows.mask & (block < end), other=0)


@triton.jit
def column_in_block(scales, block, end, col):
    """Return the scale of b's block that has column `col`, in a block of K; 0 from block `end` on."""
    return tl.load(scales.b + block * scales.b_block + (col // _BLOCK) * scales.b_col, mask=block < end, other=0)


@triton.jit
def block_scales(scales, rows, first, k, cols, there):
    """Return for each element of a tile its row's scale times its column's scale, in the block of K that begins with column
    `first` of a; 0 from column k on. there: which of the tile's columns exist."""
    block, inside = first // _BLOCK, first < k
    of_b = tl.load(scales.b + block * scales.b_block + (cols // _BLOCK) * scales.b_col, mask=there & inside, other=0)
    of_a = tl.load(rows.pointers + block * rows.block, mask=rows.mask & inside, other=0)
    return of_a[:, None] * of_b[None, :]


@triton.jit
def scaled(acc, scales, rows, cols, there):
    """Multiply a tile's sums by the scales of its rows and columns. there: which of the columns exist."""
    of_b = tl.load(scales.b + cols * scales.b_col, mask=there, other=0)
    of_a = tl.load(rows.pointers, mask=rows.mask, other=0)
    return acc * of_a[:, None] * of_b[None, :]
