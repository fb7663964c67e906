"""NVSHMEM in this process: memory that all ranks of a group have at the same place, for put-with-signal between nodes.

torch brings the library, and the operations on streams. Its symmetric memory is no way to it: that has one backend a process,
fixed by the first allocation, and weft's memory within a node is the CUDA backend's. So the library is started here, by its
host functions, and memory is asked of it directly; torch's memory stays what it is.

NVSHMEM starts once a process, for one set of ranks, and its memory is taken and freed by all of them at once. So a heap stays
until the process ends, whatever teams come and go, and keeps what is given back, by size: programs come and go in the same
order on all ranks. But where a team fails, one may have memory that another has not come to: so it is numbered, and taken again
only if all ranks would take the same.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import byref, c_char, c_int, c_size_t, c_uint64, c_void_p
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from weft.comm.pool import rounded
from weft.comm.team import Team
from weft.core.errors import WeftError

T = TypeVar("T")
_LIBRARY = "libnvshmem_host.so.3"
_VERSION_1 = 1 << 16
"""Of a structure, beside its size."""
_BY_UNIQUE_ID = 1 << 3
_SET = 9
_FRESH, _MINE, _OTHER, _MISSING = range(4)
"""What a rank has of NVSHMEM when it is asked for: nothing yet, a heap of these ranks, one of others, no library."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("version", c_int), ("internal", c_char * 124))


class _UniqueIdArgs(ctypes.Structure):
    _fields_ = (("version", c_int), ("id", c_void_p), ("rank", c_int), ("world_size", c_int))


class _InitArgs(ctypes.Structure):
    _fields_ = (("version", c_int), ("unique_id", _UniqueIdArgs), ("content", c_char * 96))


class _InitAttributes(ctypes.Structure):
    """NVSHMEM's, version 1: later libraries of its major version read it too."""

    _fields_ = (("version", c_int), ("communicator", c_void_p), ("args", _InitArgs))


def missing() -> str | None:
    """Why messages cannot go by NVSHMEM here; None if they can, as far as one can tell without a peer."""
    import torch.distributed._symmetric_memory as symmetric_memory

    if not symmetric_memory.is_nvshmem_available():
        return "this PyTorch has none, or does not find its library"
    try:
        library = _library()
    except (OSError, AttributeError) as error:
        return str(error)
    if Heap.running is None and library.nvshmemx_init_status() > 1:
        return "it has been started in this process by other code, for ranks that weft does not know"
    return None


def version() -> str:
    """Of the library. Raises what `_library` raises."""
    numbers = c_int(), c_int(), c_int()
    _library().nvshmemx_vendor_get_version_info(*map(byref, numbers))
    return ".".join(str(number.value) for number in numbers)


def _library() -> Any:
    """The library that torch has loaded. Raises OSError if there is none, AttributeError if it lacks a function."""
    found: Any = ctypes.CDLL(_LIBRARY)
    found.nvshmem_malloc.restype, found.nvshmem_malloc.argtypes = c_void_p, (c_size_t,)
    found.nvshmem_quiet.restype = None
    found.nvshmem_ptr.restype, found.nvshmem_ptr.argtypes = c_void_p, (c_void_p, c_int)
    put = found.nvshmemx_putmem_signal_on_stream
    put.restype, put.argtypes = None, (c_void_p, c_void_p, c_size_t, c_void_p, c_uint64, c_int, c_int, c_void_p)
    found.nvshmemx_signal_op_on_stream.argtypes = (c_void_p, c_uint64, c_int, c_int, c_void_p)
    found.nvshmemx_signal_op_on_stream.restype = None
    _ = found.nvshmemx_init_status, found.nvshmemx_get_uniqueid
    _ = found.nvshmemx_set_attr_uniqueid_args, found.nvshmemx_hostlib_init_attr
    return found


