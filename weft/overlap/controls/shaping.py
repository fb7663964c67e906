"""Occupancy shaping: caps how many blocks of a kernel an SM holds at once, and says how many it holds without a cap.

This is the first control of resource-aware overlap (arXiv 2606.09200). Each block of a compute kernel gets more dynamic shared
memory than it uses. Fewer blocks are then resident, so blocks of a communication kernel also fit. No kernel's code changes.

    without a cap    SM | compute | compute | compute | compute |                  collective waits for a whole wave to end
    capped at 2      SM | compute + padding | compute + padding | collective |     starts as soon as it is launched

Triton kernels are launched as copies of the compiled kernels (weft.compat.triton_kernels). Those of CuPy and cuda-core are
launched themselves, with more dynamic shared memory. A launch with more than 48 KiB needs a higher limit of the function,
which the original kernel shares. The limit is raised as far as needed, and restored on close. It does not affect launches with
less.
"""

from __future__ import annotations

import copy
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from weft.compat import triton_kernels as compat
from weft.compat.streams import checked, driver_api
from weft.compat.triton_kernels import is_compiled
from weft.overlap.controls.residency import Multiprocessor, Occupancy, blocks_per_sm, padding_bytes, this_device


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The resources of a kernel.

    threads: threads per block.
    registers: registers per thread.
    shared_bytes: static and dynamic shared memory per block.
    """

    threads: int
    registers: int
    shared_bytes: int

    def on(self, device: Multiprocessor) -> Occupancy:
        return blocks_per_sm(device, threads=self.threads, registers=self.registers, shared_bytes=self.shared_bytes)


@dataclass(frozen=True, kw_only=True)
class Cap:
    """A limit on the number of blocks per SM.

    strict: raise an error for a kernel of which fewer blocks fit anyway. Otherwise such a kernel is not changed.
    """

    blocks_per_sm: int
    strict: bool = True

    def __post_init__(self) -> None:
        if self.blocks_per_sm < 1:
            raise ValueError(f"blocks_per_sm is {self.blocks_per_sm}; at least one block an SM has to run")

    def padding(self, device: Multiprocessor, usage: Usage) -> int:
        """Return the bytes of shared memory to add to each block. Raises ValueError if no padding gives the cap."""
        if not self.strict and usage.on(device).blocks <= self.blocks_per_sm:
            return 0
        return padding_bytes(
            device,
            threads=usage.threads,
            registers=usage.registers,
            shared_bytes=usage.shared_bytes,
            blocks_per_sm=self.blocks_per_sm,
        )


class Shaped:
    """A kernel that is launched with a cap. The original kernel is launched without it.

    It is also a context. Closing it undoes its settings, and later launches raise ValueError.
    """

    def __init__(self, cap: Cap) -> None:
        self.cap = cap
        self._closed = False

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"this kernel's cap of {self.cap.blocks_per_sm} blocks an SM is closed; shape the kernel again")

    def __enter__(self) -> Shaped:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def is_launchable(kernel: object) -> bool:
    """Return whether this is a kernel that Triton's decorators make: jit, autotune, heuristics."""
    from triton.runtime.jit import KernelInterface

    return isinstance(kernel, KernelInterface)


def usage_of_triton(compiled: Any) -> Usage:
    """Return the resources of a compiled Triton kernel, which is loaded onto the current device if necessary."""
    asked = compat.asked(compiled)
    return Usage(threads=asked.threads, registers=asked.registers, shared_bytes=asked.shared_bytes)


def capped(compiled: Any, cap: Cap) -> Any:
    """Return a copy of a compiled kernel that is launched with the cap, or the kernel itself if nothing needs to be added.

    Raises ValueError if the kernel cannot be capped.
    """
    usage = usage_of_triton(compiled)
    padding = cap.padding(this_device(), usage)
    return compat.with_shared_bytes(compiled, usage.shared_bytes + padding) if padding else compiled


