"""The products of linears with sharded weights by weft's operators, and their gradients.

    x [.., M, .., K]          tokens along `dim`; the caller has all M of them ("whole") or this rank's m
    weights [n, K]            a column-sharded linear's part: n of N outputs             bias [n]
    weight [N, k]             a row-sharded one's: k of K inputs                         bias [N]

    tokens are    columns(x, weights)                                rows(x, weight)
    sharded       all_gather_matmul                                  matmul_reduce_scatter
    whole         matmul; its gradient by matmul_all_reduce          matmul_all_reduce

The gradient of a row-sharded linear's bias is this rank's part of it, if tokens are sharded. The caller sums it over ranks.

QuantisedProducts are for linears of FP8 checkpoints that transformers keeps in FP8, for inference:

    module of transformers        weight [N, K] of FP8, and its scales            its input is quantised
    FP8Linear                     weight_scale_inv [N / 128, K / 128]             1 x 128
    CompressedTensorsFP8Linear    weight_scale [1, N], of compressed-tensors      by row

Weight and scales are cut together. Each product quantises its input: a scale is the largest magnitude divided by 448, the
largest value of float8_e4m3fn. If the input of a row-sharded linear is quantised by row, each rank's part of a row has its own
scale. Column linears whose tokens are whole multiply without communication.

An operator compares all arguments of a call with those of earlier ones. In a module most of them cannot have changed: they are
the module's settings, and its parameters. So a RepeatedProduct looks at the input, and at whether the parameters are the same
objects, and then makes the operator's remembered call (weft.ops.front) directly. If autograd records the call, its node takes
the parameters, and not this rank's parts of them: a part of its own in the graph would be a further node for each parameter.

    x, parameters (DTensors)  -->  one node: reads the parts, runs the operator  -->  products
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft import schedules
from weft.compat.dispatch import autocast_enabled, layout_check, thread_state
from weft.core.problem import FLOAT8_UNIT, SCALE_BLOCK, Op, Recipe, split
from weft.models.parameters import ModuleParameter, kept_parameter, part_of
from weft.ops.all_reduce import matmul_all_reduce
from weft.ops.column_parallel import column_parallel_linears, quantised_linears
from weft.ops.common import FLOAT8, choose_backward_schedule
from weft.ops.front import find_remembered, make_recorded, repeat
from weft.ops.operator import Recording
from weft.ops.tensor_parallel import all_gather_matmul, matmul_reduce_scatter
from weft.runtime.bound_call import PLAIN, RememberedCall
from weft.runtime.choose import MODES
from weft.runtime.groups import GROUPS

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A call of an operator: the operator, its arguments and its options."""
_MOST = 64
"""The most kinds of calls that one place of a model keeps. With one more it forgets all."""


class _Transposed:
    """A linear's weight [n, K], as the operator's factor [K, n] (weft.ops.operator.Reading)."""

    def __init__(self, kept: ModuleParameter) -> None:
        self._kept = kept

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._kept.part_of(parameter).t()

    def restore(self, grad: torch.Tensor) -> torch.Tensor:
        return self._kept.gradient_of(grad.t())


class RepeatedProduct:
    """The product of an input with the weights of some linears, at one place of a model. A copy of the model has its own."""

    def __init__(self) -> None:
        self._calls: dict[Any, tuple[Callable[..., bool], RememberedCall | None, Recording | None]] = {}
        """For each kind of call: what checks its tensors, the operator's call, and its Recording if autograd records it. A call
        that must be made in another way has None."""

    def __reduce__(self) -> tuple[type[RepeatedProduct], tuple[()]]:
        return RepeatedProduct, ()

    def multiply(self, x: torch.Tensor, linears: Sequence[nn.Module], make: Callable[..., Call], *where: Any) -> Any:
        """Return what the operator returns. Return None if it must be called in another way. It is for eager calls.

        make: returns the operator's call, memory x, the factors [K, n] and `where`.
        where: what else may differ between the calls of this place.
        """
        state = thread_state(x.dtype)
        tensors, memory = [x], [x]
        for linear in linears:
            parameter = linear._parameters.get("weight")
            if parameter is None:  # a parametrization computes it
                return None
            kept = kept_parameter(linear, "weight")
            tensors.append(parameter)
            memory.append(kept.transposed(parameter))
            if kept.is_moved:  # the other way checks the layout that it has now
                return None
        kind = x.shape, where, state, len(linears), id(linears[0])
        call = self._calls.get(kind)
        if call is not None:
            check, known, recording = call
            if check(*tensors, *memory[1:]):
                if known is None:
                    return None
                if (made := repeat(known, recording, tensors, memory)) is not None:
                    return made
        return self._begin(kind, tensors, memory, linears, make)

    def _begin(
        self,
        kind: tuple[Any, ...],
        tensors: Sequence[Any],
        memory: Sequence[torch.Tensor],
        linears: Sequence[nn.Module],
        make: Callable[..., Call],
    ) -> Any:
        """Make a call for the first time, and keep what `multiply` needs."""
        (_, where, state, *_), x, check = kind, memory[0], layout_check([*tensors, *memory[1:]])
        if state is None or check is None or autocast_enabled() or type(x) not in PLAIN:  # autocast multiplies copies
            return None
        if len(self._calls) >= _MOST:
            self._calls.clear()
        self._calls[kind] = check, None, None
        recording: Recording | None = None
        if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
            weights = [_Transposed(kept_parameter(linear, "weight")) for linear in linears]
            # These parts are for the operator's checks, which ask whether factors require gradients. The node takes `tensors`.
            factors = [kept_parameter(linear, "weight").part(one).t() for linear, one in zip(linears, tensors[1:], strict=True)]
            found = make_recorded(*make(x, factors, *where), tensors, memory, weights)
            if found is None:
                return None
            result, known, recording = found
            GROUPS.remembered.watch(known)
        else:
            operator, arguments, options = make(x, memory[1:], *where)
            result, last = operator(*arguments, **options), find_remembered(operator, arguments, options)
            if last is None or last.bound is None:
                return result
            known = last
        self._calls[kind] = check, known, recording
        return result


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


