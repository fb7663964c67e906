"""Describes the blocks of a decoder layer: their linears, whether they can be sharded, and a check that these are still in
place.

Places of a model must run whole if modules share a parameter, which has one layout only:

    a place that can be sharded      wants some of its parameters as Shard(0) or Shard(1)
    the rest of the model            has its parameters whole: Replicate()

If a place and another module want different layouts of one parameter, the place runs whole. Any place that shares a parameter
with it may then have to run whole, too, so the search repeats until no parameter is needed in two layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from weft.models.adapters import added_late, base_of, why_not_adapted
from weft.models.linear import ColumnLinear, RowLinear, why_not_linear
from weft.models.products import kind_of


@dataclass(frozen=True)
class Block:
    """A block is a child of a decoder layer. It says which of its linears are sharded, and how.

    columns: the linears that read the block's input. Without them, the input is gathered for linears that are whole on every
    rank.
    row: the linear that makes the block's output.
    heads: linears and parameters in between, with some rows for each head. A rank has the rows of its heads. They do not
    communicate.
    fused: the block splits a column linear's output itself (into Q, K and V). The output is gathered, and every rank uses all
    of it.
    """

    columns: tuple[str, ...]
    row: str
    heads: tuple[str, ...] = ()
    fused: bool = False

    @property
    def linears(self) -> tuple[str, ...]:
        """Return the names of the linears that communicate."""
        return (*self.columns, self.row)

    def heads_of(self, child: nn.Module) -> dict[str, nn.Module | nn.Parameter]:
        """Return the members of `heads` that the block has. A configuration may set some to None."""
        found = {name: getattr(child, name) for name in self.heads}
        return {name: each for name, each in found.items() if each is not None}


_PLANS: dict[str, dict[str, str]] = {
    "deepseek_v3": {
        "layers.*.self_attn.q_proj": "heads",
        "layers.*.self_attn.q_b_proj": "heads",
        "layers.*.self_attn.kv_b_proj": "heads",
        "layers.*.self_attn.o_proj": "rowwise",
    },
    "gpt_oss": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.sinks": "heads",
        "layers.*.self_attn.o_proj": "rowwise",
    },
}
"""What transformers' own plans leave out, by config.model_type, in the names of its styles. "heads" is Block.heads."""

_SHARDED = ColumnLinear, RowLinear
_USUAL = {"self_attn": Block(("q_proj", "k_proj", "v_proj"), "o_proj"), "mlp": Block(("gate_proj", "up_proj"), "down_proj")}


def blocks_of(config: Any) -> Mapping[str, Block]:
    """Return a layer's blocks by name, from the model's own plan for tensor parallelism, or else from the usual names."""
    kinds: dict[str, dict[str, list[str]]] = {}
    plan = (getattr(config, "base_model_tp_plan", None) or {}) | _PLANS.get(getattr(config, "model_type", ""), {})
    for pattern, kind in plan.items():
        path = pattern.split(".")
        if path[:2] == ["layers", "*"] and len(path) == 4:
            kinds.setdefault(path[2], {}).setdefault(kind, []).append(path[3])
    planned = {parent: block for parent, found in kinds.items() if (block := _planned(found)) is not None}
    return planned or _USUAL


def _planned(kinds: Mapping[str, Sequence[str]]) -> Block | None:
    """Return a block from the names for each style of transformers. Return None for other combinations of styles."""
    heads = tuple(kinds.get("heads", ()))
    for columns, row, fused in (("colwise", "rowwise", False), ("colwise_gather_output", "rowwise_split_input", True)):
        if len(kinds.get(row, ())) == 1 and (columns in kinds or heads):
            return Block(tuple(kinds.get(columns, ())), kinds[row][0], heads, fused)
    return None


def why_not_block(child: nn.Module, block: Block | None, config: Any, ranks: int, several: Collection[nn.Module]) -> str:
    """Return why a block runs whole, apart from shared parameters, or "" if it can be sharded.

    several: the modules that have several places in the model.
    """
    if block is None:
        return f"a {type(child).__name__} is no block that the model's plan names"
    if "forward" in child.__dict__ or not type(child).forward.__module__.startswith("transformers."):
        return f"the forward of its {type(child).__name__} is not transformers' own"
    if own := [name for name, each in child._parameters.items() if each is not None and name not in block.heads]:
        return f"its {type(child).__name__} has parameters of its own: {', '.join(own)}"
    for name in block.heads:
        if not hasattr(child, name):
            return f"{name}: there is none"
    for name, each in block.heads_of(child).items():
        why = why_not_linear(each, ranks=ranks) if isinstance(each, nn.Module) else ""
        if why or each in several:
            return f"{name}: {why or 'it is one module in several places'}"
    for name in block.linears:
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
    if not block.fused and (hasattr(child, "head_dim") or block.heads):
        for name in ("num_attention_heads", "num_key_value_heads"):
            if getattr(config, name) % ranks:
                return f"{name} is {getattr(config, name)}, for {ranks} ranks"
    return ""


def has_experts(module: nn.Module) -> bool:
    """Return whether a module contains experts, or is a module of experts itself."""
    listed = any(name.rpartition(".")[2] == "experts" for name, _ in module.named_modules())
    return listed or isinstance(getattr(module, "gate_up_proj", None), nn.Parameter)


@dataclass(frozen=True)
class Unwrapped:
    """A hook before a block that raises ValueError if its linears are no longer those that were sharded.

    block: the block's name in the model.
    linears: their names in the block.
    """

    block: str
    linears: tuple[str, ...]

    def __call__(self, module: nn.Module, args: Any) -> None:
        for name in self.linears:
            found = getattr(module, name)
            if isinstance(found, _SHARDED) and isinstance(found._parameters.get("weight"), DTensor):
                continue
            linear = base_of(found)
            if isinstance(linear, _SHARDED):
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
    """Return whether a module has more parameters than a sharded linear. A mere wrapper, such as a compiled module, has not."""
    found = list(module.parameters())
    return len(found) > 2 or any(not isinstance(parameter, DTensor) for parameter in found)


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
