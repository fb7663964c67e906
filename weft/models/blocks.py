"""Blocks of a decoder layer: which linears they have, whether they can be sharded, and whether those are still there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from weft.models.adapters import added_late, base_of, why_not_adapted
from weft.models.linear import ColumnLinear, RowLinear
from weft.models.quantised import kind_of


@dataclass(frozen=True)
class Block:
    """A child of a decoder layer with linears of two kinds: columns read its input, the row makes its output."""

    columns: tuple[str, ...]
    row: str


_USUAL = {"self_attn": Block(("q_proj", "k_proj", "v_proj"), "o_proj"), "mlp": Block(("gate_proj", "up_proj"), "down_proj")}


def blocks_of(config: Any) -> Mapping[str, Block]:
    """A layer's blocks by name: by the model's own plan for tensor parallelism, else by the usual names."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for pattern, kind in (getattr(config, "base_model_tp_plan", None) or {}).items():
        path = pattern.split(".")
        if path[:2] == ["layers", "*"] and len(path) == 4:
            kinds.setdefault(path[2], {}).setdefault(kind, []).append(path[3])
    planned = {
        parent: Block(tuple(found["colwise"]), found["rowwise"][0])
        for parent, found in kinds.items()
        if "colwise" in found and len(found.get("rowwise", [])) == 1
    }
    return planned or _USUAL


def why_not_block(child: nn.Module, block: Block | None, config: Any, ranks: int, several: Collection[nn.Module]) -> str:
    """Why a block runs whole, whatever its parameters are shared with; empty if it can be sharded. several: modules that have
    several places in the model."""
    if block is None and has_experts(child):
        return "all experts on all tokens; pass experts=weft.ExpertParallel()"
    if block is None:
        return f"a {type(child).__name__} is no block that the model's plan names"
    if "forward" in child.__dict__ or not type(child).forward.__module__.startswith("transformers."):
        return f"the forward of its {type(child).__name__} is not transformers' own"
    if own := [name for name, parameter in child._parameters.items() if parameter is not None]:
        return f"its {type(child).__name__} has parameters of its own: {', '.join(own)}"
    for name in (*block.columns, block.row):
        found = getattr(child, name, None)
        if not isinstance(found, nn.Module):
            return f"{name}: there is none"
        why = why_not_adapted(found, row=name == block.row, ranks=ranks)
        if not why and (found in several or base_of(found) in several):
            why = "it is one module in several places"
        if why:
            return f"{name}: {why}"
    if len({kind_of(base_of(child.get_submodule(name))) for name in block.columns}) > 1:
        return f"of {', '.join(block.columns)} some are of FP8, and some are not"
    if hasattr(child, "head_dim"):
        for name in ("num_attention_heads", "num_key_value_heads"):
            if getattr(config, name) % ranks:
                return f"{name} is {getattr(config, name)}, for {ranks} ranks"
    return ""


def has_experts(module: nn.Module) -> bool:
    """Whether there are experts in a module, or it is some itself."""
    listed = any(name.rpartition(".")[2] == "experts" for name, _ in module.named_modules())
    return listed or isinstance(getattr(module, "gate_up_proj", None), nn.Parameter)


@dataclass(frozen=True)
class Unwrapped:
    """A hook before a block: its linears are still those that were sharded, or ValueError. block: its name in the model;
    linears: their names in it."""

    block: str
    linears: tuple[str, ...]

    def __call__(self, module: nn.Module, args: Any) -> None:
        for name in self.linears:
            found = getattr(module, name)
            linear = base_of(found)
            if isinstance(linear, ColumnLinear | RowLinear):
                self._check(name, linear, added_late(found))
            elif _has_more(found):
                raise ValueError(
                    f"{self.block}.{name} is a {type(found).__name__}, around or instead of what weft.parallelize has sharded; "
                    "put adapters (LoRA) in before weft.parallelize"
                )

    def _check(self, name: str, linear: nn.Linear, late: list[str]) -> None:
        if late:
            raise ValueError(
                f"{self.block}.{name} has the adapter {late[0]!r}, which came after weft.parallelize; add adapters before it"
            )
        if not isinstance(linear.weight, DTensor):
            raise ValueError(
                f"{self.block}.{name}.weight is a {type(linear.weight).__name__}, in the place of what weft.parallelize has "
                "sharded; quantise the model before weft.parallelize: that block then runs whole on every rank"
            )


def _has_more(module: nn.Module) -> bool:
    """Whether a module has parameters besides a sharded linear's: what only calls one (a compiled one) has not."""
    found = list(module.parameters())
    return len(found) > 2 or any(not isinstance(parameter, DTensor) for parameter in found)
