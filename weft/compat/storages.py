"""This module counts the users of a tensor's memory and makes weak references to it, by private functions of torch."""

from __future__ import annotations

from typing import Any

import torch


class WeakStorage:
    """A WeakStorage refers to the storage of a tensor without keeping it alive.

    It does not refer to the tensor, because views share the tensor's storage and may outlive it.
    """

    __slots__ = ("_reference",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference: Any = tensor.untyped_storage()._weak_ref()

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._reference)  # type: ignore[no-untyped-call]

    def alive(self) -> Any:
        """Return the storage, or None if it has been freed. The result keeps the storage alive."""
        return torch.UntypedStorage._new_with_weak_ptr(self._reference)


def users(tensor: torch.Tensor) -> int:
    """Return the number of tensors that use a tensor's memory, including the tensor itself."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1
