"""This module counts the users of a tensor's memory and makes weak references to it, by private functions of torch.

A weak reference is a number. It refers to the storage and not to the tensor, because views share the storage and may outlive
the tensor. `release_storage` must be called once for each.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch

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
