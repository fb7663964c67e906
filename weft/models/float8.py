"""FP8 training by torchao: what its Float8Linear computes with a sharded weight, by weft's operators with FP8 operands.

    product       column-sharded weight [n, K]                        row-sharded weight [N, k]
    output        all_gather_matmul(x8 [m, K], w8^T)                  matmul_reduce_scatter(x8 [M, k], w8^T)
    grad_input    matmul_reduce_scatter(g8 [M, n], w8)                all_gather_matmul(g8 [m, N], w8)
    grad_weight   g8^T @ x8 of all ranks' rows, a local product       g8 of all ranks' rows ^T @ x8, a local product

If every rank has all tokens, the output of columns is a local product, and matmul_all_reduce computes the other sums over
ranks.

The Float8LinearConfig of the module says what is cast, to which dtype, and with which scales. torchao's own functions cast:

    tensorwise    One scale for all ranks' parts of a tensor: its largest value is all-reduced, as DTensor does for torchao.
    axiswise      A scale for each row, or column, of a rank's part. If the scaled axis is sharded and the product is a
                  partial sum, each rank has its own scales. If rows are gathered and then summed over (grad_weight), the
                  largest values of columns are all-reduced.

Several column linears that share an input (Q, K and V) have one product for grad_input, in which their gradients share a scale.
torchao's scales multiply the values that are cast to FP8. weft's scales multiply the product, as in
torch.nn.functional.scaled_mm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType
from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax

from weft.core.problem import FLOAT8_UNIT, split
from weft.models.products import LinearProducts, TokenExchange, in_one_dtype, with_biases
from weft.ops.all_reduce import matmul_all_reduce
from weft.ops.common import FLOAT8, make_empty_operand_after
from weft.ops.tensor_parallel import all_gather_matmul, matmul_reduce_scatter

Tensor = torch.Tensor
INPUT, WEIGHT, GRAD_OUTPUT = GemmInputRole.INPUT, GemmInputRole.WEIGHT, GemmInputRole.GRAD_OUTPUT
TENSORWISE = ScalingGranularity.TENSORWISE


@cache
def of_float8(kind: type[Any]) -> type[Any]:
    """Return a Float8Linear class like `kind`, a linear with a sharded weight. torchao recognises its linears by their base
    class."""
    return type(f"Float8{kind.__name__}", (kind, Float8Linear), {})


class _Operand(NamedTuple):
    """A matrix to cast.

    axis: the dimension that its product sums over.
    second: the cast is for the second of the two products that use the matrix.
    sharded: each rank has a part of the matrix.
    gathered: the parts are concatenated along `axis` before the product.
    scale: the scale, if it is already known.
    """

    matrix: Tensor
    role: GemmInputRole
    axis: int
    second: bool = False
    sharded: bool = True
    gathered: bool = False
    scale: Tensor | None = None


@dataclass(frozen=True)
class Float8Products(LinearProducts):
    """The casts and products of a Float8Linear, from its config and its linear_mm_config."""

    config: Float8LinearConfig
    products: LinearMMConfig
    depends_on_weights_alone: ClassVar[bool] = False

    def columns(
        self, x: Tensor, weights: Sequence[Any], biases: Sequence[Tensor | None], exchange: TokenExchange
    ) -> list[Tensor]:
        call = self._call(x, weights, exchange)
        return with_biases(_Columns.apply(call, in_one_dtype(x, [])[0], *weights), biases)  # type: ignore[no-untyped-call]

    def rows(self, x: Tensor, weight: Any, bias: Tensor | None, exchange: TokenExchange) -> Tensor:
        call = self._call(x, [weight], exchange)
        out = _Rows.apply(call, in_one_dtype(x, [])[0], weight)  # type: ignore[no-untyped-call]
        return with_biases([out], [bias])[0]

    def _call(self, x: Tensor, weights: Sequence[Tensor], exchange: TokenExchange) -> _Call:
        """Return the settings of a call.

        Raises ValueError for an input that torchao's styles have cast, and for a number of tokens that FP8 does not support.
        """
        if tensor_already_casted_to_fp8(x):
            raise ValueError(
                "the input of a Float8Linear is a Float8TrainingTensor; weft's styles cast it themselves: use "
                "weft.SharedInput in the place of PrepareFloat8ModuleInput, and weft's styles on the linears before it"
            )
        rows = x[..., 0].numel()
        if exchange.total is not None:
            rows = rows // max(x.shape[exchange.dim], 1) * exchange.total
        trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
        if trained and rows % FLOAT8_UNIT and not self.products.grad_weight.emulate and self.casts(INPUT, second=True):
            raise ValueError(
                f"a Float8Linear is called with {rows} tokens, which the weight's gradient sums over in FP8; use a multiple of "
                f"{FLOAT8_UNIT}, or the recipe rowwise_with_gw_hp, which has that product in high precision"
            )
        return _Call(self, exchange)

    def cast_config(self, role: GemmInputRole, *, second: bool) -> CastConfig:
        """Return how an operand is cast for the first, or second, of its two products."""
        config = self.config
        both = {
            INPUT: (config.cast_config_input, config.cast_config_input_for_grad_weight),
            WEIGHT: (config.cast_config_weight, config.cast_config_weight_for_grad_input),
            GRAD_OUTPUT: (config.cast_config_grad_output, config.cast_config_grad_output_for_grad_weight),
        }
        return cast(CastConfig, both[role][second])

    def casts(self, role: GemmInputRole, *, second: bool) -> bool:
        """Return whether an operand is cast to FP8. Otherwise it is multiplied in high precision."""
        return self.cast_config(role, second=second).scaling_type is not ScalingType.DISABLED

    def one_scale(self, role: GemmInputRole) -> bool:
        """Return whether an operand has one scale, the same in both of its products."""
        both = [self.cast_config(role, second=second) for second in (False, True)]
        return all(one.scaling_type is ScalingType.DYNAMIC and one.scaling_granularity is TENSORWISE for one in both)

    def cast(self, group: dist.ProcessGroup, *operands: _Operand) -> list[Any]:
        """Cast operands to FP8, with one all-reduce for all scales that ranks share.

        Operands that are FP8 already, and those that the config leaves in high precision, are not changed.
        """
        configs = [self.cast_config(one.role, second=one.second) for one in operands]
        scales = [one.scale for one in operands]
        amaxes, shared = {}, []
        for at, (one, config) in enumerate(zip(operands, configs, strict=True)):
            if tensor_already_casted_to_fp8(one.matrix) or config.scaling_type is ScalingType.DISABLED:
                scales[at] = None
                continue
            if one.scale is not None:
                continue
            granularity = config.scaling_granularity
            matrix = one.matrix
            if not matrix.numel() and (granularity is TENSORWISE or one.axis == 0):
                matrix = matrix.new_zeros(1, matrix.shape[1])  # a rank without tokens
            amaxes[at] = tensor_to_amax(matrix, scaling_granularity=granularity, axiswise_dim=one.axis).float()
            if one.sharded and (one.gathered or granularity is TENSORWISE):
                shared.append(at)
        if shared:
            largest = _largest(torch.cat([amaxes[at].flatten() for at in shared]), group)
            parts = torch.split(largest, [amaxes[at].numel() for at in shared])
            amaxes |= {at: part.view_as(amaxes[at]) for at, part in zip(shared, parts, strict=True)}
        for at, amax in amaxes.items():
            scales[at] = amax_to_scale(amax, configs[at].target_dtype, self.config.round_scales_to_power_of_2)
        return [
            one.matrix
            if scale is None
            else hp_tensor_and_scale_to_float8(
                one.matrix,
                scale,
                config.target_dtype,
                self.products,
                one.role,
                get_maybe_axiswise_dim(one.axis, config.scaling_granularity),
            )
            for one, config, scale in zip(operands, configs, scales, strict=True)
        ]


class _Call(NamedTuple):
    casts: Float8Products
    exchange: TokenExchange

    @property
    def sharded(self) -> bool:
        return self.exchange.total is not None

    def cast(self, *operands: _Operand) -> list[Any]:
        return self.casts.cast(self.exchange.group, *operands)

    def gather_matmul(self, a: Any, bs: Sequence[Any], like: Tensor, fast: bool, *, gathered: bool) -> list[Tensor]:
        """Return all_gather(a) @ b for each b, and then the elements of the gathered a if `gathered` is True.

        a: the rows of a tensor [.., m, .., K].
        like: a tensor with that shape except for the last dimension, and with the result's dtype.
        """
        shape = (*like.shape[:-1], a.shape[1])
        pairs = [_scales(a, b, shape) for b in bs]
        options: dict[str, Any] = {
            "schedule": self.exchange.settings.of("all_gather_matmul"),
            "return_gathered": gathered,
            "gather_dim": self.exchange.dim,
            "rows": self.exchange.total,
            "scale_a": pairs[0][0],
            "scale_b": [scale for _, scale in pairs],
            "output_dtype": like.dtype,
            "use_fast_accum": fast,
        }
        found = all_gather_matmul(a._data.view(shape), [_by_columns(b._data) for b in bs], self.exchange.group, **options)
        return [*found[0], found[1]] if gathered else list(found)

    def matmul_reduce(self, a: Any, b: Any, like: Tensor, fast: bool) -> Tensor:
        """Return the sum over ranks of a @ b, for this rank's part of the tokens if they are sharded, else for all tokens."""
        shape = (*like.shape[:-1], a.shape[1]) if self.sharded else tuple(a.shape)
        scale_a, scale_b = _scales(a, b, shape)
        scales: Any = {"scale_a": scale_a, "scale_b": scale_b, "output_dtype": like.dtype, "use_fast_accum": fast}
        elements, columns = a._data.view(shape), _by_columns(b._data)
        if self.sharded:
            scales |= {"schedule": self.exchange.settings.of("matmul_reduce_scatter"), "scatter_dim": self.exchange.dim}
            return matmul_reduce_scatter(elements, columns, self.exchange.group, **scales)
        out = matmul_all_reduce(
            elements, columns, self.exchange.group, schedule=self.exchange.settings.of("matmul_all_reduce"), **scales
        )
        return out.view(*like.shape[:-1], out.shape[1])

    def all_rows(self, one: Any, like: Tensor, after: Tensor) -> Any:
        """Return a matrix, in FP8 or not, for the tokens of all ranks.

        like: a tensor [.., m, .., K] whose rows the matrix has.
        after: a tensor that must be computed before the gather, in graphs of torch.compile too.
        """
        if not self.sharded:
            return one
        # FP8 elements are sent as bfloat16, two elements in one.
        data = one if not isinstance(one, Float8TrainingTensor) else one._data.view(torch.bfloat16)
        rows = data.view(*like.shape[:-1], data.shape[1])
        nothing = make_empty_operand_after(data.t(), after.to(data.dtype))
        options: dict[str, Any] = {"schedule": "sequential", "gather_dim": self.exchange.dim, "rows": self.exchange.total}
        _, found = all_gather_matmul(rows, nothing, self.exchange.group, return_gathered=True, **options)
        found = found.reshape(-1, data.shape[1])
        return found if data is one else _with_elements(one, found.view(one._data.dtype))


