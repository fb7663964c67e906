"""This module reads what compiled Triton kernels need of an SM, and makes copies that request more shared memory.

Triton's launcher reads the amount of shared memory to request from the compiled kernel's metadata, and its loader raises the
function's limit to that amount. So a copy of the compiled kernel with larger metadata, loaded by Triton itself, is sufficient
on CUDA and HIP. The copy has its own function handle, so the original does not change. Every launch contains its size, so CUDA
graphs replay it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_PLAIN_LAUNCHER = "3.6."
"""The versions of Triton whose launcher takes the arguments that `launcher_of` passes."""
_SCRATCH = ("global_scratch_size", "profile_scratch_size")
"""The attributes of Triton's launcher that have the bytes of scratch memory of a block."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Asked has the resources that one block of a compiled kernel needs. registers: the number per thread."""

    threads: int
    registers: int
    shared_bytes: int


def is_compiled(kernel: object) -> bool:
    """Return whether this is a compiled kernel, as a launch or `warmup` of a Triton kernel returns it."""
    return all(hasattr(kernel, name) for name in ("packed_metadata", "metadata", "_init_handles"))


def asked(compiled: Any) -> Asked:
    """Return the resources that a block of a compiled kernel needs. The kernel is loaded onto the current device first."""
    compiled._init_handles()
    metadata = compiled.metadata
    threads = metadata.num_warps * metadata.target.warp_size
    return Asked(threads=threads, registers=compiled.n_regs, shared_bytes=metadata.shared)


def with_shared_bytes(compiled: Any, shared_bytes: int) -> Any:
    """Return a copy of a compiled kernel whose blocks request shared_bytes, loaded onto the current device."""
    from triton.compiler.compiler import make_backend

    padded = copy.copy(compiled)
    padded.metadata = compiled.metadata._replace(shared=shared_bytes)
    padded.packed_metadata = make_backend(compiled.metadata.target).pack_metadata(padded.metadata)
    padded.module = None
    padded._init_handles()
    return padded


def compiled_variants(function: Any) -> list[Any]:
    """Return the kernels that a @triton.jit function has compiled for the current device."""
    from triton.runtime import driver

    return list(function.device_caches[driver.active.get_current_device()][0].values())


def has_variants(kernel: object) -> bool:
    """Return whether `compiled_variants` accepts a kernel. It accepts a @triton.jit function, but not a wrapper of one."""
    return hasattr(kernel, "device_caches")


def finished(launched: Any) -> Any:
    """Wait until a kernel is compiled and return it. Return None for the interpreter, which compiles nothing.

    launched: the result of a launch, which may be a future within Triton's AsyncCompileMode.
    """
    return launched.result() if hasattr(launched, "result") else launched


def relaunch(compiled: Any, blocks: int, arguments: Sequence[object], stream: int | None) -> None:
    """Launch `blocks` blocks of a compiled kernel, without binding or specialising arguments again.

    arguments: all its arguments, including constants.
    stream: by default torch's current stream.
    """
    compiled[(blocks, 1, 1)](*arguments, stream=stream)


def launcher_of(compiled: Any, blocks: int) -> Callable[[int, Sequence[object]], None]:
    """Return a function (stream, arguments) that launches `blocks` blocks of a compiled kernel, with less work than `relaunch`.

    Pointers may be integers, about which the launcher does not ask the driver. Triton's own launcher calls its hooks in each
    launch, even if nobody has added one, and looks for scratch memory. So this function calls the function of C within it,
    unless the kernel needs scratch memory, and as long as there are no hooks.
    """
    import triton

    compiled._init_handles()
    run, runtime = compiled.run, triton.knobs.runtime
    if not triton.__version__.startswith(_PLAIN_LAUNCHER) or any(getattr(run, name, 1) for name in _SCRATCH):
        return lambda stream, arguments: relaunch(compiled, blocks, arguments, stream)
    launch, function, packed = run.launch, compiled.function, compiled.packed_metadata
    options = run.launch_cooperative_grid, run.launch_pdl, None, None, packed, None, None, None

    def start(stream: int, arguments: Sequence[object]) -> None:
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            relaunch(compiled, blocks, arguments, stream)
        else:
            launch(blocks, 1, 1, stream, function, *options, *arguments)

    return start
