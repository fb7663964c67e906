"""Shared memory between the ranks of one host: segments of bytes, words that are read and written atomically, GPU memory.

A segment is POSIX shared memory, readable by its user alone, with a name that tells its creator (process and start time)
and cannot be guessed. It is unlinked as soon as every rank has mapped it, so that nothing stays behind however a rank
ends; what a creator left that died in between is removed by `reap_stale`, which every team calls when it starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import mmap
import os
import platform
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.comm.rendezvous import Meetings

SHM = Path("/dev/shm")
PREFIX = "weft-"
_MAP_FIXED = 0x10
"""Linux's, of the C library's mmap; Python has no name for it."""


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
    """Whether the process that had this number and start is gone. What cannot be found out is no death."""
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


class Segment:
    """Bytes that ranks share. The creator calls `create`, the others `open`; both `close`."""

    def __init__(self, name: str, mapping: mmap.mmap) -> None:
        self.name, self.nbytes, self._mapping = name, len(mapping), mapping

    @classmethod
    def create(cls, label: str, nbytes: int) -> Segment:
        """A new zeroed segment of at least `nbytes`. Raises ValueError, with the reason, where there can be none."""
        nbytes = max(mmap.PAGESIZE, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        name = f"{PREFIX}{processes()}-{os.getpid()}-{process_start(os.getpid())}-{os.urandom(8).hex()}-{label}"
        try:
            descriptor = os.open(SHM / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ValueError(f"shared memory: no file can be made in {SHM} ({error.strerror})") from None
        try:
            # Reserve the pages now: a full /dev/shm is then an error here, not a SIGBUS at the first write.
            os.posix_fallocate(descriptor, 0, nbytes)
            return cls(name, _mapped(descriptor, nbytes))
        except BaseException as error:
            unlink(name)
            if not isinstance(error, OSError):
                raise
            raise ValueError(_refused(nbytes, error)) from None
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, name: str) -> Segment:
        """Map a segment that another rank created."""
        descriptor = os.open(SHM / name, os.O_RDWR)
        try:
            return cls(name, _mapped(descriptor, os.fstat(descriptor).st_size))
        finally:
            os.close(descriptor)

    def words(self, offset: int = 0, count: int | None = None) -> Words:
        """8-byte words from byte `offset` on."""
        return Words(self._mapping, offset, (self.nbytes - offset) // 8 if count is None else count)

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


def _refused(nbytes: int, error: OSError) -> str:
    """Why there is no segment of so many bytes, and what helps."""
    free = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
    asked = f"shared memory: {nbytes} bytes asked, {free} free in {SHM} ({error.strerror})"
    if error.errno == errno.ENOSPC or free < nbytes:
        return f"{asked}; enlarge it (--shm-size)"
    if error.errno == errno.ENOMEM:
        return f"{asked}; the host, or the memory limit of this container, has no memory left"
    return asked


def _mapped(descriptor: int, nbytes: int) -> mmap.mmap:
    """The file's bytes, without a descriptor of their own: Python's mapping would keep one, and a group of 8 ranks that keeps
    128 problems has more segments than a process may open files (1024, usually).

    Python maps as much anonymous memory, and the file takes its place.
    """
    mapping = mmap.mmap(-1, nbytes)
    place = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size, offset = ctypes.c_size_t(nbytes), ctypes.c_long(0)
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if libc.mmap(ctypes.c_void_p(place), size, access, flags, descriptor, offset) != place:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return mapping


def _atomic_accessors(mapping: mmap.mmap) -> tuple[Callable[[int], int], Callable[[int, int], None]]:
    """(load-acquire, store-release) of the 8-byte word at a byte offset."""
    try:
        from atomicshm import ACQUIRE, RELEASE, AtomicView
    except ImportError:
        return _plain_accessors(mapping)
    view = AtomicView(mapping)
    return lambda at: view.load_u64(at, ACQUIRE), lambda at, value: view.store_u64(at, value, RELEASE)


def _plain_accessors(mapping: mmap.mmap) -> tuple[Callable[[int], int], Callable[[int, int], None]]:
    """Without the atomics package: on x86-64 an aligned 8-byte move is atomic, loads acquire and stores release."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise ValueError(f"flags need atomics on {platform.machine()}: pip install atomicshm")
    words = np.frombuffer(mapping, dtype=np.uint64)
    return lambda at: int(words[at >> 3]), lambda at, value: words.__setitem__(at >> 3, value)


