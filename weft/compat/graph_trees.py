"""torch.compile(mode="reduce-overhead"): its CUDA graph trees have a memory pool, in which nothing of weft's may stay.

Before it captures, a tree runs the program once with every allocation of the thread in its pool, and then asks that nothing is
left there but the program's results. What weft keeps from a first call (tables, scratch, products that were timed) would be
taken for a leak, and overwritten by replays.
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
    """Within, this thread does not allocate in the pool of a graph tree. Not for use in a capture."""
    return _outside(device) if _TREES in sys.modules else _NOTHING


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
        torch._C._cuda_releasePool(device.index, pool)  # type: ignore[attr-defined, unused-ignore] # it was counted once more


def _pool(device: torch.device) -> Any:
    """The pool of the device's graph trees, if this thread has some."""
    if device.type != "cuda":
        return None
    trees: Any = sys.modules[_TREES]
    manager = trees.get_manager(device.index, create_if_none_exists=False)
    return None if manager is None else manager.cuda_graphs_thread_pool


def _left(device: torch.device, pool: Any) -> bool:
    """Stop allocating in the pool. False where this thread does not."""
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)  # type: ignore[attr-defined, unused-ignore]
    except RuntimeError:
        return False
    return True