class Heap:
    """NVSHMEM's memory on this GPU. ranks: of the process, which NVSHMEM knows by their place here."""

    running: ClassVar[Heap | None] = None
    """The one of the process: NVSHMEM has one state for all of it."""

    def __init__(self, team: Team, device: torch.device) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(team.group))
        self._device, self._library = device, _library()
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._free: dict[int, list[torch.Tensor]] = {}
        self._number: dict[int, int] = {}
        self._start(team)
        self._prove(team)

    @classmethod
    def of(cls, team: Team, device: torch.device) -> Heap:
        """The heap of a team's ranks, started if there is none. Collective.

        Raises ValueError, on all ranks, where one of them has no NVSHMEM, or has it for other ranks.
        """
        why = missing()
        states = team.enter("messages between nodes: nvshmem", _MISSING if why else cls._state(team))
        if _MISSING in states:
            raise ValueError(
                f"WEFT_NODE_TRANSPORT is 'nvshmem', which rank {states.index(_MISSING)} has not "
                f"({why or 'see `weft doctor` there'}); use nccl"
            )
        if len(set(states)) > 1 or _OTHER in states:
            raise ValueError(
                "WEFT_NODE_TRANSPORT is 'nvshmem', which serves one group a process, and was started for another one; use nccl"
            )
        cls.running = cls.running or cls(team, device)
        return cls.running

    @classmethod
    def _state(cls, team: Team) -> int:
        if cls.running is None:
            return _FRESH
        return _MINE if cls.running.ranks == tuple(dist.get_process_group_ranks(team.group)) else _OTHER

    def _start(self, team: Team) -> None:
        store, key = team.store("nvshmem"), "id"
        store.set_timeout(timedelta(seconds=team.timeout_s))
        made = _UniqueId(version=_VERSION_1 + ctypes.sizeof(_UniqueId))
        if team.rank == 0:
            self._checked("nvshmemx_get_uniqueid", byref(made))
            store.set(key, bytes(made))
        shared = _UniqueId.from_buffer_copy(store.get(key))
        attributes = _InitAttributes(version=_VERSION_1 + ctypes.sizeof(_InitAttributes))
        attributes.args.version = _VERSION_1 + ctypes.sizeof(_InitArgs)
        attributes.args.unique_id.version = _VERSION_1 + ctypes.sizeof(_UniqueIdArgs)
        given = team.rank, team.world_size, byref(shared), byref(attributes)
        self._checked("nvshmemx_set_attr_uniqueid_args", *given)
        start = partial(self._checked, "nvshmemx_hostlib_init_attr", _BY_UNIQUE_ID, byref(attributes))
        self._together(team, start, "start")

    def _checked(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise WeftError(f"NVSHMEM: {name} failed with {code}; NVSHMEM_DEBUG=INFO says more")

    def _together(self, team: Team, work: Callable[[], T], what: str) -> T:
        """What a function gives that waits for all ranks, in NVSHMEM's own way: on a thread, so that its wait is bounded."""
        answers, errors, done = list[T](), list[BaseException](), threading.Event()

        def run() -> None:
            try:
                torch.cuda.set_device(self._index)
                answers.append(work())
            except BaseException as error:
                errors.append(error)
            done.set()

        threading.Thread(target=run, name=f"weft-nvshmem-{what}", daemon=True).start()
        team.until(done.is_set, lambda: f"rank {team.rank}: NVSHMEM: {what}: not all ranks came")
        for error in errors:
            raise error
        return answers[0]

    def _prove(self, team: Team) -> None:
        """Every rank raises a word at every other. Raises WaitTimeout with those that did not come."""
        size = team.world_size
        words = self._made(rounded(16 * size), team).zero_()[: 16 * size].view(torch.int64)
        torch.cuda.synchronize(self._device)
        team.enter("messages between nodes: nvshmem, words lowered")
        for peer in range(size):
            own = words[team.rank : team.rank + 1]
            data = words[size:].view(torch.uint8)[:8]
            if peer == team.rank:
                own.fill_(1)
            else:
                torch.ops.symm_mem.nvshmem_put_with_signal(data, own, 1, peer)

        def silent() -> list[int]:
            return [peer for peer, seen in enumerate(words[:size].tolist()) if seen != 1]

        team.until(lambda: not silent(), lambda: f"NVSHMEM: rank {team.rank} waits for a first word of ranks {silent()}")

    def take(self, nbytes: int, team: Team, settle: Callable[[], None]) -> torch.Tensor:
        """Zeroed memory of at least `nbytes`, at the same place of all ranks. Collective. settle: waits until every rank's GPU
        has ended all its work.

        Whoever used it last has ended everywhere, and what it sent has arrived.
        """
        memory = self._kept(rounded(nbytes), team)
        torch.cuda.synchronize(self._device)
        self._library.nvshmem_quiet()
        settle()
        memory.zero_()
        settle()
        return memory

    def _kept(self, size: int, team: Team) -> torch.Tensor:
        """What was given back last of a size, if that is the same on all ranks; else new memory, and none of it ever again."""
        free = self._free.setdefault(size, [])
        offered = team.enter(f"messages between nodes: {size} bytes", self._number[free[-1].data_ptr()] if free else 0)
        if len(set(offered)) == 1 and free:
            return free.pop()
        free.clear()
        newest = max(team.enter("messages between nodes: new memory", max(self._number.values(), default=0)))
        memory = self._made(size, team)
        self._number[memory.data_ptr()] = newest + 1
        return memory

    def give(self, memory: torch.Tensor) -> None:
        """Give memory back that this rank's GPU no longer uses."""
        self._free.setdefault(memory.numel(), []).append(memory)

    def mapped(self, memory: torch.Tensor) -> frozenset[int]:
        """The other ranks whose part of some memory this GPU can write."""
        address, own = memory.data_ptr(), self._library.nvshmem_my_pe()
        return frozenset(p for p in range(len(self.ranks)) if p != own and self._library.nvshmem_ptr(address, p))

    def put(self, dst: int, src: int, nbytes: int, word: int, peer: int, stream: int) -> None:
        """Enqueue: copy to a peer's bytes, which lie where this rank's are at `dst`, and then set its word to 1. src: of any
        memory, if the peer's is mapped."""
        self._library.nvshmemx_putmem_signal_on_stream(dst, src, nbytes, word, 1, _SET, peer, stream)

    def signal(self, address: int, value: int, peer: int, stream: int) -> None:
        """Enqueue: set a peer's word, which lies where this rank's is at `address`, after all that the stream has done."""
        self._library.nvshmemx_signal_op_on_stream(address, value, _SET, peer, stream)

    def _made(self, nbytes: int, team: Team) -> torch.Tensor:
        address = self._together(team, lambda: self._library.nvshmem_malloc(nbytes), f"{nbytes} bytes")
        if not address:
            raise WeftError(f"NVSHMEM has no {nbytes} bytes left; set NVSHMEM_SYMMETRIC_SIZE higher than it is")
        return torch.as_tensor(_Bytes(address, nbytes), device=self._device)


class _Bytes:
    """Bytes of a GPU at an address, as torch takes them from other libraries."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
