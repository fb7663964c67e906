"""Capping what torch.compile generates: every Triton kernel that a compiled function launches meanwhile, in the same thread.

Generated code launches each kernel through an object of Inductor's, CachingAutotuner, that keeps what was compiled beside its
launcher. While a capped function runs, `run` of that class asks which cap its thread is under, and goes to a clone of the
object whose launcher was made from a capped copy (weft.overlap.controls.triton_kernels). Neither object nor code of the
function changes, and outside of such calls the class is as torch has it.

A kernel with several configurations is tuned at its first launch, which is not capped. Vendor libraries that the function calls
are not either, nor its backward pass, which runs in another thread, nor what torch replays from graphs that it recorded before
(mode="reduce-overhead").
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from weft.overlap.controls.device import this_device
from weft.overlap.controls.triton_kernels import capped, is_compiled
from weft.overlap.controls.usage import Cap, Shaped, Usage

Run = Callable[..., Any]


def is_compiled_function(kernel: object) -> bool:
    """Whether torch.compile made this: of a function, or of a module in either way."""
    return any(
        getattr(kernel, name, None) is not None for name in ("_torchdynamo_orig_callable", "_orig_mod", "_compiled_call_impl")
    )


class ShapedFunction(Shaped):
    """A function or module that torch.compile made, called with a cap on each Triton kernel it launches.

    A function has many kernels: one of which no more blocks fit anyway stays as it is.
    """

    def __init__(self, function: Callable[..., Any], cap: Cap) -> None:
        super().__init__(Cap(blocks_per_sm=cap.blocks_per_sm, strict=False))
        self._function = function
        self._clones: dict[int, tuple[Any, Any]] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._check_open()
        with _INTERCEPTED.by(self):
            return self._function(*args, **options)

    def clone_of(self, kernel: Any) -> Any:
        """The capped clone of one of Inductor's kernels, which has been tuned."""
        if id(kernel) not in self._clones:
            self._clones[id(kernel)] = kernel, _clone(kernel, self.cap)
        return self._clones[id(kernel)][1]


class _Intercepted:
    """CachingAutotuner.run, replaced while any thread is in a capped function; each thread's innermost one counts."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._original: Run | None = None
        self._here = threading.local()

    @contextmanager
    def by(self, function: ShapedFunction) -> Iterator[None]:
        outer = getattr(self._here, "function", None)
        self._enter()
        self._here.function = function
        try:
            yield
        finally:
            self._here.function = outer
            self._leave()

    def _enter(self) -> None:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        with self._lock:
            self._users += 1
            if self._users == 1:
                self._original = CachingAutotuner.run
                CachingAutotuner.run = self._replacing(self._original)  # type: ignore[method-assign]

    def _leave(self) -> None:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        with self._lock:
            self._users -= 1
            if self._users == 0:
                assert self._original is not None
                CachingAutotuner.run = self._original  # type: ignore[method-assign]

    def _replacing(self, original: Run) -> Run:
        def run(kernel: Any, *args: Any, benchmark_run: bool = False, **options: Any) -> Any:
            function = getattr(self._here, "function", None)
            if function is not None and not benchmark_run and len(kernel.launchers) == 1:
                kernel = function.clone_of(kernel)
            return original(kernel, *args, benchmark_run=benchmark_run, **options)

        return run


_INTERCEPTED = _Intercepted()


def _clone(kernel: Any, cap: Cap) -> Any:
    """One of Inductor's kernels with a capped launcher. It may not be copied by `copy`, which would pickle it."""
    (launcher,) = kernel.launchers
    result = next((result for result in kernel.compile_results if result.config == launcher.config), None)
    if result is None:
        raise ValueError(f"this torch keeps nothing of {kernel.fn.__name__} that could be launched with a cap")
    clone = object.__new__(type(kernel))
    clone.__dict__.update(kernel.__dict__)
    padded = copy.copy(result)
    padded.kernel = capped(result.kernel, cap) if is_compiled(result.kernel) else _capped_static(result.kernel, cap)
    clone.launchers, clone.compile_results = [padded.make_launcher()], [padded]
    if hasattr(clone, "_cached_launcher"):
        clone._cached_launcher = None
    return clone


def _capped_static(kernel: Any, cap: Cap) -> Any:
    """A copy of a kernel that torch launches without Triton; not loaded yet: making its launcher does that."""
    device = this_device()
    usage = Usage(threads=kernel.num_warps * device.warp, registers=kernel.n_regs, shared_bytes=kernel.shared)
    padded = copy.copy(kernel)
    padded.shared, padded.function, padded.cubin_path = kernel.shared + cap.padding(device, usage), None, None
    return padded
