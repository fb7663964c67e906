"""The norm after a row linear: where weft.matmul_all_reduce_norm computes it, with the residual's sum.

A decoder layer of transformers does this twice:

    hidden = residual + block(norm(residual))         the block ends in a row linear
    normed = following_norm(hidden)                   in this layer, in the next one, or after the last layer

In a call without gradients whose tokens are whole on every rank, the row linear does not multiply. It returns a PartialSum,
which the block passes on. When the layer adds that to the residual, one call computes `hidden` and `normed`. The layer goes on
with `hidden`, and the following norm returns `normed` if it is called with that very tensor, unchanged. If it is called with
another one, it computes as before. So a layer that runs alone, or as the last one, gives the same results. torch counts changes
in place, but not of inference tensors, nor in compiled code. There, a norm of the next layer is computed ahead only within the
decoder's own forward, which changes nothing between layers.

    o_proj, down_proj    PartialSum --residual + ...--> matmul_all_reduce_norm --> hidden, and normed in NormAhead
    following norm       hidden --> normed

The sum is rounded once, where the model rounds the all-reduce and the sum. The norm is computed in float32 and rounded once,
after its product with the weight. transformers' norms round before that product, too (GPT-OSS's does not). So results differ
from those of separate calls by roundings of the dtype, and are no less exact.

`norms_after` says for each block why it is not fused, and `deferring_linears` asks at each call whether other code would see a
PartialSum, or could change `hidden` before the norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as torch_module

from weft.models.parameters import part_of
from weft.ops.all_reduce import matmul_all_reduce_norm

Tensor = torch.Tensor
_CHILDREN = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
"""The children of a decoder layer that does what is said above, and nothing else."""
NOT_FUSED = "not fused with the norm that follows: "
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""The names of the module inside of torch's wrappers, which return what it returns."""
_READ_NO_VALUES = ("weft.", "torch.distributed.", "transformers.")
"""Hooks of these packages read neither a block's input nor the output of its row linear: weft's, FSDP's, and those that record
hidden states of layers and attention weights."""


@dataclass(kw_only=True, eq=False)
class NormAhead:
    """A NormAhead passes a normed sum from the call that computes it to the norm.

    norm: the norm that follows a row linear.
    hidden, normed: the last sum, and its norm, until `norm` is called.
    version: how often the sum had been changed in place, where torch counts that.
    """

    norm: nn.Module
    hidden: Tensor | None = None
    normed: Tensor | None = None
    version: int = 0

    def put(self, hidden: Tensor, normed: Tensor) -> None:
        self.hidden, self.normed, self.version = hidden, normed, _version(hidden)

    def take(self, x: Tensor) -> Tensor | None:
        """Return the norm of x if it is known, and x has not changed since. Either way, what is known is dropped."""
        found = self.normed if x is self.hidden and _version(x) == self.version else None
        self.drop()
        return found

    def drop(self) -> None:
        self.hidden = self.normed = None

    def weight(self, eager: bool) -> Tensor:
        return part_of(self.norm, "weight", eager=eager)


class PartialSum:
    """The product of a row linear, not yet multiplied and not yet summed over ranks. It can only be added to a residual."""

    def __init__(
        self, ahead: NormAhead, x: Tensor, factor: Tensor, norm_weight: Tensor, group: dist.ProcessGroup, **options: Any
    ):
        self._ahead, self._operands, self._norm_weight, self._group = ahead, (x, factor), norm_weight, group
        self._options = options

    def add_to(self, residual: Tensor) -> Tensor:
        """Return residual + the sum over ranks, and leave its norm to the norm that follows."""
        ahead, (x, factor) = self._ahead, self._operands
        eps = cast(float, ahead.norm.variance_epsilon)
        normed, hidden = matmul_all_reduce_norm(x, factor, residual, self._norm_weight, self._group, eps=eps, **self._options)
        ahead.put(hidden, normed)
        return hidden

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Compute residual + PartialSum. torch raises a TypeError for any other function of it."""
        if function in (torch.Tensor.add, torch.add) and len(args) == 2 and not kwargs and isinstance(args[1], cls):
            return args[1].add_to(args[0])
        return NotImplemented


@cache
def computed_ahead(cls: type[Any]) -> type[Any]:
    """Return a class like `cls`, a norm, that returns what its NormAhead has."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        normed = self._weft_ahead.take(hidden_states)
        return cls.forward(self, hidden_states, *args, **kwargs) if normed is None else normed

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def norms_after(decoder: Any) -> dict[nn.Module, nn.Module | str]:
    """Return the norm that follows each block of a decoder's layers, or why it cannot be computed with the block's product."""
    found: dict[nn.Module, Any] = {}
    layers = [*decoder.layers]
    for at, layer in enumerate(layers):
        why = _why_not_layer(layer)
        beyond = decoder.norm if at + 1 == len(layers) else getattr(layers[at + 1], "input_layernorm", None)
        for name, norm in (("self_attn", getattr(layer, "post_attention_layernorm", None)), ("mlp", beyond)):
            block = getattr(layer, name, None)
            if isinstance(block, nn.Module):
                again = "it runs in several places" if block in found else ""
                found[block] = again or why or _why_not_norm(norm) or norm
    norms = [norm for norm in found.values() if not isinstance(norm, str)]
    shared = {norm for norm in norms if norms.count(norm) > 1}
    return {block: "its norm runs in several places" if norm in shared else norm for block, norm in found.items()}


