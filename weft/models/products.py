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
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from weft import schedules
from weft.core.problem import Op
from weft.models.parameters import part_of
from weft.models.repeated import Call
from weft.ops.all_reduce import matmul_all_reduce
from weft.ops.column_parallel import column_parallel_linears
from weft.ops.common import choose_backward_schedule
from weft.ops.tensor_parallel import all_gather_matmul, matmul_reduce_scatter
from weft.runtime.choose import MODES

Tensor = torch.Tensor


@dataclass(frozen=True)
class LinearProducts:
    """LinearProducts multiplies in the dtype of the weights, of 16 or 32 bits. Subclasses multiply in FP8.

    depends_on_weights_alone: whether a product needs no parameter of its linear but the weight, as it is.
    """

    depends_on_weights_alone: ClassVar[bool] = True

    def weight_of(self, linear: nn.Linear, eager: bool) -> Any:
        """Return this rank's part of a sharded linear's weight, as `columns` and `rows` take it."""
        # torch (2.13) guards compiled code by this rank's part of a DTensor alone, which linears of several widths may share.
        # Read here, their widths become guards, too.
        if not eager and min(linear.in_features, linear.out_features) < 0:
            raise AssertionError(f"{linear} has no widths")
        return part_of(linear, "weight", eager=eager)

    def columns(
        self, x: Tensor, weights: Sequence[Any], biases: Sequence[Tensor | None], exchange: TokenExchange
    ) -> list[Tensor]:
        """Return x @ weight^T + bias for each weight, of all tokens: [.., M, .., n] each.

        x: this rank's part of the tokens as torch.chunk cuts them, or all of them if the exchange has no total.
        """
        if exchange.total is None:
            outs = self._of_whole(x, weights, exchange)
        else:
            x, factors, scales = self._operands(x, weights)
            operator, arguments, options = call_of_columns(x, factors, exchange)
            outs = operator(*arguments, **options, **scales)
        return with_biases(outs, biases)

    def rows(self, x: Tensor, weight: Any, bias: Tensor | None, exchange: TokenExchange) -> Tensor:
        """Return the sum over ranks of x @ weight^T, plus bias.

        It is this rank's part of the tokens, [.., m, .., N], or all of them if the exchange has no total.
        """
        x, (factor,), scales = self._operands(x, [weight])
        if exchange.total is None:
            bias, matrix = None if bias is None else bias.to(x.dtype), x[None] if x.dim() == 1 else x
            schedule = exchange.settings.of("matmul_all_reduce")
            out = matmul_all_reduce(matrix, factor, exchange.group, schedule=schedule, bias=bias, **scales)
            return out[0] if x.dim() == 1 else out
        operator, arguments, options = call_of_rows(x, factor, exchange)
        return with_biases([operator(*arguments, **options, **scales)], [bias])[0]

    def _operands(self, x: Tensor, weights: Sequence[Any]) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
        """Return x and the factors weight^T in the dtypes of the product, and the operator's options of scales."""
        x, *weights = in_one_dtype(x, weights)
        return x, [weight.t() for weight in weights], {}

    def _of_whole(self, x: Tensor, weights: Sequence[Any], exchange: TokenExchange) -> list[Tensor]:
        x, *weights = in_one_dtype(x, weights)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return [torch.nn.functional.linear(x, weight) for weight in weights]
        return column_parallel_linears(x, weights, exchange.group.group_name, exchange.settings.of("matmul_all_reduce"))


@dataclass(frozen=True, kw_only=True)
class ProductSettings:
    """ProductSettings has the settings of a linear's products.

    schedule: as the operators take it. Calls of backward passes, and calls with few tokens, use "auto" if their operator does
        not have that family. For other calls, `require` raises an error.
    keep_gathered: save the gathered input of a column linear for the weights' gradient, as torch's styles do. Otherwise the
        backward pass gathers it again.
    products: how the linear multiplies."""

    schedule: str = "auto"
    keep_gathered: bool = True
    products: LinearProducts = field(default=LinearProducts())

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


class TokenExchange(NamedTuple):
    """An TokenExchange says how the products of one call exchange tokens.

    dim: the dimension of the tokens.
    total: the number of tokens of all ranks along `dim`, or None if every rank has all tokens.
    """

    group: dist.ProcessGroup
    settings: ProductSettings
    dim: int
    total: int | None


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


def call_of_columns(x: Tensor, factors: Sequence[Tensor], exchange: TokenExchange) -> Call:
    """Return the call of `columns` for a part of the tokens. factors: the transposes [K, n] of the weights."""
    group, settings, dim, total = exchange
    schedule, keep = settings.of("all_gather_matmul"), settings.keep_gathered
    return (
        all_gather_matmul,
        (x, list(factors), group),
        {"schedule": schedule, "gather_dim": dim, "rows": total, "keep_gathered": keep},
    )


def call_of_rows(x: Tensor, factor: Tensor, exchange: TokenExchange) -> Call:
    """Return the call of `rows` that scatters tokens. factor: the transpose [k, N] of the weight."""
    options = {"schedule": exchange.settings.of("matmul_reduce_scatter"), "scatter_dim": exchange.dim}
    return matmul_reduce_scatter, (x, factor, exchange.group), options


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


def in_one_dtype(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in autocast's dtype if it is on, as torch's linears do, but not on the meta device.

    torch 2.11 cannot compile is_autocast_available.
    """
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return [x, *weights]
    dtype = torch.get_autocast_dtype(kind)
    return [x.to(dtype), *(weight.to(dtype) for weight in weights)]
