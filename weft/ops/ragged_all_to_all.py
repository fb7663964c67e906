"""matmul_all_to_all and all_to_all_matmul with `splits`: row counts that only the device knows, experts in groups.

    weft::ragged_matmul_all_to_all(a [rows, K], b [E, K, N], splits [E, W], ...)   -> out [max_rows, N], counts [W, E]
    weft::ragged_all_to_all_matmul(a [rows, K], b [E, K, N], splits [W, E], ...)   -> out [max_rows, N], counts [E, W],
                                                                                      rows [max_rows, K] if asked for
    weft::ragged_all_to_all_gated(a [rows, K], b [E, K, 2 F], splits [W, E], ...)  -> out [max_rows, F], counts [E, W]:
                                                      silu(left half) * right half of that product; no backward

E experts of this rank, W ranks. The counts of the one are the splits of the other, and the backward of each is the other one,
which takes every row back:

    ragged_matmul_all_to_all    grad_a = back(grad_out) @ b^T       grad_b[e] = a_e^T @ back(grad_out)_e
    ragged_all_to_all_matmul    grad_a = back(grad_out @ b^T)       grad_b[e] = rows_e^T @ grad_out_e
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.compat.grouped import grouped_mm
from weft.core.problem import Op
from weft.core.schedule import Schedule
from weft.ops.common import check_operands, define, group_of, shape_of
from weft.runtime.groups import GROUPS
from weft.runtime.ragged import RaggedCall

_DISPATCH: Op = "ragged_all_to_all_matmul"


class _Ragged(NamedTuple):
    """Options of weft::ragged_matmul_all_to_all and weft::ragged_all_to_all_gated. group: by name."""

    group: str
    world_size: int
    max_rows: int


# Rows go home from experts.


def ragged_combine(
    a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup | None, splits: torch.Tensor, max_rows: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """matmul_all_to_all with splits."""
    name, _, world_size = group_of(group)
    experts = _check(a, b, splits, world_size, by_expert=True)
    by_expert, rows = splits.reshape(experts, world_size), _capacity(max_rows)
    out, counts = _ragged_matmul_all_to_all(a, _grouped(b), by_expert, name, world_size, rows)
    return out, counts if b.dim() == 3 else counts.flatten()


def _combine(a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, options: _Ragged) -> tuple[torch.Tensor, torch.Tensor]:
    return _ran(RaggedCall(op="ragged_matmul_all_to_all", a=a, b=b, splits=splits, max_rows=options.max_rows), options.group)


def _combine_fake(
    a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, options: _Ragged
) -> tuple[torch.Tensor, torch.Tensor]:
    counts = a.new_empty(options.world_size, b.shape[0], dtype=torch.int32)
    return a.new_empty(options.max_rows, b.shape[2]), counts


def _combine_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    a, b, splits, ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(a, b, splits, output[1])


def _combine_backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    (a, b, splits, counts), options = ctx.saved_tensors, ctx.options
    rows = a.shape[0]
    back = (options.group, options.world_size, room(rows), True)
    grad_a, _, received = _ragged_all_to_all_matmul(grad.contiguous(), b.transpose(1, 2), counts, *back)
    return grad_a[:rows], grouped_outer(a, received[:rows], splits.sum(1)), None


_ragged_matmul_all_to_all = define(
    "ragged_matmul_all_to_all(Tensor a, Tensor b, Tensor splits, str group, int world_size, SymInt max_rows)"
    " -> (Tensor, Tensor)",
    _Ragged,
    run=_combine,
    fake=_combine_fake,
    save=_combine_save,
    backward=_combine_backward,
)


# Rows go to experts.


def ragged_dispatch(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None,
    splits: torch.Tensor,
    max_rows: int | None,
    *,
    return_received: bool,
) -> tuple[torch.Tensor, ...]:
    """all_to_all_matmul with splits."""
    name, _, world_size = group_of(group)
    experts = _check(a, b, splits, world_size, by_expert=False)
    by_rank, rows = splits.reshape(world_size, experts), _capacity(max_rows)
    results = _ragged_all_to_all_matmul(a, _grouped(b), by_rank, name, world_size, rows, return_received)
    out, counts, *received = results
    return (out, counts if b.dim() == 3 else counts.flatten(), *received)


class _Dispatch(NamedTuple):
    """Options of weft::ragged_all_to_all_matmul."""

    group: str
    world_size: int
    max_rows: int
    return_received: bool


def _dispatch(a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, options: _Dispatch) -> list[torch.Tensor]:
    received, most = options.return_received, options.max_rows
    call = RaggedCall(op=_DISPATCH, a=a, b=b, splits=splits, max_rows=most, return_received=received)
    found = GROUPS.run(options.group, call)
    return [found["out"][0], found["counts"][0], *found.get("received", [])]


def _dispatch_fake(a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, options: _Dispatch) -> list[torch.Tensor]:
    counts = a.new_empty(b.shape[0], options.world_size, dtype=torch.int32)
    received = [a.new_empty(options.max_rows, a.shape[1])] * options.return_received
    return [a.new_empty(options.max_rows, b.shape[2]), counts, *received]


def _dispatch_save(ctx: Any, inputs: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
    a, b, splits, ctx.options = inputs
    ctx.mark_non_differentiable(outputs[1])
    # Zeros for received rows that nobody has used would go through the whole backward.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, b, splits, outputs[1], *outputs[2:])


def _dispatch_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    (a, b, splits, counts, *kept), options = ctx.saved_tensors, ctx.options
    grad = a.new_zeros(options.max_rows, b.shape[2]) if grads[0] is None else grads[0].contiguous()
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        factors, columns = grad, b.transpose(1, 2)
        if options.return_received and grads[2] is not None:
            # The gradient of the received rows goes back with the rest, as a product with 1.
            eye = torch.eye(a.shape[1], dtype=a.dtype, device=a.device).expand(b.shape[0], -1, -1)
            factors, columns = torch.cat([grad, grads[2]], 1), torch.cat([columns, eye], 1)
        home = (options.group, options.world_size, room_home(a.shape[0], options.max_rows))
        back, _ = _ragged_matmul_all_to_all(factors, columns, counts, *home)
        grad_a = back[: a.shape[0]]
    if ctx.needs_input_grad[1]:
        # Exchanging again costs time; keeping what arrived costs max_rows x K of memory from forward to backward.
        rows = kept[0] if kept else _received_again(a, b, splits, options)
        grad_b = grouped_outer(rows, grad, counts.sum(1))
    return grad_a, grad_b, None


def _received_again(a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, options: _Dispatch) -> torch.Tensor:
    again = options._replace(return_received=True)
    rows: torch.Tensor = _ragged_all_to_all_matmul(a, b[:, :, :0], splits, *again)[2]
    return rows


_ragged_all_to_all_matmul = define(
    "ragged_all_to_all_matmul(Tensor a, Tensor b, Tensor splits, str group, int world_size, SymInt max_rows,"
    " bool return_received) -> Tensor[]",
    _Dispatch,
    run=_dispatch,
    fake=_dispatch_fake,
    save=_dispatch_save,
    backward=_dispatch_backward,
)


def ragged_gated(
    a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup | None, splits: torch.Tensor, max_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(left half) * right half of all_to_all_matmul(a, b, splits=splits), which is computed in float32 and never stored.
    b: [experts, K, 2 F]. Returns ([max_rows, F], counts). Without gradients. Raises ValueError for an odd N."""
    name, _, world_size = group_of(group)
    experts = _check(a, b, splits, world_size, by_expert=False)
    if b.dim() != 3 or b.shape[2] % 2:
        raise ValueError(f"b is {shape_of(b)}; to be gated it must be [experts, K, 2 F]")
    by_rank, rows = splits.reshape(world_size, experts), _capacity(max_rows)
    out, counts = _ragged_all_to_all_gated(a, b, by_rank, name, world_size, rows)
    return out, counts


