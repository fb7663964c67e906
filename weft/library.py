"""The operators as torch sees them: torch.library definitions in the namespace weft, with fakes and backward.

    weft::all_gather_matmul(a [m, K], bs [K, n]..., ...)   -> [out [M, n], ..., gathered [M, K] if asked for]
    weft::matmul_reduce_scatter(a [M, k], b [k, N], ...)   -> out [m, N]

They take flat matrices and a group's name; weft.ops is the way in for people. Each backward is the other operator: what was
gathered is scattered, what was scattered is gathered, overlapped with the matmul as in the forward.

    all_gather_matmul       grad_a = reduce_scatter(grad_out @ b^T)      grad_b = all_gather(a)^T @ grad_out
    matmul_reduce_scatter   grad_a = all_gather(grad_out) @ b^T          grad_b = a^T @ all_gather(grad_out)

Defined through torch.library.Library, not the custom_op decorator: that one's wrapper loads torch._dynamo at the first
call, and once that is loaded beside a process group, the group's threads outlive its destruction (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from weft import schedules
from weft.execute.groups import GROUPS, Call
from weft.problem import Op, split

_LIBRARY = torch.library.Library("weft", "DEF")  # type: ignore[no-untyped-call]
_SCHEMAS = (
    "all_gather_matmul(Tensor a, Tensor[] bs, str group, SymInt rows, SymInt unit, str schedule, bool return_gathered)"
    " -> Tensor[]",
    "matmul_reduce_scatter(Tensor a, Tensor b, str group, int rank, int world_size, SymInt unit, str schedule, str op)"
    " -> Tensor",
)
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]


def _gather(
    a: torch.Tensor, bs: list[torch.Tensor], group: str, rows: int, unit: int, schedule: str, return_gathered: bool
) -> list[torch.Tensor]:
    call = Call(
        op="all_gather_matmul", a=a, bs=bs, rows=rows, row_multiple=unit, schedule=schedule, return_gathered=return_gathered
    )
    outputs = GROUPS.run(group, call)
    return outputs["out"] + outputs.get("gathered", [])


def run_gather(
    a: torch.Tensor, bs: list[torch.Tensor], group: str, rows: int, unit: int, schedule: str, return_gathered: bool
) -> list[torch.Tensor]:
    """weft::all_gather_matmul."""
    way = _gather if _unseen(a, *bs) else torch.ops.weft.all_gather_matmul
    return way(a, bs, group, rows, unit, schedule, return_gathered)


def run_scatter(
    a: torch.Tensor, b: torch.Tensor, group: str, rank: int, world_size: int, unit: int, schedule: str, op: str
) -> torch.Tensor:
    """weft::matmul_reduce_scatter."""
    way = _scatter if _unseen(a, b) else torch.ops.weft.matmul_reduce_scatter
    return way(a, b, group, rank, world_size, unit, schedule, op)


def _unseen(*tensors: torch.Tensor) -> bool:
    """Whether nobody but the caller looks at this call: no gradient, tracer, mode or subclass. Then torch's dispatch, some 15
    us of host time, has nothing to do."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    grad = torch.is_grad_enabled()
    return all(type(t) in (torch.Tensor, torch.nn.Parameter) and not (grad and t.requires_grad) for t in tensors)


def _gather_fake(
    a: torch.Tensor, bs: list[torch.Tensor], group: str, rows: int, unit: int, schedule: str, return_gathered: bool
) -> list[torch.Tensor]:
    return [a.new_empty(rows, b.shape[1]) for b in bs] + [a.new_empty(rows, a.shape[1])] * return_gathered


def _scatter(
    a: torch.Tensor, b: torch.Tensor, group: str, rank: int, world_size: int, unit: int, schedule: str, op: str
) -> torch.Tensor:
    reduce_op = cast(Literal["sum", "avg"], op)
    call = Call(
        op="matmul_reduce_scatter", a=a, bs=[b], rows=a.shape[0], row_multiple=unit, schedule=schedule, reduce_op=reduce_op
    )
    return GROUPS.run(group, call)["out"][0]


def _scatter_fake(
    a: torch.Tensor, b: torch.Tensor, group: str, rank: int, world_size: int, unit: int, schedule: str, op: str
) -> torch.Tensor:
    low, high = split(a.shape[0] // unit, world_size)[rank]
    return a.new_empty((high - low) * unit, b.shape[1])


def _gather_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    a, bs, ctx.group, ctx.rows, ctx.unit, ctx.schedule, ctx.gathered = inputs
    ctx.save_for_backward(a, *bs)


def _gather_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    a, *bs = ctx.saved_tensors
    outs = [_or_zeros(grad, ctx.rows, b.shape[1], a) for grad, b in zip(grads, bs, strict=False)]
    grad_a, grad_bs = None, [None] * len(bs)
    if ctx.needs_input_grad[0]:
        factors, columns = [*outs], [*bs]
        if ctx.gathered and grads[-1] is not None:
            # What flows into the gathered a goes back to its owners by the same reduce-scatter, as a product with 1.
            factors.append(grads[-1])
            columns.append(torch.eye(a.shape[1], dtype=a.dtype, device=a.device))
        group = _resolve_process_group(ctx.group)
        grad_a = torch.ops.weft.matmul_reduce_scatter(
            _side_by_side(factors),
            _side_by_side(columns).t(),
            ctx.group,
            dist.get_rank(group),
            dist.get_world_size(group),
            ctx.unit,
            _backward_schedule(ctx.schedule, "matmul_reduce_scatter"),
            "sum",
        )
    if any(ctx.needs_input_grad[1]):
        # Gathering again costs time; keeping the gathered a would cost M x K of memory from forward to backward.
        nothing = a.new_empty(a.shape[1], 0)
        gathered = torch.ops.weft.all_gather_matmul(a, [nothing], ctx.group, ctx.rows, ctx.unit, "sequential", True)[-1]
        grad_bs = [gathered.t() @ grad for grad in outs]
    return grad_a, grad_bs, None, None, None, None, None


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
        _backward_schedule(ctx.schedule, "all_gather_matmul"),
        True,
    )
    return grad_a, a.t() @ gathered, None, None, None, None, None, None


def _side_by_side(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """One matrix of them all; a single one as it is (a copy of a weight costs as much as its collective)."""
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices), 1)


def _or_zeros(grad: torch.Tensor | None, rows: int, cols: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros(rows, cols) if grad is None else grad


def _backward_schedule(schedule: str, op: Op) -> str:
    """A family that was asked for serves both ways where `op`, the other one, has it. Where it has not, and for a Schedule
    value, which is for the forward's problem alone, the way back is auto."""
    family = schedule.partition(":")[0]
    alone = family in schedules.NAMES and family not in schedules.names(op)
    return "auto" if alone or schedule.startswith("value:") else schedule


for _name, _run, _fake, _context, _backward in (
    ("all_gather_matmul", _gather, _gather_fake, _gather_context, _gather_backward),
    ("matmul_reduce_scatter", _scatter, _scatter_fake, _scatter_context, _scatter_backward),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"weft::{_name}", _fake, lib=_LIBRARY)
    torch.library.register_autograd(f"weft::{_name}", _backward, setup_context=_context, lib=_LIBRARY)
