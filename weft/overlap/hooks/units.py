"""Which modules fully_shard should take together.

Each unit of fully_shard's costs the host some 0.6 ms a pass, whatever its size. Where blocks are small the GPU waits for that,
and there is nothing to hide: larger units move the same bytes by fewer calls.

    blocks  0 1 2 3 4 5 6 7 ...       one after the other, in the order in which they are computed
    units   [------] [------] ...     each about as large as the others
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.core.errors import require

LEAST_BYTES = 256 << 20
"""Of a unit, gathered. With blocks of 61 MB a step of a GPT took 0.66 of its time in units of four, 0.5 in units of twelve."""
LEAST_UNITS = 4
"""So that there is something to compute while the next unit is gathered, in a model of fewer bytes, too."""


def units(modules: Iterable[nn.Module], *, least_bytes: int = LEAST_BYTES) -> list[list[nn.Module]]:
    """Modules that are computed one after the other, as lists that fully_shard takes.

    `for unit in units(model.blocks): fully_shard(unit)` instead of `for block in model.blocks: fully_shard(block)`. There are
    as many units as have about least_bytes of parameters each, at least LEAST_UNITS, and none without a module; so blocks of
    least_bytes or more stay alone. While one unit is computed the next is gathered: a step takes the memory of two.

    Args:
        modules: in the order in which they are computed, such as a model's layers.
        least_bytes: of parameters, in the dtype that they have now; what other parallelism leaves of them to this rank.

    Raises ValueError for something else than modules, none of them, or a least_bytes below 1.
    """
    require("modules", modules, Iterable, "give modules that are computed one after the other, as model.blocks has them")
    found = [*modules]
    for at, module in enumerate(found):
        if not isinstance(module, nn.Module):
            raise ValueError(f"modules[{at}] is a {type(module).__name__}; give modules, as model.blocks has them")
    if not found:
        raise ValueError("modules is empty; give those that are computed one after the other, as model.blocks has them")
    if least_bytes < 1:
        raise ValueError(f"least_bytes is {least_bytes}; it must be at least 1")
    sizes = [sum(_here(each).numel() * each.element_size() for each in module.parameters()) for module in found]
    places = _places(sizes, max(LEAST_UNITS, sum(sizes) // least_bytes))
    return [[module for _, module in unit] for _, unit in groupby(zip(places, found, strict=True), key=lambda each: each[0])]


def _here(parameter: torch.Tensor) -> torch.Tensor:
    """What other kinds of parallelism leave of it to this rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _places(sizes: Sequence[int], count: int) -> list[int]:
    """Of `count` units of as many bytes each, the one that contains the middle of each module."""
    ends = accumulate(sizes)
    return [int((end - size / 2) * count / max(1, sum(sizes))) for end, size in zip(ends, sizes, strict=True)]
