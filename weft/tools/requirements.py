"""The part of `weft doctor` that needs no GPU: Python and packages, variables of the environment, cores and shared memory.

Each package is imported, and its version is compared with the lowest allowed. Nothing here imports PyTorch before that.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import mmap
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["ok", "warn", "missing"]
PYTHON = (3, 11)
SHM = Path("/dev/shm")
ENOUGH_BYTES = 2 << 30
"""A layer of a large model on four ranks fits into this size. The usual 64 MiB of a container are too small."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one examination.

    what: the subject.
    state: ok, warn if weft works more slowly or with fewer features, or missing if weft needs it.
    detail: what was found.
    cure: how to fix it. Empty if nothing needs to be done.
    """

    what: str
    state: State
    detail: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.what}: {self.detail}" + (f" -> {self.cure}" if self.cure else "")


# --- Python and packages ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Package:
    """A distribution, its lowest version, and its use in weft. `without` says what still works without it."""

    name: str
    lowest: str
    purpose: str
    without: str = ""


PLAIN_FLAGS = "plain loads and stores serve on x86-64" if platform.machine() in ("x86_64", "AMD64") else ""
"""Empty on other processors, on which the host executor needs real acquire and release operations."""

PACKAGES = (
    Package(name="torch", lowest="2.11", purpose="tensors, matmuls, collectives"),
    Package(name="triton", lowest="3.4", purpose="kernels"),
    Package(name="numpy", lowest="1.26", purpose="planner, host executor"),
    Package(name="simpy", lowest="4.1", purpose="simulator"),
    Package(name="rich", lowest="13", purpose="command line"),
    Package(name="typer", lowest="0.12", purpose="command line"),
    Package(name="plotly", lowest="5.20", purpose="reports", without="all but --report works"),
    Package(name="atomicshm", lowest="0.1", purpose="flags of the host executor", without=PLAIN_FLAGS),
)


def software_findings() -> tuple[Finding, ...]:
    """Return a finding on Python and one on each package."""
    return (_python(), *(package_finding(package) for package in PACKAGES))


def package_finding(package: Package) -> Finding:
    """Import the package and compare its version. A package that is there but fails to import counts as missing."""
    state: State = "warn" if package.without else "missing"
    what, cure = f"{package.name} ({package.purpose})", f'pip install "{package.name}>={package.lowest}"'
    try:
        module = importlib.import_module(package.name)
    except ModuleNotFoundError:
        without = f"; {package.without}" if package.without else ""
        return Finding(what=what, state=state, detail=f"not installed{without}", cure=cure)
    except Exception as error:  # a broken installation may raise any error, and the doctor must continue
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return Finding(what=what, state=state, detail=f"does not import: {reason[0]}", cure=f"{cure} --force-reinstall")
    version = _version(package.name) or str(getattr(module, "__version__", ""))
    if version and _numbers(version) < _numbers(package.lowest):
        return Finding(what=what, state=state, detail=f"{version}; weft needs {package.lowest}", cure=cure)
    return Finding(what=what, state="ok", detail=version or "version unknown")


def _python() -> Finding:
    seen, needed = ".".join(map(str, sys.version_info[:3])), ".".join(map(str, PYTHON))
    if sys.version_info[:2] < PYTHON:
        return Finding(what="Python", state="missing", detail=seen, cure=f"use Python {needed} or newer")
    return Finding(what="Python", state="ok", detail=seen)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, at least two of them.

    >>> _numbers("2.11.0+cu130"), _numbers("13")
    ((2, 11, 0), (13, 0))
    """
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = tuple(int(part) for part in found.group().split(".")) if found else ()
    return numbers + (0,) * (2 - len(numbers))


# --- environment ------------------------------------------------------------------------------------------------------


