"""A parameter that modules share has one layout on ranks. This file finds the places that therefore run whole.

    a place that could be sharded    wants some of its parameters as Shard(0) or Shard(1)
    all else in the model            has its parameters whole: Replicate()

A place that wants a parameter otherwise than another module has it runs whole, and so does a place that shares any parameter
with that one, until no parameter is needed in two layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

Wanted = Mapping[tuple[nn.Module, str], tuple[nn.Module, Placement]]
"""By (module, name of its parameter): (the place that it belongs to, how that place wants it)."""


def in_several_places(model: nn.Module) -> set[nn.Module]:
    """The modules that are children of several others, or of one by several names. A linear that is called in two places has
    one layout for both, and one product to give away: so it is no block's own."""
    places = Counter(child for parent in model.modules() for child in parent._modules.values() if child is not None)
    return {module for module, count in places.items() if count > 1}


def whole_by_sharing(model: nn.Module, wanted: Wanted) -> dict[nn.Module, str]:
    """The places that run whole, each with the parameter because of which it does."""
    asks = [
        (*wanted.get((module, own), (None, Replicate())), id(parameter), ".".join([*name.split(".")[-1:], own]))
        for name, module in model.named_modules()
        for own, parameter in module._parameters.items()
        if parameter is not None
    ]
    whole: dict[nn.Module, str] = {}
    while True:
        layouts: dict[int, set[Placement]] = {}
        for place, layout, parameter_id, _ in asks:
            layouts.setdefault(parameter_id, set()).add(Replicate() if place in whole else layout)
        found: dict[nn.Module, str] = {}
        for place, _, parameter_id, name in asks:
            if place is not None and place not in whole and len(layouts[parameter_id]) > 1:
                found.setdefault(place, f"it shares {name} with a module that has it laid otherwise")
        if not found:
            return whole
        whole |= found
