"""torch's collectives that torch.compile traces, and its nested lists of tensors, which have private module names."""

from __future__ import annotations

import torch
from torch.distributed import _functional_collectives as functional
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["all_reduced", "tree_flatten", "tree_leaves", "tree_unflatten"]


def all_reduced(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of all ranks' x, by torch's process group of that name. The caller's stream waits for it."""
    total = functional.all_reduce(x.contiguous(), "sum", group)  # type: ignore[arg-type]
    found: torch.Tensor = functional.wait_tensor(total)  # type: ignore[no-untyped-call]
    return found
