"""Who uses the memory of a tensor, and weak references to it, which torch has under private names alone."""

from __future__ import annotations

from typing import Any

import torch


class WeakStorage:
    """The storage of a tensor, which this does not keep alive. A reference to the tensor itself would not do: views share its
    storage and outlive it."""

    __slots__ = ("_reference",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference: Any = tensor.untyped_storage()._weak_ref()

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._reference)  # type: ignore[no-untyped-call]

    def alive(self) -> Any:
        """The storage, which is kept alive as long as this result is held; None once nobody holds it."""
        return torch.UntypedStorage._new_with_weak_ptr(self._reference)


def users(tensor: torch.Tensor) -> int:
    """How many tensors there are on a tensor's memory, itself among them."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1
