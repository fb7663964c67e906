"""This kernel normalises whole rows: each row divided by the root of the mean of its squares, times a row of weights.

    _norm_kernel   persistent blocks, one row at a time
    norm()         its launcher

A row of at most WIDEST elements is loaded once. A longer one is loaded twice, the second time from the cache. Squares, their
mean and the product with the weight are float32, and the result is rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.kernels.launch import Launcher

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
    launched_by: Launcher | None = None,
    stream: int | None = None,
) -> None:
    """Store the norms of the rows of src, times weight, in out.

    src, out: [rows, n] with contiguous rows.
    weight: [1, n], contiguous.
    sms: the number of SMs; a launch has up to 8 blocks for each.
    launched_by, stream: as for weft.kernels.gemm.gemm.
    """
    rows, n = src.shape
    assert src.stride(1) == out.stride(1) == weight.stride(1) == 1 or n < 2, "the elements of a row are adjacent"
    if not rows or not n:
        return
    width = min(WIDEST, triton.next_power_of_2(n))
    strides = (n, src.stride(0), out.stride(0))
    tensors = (src, weight, out)
    (launched_by or Launcher())(
        _norm_kernel,
        min(rows, _BLOCKS_PER_SM * sms),
        (*tensors, rows, *strides),
        {"EPS": eps, "WIDTH": width, "ONCE": n <= width},
        key=(eps, strides, *(tensor.data_ptr() % 16 for tensor in tensors)),
        stream=stream,
        num_warps=8 if width > 2048 else 4,
    )


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    src_ptr, weight_ptr, out_ptr, rows, n, src_stride, out_stride, EPS: tl.constexpr, WIDTH: tl.constexpr, ONCE: tl.constexpr
):
    col = tl.arange(0, WIDTH)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        src = src_ptr + tl.cast(row, tl.int64) * src_stride
        out = out_ptr + tl.cast(row, tl.int64) * out_stride
        if ONCE:
            value = tl.load(src + col, mask=col < n, other=0.0).to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / n + EPS)
            value *= scale * tl.load(weight_ptr + col, mask=col < n, other=0.0).to(tl.float32)
            tl.store(out + col, value.to(out_ptr.dtype.element_ty), mask=col < n)
        else:
            squares = tl.zeros((WIDTH,), tl.float32)
            for first in range(0, n, WIDTH):
                value = tl.load(src + first + col, mask=first + col < n, other=0.0).to(tl.float32)
                squares += value * value
            scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / n + EPS)
            for first in range(0, n, WIDTH):
                there = first + col < n
                value = tl.load(src + first + col, mask=there, other=0.0).to(tl.float32)
                value *= scale * tl.load(weight_ptr + first + col, mask=there, other=0.0).to(tl.float32)
                tl.store(out + first + col, value.to(out_ptr.dtype.element_ty), mask=there)