class Words:
    """8-byte unsigned words of a segment, with load-acquire and store-release."""

    def __init__(self, mapping: mmap.mmap, offset: int, count: int) -> None:
        assert offset % 8 == 0
        assert offset + 8 * count <= len(mapping)
        self._load, self._store = _atomic_accessors(mapping)
        self._offset, self.count = offset, count

    def load(self, index: int) -> int:
        return self._load(self._offset + 8 * index)

    def store(self, index: int, value: int) -> None:
        self._store(self._offset + 8 * index, value)


def gpu_symmetric(
    nbytes: int, meetings: Meetings, device: torch.device, *, meet: Callable[[], None]
) -> tuple[torch.Tensor, Any]:
    """Zeroed bytes of this GPU that the other ranks' GPUs can reach, and their handle (`buffer_ptrs`: addresses by rank).

    Collective. A peer may use them once every rank's device has ended its work. meet: waits for all ranks, and raises if one
    has failed; called once this rank has its memory, since the rendezvous watches nobody. Raises torch.OutOfMemoryError before,
    and as Meetings.rendezvous.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    free_symmetric()
    area = symmetric_memory.empty(max(1024, nbytes), dtype=torch.uint8, device=device)
    meet()
    handle = meetings.rendezvous(area)
    area.zero_()
    return lent(area, handle), handle


_LENT: list[tuple[torch.Tensor, Any]] = []
_FREES = threading.Lock()
"""Groups may be made and closed on several threads."""


def lent(area: torch.Tensor, handle: Any) -> torch.Tensor:
    """A tensor on the same memory, which stays for `free_symmetric` to free."""
    _LENT.append((area, handle))
    return area[:]


def free_symmetric() -> None:
    """Free the symmetric memory of which no tensor is left.

    Not where its last tensor goes, which may be the garbage collector's doing, while a stream is captured: torch waits for the
    device before it frees such memory, and ends the process if it must not.
    """
    if not _LENT or torch.cuda.is_current_stream_capturing():
        return
    with _FREES:
        gone = [number for number, (area, _) in enumerate(_LENT) if _users(area) == 1]
        for device in {_LENT[number][0].device for number in gone}:
            # In torch's own wait no other thread runs: not even one that would end it, if a peer is lost.
            torch.cuda.synchronize(device)
        for number in reversed(gone):
            del _LENT[number]


def _users(tensor: torch.Tensor) -> int:
    """How many tensors there are on its memory."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def unlink(name: str) -> None:
    """Remove a segment's name; no error if it is gone."""
    (SHM / name).unlink(missing_ok=True)


@cache
def processes() -> str:
    """Among which processes this one has its number: those of a host, or of a container."""
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return "0"


def sharing() -> str:
    """What ranks of a node share beside the host's name: its kernel, /dev/shm, and processes' numbers."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        kernel = ""
    return hashlib.sha256(f"{kernel} {os.stat(SHM).st_dev} {processes()}".encode()).hexdigest()[:6]


def reap_stale() -> list[str]:
    """Remove segments of this user whose creator is dead; their names. Not of other containers, whose processes have numbers of
    their own, and may live."""
    reaped = []
    for path in SHM.glob(f"{PREFIX}{processes()}-*"):
        pid, start = [*path.name.removeprefix(f"{PREFIX}{processes()}-").split("-"), "", ""][:2]
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
