"""matmul_all_reduce serves tensor parallel decode, where every rank needs the whole result of few rows.

    matmul_all_reduce(a, b)        replaces   c = a @ b; dist.all_reduce(c)

Capitals M N are full extents, k is a rank's part of K. The operator of torch.library takes flat matrices and a group's name:

    weft::matmul_all_reduce(a [M, k]..., b [k, N]..., bias [N]?, residual [M, N]?, ...)   -> out [M, N]

Every rank has the whole result, so its gradient is whole on every rank, too, and the backward needs no exchange:

    grad_a = grad @ b^T      grad_b = a^T @ grad      grad_bias = the sum of grad's rows      grad_residual = grad

Each rank computes a part of the first two. If they are differentiated in turn, the gradient of grad is therefore summed over
the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack, cast

import torch
import torch.distributed as dist

from weft.core.schedule import Schedule
from weft.ops.common import (
    FLOAT8,
    as_matrix,
    check_addend,
    factors_of,
    resolve_group,
    rows_of,
    schedule_to_spec,
)
from weft.ops.front import OperatorRequest, public
from weft.ops.operator import define
from weft.ops.parts import with_summed_double_gradient
from weft.ops.scaled import ScaleOptions, quantised, refuse_gradients, refuse_several, scaled_matmul
from weft.runtime.calls import MatmulCall, matmul_call


@public
def matmul_all_reduce(
    a: torch.Tensor | Sequence[torch.Tensor],
    b: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    **scales: Unpack[ScaleOptions],
) -> torch.Tensor:
    """Compute all_reduce(a @ b) + bias + residual. If M is small, one kernel multiplies and exchanges.

    Replaces

        c = a @ b; dist.all_reduce(c, group=group); out = c + bias + residual

    Args:
        a, b: as for matmul_reduce_scatter, also several of each, whose products are added up.
        group: as for all_gather_matmul.
        schedule: as for all_gather_matmul. "one_shot" and "two_shot" are one kernel each, for few rows.
        bias: [N], the same on every rank, added once.
        residual: [M, ..., N], the same on every rank, added once.

    Partial products are rounded to the dtype. They and the addends are summed in float32, in the order of ranks, and rounded
    once. "sequential" rounds twice, after NCCL's or gloo's all-reduce and after adding the addends. A schedule gives the same
    bits in each call. All schedules but those that use NCCL's or gloo's all-reduce also give the same bits on every rank.

    FP8: a, b, scale_a, scale_b and the options that follow them are as for matmul_reduce_scatter. bias and residual then have
    output_dtype, and are added before the result is rounded.

    The gradient of the result must be the same on every rank. Then the gradients of bias and residual are whole on each rank.

    Returns out [M, ..., N], whole on every rank. Raises as all_gather_matmul does. Source: fused computation-collectives
    (arXiv 2305.06942), GEMV + AllReduce.
    """
    factors, bs = factors_of(a, b)
    a, b = factors[0], bs[0]
    scaled = quantised("matmul_all_reduce", a, bs, scales) if scales or a.dtype in FLOAT8 else None
    if scaled is not None:
        refuse_several(factors)
        refuse_gradients(bias=bias, residual=residual)
    shape = (*a.shape[:-1], b.shape[1])
    dtype = a.dtype if scaled is None else scaled.output_dtype
    if bias is not None:
        check_addend("bias", bias, (b.shape[1],), dtype, a.device)
    if residual is not None:
        check_addend("residual", residual, shape, dtype, a.device)
    of_group, spec = resolve_group(group), schedule_to_spec(schedule, "matmul_all_reduce")
    view, tensors = rows_of(shape), (factors, bs, bias, residual)
    if scaled is not None:
        added = None if residual is None else as_matrix(residual)
        how: Any = {"view": view, "bias": bias, "residual": added}
        return cast(torch.Tensor, scaled_matmul("matmul_all_reduce", a, [b], scaled, (group, *of_group), spec, **how))
    request = OperatorRequest(flat_matmul_all_reduce, tensors, (of_group[0], spec), group, (view, None, None, view), view)
    return cast(torch.Tensor, request)  # `public` runs it


def _run(
    factors: list[torch.Tensor],
    bs: list[torch.Tensor],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    group: str,
    schedule: str,
) -> MatmulCall:
    a, *more = factors
    extras = {} if bias is None else {"bias": bias[None]}
    extras |= {} if residual is None else {"residual": residual}
    return matmul_call("matmul_all_reduce", a, bs, group, schedule, rows=a.shape[0], extras=extras, more=more)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    factors, bs, _, _, ctx.group, _ = inputs
    ctx.save_for_backward(*factors, *bs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    factors, bs = saved[: len(saved) // 2], saved[len(saved) // 2 :]
    for_a, for_b, for_bias, for_residual = ctx.needs_input_grad[:4]
    used = with_summed_double_gradient(grad, ctx.group)
    return (
        [used @ b.t() if needed else None for b, needed in zip(bs, for_a, strict=True)],
        [a.t() @ used if needed else None for a, needed in zip(factors, for_b, strict=True)],
        grad.sum(0) if for_bias else None,
        grad if for_residual else None,
    )


flat_matmul_all_reduce = define(
    "matmul_all_reduce",
    _run,
    lambda factors, bs, *_: factors[0].new_empty(factors[0].shape[0], bs[0].shape[1]),
    returns=torch.Tensor,
    save=_save,
    backward=_backward,
    saves_results=False,
)
"""The operator weft::matmul_all_reduce, which takes matrices."""
