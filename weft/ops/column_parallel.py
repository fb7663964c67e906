"""These are column-parallel linears of an input that is replicated on all ranks. Only their backward communicates.

    weft::linears_of_whole(x [.., K], weights [n, K]..., ...)   -> [x @ weight^T [.., n], ...]

Each weight is this rank's part of the columns, so each rank computes a part of the gradient of x. It is summed over the ranks
by one matmul_all_reduce for all weights:

    grad_x = all_reduce(grad_0 @ weight_0 + grad_1 @ weight_1 ..)             grad_weight = grad^T @ x, if its result was used

This is an operator because torch.compile would trace the backward of an autograd.Function with gradients of all results. A
weight whose result is not used would then get a gradient of zeros, and an optimizer's weight decay would change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.ops.all_reduce import flat_matmul_all_reduce
from weft.ops.operator import define
from weft.ops.replicated import with_summed_double_gradient

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
