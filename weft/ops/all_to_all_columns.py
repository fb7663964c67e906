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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.core.schedule import Schedule
from weft.ops.common import (
    check_operands,
    choose_backward_schedule,
    find_gradients_of_received,
    resolve_group,
    rows_of,
    save_factors,
    save_factors_and_received,
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


class _Columns(NamedTuple):
    """_Columns holds the options of both operators."""

    group: str
    world_size: int
    schedule: str


def _to_ranks(a: torch.Tensor, b: torch.Tensor, options: _Columns) -> MatmulCall:
    return matmul_call("matmul_all_to_all_columns", a, [b], options.group, options.schedule, rows=a.shape[0])


def _to_ranks_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (a, b), options = ctx.saved_tensors, ctx.options
    home = options._replace(schedule=choose_backward_schedule(options.schedule, "all_to_all_columns_matmul"))
    grad_a, received = _all_to_all_columns_matmul(grad.contiguous(), b.t(), *home, True)
    return grad_a, a.t() @ received


_matmul_all_to_all_columns = define(
    "matmul_all_to_all_columns",
    _to_ranks,
    lambda a, b, options: a.new_empty(options.world_size * a.shape[0], b.shape[1] // options.world_size),
    returns=torch.Tensor,
    save=save_factors,
    backward=_to_ranks_backward,
    saves_results=False,
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


def _from_ranks(a: torch.Tensor, b: torch.Tensor, options: _Columns, return_received: bool) -> MatmulCall:
    group, _, schedule = options
    return matmul_call("all_to_all_columns_matmul", a, [b], group, schedule, rows=a.shape[0], return_gathered=return_received)


def _from_ranks_fake(a: torch.Tensor, b: torch.Tensor, options: _Columns, return_received: bool) -> list[torch.Tensor]:
    rows = a.shape[0] // options.world_size
    return [a.new_empty(rows, b.shape[1])] + [a.new_empty(rows, b.shape[0])] * return_received


def _from_ranks_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    saved, options = ctx.saved_tensors, ctx.options
    home = options._replace(schedule=choose_backward_schedule(options.schedule, "matmul_all_to_all_columns"))
    again = options._replace(schedule="sequential")
    return find_gradients_of_received(
        ctx,
        saved,
        grads,
        saved[0].shape[0] // options.world_size,
        lambda grad, columns: _matmul_all_to_all_columns(grad.contiguous(), columns, *home),
        lambda nothing: _all_to_all_columns_matmul(saved[0], nothing, *again, True)[1],
    )


_all_to_all_columns_matmul = define(
    "all_to_all_columns_matmul",
    _from_ranks,
    _from_ranks_fake,
    returns=list[torch.Tensor],
    save=save_factors_and_received,
    backward=_from_ranks_backward,
)
