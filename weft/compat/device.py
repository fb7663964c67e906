"""A GPU's properties, and the memory of tensors: its users, its pools and how the host maps it.

torch reports counts, sizes and clocks. It does not report how many operations a matrix unit does per clock, so this module has
a table by architecture.

A weak reference is a number. It refers to the storage and not to the tensor, because views share the storage and may outlive
the tensor. `release_storage` must be called once for each.

weft's memory stays out of the pool of CUDA graph trees, which torch.compile(mode="reduce-overhead") uses. Before it captures, a
graph tree runs the program once and sends all allocations of this thread to a memory pool of its own.
Afterwards only the program's outputs may be alive there. In a first call, weft allocates memory that must live longer (tables,
scratch, candidates of an autotuning run). In the pool, torch would report it as a leak, and replays would overwrite it. So weft
leaves the pool during its own calls.

`mapped` calls the C library, because Python's `mmap` keeps a file descriptor for each mapping.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from operator import methodcaller
from typing import Any

import torch

from weft.core.hardware import Capabilities

INTERPRETER = Capabilities(sms=1, shared_bytes=1 << 30, tma=False)
"""The capabilities of a CPU, where Triton's interpreter runs kernels and any tile fits."""
_FLOP_PER_CLOCK = {
    "sm_80": 2048,
    "sm_86": 1024,
    "sm_87": 1024,
    "sm_89": 1024,
    "sm_90": 4096,
    "sm_100": 8192,
    "sm_103": 8192,
    "sm_120": 1024,
    "gfx90a": 1024,
    "gfx942": 2048,
    "gfx950": 4096,
}
"""The dense bfloat16 operations of one SM, or compute unit, per clock, from white papers and data sheets of NVIDIA and AMD."""
_HERE: AbstractContextManager[None] = nullcontext()
_UNKNOWN_FLOP_PER_CLOCK = 1024
"""The value for an architecture that is not listed."""


def idle(device: torch.device, within_s: float) -> bool:
    """Wait until a GPU has ended all work of all streams, for `within_s` at most. Return whether it has.

    torch.cuda.synchronize has no bound, so a separate thread waits in it, and remains there if the work does not end.
    """
    ended = threading.Event()

    def wait() -> None:
        with suppress(RuntimeError):  # a lost device runs nothing
            torch.cuda.synchronize(device)
        ended.set()

    threading.Thread(target=wait, name="weft-waits-for-device", daemon=True).start()
    return ended.wait(max(0.0, within_s))


def enqueued(device: torch.device) -> Callable[[], bool]:
    """Return a function that returns whether the GPU has ended the work that torch's current stream has now."""
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.query


@functools.cache
def capabilities(device: torch.device) -> Capabilities:
    """Return the capabilities that a device offers to kernels."""
    return INTERPRETER if device.type == "cpu" else of_properties(torch.cuda.get_device_properties(device))


def of_properties(found: Any) -> Capabilities:
    """Return the capabilities of a GPU. found: the result of torch.cuda.get_device_properties."""
    arch = architecture(found)
    nvidia = arch.startswith("sm_")
    return Capabilities(
        sms=found.multi_processor_count,
        shared_bytes=getattr(found, "shared_memory_per_block_optin", 0) or found.shared_memory_per_block,
        matrix_16bit=not nvidia or found.major >= 8,
        tma=nvidia and found.major >= 9,
        exact_fp8=nvidia and found.major >= 10,
        warp=found.warp_size,
    )


def architecture(found: Any) -> str:
    """Return the architecture as compilers name it, such as sm_90 or gfx942. found: as for `of_properties`."""
    if torch.version.hip is not None:
        return str(found.gcnArchName).split(":")[0]
    return f"sm_{found.major}{found.minor}"


def flop_per_clock(arch: str) -> int:
    """Return the bfloat16 operations of one SM per clock."""
    return _FLOP_PER_CLOCK.get(arch, _UNKNOWN_FLOP_PER_CLOCK)


def memory_gbps(found: Any) -> float:
    """Return a GPU's peak memory rate in 1e9 bytes/s, or 0 if torch does not report it. found: as for `of_properties`."""
    khz, bits = (getattr(found, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2 * khz * 1e3 * bits / 8 / 1e9


def gpu_number(device: torch.device) -> int:
    """Return a number that identifies a GPU for processes in which it has another index."""
    return int(hashlib.sha256(str(torch.cuda.get_device_properties(device).uuid).encode()).hexdigest()[:12], 16)


current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Returns the index of the thread's current GPU, if CUDA is initialised. torch's own function also checks that in each call."""


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which this GPU is the thread's current one, as after torch.cuda.set_device."""
    begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if device.type != "cuda" or not begun or current_device() == device.index:
        return _HERE
    return torch.cuda.device(device)  # type: ignore[return-value, unused-ignore]


reference_of: Callable[[torch.UntypedStorage], int] = methodcaller("_weak_ref")
"""Returns a weak reference to a storage."""


def weak_storage(tensor: torch.Tensor) -> int:
    """Return a weak reference to the storage of a tensor."""
    return reference_of(tensor.untyped_storage())


def living_storage(reference: int) -> Any:
    """Return the storage, or None if it has been freed. The result keeps the storage alive."""
    return torch.UntypedStorage._new_with_weak_ptr(reference)


release_storage: Any = torch.UntypedStorage._free_weak_ref
"""Frees a weak reference."""


def users(tensor: torch.Tensor) -> int:
    """Return the number of tensors that use a tensor's memory, including the tensor itself."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


_TREES = "torch._inductor.cudagraph_trees"
_NOTHING: AbstractContextManager[None] = nullcontext()


def outside_graph_trees(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which this thread allocates outside of a graph tree's pool. Do not use it during a capture."""
    return _outside(device) if _TREES in sys.modules else _NOTHING


def has_graph_trees() -> bool:
    """Return whether this process may have graph trees, so that `outside_graph_trees` may have something to leave."""
    return _TREES in sys.modules


@contextmanager
def _outside(device: torch.device) -> Iterator[None]:
    pool = _pool(device)
    if pool is None or not _left(device, pool):
        yield
        return
    try:
        yield
    finally:
        torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, pool)  # type: ignore[attr-defined, unused-ignore]
        torch._C._cuda_releasePool(device.index, pool)  # type: ignore[attr-defined, unused-ignore] # begin counts one user of the pool more


def _pool(device: torch.device) -> Any:
    """Return the pool of the device's graph trees, or None if this thread has none."""
    if device.type != "cuda":
        return None
    trees: Any = sys.modules[_TREES]
    try:
        manager = trees.get_manager(device.index, create_if_none_exists=False)
    except AssertionError:  # some versions of torch have no manager in a thread that the user started
        return None
    return None if manager is None else manager.cuda_graphs_thread_pool


def _left(device: torch.device, pool: Any) -> bool:
    """Stop allocating in the pool. Return whether this thread did allocate in it."""
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)  # type: ignore[attr-defined, unused-ignore]
    except RuntimeError:
        return False
    return True


_MAP_FIXED = 0x10
"""Linux's value of MAP_FIXED, for which Python has no name."""


def mapped(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map an open file, so that every process that maps it shares its bytes. The mapping keeps no file descriptor.

    Python's own mapping of a file keeps one, and a group of 8 ranks with 128 cached problems has more mappings than a process
    may open files (1024, usually). So Python maps the same amount of anonymous memory, and the file then replaces it.
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
