"""This module keeps weft's memory out of the pool of CUDA graph trees, which torch.compile(mode="reduce-overhead") uses.

Before it captures, a graph tree runs the program once and sends all allocations of this thread to a memory pool of its own.
Afterwards only the program's outputs may be alive there. In a first call, weft allocates memory that must live longer (tables,
scratch, candidates of an autotuning run). In the pool, torch would report it as a leak, and replays would overwrite it. So weft
leaves the pool during its own calls.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

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
