"""Chooses the input of a block of linears that share it: a placeholder, or the gathered input of all tokens.

    no other code reads the input     a placeholder of the gathered shape; the gather overlaps the matmuls
    a hook, an adapter, ... may       the gathered input itself; nothing overlaps, and a warning says why

Each call chooses again, because hooks may be added and removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from weft.core.logs import warn_once
from weft.models.linear import SharedInputLinears, change_input

_READ_NO_INPUTS = ("weft.", "torch.distributed.", "transformers.")
"""Hooks of these packages do not read a module's input: weft's, FSDP's, and those that record outputs of a decoder's blocks."""


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
            if _reading(member._forward_pre_hooks.values()) or _reading(member._forward_hooks.values()):
                return f"a hook of {name}"
        if _reading(module._forward_pre_hooks.values()) or _reading(module._forward_hooks.values()):
            return "a hook of the module"
        if eager:
            self.silent[:] = hooks
        return ""


def _reading(hooks: Iterable[Any]) -> bool:
    return any(not _package(hook).startswith(_READ_NO_INPUTS) for hook in hooks)


def _package(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    found: str = getattr(hook, "__module__", None) or type(hook).__module__
    return found
