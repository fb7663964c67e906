"""This torch code finds the bag of each lookup index, and the order in which the gradients of table rows are summed.

    locate_indices()   returns Places: for every index its bag, its factor, and whether it counts
    sort_indices()     returns SortedIndices, where indices of one row are adjacent

No function waits for the device, and no shape depends on how many indices count, so a CUDA graph can capture them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from weft.kernels.tables import DeviceTables


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
