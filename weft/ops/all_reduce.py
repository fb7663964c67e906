"""matmul_all_reduce serves tensor parallel decode, where every rank needs the whole result of few rows.

    matmul_all_reduce(a, b)        replaces   c = a @ b; dist.all_reduce(c)
    matmul_all_reduce_norm(...)    replaces   the same, residual + c, and the RMSNorm of that
    all_reduce_norm(x, ...)        replaces   dist.all_reduce(x), residual + x, and the RMSNorm of that

Capitals M N are full extents, k is a rank's part of K. The operator of torch.library takes flat matrices and a group's name:

    weft::matmul_all_reduce(a [M, k]..., b [k, N]..., bias [N]?, residual [M, N]?, ...)   -> out [M, N]
    weft::matmul_all_reduce_norm(a..., b..., bias?, residual?, norm_weight [N], eps, ...)  -> [normed [M, N], out [M or m, N]]
    weft::all_reduce_norm(x [M, N], bias?, residual?, norm_weight [N], eps, ...)           -> [normed [M, N], out [M, N]]

If the norm is quantised, the last two return [normed, scale [M, 1 or N / 128], out].

Every rank has the whole result, so its gradient is whole on every rank, too, and the backward needs no exchange:

    grad_a = grad @ b^T      grad_b = a^T @ grad      grad_bias = the sum of grad's rows      grad_residual = grad

Each rank computes a part of the first two. If they are differentiated in turn, the gradient of grad is therefore summed over
the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack, cast

import torch
import torch.distributed as dist

from weft.core.errors import require
from weft.core.problem import FLOAT8_UNIT, SCALE_BLOCK, Scaling, split
from weft.core.schedule import Schedule
from weft.ops.common import (
    FLOAT8,
    QUANTISED,
    check_addend,
    check_device,
    check_local_strided,
    count_rows_per_entry,
    describe,
    factors_of,
    resolve_group,
    rows_of,
    schedule_to_spec,
)
from weft.ops.front import OperatorRequest, public
from weft.ops.operator import define
from weft.ops.parts import with_summed_double_gradient
from weft.ops.scaled import (
    ScaleOptions,
    new_product,
    quantised,
    recipe_of_rows,
    refuse_gradients,
    refuse_several,
    with_scales,
)
from weft.ops.schema import SymInt
from weft.runtime.calls import MatmulCall, ScaledOperands, matmul_call
from weft.runtime.collective_calls import AllReduceCall, check_summed, staging_from_environment


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
    scaled = quantised("matmul_all_reduce", a, bs, scales) if scales or a.dtype in FLOAT8 or b.dtype in FLOAT8 else None
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
    request = OperatorRequest(flat_matmul_all_reduce, tensors, (of_group[0], spec), group, (view, None, None, view), view)
    found = request if scaled is None else with_scales("matmul_all_reduce", request, scaled)
    return cast(torch.Tensor, found)  # `public` runs it


@public
def matmul_all_reduce_norm(
    a: torch.Tensor | Sequence[torch.Tensor],
    b: torch.Tensor | Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    eps: float = 1e-6,
    schedule: str | Schedule = "auto",
    bias: torch.Tensor | None = None,
    residual_sharded: bool = False,
    scale_recipe_normed: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Compute r = residual + all_reduce(a @ b) + bias, and the RMSNorm of r. If M is small, one kernel does all of it.

    Replaces

        c = a @ b; dist.all_reduce(c, group=group); r = residual + c + bias
        normed = torch.nn.functional.rms_norm(r, (N,), weight, eps)

    Args:
        a, b: as for matmul_all_reduce, also several of each, whose products are added up.
        residual: [M, ..., N], the same on every rank, added once; or None.
        weight: [N], that of the norm, the same on every rank.
        group: as for all_gather_matmul.
        eps: the epsilon of the norm, from 0 to below 1.
        schedule: as for matmul_all_reduce. "one_shot" is one kernel with the norm.
        bias: [N], the same on every rank, added once.
        residual_sharded: residual and r have only this rank's part of dimension 0, as torch.chunk would cut it. From layer to
            layer r is then the residual, and only the norm is gathered, which every rank has whole. For many rows: the
            schedules are "token_split" and "sequential".
        scale_recipe_normed: quantise the norm to float8_e4m3fn, for a next layer of FP8. Pass
            torch.nn.functional.ScalingType.RowWise or BlockWise1x128, or its name. N must then be a multiple of 16, or of 128.

    Sums and the norm are computed in float32. r is rounded once, and the norm is that of the rounded r, as without weft. The
    norm is rounded once, after the product with its weight.

    A quantised norm comes with float32 scales, as a next weft.all_gather_matmul or torch.nn.functional.scaled_mm takes them: a
    scale is the largest magnitude of its row, or of its 128 columns, over 448. The float32 norm is quantised; it is not rounded
    to the dtype before. With residual_sharded its elements and scales are gathered, which are half of the bytes of 16-bit
    numbers. The norm is then always a kernel of its own, also after "one_shot". GPUs older than Hopper, and AMD's, quantise by
    torch's operations, which takes longer.

    It has no gradient: use matmul_all_reduce and torch.nn.functional.rms_norm where one is needed.

    Returns (normed, r), each [M, ..., N], whole on every rank, except for a sharded r, [m, ..., N]. With scale_recipe_normed it
    returns (normed, scale, r); scale is [M, ..., 1], or [M, ..., N / 128] for blocks. Raises ValueError for tensors that
    require a gradient and for a wrong eps, weight, recipe or N, and otherwise as all_gather_matmul does.
    """
    factors, bs = factors_of(a, b)
    a, b = factors[0], bs[0]
    for name, tensor in {"a": a, "b": b}.items():
        if tensor.dtype in FLOAT8:
            raise ValueError(f"{name} has dtype {tensor.dtype}; with FP8 operands call matmul_all_reduce, then rms_norm")
    added: dict[str, Sequence[torch.Tensor | None]] = {"residual": [residual], "weight": [weight], "bias": [bias]}
    _refuse_gradients_of_norm("matmul_all_reduce_norm", "matmul_all_reduce", {"a": factors, "b": bs} | added)
    name, rank, world_size = resolve_group(group)
    require("residual_sharded", residual_sharded, bool, "use True or False")
    shape, of_r = (*a.shape[:-1], b.shape[1]), (*a.shape[:-1], b.shape[1])
    if residual_sharded:
        low, high = split(shape[0], world_size)[rank]
        of_r = (high - low, *shape[1:])
    _check_norm(of_r, a, residual, weight, bias, eps)
    recipe = _recipe_of_norm(scale_recipe_normed, shape[-1])
    spec, unit = schedule_to_spec(schedule, "matmul_all_reduce"), max(count_rows_per_entry(shape), 1)
    view, view_of_r, tensors = rows_of(shape), rows_of(of_r), (factors, bs, bias, residual, weight)
    options = (eps, recipe, residual_sharded, of_r[0] * unit, unit, name, spec)
    request = OperatorRequest(
        flat_matmul_all_reduce_norm, tensors, options, group, (view, None, None, view_of_r, None), view, tuple
    )
    if residual_sharded and view is not None and view_of_r is not None:
        normed_as, r_as = view.restore, view_of_r.restore
        request = request._replace(view=None, after=lambda found: (*map(normed_as, found[:-1]), r_as(found[-1])))
    return cast(tuple[torch.Tensor, ...], request)  # `public` runs it


