"""matmul_all_to_all and all_to_all_matmul exchange rows by destination, in even shares.

    matmul_all_to_all(a, b)    replaces   c = a @ b; dist.all_to_all_single(out, c)
    all_to_all_matmul(a, b)    replaces   dist.all_to_all_single(received, a); received @ b

Every rank has its own a and b. a has M rows, m of them for each rank. N and K are those of a rank's matmul. The public
functions also take two other layouts:

    splits=...                         a tensor has the number of rows for each rank     ragged_all_to_all.py
    split_dim=-1, gather_dim=-1        exchange parts of rows and parts of columns       the end of this text

The operators of torch.library take flat matrices and a group's name. Shard d of the M rows goes to rank d.

    weft::matmul_all_to_all(a [M, K], b [K, N], ...)   -> out [world_size * m, N]
    weft::all_to_all_matmul(a [M, K], b [K, N], ...)   -> [out [world_size * m, N], received [world_size * m, K] if asked for]

The backward of each is the other one, which returns every row to its source, overlapped with its matmul:

    matmul_all_to_all    grad_a = back(grad_out) @ b^T       grad_b = a^T @ back(grad_out)
    all_to_all_matmul    grad_a = back(grad_out @ b^T)       grad_b = all_to_all(a)^T @ grad_out

matmul_all_to_all with split_dim=-1 and all_to_all_matmul with gather_dim=-1 exchange parts of rows and parts of columns:

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
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
import torch.distributed as dist

from weft.core.problem import split
from weft.core.schedule import Schedule
from weft.ops.common import (
    FLOAT8,
    RowsOf,
    check_operands,
    choose_backward_schedule,
    count_rows_per_entry,
    find_gradients_of_received,
    resolve_group,
    rows_of,
    save_factors,
    save_factors_and_received,
    schedule_to_spec,
)
from weft.ops.front import OperatorRequest, public
from weft.ops.operator import define
from weft.ops.ragged_all_to_all import combine_request, dispatch_request, refuse_max_rows
from weft.ops.scaled import (
    ScaleAndBias,
    ScalesAndBias,
    new_gathered,
    new_product,
    quantised,
    refuse_scales,
    refuse_unknown,
    with_scales,
)
from weft.ops.schema import SymInt
from weft.runtime.calls import MatmulCall, ScaledOperands, matmul_call


@overload
def matmul_all_to_all(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    split_dim: Literal[0, -1] = 0,
    **scales: Unpack[ScaleAndBias],
) -> torch.Tensor: ...


@overload
def matmul_all_to_all(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    splits: torch.Tensor,
    max_rows: int,
    **scales: Unpack[ScaleAndBias],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@public
def matmul_all_to_all(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    split_dim: Literal[0, -1] = 0,
    splits: torch.Tensor | None = None,
    max_rows: int | None = None,
    **scales: Unpack[ScaleAndBias],
) -> Any:
    """Compute all_to_all(a @ b), and overlap the exchange with the matmul.

    Replaces

        c = a @ b; dist.all_to_all_single(out, c, group=group)

    Args:
        a: [M, ..., K], any strides, of one shape on all ranks. torch.chunk cuts its first dimension, and part d goes to rank d.
        b: [K, N], each rank's own; with splits also [experts, K, N].
        group: as for all_gather_matmul.
        schedule: as for all_gather_matmul. With splits, "auto" and "planned" are "fused", and "sequential" is the other name.
        split_dim: what is cut by destination: 0 for rows, -1 for the product's columns.
        splits: the number of rows for each destination, a tensor on the device; see below.
        max_rows: with splits, the most rows that may arrive. It is the same on all ranks.

    FP8: a, b, scale_a, scale_b and the options that follow them are as for matmul_reduce_scatter; with splits see below.
    split_dim=-1 does not support FP8.

    Returns out [world_size * m, ..., N]: the rows for this rank from every rank, in the order of ranks. Raises as
    all_gather_matmul does.

    **splits** are for experts that return rows to their ranks. They are int32 or int64 on a's device: [world_size] rows by
    destination, or, with b [experts, K, N], [experts, world_size] rows by expert and destination. a [rows, K] has its rows in
    that order, and may have more. Ranks may have different numbers of rows. In the backward the hosts exchange these numbers.

    Returns (out [max_rows, N], counts int32 [world_size, experts], or [world_size] for a b of two dimensions). Rows are ordered
    by the rank that they come from, then by its expert. Rows past the counts are zero. No host waits for a device. Rows that do
    not fit (in a, or in max_rows) are dropped. Every rank then raises the same ValueError, which names the rank where they do
    not fit: on CPUs in this call, on GPUs in a later call or in weft.synchronize. On GPUs: bfloat16 and float16; K and N are
    multiples of 8; a has at most max_rows rows, or at most the rows of any rank's a in the first call with these sizes, which
    decides how much memory products have.

    FP8 with splits: the first dimension of scale_b is the experts, as for b: rowwise [experts, 1, N], blockwise [experts,
    K / 128, N / 128], tensorwise [1] or [experts, 1, 1]. There is no bias. Results, and the rows that are sent, have
    output_dtype.

    **split_dim=-1** cuts the product's columns instead, which must be a multiple of world_size. Part d goes to rank d.

    Returns out [world_size * M, ..., n]: these columns, for the rows of every rank. Ulysses' attention uses it to go from parts
    of the sequence to heads (arXiv 2309.14509). Heads are outermost in the weight's columns:

        qkv = matmul_all_to_all(x, weight, split_dim=-1)    x [tokens, hidden], a part; weight [hidden, heads * 3 * dim]
        qkv.view(world_size * tokens, -1, 3, dim)           of the whole sequence, this rank's heads

    Source: fused computation-collectives (arXiv 2305.06942); see docs/schedules.md, and docs/kernels.md for splits.
    """
    columns = _is_columns("split_dim", split_dim, splits)
    if scales:
        refuse_unknown("matmul_all_to_all", scales)
        if columns:
            refuse_scales(scales, "split_dim=-1")
    if splits is not None:
        return combine_request(a, b, group, splits, max_rows, schedule=schedule, **scales)
    refuse_max_rows(max_rows)
    if columns:
        return columns_to_ranks(a, b, group, schedule)
    check_operands(a, [b], scaled=True)
    scaled = quantised("matmul_all_to_all", a, [b], scales) if scales or a.dtype in FLOAT8 or b.dtype in FLOAT8 else None
    name, rank, world_size = resolve_group(group)
    shape, unit = a.shape, max(1, count_rows_per_entry(a.shape))
    view, spec = _arriving(shape, rank, world_size), schedule_to_spec(schedule, "matmul_all_to_all")
    options = (name, rank, world_size, unit, spec)
    request = OperatorRequest(_matmul_all_to_all, (a, b), options, group, (rows_of(shape), None), view)
    return request if scaled is None else with_scales("matmul_all_to_all", request, scaled)


class _Shares(NamedTuple):
    """_Shares holds the options of both operators.

    unit: the rows of the flat a for one entry of its first dimension, which stay together.
    """

    group: str
    rank: int
    world_size: int
    unit: SymInt
    schedule: str


def _combine(a: torch.Tensor, b: torch.Tensor, options: _Shares, scales: ScaledOperands | None = None) -> MatmulCall:
    group, _, _, unit, schedule = options
    return matmul_call("matmul_all_to_all", a, [b], group, schedule, rows=a.shape[0], unit=unit, scales=scales)


def _combine_fake(a: torch.Tensor, b: torch.Tensor, options: _Shares, scales: ScaledOperands | None = None) -> torch.Tensor:
    return new_product(a, _count_arriving_rows(a.shape[0], *options[1:4]), b.shape[1], scales)


def _combine_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (a, b), options = ctx.saved_tensors, ctx.options
    rows, spec = a.shape[0], choose_backward_schedule(options.schedule, "all_to_all_matmul")
    home = options._replace(schedule=spec)
    grad_a, back = _all_to_all_matmul(_pad_gradient(grad, rows, options), b.t(), *home, True)
    return grad_a[:rows], a.t() @ back[:rows]


_matmul_all_to_all = define(
    "matmul_all_to_all",
    _combine,
    _combine_fake,
    returns=torch.Tensor,
    save=save_factors,
    backward=_combine_backward,
    saves_results=False,
)


@overload
def all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    gather_dim: Literal[0, -1] = 0,
    return_received: Literal[False] = False,
    **scales: Unpack[ScaleAndBias],
) -> torch.Tensor: ...


@overload
def all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    gather_dim: Literal[0, -1] = 0,
    return_received: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    gather_dim: Literal[0, -1] = 0,
    return_received: bool = False,
    **scales: Unpack[ScalesAndBias],
) -> Any: ...


@overload
def all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    splits: torch.Tensor,
    max_rows: int,
    return_received: bool = False,
    **scales: Unpack[ScaleAndBias],
) -> tuple[torch.Tensor, ...]: ...


@public
def all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    gather_dim: Literal[0, -1] = 0,
    splits: torch.Tensor | None = None,
    max_rows: int | None = None,
    return_received: bool = False,
    **scales: Unpack[ScaleAndBias],
) -> Any:
    """Compute all_to_all(a) @ b, and overlap the exchange with the matmul.

    Replaces

        dist.all_to_all_single(received, a, group=group); out = received @ b

    Args:
        a: as for matmul_all_to_all.
        b: as for matmul_all_to_all; with gather_dim=-1 [world_size * k, N].
        group: as for all_gather_matmul.
        schedule: as for all_gather_matmul. With splits, "auto" and "planned" are "fused", and "sequential" is the other name.
        gather_dim: 0 concatenates received rows along the first dimension, -1 along the last one.
        splits: the number of rows for each destination, a tensor on the device; see below.
        max_rows: with splits, the most rows that may arrive. It is the same on all ranks.
        return_received: also return the rows that were multiplied.

    FP8: a, b, scale_a, scale_b and the options that follow them are as for all_gather_matmul; with splits see below.
    gather_dim=-1 does not support FP8.

    Returns out [world_size * m, ..., N], for the rows that this rank has received, in the order of ranks. With return_received,
    it returns (out, received [world_size * m, ..., K]), and for FP8 also the scales of these rows. Raises as all_gather_matmul
    does.

    **splits** are for tokens that are dispatched to experts: [world_size] rows by destination, or, with b [experts, K, N],
    [world_size, experts] (or flat) rows by destination and its expert. a [rows, K] has its rows in that order. The rows that
    arrive are ordered by this rank's experts, then by source rank.

    Returns (out [max_rows, N], counts int32 [experts, world_size], or [world_size]). With return_received, the rows [max_rows,
    K] follow, and for FP8 their scales. FP8 rows are sent as FP8, with their scales, which is about half of the bytes. counts
    are the splits of the matmul_all_to_all that returns the rows to their sources:

        hidden, counts = all_to_all_matmul(tokens, up, splits=splits, max_rows=capacity)
        home, _ = matmul_all_to_all(act(hidden), down, splits=counts, max_rows=len(tokens))

    The other rules are those of matmul_all_to_all with splits.

    **gather_dim=-1** concatenates the received rows along the last dimension, in the order of ranks. b is
    [world_size * k, N] for a [M, ..., k], whose first dimension must be a multiple of world_size.

    Returns out [m, ..., N], and with return_received (out, received [m, ..., world_size * k]). Ulysses' attention uses it to go
    back from heads to parts of the sequence:

        x = all_to_all_matmul(attended, weight, gather_dim=-1)    attended [sequence, heads * dim of this rank]

    Source: fused computation-collectives (arXiv 2305.06942); see docs/schedules.md, and
    docs/kernels.md for splits.
    """
    columns = _is_columns("gather_dim", gather_dim, splits)
    if scales:
        refuse_unknown("all_to_all_matmul", scales)
        if columns:
            refuse_scales(scales, "gather_dim=-1")
    if splits is not None:
        options: dict[str, Any] = {"return_received": return_received, "schedule": schedule, **scales}
        return dispatch_request(a, b, group, splits, max_rows, **options)
    refuse_max_rows(max_rows)
    if columns:
        return columns_from_ranks(a, b, group, schedule, return_received=return_received)
    check_operands(a, [b], scaled=True)
    scaled = quantised("all_to_all_matmul", a, [b], scales) if scales or a.dtype in FLOAT8 or b.dtype in FLOAT8 else None
    name, rank, world_size = resolve_group(group)
    shape, unit = a.shape, max(1, count_rows_per_entry(a.shape))
    view, spec = _arriving(shape, rank, world_size), schedule_to_spec(schedule, "all_to_all_matmul")
    after = tuple if return_received else itemgetter(0)
    of_call = (name, rank, world_size, unit, spec, return_received)
    request = OperatorRequest(_all_to_all_matmul, (a, b), of_call, group, (rows_of(shape), None), view, after)
    return request if scaled is None else with_scales("all_to_all_matmul", request, scaled)


def _dispatch(
    a: torch.Tensor, b: torch.Tensor, options: _Shares, return_received: bool, scales: ScaledOperands | None = None
) -> MatmulCall:
    group, _, _, unit, schedule = options
    how: dict[str, Any] = {"rows": a.shape[0], "unit": unit, "return_gathered": return_received, "scales": scales}
    return matmul_call("all_to_all_matmul", a, [b], group, schedule, **how)


def _dispatch_fake(
    a: torch.Tensor, b: torch.Tensor, options: _Shares, return_received: bool, scales: ScaledOperands | None = None
) -> list[torch.Tensor]:
    rows = _count_arriving_rows(a.shape[0], *options[1:4])
    return [new_product(a, rows, b.shape[1], scales)] + new_gathered(a, rows, scales) * return_received


def _dispatch_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    saved, options = ctx.saved_tensors, ctx.options
    a, rows = saved[0], saved[0].shape[0]
    home = options._replace(schedule=choose_backward_schedule(options.schedule, "matmul_all_to_all"))
    again = options._replace(schedule="sequential")
    return find_gradients_of_received(
        ctx,
        saved,
        grads,
        _count_arriving_rows(rows, *options[1:4]),
        lambda grad, columns: _matmul_all_to_all(_pad_gradient(grad, rows, options), columns, *home)[:rows],
        lambda nothing: _all_to_all_matmul(a, nothing, *again, True)[1],
    )


_all_to_all_matmul = define(
    "all_to_all_matmul",
    _dispatch,
    _dispatch_fake,
    returns=list[torch.Tensor],
    save=save_factors_and_received,
    backward=_dispatch_backward,
)


# What both share.


def _is_columns(name: str, dim: int, splits: torch.Tensor | None) -> bool:
    """Return whether an exchange is between parts of rows and parts of columns. Raises ValueError for other values."""
    if not isinstance(dim, int) or dim not in (0, -1) or isinstance(dim, bool):
        raise ValueError(f"{name} is {dim!r}; it must be 0 (rows) or -1 (columns)")
    if dim and splits is not None:
        raise ValueError(f"{name} is {dim}; with splits it must be 0, because splits count rows")
    return dim == -1


def _count_arriving_rows(rows: int, rank: int, world_size: int, unit: int) -> int:
    """Return how many flat rows a rank receives from all ranks, each of which has `rows`."""
    low, high = split(rows // unit, world_size)[rank]
    return world_size * (high - low) * unit


def _pad_gradient(grad: torch.Tensor, rows: int, options: _Shares) -> torch.Tensor:
    """Return the gradients of the rows from every rank, padded with zeros to the longest shard.

    Then the backward is an exchange of even shards. The first `rows` rows of its result belong to the rows that were sent.
    """
    longest = _count_arriving_rows(rows, 0, options.world_size, options.unit)
    if grad.shape[0] == longest:
        return grad.contiguous()
    own = grad.shape[0] // options.world_size
    padded = grad.new_zeros(options.world_size, longest // options.world_size, grad.shape[1])
    # It is done even if there are no rows, because all ranks must record it for a second derivative, or none.
    padded[:, :own] = grad.reshape(options.world_size, own, grad.shape[1])
    return padded.flatten(0, 1)


def _arriving(shape: torch.Size, rank: int, world_size: int) -> RowsOf | None:
    """Return how to read the result of an a of this shape as a matrix. None if it is one."""
    low, high = split(shape[0], world_size)[rank]
    return rows_of(shape, 0, world_size * (high - low))


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
    after = tuple if return_received else itemgetter(0)
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
