"""weft::linears_of_whole(x [.., K], weights [n, K]..., ...) -> [x @ weight^T [.., n], ...]

Several weights' columns of this rank; x is whole, so its gradient is summed over ranks, in one go:

    grad_x = all_reduce([grad_0 | grad_1 ..] @ [weight_0 / weight_1 ..])      grad_weight = grad^T @ x, of those that were used

An operator, not an autograd.Function: of such a one torch.compile traces a backward that has all gradients, so that a weight
whose product nobody has used would get zeros, and an optimizer's weight decay change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.ops.library import register
from weft.ops.library.all_reduce import run_all_reduce
from weft.ops.library.summed import summed_in_backward

Tensor = torch.Tensor


def linears_of_whole(x: Tensor, weights: Sequence[Tensor], group: str, schedule: str) -> list[Tensor]:
    """weft::linears_of_whole."""
    found: list[Tensor] = torch.ops.weft.linears_of_whole(x, list(weights), group, schedule)
    return found


def _run(x: Tensor, weights: Sequence[Tensor], group: str, schedule: str) -> list[Tensor]:
    return [torch.nn.functional.linear(x, weight) for weight in weights]


def _fake(x: Tensor, weights: Sequence[Tensor], group: str, schedule: str) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


def _context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    x, weights, ctx.group, ctx.schedule = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, *weights)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    x = summed_in_backward(x, ctx.group)
    rows_x, given = _matrix(x), [None if grad is None else _matrix(grad) for grad in grads]
    pairs = zip(given, weights, strict=True)
    # A product that nobody has used stays in it, as zeros: ranks that differ in that still call the same.
    flat = [rows_x.new_zeros(rows_x.shape[0], weight.shape[0]) if one is None else one for one, weight in pairs]
    grad, weight = (flat[0], weights[0]) if len(flat) == 1 else (torch.cat(flat, -1), torch.cat(weights))
    grad_x = run_all_reduce(grad, weight, None, None, ctx.group, ctx.schedule).view(x.shape)
    wanted = zip(given, ctx.needs_input_grad[1], strict=True)
    return grad_x, [one.t() @ rows_x if needed and one is not None else None for one, needed in wanted], None, None


def _matrix(x: Tensor) -> Tensor:
    """All tokens one below the other; of a single one, without a dimension for it, a matrix of one row."""
    return x[None] if x.dim() == 1 else x.flatten(0, -2)


register(
    "linears_of_whole(Tensor x, Tensor[] weights, str group, str schedule) -> Tensor[]",
    run=_run,
    fake=_fake,
    context=_context,
    backward=_backward,
)