class _Columns(torch.autograd.Function):
    """Multiplies x [.., m, .., K], or whole x, by weights [n, K]."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        casts, products = call.casts, call.casts.products
        x8, *w8s = call.cast(
            _Operand(_matrix(x), INPUT, -1, sharded=call.sharded), *(_Operand(weight.t(), WEIGHT, 0) for weight in weights)
        )
        # With one scale, the weights' gradients need the same elements that were gathered.
        keep = (
            call.sharded and call.exchange.settings.keep_gathered and casts.one_scale(INPUT) and any(ctx.needs_input_grad[2:])
        )
        if call.sharded:
            outs = call.gather_matmul(x8, w8s, x, products.output.use_fast_accum, gathered=keep)
        else:
            outs = [torch.mm(x8, w8).view(*x.shape[:-1], w8.shape[1]) for w8 in w8s]
        ctx.call, ctx.keep_elements, ctx.x_dtype = call, keep, x.dtype
        ctx.save_for_backward(outs.pop() if keep else x, *_known([x8, *w8s], casts), *weights)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, casts = ctx.call, ctx.call.casts
        x, x_scale, *rest = ctx.saved_tensors
        w_scales, weights = rest[: len(grads)], rest[len(grads) :]
        matrices, like = [_matrix(grad) for grad in grads], grads[0]
        if casts.one_scale(GRAD_OUTPUT) and casts.one_scale(WEIGHT):
            g8, w8, g8s = _joined(call, matrices, weights, w_scales)
        else:
            whole = _Operand(_concatenated([weight.t() for weight in weights]), WEIGHT, -1, second=True)
            g8, w8 = call.cast(_Operand(_concatenated(matrices), GRAD_OUTPUT, -1), whole)
            g8s = call.cast(*(_Operand(matrix, GRAD_OUTPUT, 0, second=True) for matrix in matrices))
        grad_x: Tensor | None = None
        grad_weights: Sequence[Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[1]:
            grad_x = call.matmul_reduce(g8, w8.t(), like, casts.products.grad_input.use_fast_accum)
        if any(ctx.needs_input_grad[2:]):
            if ctx.keep_elements:
                x8 = Float8TrainingTensor(_matrix(x), x_scale, ctx.x_dtype, casts.products, INPUT)
            else:
                options: dict[str, Any] = {"second": True, "sharded": call.sharded, "gathered": True, "scale": x_scale}
                (x8,) = call.cast(_Operand(_matrix(x), INPUT, 0, **options))
                x8 = call.all_rows(x8, x, like if grad_x is None else grad_x)
            grad_weights = [torch.mm(g8.t(), x8) for g8 in g8s]
        return None, grad_x, *grad_weights


class _Rows(torch.autograd.Function):
    """Multiplies x [.., M, .., k] by weight [N, k], and returns [.., m, .., N], or whole tokens."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, weight: Tensor) -> Tensor:
        x8, w8 = call.cast(_Operand(_matrix(x), INPUT, -1), _Operand(weight.t(), WEIGHT, 0))
        ctx.call = call
        ctx.save_for_backward(x, weight, *_known([x8, w8], call.casts))
        return call.matmul_reduce(x8, w8, x, call.casts.products.output.use_fast_accum)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, casts = ctx.call, ctx.call.casts
        x, weight, x_scale, w_scale = ctx.saved_tensors
        own = _matrix(grad)
        g8, w8 = call.cast(
            _Operand(own, GRAD_OUTPUT, -1, sharded=call.sharded), _Operand(weight.t(), WEIGHT, -1, second=True, scale=w_scale)
        )
        reused = casts.one_scale(GRAD_OUTPUT)
        if call.sharded:
            found = call.gather_matmul(g8, [w8.t()], grad, casts.products.grad_input.use_fast_accum, gathered=reused)
            grad_x = found[0]
            g8 = _with_elements(g8, _matrix(found[1])) if reused else g8
        else:
            grad_x = torch.mm(g8, w8.t()).view(*grad.shape[:-1], x.shape[-1])
        if not ctx.needs_input_grad[2]:
            return None, grad_x, None
        operands = [_Operand(_matrix(x), INPUT, 0, second=True, scale=x_scale)]
        if not reused:
            operands.append(_Operand(own, GRAD_OUTPUT, 0, second=True, sharded=call.sharded, gathered=True))
        x8, *again = call.cast(*operands)
        g8 = call.all_rows(again[0], grad, grad_x) if again else g8
        return None, grad_x, torch.mm(g8.t(), x8)


