"""How many SMs cuBLAS and cuBLASLt may use: a setting of torch's that is experimental, and two functions of cuBLAS in C."""

from __future__ import annotations

import ctypes
from functools import cache

import torch


def has_carveout() -> bool:
    """Whether this torch can give its GEMMs fewer SMs."""
    return hasattr(torch._C, "_set_sm_carveout_experimental")


def carveout() -> int | None:
    """SMs that cuBLASLt, and persistent GEMMs of Inductor's, leave free in this process; None: not set."""
    _require_carveout()
    return torch._C._get_sm_carveout_experimental()


def set_carveout(sms: int | None) -> None:
    """Set what `carveout` reads. Raises ValueError where this torch cannot."""
    _require_carveout()
    torch._C._set_sm_carveout_experimental(sms)


def matmul_settings() -> tuple[object, ...]:
    """What is set in torch that decides how matmuls run: SMs left free, the same bits each time, sums in float16, float32 as
    TF32, partial sums in 16 bits, cuBLAS or another library."""
    return (
        torch._C._get_sm_carveout_experimental(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_cublas_allow_fp16_accumulation(),
        torch._C._get_fp32_precision_getter("cuda", "matmul"),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_blas_preferred_backend(),
    )


def needs_torch(dtype: torch.dtype) -> bool:
    """Whether the caller has asked torch for something that only torch's own matmuls of this dtype do: SMs left free, the same
    bits each time, sums in float16."""
    if torch._C._get_sm_carveout_experimental() is not None or torch.are_deterministic_algorithms_enabled():
        return True
    return dtype == torch.float16 and bool(torch._C._get_cublas_allow_fp16_accumulation())


def _require_carveout() -> None:
    if not has_carveout():
        raise ValueError(f"sms: torch {torch.__version__} cannot give its GEMMs fewer SMs; torch 2.11 can")


def sm_target() -> int:
    """The number of SMs for which the cuBLAS handle of this thread and of the current device chooses kernels; 0: all."""
    found = ctypes.c_int()
    _require_success(_library().cublasGetSmCountTarget(_handle(), ctypes.byref(found)))
    return found.value


def set_sm_target(sms: int) -> None:
    """Set what `sm_target` reads. Raises ValueError if cuBLAS refuses the number."""
    _require_success(_library().cublasSetSmCountTarget(_handle(), sms))


def _handle() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]


@cache
def _library() -> ctypes.CDLL:
    """The cuBLAS that torch has loaded."""
    name = f"libcublas.so.{str(torch.version.cuda).split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise ValueError(f"sms: {name} cannot be loaded: {error}") from None


def _require_success(status: int) -> None:
    if status:
        raise ValueError(f"sms: cuBLAS refused the number (status {status})")
