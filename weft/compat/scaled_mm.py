"""torch's products of FP8 operands on NVIDIA GPUs. torch.nn.functional.scaled_mm is the public name, but it has no `out`."""

from __future__ import annotations

import functools

import torch

OUT_DTYPES = {
    "tensorwise": (torch.bfloat16, torch.float16, torch.float32),
    "rowwise": (torch.bfloat16,),
    "blockwise": (torch.bfloat16,),
}
"""By recipe, the dtypes of results that torch has kernels for."""


def takes(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, recipe: str) -> bool:
    """Whether torch has a kernel for the product: of a result of this dtype, and rowwise and blockwise of a b of
    float8_e4m3fn."""
    return out.dtype in OUT_DTYPES[recipe] and (recipe == "tensorwise" or b.dtype == torch.float8_e4m3fn)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out: torch.Tensor,
    *,
    recipe: str,
    use_fast_accum: bool,
) -> None:
    """out = (a * scale_a) @ (b * scale_b). a: [M, K], rows contiguous. b: [K, N], columns contiguous. Scales are as
    weft.core.problem.Scaling has them."""
    if recipe == "blockwise":
        # cuBLAS reads the scales of a column of blocks together, and those of b with padding to four.
        scale_a, scale_b = scale_a.t().contiguous().t(), _in_fours(scale_b)
        use_fast_accum = False
    torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out.dtype, use_fast_accum=use_fast_accum, out=out)


def unscaled_mm(a: torch.Tensor, b: torch.Tensor, *, use_fast_accum: bool) -> torch.Tensor:
    """a @ b in float32."""
    one = _one(a.device)
    product: torch.Tensor = torch._scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=use_fast_accum)
    return product


def _in_fours(scales: torch.Tensor) -> torch.Tensor:
    """[K / 128, N / 128] with columns that are a multiple of four elements apart."""
    high, wide = scales.shape
    padded = scales.new_empty(wide, -(-high // 4) * 4)
    padded[:, :high].copy_(scales.t())
    return padded[:, :high].t()


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones(1, device=device)
