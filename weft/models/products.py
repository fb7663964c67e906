"""The products of linears with sharded weights by weft's operators, and their gradients.

    x [.., M, .., K]          tokens along `dim`; the caller has all M of them ("whole") or this rank's m
    weights [n, K]            a column-sharded linear's part: n of N outputs             bias [n]
    weight [N, k]             a row-sharded one's: k of K inputs                         bias [N]

    tokens are    columns(x, weights)                                rows(x, weight)
    sharded       all_gather_matmul                                  matmul_reduce_scatter
    whole         matmul; its gradient by matmul_all_reduce          matmul_all_reduce

The gradient of a row-sharded linear's bias is this rank's part of it, if tokens are sharded. The caller sums it over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft import schedules
from weft.core.problem import Op
from weft.models.repeated import Call
from weft.ops.all_reduce import matmul_all_reduce
from weft.ops.column_parallel import column_parallel_linears
from weft.ops.common import choose_backward_schedule
from weft.ops.tensor_parallel import all_gather_matmul, matmul_reduce_scatter
from weft.runtime.choose import MODES

if TYPE_CHECKING:
    from weft.models.float8 import Float8Products

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class ProductSettings:
    """ProductSettings has the settings of a linear's products.

    schedule: as the operators take it. Calls of backward passes, and calls with few tokens, use "auto" if their operator does
        not have that family. For other calls, `require` raises an error.
    keep_gathered: save the gathered input of a column linear for the weights' gradient, as torch's styles do. Otherwise the
        backward pass gathers it again.
    float8: the casts and products of linears that torchao converted for FP8 training."""

    schedule: str = "auto"
    keep_gathered: bool = True
    float8: Float8Products | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, str):
            raise ValueError(f"schedule is a {type(self.schedule).__name__}; a module's calls differ in size, so use a name")
        if self.schedule not in MODES:
            schedules.parse(self.schedule)

    def require(self, *ops: Op) -> None:
        """Raise ValueError if the schedule's family lacks one of these operators, which forward passes call."""
        for op in ops if self.schedule not in MODES else ():
            schedules.check_op(schedules.parse(self.schedule)[0], op)

    def of(self, op: Op) -> str:
        """Return the schedule for an operator."""
        return self.schedule if self.schedule in MODES else choose_backward_schedule(self.schedule, op)


def columns(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: dist.ProcessGroup,
    settings: ProductSettings,
    *,
    dim: int = 1,
    total: int | None = None,
) -> list[Tensor]:
    """Return x @ weight^T + bias for each weight, of all tokens: [.., M, .., n] each.

    total: M, if x has this rank's part of the tokens as torch.chunk cuts them, or None if x is whole.
    """
    if settings.float8 is not None:
        outs = settings.float8.columns(x, weights, group, settings, dim=dim, total=total)
    else:
        outs = _columns(*in_one_dtype(x, weights), group=group, settings=settings, dim=dim, total=total)
    return with_biases(outs, biases)