def _why_not_layer(layer: nn.Module) -> str:
    others = [name for name, _ in layer.named_children() if name not in _CHILDREN]
    if others:
        return f"its layer also has {', '.join(others)}"
    return _why_not_own(layer)


def _why_not_norm(norm: Any) -> str:
    """Return why a module is no RMSNorm of float32 that multiplies by its weight, or "" if it is one."""
    name, epsilon, weight = type(norm).__name__, getattr(norm, "variance_epsilon", None), getattr(norm, "weight", None)
    if not name.endswith("RMSNorm") or not isinstance(epsilon, float) or not 0 <= epsilon < 1:
        return f"the {name} that follows is no RMSNorm as Llama's"
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        return f"the weight of the {name} that follows is no plain parameter"
    return _why_not_own(norm)


def _why_not_own(module: nn.Module) -> str:
    if "forward" in module.__dict__ or not type(module).forward.__module__.startswith("transformers."):
        return f"the forward of its {type(module).__name__} is not transformers' own"
    return ""


def _version(x: Tensor) -> int:
    """Return how often x has been changed in place, or 0 where torch does not count that."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def deferring_linears(layer: nn.Module, *, in_decoder: bool) -> list[Any]:
    """Return the row linears of a decoder layer that may return a PartialSum in this call. in_decoder: whether the decoder's
    own forward calls the layer."""
    eager, rows = not torch.compiler.is_compiling(), []
    of_layer = _why_observed("the layer", layer)
    if of_layer and (first := getattr(layer._modules.get("input_layernorm"), "_weft_ahead", None)) is not None:
        first.drop()  # a hook before the layer may have changed its input in place
    for name, block in _unwrapped(layer):
        at = block.__dict__.get("_weft_row")
        row = None if at is None else _inside(block._modules[at])
        if row is None or getattr(row, "_weft_ahead", None) is None:
            continue
        why = (
            of_layer or _why_observed(name, block) or _why_observed(at, row) or _why_observed("that norm", row._weft_ahead.norm)
        )
        beyond = row._weft_ahead.norm not in layer._modules.values()
        if beyond and not in_decoder and (not eager or torch.is_inference_mode_enabled()):
            why = "its layer is called by itself, and what changes its result before the norm is not known"
        if not why:
            rows.append(row)
        elif eager:
            row._weft_ran.remarks.add(NOT_FUSED + why)
    return rows


def _unwrapped(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, child in layer._modules.items():
        if child is not None:
            yield name, _inside(child)


def _inside(module: Any) -> Any:
    """Return the module inside of torch's wrappers."""
    for name in _WRAPPED:
        if name in module._modules:
            return _inside(module._modules[name])
    return module


def _why_observed(name: str, module: nn.Module) -> str:
    """Return who may see what a module is called with or returns, or "" if nobody does."""
    if torch_module._global_forward_pre_hooks or torch_module._global_forward_hooks:
        return "a hook of all modules"
    if "forward" in module.__dict__:
        return f"a forward that was put on {name} itself"
    if reading(module._forward_pre_hooks) or reading(module._forward_hooks):
        return f"a hook of {name}"
    return ""


def reading(hooks: Mapping[int, Any]) -> bool:
    """Return whether one of a module's hooks may read values."""
    return any(not _package(hook).startswith(_READ_NO_VALUES) for hook in hooks.values())


def _package(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    found: str = getattr(hook, "__module__", None) or type(hook).__module__
    return found
