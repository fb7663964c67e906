"""weft::all_gather_matmul and weft::matmul_reduce_scatter.

    weft::all_gather_matmul(a [m, K], bs [K, n]..., ...)   -> [out [M, n], ..., gathered [M, K] if asked for]
    weft::matmul_reduce_scatter(a [M, k], b [k, N], ...)   -> out [m, N]

They take flat matrices and a group's name. Each backward is the other operator: what was gathered is scattered, what was
scattered is gathered, overlapped with the matmul as in the forward.

    all_gather_matmul       grad_a = reduce_scatter(grad_out @ b^T)      grad_b = all_gather(a)^T @ grad_out
    matmul_reduce_scatter   grad_a = all_gather(grad_out) @ b^T          grad_b = a^T @ all_gather(grad_out)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from weft.core.problem import split
from weft.ops.library import backward_schedule, register, unseen
from weft.runtime.calls import MatmulCall
from weft.runtime.groups import GROUPS


def _gather(
    a: torch.Tensor,
    bs: list[torch.Tensor],
    group: str,
    rows: int,
    unit: int,
    schedule: str,
    return_gathered: bool,
    keep: bool,
) -> list[torch.Tensor]:
    call = MatmulCall(
        op="all_gather_matmul", a=a, bs=bs, rows=rows, row_multiple=unit, schedule=schedule, return_gathered=return_gathered
    )
    outputs = GROUPS.run(group, call)
    return outputs["out"] + outputs.get("gathered", [])


def run_gather(
    a: torch.Tensor,
    bs: list[torch.Tensor],
    group: str,
    rows: int,
    unit: int,
    schedule: str,
    return_gathered: bool,
    keep: bool,
) -> list[torch.Tensor]:
    """weft::all_gather_matmul."""
    way = _gather if unseen(a, *bs) else torch.ops.weft.all_gather_matmul
    return way(a, bs, group, rows, unit, schedule, return_gathered, keep)


def run_scatter(
    a: torch.Tensor, b: torch.Tensor, group: str, rank: int, world_size: int, unit: int, schedule: str, op: str
) -> torch.Tensor:
    """weft::matmul_reduce_scatter."""
    way = _scatter if unseen(a, b) else torch.ops.weft.matmul_reduce_scatter
    return way(a, b, group, rank, world_size, unit, schedule, op)


def _gather_fake(
    a: torch.Tensor,
    bs: list[torch.Tensor],
    group: str,
    rows: int,
    unit: int,
    schedule: str,
    return_gathered: bool,
    keep: bool,
) -> list[torch.Tensor]:
    return [a.new_empty(rows, b.shape[1]) for b in bs] + [a.new_empty(rows, a.shape[1])] * return_gathered


def _scatter(
    a: torch.Tensor, b: torch.Tensor, group: str, rank: int, world_size: int, unit: int, schedule: str, op: str
) -> torch.Tensor:
    reduce_op = cast(Literal["sum", "avg"], op)
    call = MatmulCall(
        op="matmul_reduce_scatter", a=a, bs=[b], rows=a.shape[0], row_multiple=unit, schedule=schedule, reduce_op=reduce_op
    )
    return GROUPS.run(group, call)["out"][0]


def _scatter_fake(
    a: torch.Tensor, b: torch.Tensor, group: str, rank: int, world_size: int, unit: int, schedule: str, op: str
) -> torch.Tensor:
    low, high = split(a.shape[0] // unit, world_size)[rank]
    return a.new_empty((high - low) * unit, b.shape[1])


def _gather_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    a, bs, ctx.group, ctx.rows, ctx.unit, ctx.schedule, ctx.gathered, ctx.kept = inputs
    # Zeros for a gathered a that nobody has used would go through the whole backward.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, *([output[-1]] if ctx.kept else []), *bs)


def _gather_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    a, *bs = ctx.saved_tensors
    kept = bs.pop(0) if ctx.kept else None
    grad_a: torch.Tensor | None = None
    grad_bs: list[torch.Tensor | None] = [None] * len(bs)
    if ctx.needs_input_grad[0]:
        # An output that nobody has used stays in it, as zeros: ranks that differ in that still call the same.
        factors, columns = [_or_zeros(grad, ctx.rows, b.shape[1], a) for grad, b in zip(grads, bs, strict=False)], [*bs]
        if ctx.gathered and grads[-1] is not None:
            # What flows into the gathered a goes back to its owners by the same reduce-scatter, as a product with 1.
            factors.append(grads[-1])
            columns.append(torch.eye(a.shape[1], dtype=a.dtype, device=a.device))
        group = _resolve_process_group(ctx.group)
        grad_a = torch.ops.weft.matmul_reduce_scatter(
            _side_by_side(factors),
            _side_by_side_transposed(columns),
            ctx.group,
            dist.get_rank(group),
            dist.get_world_size(group),
            ctx.unit,
            backward_schedule(ctx.schedule, "matmul_reduce_scatter"),
            "sum",
        )
    if any(ctx.needs_input_grad[1]):
        gathered = _gathered_again(ctx, a) if kept is None else kept
        wanted = zip(bs, grads, ctx.needs_input_grad[1], strict=False)
        grad_bs = [_gradient_of(b, gathered, grad) if needed and grad is not None else None for b, grad, needed in wanted]
    return grad_a, grad_bs, None, None, None, None, None, None


def _gathered_again(ctx: Any, a: torch.Tensor) -> torch.Tensor:
    nothing = a.new_empty(a.shape[1], 0)
    found = torch.ops.weft.all_gather_matmul(a, [nothing], ctx.group, ctx.rows, ctx.unit, "sequential", True, False)
    return found[-1]  # type: ignore[no-any-return]


def _scatter_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, ctx.group, _, ctx.world_size, ctx.unit, ctx.schedule, ctx.op = inputs
    ctx.save_for_backward(a, b)


def _scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    scaled = grad / ctx.world_size if ctx.op == "avg" else grad
    grad_a, gathered = torch.ops.weft.all_gather_matmul(
        scaled.contiguous(),
        [b.t()],
        ctx.group,
        a.shape[0],
        ctx.unit,
        backward_schedule(ctx.schedule, "all_gather_matmul"),
        True,
        False,
    )
    return grad_a, _gradient_of(b, a, gathered) if ctx.needs_input_grad[1] else None, None, None, None, None, None, None


def _gradient_of(b: torch.Tensor, a: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """a^T @ grad, laid out as b is: else a transposed weight's gradient is copied when it is accumulated."""
    return (grad.t() @ a).t() if _is_transposed(b) else a.t() @ grad


