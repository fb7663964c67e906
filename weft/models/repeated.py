"""The operator calls that a module makes again and again, with its own weights.

An operator compares all arguments of a call with those of earlier ones. In a module most of them cannot have changed: they are
the module's settings, and its parameters. So a RepeatedProduct looks at the input, and at whether the parameters are the same
objects, and then makes the operator's remembered call (weft.ops.front) directly.

If autograd records the call, its node takes the parameters, and not this rank's parts of them: a part of its own in the graph
would be a further node for each parameter.

    x, parameters (DTensors)  -->  one node: reads the parts, runs the operator  -->  products
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import nn

from weft.compat.dispatch import autocast_enabled
from weft.compat.layouts import layout_check
from weft.compat.thread_state import thread_state
from weft.models.parameters import ModuleParameter, kept_parameter
from weft.ops.front import find_remembered, repeat
from weft.ops.operator import Reading, Recording
from weft.runtime.bound_call import RememberedCall

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
        self._calls: dict[Any, tuple[Callable[..., bool], Callable[[], RememberedCall | None], Recording | None]] = {}

    def __reduce__(self) -> tuple[type[RepeatedProduct], tuple[()]]:
        return RepeatedProduct, ()

    def again(self, x: torch.Tensor, linears: Sequence[nn.Module], *where: Any) -> Any:
        """Make the call, and return what the operator returns. Return None if no such call is known.

        where: what else may differ between the calls of this place.
        """
        state = thread_state(x.dtype)
        call = self._calls.get((x.shape, where, state))
        if call is None:
            return None
        check, find, recording = call
        parameters, given = [x], [x]
        for linear in linears:
            parameter = linear._parameters.get("weight")
            kept = kept_parameter(linear, "weight")
            if parameter is None or not kept.is_of(parameter):
                return None
            parameters.append(parameter)
            given.append(kept.transposed)
        known = find()
        if known is None or not check(*parameters):
            return None
        return repeat(known, recording, parameters, given)

    def remember(
        self, x: torch.Tensor, linears: Sequence[nn.Module], *where: Any, of: tuple[Any, tuple[Any, ...], dict[str, Any]]
    ) -> None:
        """Remember a call that was just made. of: the operator, its arguments and its options."""
        state, known = thread_state(x.dtype), find_remembered(*of)
        if state is None or known is None or autocast_enabled():  # autocast multiplies copies
            return
        parameters = [x]
        for linear in linears:
            parameter = linear._parameters.get("weight")
            if parameter is None or not kept_parameter(linear, "weight").is_of(parameter):
                return
            parameters.append(parameter)
        recording, check = known.recording, layout_check(parameters)
        if check is None or (recording is None and known.bound is None):
            return
        if recording is not None:
            if recording.reads is None and any(known.request.reads):  # it reads a copy of x
                return
            reads: list[Reading | None] = [recording.reads[0] if recording.reads else None]
            reads += [_Transposed(kept_parameter(linear, "weight")) for linear in linears]
            recording = Recording(recording.operator, recording.places, recording.options, reads, recording.view)
        if len(self._calls) >= _MOST:
            self._calls.clear()
        self._calls[x.shape, where, state] = check, ref(known), recording
