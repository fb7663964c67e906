"""Shared memory between the ranks of one host: segments of bytes, and words that are read and written atomically.

A segment is POSIX shared memory that only its user can access. Its name contains the process id and the start time of its
creator, and random bits. It is unlinked as soon as every rank has mapped it, so no segment remains, however a rank ends. If the
creator dies before that, `remove_stale_segments` removes the segment. Every rank calls it when it joins a group. So this module
also knows which processes of the host are alive, and which can see each other.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import platform
import weakref
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.compat.device import mapped


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


SHM = Path("/dev/shm")
"""The directory of POSIX shared memory."""
PREFIX = "weft-"
"""The beginning of the name of every segment."""


class SharedSegment:
    """Bytes that ranks share. The creator calls `create`, the other ranks call `open`, and all ranks call `close`."""

    def __init__(self, name: str, mapping: mmap.mmap) -> None:
        self.name, self.nbytes, self._mapping = name, len(mapping), mapping

    @classmethod
    def create(cls, label: str, nbytes: int) -> SharedSegment:
        """Create a segment of at least `nbytes` zeros. Raises ValueError with the reason if that fails."""
        nbytes = max(mmap.PAGESIZE, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        name = f"{PREFIX}{process_namespace()}-{os.getpid()}-{process_start(os.getpid())}-{os.urandom(8).hex()}-{label}"
        try:
            descriptor = os.open(SHM / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ValueError(f"shared memory: weft cannot create a file in {SHM} ({error.strerror})") from None
        try:
            # Reserve the pages now, so that a full /dev/shm is an error here. Otherwise the first write would raise SIGBUS.
            os.posix_fallocate(descriptor, 0, nbytes)
            return cls(name, mapped(descriptor, nbytes))
        except BaseException as error:
            unlink(name)
            if not isinstance(error, OSError):
                raise
            raise ValueError(_describe_refusal(nbytes, error)) from None
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, name: str) -> SharedSegment:
        """Map a segment that another rank created."""
        descriptor = os.open(SHM / name, os.O_RDWR)
        try:
            return cls(name, mapped(descriptor, os.fstat(descriptor).st_size))
        finally:
            os.close(descriptor)

    def view_words(self, offset: int = 0, count: int | None = None) -> AtomicWords:
        """Return `count` 8-byte words that begin at byte `offset`. By default they reach to the end of the segment."""
        return AtomicWords(self._mapping, offset, (self.nbytes - offset) // 8 if count is None else count)

    def view_matrix(self, offset: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a rows x cols tensor whose first element is at byte `offset`."""
        if rows * cols == 0:
            return torch.empty(rows, cols, dtype=dtype)
        # While this view exists, the mapping cannot be closed. The tensor alone would keep only the Python object alive.
        return torch.frombuffer(memoryview(self._mapping), dtype=dtype, count=rows * cols, offset=offset).view(rows, cols)

    @property
    def address(self) -> int:
        """Return the address of the first byte in this process."""
        return torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()

    def read_bytes(self, offset: int, size: int) -> bytes:
        return self._mapping[offset : offset + size]

    def write_bytes(self, offset: int, data: bytes) -> None:
        self._mapping[offset : offset + len(data)] = data

    def read_text(self, offset: int, size: int) -> str:
        """Read a text that zeros may follow."""
        return self._mapping[offset : offset + size].rstrip(b"\0").decode(errors="replace")

    def write_text(self, offset: int, size: int, text: str) -> None:
        """Write a text, cut or filled with zeros to `size` bytes."""
        self._mapping[offset : offset + size] = text.encode()[:size].ljust(size, b"\0")

    def close(self) -> None:
        """Close the mapping. If tensors still use it, it is closed when the last of them is freed."""
        with contextlib.suppress(BufferError):
            self._mapping.close()


def _describe_refusal(nbytes: int, error: OSError) -> str:
    """Return why a segment of `nbytes` cannot be created, and what the user can do."""
    free = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
    reason = f"shared memory: {nbytes} bytes are needed, {free} are free in {SHM} ({error.strerror})"
    if error.errno == errno.ENOSPC or free < nbytes:
        return f"{reason}; enlarge it (--shm-size)"
    if error.errno == errno.ENOMEM:
        return f"{reason}; the host, or the memory limit of this container, has no memory left"
    return reason


class _NumpyWords:
    """8-byte words for x86-64, used if the package atomicshm is missing.

    On x86-64 an aligned 8-byte move is atomic, every load is a load-acquire, and every store is a store-release.
    """

    def __init__(self, data: memoryview) -> None:
        if platform.machine() not in ("x86_64", "AMD64"):
            raise ValueError(f"flags need atomics on {platform.machine()}: pip install atomicshm")
        self._words = np.frombuffer(data, dtype=np.uint64)

    def load_u64(self, offset: int, order: object) -> int:
        return int(self._words[offset >> 3])

    def store_u64(self, offset: int, value: int, order: object) -> None:
        self._words[offset >> 3] = value


def _open_words(data: memoryview) -> tuple[Any, Any, Any]:
    """Return an object that loads and stores 8-byte words at byte offsets, and its memory orders for loads and for stores."""
    try:
        from atomicshm import ACQUIRE, RELEASE, AtomicView
    except ImportError:
        return _NumpyWords(data), None, None
    return AtomicView(data), ACQUIRE, RELEASE


class AtomicWords:
    """8-byte unsigned words of a segment, with load-acquire and store-release."""

    def __init__(self, mapping: mmap.mmap, offset: int, count: int) -> None:
        assert offset % 8 == 0
        assert offset + 8 * count <= len(mapping)
        self.count = count
        self._view, self._acquire, self._release = _open_words(memoryview(mapping)[offset : offset + 8 * count])
        # A view that is part of a reference cycle ends the process when the garbage collector clears the cycle (atomicshm 0.1).
        # The finalizer refers to it, so the collector does not see it as garbage, and it is freed after this object.
        weakref.finalize(self, _release_view, self._view).atexit = False
        self.store_at: tuple[Callable[[int, int, Any], None], Any] = self._view.store_u64, self._release
        """A function (8 * index, value, order) that stores one word, and its order. It takes less time than `store`."""

    def make_loader(self, index: int) -> Callable[[], int]:
        """Return a function that loads one word. It takes less time than `load`."""
        return partial(self._view.load_u64, 8 * index, self._acquire)

    def load(self, index: int) -> int:
        return self._view.load_u64(8 * index, self._acquire)  # type: ignore[no-any-return]

    def store(self, index: int, value: int) -> None:
        self._view.store_u64(8 * index, value, self._release)


def _release_view(view: object) -> None:
    """Drop the last reference to a view. Its arguments do that."""


def unlink(name: str) -> None:
    """Remove the name of a segment, if it still exists."""
    (SHM / name).unlink(missing_ok=True)


def remove_stale_segments() -> list[str]:
    """Remove the segments of this user whose creator has died, and return their names.

    Segments of other containers stay, because their process ids mean other processes there.
    """
    removed = []
    for path in SHM.glob(f"{PREFIX}{process_namespace()}-*"):
        pid, start = [*path.name.removeprefix(f"{PREFIX}{process_namespace()}-").split("-"), "", ""][:2]
        try:
            # lstat does not follow links, which any user may create in this directory.
            is_own = path.lstat().st_uid == os.getuid()
        except OSError:
            continue
        if is_own and pid.isdigit() and start.isdigit() and died(int(pid), int(start)):
            with contextlib.suppress(OSError):  # a segment that stays does no harm, because no process maps it
                path.unlink()
                removed.append(path.name)
    return removed
