"""all_gather_matmul and matmul_reduce_scatter serve tensor and sequence parallel layers.

    all_gather_matmul(a, b)        replaces   dist.all_gather_into_tensor(a_full, a); a_full @ b
    matmul_reduce_scatter(a, b)    replaces   c = a @ b; dist.reduce_scatter_tensor(out, c)

Capitals M N K are full extents, m n k a rank's part. The operators of torch.library take flat matrices and a group's name:

    weft::all_gather_matmul(a [m, K], bs [K, n]..., ...)   -> [out [M, n], ..., gathered [M, K] if it is asked for]
    weft::matmul_reduce_scatter(a [M, k]..., b [k, N]..., ...)   -> out [m, N]

The backward of each is the other one, overlapped with its matmul as in the forward:

    all_gather_matmul       grad_a = reduce_scatter(grad_out @ b^T)      grad_b = all_gather(a)^T @ grad_out
    matmul_reduce_scatter   grad_a = all_gather(grad_out) @ b^T          grad_b = a^T @ all_gather(grad_out)

The gradient of an all_gather_matmul's b needs no exchange of its own, so its product can run during the exchange of grad_a.
Both are one call of matmul_reduce_scatter with gradients of weights (weft.core.problem), whose schedules say what runs when:

    weft::all_gather_matmul_backward(grads [M, n]..., bs^T [n, K]..., x [M, K] or [m, K], ...)   -> [grad_a [m, K], grad_b^T...]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Unpack, cast, overload

import torch
import torch.distributed as dist

from weft.compat.c10d import group_named
from weft.core.errors import require
from weft.core.problem import split
from weft.core.schedule import Schedule
from weft.ops.common import (
    FLOAT8,
    check_operands,
    choose_backward_schedule,
    count_rows_per_entry,
    factors_of,
    is_registered,
    make_empty_operand_after,
    resolve_group,
    rows_of,
    schedule_to_spec,
    to_list,
)
from weft.ops.front import OperatorRequest, public
from weft.ops.operator import define
from weft.ops.scaled import ScaleAndBias, ScalesAndBias, new_gathered, new_product, quantised, refuse_several, with_scales
from weft.ops.schema import SymInt
from weft.runtime.calls import MatmulCall, ScaledOperands, matmul_call
from weft.runtime.groups import GROUPS


@overload
def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    return_gathered: Literal[False] = False,
    gather_dim: int = 0,
    rows: int | None = None,
    keep_gathered: bool = False,
) -> torch.Tensor: ...


@overload
def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    return_gathered: Literal[True],
    gather_dim: int = 0,
    rows: int | None = None,
    keep_gathered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def all_gather_matmul(
    a: torch.Tensor,
    b: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    return_gathered: Literal[False] = False,
    gather_dim: int = 0,
    rows: int | None = None,
    keep_gathered: bool = False,
) -> list[torch.Tensor]: ...


@overload
def all_gather_matmul(
    a: torch.Tensor,
    b: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    return_gathered: Literal[True],
    gather_dim: int = 0,
    rows: int | None = None,
    keep_gathered: bool = False,
) -> tuple[list[torch.Tensor], torch.Tensor]: ...


@overload
def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    return_gathered: bool = False,
    gather_dim: int = 0,
    rows: int | None = None,
    keep_gathered: bool = False,
    **scales: Unpack[ScalesAndBias],
) -> Any: ...


@public
def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    return_gathered: bool = False,
    gather_dim: int = 0,
    rows: int | None = None,
    keep_gathered: bool = False,
    **scales: Unpack[ScaleAndBias],
) -> Any:
    """Compute all_gather(a, dim=gather_dim) @ b, and overlap the gather with the matmul.

    Replaces

        dist.all_gather_into_tensor(a_full, a, group); out = a_full @ b

    Args:
        a: [m, ..., K], this rank's shard; any strides.
        b: [K, n], or a list of several that share one gather, such as Q, K and V.
        group: any process group. On several hosts see docs/nodes.md. Default: the whole world.
        schedule: "auto" takes the fastest of a few schedules, which the first call of a problem measures (on CPUs, the
            planner's choice). "planned" takes the planner's choice without measuring. It may also be a name of
            `weft schedules`, "name:chunks", or a Schedule value.
        return_gathered: also return the gathered a.
        gather_dim: the dimension that is gathered (not the last).
        rows: the extent of gather_dim over all ranks, if it is not world_size times a's. Then a's extent must be the part that
            torch.chunk would give this rank.
        keep_gathered: keep the gathered a, M x K, from forward to backward for b's gradient. By default it is gathered again,
            into memory that all calls of these sizes share. The styles keep it by default, as torch's styles do.

    **FP8**: a and b may be float8_e4m3fn or float8_e5m2 with scales, named as in torch.nn.functional.scaled_mm:

        scale_a, scale_b: float32. One element each (tensorwise); [m, ..., 1] and [1, n] (rowwise); or [m, ..., K / 128] and
            [K / 128, n / 128] (blockwise, 1x128 by 128x128). For several b, scale_b is a list.
        scale_recipe_a, scale_recipe_b: members of torch.nn.functional.ScalingType; by default the shapes determine them.
        bias: [n], in output_dtype, added to the rounded result.
        output_dtype: bfloat16 (default), float16 or float32.
        use_fast_accum: as in torch.

    An a of another dtype, passed without scale_a, is quantised while it is sent to the other ranks: to float8_e4m3fn, rowwise,
    or 1x128 for a blockwise b, with the largest magnitude over 448 as scale. The result then has a's dtype. b's columns must be
    contiguous (weight.t()), K a multiple of 16, or of 128 blockwise, and n of 16. Rows are sent with their scales, so
    tensorwise scales become rowwise, and may differ between ranks. There is no backward.

    Returns out [M, ..., n], or a list with one for each b. With return_gathered, it returns (out, gathered a), and for FP8 also
    the scales of the gathered a. Raises ValueError for wrong shapes, dtypes or names; RankMismatch if ranks call different
    things; PeerLost and WaitTimeout if a rank is lost. Sources: FiCCO (arXiv 2512.10236), T3 (arXiv 2401.16677); see
    docs/schedules.md.
    """
    bs = [b] if isinstance(b, torch.Tensor) else to_list("b", b, "pass a matrix, or several in a list")
    check_operands(a, bs, scaled=True)
    scaled = quantised("all_gather_matmul", a, bs, scales) if scales or a.dtype in FLOAT8 or bs[0].dtype in FLOAT8 else None
    name, rank, world_size = resolve_group(group)
    dim = _dimension("gather_dim", gather_dim, a)
    shape = (a.movedim(dim, 0) if dim else a).shape
    _check_rows(rows, shape[0], rank, world_size)
    total = world_size * shape[0] if rows is None else rows
    unit = count_rows_per_entry(shape)
    keep = keep_gathered and torch.is_grad_enabled() and any(one.requires_grad for one in bs)
    spec, gathered = schedule_to_spec(schedule, "all_gather_matmul"), return_gathered or keep
    several, count = not isinstance(b, torch.Tensor), len(bs)
    reads, view = (rows_of(a.shape, dim), None), rows_of(a.shape, dim, total)

    def after(results: Sequence[torch.Tensor]) -> Any:
        out = list(results[:count]) if several else results[0]
        return (out, *results[count:]) if return_gathered else out

    options = (name, total * unit, max(unit, 1), spec, gathered, keep)
    request = OperatorRequest(_all_gather_matmul, (a, bs), options, group, reads, view, after)
    return request if scaled is None else with_scales("all_gather_matmul", request, scaled)


class _Gather(NamedTuple):
    """_Gather holds the options of weft::all_gather_matmul.

    rows: the rows of the whole flat a.
    unit: the flat rows of one entry of the gathered dimension.
    keep: whether the gathered a is an additional output, which is saved for b's gradient in place of a.
    """

    group: str
    rows: SymInt
    unit: SymInt
    schedule: str
    return_gathered: bool
    keep: bool


def _gather(a: torch.Tensor, bs: list[torch.Tensor], options: _Gather, scales: ScaledOperands | None = None) -> MatmulCall:
    group, rows, unit, schedule, gathered, _ = options
    how: dict[str, Any] = {"rows": rows, "unit": unit, "return_gathered": gathered, "scales": scales}
    return matmul_call("all_gather_matmul", a, bs, group, schedule, **how)


def _gather_fake(
    a: torch.Tensor, bs: list[torch.Tensor], options: _Gather, scales: ScaledOperands | None = None
) -> list[torch.Tensor]:
    outs = [new_product(a, options.rows, b.shape[1], scales) for b in bs]
    return outs + new_gathered(a, options.rows, scales) * options.return_gathered


def _gather_save(ctx: Any, inputs: tuple[Any, ...], outputs: list[torch.Tensor]) -> None:
    a, bs, ctx.options = inputs
    # Without this, zeros would go through the whole backward if the gathered a has no gradient.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(outputs[-1] if ctx.options.keep else a, *bs)


def _gather_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    (x, *bs), options = ctx.saved_tensors, ctx.options
    of_products, of_gathered = grads[: len(bs)], grads[-1] if options.return_gathered else None
    grad_a: torch.Tensor | None = None
    grad_bs: list[torch.Tensor | None] = [None] * len(bs)
    if ctx.needs_input_grad[0]:
        # A product that is not used gets a gradient of zeros, because ranks may use different products and must all make the
        # same call.
        factors = [x.new_zeros(options.rows, b.shape[1]) if g is None else g for g, b in zip(of_products, bs, strict=True)]
        columns = [b.t() for b in bs]
        if of_gathered is not None:
            # The same reduce-scatter returns the gradient of the gathered a to its owners, as a product with the identity.
            factors.append(of_gathered)
            columns.append(torch.eye(x.shape[1], dtype=x.dtype, device=x.device))
        group = group_named(options.group)
        spec = choose_backward_schedule(options.schedule, "matmul_reduce_scatter")
        back = (options.group, group.rank(), group.size(), options.unit, spec, "sum")
        if of_gathered is None and _may_be_one_call(ctx.needs_input_grad[1], bs, options, spec):
            given = "whole" if options.keep else "shard"
            grad_a, *found = _all_gather_matmul_backward(factors, columns, x, *back[:-1], given)
            wanted = zip(found, of_products, ctx.needs_input_grad[1], strict=True)
            return grad_a, [one.t() if needed and grad is not None else None for one, grad, needed in wanted]
        grad_a = _matmul_reduce_scatter(factors, columns, *back)
    if any(ctx.needs_input_grad[1]):
        after = next((each for each in (grad_a, *grads) if each is not None), x)
        gathered = x if options.keep else _gather_again(x, make_empty_operand_after(x.t(), after), options)
        wanted = zip(bs, of_products, ctx.needs_input_grad[1], strict=True)
        grad_bs = [_gradient_of(b, gathered, grad) if needed and grad is not None else None for b, grad, needed in wanted]
    return grad_a, grad_bs


def _may_be_one_call(needed: Sequence[bool], bs: Sequence[torch.Tensor], options: _Gather, schedule: str) -> bool:
    """Return whether one call may compute the gradients of a and of all bs. It must be the same on all ranks.

    So the layouts of bs do not count, which depend on their widths, nor does which of them needs a gradient: the others of
    these are not used. The call has no second derivatives, and nothing to do without rows.
    """
    if not any(needed) or torch.is_grad_enabled() or is_registered(schedule):
        return False
    return options.rows > 0 and bs[0].shape[0] > 0 and (options.keep or not _sends_messages(options.group, schedule))


def _sends_messages(group: str, schedule: str) -> bool:
    """Return whether ranks exchange by messages between nodes. Such a schedule cannot gather x by NCCL, too."""
    state = GROUPS.known(group)
    return schedule.startswith("node_slices") or bool(state and state.rank_group.nodes)


def _gather_again(a: torch.Tensor, nothing: torch.Tensor, options: _Gather) -> torch.Tensor:
    again = options._replace(schedule="sequential", return_gathered=True, keep=False)
    gathered: torch.Tensor = _all_gather_matmul(a, [nothing], *again)[-1]
    return gathered


_all_gather_matmul = define(
    "all_gather_matmul", _gather, _gather_fake, returns=list[torch.Tensor], save=_gather_save, backward=_gather_backward
)


@public
def matmul_reduce_scatter(
    a: torch.Tensor | Sequence[torch.Tensor],
    b: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    op: str = "sum",
    scatter_dim: int = 0,
    **scales: Unpack[ScaleAndBias],
) -> torch.Tensor:
    """Compute reduce_scatter(a @ b, dim=scatter_dim), and overlap the exchange with the matmul.

    Replaces

        c = a @ b; dist.reduce_scatter_tensor(out, c, op, group)
        c = a[0] @ b[0] + a[1] @ b[1] + ...; dist.reduce_scatter_tensor(out, c, op, group)      with lists of a and b

    Args:
        a: [M, ..., k], any strides. Or several, which have the same extents but for the last, k.
        b: [k, N]. Or several, as many as there are a, each with the k of its a and the same N.
        group: as for all_gather_matmul.
        schedule: as for all_gather_matmul, except for the schedules that only all_gather_matmul has.
        op: "sum" or "avg".
        scatter_dim: the dimension that is scattered (not the last).

    Partial products are rounded to the dtype, summed in float32 in the order of ranks, and rounded once. Where a kernel adds up
    several products they are rounded together, else after each addition. A registered family (weft.schedule.register) chooses
    its own order of sums.

    FP8: one a and one b, scale_a, scale_b and the options that follow them are as for all_gather_matmul, but tensorwise scales
    remain tensorwise. Partial products are rounded to output_dtype, and bias [N] is added once, to the sum.

    Returns out [m, ..., N]: this rank's part as torch.chunk would cut it. If world_size does not divide M, the parts of the
    last ranks are shorter or empty. Raises as all_gather_matmul does.
    """
    factors, bs = factors_of(a, b)
    a = factors[0]
    scaled = quantised("matmul_reduce_scatter", a, bs, scales) if scales or a.dtype in FLOAT8 or bs[0].dtype in FLOAT8 else None
    if scaled is not None:
        refuse_several(factors)
    if op not in ("sum", "avg"):
        raise ValueError(f"op is {op!r}; use 'sum' or 'avg'")
    name, rank, world_size = resolve_group(group)
    dim = _dimension("scatter_dim", scatter_dim, a)
    shape = (a.movedim(dim, 0) if dim else a).shape
    unit, spec = max(count_rows_per_entry(shape), 1), schedule_to_spec(schedule, "matmul_reduce_scatter")
    low, high = split(shape[0], world_size)[rank]
    reads, view = (rows_of(a.shape, dim), None), rows_of(a.shape, dim, high - low)
    options = (name, rank, world_size, unit, spec, op)
    request = OperatorRequest(_matmul_reduce_scatter, (factors, bs), options, group, reads, view)
    found = request if scaled is None else with_scales("matmul_reduce_scatter", request, scaled)
    return cast(torch.Tensor, found)  # `public` runs it


class _Scatter(NamedTuple):
    """_Scatter holds the options of weft::matmul_reduce_scatter.

    unit: the flat rows of one entry of the scattered dimension.
    op: "sum" or "avg".
    """

    group: str
    rank: int
    world_size: int
    unit: SymInt
    schedule: str
    op: str


class _Backward(NamedTuple):
    """_Backward holds the options of weft::all_gather_matmul_backward.

    unit: the flat rows of one entry of the gathered dimension.
    given: "whole" if ranks pass the gathered a for x, "shard" if they pass their own.
    """

    group: str
    rank: int
    world_size: int
    unit: SymInt
    schedule: str
    given: str


def _backward(factors: list[torch.Tensor], bs: list[torch.Tensor], x: torch.Tensor, options: _Backward) -> MatmulCall:
    (a, *more), (group, _, _, unit, schedule, given) = factors, options
    how: dict[str, Any] = {"rows": a.shape[0], "unit": unit, "more": more, "x": x, "weight_gradients": given}
    return matmul_call("matmul_reduce_scatter", a, bs, group, schedule, **how)


def _backward_fake(
    factors: list[torch.Tensor], bs: list[torch.Tensor], x: torch.Tensor, options: _Backward
) -> list[torch.Tensor]:
    low, high = split(factors[0].shape[0] // options.unit, options.world_size)[options.rank]
    return [x.new_empty((high - low) * options.unit, x.shape[1]), *(x.new_empty(b.shape) for b in bs)]


_all_gather_matmul_backward = define("all_gather_matmul_backward", _backward, _backward_fake, returns=list[torch.Tensor])


def _scatter(
    factors: list[torch.Tensor], bs: list[torch.Tensor], options: _Scatter, scales: ScaledOperands | None = None
) -> MatmulCall:
    (a, *more), (group, _, _, unit, schedule, op) = factors, options
    how: dict[str, Any] = {"rows": a.shape[0], "unit": unit, "reduce_op": op, "more": more, "scales": scales}
    return matmul_call("matmul_reduce_scatter", a, bs, group, schedule, **how)


def _scatter_fake(
    factors: list[torch.Tensor], bs: list[torch.Tensor], options: _Scatter, scales: ScaledOperands | None = None
) -> torch.Tensor:
    low, high = split(factors[0].shape[0] // options.unit, options.world_size)[options.rank]
    return new_product(factors[0], (high - low) * options.unit, bs[0].shape[1], scales)


def _scatter_save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    factors, bs, ctx.options = inputs
    ctx.save_for_backward(*factors, *bs)


def _scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    saved, options = ctx.saved_tensors, ctx.options
    factors, bs = saved[: len(saved) // 2], saved[len(saved) // 2 :]
    scaled = grad / options.world_size if options.op == "avg" else grad
    spec = choose_backward_schedule(options.schedule, "all_gather_matmul")
    back = (options.group, factors[0].shape[0], options.unit, spec, True, False)
    *grad_factors, gathered = _all_gather_matmul(scaled.contiguous(), [b.t() for b in bs], *back)
    wanted = zip(factors, bs, ctx.needs_input_grad[1], strict=True)
    return grad_factors, [_gradient_of(b, a, gathered) if needed else None for a, b, needed in wanted]


_matmul_reduce_scatter = define(
    "matmul_reduce_scatter",
    _scatter,
    _scatter_fake,
    returns=torch.Tensor,
    save=_scatter_save,
    backward=_scatter_backward,
    saves_results=False,
)


# What both share.


def _dimension(name: str, dim: int, a: torch.Tensor) -> int:
    """Return a dimension as a number from 0. Raises ValueError that names the argument for the last dimension."""
    if not isinstance(dim, int):
        raise ValueError(f"{name} is a {type(dim).__name__}; it must be in 0 to {a.dim() - 2}")
    found = dim + a.dim() if dim < 0 else dim
    if not 0 <= found < a.dim() - 1:
        raise ValueError(f"{name} is {dim}; for a of {a.dim()} dimensions it must be in 0 to {a.dim() - 2}")
    return found


def _check_rows(rows: int | None, own: int, rank: int, world_size: int) -> None:
    if rows is None:
        return
    require("rows", rows, (int, torch.SymInt), "it must be a whole number, or None")
    low, high = split(rows, world_size)[rank]
    if own != high - low:
        raise ValueError(
            f"rows is {rows}: torch.chunk over {world_size} ranks gives rank {rank} {high - low} rows, but a has {own}"
        )


def _gradient_of(b: torch.Tensor, a: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    # In another layout than b's, the gradient of a transposed weight would be copied when it is accumulated.
    return (grad.t() @ a).t() if b.stride(0) == 1 < b.stride(1) else a.t() @ grad
