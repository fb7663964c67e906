"""Examines environment variables: valid values, known names, and settings that affect CUDA's start."""

from __future__ import annotations

import os
from collections.abc import Iterator

from weft.tools.doctor.finding import Finding


def environment_findings() -> tuple[Finding, ...]:
    """Examine weft's environment variables and those of CUDA. Without PyTorch there are no findings."""
    try:
        from weft.runtime.environment import READ, unknown
    except Exception:  # a broken installation may raise any error, which the finding on PyTorch reports
        return ()
    found = [_read(name) for name in READ if name in os.environ]
    for name in unknown():
        cure = f"unset {name}; weft reads {', '.join(READ)}"
        found.append(Finding(what=name, state="warn", detail="nothing reads it", cure=cure))
    return (*found, *_of_cuda())


def _of_cuda() -> Iterator[Finding]:
    """Examine the variables of CUDA and PyTorch that affect what weft can run."""
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "") not in ("", "0"):
        detail = "kernel launches block, so only schedule='sequential' can run on GPUs"
        yield Finding(what="CUDA_LAUNCH_BLOCKING", state="warn", detail=detail, cure="unset CUDA_LAUNCH_BLOCKING")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "cudaMallocAsync" in os.environ.get(name, ""):
            detail = "this allocator has no memory pools, so only schedule='sequential' can run on GPUs"
            yield Finding(what=name, state="warn", detail=detail, cure="use torch's own allocator: leave backend: out")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is not None:
        detail = f"{seen or 'empty'}: weft sees these GPUs alone; ranks of one job may each have a list of their own"
        yield Finding(what="CUDA_VISIBLE_DEVICES", state="ok", detail=detail)


def _read(name: str) -> Finding:
    from weft.runtime.environment import READ

    try:
        READ[name]()
    except ValueError as error:
        return Finding(what=name, state="missing", detail=" ".join(str(error).split()), cure=f"set it so, or unset {name}")
    return Finding(what=name, state="ok", detail=os.environ[name] or "empty")
