"""The plain tensors that the modules of weft compute with, while their parameters are DTensors.

A module has one ModuleParameter for each parameter. It looks up this rank's part and its process group once, and again when the
parameter is another object or has other memory (`module.to`). While the parameter is frozen, the part is outside of autograd.
Otherwise it is the output of an autograd node, one for each stream, which saves no tensors, so all forward passes can use it:

    AccumulateGrad of the DTensor <-- _Part (makes the gradient a DTensor) <-- the module's operators

The gradient of a parameter that is whole on every rank, while each rank computes a part of the gradient, is summed over the
ranks. Parameters whose gradients arrive in the same backward passes are summed together, in one all-reduce when the last of
them has arrived:

    _Part of a norm's weight  <--.                            .-- operators of the norm
    _Part of the next norm's  <-- +-- one node of a _Bundle --+-- operators of the next norm
    _Part of a linear's bias  <--'                            '-- operators of the linear

A bundle is found by observation. If all parameters were bundled in advance, autograd would run the hooks of parameters that a
pass does not use, with None as the gradient. So in its first backward pass, each parameter has a node of its own, and those
whose nodes run in one pass become a bundle. A parameter without a gradient in a pass in which others of its bundle have one
leaves them (its hooks see that once, with None), together with all others without one. Ranks that run the same program
therefore have the same bundles, even if they free a model's modules at different times.

FSDP2 replaces parameters, and needs each gradient when the backward pass leaves its module. So a parameter that is not the one
that the style has made is summed by itself.

Compiled code does none of this. It reads `DTensor.to_local`, whose cost is traced away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.compat.dispatch import backward_pass
from weft.compat.dtensors import differentiable_dtensor_of, dtensor_of, local_tensor_of, run_first, spec_of
from weft.compat.streams import raw_stream
from weft.ops.parts import with_summed_gradient, with_summed_gradients

Tensor = torch.Tensor
_PARAMETERS = "_weft_parameters"


class ModuleParameter:
    """This rank's part of one parameter of a module. A copy of the module looks its parts up anew.

    is_moved: whether the parameter is on another mesh, or has other placements, than the one that was looked up first.
    made: the parameter that a style has made, if its gradient may be summed together with others. It is dropped when the module
        has another one, whose gradient is summed by itself.
    """

    def __init__(self, made: nn.Parameter | None = None) -> None:
        self.bundle: _Bundle | None = None
        self._made = made
        self._parameter: Tensor | None = None
        self._memory: Tensor | None = None
        self._plain: Tensor | None = None
        self._transposed: Tensor | None = None
        self._place: tuple[Any, ...] | None = None
        self.is_moved = False
        self._part: Tensor | None = None
        self._group: dist.ProcessGroup | None = None
        self._gpu: int | None = None
        self._stream: int | None = None

    def __reduce__(self) -> tuple[type[ModuleParameter], tuple[nn.Parameter | None]]:
        return ModuleParameter, (self._made,)

    def part(self, parameter: Tensor) -> Tensor:
        """Return this rank's part. parameter: the module's parameter now."""
        if parameter is not self._parameter or local_tensor_of(parameter) is not self._memory:
            self._look_up(parameter)
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            plain: Any = self._plain
            return plain  # type: ignore[no-any-return]
        # A backward pass runs a node on the stream on which it was made.
        if self._part is None or (self._gpu is not None and raw_stream(self._gpu) != self._stream):
            self._stream = None if self._gpu is None else raw_stream(self._gpu)
            self._part = _Part.apply(parameter)  # type: ignore[no-untyped-call]
            run_first(self._part.grad_fn)
        return self._part

    def transposed(self, parameter: Tensor) -> Tensor:
        """Return the transpose of this rank's part of a matrix, outside of autograd. parameter: the module's parameter now."""
        if parameter is not self._parameter or local_tensor_of(parameter) is not self._memory:
            self._look_up(parameter)
        if self._transposed is None:
            self._transposed = cast(Tensor, self._plain).t()
        return self._transposed

    def is_of(self, parameter: Tensor) -> bool:
        """Return whether the module's parameter is the one that was looked up."""
        return parameter is self._parameter and local_tensor_of(parameter) is self._memory

    def part_of(self, parameter: Tensor) -> Tensor:
        """Return this rank's part, outside of the graph that `part` makes. It is differentiable if gradients are recorded."""
        return own_part(parameter) if torch.is_grad_enabled() or not self.is_of(parameter) else cast(Tensor, self._plain)

    def gradient_of(self, grad: Tensor) -> Tensor:
        """Return the gradient of the parameter, given that of this rank's part."""
        return _gradient(grad, spec_of(cast(Tensor, self._parameter)), cast(Tensor, self._memory).stride())

    def summed(self, parameter: Tensor) -> Tensor:
        """Return this rank's part, with its gradient summed over the ranks."""
        part = self.part(parameter)
        if not part.requires_grad:
            if not parameter.requires_grad:
                self.bundle = None
            return part
        if self.bundle is not None:
            return self.bundle.read(self, part)
        me, name = ref(self), self.group(parameter).group_name
        return with_summed_gradients([part], name, lambda _: _observe(me, name))[0]

    def group(self, parameter: Tensor) -> dist.ProcessGroup:
        """Return the process group that shares the parameter."""
        if parameter is not self._parameter:
            self._look_up(parameter)
        if self._group is None:
            self._group = get_process_group(parameter)
        return self._group

    def last_part(self) -> Tensor | None:
        """Return this rank's part of the parameter that was read last. None if that does not require gradients now."""
        parameter = self._parameter
        if parameter is None or not parameter.requires_grad:
            return None
        # A backward pass that reaches a part of memory that `module.to` has replaced would raise an error.
        return self.part(parameter) if self._part is None or local_tensor_of(parameter) is not self._memory else self._part

    def observe(self, group: str) -> None:
        """Join the bundle of the parameters whose gradients this backward pass has summed one by one."""
        if self._made is None or self.bundle is not None:
            return
        key = group, backward_pass()
        bundle = _OBSERVED.get(key)
        if bundle is None:
            bundle = _OBSERVED[key] = _Bundle(group)
        bundle.add([self])

    def _look_up(self, parameter: Tensor) -> None:
        if parameter is not self._made:
            self._made = self.bundle = None
        self._memory = local_tensor_of(parameter)
        spec = spec_of(parameter)
        self._place = self._place or (spec.mesh, spec.placements)
        self.is_moved = self._place != (spec.mesh, spec.placements)
        self._parameter, self._plain, self._part, self._group = parameter, self._memory.detach(), None, None
        self._transposed = None
        self._gpu = self._memory.device.index if self._memory.is_cuda else None


