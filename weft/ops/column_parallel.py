"""These are column-parallel linears of an input that is replicated on all ranks. Only their backward communicates.

    weft::linears_of_whole(x [.., K], weights [n, K]..., ...)   -> [x @ weight^T [.., n], ...]

Each weight is this rank's part of the columns, so each rank computes a part of the gradient of x. It is summed over the ranks
by one matmul_all_reduce for all weights:

    grad_x = all_reduce(grad_0 @ weight_0 + grad_1 @ weight_1 ..)             grad_weight = grad^T @ x, if its result was used

This is an operator because torch.compile would trace the backward of an autograd.Function with gradients of all results. A
weight whose result is not used would then get a gradient of zeros, and an optimizer's weight decay would change it.

Those with FP8 weights are for inference, and do not communicate:

    weft::quantised_linears(x [.., K], weights [n, K]..., scale_bs, recipe)   -> [x @ (scaled weight)^T [.., n], ...]

x is quantised once for all weights. scale_bs are the scales of each weight^T, as weft.core.problem.Scaling names them for b.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.core.problem import Recipe, Scaling
from weft.ops.all_reduce import flat_matmul_all_reduce
from weft.ops.common import FLOAT8, QUANTISED
from weft.ops.operator import define
from weft.ops.parts import with_summed_double_gradient
from weft.ops.scaled import quantised_here
from weft.runtime.bindings import FactorScales
from weft.runtime.products import products_on

Tensor = torch.Tensor


def column_parallel_linears(x: Tensor, weights: Sequence[Tensor], group: str, schedule: str) -> list[Tensor]:
    """Return x @ weight^T for each weight.

    x: the same on all ranks.
    group: the name of the process group.
    schedule: the schedule of the backward's matmul_all_reduce.
    """
    found: list[Tensor] = _linears(x, list(weights), group, schedule)
    return found


def _run(x: Tensor, weights: Sequence[Tensor], group: str, schedule: str) -> list[Tensor]:
    return [torch.nn.functional.linear(x, weight) for weight in weights]


def _fake(x: Tensor, weights: Sequence[Tensor], *_: str) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    x, weights, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, *weights)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    (x, *weights), (group, schedule) = ctx.saved_tensors, ctx.options
    x = with_summed_double_gradient(x, group)
    rows, given = _matrix(x), [None if grad is None else _matrix(grad) for grad in grads]
    # The gradient of a result that nobody has used is zeros, and not left out: ranks may differ in what they use, and all must
    # make the same call.
    pairs = zip(given, weights, strict=True)
    flat = [rows.new_zeros(rows.shape[0], weight.shape[0]) if grad is None else grad for grad, weight in pairs]
    grad_x = flat_matmul_all_reduce(flat, weights, None, None, group, schedule).view(x.shape)
    wanted = zip(given, ctx.needs_input_grad[1], strict=True)
    return grad_x, [one.t() @ rows if needed and one is not None else None for one, needed in wanted]


def _matrix(x: Tensor) -> Tensor:
    """All tokens as a matrix's rows. A single token, without a dimension for it, is one row."""
    return x[None] if x.dim() == 1 else x.flatten(0, -2)


_linears = define("linears_of_whole", _run, _fake, save=_save, backward=_backward)


def quantised_linears(x: Tensor, weights: Sequence[Tensor], scale_bs: Sequence[Tensor], recipe: Recipe) -> list[Tensor]:
    """Return x @ weight^T for each FP8 weight, in the dtype of x.

    x: a tensor of 16 or 32 bits.
    recipe: "rowwise" or "blockwise".
    """
    found: list[Tensor] = _quantised_linears(x, list(weights), list(scale_bs), recipe)
    return found


def _run_quantised(x: Tensor, weights: Sequence[Tensor], scale_bs: Sequence[Tensor], recipe: str) -> list[Tensor]:
    elements, scale_a = quantised_here(x.reshape(-1, x.shape[-1]), recipe)  # type: ignore[arg-type]
    scaling = Scaling(a=FLOAT8[QUANTISED], b=FLOAT8[weights[0].dtype], recipe=recipe)  # type: ignore[arg-type]
    outs = [x.new_empty(elements.shape[0], weight.shape[0]) for weight in weights]
    for weight, scale_b, out in zip(weights, scale_bs, outs, strict=True):
        products_on(x.device)(elements, weight.t(), out, FactorScales(scale_a, scale_b, scaling))
    return [out.view(*x.shape[:-1], out.shape[1]) for out in outs]


def _fake_quantised(x: Tensor, weights: Sequence[Tensor], *_: object) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


_quantised_linears = define("quantised_linears", _run_quantised, _fake_quantised)
