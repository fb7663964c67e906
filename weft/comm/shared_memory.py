"""Shared memory between the ranks of one host: segments of bytes, and words that are read and written atomically.

A segment is POSIX shared memory, readable by its user alone. Its name says which process created it (number and start time),
and cannot be guessed. It is unlinked as soon as every rank has mapped it, so that nothing stays behind however a rank ends.
What a creator left that died in between is removed by `reap_stale`, which every rank calls when it joins a group.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.comm.processes import died, process_namespace, process_start
from weft.compat.mappings import mapped

SHM = Path("/dev/shm")
PREFIX = "weft-"


class SharedSegment:
    """Bytes that ranks share. The creator calls `create`, the others `open`; both `close`."""

    def __init__(self, name: str, mapping: mmap.mmap) -> None:
        self.name, self.nbytes, self._mapping = name, len(mapping), mapping

    @classmethod
    def create(cls, label: str, nbytes: int) -> SharedSegment:
        """A new zeroed segment of at least `nbytes`. Raises ValueError, with the reason, where there can be none."""
        nbytes = max(mmap.PAGESIZE, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        name = f"{PREFIX}{process_namespace()}-{os.getpid()}-{process_start(os.getpid())}-{os.urandom(8).hex()}-{label}"
        try:
            descriptor = os.open(SHM / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ValueError(f"shared memory: no file can be made in {SHM} ({error.strerror})") from None
        try:
            # Reserve the pages now: a full /dev/shm is then an error here, not a SIGBUS at the first write.
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

    def words(self, offset: int = 0, count: int | None = None) -> AtomicWords:
        """8-byte words from byte `offset` on."""
        return AtomicWords(self._mapping, offset, (self.nbytes - offset) // 8 if count is None else count)

    def matrix(self, offset: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """A rows x cols tensor over the bytes from `offset` on."""
        if rows * cols == 0:
            return torch.empty(rows, cols, dtype=dtype)
        # The view keeps the mapping from being closed below the tensor, which by itself would keep the Python object alone.
        return torch.frombuffer(memoryview(self._mapping), dtype=dtype, count=rows * cols, offset=offset).view(rows, cols)

    @property
    def address(self) -> int:
        """Where this process finds the first byte."""
        return torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()

    def read_bytes(self, offset: int, size: int) -> bytes:
        return self._mapping[offset : offset + size]

    def write_bytes(self, offset: int, data: bytes) -> None:
        self._mapping[offset : offset + len(data)] = data

    def read_text(self, offset: int, size: int) -> str:
        return self._mapping[offset : offset + size].rstrip(b"\0").decode(errors="replace")

    def write_text(self, offset: int, size: int, text: str) -> None:
        self._mapping[offset : offset + size] = text.encode()[:size].ljust(size, b"\0")

    def close(self) -> None:
        """Drop this mapping; it goes once no tensor over it is left."""
        with contextlib.suppress(BufferError):
            self._mapping.close()


def _describe_refusal(nbytes: int, error: OSError) -> str:
    """Why there is no segment of so many bytes, and what helps."""
    free = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
    asked = f"shared memory: {nbytes} bytes asked, {free} free in {SHM} ({error.strerror})"
    if error.errno == errno.ENOSPC or free < nbytes:
        return f"{asked}; enlarge it (--shm-size)"
    if error.errno == errno.ENOMEM:
        return f"{asked}; the host, or the memory limit of this container, has no memory left"
    return asked


class _PlainView:
    """Words of some bytes without the package of atomics: on x86-64 an aligned 8-byte move is atomic, loads acquire and stores
    release."""

    def __init__(self, data: memoryview) -> None:
        if platform.machine() not in ("x86_64", "AMD64"):
            raise ValueError(f"flags need atomics on {platform.machine()}: pip install atomicshm")
        self._words = np.frombuffer(data, dtype=np.uint64)

    def load_u64(self, at: int, order: object) -> int:
        return int(self._words[at >> 3])

    def store_u64(self, at: int, value: int, order: object) -> None:
        self._words[at >> 3] = value


def _view_of(data: memoryview) -> tuple[Any, Any, Any]:
    """What loads and stores 8-byte words of some bytes, at byte offsets; its words for load-acquire and for store-release."""
    try:
        from atomicshm import ACQUIRE, RELEASE, AtomicView
    except ImportError:
        return _PlainView(data), None, None
    return AtomicView(data), ACQUIRE, RELEASE


class AtomicWords:
    """8-byte unsigned words of a segment, with load-acquire and store-release."""

    def __init__(self, mapping: mmap.mmap, offset: int, count: int) -> None:
        assert offset % 8 == 0
        assert offset + 8 * count <= len(mapping)
        self.count = count
        self._view, self._acquire, self._release = _view_of(memoryview(mapping)[offset : offset + 8 * count])

    def loader(self, index: int) -> Callable[[], int]:
        """Return a function that loads one word. It takes a quarter of the time of `load`."""
        return partial(self._view.load_u64, 8 * index, self._acquire)

    def load(self, index: int) -> int:
        return self._view.load_u64(8 * index, self._acquire)  # type: ignore[no-any-return]

    def store(self, index: int, value: int) -> None:
        self._view.store_u64(8 * index, value, self._release)


def unlink(name: str) -> None:
    """Remove a segment's name; no error if it is gone."""
    (SHM / name).unlink(missing_ok=True)


def reap_stale() -> list[str]:
    """Remove segments of this user whose creator is dead; their names. Not of other containers, whose processes have numbers of
    their own, and may live."""
    reaped = []
    for path in SHM.glob(f"{PREFIX}{process_namespace()}-*"):
        pid, start = [*path.name.removeprefix(f"{PREFIX}{process_namespace()}-").split("-"), "", ""][:2]
        try:
            # Not what a link points to: anyone may put one here.
            mine = path.lstat().st_uid == os.getuid()
        except OSError:
            continue
        if mine and pid.isdigit() and start.isdigit() and died(int(pid), int(start)):
            with contextlib.suppress(OSError):  # it can stay: nobody maps it
                path.unlink()
                reaped.append(path.name)
    return reaped
