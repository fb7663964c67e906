"""This module calls torch's private matmul of FP8 operands, because torch.nn.functional.scaled_mm has no `out`."""

from __future__ import annotations

import torch

OUT_DTYPES = {
    "tensorwise": (torch.bfloat16, torch.float16, torch.float32),
    "rowwise": (torch.bfloat16,),
    "blockwise": (torch.bfloat16,),
}
"""The dtypes of results for which torch has kernels, by recipe."""
_ALIGN_BYTES = 16
"""The alignment of scales that cuBLAS reads."""


def takes(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, recipe: str) -> bool:
    """Return whether torch has a kernel for a product with this recipe and a result of this dtype.

    Rowwise and blockwise scales need a b of float8_e4m3fn. Blockwise scales also need M and the blocks of K to be multiples of
    4, because for other sizes the format of scales depends on torch's version.
    """
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
    """Compute out = (a * scale_a) @ (b * scale_b).

    a: [M, K], with contiguous rows.
    b: [K, N], with contiguous columns.
    scale_a, scale_b: of the shapes that weft.core.problem.Scaling names.
    """
    if recipe == "blockwise":
        # cuBLAS reads the scales of a column of blocks together. It has no fast accumulation.
        scale_a, scale_b = scale_a.t().contiguous().t(), scale_b.t().contiguous().t()
        use_fast_accum = False
    scale_a, scale_b = (one if one.data_ptr() % _ALIGN_BYTES == 0 else one.clone() for one in (scale_a, scale_b))
    torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out.dtype, use_fast_accum=use_fast_accum, out=out)
