"""What torch says of this CPU by private operators."""

from __future__ import annotations

from functools import cache

import torch


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has matmuls of its own for `dtype`. If not, torch's take a hundred times as long as those of float32."""
    if dtype == torch.float32:
        return True
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    return bool(getattr(torch.ops.mkldnn, name)())
