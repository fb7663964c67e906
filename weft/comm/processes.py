"""Processes of this host: which ones are alive, and which can see each other."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path


def process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None if there is no such process, or only its zombie.

    Raises OSError if this cannot be determined, for example without free file descriptors.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def died(pid: int, start: int | None) -> bool:
    """Return whether the process with this number and start time has died. If that cannot be determined, it has not."""
    try:
        return process_start(pid) != start
    except OSError:
        return not _exists(pid)


def _exists(pid: int) -> bool:
    """Return whether there is a process with this number. It needs no file descriptor."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process exists, and belongs to another user
        return True
    return True


@cache
def process_namespace() -> str:
    """Return the namespace of this process's number: that of the host, or of a container."""
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return "0"


def node_label(shared_memory: Path) -> str:
    """Return a digest of what ranks of one node share besides the host's name: kernel, /dev/shm and process namespace."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        kernel = ""
    return hashlib.sha256(f"{kernel} {os.stat(shared_memory).st_dev} {process_namespace()}".encode()).hexdigest()[:6]