def own_part(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, of which the caller knows the placement. Not for torch.compile."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return local_tensor_of(x)
    found: Tensor = _Part.apply(x)  # type: ignore[no-untyped-call]
    return found


def as_whole(part: Tensor, spec: Any) -> Tensor:
    """Return a tensor as this rank's part of a DTensor. Not for torch.compile. spec: as of compat's `spec_of`."""
    found: Tensor = _Whole.apply(part, spec)  # type: ignore[no-untyped-call]
    return found


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, spec: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        return dtensor_of(part.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        if spec_of(grad).placements != ctx.spec.placements:
            grad = grad.redistribute(ctx.spec.mesh, ctx.spec.placements)
        return grad.to_local() if torch.is_grad_enabled() else local_tensor_of(grad), None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        memory, ctx.spec = local_tensor_of(parameter), spec_of(parameter)
        ctx.strides = memory.stride()
        return memory.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else _gradient(grad, ctx.spec, ctx.strides)


def _gradient(grad: Tensor, spec: Any, strides: Sequence[int]) -> Tensor:
    """Return the gradient of a DTensor, given that of its part. strides: those of the part."""
    if not torch.is_grad_enabled() and grad.stride() == strides:
        return dtensor_of(grad, spec)
    return differentiable_dtensor_of(grad, spec.mesh, spec.placements, spec.shape)


class _Bundle:
    """Parameters of one process group whose gradients have arrived in the same backward passes so far.

    The parameters own it. It refers to them weakly, so they are freed with their modules. A parameter that is frozen or
    replaced leaves alone.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._members: list[ref[ModuleParameter]] = []
        self._results: dict[int, tuple[Tensor, Tensor]] = {}
        self._node = object()

    def add(self, members: Sequence[ModuleParameter]) -> None:
        for member in members:
            member.bundle = self
        self._members += map(ref, members)
        self._results = {}

    def read(self, member: ModuleParameter, part: Tensor) -> Tensor:
        """Return a member's part, with its gradient summed together with those of all members."""
        known = self._results.get(id(member))
        if known is None or known[0] is not part:
            self._make_node()
            known = self._results[id(member)]
        return known[1]

    def _make_node(self) -> None:
        alive = [member for one in self._members if (member := one()) is not None and member.bundle is self]
        self._members = [*map(ref, alive)]
        pairs = [(member, part) for member in alive if (part := member.last_part()) is not None]
        members, bundle, node = [ref(member) for member, _ in pairs], ref(self), object()

        def arrived(has: list[bool]) -> None:
            mine = bundle()
            # If this is not the newest node, the members may have been read from the newest one.
            if mine is not None and mine._node is node and not all(has):
                mine._split([member for member, had in zip(members, has, strict=True) if not had])

        summed = with_summed_gradients([part for _, part in pairs], self._group, arrived)
        self._node = node
        self._results = {id(member): (part, one) for (member, part), one in zip(pairs, summed, strict=True)}

    def _split(self, without: Sequence[ref[ModuleParameter]]) -> None:
        """Move the members without a gradient to a bundle of their own."""
        members = [member for one in without if (member := one()) is not None and member.bundle is self]
        _Bundle(self._group).add(members)
        self._results = {}


_OBSERVED: WeakValueDictionary[tuple[str, int], _Bundle] = WeakValueDictionary()
"""The bundle of each process group and backward pass in which a parameter had its first gradient."""


def _observe(parameter: ref[ModuleParameter], group: str) -> None:
    # The node of a result must not own the parameter, which owns the result.
    member = parameter()
    if member is not None:
        member.observe(group)


def keep_parts(module: nn.Module, *names: str, summed: bool = False) -> None:
    """Let `part_of` and `group_of` look up these parameters of a module, which a style has made, only once.

    summed: they may be read with summed gradients.
    """
    known = module.__dict__.setdefault(_PARAMETERS, {})
    known.update({name: ModuleParameter(module.get_parameter(name) if summed else None) for name in names})


def kept_parameter(module: nn.Module, name: str) -> ModuleParameter:
    """Return what `keep_parts` keeps of a parameter."""
    found: ModuleParameter = module.__dict__[_PARAMETERS][name]
    return found


def held_parameter(module: nn.Module, name: str) -> Tensor:
    """Return the parameter, or the tensor that torch has set in its place, as DistributedDataParallel does.

    Raises AttributeError if there is neither, because a parametrization computes it.
    """
    held = module._parameters if name in module._parameters else module.__dict__
    if name not in held:
        raise AttributeError(f"{type(module).__name__} has no parameter {name}")
    return cast(Tensor, held[name])


def part_of(module: nn.Module, name: str, *, eager: bool, summed: bool = False) -> Tensor:
    """Return this rank's part of a parameter.

    eager: torch does not compile the call.
    summed: sum its gradient over the ranks.
    """
    parameter = module._parameters.get(name)
    if parameter is None:  # a parametrization computes it, or torch has set a tensor in its place
        parameter = module.__dict__[name] if name in module.__dict__ else getattr(module, name)
    elif eager:
        known: ModuleParameter = module.__dict__[_PARAMETERS][name]
        return known.summed(parameter) if summed else known.part(parameter)
    part = cast(DTensor, parameter).to_local()
    return with_summed_gradient(part, get_process_group(parameter).group_name) if summed else part


def group_of(linear: nn.Module, *, eager: bool) -> dist.ProcessGroup:
    """Return the process group that shares a linear's weight. eager: torch does not compile the call."""
    weight = linear._parameters.get("weight")
    if weight is None or not eager:
        return get_process_group(cast(Tensor, linear.weight))
    known: ModuleParameter = linear.__dict__[_PARAMETERS]["weight"]
    return known.group(weight)


def get_process_group(parameter: Tensor) -> dist.ProcessGroup:
    """Return the process group that shares a parameter. Raises ValueError if its mesh has further dimensions during the
    call."""
    mesh = cast(DTensor, parameter).device_mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"a weight is on a mesh of {mesh.ndim} dimensions when its linear is called; apply fully_shard to the module "
            "that has all linears that share an input (a decoder layer), not to a linear"
        )
    return mesh.get_group()