@public
def all_reduce_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    eps: float = 1e-6,
    schedule: str | Schedule = "auto",
    bias: torch.Tensor | None = None,
    scale_recipe_normed: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Compute r = residual + all_reduce(x) + bias, and the RMSNorm of r, for an x that is there already: of few rows as one
    kernel.

    Replaces

        dist.all_reduce(x, group=group); r = residual + x + bias
        normed = torch.nn.functional.rms_norm(r, (N,), weight, eps)

    Args:
        x: [M, ..., N], this rank's part of the sum, of bfloat16, float16 or float32. It is not changed.
        residual, weight, group, eps, bias, scale_recipe_normed: as for matmul_all_reduce_norm.
        schedule: "auto", "one_shot", "two_shot", "sequential" (NCCL's or gloo's all-reduce, a sum and a norm), or a
            weft.schedule.Schedule.

    Sums, rounding, gradients, results and errors are as for matmul_all_reduce_norm.
    """
    if not isinstance(x, torch.Tensor) or x.dim() < 1:
        raise ValueError(f"x is {describe(x)}; it must be a tensor of at least one dimension")
    check_local_strided("x", x)
    check_device("x", x)
    check_summed("all_reduce_norm", "x", x)
    added: dict[str, Sequence[torch.Tensor | None]] = {"residual": [residual], "weight": [weight], "bias": [bias]}
    _refuse_gradients_of_norm("all_reduce_norm", "weft.collectives.all_reduced", {"x": [x]} | added)
    _check_norm(tuple(x.shape), x, residual, weight, bias, eps)
    recipe = _recipe_of_norm(scale_recipe_normed, x.shape[-1])
    of_group, spec = resolve_group(group), schedule_to_spec(schedule, "all_reduce")
    view = rows_of(tuple(x.shape))
    tensors, reads = (x, bias, residual, weight), (view, None, view, None)
    return cast(
        tuple[torch.Tensor, ...],
        OperatorRequest(flat_all_reduce_norm, tensors, (eps, recipe, of_group[0], spec), group, reads, view, tuple),
    )  # `public` runs it


def _refuse_gradients_of_norm(op: str, unfused: str, given: dict[str, Sequence[torch.Tensor | None]]) -> None:
    for name, some in given.items() if torch.is_grad_enabled() else ():
        if any(tensor is not None and tensor.requires_grad for tensor in some):
            raise ValueError(
                f"{name} requires a gradient, and {op} has none; call it under torch.no_grad(), or call {unfused} and "
                "torch.nn.functional.rms_norm"
            )


def _check_norm(
    shape: tuple[int, ...],
    like: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> None:
    """Check what is added to a result of this shape, and its norm. Raises ValueError."""
    if not isinstance(eps, float) or not 0 <= eps < 1:
        raise ValueError(f"eps is {eps!r}; use a float from 0 to below 1, such as 1e-6")
    check_addend("weight", weight, shape[-1:], like.dtype, like.device)
    if bias is not None:
        check_addend("bias", bias, shape[-1:], like.dtype, like.device)
    if residual is not None:
        check_addend("residual", residual, shape, like.dtype, like.device)


def _recipe_of_norm(named: Any, n: int) -> str:
    """Return how the norm of N columns is quantised, or "" if it is not. Raises ValueError."""
    if named is None:
        return ""
    recipe = recipe_of_rows("normed", named)
    unit = SCALE_BLOCK if recipe == "blockwise" else FLOAT8_UNIT
    if n % unit or not n:
        raise ValueError(f"N is {n}; with scale_recipe_normed={getattr(named, 'name', named)} it must be a multiple of {unit}")
    return recipe


def _new_norm(like: torch.Tensor, rows: int, n: int, recipe: str) -> list[torch.Tensor]:
    """Return an empty norm, and its scales if it is quantised."""
    if not recipe:
        return [like.new_empty(rows, n)]
    scales = Scaling(recipe=recipe).scales_shape("norm", rows, n)  # type: ignore[arg-type]
    return [like.new_empty(rows, n, dtype=QUANTISED), like.new_empty(scales, dtype=torch.float32)]


class _NormOptions(NamedTuple):
    """_NormOptions holds the options of weft::matmul_all_reduce_norm.

    norm_recipe: as in weft.core.problem.Problem.
    rows_of_sum: the rows of the residual and of the sum on this rank.
    unit: the flat rows of one entry of the dimension that is sharded.
    """

    eps: float
    norm_recipe: str
    residual_sharded: bool
    rows_of_sum: SymInt
    unit: SymInt
    group: str
    schedule: str


def _run_norm(
    factors: list[torch.Tensor],
    bs: list[torch.Tensor],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    options: _NormOptions,
) -> MatmulCall:
    (a, *more), (eps, recipe, sharded, _, unit, group, schedule) = factors, options
    extras = _extras(bias, residual) | {"norm_weight": norm_weight[None]}
    how: dict[str, Any] = {"rows": a.shape[0], "unit": unit if sharded else 1, "extras": extras, "more": more}
    how |= {"norm_eps": eps, "norm_recipe": recipe, "residual_sharded": sharded}
    return matmul_call("matmul_all_reduce", a, bs, group, schedule, **how)


def _fake_norm(
    factors: list[torch.Tensor], bs: list[torch.Tensor], bias: Any, residual: Any, norm_weight: Any, options: _NormOptions
) -> list[torch.Tensor]:
    a, n = factors[0], bs[0].shape[1]
    return [*_new_norm(a, a.shape[0], n, options.norm_recipe), a.new_empty(options.rows_of_sum, n)]


flat_matmul_all_reduce_norm = define("matmul_all_reduce_norm", _run_norm, _fake_norm, returns=list[torch.Tensor])
"""The operator weft::matmul_all_reduce_norm, which takes matrices. It returns the norm, its scales if it is quantised, and what
it is the norm of."""


def _run_sum_norm(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    norm_recipe: str,
    group: str,
    schedule: str,
) -> AllReduceCall:
    extras = _extras(bias, residual) | {"norm_weight": norm_weight[None]}
    staging_bytes = staging_from_environment(x.device)
    how: dict[str, Any] = {"group": group, "schedule": schedule, "extras": extras}
    how |= {"norm_eps": eps, "norm_recipe": norm_recipe}
    return AllReduceCall(op="all_reduce", a=x.contiguous(), staging_bytes=staging_bytes, **how)


def _fake_sum_norm(
    x: torch.Tensor, bias: Any, residual: Any, norm_weight: Any, eps: float, norm_recipe: str, *_: Any
) -> list[torch.Tensor]:
    return [*_new_norm(x, x.shape[0], x.shape[1], norm_recipe), x.new_empty(x.shape)]


flat_all_reduce_norm = define("all_reduce_norm", _run_sum_norm, _fake_sum_norm, returns=list[torch.Tensor])
"""The operator weft::all_reduce_norm, which takes matrices. It returns the same."""


def _extras(bias: torch.Tensor | None, residual: torch.Tensor | None) -> dict[str, torch.Tensor]:
    extras = {} if bias is None else {"bias": bias[None]}
    return extras if residual is None else extras | {"residual": residual}


def _run(
    factors: list[torch.Tensor],
    bs: list[torch.Tensor],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    group: str,
    schedule: str,
    scales: ScaledOperands | None = None,
) -> MatmulCall:
    a, *more = factors
    how: dict[str, Any] = {"rows": a.shape[0], "extras": _extras(bias, residual), "more": more, "scales": scales}
    return matmul_call("matmul_all_reduce", a, bs, group, schedule, **how)


def _fake(
    factors: list[torch.Tensor], bs: list[torch.Tensor], bias: Any, residual: Any, group: str, schedule: str, scales: Any = None
) -> torch.Tensor:
    return new_product(factors[0], factors[0].shape[0], bs[0].shape[1], scales)


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
    _fake,
    returns=torch.Tensor,
    save=_save,
    backward=_backward,
    saves_results=False,
)
"""The operator weft::matmul_all_reduce, which takes matrices."""
