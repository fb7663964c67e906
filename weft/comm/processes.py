"""Processes of this host: which of them live, and which see each other."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none, or only its zombie.

    Raises OSError where that cannot be found out, as without free file descriptors.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def died(pid: int, start: int | None) -> bool:
    """Whether the process that had this number and start is gone. A process of which that cannot be found out has not died."""
    try:
        return process_start(pid) != start
    except OSError:
        return not _exists(pid)


def _exists(pid: int) -> bool:
    """Whether there is a process of this number. Needs no file descriptor."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


@cache
def process_namespace() -> str:
    """Among which processes this one has its number: those of a host, or of a container."""
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return "0"


def node_label(shared_memory: Path) -> str:
    """Return what is equal for ranks of one node in addition to the host's name: the kernel, /dev/shm, and the processes'
    numbers."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        kernel = ""
    return hashlib.sha256(f"{kernel} {os.stat(shared_memory).st_dev} {process_namespace()}".encode()).hexdigest()[:6]