def variables() -> dict[str, Callable[[], object]]:
    """Return all variables that weft reads, each with a function that raises ValueError for a wrong value."""
    import torch

    from weft.comm.membership import ranks_per_node, timeout_from_environment
    from weft.runtime.choose import automatic, profile_for
    from weft.runtime.collective_calls import staging_from_environment
    from weft.runtime.programs import memory_from_environment
    from weft.runtime.watchdog import on_failure_from_environment

    return {
        "WEFT_TIMEOUT_S": timeout_from_environment,
        "WEFT_ON_FAILURE": on_failure_from_environment,
        "WEFT_MACHINE": lambda: profile_for(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "WEFT_SCHEDULE": automatic,
        "WEFT_CACHE_DIR": lambda: None,
        "WEFT_PROGRAM_MEMORY_GB": memory_from_environment,
        "WEFT_RANKS_PER_NODE": ranks_per_node,
        "WEFT_STAGING_BYTES": lambda: staging_from_environment(torch.device("cpu")),
    }


def check_environment() -> None:
    """Raise ValueError for the first variable with a wrong value, as the first call would on every rank."""
    for read in variables().values():
        read()


def environment_findings() -> Iterator[Finding]:
    """Examine weft's environment variables and those of CUDA. Without PyTorch there are no findings."""
    try:
        known = variables()
    except Exception:  # a broken installation may raise any error, which the finding on PyTorch reports
        return
    for name, read in known.items():
        if name not in os.environ:
            continue
        try:
            read()
            yield Finding(what=name, state="ok", detail=os.environ[name] or "empty")
        except ValueError as error:
            detail = " ".join(str(error).split())
            yield Finding(what=name, state="missing", detail=detail, cure=f"set it so, or unset {name}")
    for name in sorted(name for name in os.environ if name.startswith("WEFT_") and name not in known):
        cure = f"unset {name}; weft reads {', '.join(known)}"
        yield Finding(what=name, state="warn", detail="nothing reads it", cure=cure)
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "") not in ("", "0"):
        detail = "kernel launches block, so only schedule='sequential' can run on GPUs"
        yield Finding(what="CUDA_LAUNCH_BLOCKING", state="warn", detail=detail, cure="unset CUDA_LAUNCH_BLOCKING")
    from weft.core.hardware import DEFAULT_QUEUES, hardware_queues

    if hardware_queues() < DEFAULT_QUEUES:
        name, detail = "CUDA_DEVICE_MAX_CONNECTIONS", "hardware queues are few, so only schedule='sequential' can run on GPUs"
        yield Finding(what=name, state="warn", detail=detail, cure=f"unset {name}: weft's lanes start early without it")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "cudaMallocAsync" in os.environ.get(name, ""):
            detail = "this allocator has no memory pools, so only schedule='sequential' can run on GPUs"
            yield Finding(what=name, state="warn", detail=detail, cure="use torch's own allocator: leave backend: out")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is not None:
        detail = f"{seen or 'empty'}: weft sees these GPUs alone; ranks of one job may each have a list of their own"
        yield Finding(what="CUDA_VISIBLE_DEVICES", state="ok", detail=detail)


# --- host -------------------------------------------------------------------------------------------------------------


def host_findings() -> tuple[Finding, ...]:
    """Examine cores and shared memory."""
    return _cores(), shared_memory_finding()


def shared_memory_finding(folder: Path = SHM) -> Finding:
    """Map, write, read and remove a block in `folder`, and check how much memory is free."""
    what = "shared memory (host executor)"
    try:
        _try_block(folder)
        space = os.statvfs(folder)
    except OSError as error:
        cure = f"make {folder} a writable tmpfs (in a container: --shm-size=8g or --ipc=host); weft needs Linux for it"
        return Finding(what=what, state="missing", detail=f"{folder}: {error.strerror or error}", cure=cure)
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    detail = f"{folder}, {_gib(size)}, {_gib(free)} free"
    if free < ENOUGH_BYTES:
        cure = f"free some of {folder}, or enlarge it: mount -o remount,size=8g {folder} (in a container: --shm-size=8g)"
        return Finding(what=what, state="warn", detail=f"{detail}; large models may not fit", cure=cure)
    return Finding(what=what, state="ok", detail=detail)


def _try_block(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        os.truncate(file.fileno(), mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE) as block:
            block[:4] = b"weft"
            if os.pread(file.fileno(), 4, 0) != b"weft":
                raise OSError("reads back other bytes than were written")


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    detail = f"{usable} usable, {platform.machine()}, {platform.system()}"
    if usable < 2:
        cure = "give the process two cores or more; ranks on one core take turns, so nothing overlaps"
        return Finding(what="CPU cores", state="warn", detail=detail, cure=cure)
    return Finding(what="CPU cores", state="ok", detail=detail)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
