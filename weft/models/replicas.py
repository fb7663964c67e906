"""Parameters that are whole on every rank: DTensors to the world, plain tensors to their module's forward.

A model whose linears have DTensors needs them everywhere: optimizers and torch.nn.utils.clip_grad_norm_ take no mixture. But a
norm over DTensors pays DTensor's dispatch at every operation. So the module becomes one of a class whose parameters, read as
attributes while its forward runs, are this rank's plain tensors. Everybody else sees the DTensors.

A rank that computes a part has a part of the gradient:

    what the module is given            `part` says     gradient
    this rank's tokens, or heads        True            summed over ranks, as the backward reaches it
    all of them, on every rank          False           whole as it is
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from weft.models.linear import Distributor, group_of, local
from weft.ops.replicated import with_summed_gradient

Part = Callable[[], bool]


def replicate(module: nn.Module, distribute: Distributor, part: Part) -> None:
    """Make a module's parameters, and those of its children, whole on every rank. Parameters that are no plain floating point
    ones (quantised weights) stay as they are."""
    for each in module.modules():
        replicate_alone(each, distribute, part)


def replicate_alone(module: nn.Module, distribute: Distributor, part: Part) -> None:
    """As `replicate`, of a module without its children. Those of its parameters that are DTensors stay."""
    # Under all its names, if it has several: named_parameters has the first alone.
    plain = tuple(name for name, parameter in module._parameters.items() if parameter is not None and _is_plain(parameter))
    for name in plain:
        module.register_parameter(name, distribute(module.get_parameter(name), Replicate()))
    if plain:
        module.__class__ = _reading_locals(class_of(module), plain)
        module.__dict__["_weft_part"] = part


def class_of(module: nn.Module) -> Any:
    """A module's class, to be derived from. A forward that was put on the module itself (module.forward = ...), past which no
    class's would run, becomes this one's."""
    own = module.__dict__.pop("forward", None)
    if own is None:
        return type(module)
    module.__dict__["_weft_own_forward"] = own
    return _calling_own(cast(Any, type(module)))


@cache
def _calling_own(cls: type[Any]) -> type[Any]:
    """A class like `cls` whose forward is the module's own."""

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._weft_own_forward(*args, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def always() -> bool:
    """The part of a module that every rank runs on other heads, or on its tokens whatever they are."""
    return True


def never() -> bool:
    """The part of a module that every rank runs on the same."""
    return False


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and parameter.is_floating_point()


class _Running(threading.local):
    """The modules whose forward this thread is in, by id, with how often: a forward may call itself."""

    def __init__(self) -> None:
        self.depth: dict[int, int] = {}


@cache
def _reading_locals(cls: type[Any], names: tuple[str, ...]) -> type[Any]:
    """A class like `cls` whose forward reads parameters of these names as plain tensors, in the thread that it runs in."""
    running = _Running()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # traced in one thread; torch.compile does not trace another thread's state
            before, self._weft_traced = self._weft_traced, True
            try:
                return cls.forward(self, *args, **kwargs)
            finally:
                self._weft_traced = before
        depth = running.depth
        depth[id(self)] = depth.get(id(self), 0) + 1
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            depth[id(self)] -= 1
            if not depth[id(self)]:
                del depth[id(self)]

    members = {name: _local_parameter(name, running) for name in names} | {"_weft_traced": False}
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__, **members})


def _local_parameter(name: str, running: _Running) -> property:
    def read(module: Any) -> torch.Tensor:
        parameter: torch.Tensor = module._parameters[name]
        inside = module._weft_traced if torch.compiler.is_compiling() else id(module) in running.depth
        if not inside:
            return parameter
        mine = local(parameter)
        return with_summed_gradient(mine, group_of(parameter).group_name) if module._weft_part() else mine

    return property(read)
