"""These are column-parallel linears with FP8 weights, for inference. Every rank has the input, so they do not communicate.

    weft::quantised_linears(x [.., K], weights [n, K]..., scale_bs, recipe)   -> [x @ (scaled weight)^T [.., n], ...]

x is quantised once for all weights. scale_bs are the scales of each weight^T, as weft.core.problem.Scaling names them for b.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.core.problem import Recipe, Scaling
from weft.ops.common import FLOAT8
from weft.ops.operator import define
from weft.ops.scaled import QUANTISED, quantised_here
from weft.runtime.bindings import FactorScales
from weft.runtime.products import products_on

Tensor = torch.Tensor


def quantised_linears(x: Tensor, weights: Sequence[Tensor], scale_bs: Sequence[Tensor], recipe: Recipe) -> list[Tensor]:
    """Return x @ weight^T for each FP8 weight, in the dtype of x.

    x: a tensor of 16 or 32 bits.
    recipe: "rowwise" or "blockwise".
    """
    found: list[Tensor] = _linears(x, list(weights), list(scale_bs), recipe)
    return found


def _run(x: Tensor, weights: Sequence[Tensor], scale_bs: Sequence[Tensor], recipe: str) -> list[Tensor]:
    elements, scale_a = quantised_here(x.reshape(-1, x.shape[-1]), recipe)  # type: ignore[arg-type]
    scaling = Scaling(a=FLOAT8[QUANTISED], b=FLOAT8[weights[0].dtype], recipe=recipe)  # type: ignore[arg-type]
    outs = [x.new_empty(elements.shape[0], weight.shape[0]) for weight in weights]
    for weight, scale_b, out in zip(weights, scale_bs, outs, strict=True):
        products_on(x.device)(elements, weight.t(), out, FactorScales(scale_a, scale_b, scaling))
    return [out.view(*x.shape[:-1], out.shape[1]) for out in outs]


def _fake(x: Tensor, weights: Sequence[Tensor], *_: object) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


_linears = define("quantised_linears", _run, _fake)
