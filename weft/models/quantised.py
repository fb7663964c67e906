"""Linears of FP8 checkpoints that transformers keeps in FP8: the kinds that weft shards, and their products, for inference.

    module of transformers        weight [N, K] of FP8, and its scales            its input is quantised
    FP8Linear                     weight_scale_inv [N / 128, K / 128]             1 x 128
    CompressedTensorsFP8Linear    weight_scale [1, N], of compressed-tensors      by row

Weight and scales are cut together. Each product quantises its input: a scale is the largest magnitude divided by 448, the
largest value of float8_e4m3fn. If the input of a row-sharded linear is quantised by row, each rank's part of a row has its own
scale.

    tokens are    columns(x, weights)                    rows(x, weight)
    sharded       all_gather_matmul, which sends FP8     matmul_reduce_scatter
    whole         products without communication         matmul_all_reduce
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft.core.problem import FLOAT8_UNIT, SCALE_BLOCK, Recipe, split
from weft.models.products import ProductSettings, in_one_dtype
from weft.ops.all_reduce import matmul_all_reduce
from weft.ops.common import FLOAT8
from weft.ops.quantised_linears import quantised_linears
from weft.ops.tensor_parallel import all_gather_matmul, matmul_reduce_scatter

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


class QuantisedWeight(NamedTuple):
    """A rank's part of an FP8 weight, [n, K] or [N, k], and of its scales, in the module's layout."""

    elements: Tensor
    scales: Tensor
    recipe: Recipe

    @property
    def scale_b(self) -> Tensor:
        """Return the scales of weight^T, in the layout of weft.core.problem.Scaling for b."""
        return self.scales.t() if self.recipe == "blockwise" else self.scales.reshape(1, -1)


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


def columns(
    x: Tensor,
    weights: Sequence[QuantisedWeight],
    biases: Sequence[Tensor | None],
    group: dist.ProcessGroup,
    settings: ProductSettings,
    *,
    dim: int = 1,
    total: int | None = None,
) -> list[Tensor]:
    """Return x @ weight^T + bias for each weight, of all tokens, as weft.models.products.columns does."""
    (x,), recipe, scales = _input(x), weights[0].recipe, [weight.scale_b for weight in weights]
    if total is None:
        outs = quantised_linears(x, [weight.elements for weight in weights], scales, recipe)
    else:
        outs = all_gather_matmul(
            x,
            [weight.elements.t() for weight in weights],
            group,
            schedule=settings.of("all_gather_matmul"),
            gather_dim=dim,
            rows=total,
            scale_b=scales,
            scale_recipe_b=_NAMES[recipe],
        )
    return [out if bias is None else out + bias.to(out.dtype) for out, bias in zip(outs, biases, strict=True)]


def rows(
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    group: dist.ProcessGroup,
    settings: ProductSettings,
    *,
    dim: int = 1,
    scatter: bool,
) -> Tensor:
    """Return the sum over ranks of x @ weight^T, plus bias, as weft.models.products.rows does."""
    (x,) = _input(x)
    options: Any = {"scale_b": weight.scale_b, "scale_recipe_b": _NAMES[weight.recipe]}
    if scatter:
        options |= {"schedule": settings.of("matmul_reduce_scatter"), "scatter_dim": dim}
        out = matmul_reduce_scatter(x, weight.elements.t(), group, **options)
    else:
        out = matmul_all_reduce(x, weight.elements.t(), group, schedule=settings.of("matmul_all_reduce"), **options)
    return out if bias is None else out + bias.to(out.dtype)


def _input(x: Tensor) -> list[Tensor]:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(
            "a linear with FP8 weights is called with an input that requires gradients, which weft has for none of FP8: call "
            "the model under torch.no_grad() or torch.inference_mode()"
        )
    return in_one_dtype(x, [])
