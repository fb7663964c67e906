"""weft::ragged_matmul_all_to_all and weft::ragged_all_to_all_matmul: splits on the device, experts in groups.

    weft::ragged_matmul_all_to_all(a [rows, K], b [E, K, N], splits [E, W], ...)   -> out [max_rows, N], counts [W, E]
    weft::ragged_all_to_all_matmul(a [rows, K], b [E, K, N], splits [W, E], ...)   -> out [max_rows, N], counts [E, W],
                                                                                      rows [max_rows, K] if asked for
    weft::ragged_all_to_all_gated(a [rows, K], b [E, K, 2 F], splits [W, E], ...)  -> out [max_rows, F], counts [E, W]:
                                                      silu(left half) * right half of that product; no backward

counts of the one are splits of the other, and each backward is the other operator, which takes every row back:

    ragged_matmul_all_to_all    grad_a = back(grad_out) @ b^T       grad_b[e] = a_e^T @ back(grad_out)_e
    ragged_all_to_all_matmul    grad_a = back(grad_out @ b^T)       grad_b[e] = rows_e^T @ grad_out_e
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.ops.library import register, unseen
from weft.runtime.groups import GROUPS


def room(rows: int) -> int:
    """A max_rows for at least so many: of a few sizes, as each is a program with memory of its own. At most an eighth more; a
    number that torch.compile does not know stays.

    >>> [room(rows) for rows in (0, 7, 16, 17, 1000, 16384)]
    [1, 7, 16, 18, 1024, 16384]
    """
    if not isinstance(rows, int):
        return max(1, rows)
    step = 1 << max(0, rows.bit_length() - 4)
    return max(1, -(-rows // step) * step)


def room_home(rows: int, most: int) -> int:
    """A max_rows for so many rows that come home from `most`, on all ranks the same: a program has room for as many products as
    it brings home, so that another call with as many rows and fewer or more products is of another program, unless they are
    so many more that bringing as many home would take too much memory.

    >>> room_home(32, 40), room_home(32, 64), room_home(32, 256)
    (40, 64, 32)
    """
    if not isinstance(rows, int) or not isinstance(most, int) or most > 2 * rows:
        return room(rows)
    return max(room(rows), most)


def _combine(
    a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, group: str, world_size: int, max_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    from weft.runtime.ragged import RaggedCall

    done = GROUPS.run_ragged(group, RaggedCall(dispatch=False, a=a, b=b, splits=splits, max_rows=max_rows))
    return done.out, done.counts


def run_combine(
    a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, group: str, world_size: int, max_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """weft::ragged_matmul_all_to_all."""
    way = _combine if unseen(a, b, splits) else torch.ops.weft.ragged_matmul_all_to_all
    return way(a, b, splits, group, world_size, max_rows)


def _combine_fake(
    a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, group: str, world_size: int, max_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return a.new_empty(max_rows, b.shape[2]), a.new_empty(world_size, b.shape[0], dtype=torch.int32)


def _dispatch(
    a: torch.Tensor,
    b: torch.Tensor,
    splits: torch.Tensor,
    group: str,
    world_size: int,
    max_rows: int,
    return_received: bool,
) -> list[torch.Tensor]:
    from weft.runtime.ragged import RaggedCall

    call = RaggedCall(dispatch=True, a=a, b=b, splits=splits, max_rows=max_rows, return_received=return_received)
    done = GROUPS.run_ragged(group, call)
    return [done.out, done.counts] + ([] if done.rows is None else [done.rows])


def run_dispatch(
    a: torch.Tensor,
    b: torch.Tensor,
    splits: torch.Tensor,
    group: str,
    world_size: int,
    max_rows: int,
    return_received: bool,
) -> list[torch.Tensor]:
    """weft::ragged_all_to_all_matmul."""
    way = _dispatch if unseen(a, b, splits) else torch.ops.weft.ragged_all_to_all_matmul
    return way(a, b, splits, group, world_size, max_rows, return_received)


def _dispatch_fake(
    a: torch.Tensor,
    b: torch.Tensor,
    splits: torch.Tensor,
    group: str,
    world_size: int,
    max_rows: int,
    return_received: bool,
) -> list[torch.Tensor]:
    counts = a.new_empty(b.shape[0], world_size, dtype=torch.int32)
    return [a.new_empty(max_rows, b.shape[2]), counts] + [a.new_empty(max_rows, a.shape[1])] * return_received


def _gated(
    a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, group: str, world_size: int, max_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    from weft.runtime.ragged import RaggedCall

    done = GROUPS.run_ragged(group, RaggedCall(dispatch=True, a=a, b=b, splits=splits, max_rows=max_rows, gated=True))
    return done.out, done.counts


def _gated_fake(
    a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, group: str, world_size: int, max_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return a.new_empty(max_rows, b.shape[2] // 2), a.new_empty(b.shape[0], world_size, dtype=torch.int32)


def run_gated(
    a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, group: str, world_size: int, max_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """weft::ragged_all_to_all_gated."""
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.weft.ragged_all_to_all_gated(a, b, splits, group, world_size, max_rows)
    return found


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    a, b, splits, ctx.group, ctx.world_size, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(a, b, splits, output[1])


def _combine_backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    a, b, splits, counts = ctx.saved_tensors
    back = torch.ops.weft.ragged_all_to_all_matmul(
        grad.contiguous(), b.transpose(1, 2), counts, ctx.group, ctx.world_size, room(a.shape[0]), True
    )
    grad_a = back[0][: a.shape[0]]
    return grad_a, grouped_outer(a, back[2][: a.shape[0]], splits.sum(1)), None, None, None, None


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    a, b, splits, ctx.group, ctx.world_size, ctx.max_rows, ctx.received = inputs
    ctx.mark_non_differentiable(output[1])
    # Zeros for received rows that nobody has used would go through the whole backward.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, b, splits, output[1], *output[2:])


def _dispatch_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    a, b, splits, counts, *kept = ctx.saved_tensors
    grad = a.new_zeros(ctx.max_rows, b.shape[2]) if grads[0] is None else grads[0].contiguous()
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        factors, columns = grad, b.transpose(1, 2)
        if ctx.received and grads[2] is not None:
            # What flows into the received rows goes back with the rest, as a product with 1.
            eye = torch.eye(a.shape[1], dtype=a.dtype, device=a.device).expand(b.shape[0], -1, -1)
            factors, columns = torch.cat([grad, grads[2]], 1), torch.cat([columns, eye], 1)
        home = room_home(a.shape[0], ctx.max_rows)
        back, _ = torch.ops.weft.ragged_matmul_all_to_all(factors, columns, counts, ctx.group, ctx.world_size, home)
        grad_a = back[: a.shape[0]]
    if ctx.needs_input_grad[1]:
        # Exchanging again costs time; keeping what arrived costs max_rows x K of memory from forward to backward.
        rows = kept[0] if kept else _again(ctx, a, b, splits)
        grad_b = grouped_outer(rows, grad, counts.sum(1))
    return grad_a, grad_b, None, None, None, None, None


def _again(ctx: Any, a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
    """The rows that arrived."""
    nothing = b[:, :, :0]
    rows: torch.Tensor = torch.ops.weft.ragged_all_to_all_matmul(
        a, nothing, splits, ctx.group, ctx.world_size, ctx.max_rows, True
    )[2]
    return rows


def grouped_outer(rows: torch.Tensor, grads: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """By expert, rows_e^T @ grads_e: [E, K, N]. counts: [E], on the device; rows past their sum, whatever they hold, add
    nothing."""
    ends = counts.cumsum(0)
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        if torch.is_grad_enabled():  # whose own backward writes nothing past the last end
            place = torch.arange(rows.shape[0], device=rows.device)[:, None]
            rows, grads = (torch.where(place < ends[-1], each, 0) for each in (rows, grads))
        # What lies past the last end is in no group, and is not read.
        return torch._grouped_mm(_aligned(rows).t(), _aligned(grads), offs=ends.to(torch.int32))
    place = torch.arange(rows.shape[0], device=rows.device)[:, None]
    valid, grads = (torch.where(place < ends[-1], each, 0) for each in (rows, grads))
    if len(counts) == 1:
        return (valid.t() @ grads)[None]
    starts = ends - counts
    masks = ((place >= start) & (place < end) for start, end in zip(starts.unbind(), ends.unbind(), strict=True))
    return torch.stack([torch.where(mask, valid, 0).t() @ grads for mask in masks])


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """As grouped matmuls take it: contiguous, at a multiple of 16 bytes."""
    rows = rows.contiguous()
    traced = torch.compiler.is_compiling() or type(rows) is not torch.Tensor  # which lies nowhere
    return rows if traced or rows.data_ptr() % 16 == 0 else rows.clone()


register(
    "ragged_matmul_all_to_all(Tensor a, Tensor b, Tensor splits, str group, int world_size, SymInt max_rows)"
    " -> (Tensor, Tensor)",
    run=_combine,
    fake=_combine_fake,
    context=_combine_context,
    backward=_combine_backward,
)
register(
    "ragged_all_to_all_matmul(Tensor a, Tensor b, Tensor splits, str group, int world_size, SymInt max_rows,"
    " bool return_received) -> Tensor[]",
    run=_dispatch,
    fake=_dispatch_fake,
    context=_dispatch_context,
    backward=_dispatch_backward,
)
register(
    "ragged_all_to_all_gated(Tensor a, Tensor b, Tensor splits, str group, int world_size, SymInt max_rows)"
    " -> (Tensor, Tensor)",
    run=_gated,
    fake=_gated_fake,
)
