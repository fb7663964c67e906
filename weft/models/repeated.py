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

import torch
from torch import nn

from weft.compat.dispatch import autocast_enabled, layout_check, thread_state
from weft.models.parameters import ModuleParameter, kept_parameter
from weft.ops.front import find_remembered, make_recorded, repeat
from weft.ops.operator import Recording
from weft.runtime.bound_call import PLAIN, RememberedCall
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
