"""Linears of FP8 checkpoints that transformers keeps in FP8: the kinds that weft shards, and their products, for inference.

    module of transformers        weight [N, K] of FP8, and its scales            its input is quantised
    FP8Linear                     weight_scale_inv [N / 128, K / 128]             1 x 128
    CompressedTensorsFP8Linear    weight_scale [1, N], of compressed-tensors      by row

Weight and scales are cut together. Each product quantises its input: a scale is the largest magnitude divided by 448, the
largest value of float8_e4m3fn. If the input of a row-sharded linear is quantised by row, each rank's part of a row has its own
scale.

Column linears whose tokens are whole multiply without communication. Else the operators are those of weft.models.products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft.core.problem import FLOAT8_UNIT, SCALE_BLOCK, Recipe, split
from weft.models.parameters import part_of
from weft.models.products import LinearProducts, TokenExchange, in_one_dtype
from weft.ops.common import FLOAT8
from weft.ops.quantised_linears import quantised_linears

Tensor = torch.Tensor


class Kind(NamedTuple):
    """A class of FP8 linears. scales: the name of the parameter with the scales."""

    scales: str
    recipe: Recipe

    def placement(self, scales: Tensor, weight: Placement) -> Placement:
        """Return the layout of the scales for a layout of the weight [N, K]."""
        if self.recipe == "blockwise":
            return weight
        return Shard(0 if scales.shape[1] == 1 else 1) if weight == Shard(0) else Replicate()


_KINDS = {
    ("transformers.integrations.finegrained_fp8", "FP8Linear"): Kind("weight_scale_inv", "blockwise"),
    ("transformers.integrations.compressed_tensors", "CompressedTensorsFP8Linear"): Kind("weight_scale", "rowwise"),
}
"""The kinds, by module and name of the class. Names are used because transformers is optional."""
_NAMES: dict[Recipe, str] = {"rowwise": "RowWise", "blockwise": "BlockWise128x128"}
"""Names in torch.nn.functional.ScalingType. A small b may have a single scale with either recipe, so its size cannot tell them
apart."""


def kind_of(module: nn.Module) -> Kind | None:
    """Return the kind of an FP8 linear that is not sharded yet, or None for other modules."""
    return _KINDS.get((type(module).__module__, type(module).__qualname__))


def why_not_quantised(module: nn.Module, kind: Kind) -> str:
    """Return why weft cannot multiply by a linear of this kind, or "" if it can."""
    linear, scales = cast(Any, module), getattr(module, kind.scales)
    if "forward" in module.__dict__:
        return "its forward was put on the module itself"
    if linear.weight.dtype not in FLOAT8:
        return f"its weight is of {linear.weight.dtype}, not of FP8"
    if scales.dtype != torch.float32:
        return f"its {kind.scales} is of {scales.dtype}; weft multiplies by scales of float32"
    if kind.recipe == "blockwise" and tuple(linear.block_size or ()) != (SCALE_BLOCK, SCALE_BLOCK):
        return f"its block_size is {linear.block_size}; weft multiplies blocks of {SCALE_BLOCK} x {SCALE_BLOCK}"
    if getattr(linear, "activation_scheme", "dynamic") != "dynamic":
        return f"its activation_scheme is {linear.activation_scheme!r}; weft quantises by scales of the input, 'dynamic'"
    return ""


def check_sizes(name: str, linear: nn.Module, kind: Kind, *, row: bool, ranks: int) -> None:
    """Raise ValueError if a linear's parts would cut a block of scales, or have sizes that FP8 products do not take.

    name: the name of the linear in the model.
    row: cut along K, the inputs. Otherwise it is cut along N, the outputs.
    """
    found = cast(nn.Linear, linear)
    n, k, unit = found.out_features, found.in_features, SCALE_BLOCK if kind.recipe == "blockwise" else FLOAT8_UNIT
    parts = [high - low for low, high in split(k if row else n, ranks)]
    other, needed = (n, FLOAT8_UNIT) if row else (k, unit)
    if other % needed or any(part % unit or not part for part in parts):
        cut, whole = ("inputs", "outputs") if row else ("outputs", "inputs")
        raise ValueError(
            f"{name} is a {type(linear).__name__} of {k} inputs and {n} outputs, whose {cut} would be cut into {parts} on "
            f"{ranks} ranks; with {kind.recipe} scales a part must be a multiple of {unit}, and its {whole} one of {needed}: "
            "use a number of ranks that gives such parts, or a checkpoint that is not of FP8"
        )


@dataclass(frozen=True)
class QuantisedProducts(LinearProducts):
    """The products of FP8 linears of one kind. A weight is this rank's part of it, in the module's layout, and scale_b of
    weight^T."""

    kind: Kind
    depends_on_weights_alone: ClassVar[bool] = False

    def weight_of(self, linear: nn.Linear, eager: bool) -> tuple[Tensor, Tensor]:
        scales = part_of(linear, self.kind.scales, eager=eager)
        return super().weight_of(linear, eager), scales.t() if self.kind.recipe == "blockwise" else scales.reshape(1, -1)

    def _operands(self, x: Tensor, weights: Sequence[Any]) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
        scales = [scale_b for _, scale_b in weights]
        return (
            _input(x),
            [elements.t() for elements, _ in weights],
            {"scale_b": scales, "scale_recipe_b": _NAMES[self.kind.recipe]},
        )

    def _of_whole(self, x: Tensor, weights: Sequence[Any], exchange: TokenExchange) -> list[Tensor]:
        elements, scales = zip(*weights, strict=True)
        return quantised_linears(_input(x), elements, scales, self.kind.recipe)


def _input(x: Tensor) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(
            "a linear with FP8 weights is called with an input that requires gradients, which weft has for none of FP8: call "
            "the model under torch.no_grad() or torch.inference_mode()"
        )
    return in_one_dtype(x, [])[0]
