"""weft::matmul_all_reduce(a [M, k], b [k, N], bias [N]?, residual [M, N]?, ...) -> out [M, N].

Every rank has the whole result, so its gradient is whole on every rank, too, and each rank's part of a and b needs no exchange:

    grad_a = grad @ b^T      grad_b = a^T @ grad      grad_bias = the sum of grad's rows      grad_residual = grad

Of the first two each rank has a part, so that where gradients of gradients are asked for, grad's is summed over ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.ops.library import register, unseen
from weft.ops.library.summed import summed_in_backward
from weft.runtime.calls import MatmulCall
from weft.runtime.groups import GROUPS


def _all_reduce(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, group: str, schedule: str
) -> torch.Tensor:
    extras = {} if bias is None else {"bias": bias[None]}
    extras |= {} if residual is None else {"residual": residual}
    call = MatmulCall(op="matmul_all_reduce", a=a, bs=[b], rows=a.shape[0], row_multiple=1, schedule=schedule, extras=extras)
    return GROUPS.run(group, call)["out"][0]


def run_all_reduce(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, group: str, schedule: str
) -> torch.Tensor:
    """weft::matmul_all_reduce."""
    way = _all_reduce if unseen(a, b, *(t for t in (bias, residual) if t is not None)) else torch.ops.weft.matmul_all_reduce
    return way(a, b, bias, residual, group, schedule)


def _fake(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, group: str, schedule: str
) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, _, _, ctx.group, _ = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    for_a, for_b, for_bias, for_residual = ctx.needs_input_grad[:4]
    used = summed_in_backward(grad, ctx.group)
    return (
        used @ b.t() if for_a else None,
        a.t() @ used if for_b else None,
        grad.sum(0) if for_bias else None,
        grad if for_residual else None,
        None,
        None,
    )


register(
    "matmul_all_reduce(Tensor a, Tensor b, Tensor? bias, Tensor? residual, str group, str schedule) -> Tensor",
    run=_all_reduce,
    fake=_fake,
    context=_context,
    backward=_backward,
)