def with_biases(outs: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Return each product plus its bias."""
    return [out if bias is None else _with_bias(out, bias) for out, bias in zip(outs, biases, strict=True)]


def _with_bias(out: Tensor, bias: Tensor) -> Tensor:
    if bias.dtype == out.dtype:
        return out + bias
    found: Tensor = _AddBias.apply(out, bias)  # type: ignore[no-untyped-call]
    return found


class _AddBias(torch.autograd.Function):
    """Adds a bias of a wider dtype, as under autocast. Its gradient is summed over rows, and then over ranks, in that dtype.
    A cast of the bias would round the sum over this rank's rows."""

    @staticmethod
    def forward(out: Tensor, bias: Tensor) -> Tensor:
        return out + bias.to(out.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        rows = grads[0][None]  # torch.sum over no dimension would sum over all of them
        return grads[0], rows.sum(tuple(range(rows.dim() - 1)), dtype=ctx.dtype)


def call_of_columns(
    x: Tensor, factors: Sequence[Tensor], group: dist.ProcessGroup, settings: ProductSettings, *, dim: int, total: int
) -> Call:
    """Return the call that `columns` makes for a part of the tokens. factors: the transposes [K, n] of the weights."""
    options = {
        "schedule": settings.of("all_gather_matmul"),
        "gather_dim": dim,
        "rows": total,
        "keep_gathered": settings.keep_gathered,
    }
    return all_gather_matmul, (x, list(factors), group), options


def call_of_rows(x: Tensor, factor: Tensor, group: dist.ProcessGroup, settings: ProductSettings, *, dim: int) -> Call:
    """Return the call that `rows` makes to scatter tokens. factor: the transpose [k, N] of the weight."""
    options = {"schedule": settings.of("matmul_reduce_scatter"), "scatter_dim": dim}
    return matmul_reduce_scatter, (x, factor, group), options


def rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: dist.ProcessGroup,
    settings: ProductSettings,
    *,
    dim: int = 1,
    scatter: bool,
) -> Tensor:
    """Return the sum over ranks of x @ weight^T, plus bias.

    scatter: return this rank's part of the tokens along `dim`, [.., m, .., N]. Otherwise return all of them.
    """
    if settings.float8 is not None:
        out = settings.float8.rows(x, weight, group, settings, dim=dim, scatter=scatter)
    else:
        x, weight = in_one_dtype(x, [weight])
        if not scatter:
            bias = None if bias is None else bias.to(x.dtype)
            matrix = x[None] if x.dim() == 1 else x
            out = matmul_all_reduce(matrix, weight.t(), group, schedule=settings.of("matmul_all_reduce"), bias=bias)
            return out[0] if x.dim() == 1 else out
        operator, arguments, options = call_of_rows(x, weight.t(), group, settings, dim=dim)
        out = operator(*arguments, **options)
    return with_biases([out], [bias])[0]


def _columns(
    x: Tensor, *weights: Tensor, group: dist.ProcessGroup, settings: ProductSettings, dim: int, total: int | None
) -> list[Tensor]:
    if total is None:
        return _of_whole(x, weights, group, settings)
    operator, arguments, options = call_of_columns(x, [weight.t() for weight in weights], group, settings, dim=dim, total=total)
    found: list[Tensor] = operator(*arguments, **options)
    return found


def ops_of_columns(total: int | None) -> tuple[Op, ...]:
    """Return the operators that `columns` runs."""
    return () if total is None else ("all_gather_matmul",)


def backward_ops_of_columns(x: Tensor, total: int | None) -> tuple[Op, ...]:
    """Return the operators that the backward pass of `columns` runs for the gradient of x."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return ()
    return ("matmul_all_reduce",) if total is None else ("matmul_reduce_scatter",)


def ops_of_rows(scatter: bool) -> tuple[Op, ...]:
    """Return the operators that `rows` runs."""
    return ("matmul_reduce_scatter",) if scatter else ("matmul_all_reduce",)


def backward_ops_of_rows(scatter: bool) -> tuple[Op, ...]:
    """Return the operators that the backward pass of `rows` runs."""
    return ("all_gather_matmul",) if scatter and torch.is_grad_enabled() else ()


def _of_whole(x: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup, settings: ProductSettings) -> list[Tensor]:
    if not (torch.is_grad_enabled() and x.requires_grad):
        return [torch.nn.functional.linear(x, weight) for weight in weights]
    return column_parallel_linears(x, weights, group.group_name, settings.of("matmul_all_reduce"))


def in_one_dtype(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in autocast's dtype if it is on, as torch's linears do, but not on the meta device.

    torch 2.11 cannot compile is_autocast_available.
    """
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return [x, *weights]
    dtype = torch.get_autocast_dtype(kind)
    return [x.to(dtype), *(weight.to(dtype) for weight in weights)]
