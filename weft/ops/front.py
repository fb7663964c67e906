"""The front door of the public operators: a call that was made before takes its BoundCall, and any other takes the slow path.

A public function is decorated by `public`. It checks its arguments and returns an OperatorRequest, which says which operator
runs, with which tensors and options. The decorator runs it, and remembers it by what identifies the call
(weft.runtime.bound_call): the function, the shapes, strides, dtypes and devices of its tensors, its other arguments, and the
settings of torch on which results depend. The next call that is the same needs no check:

    remembered, with a BoundCall that can make it     BoundCall -> `view`, `after`
    remembered, with gradients                        one autograd.Function over a BoundCall, which reads and views -> `after`
    remembered, with gradients, `reads` make copies   `reads` -> one autograd.Function over a BoundCall -> `view`, `after`
    remembered, otherwise                             `reads` -> LibraryOperator -> `view`, `after`
    remembered without its own tensors (it passes     as if it were not remembered
        a view, such as b[None]), no BoundCall
    not remembered                                    the function -> `reads` -> LibraryOperator -> `view`, `after`
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
from weft.compat.dispatch import observed
from weft.core.schedule import Schedule
from weft.ops.common import publish_error_instead
from weft.ops.operator import LibraryOperator, Places, Reading, Recording, flatten, unflatten
from weft.runtime.bound_call import RememberedCall
from weft.runtime.groups import GROUPS

F = TypeVar("F", bound=Callable[..., Any])


class OperatorRequest(NamedTuple):
    """An OperatorRequest says what a public function computes.

    operator: the operator that runs.
    tensors: the caller's tensors, in the places of the operator's tensors, or views of them. A call that takes a view is
        remembered only with a BoundCall, which needs nothing but the caller's tensors.
    options: the operator's options. Scales are further tensors and options, as for LibraryOperator.compute.
    group: the process group. None for the whole world.
    reads: for each of the tensors, or each list of tensors, how the operator reads it. None for what it reads as it is. It is
        empty if it reads all as they are.
    view: how each result is restored to the caller's shape. None if it is the operator's.
    after: returns what the public function returns, given the restored results. None if that is the same.

    reads, view and after are kept for later calls, so they must not refer to tensors.
    """

    operator: LibraryOperator
    tensors: tuple[Any, ...]
    options: tuple[Any, ...]
    group: dist.ProcessGroup | None
    reads: tuple[Reading | None, ...] = ()
    view: Reading | None = None
    after: Callable[[Any], Any] | None = None

    def run(self) -> Any:
        """Run the operator."""
        return self.finish(self.operator.compute(self.read(self.tensors), self.options)[0])

    def read(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the operator's tensors. tensors: the caller's."""
        if not any(self.reads):
            return list(tensors)
        pairs = zip(tensors, self.reads, strict=True)
        return [
            one
            if read is None or one is None
            else list(map(read.read, one))
            if isinstance(one, (list, tuple))
            else read.read(one)
            for one, read in pairs
        ]

    def finish(self, results: Any) -> Any:
        """Return what the public function returns, given what the operator does."""
        if self.view is not None:
            view = self.view
            results = view.restore(results) if self.operator.single else [view.restore(one) for one in results]
        return results if self.after is None else self.after(results)


def public(function: F) -> F:
    """Decorate a public operator, which all ranks of its argument `group` call.

    The function returns an OperatorRequest, which is run here, or the result itself. If it raises on this rank, peers that wait
    for this rank in the call get the error, and do not wait until the bound.
    """

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            request = function(*arguments, **options)
            return request.run() if isinstance(request, OperatorRequest) else request
        try:
            tensors: list[torch.Tensor] = []
            key, values = [function, len(arguments), *options], [*arguments, *options.values()]
            identity, known = GROUPS.remembered.find(key, values, tensors)
            made = None if known is None or known.bound is None or known.recording is not None else known.bound(tensors)
            if known is None or (made is None and not known.request.tensors):
                request = function(*arguments, **options)
                return _run(request, identity, tensors, arguments, options) if isinstance(request, OperatorRequest) else request
            request, recording = known.request, known.recording
            if made is not None:
                results: Any = made[known.picks[0]] if request.operator.single else [made[pick] for pick in known.picks]
                if known.view is not None:
                    return request.finish(results)
                return results if request.after is None else request.after(results)
            places, flat = request.tensors
            given = list(map(tensors.__getitem__, flat))
            if recording is not None and recording.reads is None and any(request.reads):  # what it reads are copies
                _, given = flatten(request.read(unflatten(places, given)))
                return request.finish(recording.apply(known, given))
            if recording is not None:
                results = recording.apply(known, given)
                return results if request.after is None else request.after(results)
            request = request._replace(tensors=unflatten(places, given), group=known.group())
            # A BoundCall that could not make this call may be of a program that is closed. Then _run remembers another one.
            # Calls without a BoundCall, as on CPUs, would be remembered again in vain.
            return request.run() if known.bound is None else _run(request, identity, tensors, arguments, options)
        except Exception as error:
            _publish(error, function, arguments, options)
            raise

    return cast(F, call)


