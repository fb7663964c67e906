"""Occupancy shaping: caps how many blocks of a kernel an SM holds at once, and says how many it holds without a cap.

This is the first control of resource-aware overlap (arXiv 2606.09200). Each block of a compute kernel gets more dynamic shared
memory than it uses. Fewer blocks are then resident, so blocks of a communication kernel also fit. No kernel's code changes.

    without a cap    SM | compute | compute | compute | compute |                  collective waits for a whole wave to end
    capped at 2      SM | compute + padding | compute + padding | collective |     starts as soon as it is launched
"""

from __future__ import annotations

import sys
from typing import Any

from weft.compat.triton_kernels import is_compiled
from weft.overlap.controls import raw_kernels, triton_kernels
from weft.overlap.controls.device import this_device
from weft.overlap.controls.residency import Multiprocessor, Occupancy
from weft.overlap.controls.usage import Cap, Usage

_KINDS = "a Triton kernel, a CuPy RawKernel, or a cuda-core Kernel"


def shape(kernel: Any, *, blocks_per_sm: int) -> Any:
    """Return a version of `kernel` of which an SM holds at most `blocks_per_sm` blocks at once. `kernel` itself does not
    change.

    The result is launched as `kernel` is: `shaped[grid](...)` for Triton (also autotuned or with heuristics), `shaped(...)` for
    CuPy, `shaped.launch(stream, config, ...)` for cuda-core. It is also a context, and closing it undoes its settings. Launch
    it once before you capture launches in a CUDA graph.

    Raises ValueError, here or at the launch, if fewer blocks fit anyway, if no padding gives that number, and for another kind
    of kernel, such as the result of torch.compile. Variants of an autotuned kernel of which fewer blocks fit are not changed.
    """
    cap = Cap(blocks_per_sm=blocks_per_sm)
    if _by_triton() and triton_kernels.is_launchable(kernel):
        return triton_kernels.ShapedKernel(kernel, cap)
    if raw_kernels.is_cupy(kernel):
        return raw_kernels.ShapedCupy(kernel, cap)
    if raw_kernels.is_cuda_core(kernel):
        return raw_kernels.ShapedCudaCore(kernel, cap)
    raise ValueError(f"kernel is {type(kernel).__name__}; use {_KINDS}")


def occupancy(
    kernel: Any, *, threads: int | None = None, dynamic_bytes: int = 0, device: Multiprocessor | None = None
) -> Occupancy:
    """Return how many blocks of a kernel an SM holds at once, and what limits that.

    kernel: the result of a Triton launch, a Triton kernel with one compiled variant, or a CuPy or cuda-core kernel.
    threads, dynamic_bytes: threads and dynamic shared memory per block, for a CuPy or cuda-core kernel.
    device: default, the current GPU.
    """
    return _usage(kernel, threads, dynamic_bytes).on(device or this_device())


def _usage(kernel: Any, threads: int | None, dynamic_bytes: int) -> Usage:
    if is_compiled(kernel):
        return triton_kernels.usage_of(kernel)
    if _by_triton() and triton_kernels.is_launchable(kernel):
        return triton_kernels.usage_of(triton_kernels.only_compiled(kernel))
    if not (raw_kernels.is_cupy(kernel) or raw_kernels.is_cuda_core(kernel)):
        raise ValueError(f"kernel is {type(kernel).__name__}; use {_KINDS}")
    if threads is None:
        raise ValueError("threads is missing: how many threads a block of this kernel has is said at each launch")
    return raw_kernels.usage_of(kernel, threads, dynamic_bytes)


def _by_triton() -> bool:
    """Return whether Triton has been imported. Without it no kernel can be Triton's."""
    return "triton" in sys.modules
