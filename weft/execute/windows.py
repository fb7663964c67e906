"""Memory that all ranks of a group have registered with NCCL's communicator ("symmetric windows"), for kernels of less latency.

Registered with NCCL itself, behind torch's back: torch 2.11 would hand its list of windows to ncclCommDeregister when a
communicator is aborted, which refuses windows, and then does not abort it: whoever waits in a collective would wait for ever.
NCCL frees the windows of a communicator that it aborts or destroys.
"""

from __future__ import annotations

import ctypes
import math
import time
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

_SUCCESS, _IN_PROGRESS = 0, 7
_COLL_SYMMETRIC = 1
_REGISTERS_S = 60.0
"""A communicator that does not block is asked for so long whether it has registered a window."""


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What runs a group's collectives on a device."""
    return group._get_backend(device)


def can_register(backend: Any) -> bool:
    """Whether NCCL runs a group's collectives, and is a library that has windows."""
    return hasattr(backend, "_comm_ptr") and hasattr(backend, "mem_allocator") and _library() is not None


class Window:
    """Memory that all ranks have registered with the group's communicator. Collective, as is `close`."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device) -> None:
        self._backend = backend_of(group, device)
        self._pool: Any = torch.cuda.MemPool(self._backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._registration = Registration(self._backend, self.memory)
        self._matrix: torch.Tensor | None = None

    def matrix(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The window's first elements as a matrix of that shape; the same tensor for the same shape again."""
        if self._matrix is None or self._matrix.shape != shape or self._matrix.dtype != dtype:
            self._matrix = self.memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)
        return self._matrix

    def close(self, *, broken: bool = False) -> None:
        """broken: the communicator may be aborted at any time, and gives up its windows then."""
        if not broken:
            self._registration.close()
        self._pool = self._backend = self._matrix = None
        self.memory = self.memory[:0]


class Registration:
    """One window of a communicator, over a tensor that NCCL has allocated. Collective. RuntimeError if NCCL refuses it."""

    def __init__(self, backend: Any, memory: torch.Tensor) -> None:
        self._backend, self._communicator = backend, int(backend._comm_ptr())
        if not self._communicator:
            raise RuntimeError("the group has no communicator on this device yet: run a collective first")
        self._window = c_void_p()
        library, nbytes = _library(), c_size_t(memory.numel() * memory.element_size())
        assert library is not None
        place = c_void_p(memory.data_ptr())
        status = library.ncclCommWindowRegister(self._communicator, place, nbytes, byref(self._window), _COLL_SYMMETRIC)
        deadline, state = time.monotonic() + _REGISTERS_S, c_int(status)
        while state.value == _IN_PROGRESS:
            if time.monotonic() > deadline:
                raise RuntimeError(f"NCCL did not register a window of {nbytes.value} bytes within {_REGISTERS_S:g} s")
            time.sleep(1e-4)
            _checked(library, library.ncclCommGetAsyncError(self._communicator, byref(state)))
        _checked(library, state.value)

    def close(self) -> None:
        """Nothing is to do if the group has been destroyed in the meantime, and its windows with it."""
        try:
            alive = int(self._backend._comm_ptr()) == self._communicator
        except RuntimeError:  # torch knows of no communicator any more
            alive = False
        if alive and self._window:
            library = _library()
            assert library is not None
            status = library.ncclCommWindowDeregister(self._communicator, self._window)
            if status != _IN_PROGRESS:
                _checked(library, status)
        self._window = c_void_p()


def _checked(library: Any, status: int) -> None:
    if status != _SUCCESS:
        raise RuntimeError(f"NCCL refused a window: {library.ncclGetErrorString(status).decode()}")


@cache
def _library() -> Any:
    """The NCCL that torch has loaded; None if it is not a library of its own, or older than windows (2.27)."""
    try:
        found: Any = ctypes.CDLL("libnccl.so.2")
        found.ncclGetErrorString.restype, found.ncclGetErrorString.argtypes = c_char_p, (c_int,)
        found.ncclCommWindowRegister.argtypes = (c_void_p, c_void_p, c_size_t, c_void_p, c_int)
        found.ncclCommWindowDeregister.argtypes = (c_void_p, c_void_p)
        found.ncclCommGetAsyncError.argtypes = (c_void_p, c_void_p)
    except (OSError, AttributeError):
        return None
    return found
