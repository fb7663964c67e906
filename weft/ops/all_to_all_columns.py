"""matmul_all_to_all with split_dim=-1 and all_to_all_matmul with gather_dim=-1 exchange parts of rows and parts of columns.

The operators of torch.library take flat matrices and a group's name:

    weft::matmul_all_to_all_columns(a [M, K], b [K, N], ...)   -> out [world_size * M, n]
    weft::all_to_all_columns_matmul(a [M, k], b [K, N], ...)   -> [out [m, N], received [m, K] if asked for]

m is M / world_size, and n and k are such parts of N and K. In the first operator, part d of a product's columns goes to rank d.
In the second, part d of the rows of a goes to rank d, which concatenates the columns that it receives. The backward of each is
the other one:

    matmul_all_to_all_columns    grad_a = concatenated(grad_out) @ b^T     grad_b = a^T @ concatenated(grad_out)
    all_to_all_columns_matmul    grad_a = to_ranks(grad_out @ b^T)         grad_b = concatenated(a)^T @ grad_out
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.core.schedule import Schedule
from weft.ops.common import (
    check_operands,
    choose_backward_schedule,
    make_empty_operand_after,
    resolve_group,
    rows_of,
    schedule_to_spec,
)
from weft.ops.front import OperatorRequest
from weft.ops.operator import define
from weft.runtime.calls import MatmulCall, matmul_call


def columns_to_ranks(
    a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup | None, schedule: str | Schedule
) -> OperatorRequest:
    """Return the OperatorRequest of matmul_all_to_all(a, b, split_dim=-1)."""
    check_operands(a, [b])
    name, _, world_size = resolve_group(group)
    if b.shape[1] % world_size:
        raise ValueError(f"b has {b.shape[1]} columns; with split_dim=-1 they must be a multiple of {world_size}, the ranks")
    spec = schedule_to_spec(schedule, "matmul_all_to_all_columns")
    reads, view = (rows_of(a.shape), None), rows_of(a.shape, 0, world_size * a.shape[0])
    return OperatorRequest(_matmul_all_to_all_columns, (a, b), (name, world_size, spec), group, reads, view)


def _to_ranks(a: torch.Tensor, b: torch.Tensor, group: str, world_size: int, schedule: str) -> MatmulCall:
    return matmul_call("matmul_all_to_all_columns", a, [b], group, schedule, rows=a.shape[0])


def _to_ranks_fake(a: torch.Tensor, b: torch.Tensor, group: str, world_size: int, schedule: str) -> torch.Tensor:
    return a.new_empty(world_size * a.shape[0], b.shape[1] // world_size)


def _to_ranks_save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, *ctx.options = inputs
    ctx.save_for_backward(a, b)


def _to_ranks_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (a, b), (group, world_size, schedule) = ctx.saved_tensors, ctx.options
    spec = choose_backward_schedule(schedule, "all_to_all_columns_matmul")
    grad_a, received = _all_to_all_columns_matmul(grad.contiguous(), b.t(), group, world_size, spec, True)
    return grad_a, a.t() @ received


_matmul_all_to_all_columns = define(
    "matmul_all_to_all_columns",
    _to_ranks,
    _to_ranks_fake,
    returns=torch.Tensor,
    save=_to_ranks_save,
    backward=_to_ranks_backward,
)


def columns_from_ranks(
    a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup | None, schedule: str | Schedule, *, return_received: bool
) -> OperatorRequest:
    """Return the OperatorRequest of all_to_all_matmul(a, b, gather_dim=-1)."""
    name, _, world_size = resolve_group(group)
    check_operands(a, [b], parts=world_size)
    if a.shape[0] % world_size:
        raise ValueError(f"a has {a.shape[0]} rows; with gather_dim=-1 they must be a multiple of {world_size}, the ranks")
    spec = schedule_to_spec(schedule, "all_to_all_columns_matmul")
    reads, view = (rows_of(a.shape), None), rows_of(a.shape, 0, a.shape[0] // world_size)

    def after(results: Sequence[torch.Tensor]) -> Any:
        return tuple(results) if return_received else results[0]

    options = (name, world_size, spec, return_received)
    return OperatorRequest(_all_to_all_columns_matmul, (a, b), options, group, reads, view, after)


def _from_ranks(
    a: torch.Tensor, b: torch.Tensor, group: str, world_size: int, schedule: str, return_received: bool
) -> MatmulCall:
    return matmul_call("all_to_all_columns_matmul", a, [b], group, schedule, rows=a.shape[0], return_gathered=return_received)


def _from_ranks_fake(
    a: torch.Tensor, b: torch.Tensor, group: str, world_size: int, schedule: str, return_received: bool
) -> list[torch.Tensor]:
    rows = a.shape[0] // world_size
    return [a.new_empty(rows, b.shape[1])] + [a.new_empty(rows, b.shape[0])] * return_received


def _from_ranks_save(ctx: Any, inputs: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
    a, b, *ctx.options = inputs
    # Zeros for received rows that nobody has used would go through the whole backward.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, b, *outputs[1:])


def _from_ranks_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    (a, b, *saved), (group, world_size, schedule, return_received) = ctx.saved_tensors, ctx.options
    grad = a.new_zeros(a.shape[0] // world_size, b.shape[1]) if grads[0] is None else grads[0].contiguous()
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        factors, columns = grad, b
        if return_received and grads[-1] is not None:
            # The gradient of the received rows goes back with the rest, as a product with 1.
            factors = torch.cat([grad, grads[-1]], 1)
            columns = torch.cat([b, torch.eye(b.shape[0], dtype=b.dtype, device=b.device)], 1)
        spec = choose_backward_schedule(schedule, "matmul_all_to_all_columns")
        grad_a = _matmul_all_to_all_columns(factors, columns.t(), group, world_size, spec)
    if ctx.needs_input_grad[1]:
        # Exchanging again costs time; keeping what arrived costs as much memory as a from forward to backward.
        nothing = make_empty_operand_after(b, grad if grad_a is None else grad_a)
        received = saved[0] if saved else _all_to_all_columns_matmul(a, nothing, group, world_size, "sequential", True)[1]
        grad_b = received.t() @ grad
    return grad_a, grad_b


_all_to_all_columns_matmul = define(
    "all_to_all_columns_matmul",
    _from_ranks,
    _from_ranks_fake,
    returns=list[torch.Tensor],
    save=_from_ranks_save,
    backward=_from_ranks_backward,
)
