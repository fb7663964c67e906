"""The cache of small device tensors that kernels read: addresses, sizes, constants. What a graph reads is never evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class DeviceTables(Generic[T]):
    """DeviceTables is an LRU cache of at most `most` tables, plus all tables that were requested during a graph capture.

    A captured graph keeps reading its tables. Evicting a table is safe for kernels that were enqueued before on the same
    stream, because torch reuses memory in stream order.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: OrderedDict[Hashable, T] = OrderedDict()
        self._captured: dict[Hashable, T] = {}

    def __len__(self) -> int:
        return len(self._made) + len(self._captured)

    def get(self, key: Hashable, device: torch.device, make: Callable[[], T]) -> T:
        """Return what `make` has returned for this key, the first time outside of a graph capture: it copies to the device."""
        if key in self._captured:
            return self._captured[key]
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if captured and key not in self._made:
            raise ValueError(
                "a tensor has another address, stride or alignment than in earlier calls, so a kernel needs a new table; "
                "call the operator once with such tensors before capturing a graph"
            )
        found = self._made.pop(key) if key in self._made else make()
        if captured:
            return self._captured.setdefault(key, found)
        self._made[key] = found
        if len(self._made) > self._most:
            self._made.popitem(last=False)
        return found
