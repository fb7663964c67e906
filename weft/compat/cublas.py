"""Limits the number of SMs that cuBLAS and cuBLASLt use.

The carveout is an experimental setting of torch. The SM target is a setting of a cuBLAS handle, which cuBLAS's C functions read
and write.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch


def has_carveout() -> bool:
    """Return whether this version of torch can limit the SMs of its GEMMs."""
    return hasattr(torch._C, "_set_sm_carveout_experimental")


def carveout() -> int | None:
    """Return the number of SMs that cuBLASLt and Inductor's persistent GEMMs leave free in this process, or None if not set."""
    _require_carveout()
    return torch._C._get_sm_carveout_experimental()


def set_carveout(sms: int | None) -> None:
    """Set the number of SMs that `carveout` returns. Raises ValueError if this version of torch cannot."""
    _require_carveout()
    torch._C._set_sm_carveout_experimental(sms)


def matmul_settings(dtype: torch.dtype | None = None) -> tuple[object, ...]:
    """Return the settings of torch that affect how its matmuls run. They can be part of a cache key.

    The settings are, in this order: the carveout, deterministic algorithms, the preferred BLAS library, reduced-precision
    reductions in bfloat16 and in float16, accumulation in float16, and the precision of float32 matmuls. With bfloat16 as dtype
    it returns the first four, on which products of bfloat16 depend. That saves time in each replayed call.
    """
    of_bfloat16 = (
        torch._C._get_sm_carveout_experimental(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_blas_preferred_backend(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
    )
    if dtype == torch.bfloat16:
        return of_bfloat16
    return (
        *of_bfloat16,
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
        torch._C._get_fp32_precision_getter("cuda", "matmul"),
    )


def needs_torch(dtype: torch.dtype) -> bool:
    """Return whether a setting of torch applies that only torch's own matmuls of this dtype follow.

    Such settings are a carveout, deterministic algorithms, and accumulation in float16.
    """
    if torch._C._get_sm_carveout_experimental() is not None or torch.are_deterministic_algorithms_enabled():
        return True
    return dtype == torch.float16 and bool(torch._C._get_cublas_allow_fp16_accumulation())


def _require_carveout() -> None:
    if not has_carveout():
        raise ValueError(f"sms: torch {torch.__version__} cannot limit the SMs of its GEMMs; torch 2.11 can")


def sm_target() -> int:
    """Return the number of SMs for which cuBLAS chooses kernels in this thread and on the current device, or 0 for all SMs."""
    sms = ctypes.c_int()
    _require_success(_library().cublasGetSmCountTarget(_handle(), ctypes.byref(sms)))
    return sms.value


def set_sm_target(sms: int) -> None:
    """Set the number of SMs that `sm_target` returns. Raises ValueError if cuBLAS refuses the number."""
    _require_success(_library().cublasSetSmCountTarget(_handle(), sms))


def _handle() -> ctypes.c_void_p:
    """Return torch's cuBLAS handle of this thread and of the current device."""
    return ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]


@cache
def _library() -> ctypes.CDLL:
    """Return the cuBLAS library that torch has loaded."""
    name = f"libcublas.so.{str(torch.version.cuda).split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise ValueError(f"sms: {name} cannot be loaded: {error}") from None


def _require_success(status: int) -> None:
    if status:
        raise ValueError(f"sms: cuBLAS refused the number (status {status})")
