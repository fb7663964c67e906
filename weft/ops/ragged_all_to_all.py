"""matmul_all_to_all and all_to_all_matmul with `splits` exchange rows whose counts are on the device, for groups of experts.

    weft::ragged_matmul_all_to_all(a [rows, K], b [E, K, N], splits [E, W], ...)   -> out [max_rows, N], counts [W, E]
    weft::ragged_all_to_all_matmul(a [rows, K], b [E, K, N], splits [W, E], ...)   -> out [max_rows, N], counts [E, W],
                                                                                      rows [max_rows, K] if asked for
    weft::ragged_all_to_all_gated(a [rows, K], b [E, K, 2 F], splits [W, E], ...)  -> out [max_rows, F], counts [E, W]:
                                                      silu(left half) * right half of that product; no backward

With FP8 operands each takes scale_a [rows, s] and scale_bs of one [E, ., .], too. Received rows are then followed by their
scales, and there is no backward.

This rank has E of the experts, and there are W ranks. The counts of one operator are the splits of the other. The backward of
each is the other one, which returns every row to its source:

    ragged_matmul_all_to_all    grad_a = back(grad_out) @ b^T       grad_b[e] = a_e^T @ back(grad_out)_e
    ragged_all_to_all_matmul    grad_a = back(grad_out @ b^T)       grad_b[e] = rows_e^T @ grad_out_e

Ranks may have different numbers of rows in a. To return the rows, all ranks need memory for the most rows of any rank:

    weft::rows_of_ranks(a [rows, K], ...)    -> the most rows that the a of a rank has, and the rows of all ranks together, both
                                                rounded up to few values

Callers that know the first number pass it as a_rows. Otherwise the backward asks the other ranks for theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import torch
import torch.distributed as dist

from weft.compat.dispatch import grouped_mm
from weft.core.problem import Op
from weft.core.schedule import Schedule
from weft.ops.common import FLOAT8, check_operands, describe, make_empty_operand_after, resolve_group
from weft.ops.front import OperatorRequest, public
from weft.ops.operator import LibraryOperator, define
from weft.ops.scaled import ScaleAndBias, new_gathered, new_product, quantised, quantised_here
from weft.ops.schema import SymInt
from weft.runtime.calls import ScaledOperands
from weft.runtime.choose import MODES
from weft.runtime.groups import GROUPS
from weft.runtime.ragged import RaggedCall, room
from weft.schedules import ragged

_DISPATCH: Op = "ragged_all_to_all_matmul"
_COMBINE: Op = "ragged_matmul_all_to_all"


class _Ragged(NamedTuple):
    """_Ragged holds the options of the operators that exchange rows.

    group: the name of the process group.
    world_size: the number of its ranks.
    max_rows: the most rows that may arrive.
    a_rows: the most rows that a has on any rank, the same on all ranks. None if it is not known.
    limit: the settings from which max_rows was computed, for error messages. It is "" if the caller has passed max_rows.
    schedule: the schedule as a string.
    return_received: whether the rows that arrived, and their scales if they are FP8, are further results.
    """

    group: str
    world_size: int
    max_rows: SymInt
    a_rows: SymInt | None
    limit: str
    schedule: str
    return_received: bool


def _define(name: str, op: Op, *, gated: bool = False, returns: Any, **more: Any) -> LibraryOperator:
    """Define an operator that exchanges rows. gated: its results are those of `ragged_gated`."""

    def run(
        a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, options: _Ragged, scales: ScaledOperands | None = None
    ) -> RaggedCall:
        given: dict[str, Any] = options._asdict()
        del given["world_size"]
        return RaggedCall(op=op, a=a, b=b, splits=splits, gated=gated, scales=scales, **given)

    def fake(a: torch.Tensor, b: torch.Tensor, _: Any, options: _Ragged, scales: ScaledOperands | None = None) -> Any:
        experts, _, n = b.shape
        extents = (experts, options.world_size) if op == _DISPATCH else (options.world_size, experts)
        out = new_product(a, options.max_rows, n // 2 if gated else n, scales)
        received = new_gathered(a, options.max_rows, scales) * options.return_received
        found = [out, a.new_empty(extents, dtype=torch.int32), *received]
        return found if returns == list[torch.Tensor] else tuple(found)

    return define(name, run, fake, returns=returns, **more)


# How many rows ranks have.


def rows_of_ranks(a: torch.Tensor, group: str, limit: str) -> tuple[int, int]:
    """Return the most rows that a has on any rank, and the rows of all ranks together, both rounded up by `room`.

    Collective: hosts wait for each other, and devices do not. limit: as for _Ragged.
    """
    most, total = _rows_of_ranks(a, group, limit)
    return most, total


def _ask(a: torch.Tensor, group: str, limit: str) -> tuple[SymInt, SymInt]:
    what = f"op: number of rows, for a call with splits\nsettings: {limit or 'none'}"
    found = GROUPS.state(group).exchange_numbers(what, a.shape[0])
    return room(max(found)), room(sum(found))


def _ask_fake(a: torch.Tensor, group: str, limit: str) -> tuple[Any, Any]:
    context = torch.library.get_ctx()
    return context.new_dynamic_size(min=1), context.new_dynamic_size(min=1)


_rows_of_ranks = define("rows_of_ranks", _ask, _ask_fake)


def _most_rows(a: torch.Tensor, options: _Ragged) -> int:
    """Return the most rows that a has on any rank. Collective if the options do not contain the number."""
    return rows_of_ranks(a, options.group, options.limit)[0] if options.a_rows is None else options.a_rows


# Rows return from experts to their ranks.


def combine_request(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None,
    splits: torch.Tensor,
    max_rows: int | None,
    *,
    a_rows: int | None = None,
    limit: str = "",
    schedule: str | Schedule = "auto",
    **scales: Unpack[ScaleAndBias],
) -> OperatorRequest:
    """Return the OperatorRequest of matmul_all_to_all with splits. a_rows, limit: as for _Ragged."""
    by_expert, options = _checked(_COMBINE, a, b, group, splits, max_rows, a_rows, limit, _spec(schedule), False)
    tensors, scaled = _operands(_COMBINE, a, b, by_expert, scales)
    after = _finish if b.dim() == 3 else _finish_single
    return OperatorRequest(_ragged_matmul_all_to_all, tensors, (*options, *scaled), group, after=after)


ragged_combine: Callable[..., Any] = public(combine_request)
"""Runs matmul_all_to_all with splits: as combine_request."""


def _combine_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    a, b, splits, ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(a, b, splits, output[1])


def _combine_backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    (a, b, splits, counts), options = ctx.saved_tensors, ctx.options
    rows, home = a.shape[0], _home(a, options)._replace(return_received=True)
    grad_a, _, received = _ragged_all_to_all_matmul(grad.contiguous(), b.transpose(1, 2), counts, *home)
    return grad_a.narrow(0, 0, rows), grouped_outer(a, received.narrow(0, 0, rows), splits.sum(1)), None


_ragged_matmul_all_to_all = _define(
    "ragged_matmul_all_to_all",
    _COMBINE,
    returns=tuple[torch.Tensor, torch.Tensor],
    save=_combine_save,
    backward=_combine_backward,
)


# Rows go to experts.


def dispatch_request(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None,
    splits: torch.Tensor,
    max_rows: int | None,
    *,
    return_received: bool,
    a_rows: int | None = None,
    limit: str = "",
    schedule: str | Schedule = "auto",
    **scales: Unpack[ScaleAndBias],
) -> OperatorRequest:
    """Return the OperatorRequest of all_to_all_matmul with splits. a_rows, limit: as for _Ragged."""
    by_rank, options = _checked(_DISPATCH, a, b, group, splits, max_rows, a_rows, limit, _spec(schedule), return_received)
    tensors, scaled = _operands(_DISPATCH, a, b, by_rank, scales)
    given, after = (*options, *scaled), _finish if b.dim() == 3 else _finish_single
    return OperatorRequest(_ragged_all_to_all_matmul, tensors, given, group, after=after)


ragged_dispatch: Callable[..., Any] = public(dispatch_request)
"""Runs all_to_all_matmul with splits: as dispatch_request."""


def _dispatch_save(ctx: Any, inputs: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
    a, b, splits, ctx.options = inputs
    ctx.mark_non_differentiable(outputs[1])
    # Without this, zeros would go through the whole backward if the received rows have no gradient.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, b, splits, outputs[1], *outputs[2:])


def _dispatch_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    (a, b, splits, counts, *received), options = ctx.saved_tensors, ctx.options
    grad = a.new_zeros(options.max_rows, b.shape[2]) if grads[0] is None else grads[0].contiguous()
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        factors, columns = grad, b.transpose(1, 2)
        if options.return_received and grads[2] is not None:
            # The gradient of the received rows goes back with the rest, as a product with 1.
            eye = torch.eye(a.shape[1], dtype=a.dtype, device=a.device).expand(b.shape[0], -1, -1)
            factors, columns = torch.cat([grad, grads[2]], 1), torch.cat([columns, eye], 1)
        back, _ = _ragged_matmul_all_to_all(factors, columns, counts, *_home(a, options))
        grad_a = back.narrow(0, 0, a.shape[0])
    if ctx.needs_input_grad[1]:
        # Saving the received rows would cost max_rows x K of memory from forward to backward, so they are exchanged again by
        # default.
        if not received:
            nothing = make_empty_operand_after(b, grad if grad_a is None else grad_a)
            again = options._replace(schedule=_backward_spec(options.schedule), return_received=True)
            _, _, *received = _ragged_all_to_all_matmul(a, nothing, splits, *again)
        grad_b = grouped_outer(received[0], grad, counts.sum(1))
    return grad_a, grad_b, None


_ragged_all_to_all_matmul = _define(
    "ragged_all_to_all_matmul", _DISPATCH, returns=list[torch.Tensor], save=_dispatch_save, backward=_dispatch_backward
)


@public
def ragged_gated(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None,
    splits: torch.Tensor,
    max_rows: int,
    *,
    a_rows: int | None = None,
    limit: str = "",
    **scales: Unpack[ScaleAndBias],
) -> Any:
    """Return silu(left half) * right half of all_to_all_matmul(a, b, splits=splits), and the counts.

    The product is computed in float32 and not stored. The result [max_rows, F] has no gradient. Raises ValueError for an odd N.

    b: [experts, K, 2 F].
    a_rows, limit: as for _Ragged.
    With blockwise scales F is a multiple of 128.
    """
    by_rank, options = _checked(_DISPATCH, a, b, group, splits, max_rows, a_rows, limit, "auto", False)
    if b.dim() != 3 or b.shape[2] % 2:
        raise ValueError(f"b is {describe(b)}; for a gated product it must be [experts, K, 2 F]")
    tensors, scaled = _operands(_DISPATCH, a, b, by_rank, scales)
    return OperatorRequest(_ragged_all_to_all_gated, tensors, (*options, *scaled), group, after=_finish)


_ragged_all_to_all_gated = _define("ragged_all_to_all_gated", _DISPATCH, gated=True, returns=tuple[torch.Tensor, torch.Tensor])


# What they share.


def _operands(
    op: Op, a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, scales: ScaleAndBias
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return an operator's tensors, and the options of their scales. Raises ValueError for scales that do not fit."""
    if not scales and a.dtype not in FLOAT8:
        return (a, _grouped(b), splits), ()
    if "bias" in scales:
        raise ValueError("bias cannot be used with splits; add it to the rows that arrive")
    of = quantised(op, a, [b], scales)
    elements, scale_a = (a, of.scale_a) if of.scale_a is not None else quantised_here(a, of.recipe)
    tensors = (elements, _grouped(b), splits, scale_a, [_grouped(of.scale_bs[0])])
    return tensors, (of.recipe, of.output_dtype, of.use_fast_accum)