def _joined(
    call: _Call, grads: Sequence[Tensor], weights: Sequence[Tensor], w_scales: Sequence[Tensor | None]
) -> tuple[Any, Any, list[Any]]:
    """Return, tensorwise in FP8: the gradients [M, sum of n], the weights [K, sum of n], and the gradient of each output.

    Each weight keeps its own scale. Gradients are multiplied by the ratio of the first weight's scale, so the sum over all n is
    right.
    """
    known = zip(weights, w_scales, strict=True)
    w8s = call.cast(*(_Operand(weight.t(), WEIGHT, -1, second=True, scale=scale) for weight, scale in known))
    ratios = [w8s[0]._scale / w8._scale for w8 in w8s]
    scaled = [grad * ratio.to(grad.dtype) for grad, ratio in zip(grads[1:], ratios[1:], strict=True)]
    (g8,) = call.cast(_Operand(_concatenated([grads[0], *scaled]), GRAD_OUTPUT, -1))
    if not scaled:
        return g8, w8s[0], [g8]
    bytes_of = torch.cat([w8._data.t().view(torch.uint8) for w8 in w8s])
    w8 = _with_elements(w8s[0], bytes_of.view(w8s[0]._data.dtype).t())
    parts = g8._data.split([grad.shape[1] for grad in grads], 1)
    dtypes = {"orig_dtype": g8._orig_dtype, "linear_mm_config": g8._linear_mm_config, "gemm_input_role": GRAD_OUTPUT}
    return g8, w8, [Float8TrainingTensor(part, g8._scale * one, **dtypes) for part, one in zip(parts, ratios, strict=True)]