def _gated(a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, options: _Ragged) -> tuple[torch.Tensor, torch.Tensor]:
    return _ran(RaggedCall(op=_DISPATCH, a=a, b=b, splits=splits, max_rows=options.max_rows, gated=True), options.group)


def _gated_fake(a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, options: _Ragged) -> tuple[torch.Tensor, torch.Tensor]:
    counts = a.new_empty(b.shape[0], options.world_size, dtype=torch.int32)
    return a.new_empty(options.max_rows, b.shape[2] // 2), counts


_ragged_all_to_all_gated = define(
    "ragged_all_to_all_gated(Tensor a, Tensor b, Tensor splits, str group, int world_size, SymInt max_rows)"
    " -> (Tensor, Tensor)",
    _Ragged,
    run=_gated,
    fake=_gated_fake,
)


# What they share.


def _ran(call: RaggedCall, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the counts of what arrived."""
    found = GROUPS.run(group, call)
    return found["out"][0], found["counts"][0]


def refuse_max_rows(max_rows: int | None) -> None:
    if max_rows is not None:
        raise ValueError(f"max_rows is {max_rows}, but splits is None; give both, or neither for even shares")


def refuse_schedule(schedule: str | Schedule) -> None:
    if schedule != "auto":
        raise ValueError(f"schedule is {schedule}; with splits there is one schedule, use 'auto'")


def _grouped(b: torch.Tensor) -> torch.Tensor:
    return b if b.dim() == 3 else b[None]


def _capacity(max_rows: int | None) -> int:
    if not isinstance(max_rows, int) or isinstance(max_rows, bool) or max_rows < 1:
        raise ValueError(f"max_rows is {max_rows!r}; with splits, say how many rows may arrive at most, 1 or more")
    return max_rows


def _check(a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, world_size: int, *, by_expert: bool) -> int:
    """The number of experts."""
    if not isinstance(b, torch.Tensor) or b.dim() not in (2, 3) or (b.dim() == 3 and not b.shape[0]):
        raise ValueError(f"b is {shape_of(b)}; with splits it must be a matrix, or [experts, K, N] with an expert or more")
    check_operands(a, [_grouped(b)[0]])
    if a.dim() != 2:
        raise ValueError(f"a is {shape_of(a)}; with splits it must be a matrix")
    experts = b.shape[0] if b.dim() == 3 else 1
    extents = (experts, world_size) if by_expert else (world_size, experts)
    shapes = [extents] + ([(world_size,)] if experts == 1 else []) + ([] if by_expert else [(world_size * experts,)])
    if not isinstance(splits, torch.Tensor) or tuple(splits.shape) not in shapes:
        raise ValueError(f"splits is {shape_of(splits)}; for this b and group it must be {' or '.join(map(str, shapes))}")
    if splits.dtype not in (torch.int32, torch.int64) or splits.device != a.device:
        raise ValueError(f"splits is {splits.dtype} on {splits.device}; it must be int32 or int64 on {a.device}, as a is")
    return experts


def room(rows: int) -> int:
    """A max_rows for at least so many rows. It takes few different values, since each is a program with memory of its own, and
    is at most an eighth larger. A number that torch.compile does not know is returned as it is.

    >>> [room(rows) for rows in (0, 7, 16, 17, 1000, 16384)]
    [1, 7, 16, 18, 1024, 16384]
    """
    if not isinstance(rows, int):
        return max(1, rows)
    step = 1 << max(0, rows.bit_length() - 4)
    return max(1, -(-rows // step) * step)


def room_home(rows: int, most: int) -> int:
    """A max_rows for so many rows that come home from experts with room for `most`, on all ranks the same.

    A program has room for as many products as it brings home. With `most`, calls with the same rows and other numbers of
    products share a program. If that is more than twice the rows, it would take too much memory, and room(rows) is returned.

    >>> room_home(32, 40), room_home(32, 64), room_home(32, 256)
    (40, 64, 32)
    """
    if not isinstance(rows, int) or not isinstance(most, int) or most > 2 * rows:
        return room(rows)
    return max(room(rows), most)


def grouped_outer(rows: torch.Tensor, grads: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """rows_e^T @ grads_e of each expert: [E, K, N]. counts: [E] rows of each, on the device. Rows past their sum, whatever they
    hold, add nothing."""
    ends = counts.cumsum(0)
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        if torch.is_grad_enabled():  # the backward of grouped_mm writes nothing past the last end
            place = torch.arange(rows.shape[0], device=rows.device)[:, None]
            rows, grads = (torch.where(place < ends[-1], each, 0) for each in (rows, grads))
        # What lies past the last end is in no group, and is not read.
        return grouped_mm(_aligned(rows).t(), _aligned(grads), ends)
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
