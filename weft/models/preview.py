"""The places that weft.parallelize makes in a model, found by sharding it over ranks that do not exist.

The modules are on the meta device, so no weight is allocated, and nothing is sent. What is listed cannot differ from what
`weft.parallelize` does, because it does it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.compat.c10d import pretended_ranks
from weft.models.communicating import layers_of_places
from weft.models.experts import ExpertParallel
from weft.models.parallelize import FAMILIES, FEW_TOKENS, shard
from weft.planner.models.modules import build_modules
from weft.planner.models.values import Place


def is_parallelized(config: Any) -> bool:
    """Return whether weft.parallelize takes models of a transformers config."""
    return config.model_type in FAMILIES


def preview(config: Any, ranks: int) -> tuple[Place, ...]:
    """Return the places of a transformers model with a head that weft.parallelize has sharded over `ranks` ranks.

    Experts are sharded by weft.ExpertParallel, unless it refuses them: then they run whole on every rank.

    Raises ValueError for a model that weft.parallelize refuses, and in a process that has a process group.
    """
    model = build_modules(config, head=True)
    with pretended_ranks(ranks) as mesh:
        try:
            _shard(model, mesh, ExpertParallel())
        except ValueError:  # the model is unchanged
            _shard(model, mesh, None)
        return places_of(model)


def places_of(model: nn.Module) -> tuple[Place, ...]:
    """Return the places of a model that weft has sharded."""
    return tuple(
        Place(
            module=layer.module,
            parts=layer.parts,
            count=len(same),
            operators=layer.operators,
            reason=layer.reason,
            n=layer.n,
            k=layer.k,
            backward_only=layer.backward_only,
        )
        for layer, same in layers_of_places(model).items()
    )


def _shard(model: nn.Module, mesh: DeviceMesh, experts: ExpertParallel | None) -> None:
    shard(model, mesh, schedule="auto", few_tokens=FEW_TOKENS, keep_gathered=True, experts=experts, src_data_rank=None)
