"""This kernel normalises whole rows: each row divided by the root of the mean of its squares, times a row of weights.

    _norm_kernel   persistent blocks, one row at a time
    norm()         its launcher

A row of at most WIDEST elements is loaded once. A longer one is loaded twice, the second time from the cache. Squares, their
mean and the product with the weight are float32, and the result is rounded once.

If the result is FP8, the float32 norm is quantised as weft.runtime.products.quantise does it. A scale of a whole row needs the
row's largest magnitude first, so a longer row is then loaded a third time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.core.problem import SCALE_BLOCK
from weft.kernels.launch import Launcher
from weft.kernels.scaled import largest, quantised, scale_of

WIDEST = 8192
"""The most elements of a row that a block holds at once: 32 for each of 256 threads."""
_BLOCKS_PER_SM = 8


def norm(
    src: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    eps: float,
    sms: int,
    scales: torch.Tensor | None = None,
    launched_by: Launcher | None = None,
    stream: int | None = None,
) -> None:
    """Store the norms of the rows of src, times weight, in out.

    src, out: [rows, n] with contiguous rows.
    weight: [1, n], contiguous.
    sms: the number of SMs; a launch has up to 8 blocks for each.
    scales: for an out of float8_e4m3fn, [rows, 1] or [rows, n / 128], contiguous.
    launched_by, stream: as for weft.kernels.gemm.gemm.
    """
    rows, n = src.shape
    assert src.stride(1) == out.stride(1) == weight.stride(1) == 1 or n < 2, "the elements of a row are adjacent"
    if not rows or not n:
        return
    block = 0
    if scales is not None:
        assert scales.is_contiguous(), "scales are contiguous"
        out, block = out.view(torch.int8), SCALE_BLOCK if scales.shape[1] > 1 else 0  # one block is a whole row
    width = min(WIDEST, triton.next_power_of_2(n))
    strides = (n, src.stride(0), out.stride(0))
    tensors = (src, weight, out, out if scales is None else scales)
    (launched_by or Launcher())(
        _norm_kernel,
        min(rows, _BLOCKS_PER_SM * sms),
        (*tensors, rows, *strides),
        {"EPS": eps, "WIDTH": width, "ONCE": n <= width, "QUANTISE": scales is not None, "BLOCK": block},
        key=(eps, strides, scales is not None, block, *(tensor.data_ptr() % 16 for tensor in tensors)),
        stream=stream,
        num_warps=8 if width > 2048 else 4,
    )


@triton.jit
def _loaded(ptr, first, n, WIDTH: tl.constexpr):
    """Return elements of a row in float32, from element `first` on. They are zero from element n on."""
    col = first + tl.arange(0, WIDTH)
    return tl.load(ptr + col, mask=col < n, other=0.0).to(tl.float32)


@triton.jit
def _store(value, out, scales, scale, first, n, WIDTH: tl.constexpr, QUANTISE: tl.constexpr, BLOCK: tl.constexpr):
    """Store elements of a row of the norm, from element `first` on, and the scales of their blocks.

    scale: that of the row, if it is quantised as a whole.
    """
    col = first + tl.arange(0, WIDTH)
    if QUANTISE:
        if BLOCK == 0:
            data = quantised(value, tl.broadcast_to(scale, (WIDTH,)))
        else:
            blocks, block = value.reshape(WIDTH // BLOCK, BLOCK), first // BLOCK + tl.arange(0, WIDTH // BLOCK)
            factors = scale_of(largest(blocks, 1))
            data = quantised(blocks, tl.broadcast_to(factors[:, None], (WIDTH // BLOCK, BLOCK))).reshape(WIDTH)
            tl.store(scales + block, factors, mask=block * BLOCK < n)
        tl.store(out + col, data, mask=col < n)
    else:
        tl.store(out + col, value.to(out.dtype.element_ty), mask=col < n)


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    src_ptr, weight_ptr, out_ptr, scales_ptr, rows, n, src_stride, out_stride,
    EPS: tl.constexpr, WIDTH: tl.constexpr, ONCE: tl.constexpr, QUANTISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        src = src_ptr + tl.cast(row, tl.int64) * src_stride
        out = out_ptr + tl.cast(row, tl.int64) * out_stride
        scales = scales_ptr + tl.cast(row, tl.int64) * (n // BLOCK if BLOCK else 1)
        scale = 0.0
        if ONCE:
            value = _loaded(src, 0, n, WIDTH)
            inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / n + EPS)
            value *= inverse * _loaded(weight_ptr, 0, n, WIDTH)
            if QUANTISE and BLOCK == 0:
                scale = scale_of(largest(value, 0))
            _store(value, out, scales, scale, 0, n, WIDTH, QUANTISE, BLOCK)
        else:
            squares = tl.zeros((WIDTH,), tl.float32)
            for first in range(0, n, WIDTH):
                value = _loaded(src, first, n, WIDTH)
                squares += value * value
            inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / n + EPS)
            if QUANTISE and BLOCK == 0:
                most = tl.zeros((WIDTH,), tl.float32)
                for first in range(0, n, WIDTH):
                    value = _loaded(src, first, n, WIDTH) * (inverse * _loaded(weight_ptr, first, n, WIDTH))
                    most = tl.maximum(most, tl.abs(value), propagate_nan=tl.PropagateNan.ALL)
                scale = scale_of(largest(most, 0))
            for first in range(0, n, WIDTH):
                value = _loaded(src, first, n, WIDTH) * (inverse * _loaded(weight_ptr, first, n, WIDTH))
                _store(value, out, scales, scale, first, n, WIDTH, QUANTISE, BLOCK)
        if QUANTISE and BLOCK == 0:
            tl.store(scales, scale)
