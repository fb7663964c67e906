"""Small device tensors that kernels read, and are made by torch.

    DeviceTables       a cache of addresses, sizes and constants; what a graph reads is never evicted
    locate_indices()   Places: for every index of a lookup its bag, its factor, and whether it counts
    sort_indices()     SortedIndices, where indices of one row are adjacent: the order in which its gradients are summed

No function waits for the device, and no shape depends on how many indices count, so a CUDA graph can capture them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
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


@dataclass(frozen=True, kw_only=True)
class Places:
    """Places says where every index belongs.

    bag: its bag, table * batch + sample.
    factor: its factor in the result of its bag.
    counts: whether it is in a bag and its table has that row.
    """

    bag: torch.Tensor
    factor: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class SortedIndices:
    """SortedIndices holds indices sorted by (table, row). Those that count come first.

    starts: [L + 1], the position of the first index of each row. After the last row it is L.
    tables, rows, samples, factors: [L], the table, row, sample and factor of each index.
    """

    starts: torch.Tensor
    tables: torch.Tensor
    rows: torch.Tensor
    samples: torch.Tensor
    factors: torch.Tensor


def locate_indices(
    indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, rows: Sequence[int], *, mean: bool
) -> Places:
    """Return the Places of all indices. rows: the number of rows of each table."""
    offsets = offsets.long().clamp(0, indices.numel())
    bags = offsets.numel() - 1
    position = torch.arange(indices.numel(), device=indices.device)
    bag = torch.searchsorted(offsets, position, right=True) - 1
    held = (bag >= 0) & (bag < bags)
    bag = bag.clamp(0, bags - 1)
    height = cached_constant(tuple(rows), indices.device)[bag // (bags // len(rows))]
    factor = indices.new_ones(indices.numel(), dtype=torch.float32) if weights is None else weights.float()
    if mean:
        factor = factor / offsets.diff().clamp(min=1)[bag]
    return Places(bag=bag, factor=factor, counts=held & (indices >= 0) & (indices < height))


def sort_indices(indices: torch.Tensor, places: Places, rows: Sequence[int], batch: int) -> SortedIndices:
    """Sort indices so that those of one row are adjacent. rows: the number of rows of each table."""
    length, device = indices.numel(), indices.device
    first = (0, *accumulate(rows))[:-1]
    owner = places.bag // batch
    total = sum(rows)
    keys = torch.where(places.counts, cached_constant(first, device)[owner] + indices, total)
    keys, order = keys.sort(stable=True)
    position = torch.arange(length, device=device)
    heads = torch.ones_like(places.counts)
    heads[1:] = keys[1:] != keys[:-1]
    # Indices that do not count sort last. They start no segment.
    heads &= keys < total
    slot = torch.where(heads, heads.cumsum(0) - 1, length)
    starts = torch.full((length + 1,), length, device=device)
    starts.scatter_(0, slot, torch.where(heads, position, length))
    counted = places.counts.sum()
    starts = torch.minimum(starts, counted)
    owner = owner[order]
    return SortedIndices(
        starts=starts,
        tables=owner,
        rows=indices[order].long(),
        samples=places.bag[order] % batch,
        factors=places.factor[order],
    )


def cached_constant(values: tuple[object, ...], device: torch.device) -> torch.Tensor:
    """Return a constant tensor on the device. It is cached, because it cannot be made during a CUDA graph capture."""

    def made() -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.tensor(values, dtype=torch.int64, device=device)

    return _CONSTANTS.get((values, device), device, made)


_CONSTANTS: DeviceTables[torch.Tensor] = DeviceTables(256)
"""The cached constants: numbers of table rows, and addresses of gradients, which may differ from step to step."""
