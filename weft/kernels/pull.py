"""One kernel that moves a rectangle by a set number of SMs, through shared memory: from a peer, to a peer, or here.

    _pull_kernel   persistent blocks; tiles loaded and stored by TMA, several loads under way in each block
    pull()         its launcher; fits(): what it can move

A load from a peer takes some 2 us, so that 350 GB/s need 700 KB under way: a few SMs have room for that in shared memory,
where plain loads would need the registers of many.

    block 0: load tile 0, 8, 16, 24 ...    tile 0 is there -> store it, load tile 32    tile 8 is there -> ...

It waits for nothing: what it reads must be there when its stream comes to it, and when its stream has passed it, all of its
destination is written.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.launch import Launcher

_BYTES = 16
"""TMA's grain: of addresses, strides and widths."""
_TILE = (64, 256)
_INTERPRETED_TILE = (16, 64)
_STAGES = 6
"""One more than the loads under way: 5 x 32 KiB, beside the tile that is stored, of 227 KiB."""


def fits(src: torch.Tensor, dst: torch.Tensor) -> bool:
    """Whether TMA can move src to dst, matrices of one shape and dtype: rows adjacent elements, all else at multiples of 16
    bytes."""
    if src.numel() == 0 or src.shape[1] * src.element_size() % _BYTES:
        return False
    lead = math.gcd(*(t.stride(0) * t.element_size() for t in (src, dst)))
    return lead % _BYTES == 0 and all(t.stride(1) == 1 and t.data_ptr() % _BYTES == 0 for t in (src, dst))


def launcher() -> Launcher:
    """For `pull`, call after call."""
    return Launcher(_pull_kernel)


def pull(
    src: torch.Tensor, dst: torch.Tensor, *, sms: int, launched_by: Launcher | None = None, stream: int | None = None
) -> None:
    """dst = src, by at most `sms` blocks. src, dst: matrices that `fits`, of memory here or at a peer.

    launched_by, stream: as for weft.kernels.gemm.gemm.
    """
    assert src.shape == dst.shape, f"source is {list(src.shape)}, destination {list(dst.shape)}"
    rows, cols = _TILE if src.is_cuda else _INTERPRETED_TILE
    cols = cols * 2 // src.element_size()
    tiles = -(-src.shape[0] // rows) * -(-src.shape[1] // cols)
    (launched_by or launcher())(
        min(sms, tiles),
        (
            TensorDescriptor.from_tensor(src, [rows, cols]),
            TensorDescriptor.from_tensor(dst, [rows, cols]),
            tiles,
            -(-src.shape[1] // cols),
        ),
        {"ROWS": rows, "COLS": cols, "STAGES": _STAGES},
        key=(src.dtype, rows, cols),
        stream=stream,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["tiles", "col_tiles"])
def _pull_kernel(src_desc, dst_desc, tiles, col_tiles, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr):
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row, col = tile // col_tiles * ROWS, tile % col_tiles * COLS
        dst_desc.store([row, col], src_desc.load([row, col]))