class _Capped:
    """A @triton.jit function that launches capped copies of its compiled kernels. Other attributes are the function's own."""

    def __init__(self, function: Any, cap: Cap) -> None:
        self._function, self._cap = function, cap
        self._copies: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def run(self, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        """Launch as Triton's own `run` does, and return the capped copy."""
        compiled = self._function.run(*args, grid=grid, warmup=True, **options)
        if hasattr(compiled, "result"):
            compiled = compiled.result()
        if compiled not in self._copies:
            self._copies[compiled] = capped(compiled, self._cap)
        if not warmup:
            bound = self._bind(args, options)
            sizes = tuple(grid(bound) if callable(grid) else grid)
            self._copies[compiled][(*sizes, 1, 1)[:3]](*bound.values())
        return self._copies[compiled]

    def _bind(self, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of the function by name, in order. Launch options such as num_warps are left out."""
        parameters = self._function.signature.parameters
        bound = self._function.signature.bind(*args, **{name: value for name, value in options.items() if name in parameters})
        bound.apply_defaults()
        return dict(bound.arguments)


class ShapedKernel(Shaped):
    """A Triton kernel with a cap. `shaped[grid](...)` launches it.

    An autotuned kernel is tuned again under the cap. Its configurations of which no more blocks fit anyway are not changed. The
    first launch loads the copy, which a graph capture may forbid, so launch once before a capture.
    """

    def __init__(self, kernel: Any, cap: Cap) -> None:
        super().__init__(cap)
        self._kernel = _copy_kernel(kernel, cap)

    def run(self, *args: Any, **options: Any) -> Any:
        self._check_open()
        return self._kernel.run(*args, **options)

    def warmup(self, *args: Any, grid: Any, **options: Any) -> Any:
        """Compile and load the kernel without a launch, and return the capped copy."""
        self._check_open()
        return self._kernel.run(*args, grid=grid, warmup=True, **options)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **options: self.run(*args, grid=grid, warmup=False, **options)


def _copy_kernel(kernel: Any, cap: Cap) -> Any:
    """Copy the chain of decorators around a @triton.jit function, and put the capped function in it."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    if isinstance(kernel, JITFunction):
        return _Capped(kernel, cap)
    if not hasattr(kernel, "fn") or not is_launchable(kernel.fn):
        raise ValueError(f"kernel {_name(kernel)} runs under Triton's interpreter, which has no multiprocessors to share")
    clone = copy.copy(kernel)
    if isinstance(kernel, Autotuner):
        cap = Cap(blocks_per_sm=cap.blocks_per_sm, strict=cap.strict and len(kernel.configs) == 1)
        # Times without the cap, from this process or Triton's cache on disk, do not hold under the cap.
        clone.cache, clone.cache_results = {}, False
    clone.fn = _copy_kernel(kernel.fn, cap)
    return clone


def _name(kernel: Any) -> str:
    return str(getattr(kernel, "__name__", type(kernel).__name__))


def only_compiled(kernel: Any) -> Any:
    """Return the only compiled variant of a kernel for the current device. Raises ValueError if it has none, or several."""
    while not compat.has_variants(kernel):
        if not is_launchable(getattr(kernel, "fn", None)):
            raise ValueError(f"kernel {_name(kernel)} runs under Triton's interpreter, which has no multiprocessors to share")
        kernel = kernel.fn
    variants = compat.compiled_variants(kernel)
    if len(variants) != 1:
        raise ValueError(
            f"kernel {_name(kernel)} has {len(variants)} compiled variants on this device; "
            "pass the one that is meant: what a launch, or kernel.warmup(...), returns"
        )
    return variants[0]


def is_cupy(kernel: object) -> bool:
    """Return whether this is, or looks like, a RawKernel of CuPy."""
    return callable(kernel) and all(
        hasattr(kernel, name) for name in ("max_dynamic_shared_size_bytes", "num_regs", "shared_size_bytes")
    )


def is_cuda_core(kernel: object) -> bool:
    """Return whether this is, or looks like, a Kernel of cuda-core."""
    return all(hasattr(kernel, name) for name in ("attributes", "handle", "occupancy"))


def usage_of_raw(kernel: Any, threads: int, dynamic_bytes: int) -> Usage:
    """Return the resources of a block with `threads` threads."""
    said = kernel if is_cupy(kernel) else kernel.attributes
    return Usage(threads=threads, registers=said.num_regs, shared_bytes=said.shared_size_bytes + dynamic_bytes)


class _ShapedRaw(Shaped, ABC):
    """A raw kernel with a cap. Subclasses read and set its limit of dynamic shared memory, in bytes.

    kernel: the original.
    """

    def __init__(self, kernel: Any, cap: Cap) -> None:
        super().__init__(cap)
        self._kernel = kernel
        self._before: int | None = None

    def _padded(self, threads: int, dynamic_bytes: int) -> int:
        """Return the dynamic shared memory for a launch, after raising the limit if needed."""
        self._check_open()
        dynamic_bytes += self.cap.padding(this_device(), usage_of_raw(self._kernel, threads, dynamic_bytes))
        limit = self._limit()
        if limit < dynamic_bytes:
            self._before = limit if self._before is None else self._before
            self._set_limit(dynamic_bytes)
        return dynamic_bytes

    @abstractmethod
    def _limit(self) -> int: ...

    @abstractmethod
    def _set_limit(self, nbytes: int) -> None: ...

    def close(self) -> None:
        if self._before is not None:
            self._set_limit(self._before)
            self._before = None
        super().close()


class ShapedCupy(_ShapedRaw):
    """A CuPy kernel with a cap. It is called as a RawKernel: `shaped(grid, block, args, shared_mem=0)`."""

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0, **options: Any) -> Any:
        return self._kernel(grid, block, args, shared_mem=self._padded(math.prod(block), shared_mem), **options)

    def _limit(self) -> int:
        return int(self._kernel.max_dynamic_shared_size_bytes)

    def _set_limit(self, nbytes: int) -> None:
        self._kernel.max_dynamic_shared_size_bytes = nbytes


class ShapedCudaCore(_ShapedRaw):
    """A cuda-core kernel with a cap. `shaped.launch(stream, config, *args)` is cuda-core's launch without the kernel
    argument."""

    def launch(self, stream: Any, config: Any, *args: Any) -> None:
        from cuda.core import launch

        launch(stream, self.config(config), self._kernel, *args)

    def config(self, config: Any) -> Any:
        """Return a copy of a launch configuration, with the cap, for cuda-core's own launch."""
        options = {name: getattr(config, name) for name in _OPTIONS if getattr(config, name, None)}
        return type(config)(**options, shmem_size=self._padded(math.prod(config.block), config.shmem_size or 0))

    def _limit(self) -> int:
        # kernel.attributes would return a cached value.
        api = driver_api()
        return int(checked(api.cuKernelGetAttribute(_limit_of(api), self._kernel.handle, checked(api.cuCtxGetDevice()))))

    def _set_limit(self, nbytes: int) -> None:
        api = driver_api()
        checked(api.cuKernelSetAttribute(_limit_of(api), nbytes, self._kernel.handle, checked(api.cuCtxGetDevice())))


def _limit_of(api: Any) -> Any:
    return api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


_OPTIONS = ("grid", "cluster", "block", "is_cooperative", "programmatic_stream_serialization")
"""The fields of a cuda-core launch configuration that are copied. Shared memory is set separately."""


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
    if _by_triton() and is_launchable(kernel):
        return ShapedKernel(kernel, cap)
    if is_cupy(kernel):
        return ShapedCupy(kernel, cap)
    if is_cuda_core(kernel):
        return ShapedCudaCore(kernel, cap)
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
        return usage_of_triton(kernel)
    if _by_triton() and is_launchable(kernel):
        return usage_of_triton(only_compiled(kernel))
    if not (is_cupy(kernel) or is_cuda_core(kernel)):
        raise ValueError(f"kernel is {type(kernel).__name__}; use {_KINDS}")
    if threads is None:
        raise ValueError("threads is missing: how many threads a block of this kernel has is said at each launch")
    return usage_of_raw(kernel, threads, dynamic_bytes)


def _by_triton() -> bool:
    """Return whether Triton has been imported. Without it no kernel can be Triton's."""
    return "triton" in sys.modules
