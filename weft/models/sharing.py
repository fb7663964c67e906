"""Finds the places of a model that must run whole because modules share a parameter, which has one layout only.

    a place that can be sharded      wants some of its parameters as Shard(0) or Shard(1)
    the rest of the model            has its parameters whole: Replicate()

If a place and another module want different layouts of one parameter, the place runs whole. Any place that shares a parameter
with it may then have to run whole, too, so the search repeats until no parameter is needed in two layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

Wanted = Mapping[tuple[nn.Module, str], tuple[nn.Module, Placement]]
"""The place of each (module, name of a parameter), and the layout that the place wants."""


def in_several_places(model: nn.Module) -> set[nn.Module]:
    """Return the modules that are children of several modules, or have several names in one.

    A linear that is called in two places has one layout for both and one saved product, so no block can shard it as its own.
    """
    places = Counter(child for parent in model.modules() for child in parent._modules.values() if child is not None)
    return {module for module, count in places.items() if count > 1}


def whole_by_sharing(model: nn.Module, wanted: Wanted) -> dict[nn.Module, str]:
    """Return the places that run whole, each with the shared parameter that is the reason."""
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
