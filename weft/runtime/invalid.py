"""Results that a failure makes invalid, and what a rank does besides raising an error.

A call on a GPU returns before the GPU has ended it, so an error that comes later cannot be raised by that call. The next call
of the group raises it, or `weft.synchronize`. Until then a program may read what the call has returned: so its floating-point
results become NaN, which no computation hides.

    caller's stream     call 7: waits for a peer ... released ... done 7
    watch's stream                                                      wait done 7, write NaN into what call 7 returned

Every byte is set to 0xFF, which is NaN in float8_e4m3, float16, bfloat16, float32 and float64. The driver's memset needs no
kernel that would have to be loaded, which CUDA does not do while a stream waits. Integers have no NaN, so integer results stay
as they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from weft.compat.storages import WeakStorage
from weft.core.logs import LOGGER

INVALID_BYTE = 0xFF
_ON_FAILURE = ("raise", "abort")


def on_failure_from_environment() -> str:
    """WEFT_ON_FAILURE, or raise. Raises ValueError if it is neither raise nor abort."""
    name = os.environ.get("WEFT_ON_FAILURE", "raise")
    if name not in _ON_FAILURE:
        raise ValueError(f"WEFT_ON_FAILURE is {name!r}; use {' or '.join(_ON_FAILURE)}")
    return name


def end_process() -> None:
    """End this process by SIGABRT, as torch's watchdog of NCCL does, so that what has launched it notices."""
    for handler in (*LOGGER.handlers, *logging.getLogger().handlers):
        handler.flush()
    os.abort()


class Result:
    """Memory that a call has returned. It is not kept alive: the allocator may give it to others as soon as the caller drops
    it, and then it must not be written."""

    __slots__ = ("_address", "_nbytes", "_storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address, self._nbytes, self._storage = tensor.data_ptr(), tensor.nbytes, WeakStorage(tensor)

    def invalidate(self, fill: Callable[[int, int], None]) -> Any:
        """Call fill(address, nbytes) if somebody still holds the memory. Returns what keeps it alive meanwhile, or None."""
        alive = self._storage.alive()
        if alive is not None and self._nbytes:
            fill(self._address, self._nbytes)
        return alive


def results_in(outputs: Mapping[str, Sequence[torch.Tensor]]) -> list[Result]:
    """The floating-point results of a program: contiguous, by name."""
    return [Result(one) for some in outputs.values() for one in some if one.is_floating_point()]


def results_of(found: Any) -> Iterator[Result]:
    """The floating-point results among tensors, in whatever lists and tuples they lie. A sparse one, or one whose rows lie
    among those of others, stays as it is."""
    if isinstance(found, torch.Tensor):
        if found.is_floating_point() and found.layout == torch.strided and found.is_contiguous():
            yield Result(found)
    elif isinstance(found, list | tuple):
        for one in found:
            yield from results_of(one)