def _side_by_side(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """One matrix of them all; a single one as it is (a copy of a weight costs as much as its collective)."""
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices), 1)


def _side_by_side_transposed(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Its transpose. Of transposed weights their rows are copied as they lie, not element by element across."""
    if len(matrices) > 1 and _is_transposed(matrices[0]):
        return _one_below_another([matrix.t() for matrix in matrices])
    return _side_by_side(matrices).t()


def _one_below_another(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """One matrix of their rows; without a copy if they lie so in one storage, and none of them needs a gradient here."""
    first = matrices[0]
    derived = torch.is_grad_enabled() and any(matrix.requires_grad for matrix in matrices)
    if torch.compiler.is_compiling() or derived or any(type(matrix) is not torch.Tensor for matrix in matrices):
        return torch.cat(list(matrices))
    end = first.storage_offset()
    for matrix in matrices:
        shared = matrix.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not shared or matrix.storage_offset() != end or not matrix.is_contiguous() or matrix.dtype != first.dtype:
            return torch.cat(list(matrices))
        end += matrix.numel()
    rows = sum(matrix.shape[0] for matrix in matrices)
    # Of one row, a contiguous matrix has any stride.
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


def _is_transposed(matrix: torch.Tensor) -> bool:
    return matrix.stride(0) == 1 < matrix.stride(1)


def _or_zeros(grad: torch.Tensor | None, rows: int, cols: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros(rows, cols) if grad is None else grad


register(
    "all_gather_matmul(Tensor a, Tensor[] bs, str group, SymInt rows, SymInt unit, str schedule, bool return_gathered,"
    " bool keep) -> Tensor[]",
    run=_gather,
    fake=_gather_fake,
    context=_gather_context,
    backward=_gather_backward,
)
register(
    "matmul_reduce_scatter(Tensor a, Tensor b, str group, int rank, int world_size, SymInt unit, str schedule, str op)"
    " -> Tensor",
    run=_scatter,
    fake=_scatter_fake,
    context=_scatter_context,
    backward=_scatter_backward,
)
