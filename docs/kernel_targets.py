"""This module lists the GPUs that every kernel is compiled for in CI. Triton's compilers need no GPU.

docs/kernels.md shows the table `rows`, and tests/kernels/test_targets.py compiles every entry that says yes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """A Target is one GPU architecture.

    gpus: the products that have it.
    backend, arch, warp: the arguments of Triton's GPUTarget.
    binary: the format that the driver loads.
    """

    gpus: str
    backend: str
    arch: int | str
    warp: int
    binary: str


TARGETS = {
    "sm_80": Target(gpus="A100", backend="cuda", arch=80, warp=32, binary="cubin"),
    "sm_90": Target(gpus="H100, H200", backend="cuda", arch=90, warp=32, binary="cubin"),
    "sm_100": Target(gpus="B200", backend="cuda", arch=100, warp=32, binary="cubin"),
    "gfx942": Target(gpus="MI300X", backend="hip", arch="gfx942", warp=64, binary="hsaco"),
}
NOT_COMPILED: dict[tuple[str, str], str] = {
    ("quantise", "sm_80"): "these GPUs have no instruction that converts to float8_e4m3fn"
}
"""The reason why the kernels of a module are not compiled for a target, by (module, target)."""
MODULES = (
    *("gemm_kernel", "all_reduce", "ragged", "ragged_rows", "segments", "experts"),
    *("lookup", "update", "push", "quantise", "sums", "norm", "flag_operations"),
)
"""The modules of weft.kernels that define kernels."""


def rows() -> list[tuple[str, ...]]:
    """Return a table that says which kernels compile for which GPUs, with a heading. Its numbers refer to `reasons`."""
    number = {reason: str(at) for at, reason in enumerate(reasons(), start=1)}
    table = [("weft/kernels/", *(f"{name} ({target.gpus})" for name, target in TARGETS.items()))]
    for module in MODULES:
        marks = [NOT_COMPILED.get((module, name)) for name in TARGETS]
        table.append((f"{module}.py", *("yes" if mark is None else f"no ({number[mark]})" for mark in marks)))
    return table


def reasons() -> tuple[str, ...]:
    """Return the reasons why kernels are not compiled for some GPUs, each once, in the order of NOT_COMPILED."""
    return tuple(dict.fromkeys(NOT_COMPILED.values()))
