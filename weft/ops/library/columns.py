"""weft::matmul_all_to_all_columns and weft::all_to_all_columns_matmul: between parts of rows and parts of columns.

    weft::matmul_all_to_all_columns(a [M, K], b [K, N], ...)   -> out [world_size * M, n]
    weft::all_to_all_columns_matmul(a [M, k], b [K, N], ...)   -> [out [m, N], received [m, K] if asked for]

m = M / world_size, and n and k alike. Each backward is the other operator:

    matmul_all_to_all_columns    grad_a = beside(grad_out) @ b^T       grad_b = a^T @ beside(grad_out)
    all_to_all_columns_matmul    grad_a = apart(grad_out @ b^T)        grad_b = beside(a)^T @ grad_out
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.ops.library import backward_schedule, register, unseen
from weft.runtime.calls import MatmulCall
from weft.runtime.groups import GROUPS


def _apart(a: torch.Tensor, b: torch.Tensor, group: str, world_size: int, schedule: str) -> torch.Tensor:
    call = MatmulCall(op="matmul_all_to_all_columns", a=a, bs=[b], rows=a.shape[0], row_multiple=1, schedule=schedule)
    return GROUPS.run(group, call)["out"][0]


def run_apart(a: torch.Tensor, b: torch.Tensor, group: str, world_size: int, schedule: str) -> torch.Tensor:
    """weft::matmul_all_to_all_columns."""
    way = _apart if unseen(a, b) else torch.ops.weft.matmul_all_to_all_columns
    return way(a, b, group, world_size, schedule)


def _apart_fake(a: torch.Tensor, b: torch.Tensor, group: str, world_size: int, schedule: str) -> torch.Tensor:
    return a.new_empty(world_size * a.shape[0], b.shape[1] // world_size)


def _beside(
    a: torch.Tensor, b: torch.Tensor, group: str, world_size: int, schedule: str, return_received: bool
) -> list[torch.Tensor]:
    call = MatmulCall(
        op="all_to_all_columns_matmul",
        a=a,
        bs=[b],
        rows=a.shape[0],
        row_multiple=1,
        schedule=schedule,
        return_gathered=return_received,
    )
    outputs = GROUPS.run(group, call)
    return outputs["out"] + outputs.get("gathered", [])


def run_beside(
    a: torch.Tensor, b: torch.Tensor, group: str, world_size: int, schedule: str, return_received: bool
) -> list[torch.Tensor]:
    """weft::all_to_all_columns_matmul."""
    way = _beside if unseen(a, b) else torch.ops.weft.all_to_all_columns_matmul
    return way(a, b, group, world_size, schedule, return_received)


def _beside_fake(
    a: torch.Tensor, b: torch.Tensor, group: str, world_size: int, schedule: str, return_received: bool
) -> list[torch.Tensor]:
    rows = a.shape[0] // world_size
    return [a.new_empty(rows, b.shape[1])] + [a.new_empty(rows, b.shape[0])] * return_received


def _apart_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, ctx.group, ctx.world_size, ctx.schedule = inputs
    ctx.save_for_backward(a, b)


def _apart_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    spec = backward_schedule(ctx.schedule, "all_to_all_columns_matmul")
    grad_a, back = torch.ops.weft.all_to_all_columns_matmul(grad.contiguous(), b.t(), ctx.group, ctx.world_size, spec, True)
    return grad_a, a.t() @ back, None, None, None


def _beside_context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    a, b, ctx.group, ctx.world_size, ctx.schedule, ctx.received = inputs
    # Zeros for received rows that nobody has used would go through the whole backward.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, b, *output[1:])


def _beside_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    a, b, *kept = ctx.saved_tensors
    grad = a.new_zeros(a.shape[0] // ctx.world_size, b.shape[1]) if grads[0] is None else grads[0].contiguous()
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        factors, columns = grad, b
        if ctx.received and grads[-1] is not None:
            # What flows into the received rows goes back with the rest, as a product with 1.
            factors = torch.cat([grad, grads[-1]], 1)
            columns = torch.cat([b, torch.eye(b.shape[0], dtype=b.dtype, device=b.device)], 1)
        spec = backward_schedule(ctx.schedule, "matmul_all_to_all_columns")
        grad_a = torch.ops.weft.matmul_all_to_all_columns(factors, columns.t(), ctx.group, ctx.world_size, spec)
    if ctx.needs_input_grad[1]:
        # Exchanging again costs time; keeping what arrived costs as much memory as a from forward to backward.
        received = kept[0] if kept else _again(ctx, a, b)
        grad_b = received.t() @ grad
    return grad_a, grad_b, None, None, None, None


def _again(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The rows that arrived, side by side."""
    found = torch.ops.weft.all_to_all_columns_matmul(a, b[:, :0], ctx.group, ctx.world_size, "sequential", True)
    rows: torch.Tensor = found[1]
    return rows


register(
    "matmul_all_to_all_columns(Tensor a, Tensor b, str group, int world_size, str schedule) -> Tensor",
    run=_apart,
    fake=_apart_fake,
    context=_apart_context,
    backward=_apart_backward,
)
register(
    "all_to_all_columns_matmul(Tensor a, Tensor b, str group, int world_size, str schedule, bool return_received) -> Tensor[]",
    run=_beside,
    fake=_beside_fake,
    context=_beside_context,
    backward=_beside_backward,
)
