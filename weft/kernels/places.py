"""Where a lookup's indices belong, and in which order their rows' gradients are summed: by torch, from indices alone.

    places_of()      of every index: its bag, its factor, whether it counts; Places
    sort_indices()   what refers to one row lies together; Sorted

Nothing here waits for the device or depends on how many indices count, so that a CUDA graph can hold it. Without Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from weft.kernels.tables import DeviceTables


@dataclass(frozen=True, kw_only=True)
class Places:
    """Of every index: the bag (table * batch + sample) that holds it, its factor in that bag's result, and whether it counts:
    it lies in a bag, and its table has that row."""

    bag: torch.Tensor
    factor: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Sorted:
    """Indices in the order of (table, row), those that count first. starts [L + 1]: where each row's begin; L from the last
    one on. tables, rows, samples, factors [L]: of each."""

    starts: torch.Tensor
    tables: torch.Tensor
    rows: torch.Tensor
    samples: torch.Tensor
    factors: torch.Tensor


def places_of(
    indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, rows: Sequence[int], *, mean: bool
) -> Places:
    """Where each index belongs. rows: of each table."""
    offsets = offsets.long().clamp(0, indices.numel())
    bags = offsets.numel() - 1
    position = torch.arange(indices.numel(), device=indices.device)
    bag = torch.searchsorted(offsets, position, right=True) - 1
    held = (bag >= 0) & (bag < bags)
    bag = bag.clamp(0, bags - 1)
    height = constant(tuple(rows), indices.device)[bag // (bags // len(rows))]
    factor = indices.new_ones(indices.numel(), dtype=torch.float32) if weights is None else weights.float()
    if mean:
        factor = factor / offsets.diff().clamp(min=1)[bag]
    return Places(bag=bag, factor=factor, counts=held & (indices >= 0) & (indices < height))


def sort_indices(indices: torch.Tensor, places: Places, rows: Sequence[int], batch: int) -> Sorted:
    """What refers to one row lies together. rows: of each table."""
    length, device = indices.numel(), indices.device
    first = (0, *accumulate(rows))[:-1]
    owner = places.bag // batch
    total = sum(rows)
    keys = torch.where(places.counts, constant(first, device)[owner] + indices, total)
    keys, order = keys.sort(stable=True)
    position = torch.arange(length, device=device)
    heads = torch.ones_like(places.counts)
    heads[1:] = keys[1:] != keys[:-1]
    # What does not count makes the last segment, which is none.
    heads &= keys < total
    slot = torch.where(heads, heads.cumsum(0) - 1, length)
    starts = torch.full((length + 1,), length, device=device)
    starts.scatter_(0, slot, torch.where(heads, position, length))
    counted = places.counts.sum()
    starts = torch.minimum(starts, counted)
    owner = owner[order]
    return Sorted(
        starts=starts,
        tables=owner,
        rows=indices[order].long(),
        samples=places.bag[order] % batch,
        factors=places.factor[order],
    )


def constant(values: tuple[object, ...], device: torch.device) -> torch.Tensor:
    """A table on the device. It is made once, because none can be made while a CUDA graph is captured."""

    def made() -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.tensor(values, dtype=torch.int64, device=device)

    return _CONSTANTS.get((values, device), device, made)


_CONSTANTS: DeviceTables[torch.Tensor] = DeviceTables(256)
"""For the heights of tables, and for the addresses of gradients, which may differ from step to step."""
