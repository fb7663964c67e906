"""A bounded cache of small device tensors. Tables that a CUDA graph reads are never evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class DeviceTables(Generic[T]):
    """DeviceTables is an LRU cache of at most `most` tables, plus all tables that were requested during a graph capture.

    A captured graph keeps reading its tables, and tables cannot be made during a capture. Evicting a table is safe for kernels
    that were enqueued before on the same stream, because torch reuses memory in stream order.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: OrderedDict[Hashable, T] = OrderedDict()
        self._captured: dict[Hashable, T] = {}

    def __len__(self) -> int:
        return len(self._made) + len(self._captured)

    def get(self, key: Hashable, device: torch.device, make: Callable[[], T]) -> T:
        if key in self._captured:
            return self._captured[key]
        found = self._made.pop(key) if key in self._made else make()
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._captured.setdefault(key, found)
        self._made[key] = found
        if len(self._made) > self._most:
            self._made.popitem(last=False)
        return found
