"""Small tables on a device, made once for a key: a bounded number of them, and those that a CUDA graph reads for good."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class DeviceTables(Generic[T]):
    """At most `most` tables besides those that were asked for while a graph was captured: the graph goes on reading them, and
    none can be made within a capture. The least recently used one goes first; kernels that were enqueued before on the same
    stream still find it, because torch reuses memory in a stream's order."""

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
