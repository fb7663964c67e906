"""The front door of the public operators: a call that was made before takes its BoundCall, and any other takes the slow path.

A public function is decorated by `public`. It checks its arguments and returns an OperatorRequest, which says which operator
runs, with which tensors and options. The decorator runs it, and remembers it by what identifies the call
(weft.runtime.bound_call): the function, the shapes, strides, dtypes and devices of its tensors, its other arguments, and the
settings of torch on which results depend. The next call that is the same needs no check:

    remembered, with a BoundCall that can make it     BoundCall -> `after`
    remembered, with gradients                        `before` -> one autograd.Function over a BoundCall -> `after`
    remembered, otherwise                             `before` -> LibraryOperator -> `after`
    not remembered                                    the function -> `before` -> LibraryOperator -> `after`
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from weft.compat.c10d import LIVING_GROUPS
from weft.core.schedule import Schedule
from weft.ops.common import publish_error_instead
from weft.ops.operator import LibraryOperator, flatten, unflatten
from weft.runtime.bound_call import RememberedCall, identify
from weft.runtime.groups import GROUPS

F = TypeVar("F", bound=Callable[..., Any])


class OperatorRequest(NamedTuple):
    """An OperatorRequest says what a public function computes.

    operator: the operator that runs.
    tensors: the caller's tensors, in the places of the operator's tensors.
    options: the operator's options.
    group: the process group. None for the whole world.
    before: returns the operator's tensors, given the caller's. None if they are the same.
    after: returns what the public function returns, given what the operator does. None if that is the same.

    before and after are kept for later calls, so they must not refer to tensors.
    """

    operator: LibraryOperator
    tensors: tuple[Any, ...]
    options: tuple[Any, ...]
    group: dist.ProcessGroup | None
    before: Callable[..., tuple[Any, ...]] | None = None
    after: Callable[[Any], Any] | None = None

    def run(self) -> Any:
        """Run the operator."""
        tensors = self.tensors if self.before is None else self.before(*self.tensors)
        results = self.operator(*tensors, *self.options)
        return results if self.after is None else self.after(results)


def public(function: F) -> F:
    """Decorate a public operator, which all ranks of its argument `group` call.

    The function returns an OperatorRequest, which is run here, or the result itself. If it raises on this rank, peers that wait
    for this rank in the call get the error, and do not wait until the bound.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            request = function(*arguments, **options)
            return request.run() if isinstance(request, OperatorRequest) else request
        try:
            tensors: list[torch.Tensor] = []
            identity = identify([function, len(arguments), *options], [*arguments, *options.values()], tensors)
            known = None if identity is None else GROUPS.remembered.get(identity)
            if known is not None and (known.group() not in LIVING_GROUPS or (known.values and known.is_outdated())):
                known = None
            if known is None:
                request = function(*arguments, **options)
                return _run(request, identity, tensors, arguments, options) if isinstance(request, OperatorRequest) else request
            request = known.request
            if not known.recorded and known.bound is not None and (made := known.bound(tensors)) is not None:
                results = made[known.picks[0]] if request.operator.single else [made[pick] for pick in known.picks]
                return results if request.after is None else request.after(results)
            places, flat = request.tensors
            given = list(map(tensors.__getitem__, flat))
            if known.recorded:
                if request.before is not None:
                    places, given = flatten(request.before(*unflatten(places, given)))
                results = request.operator.apply(known, places, request.options, given)
                return results if request.after is None else request.after(results)
            request = request._replace(tensors=unflatten(places, given), group=known.group())
            # A BoundCall that could not make this call may be of a program that is closed. Then _run remembers another one.
            return request.run() if known.bound is None else _run(request, identity, tensors, arguments, options)
        except Exception as error:
            with suppress(TypeError):  # the arguments do not fit the function
                publish_error_instead(signature.bind(*arguments, **options).arguments.get("group"), error)
            raise

    return cast(F, call)


def _run(
    request: OperatorRequest,
    identity: tuple[Any, ...] | None,
    tensors: Sequence[torch.Tensor],
    arguments: Sequence[Any],
    options: dict[str, Any],
) -> Any:
    """Run an OperatorRequest, and remember it for calls with the same identity. tensors: those of the call."""
    given = request.tensors if request.before is None else request.before(*request.tensors)
    results, bound, picks = request.operator.compute(given, request.options, tensors)
    group = request.group or dist.group.WORLD
    places, flat = flatten(request.tensors)
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    if identity is not None and group is not None and all(id(one) in numbers for one in flat):
        values = [one for one in (*arguments, *options.values()) if isinstance(one, Schedule)]
        template = request._replace(tensors=(places, [numbers[id(one)] for one in flat]), group=None)
        made = RememberedCall(group, bound, picks, values, template)
        made.recorded = request.operator.is_recorded(given)
        GROUPS.remembered.add(identity, made)
    return results if request.after is None else request.after(results)
