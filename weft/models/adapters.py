"""Shards PEFT's LoRA around a linear that weft shards.

    y = base(x) + up(down(dropout(x))) * scaling         down [r, K], up [N, r]

    base            x                        down                       up
    column linear   all tokens               whole on every rank        columns of this rank: Shard(0)
    row linear      this rank's columns      Shard(1), as the base's    whole, on this rank's tokens

So both products have the layout of the base's product. The gradient of a whole `down` is the same on every rank. That of a
whole `up` is summed over ranks. Other adapters, and kinds of LoRA that read the whole weight (DoRA), are not sharded, and their
block runs whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from weft.models.linear import (
    ColumnLinear,
    Distributor,
    RowLinear,
    Tokens,
    make_column_linears,
    make_row_linear,
    why_not_linear,
)
from weft.models.products import ProductSettings, kind_of, why_not_quantised
from weft.models.replicas import derived, never, replicate

_LORA = ("peft.tuners.lora.layer", "Linear")


def is_lora(module: nn.Module) -> bool:
    """Return whether a module is PEFT's LoRA around a linear that is not quantised."""
    return (type(module).__module__, type(module).__qualname__) == _LORA


def base_of(module: nn.Module) -> nn.Module:
    """Return the linear inside a LoRA layer, or any other module itself."""
    return cast(nn.Module, module.base_layer) if is_lora(module) else module


def why_not_adapted(module: nn.Module, *, row: bool, ranks: int) -> str:
    """Return why weft cannot shard a linear, or a LoRA layer around one, or "" if it can. row: the linear would be a row
    linear."""
    if not is_lora(module):
        kind = kind_of(module)
        return why_not_linear(module, row=row, ranks=ranks) if kind is None else why_not_quantised(module, kind)
    lora, base = cast(Any, module), base_of(module)
    if "forward" in module.__dict__:
        return "its forward was put on the module itself"
    if lora.lora_variant:
        kinds = ", ".join(sorted({type(variant).__name__ for variant in lora.lora_variant.values()}))
        return f"its adapter is a {kinds}, which is no plain LoRA"
    if lora.fan_in_fan_out:
        return "its adapter has fan_in_fan_out=True"
    if row and cast(nn.Linear, base).in_features % ranks and any(getattr(each, "p", 0) for each in lora.lora_dropout.values()):
        return f"its adapter has dropout, and {ranks} ranks do not divide its inputs: they would draw different numbers"
    return next(filter(None, map(why_not_linear, (base, *_downs(module), *_ups(module)))), "")


def wanted(module: nn.Module, *, row: bool) -> Iterator[tuple[nn.Module, str, Placement]]:
    """Return the layouts of the sharded parameters of a linear and of a LoRA layer's matrices."""
    for each in (base_of(module), *(_downs(module) if row else _ups(module))):
        yield each, "weight", Shard(1) if row else Shard(0)
        if not row:
            yield each, "bias", Shard(0)


def shard_columns(module: nn.Module, settings: ProductSettings, distribute: Distributor) -> None:
    """Shard the matrices of a LoRA layer around a column linear."""
    for up in _ups(module):
        make_column_linears([up], Tokens(), settings, distribute)
    for down in _downs(module):
        replicate(down, distribute, never)


def shard_row(module: nn.Module, tokens: Tokens, settings: ProductSettings, distribute: Distributor) -> None:
    """Shard the matrices of a LoRA layer around a row linear."""
    for down in _downs(module):
        make_row_linear(down, tokens, settings, distribute)
    for up in _ups(module):
        replicate(up, distribute, tokens.sharded)


def added_late(module: nn.Module) -> list[str]:
    """Return the adapters that were added to a LoRA layer after its linear was sharded."""
    if not is_lora(module):
        return []
    lora = cast(Any, module)
    row = isinstance(base_of(module), RowLinear)
    matrices, kind = (lora.lora_A, RowLinear) if row else (lora.lora_B, ColumnLinear)
    return [name for name, matrix in matrices.items() if not isinstance(matrix, kind)]


def refuse_wrapped_parameters(model: nn.Module) -> None:
    """Raise ValueError for PEFT's adapters of parameters, which replace the parameters while they run."""
    for name, module in model.named_modules():
        if (type(module).__module__, type(module).__qualname__) == ("peft.tuners.lora.layer", "ParamWrapper"):
            raise ValueError(
                f"model has {name}, a ParamWrapper of PEFT's around the parameter {module.parameter_name!r}; weft.parallelize "
                "takes adapters of modules: use LoraConfig(target_modules=...) without target_parameters"
            )


def merge_whole_weights(module: nn.Module) -> None:
    """Make PEFT's merge and unmerge gather whole weights first, and shard the results again. Both become collective. PEFT's own
    code assigns to `weight.data`, which has no effect on a DTensor, and multiplies local matrices of other placements."""
    for each in module.modules():
        if type(each).__module__.startswith("peft.") and hasattr(type(each), "unmerge"):
            each.__class__ = _merging_whole(cast(Any, type(each)))


@cache
def _merging_whole(cls: type[Any]) -> type[Any]:
    def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _whole_weights(self):
            return cls.merge(self, *args, **kwargs)

    def unmerge(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _whole_weights(self):
            return cls.unmerge(self, *args, **kwargs)

    return derived(cls, merge=merge, unmerge=unmerge)


@contextmanager
def _whole_weights(module: nn.Module) -> Iterator[None]:
    """Make the DTensors of a module plain parameters within this context. Without an error, their new values are written
    back."""
    spread = [
        (each, name, cast(DTensor, parameter))
        for each in module.modules()
        for name, parameter in each._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    for each, name, mine in spread:
        each._parameters[name] = nn.Parameter(cast(DTensor, mine.detach()).full_tensor().clone(), requires_grad=False)
    changed = []
    try:
        yield
        changed = [cast(torch.Tensor, each._parameters[name]).detach() for each, name, _ in spread]
    finally:
        for each, name, mine in spread:
            each._parameters[name] = cast(nn.Parameter, mine)
    with torch.no_grad():
        for whole, (_, _, mine) in zip(changed, spread, strict=True):
            mine.copy_(distribute_tensor(whole, mine.device_mesh, mine.placements, src_data_rank=None))


def _downs(module: nn.Module) -> list[nn.Linear]:
    return [*cast(Any, module).lora_A.values()] if is_lora(module) else []


def _ups(module: nn.Module) -> list[nn.Linear]:
    return [*cast(Any, module).lora_B.values()] if is_lora(module) else []
