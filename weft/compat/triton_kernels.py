"""Compiled Triton kernels from within: what they ask of an SM, and copies that ask for more shared memory.

Triton's launcher reads how much shared memory to ask for from the compiled kernel's metadata, and its loader raises the
function's limit to fit that. So a copy of the compiled kernel with larger metadata, loaded by Triton itself, is all it takes:
no hook, no patch, the same for CUDA and HIP. The copy has a function handle of its own, so that not even an attribute of the
original's changes; and since every launch carries its size, CUDA graphs replay it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What one block of a compiled kernel asks of its SM: threads, registers a thread, bytes of shared memory."""

    threads: int
    registers: int
    shared_bytes: int


def is_compiled(kernel: object) -> bool:
    """Whether this is what a launch or `warmup` of a Triton kernel returns."""
    return all(hasattr(kernel, name) for name in ("packed_metadata", "metadata", "_init_handles"))


def asked(compiled: Any) -> Asked:
    """What a compiled kernel asks for. The kernel is loaded onto the current device if it has not been."""
    compiled._init_handles()
    metadata = compiled.metadata
    threads = metadata.num_warps * metadata.target.warp_size
    return Asked(threads=threads, registers=compiled.n_regs, shared_bytes=metadata.shared)


def with_shared_bytes(compiled: Any, shared_bytes: int) -> Any:
    """A copy of a compiled kernel whose blocks ask for so many bytes of shared memory, loaded onto the current device."""
    from triton.compiler.compiler import make_backend

    padded = copy.copy(compiled)
    padded.metadata = compiled.metadata._replace(shared=shared_bytes)
    padded.packed_metadata = make_backend(compiled.metadata.target).pack_metadata(padded.metadata)
    padded.module = None
    padded._init_handles()
    return padded


def compiled_variants(function: Any) -> list[Any]:
    """What a @triton.jit function has compiled for the current device."""
    from triton.runtime import driver

    return list(function.device_caches[driver.active.get_current_device()][0].values())


def has_variants(kernel: object) -> bool:
    """Whether `compiled_variants` can be asked of a kernel: of a @triton.jit function, not of what wraps it."""
    return hasattr(kernel, "device_caches")


def finished(launched: Any) -> Any:
    """What the launch of a Triton kernel returned, once it is compiled. Within Triton's AsyncCompileMode it may be a future.
    The interpreter compiles nothing, and returns None."""
    return launched.result() if hasattr(launched, "result") else launched


def relaunch(compiled: Any, blocks: int, arguments: Sequence[object], stream: int | None) -> None:
    """Launch a compiled kernel on `blocks` blocks with all its arguments, constants included. Nothing is bound or specialised
    again. stream: default, torch's current one."""
    compiled[(blocks, 1, 1)](*arguments, stream=stream)
