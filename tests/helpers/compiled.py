"""Kernels as GPUs run them, compiled for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
from kernel_targets import TARGETS, Target


def for_a_gpu(
    kernel: Any,
    constants: Mapping[str, Any],
    types: Mapping[str, str | tuple[str | None, ...]],
    *,
    multiples: Collection[str] = (),
    warps: int,
    stages: int | None = None,
    target: Target = TARGETS["sm_90"],
) -> Any:
    """What Triton compiles of a kernel for a target: `asm["ptx"]`, `metadata.shared`.

    types: of arguments whose names do not say: else x_peers_ptr is *i64, x_ptr *i32, and any other i32. A tuple of pointers has
    a tuple of types, with None where it is None. Pointers are multiples of 16 bytes, and so are the integers that `multiples`
    names. Skips the test where Triton is not installed.
    """
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    known = {name: "*i64" if name.endswith("peers_ptr") else "*i32" if name.endswith("_ptr") else "i32" for name in names}
    signature = known | {name: kind for name, kind in types.items() if name in names} | dict.fromkeys(constants, "constexpr")
    constexprs: dict[Any, Any] = {(names.index(name),): value for name, value in constants.items()}
    aligned = [(at,) for at, name in enumerate(names) if name.endswith("_ptr") or name in multiples]
    for at, name in enumerate(names):
        if isinstance(kinds := signature[name], tuple):
            signature[name] = type(kinds)(*(kind or "constexpr" for kind in kinds))
            constexprs |= {(at, place): None for place, kind in enumerate(kinds) if kind is None}
            aligned += [(at, place) for place, kind in enumerate(kinds) if kind is not None]
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": warps} | ({"num_stages": stages} if stages else {})
    return triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp), options=options)


def all_reduce_for_a_gpu(kernel: Any, layout: Any) -> Any:
    """The kernel of weft.kernels.all_reduce, by a plan of its, without addends."""
    from devices import BLOCK_OF_H200
    from kernel_examples import all_reduce_example

    one = all_reduce_example(layout, BLOCK_OF_H200)
    return for_a_gpu(one.kernel, one.constants, one.types, multiples=one.multiples, warps=one.warps)