class Kind(NamedTuple):
    """A class of FP8 linears. scales: the name of the parameter with the scales."""

    scales: str
    recipe: Recipe

    def placement(self, scales: Tensor, weight: Placement) -> Placement:
        """Return the layout of the scales for a layout of the weight [N, K]."""
        if self.recipe == "blockwise":
            return weight
        return Shard(0 if scales.shape[1] == 1 else 1) if weight == Shard(0) else Replicate()


_KINDS = {
    ("transformers.integrations.finegrained_fp8", "FP8Linear"): Kind("weight_scale_inv", "blockwise"),
    ("transformers.integrations.compressed_tensors", "CompressedTensorsFP8Linear"): Kind("weight_scale", "rowwise"),
}
"""The kinds, by module and name of the class. Names are used because transformers is optional."""
_NAMES: dict[Recipe, str] = {"rowwise": "RowWise", "blockwise": "BlockWise128x128"}
"""Names in torch.nn.functional.ScalingType. A small b may have a single scale with either recipe, so its size cannot tell them
apart."""


def kind_of(module: nn.Module) -> Kind | None:
    """Return the kind of an FP8 linear that is not sharded yet, or None for other modules."""
    return _KINDS.get((type(module).__module__, type(module).__qualname__))


def why_not_quantised(module: nn.Module, kind: Kind) -> str:
    """Return why weft cannot multiply by a linear of this kind, or "" if it can."""
    linear, scales = cast(Any, module), getattr(module, kind.scales)
    if "forward" in module.__dict__:
        return "its forward was put on the module itself"
    if linear.weight.dtype not in FLOAT8:
        return f"its weight is of {linear.weight.dtype}, not of FP8"
    if scales.dtype != torch.float32:
        return f"its {kind.scales} is of {scales.dtype}; weft multiplies by scales of float32"
    if kind.recipe == "blockwise" and tuple(linear.block_size or ()) != (SCALE_BLOCK, SCALE_BLOCK):
        return f"its block_size is {linear.block_size}; weft multiplies blocks of {SCALE_BLOCK} x {SCALE_BLOCK}"
    if getattr(linear, "activation_scheme", "dynamic") != "dynamic":
        return f"its activation_scheme is {linear.activation_scheme!r}; weft quantises by scales of the input, 'dynamic'"
    return ""


def check_sizes(name: str, linear: nn.Module, kind: Kind, *, row: bool, ranks: int) -> None:
    """Raise ValueError if a linear's parts would cut a block of scales, or have sizes that FP8 products do not take.

    name: the name of the linear in the model.
    row: cut along K, the inputs. Otherwise it is cut along N, the outputs.
    """
    found = cast(nn.Linear, linear)
    n, k, unit = found.out_features, found.in_features, SCALE_BLOCK if kind.recipe == "blockwise" else FLOAT8_UNIT
    parts = [high - low for low, high in split(k if row else n, ranks)]
    other, needed = (n, FLOAT8_UNIT) if row else (k, unit)
    if other % needed or any(part % unit or not part for part in parts):
        cut, whole = ("inputs", "outputs") if row else ("outputs", "inputs")
        raise ValueError(
            f"{name} is a {type(linear).__name__} of {k} inputs and {n} outputs, whose {cut} would be cut into {parts} on "
            f"{ranks} ranks; with {kind.recipe} scales a part must be a multiple of {unit}, and its {whole} one of {needed}: "
            "use a number of ranks that gives such parts, or a checkpoint that is not of FP8"
        )


@dataclass(frozen=True)
class QuantisedProducts(LinearProducts):
    """The products of FP8 linears of one kind. A weight is this rank's part of it, in the module's layout, and scale_b of
    weight^T."""

    kind: Kind
    depends_on_weights_alone: ClassVar[bool] = False

    def weight_of(self, linear: nn.Linear, eager: bool) -> tuple[Tensor, Tensor]:
        scales = part_of(linear, self.kind.scales, eager=eager)
        return super().weight_of(linear, eager), scales.t() if self.kind.recipe == "blockwise" else scales.reshape(1, -1)

    def _operands(self, x: Tensor, weights: Sequence[Any]) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
        scales = [scale_b for _, scale_b in weights]
        return (
            _input(x),
            [elements.t() for elements, _ in weights],
            {"scale_b": scales, "scale_recipe_b": _NAMES[self.kind.recipe]},
        )

    def _of_whole(self, x: Tensor, weights: Sequence[Any], exchange: TokenExchange) -> list[Tensor]:
        elements, scales = zip(*weights, strict=True)
        return quantised_linears(_input(x), elements, scales, self.kind.recipe)


def _input(x: Tensor) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(
            "a linear with FP8 weights is called with an input that requires gradients, which weft has for none of FP8: call "
            "the model under torch.no_grad() or torch.inference_mode()"
        )
    return in_one_dtype(x, [])[0]
