"""weft::matmul_all_to_all and weft::all_to_all_matmul.

    weft::matmul_all_to_all(a [M, K], b [K, N], ...)   -> out [world_size * m, N]
    weft::all_to_all_matmul(a [M, K], b [K, N], ...)   -> [out [world_size * m, N], received [world_size * m, K] if asked for]

They take flat matrices and a group's name; shard d of the M rows goes to rank d. Each backward is the other operator, which
takes every row back to where it came from, overlapped with the matmul as in the forward:

    matmul_all_to_all    grad_a = back(grad_out) @ b^T       grad_b = a^T @ back(grad_out)
    all_to_all_matmul    grad_a = back(grad_out @ b^T)       grad_b = all_to_all(a)^T @ grad_out
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.core.problem import split
from weft.ops.library import backward_schedule, register, unseen
from weft.runtime.calls import MatmulCall
from weft.runtime.groups import GROUPS


def _combine(
    a: torch.Tensor, b: torch.Tensor, group: str, rank: int, world_size: int, unit: int, schedule: str
) -> torch.Tensor:
    call = MatmulCall(op="matmul_all_to_all", a=a, bs=[b], rows=a.shape[0], row_multiple=unit, schedule=schedule)
    return GROUPS.run(group, call)["out"][0]


def run_combine(
    a: torch.Tensor, b: torch.Tensor, group: str, rank: int, world_size: int, unit: int, schedule: str
) -> torch.Tensor:
    """weft::matmul_all_to_all."""
    way = _combine if unseen(a, b) else torch.ops.weft.matmul_all_to_all
    return way(a, b, group, rank, world_size, unit, schedule)


def _combine_fake(
    a: torch.Tensor, b: torch.Tensor, group: str, rank: int, world_size: int, unit: int, schedule: str
) -> torch.Tensor:
    return a.new_empty(_arriving(a.shape[0], rank, world_size, unit), b.shape[1])


def _dispatch(
    a: torch.Tensor, b: torch.Tensor, group: str, rank: int, world_size: int, unit: int, schedule: str, return_received: bool
) -> list[torch.Tensor]:
    call = MatmulCall(
        op="all_to_all_matmul",
        a=a,
        bs=[b],
        rows=a.shape[0],
        row_multiple=unit,
        schedule=schedule,
        return_gathered=return_received,
    )
    outputs = GROUPS.run(group, call)
    return outputs["out"] + outputs.get("gathered", [])


def run_dispatch(
    a: torch.Tensor, b: torch.Tensor, group: str, rank: int, world_size: int, unit: int, schedule: str, return_received: bool
) -> list[torch.Tensor]:
    """weft::all_to_all_matmul."""
    way = _dispatch if unseen(a, b) else torch.ops.weft.all_to_all_matmul
    return way(a, b, group, rank, world_size, unit, schedule, return_received)


def _dispatch_fake(
    a: torch.Tensor, b: torch.Tensor, group: str, rank: int, world_size: int, unit: int, schedule: str, return_received: bool
) -> list[torch.Tensor]:
    rows = _arriving(a.shape[0], rank, world_size, unit)
    return [a.new_empty(rows, b.shape[1])] + [a.new_empty(rows, a.shape[1])] * return_received


def _arriving(rows: int, rank: int, world_size: int, unit: int) -> int:
    """Rows that a rank has from all."""
    low, high = split(rows // unit, world_size)[rank]
    return world_size * (high - low) * unit


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, ctx.group, ctx.rank, ctx.world_size, ctx.unit, ctx.schedule = inputs
    ctx.save_for_backward(a, b)


def _combine_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    rows = a.shape[0]
    home = (ctx.group, ctx.rank, ctx.world_size, ctx.unit, backward_schedule(ctx.schedule, "all_to_all_matmul"))
    grad_a, back = torch.ops.weft.all_to_all_matmul(_padded(ctx, grad, rows), b.t(), *home, True)
    return grad_a[:rows], a.t() @ back[:rows], None, None, None, None, None


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    a, b, ctx.group, ctx.rank, ctx.world_size, ctx.unit, ctx.schedule, ctx.received = inputs
    # Zeros for received rows that nobody has used would go through the whole backward.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, b, *output[1:])


def _dispatch_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    a, b, *kept = ctx.saved_tensors
    here = (ctx.group, ctx.rank, ctx.world_size, ctx.unit)
    arriving = _arriving(a.shape[0], ctx.rank, ctx.world_size, ctx.unit)
    grad = a.new_zeros(arriving, b.shape[1]) if grads[0] is None else grads[0]
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        factors, columns = grad, b
        if ctx.received and grads[-1] is not None:
            # What flows into the received rows goes back with the rest, as a product with 1.
            factors = torch.cat([grad, grads[-1]], 1)
            columns = torch.cat([b, torch.eye(a.shape[1], dtype=a.dtype, device=a.device)], 1)
        spec = backward_schedule(ctx.schedule, "matmul_all_to_all")
        grad_a = torch.ops.weft.matmul_all_to_all(_padded(ctx, factors, a.shape[0]), columns.t(), *here, spec)[: a.shape[0]]
    if ctx.needs_input_grad[1]:
        # Exchanging again costs time; keeping what arrived costs as much memory as a from forward to backward.
        received = kept[0] if kept else torch.ops.weft.all_to_all_matmul(a, b[:, :0], *here, "sequential", True)[1]
        grad_b = received.t() @ grad
    return grad_a, grad_b, None, None, None, None, None, None


def _padded(ctx: Any, grad: torch.Tensor, rows: int) -> torch.Tensor:
    """The rows of every rank, cut as on the way here: shards of `rows` that are shorter than the longest are padded, so that
    the way back is an even one, whose first `rows` rows are what was sent."""
    longest = _arriving(rows, 0, ctx.world_size, ctx.unit)
    if grad.shape[0] == longest:
        return grad.contiguous()
    padded, own = grad.new_zeros(ctx.world_size, longest // ctx.world_size, grad.shape[1]), grad.shape[0] // ctx.world_size
    # Also of nothing: all ranks derive it once more, or none.
    padded[:, :own] = grad.reshape(ctx.world_size, own, grad.shape[1])
    return padded.flatten(0, 1)


register(
    "matmul_all_to_all(Tensor a, Tensor b, str group, int rank, int world_size, SymInt unit, str schedule) -> Tensor",
    run=_combine,
    fake=_combine_fake,
    context=_combine_context,
    backward=_combine_backward,
)
register(
    "all_to_all_matmul(Tensor a, Tensor b, str group, int rank, int world_size, SymInt unit, str schedule,"
    " bool return_received) -> Tensor[]",
    run=_dispatch,
    fake=_dispatch_fake,
    context=_dispatch_context,
    backward=_dispatch_backward,
)
