"""Examines the host: its cores, which run rank processes, and its shared memory, through which they exchange data."""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
from pathlib import Path

from weft.tools.doctor.finding import Finding

SHM = Path("/dev/shm")
ENOUGH_BYTES = 2 << 30
"""A layer of a large model on four ranks fits into this size. The usual 64 MiB of a container are too small."""


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
