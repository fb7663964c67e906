"""matmul_all_reduce: tensor parallel decode, where every rank needs the whole result of few rows.

    matmul_all_reduce(a, b)        replaces   c = a @ b; dist.all_reduce(c)

Legend: M N full extents, k a rank's part of K. weft::matmul_all_reduce is its torch.library definition.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft.core.schedule import Schedule
from weft.ops.checks import check_operands, check_own, group_of, shape_of, spec_of
from weft.ops.library.all_reduce import run_all_reduce
from weft.ops.rows import flat


def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """all_reduce(a @ b) + bias + residual, the exchange within the matmul's kernel where M is small.

    Replaces

        c = a @ b; dist.all_reduce(c, group=group); out = c + bias + residual

    Args:
        a: [M, ..., k], any strides.
        b: [k, N], of any one unit stride (weight.t() is fine).
        group: as for all_gather_matmul.
        schedule: as for all_gather_matmul; "one_shot" and "two_shot" are one kernel each, for few rows.
        bias: [N], the same on every rank, added once.
        residual: [M, ..., N], the same on every rank, added once.

    Partial products are rounded to the dtype; they and the addends are summed in float32, in the order of ranks, and rounded
    once (by "sequential": after the vendor's all-reduce, once more for the addends). A schedule gives the same bits each call,
    and all of them but the vendor's say so of each rank, too.

    The gradient of the result must be the same on every rank; those of bias and residual are then whole on each.

    Returns out [M, ..., N], whole on every rank. Raises as all_gather_matmul does. Source: fused computation-collectives
    (arXiv 2305.06942), GEMV + AllReduce.
    """
    check_operands(a, [b], 1)
    shape = (*a.shape[:-1], b.shape[1])
    _check_addend("bias", bias, (b.shape[1],), a)
    _check_addend("residual", residual, shape, a)
    group_name, _, _ = group_of(group)
    added = None if residual is None else flat(residual)
    return run_all_reduce(flat(a), b, bias, added, group_name, spec_of(schedule, "matmul_all_reduce")).view(shape)


def _check_addend(name: str, given: torch.Tensor | None, shape: tuple[int, ...], a: torch.Tensor) -> None:
    if given is None:
        return
    if not isinstance(given, torch.Tensor) or tuple(given.shape) != shape:
        raise ValueError(f"{name} is {shape_of(given)}; it must be {list(shape)}")
    check_own(name, given)
    if given.dtype != a.dtype or given.device != a.device:
        raise ValueError(f"{name} is {given.dtype} on {given.device}, a is {a.dtype} on {a.device}; they must agree")
