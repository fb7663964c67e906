"""torch's products of FP8 operands on NVIDIA GPUs. torch.nn.functional.scaled_mm is the public name, but it has no `out`."""

from __future__ import annotations

import torch

OUT_DTYPES = {
    "tensorwise": (torch.bfloat16, torch.float16, torch.float32),
    "rowwise": (torch.bfloat16,),
    "blockwise": (torch.bfloat16,),
}
"""By recipe, the dtypes of results that torch has kernels for."""
_ALIGN_BYTES = 16
"""Of scales that cuBLAS reads."""


def takes(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, recipe: str) -> bool:
    """Whether torch has a kernel for the product: of a result of this dtype; rowwise and blockwise, of a b of float8_e4m3fn.
    Blockwise only where four scales are adjacent along M and along K. For other layouts torch's format depends on its
    version."""
    if recipe == "blockwise" and (a.shape[0] % 4 or a.shape[1] % 512):
        return False
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
        # cuBLAS reads the scales of a column of blocks together. It has no fast accumulation.
        scale_a, scale_b = scale_a.t().contiguous().t(), scale_b.t().contiguous().t()
        use_fast_accum = False
    scale_a, scale_b = (one if one.data_ptr() % _ALIGN_BYTES == 0 else one.clone() for one in (scale_a, scale_b))
    torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out.dtype, use_fast_accum=use_fast_accum, out=out)