def _finish(results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(results)


def _finish_single(results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the results of a call whose b is a matrix: the counts have no dimension for experts."""
    out, counts, *received = results
    return (out, counts.flatten(), *received)


def refuse_max_rows(max_rows: int | None) -> None:
    if max_rows is not None:
        raise ValueError(f"max_rows is {max_rows}, but splits is None; pass both, or neither for even shares")


def _spec(schedule: str | Schedule) -> str:
    """Return the string that names a schedule in operators."""
    if isinstance(schedule, Schedule):
        return GROUPS.keep(schedule)
    if schedule not in (*MODES, *ragged.FAMILIES):
        named = schedule if isinstance(schedule, str) else type(schedule).__name__
        known = ", ".join((*MODES, *ragged.FAMILIES))
        raise ValueError(f"schedule is {named!r}; with splits use {known}, or a weft.schedule.Schedule")
    return schedule


def _home(a: torch.Tensor, options: _Ragged) -> _Ragged:
    """Return the options of the exchange that returns the rows.

    Collective if the options do not contain the number of rows of a.
    """
    spec = _backward_spec(options.schedule)
    return options._replace(max_rows=_most_rows(a, options), a_rows=options.max_rows, schedule=spec, return_received=False)


def _backward_spec(schedule: str) -> str:
    """Return the schedule of the backward. A Schedule value is only for the forward's problem, so it becomes auto."""
    return "auto" if schedule.startswith("value:") else schedule


def _grouped(b: torch.Tensor) -> torch.Tensor:
    return b if b.dim() == 3 else b[None]


def _capacity(max_rows: int | None) -> int:
    if not isinstance(max_rows, int) or isinstance(max_rows, bool) or max_rows < 1:
        raise ValueError(
            f"max_rows is {max_rows!r}; with splits it must be the most rows that may arrive, an int of at least 1"
        )
    return max_rows


def _checked(
    op: Op,
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None,
    splits: torch.Tensor,
    max_rows: int | None,
    *rest: Any,
) -> tuple[torch.Tensor, _Ragged]:
    """Check the arguments. Return the splits as a matrix, and the options. rest: the other options, from a_rows on."""
    name, _, world_size = resolve_group(group)
    if not isinstance(b, torch.Tensor) or b.dim() not in (2, 3) or (b.dim() == 3 and not b.shape[0]):
        raise ValueError(f"b is {describe(b)}; with splits it must be a matrix, or [experts, K, N] with at least one expert")
    check_operands(a, [_grouped(b)[0]], scaled=True)
    if a.dim() != 2:
        raise ValueError(f"a is {describe(a)}; with splits it must be a matrix")
    experts = b.shape[0] if b.dim() == 3 else 1
    extents = (world_size, experts) if op == _DISPATCH else (experts, world_size)
    shapes = [extents, *[(world_size,)] * (experts == 1), *[(world_size * experts,)] * (op == _DISPATCH)]
    if not isinstance(splits, torch.Tensor) or tuple(splits.shape) not in shapes:
        raise ValueError(f"splits is {describe(splits)}; for this b and group it must be {' or '.join(map(str, shapes))}")
    if splits.dtype not in (torch.int32, torch.int64) or splits.device != a.device:
        raise ValueError(f"splits is {splits.dtype} on {splits.device}; it must be int32 or int64 on {a.device}, as a is")
    splits = splits if splits.shape == extents else splits.reshape(extents)
    return splits, _Ragged(name, world_size, _capacity(max_rows), *rest)


def grouped_outer(rows: torch.Tensor, grads: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return rows_e^T @ grads_e of each expert, [E, K, N].

    counts: [E] rows of each expert, on the device. Rows after their sum are ignored, whatever they contain.
    """
    ends = counts.cumsum(0)
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        if torch.is_grad_enabled():  # the backward of grouped_mm writes nothing past the last end
            place = torch.arange(rows.shape[0], device=rows.device)[:, None]
            rows, grads = (torch.where(place < ends[-1], each, 0) for each in (rows, grads))
        # Rows after the last end are in no group, and are not read.
        return grouped_mm(_aligned(rows).t(), _aligned(grads), ends)
    if rows.is_cpu and type(counts) is torch.Tensor and not torch.compiler.is_compiling():
        # The host knows the numbers of rows, so each expert's rows are multiplied alone, and not all rows for each expert.
        sizes = counts.tolist()
        parts, of_parts = (torch.split(each[: sum(sizes)], sizes) for each in (rows, grads))
        return torch.stack([part.t() @ grad for part, grad in zip(parts, of_parts, strict=True)])
    place = torch.arange(rows.shape[0], device=rows.device)[:, None]
    valid, grads = (torch.where(place < ends[-1], each, 0) for each in (rows, grads))
    if len(counts) == 1:
        return (valid.t() @ grads)[None]
    starts = ends - counts
    masks = ((place >= start) & (place < end) for start, end in zip(starts.unbind(), ends.unbind(), strict=True))
    return torch.stack([torch.where(mask, valid, 0).t() @ grads for mask in masks])


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Return rows contiguous and at a multiple of 16 bytes, as grouped matmuls need them."""
    rows = rows.contiguous()
    traced = torch.compiler.is_compiling() or type(rows) is not torch.Tensor  # traced tensors have no address
    return rows if traced or rows.data_ptr() % 16 == 0 else rows.clone()
