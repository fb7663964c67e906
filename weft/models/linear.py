"""Sharded linears: torch.nn.Linear modules whose class is replaced, so that they call weft's operators.

Only the `__class__` of a module changes, so names, hooks, parameters and checkpoints stay the same. torchao's Float8Linear
gets a subclass of these classes, which multiplies in FP8 (weft/models/float8.py).

    ColumnLinear         weight Shard(0), bias Shard(0)      outputs are this rank's columns, of all tokens
    RowLinear            weight Shard(1), bias Replicate     inputs are this rank's columns of all tokens
    SharedInputLinears   column linears that read one tensor: it is gathered once for all of them

A SharedInputLinears computes the products of all its members before the forward of their parent module runs:

    parent's pre-hook     x [B, s, H], this rank's tokens --> multiply_all(x) computes and saves the products of all members
    parent's forward      receives a placeholder of the gathered shape, filled with NaN, because no code may read the values
    member's forward      receives the placeholder --> returns its saved product, once
    parent's hook         saved products that no member has returned are dropped

A member that is called with another tensor of this rank's tokens multiplies it. A second call with the placeholder raises
ValueError, because the placeholder has no data.

If a hook or an adapter may read the parent's input, the tokens are gathered first, and nothing is computed in advance:

    parent's pre-hook     x [B, s, H] --> gather(x) [B, S, H], with its values
    member's forward      receives all tokens --> returns its product with them
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from weft.compat.dispatch import observed
from weft.compat.dtensors import differentiable_dtensor_of, patch_grad_scaler
from weft.core.problem import split
from weft.models.communicating import LayerCalls
from weft.models.norms import NOT_FUSED, NormAhead, PartialSum
from weft.models.parameters import group_of, keep_parts, part_of
from weft.models.products import (
    Call,
    LinearProducts,
    ProductSettings,
    QuantisedProducts,
    RepeatedProduct,
    TokenExchange,
    backward_ops_of_columns,
    backward_ops_of_rows,
    call_of_columns,
    call_of_rows,
    in_one_dtype,
    kind_of,
    ops_of_columns,
    ops_of_rows,
    with_biases,
)
from weft.ops.parts import gathered

Tensor = torch.Tensor


@dataclass(kw_only=True)
class Tokens:
    """Tokens has the layout of a module's input tokens over the ranks, along `dim`.

    total: the number of tokens of all ranks, if each rank has its part of them, as torch.chunk cuts it; None if every rank has
        all tokens. A pre-hook of the module's style sets it before the module runs.
    """

    dim: int = 1
    total: int | None = None

    def sharded(self) -> bool:
        """Return whether each rank has a part of the tokens."""
        return self.total is not None

    def check(self) -> None:
        """Raise ValueError if the layout is unknown. A hook for subclasses: here it is always known."""


@dataclass(kw_only=True)
class SharedInputLinears:
    """A SharedInputLinears holds the column linears that read one tensor.

    ran: the operator calls that they have made.
    _saved_products: by member, the products that were computed in advance and that the member has not returned yet.
    _placeholder: the tensor that the module gets as its input. A member that is called with it returns its saved product.
    _last_placeholder: the last one, by its shape, dtype, device and whether it is an inference tensor.
    _input_is_gathered: whether members are called with all tokens instead.
    """

    members: Sequence[ColumnLinear]
    tokens: Tokens
    settings: ProductSettings
    ran: LayerCalls = field(default_factory=LayerCalls)
    repeated: RepeatedProduct = field(default_factory=RepeatedProduct)
    _saved_products: dict[int, Tensor] = field(default_factory=dict)
    _placeholder: Tensor | None = None
    _last_placeholder: dict[Any, Tensor] = field(default_factory=dict)
    _input_is_gathered: bool = False

    def multiply_all(self, x: Tensor) -> Tensor:
        """Multiply x by all members' weights, and save the products. Return the placeholder to call the members with."""
        total, dim = self.tokens.total, self.tokens.dim
        products = self._multiply(x, self.members, total)
        self._saved_products, self._input_is_gathered = dict(enumerate(products)), False
        if total is None or group_of(self.members[0], eager=not torch.compiler.is_compiling()).size() == 1:
            self._placeholder = x
        else:
            self._placeholder = self._make_placeholder(x, (*x.shape[:dim], total, *x.shape[dim + 1 :]))
        return self._placeholder

    def _make_placeholder(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        if torch.compiler.is_compiling() or observed() or type(x) is not Tensor:
            return x.new_full((), torch.nan).expand(shape)
        # All calls of a shape have the same one, because a GPU fills it by a kernel.
        kind = shape, x.dtype, x.device, torch.is_inference_mode_enabled()
        found = self._last_placeholder.get(kind)
        if found is None:
            found = x.new_full((), torch.nan).expand(shape)
            self._last_placeholder = {kind: found}
        return found

    def gather(self, x: Tensor) -> Tensor:
        """Gather x over the ranks. Each member then multiplies the input that it is called with, which has all tokens."""
        total = self.tokens.total
        self._saved_products, self._placeholder, self._input_is_gathered = {}, None, True
        if total is None:
            return x
        return gathered(x, group_of(self.members[0], eager=not torch.compiler.is_compiling()), self.tokens.dim, total)

    def get_product(self, member: ColumnLinear, x: Tensor) -> Tensor:
        """Return a member's product with x. If x is the placeholder, it was computed in advance; otherwise compute it now.

        Raises ValueError if a member is called with the placeholder twice.
        """
        if self._input_is_gathered:
            return self._multiply(x, [member], None)[0]
        at = self.members.index(member)
        if x is not self._placeholder or at not in self._saved_products:
            self._check_not_all_tokens(x)
            return self._multiply(x, [member], self.tokens.total)[0]
        out = self._saved_products.pop(at)
        if not self._saved_products:
            self._placeholder = None
        return out

    def drop_products(self, module: nn.Module, args: Any, out: Any) -> None:
        """Drop the saved products that no member has returned. This is a forward hook of the module.

        Otherwise a compiled module would return them as outputs, and pass zero gradients to them.
        """
        self._saved_products, self._placeholder, self._input_is_gathered = {}, None, False

    def _check_not_all_tokens(self, x: Tensor) -> None:
        """Raise ValueError if x has all ranks' tokens, unless this rank's part is all of them."""
        total = self.tokens.total
        if total is None or total != x.shape[self.tokens.dim]:
            return
        group = group_of(self.members[0], eager=not torch.compiler.is_compiling())
        low, high = split(total, group.size())[group.rank()]
        # A rank that has all tokens raises for the placeholder, as the others do.
        is_placeholder = any(x is one for one in self._last_placeholder.values())
        if total != high - low or is_placeholder:
            raise ValueError(
                f"a linear that shares a gathered input is called with all {total} tokens of it, not as the module was given "
                "them, or a second time: call it once with the module's own input, or give it weft.ColwiseParallel instead"
            )

    def _multiply(self, x: Tensor, members: Sequence[ColumnLinear], total: int | None) -> list[Tensor]:
        eager, dim = not torch.compiler.is_compiling(), self.tokens.dim
        self.tokens.check()
        biases = [get_bias(member, eager) for member in members]
        products = self.settings.products
        if eager and total is not None and products.depends_on_weights_alone:
            outs = self.repeated.multiply(x, members, self._call_of, dim, total)
            if outs is not None:
                self._watch(x, outs, dim, total)
                return with_biases(outs, biases)
        weights = [products.weight_of(member, eager) for member in members]
        self._record(x, dim, total, eager)
        outs = products.columns(x, weights, biases, self._exchange(dim, total, eager))
        if eager:
            self._watch(x, outs, dim, total)
        return outs

    def _call_of(self, x: Tensor, factors: Sequence[Tensor], dim: int, total: int) -> Call:
        self._record(x, dim, total, eager=True)
        return call_of_columns(x, factors, self._exchange(dim, total, eager=True))

    def _exchange(self, dim: int, total: int | None, eager: bool) -> TokenExchange:
        return TokenExchange(group_of(self.members[0], eager=eager), self.settings, dim, total)

    def _record(self, x: Tensor, dim: int, total: int | None, eager: bool) -> None:
        if not eager or self.ran.is_new(x.shape, dim, total, x.requires_grad, torch.is_grad_enabled()):
            after = backward_ops_of_columns(x, total)
            self.ran.record(ops_of_columns(total), count_rows(x, dim, total), eager=eager, backward=after)

    def _watch(self, x: Tensor, outs: Sequence[Tensor], dim: int, total: int | None) -> None:
        if self.ran.pending:
            self.ran.watch(outs, backward_ops_of_columns(x, total), count_rows(x, dim, total))


class ColumnLinear(nn.Linear):
    """A linear whose outputs are sharded. The tokens of its SharedInputLinears say how its input is sharded."""

    _weft_shared: SharedInputLinears

    def forward(self, input: Tensor) -> Tensor:
        return self._weft_shared.get_product(self, input)


class RowLinear(nn.Linear):
    """A linear whose inputs [.., M, .., k] are sharded. Its tokens say how its output is sharded."""

    _weft_tokens: Tokens
    _weft_settings: ProductSettings
    _weft_ran: LayerCalls
    _weft_repeated: RepeatedProduct
    _weft_ahead: NormAhead | None
    _weft_defers: bool

    def forward(self, input: Tensor) -> Tensor:
        eager, tokens, products = not torch.compiler.is_compiling(), self._weft_tokens, self._weft_settings.products
        tokens.check()
        scatter, dim = tokens.total is not None, tokens.dim
        bias = get_bias(self, eager, summed=scatter)
        if eager and scatter and products.depends_on_weights_alone:
            out = self._weft_repeated.multiply(input, (self,), self._call_of, dim)
            if out is not None:
                self._watch(input, out, scatter)
                return with_biases([out], [bias])[0]
        weight = products.weight_of(self, eager)
        if self._weft_defers and self._weft_ahead is not None and not scatter:
            deferred = self._defer(self._weft_ahead, input, weight, bias, eager)
            if deferred is not None:
                return cast(Tensor, deferred)
        self._record(input, scatter, eager)
        out = products.rows(input, weight, bias, self._exchange(input, dim, scatter, eager))
        if eager:
            self._watch(input, out, scatter)
        return out

    def _defer(self, ahead: NormAhead, x: Tensor, weight: Tensor, bias: Tensor | None, eager: bool) -> PartialSum | None:
        """Return the product for the layer to add to its residual, or None if it cannot be computed with the norm."""
        (x, weight), norm = in_one_dtype(x, [weight]), ahead.weight(eager)
        if norm.dtype != x.dtype or norm.shape != (self.out_features,):
            if eager:
                has = f"{norm.dtype} {tuple(norm.shape)}, the product {x.dtype} {(self.out_features,)}"
                self._weft_ran.remarks.add(f"{NOT_FUSED}its weight is {has}")
            return None
        if not eager or self._weft_ran.is_new(x.shape, "norm"):
            self._weft_ran.record(("matmul_all_reduce_norm",), count_rows(x, 0, None), eager=eager)
        options = {"schedule": self._weft_settings.of("matmul_all_reduce"), "bias": None if bias is None else bias.to(x.dtype)}
        return PartialSum(ahead, x, weight.t(), norm, group_of(self, eager=eager), **options)

    def _call_of(self, x: Tensor, factors: Sequence[Tensor], dim: int) -> Call:
        self._record(x, True, eager=True)
        return call_of_rows(x, factors[0], self._exchange(x, dim, True, eager=True))

    def _exchange(self, x: Tensor, dim: int, scatter: bool, eager: bool) -> TokenExchange:
        return TokenExchange(group_of(self, eager=eager), self._weft_settings, dim, x.shape[dim] if scatter else None)

    def _record(self, x: Tensor, scatter: bool, eager: bool) -> None:
        if not eager or self._weft_ran.is_new(x.shape, scatter, torch.is_grad_enabled()):
            after = backward_ops_of_rows(scatter)
            self._weft_ran.record(ops_of_rows(scatter), count_rows(x, 0, None), eager=eager, backward=after)

    def _watch(self, x: Tensor, out: Tensor, scatter: bool) -> None:
        if self._weft_ran.pending:
            self._weft_ran.watch([out], backward_ops_of_rows(scatter), count_rows(x, 0, None))


def as_dtensor(mine: Tensor, mesh: DeviceMesh, layout: Placement, shape: tuple[int, ...]) -> DTensor:
    """Return this rank's part as a DTensor of that shape, whose parts need not be even."""
    return differentiable_dtensor_of(mine, mesh, (layout,), shape)


def count_rows(x: Tensor, dim: int, total: int | None) -> int:
    """Return the number of rows of all ranks' tokens. x has all of them, or this rank's part of `total` tokens along `dim`."""
    if total is None:
        return prod(x.shape[:-1])
    return total * prod(x.shape[:dim]) * prod(x.shape[dim + 1 : -1])


def get_bias(linear: nn.Linear, eager: bool, *, summed: bool = False) -> Tensor | None:
    """Return this rank's part of a sharded linear's bias. summed: sum its gradient over the ranks."""
    has_none = "bias" in linear._parameters and linear._parameters["bias"] is None
    return None if has_none else part_of(linear, "bias", eager=eager, summed=summed)


def require_one_dimension(mesh: DeviceMesh) -> None:
    """Raise ValueError for a mesh of several dimensions, because a style cannot know which one is meant."""
    if mesh.ndim != 1:
        raise ValueError(f"device_mesh has {mesh.ndim} dimensions; slice one of them: mesh['name']")


class Distributor:
    """A Distributor shards parameters over a mesh. A parameter that modules share is sharded once.

    src_data_rank: as for torch's parallelize_module.
    """

    def __init__(self, mesh: DeviceMesh, src_data_rank: int | None) -> None:
        self.mesh, self.src_data_rank = mesh, src_data_rank
        patch_grad_scaler()
        self._distributed: dict[int, tuple[Tensor, nn.Parameter]] = {}

    def __call__(self, parameter: Tensor, placement: Placement) -> nn.Parameter:
        """Raise ValueError for a DTensor, which already has a layout, and for a shared parameter that needs two layouts."""
        if isinstance(parameter, DTensor):
            raise ValueError("a parameter is a DTensor already; apply weft's styles once, and before fully_shard")
        if id(parameter) not in self._distributed:
            distributed = self._distribute_tensor(parameter.detach(), placement)
            self._distributed[id(parameter)] = parameter, nn.Parameter(distributed, requires_grad=parameter.requires_grad)
        known = self._distributed[id(parameter)][1]
        if cast(DTensor, known).placements != (placement,):
            raise ValueError(
                f"a parameter {tuple(parameter.shape)} is shared by modules of which one wants it as {placement!r}, another as "
                f"{cast(DTensor, known).placements[0]!r}; give each a parameter of its own"
            )
        return known

    def _distribute_tensor(self, whole: Tensor, placement: Placement) -> DTensor:
        # Not all backends of torch.distributed support FP8, so it is sent as bytes.
        moved = whole.view(torch.uint8) if whole.is_floating_point() and whole.itemsize == 1 else whole
        distributed = distribute_tensor(moved, self.mesh, [placement], src_data_rank=self.src_data_rank)
        if moved is whole:
            return distributed
        return as_dtensor(distributed.to_local().view(whole.dtype), self.mesh, placement, tuple(whole.shape))


def make_column_linears(
    linears: Sequence[nn.Linear], tokens: Tokens, settings: ProductSettings, distribute: Distributor
) -> SharedInputLinears:
    """Make these linears ColumnLinears that share their input. Raises ValueError if only some of them are Float8Linears."""
    settings, kind = _choose_class(linears, settings, ColumnLinear)
    for linear in linears:
        _shard_parameters(linear, distribute, Shard(0), Shard(0))
        linear.__class__ = kind
    shared = SharedInputLinears(members=cast(Sequence[ColumnLinear], list(linears)), tokens=tokens, settings=settings)
    for member in shared.members:
        member._weft_shared = shared
    return shared


def make_row_linear(linear: nn.Linear, tokens: Tokens, settings: ProductSettings, distribute: Distributor) -> LayerCalls:
    """Make a linear a RowLinear, and return the record of its calls."""
    settings, kind = _choose_class([linear], settings, RowLinear)
    _shard_parameters(linear, distribute, Shard(1), Replicate())
    linear.__class__ = kind
    row = cast(RowLinear, linear)
    row._weft_tokens, row._weft_settings = tokens, settings
    row._weft_ran, row._weft_repeated = LayerCalls(), RepeatedProduct()
    row._weft_ahead, row._weft_defers = None, False
    return row._weft_ran


def _choose_class(
    linears: Sequence[nn.Linear], settings: ProductSettings, kind: type[nn.Linear]
) -> tuple[ProductSettings, type[nn.Linear]]:
    """Return the settings of these linears' products, and the class that they get: a subclass of `kind` for Float8Linears."""
    converted = [is_float8(linear) for linear in linears]
    if not any(converted):
        quantised = kind_of(linears[0])
        products = LinearProducts() if quantised is None else QuantisedProducts(quantised)
        return replace(settings, products=products), kind
    if not all(converted):
        raise ValueError(
            "only some of the linears that share an input are Float8Linears; convert all of them to FP8 or none "
            "(module_filter_fn), or give each weft.ColwiseParallel"
        )
    from weft.models import float8  # it imports torchao, which is optional

    return replace(settings, products=float8.products_of(linears)), float8.of_float8(cast(Any, kind))


def is_float8(module: nn.Module) -> bool:
    """Return whether a module is torchao's Float8Linear."""
    torchao = sys.modules.get("torchao.float8.float8_linear")
    return torchao is not None and type(module) is torchao.Float8Linear


def _shard_parameters(linear: nn.Linear, distribute: Distributor, weight: Placement, bias: Placement) -> None:
    kind = kind_of(linear)
    if kind is not None:
        scales = linear.get_parameter(kind.scales)
        linear.register_parameter(kind.scales, distribute(scales, kind.placement(scales, weight)))
    linear.register_parameter("weight", distribute(linear.weight, weight))
    if linear.bias is not None:
        linear.register_parameter("bias", distribute(linear.bias, bias))
    for name, parameter in linear._parameters.items():
        if isinstance(parameter, DTensor):
            keep_parts(linear, name, summed=parameter.placements == (Replicate(),))


def why_not_linear(module: nn.Module, *, row: bool = False, ranks: int = 1) -> str:
    """Return why weft cannot shard a module as a linear, or "" if it can.

    Raises ValueError for a linear that weft has sharded already, and for a Float8Linear with options or sizes that weft's FP8
    products do not support.

    row: whether it is to be a RowLinear.
    """
    if isinstance(module, ColumnLinear | RowLinear):
        raise ValueError("a linear is sharded by weft already; name it once, in SharedInput or with a style of its own")
    converted = is_float8(module)
    if type(module) is not nn.Linear and not converted:
        name = type(module).__name__ if type(module).__name__ != "Linear" else f"{type(module).__module__}.Linear"
        return f"{name} is no torch.nn.Linear (a wrapped or quantised one computes by itself)"
    if "forward" in module.__dict__:
        return "its forward was put on the module itself"
    if "weight" not in module._parameters:
        return f"its weight is made of {', '.join(module._parameters)} at each call (weight_norm, pruning)"
    for name, parameter in module.named_parameters():
        plain = converted or type(parameter) is nn.Parameter
        if not plain or parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return (
                f"its {name} is a {type(parameter).__name__} of {parameter.dtype}; weft multiplies float32, bfloat16, float16"
            )
    if converted:
        from weft.models import float8

        float8.check(module, row=row, ranks=ranks)
    return ""


@dataclass(frozen=True)
class InputHook:
    """An InputHook is a forward pre-hook that changes a module's input.

    It changes the keyword argument `argument`, or else the first positional argument. It is a dataclass, so that copying the
    module also copies the objects that `change` uses.
    """

    argument: str
    change: Callable[[Tensor], Tensor]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return change_input(module, args, kwargs, self.argument, self.change)


def change_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], argument: str, change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a call with the input changed, as InputHook does.

    Hooks that torch.compile traces call this function, because torch 2.11 cannot create a dataclass in traced code.
    """
    if argument in kwargs:
        return args, {**kwargs, argument: change(kwargs[argument])}
    if not args:
        raise ValueError(
            f"{type(module).__name__} is called with {', '.join(kwargs) or 'nothing'}; weft changes its first positional "
            f"argument, or {argument!r} by name: pass it so, or say which with SharedInput(argument=)"
        )
    return (change(args[0]), *args[1:]), kwargs
