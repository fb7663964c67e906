"""Hooks of the styles that convert between torch's layouts and those of weft's operators.

Each hook is a value that a module's hook calls. A plain tensor is assumed to have the layout that the style names, as in
torch's styles. A DTensor has its own layout and number of tokens.

Announce chooses the input of a block of linears that share it: a placeholder, or the gathered input of all tokens.

    no other code reads the input     a placeholder of the gathered shape; the gather overlaps the matmuls
    a hook, an adapter, ... may       the gathered input itself; nothing overlaps, and a warning says why

Each call chooses again, because hooks may be added and removed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.modules import module as torch_module

from weft.compat.dtensors import spec_of
from weft.core.errors import warn_once
from weft.models.linear import SharedInputLinears, Tokens, as_dtensor, change_input
from weft.models.norms import reading
from weft.models.parameters import as_whole, own_part
from weft.ops.parts import cut, gathered

Tensor = torch.Tensor


@dataclass(frozen=True)
class Taken:
    """Makes a module's input a plain tensor of this rank's tokens, or of all with Replicate, and records their layout."""

    mesh: DeviceMesh
    layout: Placement
    tokens: Tokens
    ranks: int = field(init=False)
    sharded: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", self.mesh.size())
        object.__setattr__(self, "sharded", isinstance(self.layout, Shard))

    def __call__(self, x: Tensor) -> Tensor:
        dim = token_dim(self.layout, x) if self.sharded else 0
        if not isinstance(x, DTensor):
            total = self.ranks * x.shape[dim]
        elif not torch.compiler.is_compiling() and (spec := spec_of(x)).mesh is self.mesh and spec.placements == (self.layout,):
            total, x = x.shape[dim], own_part(x)
        else:
            x = x.redistribute(self.mesh, [self.layout])
            total, x = x.shape[dim], x.to_local()
        self.tokens.dim, self.tokens.total = dim, total if self.sharded else None
        return x


@dataclass(frozen=True)
class ColumnsOut:
    """Converts a column-sharded linear's output to a layout."""

    mesh: DeviceMesh
    layout: Placement
    plain: bool

    def __call__(self, module: Any, args: Any, out: Tensor) -> Tensor:
        if self.layout == Shard(-1) and self.plain:
            return out
        if self.layout.is_replicate() and self.plain:
            return gathered(out, self.mesh.get_group(), -1, module.out_features)
        shape = (*out.shape[:-1], module.out_features)
        # The operators return several sequences with the tokens outermost in memory. A DTensor is contiguous, as torch's.
        found = as_dtensor(out.contiguous(), self.mesh, Shard(out.dim() - 1), shape)
        if self.layout == Shard(-1):
            return found
        moved = found.redistribute(self.mesh, [self.layout])
        # torch returns uneven parts, and in 2.11 all moved tensors, with other strides, on which views fail.
        part = moved.to_local().contiguous()
        return part if self.plain else as_dtensor(part, self.mesh, moved.placements[0], shape)


@dataclass(frozen=True)
class LogitsOut:
    """Makes a head's logits a DTensor that is sharded by the vocabulary while gradients are recorded. Gathers them otherwise,
    because code that generates takes no DTensor."""

    mesh: DeviceMesh

    def __call__(self, module: Any, args: Any, out: Tensor) -> Tensor:
        recorded = torch.is_grad_enabled()
        return ColumnsOut(self.mesh, Shard(-1) if recorded else Replicate(), not recorded)(module, args, out)


@dataclass(frozen=True)
class ColumnsIn:
    """Cuts a row-sharded linear's input, which has all columns on every rank, to this rank's columns. The gradient is
    gathered."""

    mesh: DeviceMesh

    def __call__(self, x: Tensor) -> Tensor:
        return cut(x, self.mesh.get_group(), -1)


@dataclass(frozen=True)
class RowsIn:
    """Cuts a row-sharded linear's input to this rank's columns, and records the layout of the output's tokens."""

    mesh: DeviceMesh
    layout: Placement
    output: Placement
    tokens: Tokens

    def __call__(self, x: Tensor) -> Tensor:
        dim = token_dim(self.output, x)
        if self.layout.is_replicate() and not isinstance(x, DTensor):
            x = cut(x, self.mesh.get_group(), -1)
        elif isinstance(x, DTensor) or self.layout != Shard(-1):
            spread = x if isinstance(x, DTensor) else DTensor.from_local(x, self.mesh, [self.layout], run_check=False)
            x = spread.redistribute(self.mesh, [Shard(x.dim() - 1)]).to_local()
        self.tokens.dim, self.tokens.total = dim, x.shape[dim] if isinstance(self.output, Shard) else None
        return x