def find_remembered(function: Any, arguments: Sequence[Any], options: dict[str, Any]) -> RememberedCall | None:
    """Return what is remembered of a public operator's call with these arguments."""
    key, values = [function.__wrapped__, len(arguments), *options], [*arguments, *options.values()]
    return GROUPS.remembered.find(key, values, [])[1]


def make_recorded(
    function: Any,
    arguments: Sequence[Any],
    options: dict[str, Any],
    tensors: Sequence[Any],
    memory: Sequence[torch.Tensor],
    reads: Sequence[Reading | None],
) -> tuple[Any, RememberedCall, Recording] | None:
    """Make a call of a public operator that autograd records, whose node takes other tensors than the operator.

    tensors, memory: as for Recording.apply: the first of the operator's tensors, and what `reads` can read as the others.

    Returns what the operator returns, and what `repeat` takes. Returns None without a call if the operator reads a copy.
    """
    try:
        request: OperatorRequest = function.__wrapped__(*arguments, **options)
        places, flat = flatten(request.tensors)
        recording = _recording_of(request, places, flat, flatten(request.read(request.tensors))[1])
    except Exception as error:
        _publish(error, function, arguments, options)
        raise
    if recording.reads is None and any(request.reads):
        return None
    reads = [recording.reads[0] if recording.reads else None, *reads]
    recording = Recording(request.operator, places, request.options, reads, request.view)
    known = RememberedCall(request.group or dist.group.WORLD, request=request._replace(tensors=(), group=None))
    return repeat(known, recording, tensors, memory), known, recording


def repeat(known: RememberedCall, recording: Recording | None, tensors: Sequence[Any], memory: Sequence[torch.Tensor]) -> Any:
    """Make a remembered call, and return what the public function returns. Return None if it has to be made in another way.

    recording: the Recording of the call, if autograd records it.
    tensors, memory: as for Recording.apply.
    """
    group, request = known.group(), known.request
    if group not in LIVING_GROUPS:
        return None
    try:
        if recording is not None:
            results = recording.apply(known, tensors, memory)
            return results if request.after is None else request.after(results)
        if known.bound is None or (made := known.bound(memory)) is None:
            return None
        results = made[known.picks[0]] if request.operator.single else [made[pick] for pick in known.picks]
        if known.view is not None:
            return request.finish(results)
        return results if request.after is None else request.after(results)
    except Exception as error:
        publish_error_instead(group, error)
        raise


def _publish(error: Exception, function: Any, arguments: Sequence[Any], options: dict[str, Any]) -> None:
    """Publish that this rank raises an error instead of a public function's call."""
    with suppress(TypeError):  # the arguments do not fit the function
        publish_error_instead(inspect.signature(function).bind(*arguments, **options).arguments.get("group"), error)


def _run(
    request: OperatorRequest,
    identity: tuple[Any, ...] | None,
    tensors: Sequence[torch.Tensor],
    arguments: Sequence[Any],
    options: dict[str, Any],
) -> Any:
    """Run an OperatorRequest, and remember it for calls with the same identity. tensors: those of the call."""
    given, known = request.read(request.tensors), RememberedCall()
    group = request.group or dist.group.WORLD
    places, flat = flatten(request.tensors)
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    own = all(id(one) in numbers for one in flat)
    if identity is not None and group is not None:
        values = [one for one in (*arguments, *options.values()) if isinstance(one, Schedule)]
        template = request._replace(tensors=(places, [numbers[id(one)] for one in flat]) if own else (), group=None)
        known = RememberedCall(group, values=values, request=template)
    if request.operator.is_recorded(given) and not observed():
        # Later calls are recorded in the same way: a checkpoint compares what two calls save for the backward.
        read = flatten(given)[1]
        known.recording = recording = _recording_of(request, places, flat, read)
        copies = recording.reads is None and any(request.reads)
        results = recording.apply(known, read if copies else flat)
        results = request.finish(results) if copies else results if request.after is None else request.after(results)
    else:
        results, bound, picks = request.operator.compute(given, request.options, tensors)
        known.keep(bound, picks, request.view)
        results = request.finish(results)
    if identity is not None and known.request is not None and (own or (known.recording is None and known.bound is not None)):
        GROUPS.remembered.add(identity, tensors, known)
    return results


def _recording_of(
    request: OperatorRequest, places: Places, tensors: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> Recording:
    """Return the Recording of calls like this one. tensors, given: the caller's and the operator's tensors, each in one list.

    If what the operator reads are copies, it is a Recording of these, and autograd records the copies.
    """
    if not any(request.reads):
        return Recording(request.operator, places, request.options, view=request.view)
    if any(one.data_ptr() != read.data_ptr() for one, read in zip(tensors, given, strict=True)):
        return Recording(request.operator, places, request.options)
    reads: list[Reading | None] = []
    for place, read in zip(places, request.reads, strict=True):
        reads += [read] * (0 if place is None else 1 if place < 0 else place)
    return Recording(request.operator, places, request.options, reads, request.view)