def _known(cast_once: Sequence[Any], casts: Float8Products) -> list[Tensor | None]:
    """Return the scales that the backward pass's casts of the same tensors reuse."""
    return [one._scale if casts.one_scale(one._gemm_input_role) else None for one in cast_once]


def _with_elements(one: Any, elements: Tensor) -> Any:
    """Return a tensor with other elements and the scale of `one`."""
    return Float8TrainingTensor(
        elements, one._scale, one._orig_dtype, one._linear_mm_config, one._gemm_input_role, one._axiswise_dim
    )


def _scales(a: Any, b: Any, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return scale_a, for a tensor of `shape` with the rows of a, and scale_b for a weft operator.

    The single scale of one operand is repeated if the other operand has a scale for each row or column.
    """
    scale_a, scale_b = a._scale.reciprocal(), b._scale.reciprocal()
    if a._axiswise_dim is None and b._axiswise_dim is None:
        return scale_a.view(1), scale_b.view(1)
    return scale_a.expand(a.shape[0], 1).reshape(*shape[:-1], 1), scale_b.expand(1, b.shape[1])


def _by_columns(b: Tensor) -> Tensor:
    return b if b.stride(0) == 1 else b.t().contiguous().t()


def _concatenated(matrices: Sequence[Tensor]) -> Tensor:
    """Concatenate the columns of all matrices. A single matrix is not copied."""
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices), 1)


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _largest(amaxes: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the maximum of each value over all ranks."""
    c10d = torch.ops._c10d_functional
    found: Tensor = c10d.wait_tensor(c10d.all_reduce(amaxes, "max", group.group_name))
    return found


def products_of(linears: Sequence[nn.Module]) -> Float8Products:
    """Return the products of Float8Linears that share an input. Raises ValueError if their configs differ."""
    first, *others = cast(Sequence[Any], linears)
    for other in others:
        if other.config != first.config:
            raise ValueError("linears that share an input have different Float8LinearConfigs; convert them with the same one")
    return Float8Products(first.config, first.linear_mm_config)


def check(linear: nn.Module, *, row: bool, ranks: int) -> None:
    """Raise ValueError, which names the option, for a Float8Linear that weft cannot shard over this number of ranks."""
    found = cast(Any, linear)
    config: Float8LinearConfig = found.config
    products = Float8Products(config, found.linear_mm_config)
    if config.pad_inner_dim:
        raise ValueError("pad_inner_dim=True: weft's FP8 products are not padded; convert linears of multiples of 16 only")
    for role, name in ((INPUT, "input"), (GRAD_OUTPUT, "grad_output")):
        if not products.casts(role, second=False):
            raise ValueError(f"cast_config_{name} is disabled: leave the linear out of the conversion (module_filter_fn)")
    for role, name in ((INPUT, "input"), (WEIGHT, "weight"), (GRAD_OUTPUT, "grad_output")):
        dtype = products.cast_config(role, second=False).target_dtype
        if dtype not in FLOAT8:
            raise ValueError(f"cast_config_{name} has target_dtype {dtype}; weft multiplies {', '.join(FLOAT8.values())}")
    if config.enable_fsdp_float8_all_gather and not (products.one_scale(WEIGHT) and products.one_scale(GRAD_OUTPUT)):
        raise ValueError("enable_fsdp_float8_all_gather needs tensorwise scaling of weight and grad_output")
    spread, whole = (found.in_features, found.out_features) if row else (found.out_features, found.in_features)
    parts = [high - low for low, high in split(spread, ranks)]
    if whole % FLOAT8_UNIT or any(part % FLOAT8_UNIT for part in parts):
        raise ValueError(
            f"a Float8Linear of {found.in_features} inputs and {found.out_features} outputs is cut into {parts} "
            f"{'inputs' if row else 'outputs'} on {ranks} ranks; FP8 products need multiples of {FLOAT8_UNIT}: leave it out of "
            "the conversion (module_filter_fn)"
        )
