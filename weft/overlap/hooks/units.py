"""Groups modules into units for fully_shard.

Each unit of fully_shard costs the host about 0.6 ms per pass, whatever its size. With small blocks the GPU waits for the host,
so overlap gains nothing. Larger units move the same bytes with fewer calls.

blocks  0 1 2 3 4 5 6 7 ...       in the order in which they are computed
units   [------] [------] ...     all about the same size
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.core.errors import require

LEAST_BYTES = 256 << 20
"""The least size of a gathered unit. With blocks of 61 MB a GPT's step took 0.66 of its time with units of 4 blocks, and 0.5
with units of 12."""
LEAST_UNITS = 4
"""A smaller model still has 4 units, so that one unit can be computed while the next one is gathered."""


def units(modules: Iterable[nn.Module], *, least_bytes: int = LEAST_BYTES) -> list[list[nn.Module]]:
    """Group modules that are computed one after the other into lists that fully_shard takes.

    Write `for unit in units(model.blocks): fully_shard(unit)` instead of `for block in model.blocks: fully_shard(block)`. Each
    unit has about least_bytes of parameters, and at least one module. There are at least LEAST_UNITS units if there are as many
    modules. Blocks of least_bytes or more stay alone. One unit is computed while the next one is gathered, so a step needs
    memory for two.

    Args:
        modules: the modules in the order in which they are computed, such as a model's layers.
        least_bytes: the least size of a unit: this rank's share under other parallelism, in the parameters' current dtype.

    Raises ValueError if modules is empty or has anything but modules, or if least_bytes is below 1.
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
    """Return the part of a parameter that other kinds of parallelism leave to this rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _places(sizes: Sequence[int], count: int) -> list[int]:
    """Return the unit of each module: of `count` equal units, the one that contains the module's middle byte."""
    ends = accumulate(sizes)
    return [int((end - size / 2) * count / max(1, sum(sizes))) for end, size in zip(ends, sizes, strict=True)]
