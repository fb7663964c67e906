"""Caps Triton kernels by launching copies of the compiled kernels with more dynamic shared memory
(weft.compat.triton_kernels)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from weft.compat import triton_kernels as compat
from weft.overlap.controls.device import this_device
from weft.overlap.controls.usage import Cap, Shaped, Usage


def is_launchable(kernel: object) -> bool:
    """Return whether this is a kernel that Triton's decorators make: jit, autotune, heuristics."""
    from triton.runtime.jit import KernelInterface

    return isinstance(kernel, KernelInterface)


def usage_of(compiled: Any) -> Usage:
    """Return the resources of a compiled Triton kernel, which is loaded onto the current device if necessary."""
    asked = compat.asked(compiled)
    return Usage(threads=asked.threads, registers=asked.registers, shared_bytes=asked.shared_bytes)


def capped(compiled: Any, cap: Cap) -> Any:
    """Return a copy of a compiled kernel that is launched with the cap, or the kernel itself if nothing needs to be added.

    Raises ValueError if the kernel cannot be capped.
    """
    usage = usage_of(compiled)
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
