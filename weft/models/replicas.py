"""Parameters that are whole on every rank. They are plain tensors in their module's forward, and DTensors elsewhere.

A model whose linears have DTensors needs DTensors everywhere, because optimizers and torch.nn.utils.clip_grad_norm_ take no
mixture. But a norm over DTensors pays DTensor's dispatch in every operation. So the module gets a class whose parameters, read
as attributes while its forward runs, are this rank's plain tensors. All other code sees the DTensors. Modules may share
ParameterReaders. A module then also reads the parameters of another one (an adapter its base layer's, a layer its norm's) as
plain tensors.

A rank that computes a part has a part of the gradient:

    input of the module               `part` says     gradient
    this rank's tokens, or heads      True            summed over ranks (parameters.py)
    all of them, on every rank        False           already whole
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from weft.compat.dtensors import prepare_fully_sharded
from weft.models.linear import Distributor
from weft.models.parameters import held_parameter, keep_parts, part_of

Part = Callable[[], bool]


class _Depth(threading.local):
    """The number of a region's forwards that this thread is in."""

    count: int = 0


class ParameterReaders:
    """Modules that read each other's parameters, called a region.

    While the forward of any of them runs, its thread sees the parameters of all of them as plain tensors. A copy of the modules
    has its own region.
    """

    def __init__(self) -> None:
        self._depth = _Depth()
        # torch.compile traces in one thread, and does not trace another thread's state.
        self._traced = False
        self._prepared = False

    def __reduce__(self) -> tuple[type[ParameterReaders], tuple[()]]:
        return ParameterReaders, ()

    def running(self, *, eager: bool) -> bool:
        """Return whether this thread is in a forward of the region. eager: torch does not compile the call."""
        return self._depth.count > 0 if eager else self._traced

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a forward of the region. After a graph break, a forward that is not traced may call one that is."""
        eager = not torch.compiler.is_compiling()
        before, self._traced = self._traced, True
        if eager:
            if not self._prepared:  # FSDP2 reads DTensors when it prepares a layer, so not within a forward of the region
                self._prepared = True
                prepare_fully_sharded(args[0])
            self._depth.count += 1
        try:
            return forward(*args, **kwargs)
        finally:
            self._traced = before
            if eager:
                self._depth.count -= 1


def replicate(module: nn.Module, distribute: Distributor, part: Part, region: ParameterReaders | None = None) -> None:
    """Make a module's parameters, and those of its children, whole on every rank.

    Only plain floating point parameters are changed, so quantised weights are not.
    region: the modules that read these parameters. With None each module has its own region.
    """
    for each in module.modules():
        replicate_alone(each, distribute, part, region)


def replicate_alone(
    module: nn.Module,
    distribute: Distributor,
    part: Part,
    region: ParameterReaders | None = None,
    placement: Placement = Replicate(),  # noqa: B008 - a frozen value
) -> None:
    """Replicate the parameters of a module without its children, as `replicate` does. DTensors are not changed.

    placement: Shard if the module's forward should see this rank's part. `part` is then `never`.
    """
    # A parameter may have several names, of which named_parameters returns only the first.
    plain = tuple(name for name, parameter in module._parameters.items() if parameter is not None and _is_plain(parameter))
    for name in plain:
        module.register_parameter(name, distribute(module.get_parameter(name), placement))
    if plain:
        keep_parts(module, *plain, summed=part is not never)
        module.__class__ = _reading_locals(class_of(module), plain)
        module.__dict__["_weft_part"] = part
        module.__dict__["_weft_region"] = region or ParameterReaders()
    elif region is not None:
        enter(module, region)


def enter(module: nn.Module, region: ParameterReaders) -> None:
    """Let a module's forward be one of a region: it reads the region's parameters as plain tensors."""
    if "_weft_region" not in module.__dict__ and _has_forward(module):
        module.__class__ = _within(class_of(module))
        module.__dict__["_weft_region"] = region


def _has_forward(module: nn.Module) -> bool:
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def gathered_for_others(module: nn.Module, region: ParameterReaders) -> None:
    """Let other modules of the region read a sharded weight, while they run, as a plain tensor with all rows gathered.

    A model may multiply by its embedding's weight, or pass its head's weight to a loss.
    """
    module.__class__ = _read_by_others(class_of(module))
    module.__dict__["_weft_region"], module.__dict__["_weft_readers"] = ParameterReaders(), region


@cache
def _read_by_others(cls: type[Any]) -> type[Any]:
    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._weft_region.run(cls.forward, self, *args, **kwargs)

    def weight(self: Any) -> torch.Tensor:
        parameter: Any = held_parameter(self, "weight")
        eager = not torch.compiler.is_compiling()
        if self._weft_readers.running(eager=eager) and not self._weft_region.running(eager=eager):
            return cast(torch.Tensor, parameter.full_tensor())
        return cast(torch.Tensor, parameter)

    return derived(cls, forward=forward, weight=_attribute("weight", weight))


def class_of(module: nn.Module) -> Any:
    """Return a module's class, from which a new class is derived.

    A forward that was set on the module itself (module.forward = ...) would hide the new class's, so it becomes the class's
    forward.
    """
    own = module.__dict__.pop("forward", None)
    if own is None:
        return type(module)
    module.__dict__["_weft_own_forward"] = own
    return _calling_own(cast(Any, type(module)))


@cache
def _calling_own(cls: type[Any]) -> type[Any]:
    """Return a class like `cls` that calls the forward that was set on the module."""

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._weft_own_forward(*args, **kwargs)

    return derived(cls, forward=forward)


def always() -> bool:
    """Return True: every rank runs the module on other heads, or on its own tokens."""
    return True


def never() -> bool:
    """Return False: every rank runs the module on the same input."""
    return False


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and parameter.is_floating_point()


@cache
def _within(cls: type[Any]) -> type[Any]:
    """Return a class like `cls` whose forward counts as a forward of a region."""

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._weft_region.run(cls.forward, self, *args, **kwargs)

    return derived(cls, forward=forward)


@cache
def _reading_locals(cls: type[Any], names: tuple[str, ...]) -> type[Any]:
    """Return a class like `cls` whose named parameters are plain tensors while a forward of its region runs."""
    return derived(_within(cast(Any, cls)), **{name: _local_parameter(name) for name in names})


def derived(cls: type[Any], **members: Any) -> type[Any]:
    """Return a subclass with the same name."""
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **members})


def _local_parameter(name: str) -> property:
    def read(module: Any) -> torch.Tensor:
        parameter = held_parameter(module, name)
        eager = not torch.compiler.is_compiling()
        if not module._weft_region.running(eager=eager) or not isinstance(parameter, DTensor):
            return parameter
        return part_of(module, name, eager=eager, summed=module._weft_part())

    return _attribute(name, read)


def _attribute(name: str, read: Callable[[Any], torch.Tensor]) -> property:
    """Return a property that is read by a function, and is otherwise an attribute of the module as any other.

    DistributedDataParallel deletes a parameter that is a DTensor, and sets a plain attribute (a DTensor that is no Parameter)
    under the same name.
    """

    def write(module: Any, tensor: object) -> None:
        module.__dict__[name] = tensor

    def delete(module: Any) -> None:
        if name not in module.__dict__:
            raise AttributeError(f"{type(module).__name__} has no parameter {name}")
        del module.__dict__[name]

    return property(read, write, delete)