@dataclass(frozen=True)
class TokensOut:
    """Makes a module's output, which is sharded by tokens, a DTensor.

    contiguous: copy an output whose tokens are outermost in memory. Otherwise the DTensor has its strides.
    last: what the last output was, and the layout of its DTensor.
    """

    mesh: DeviceMesh
    layout: Placement
    tokens: Tokens
    contiguous: bool
    last: dict[Any, Any] = field(default_factory=dict, compare=False)

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        dim, total = self.tokens.dim, self.tokens.total
        if not (not torch.compiler.is_compiling() and out.is_contiguous()):
            return self._whole(out.contiguous() if self.contiguous else out, dim, total)
        kind = out.shape, out.dtype, dim, total
        spec = self.last.get(kind)
        if spec is None:
            self.last.clear()
            spec = self.last[kind] = spec_of(self._whole(out, dim, total))
        return as_whole(out, spec)

    def _whole(self, out: Tensor, dim: int, total: int | None) -> DTensor:
        if total is None:
            return as_dtensor(out, self.mesh, Replicate(), out.shape)
        return as_dtensor(out, self.mesh, Shard(dim), (*out.shape[:dim], total, *out.shape[dim + 1 :]))


def token_dim(layout: Placement, x: Tensor) -> int:
    """Return the dimension of x that a layout shards, or 0 for Replicate. Raises ValueError if it is the last one."""
    if not isinstance(layout, Shard):
        return 0
    dim = layout.dim % x.dim()
    if dim == x.dim() - 1:
        raise ValueError(f"the layout {layout!r} shards the last of a tensor's {x.dim()} dimensions; write Shard(-1) for that")
    return dim


@dataclass(frozen=True)
class Announce:
    """A block's pre-hook that multiplies the block's input by its column linears.

    argument: the name of the input's argument, as in InputHook.
    linears: the linears' names in the block.
    name: the block's name in the model.
    taken: makes the input a plain tensor. None if it is one.
    adapted: one of the linears is inside an adapter.
    silent: the numbers of the hooks that were found not to read inputs. torch never uses a number twice.
    """

    argument: str
    shared: SharedInputLinears
    linears: tuple[str, ...]
    name: str
    taken: Callable[[torch.Tensor], torch.Tensor] | None = None
    adapted: bool = False
    silent: list[int] = field(default_factory=list, compare=False)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        eager = not torch.compiler.is_compiling()
        reader = "" if self.adapted else self._reader(module, eager)
        if reader and eager:
            warn_once(f"{self.name}: {reader} may read its input, which is therefore gathered before the matmuls")
        change = self.shared.gather if reader or self.adapted else self.shared.multiply_all
        return change_input(module, args, kwargs, self.argument, lambda x: change(self.taken(x) if self.taken else x))

    def _reader(self, module: nn.Module, eager: bool) -> str:
        """Return who may read the values of the block's input, besides its linears, or "" if nobody does."""
        if torch_module._global_forward_pre_hooks or torch_module._global_forward_hooks:
            return "a hook of all modules"
        if "forward" in module.__dict__:
            return "a forward that was put on the module itself"
        hooks = [*module._forward_pre_hooks, *module._forward_hooks]
        for name, member in zip(self.linears, self.shared.members, strict=True):
            found = module._modules.get(name) or getattr(module, name)
            if found is not member and getattr(found, "_orig_mod", None) is not member:
                return f"a {type(found).__name__} around {name}"
            if "forward" in member.__dict__:
                return f"a forward that was put on {name} itself"
            hooks += [*member._forward_pre_hooks, *member._forward_hooks]
        if eager and hooks == self.silent:
            return ""
        for name, member in zip(self.linears, self.shared.members, strict=True):
            if reading(member._forward_pre_hooks) or reading(member._forward_hooks):
                return f"a hook of {name}"
        if reading(module._forward_pre_hooks) or reading(module._forward_hooks):
            return "a hook of the module"
        if eager:
            self.silent[:] = hooks
        return ""
