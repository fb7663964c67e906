"""This module reads, in one frame, the state of torch on which an eager call depends."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.autograd import forward_ad

from weft.compat.environment import variable


def thread_state(dtype: torch.dtype) -> tuple[Any, ...] | None:
    """Return the settings on which a call with factors of this dtype depends. They can be part of a key.

    These are the settings that change results or choices: whether gradients are recorded, those of
    weft.compat.cublas.matmul_settings (of which bfloat16 has fewer), and the variables of the environment
    that weft reads in each call. Return None if a mode for torch's functions or forward-mode autograd observes the thread. What
    else may observe it (weft.compat.dispatch.observed) is found by weft.compat.layouts.layout_check.
    """
    if _len_torch_function_stack() > 0 or forward_ad._current_level >= 0:
        return None
    of_all = (
        torch.is_grad_enabled(),
        variable(b"WEFT_SCHEDULE"),
        variable(b"WEFT_STAGING_BYTES"),
        torch._C._get_sm_carveout_experimental(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_blas_preferred_backend(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
    )
    if dtype == torch.bfloat16:
        return of_all
    return (
        *of_all,
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
        torch._C._get_fp32_precision_getter("cuda", "matmul"),
    )
