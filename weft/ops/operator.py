"""This module defines operators of torch.library, and calls them.

A call of an operator takes one of these ways:

    compiled, or observed by a mode     torch's dispatcher, which takes some 10 us of host time
    with gradients                      one autograd.Function, whose forward and backward call operators without gradients
    otherwise                           the operator's own function

A differentiable operator weft::NAME is two operators for the dispatcher. Its kernel for autograd is the same autograd.Function,
and computes by weft::NAME_forward, which has no derivative. So a graph that torch.compile has traced contains NAME_forward
alone, and no autograd runs around it.

Operators are defined by torch.library.Library and not by the custom_op decorator, because the wrapper of custom_op loads
torch._dynamo at the first call. If a process group exists by then, its threads outlive its destruction (docs/lab/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import chain, count, islice
from typing import Any, Protocol

import torch

from weft.compat.c10d import group_named
from weft.compat.dispatch import (
    SavedTensorsHooks,
    apply_of,
    autocast_enabled,
    call_backward_directly,
    forward_mode,
    has_tangent,
    in_functional_gradient,
    is_batch_of_gradients,
    observed,
    recomputation_hooks,
    register_flops,
    thread_state,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    without_autocast,
)
from weft.core.problem import Scaling
from weft.ops.common import FLOAT8, QUANTISED
from weft.ops.schema import FORMULAS, schema_of
from weft.runtime.bound_call import PLAIN, BoundCall, RememberedCall, bind
from weft.runtime.calls import Call, ScaledOperands
from weft.runtime.groups import GROUPS

Function = Callable[..., Any]


_LIBRARY = torch.library.Library("weft", "DEF")  # type: ignore[no-untyped-call]


class LibraryOperator:
    """A LibraryOperator is weft::name.

    name: its name in torch.library.
    dispatched: the operator of torch.library.
    forward: the operator of torch.library that computes the same without derivatives. If it has no derivatives, `dispatched`.
    single: whether it returns one tensor, and not several. Several are a list or a tuple.
    returns_tuple: whether it returns a tuple of tensors. torch passes a backward the gradients of a tuple one by one, and those
        of a list as one list.
    """

    def __init__(
        self,
        name: str,
        run: Function,
        fake: Function,
        *,
        returns: Any = None,
        save: Function | None = None,
        backward: Function | None = None,
        double_backward: bool = True,
        saves_results: bool = True,
    ) -> None:
        schema, self._count, self._option_count, self._places = schema_of(name, run, returns)
        self.name, self._run, self._fake, self.save = name, run, fake, save
        self.saves_results = saves_results
        self._calls, self._has_lists = returns is not None, "int[]" in schema
        self.single, self.returns_tuple = not schema.endswith(("[]", ")")), schema.endswith(")")
        self.function: Any = type(f"weft_{name}", (_Recorded,), {})
        self.apply = apply_of(self.function)
        call_backward_directly(self.function)
        self._flops = FORMULAS.get(name)
        self.dispatched = self.forward = self._define(name, schema)
        self.backward: Any = None
        if backward is not None:
            self.backward = backward if double_backward else _refuse_second_derivatives(backward, f"weft::{name}")
            self.forward = self._define(f"{name}_forward", schema.replace("(", "_forward(", 1))
            _LIBRARY.impl(name, self._autograd_kernel, "Autograd")  # type: ignore[no-untyped-call]

    def _define(self, name: str, schema: str) -> Function:
        _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, self._kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"weft::{name}", lambda *flat: self._fake(*self._group(*self._split(flat))), lib=_LIBRARY)
        packet = getattr(torch.ops.weft, name)
        if self._flops is not None:
            register_flops(packet, self._flops)
        found: Function = packet.default
        return found

    def __call__(self, *flat: Any) -> Any:
        """Compute the operator without scales. Its tensors come first, and then its options, one argument for each."""
        return self.compute(flat[: self._count], flat[self._count :])[0]

    def compute(
        self, tensors: Sequence[Any], options: Sequence[Any], bind_to: Sequence[torch.Tensor] | None = None
    ) -> tuple[Any, BoundCall | None, Sequence[int]]:
        """Return the results, and a BoundCall for calls like this one with its picks (weft.runtime.bound_call.RememberedCall).

        tensors, options: a call with FP8 operands has scale_a and scale_bs as further tensors, and the rest of
            weft.ops.schema.SCALES as further options.
        bind_to: the tensors by which the BoundCall will be called. Without them there is none.
        """
        if torch.compiler.is_compiling():
            return self.dispatched(*self.arguments(tensors, options)), None, ()
        identity, flat, known = self._find(tensors, options)
        if known is not None or can_skip_dispatcher(tensors):
            return self._compute_plain(tensors, options, bind_to, identity, flat, known)
        if self.backward is None or observed() or not _are_plain(tensors, grad=False):
            return self.dispatched(*self.arguments(tensors, options)), None, ()
        places, flat = flatten(tensors)
        return Recording(self, places, options).apply(RememberedCall(), flat), None, ()

    def compute_plain(
        self, tensors: Sequence[Any], options: Sequence[Any], bind_to: Sequence[torch.Tensor] | None = None
    ) -> tuple[Any, BoundCall | None, Sequence[int]]:
        """Do as `compute`, without gradients, on ordinary tensors."""
        return self._compute_plain(tensors, options, bind_to, *self._find(tensors, options))

    def is_recorded(self, tensors: Sequence[Any]) -> bool:
        """Return whether autograd records a call with these tensors. No mode may observe this thread."""
        plain, needs_no_gradient = _are_plain(tensors, grad=False), _are_plain(tensors, torch.is_grad_enabled())
        return self.backward is not None and plain and not needs_no_gradient

    def _find(
        self, tensors: Sequence[Any], options: Sequence[Any]
    ) -> tuple[tuple[Any, ...] | None, list[torch.Tensor], RememberedCall | None]:
        """Return what identifies a call without gradients, its tensors in one list, and what is remembered of it."""
        if not self._calls:
            return None, [], None
        places, flat = flatten(tensors)
        state = thread_state(flat[0].dtype)
        if state is None:
            return None, flat, None
        if self._has_lists:
            options = [tuple(one) if isinstance(one, list) else one for one in options]
        identity = (self, places, *options, *state, flat[0].shape)
        return identity, flat, GROUPS.remembered.get(identity, flat)

    def _compute_plain(
        self,
        tensors: Sequence[Any],
        options: Sequence[Any],
        bind_to: Sequence[torch.Tensor] | None,
        identity: tuple[Any, ...] | None,
        flat: Sequence[torch.Tensor],
        known: RememberedCall | None,
    ) -> tuple[Any, BoundCall | None, Sequence[int]]:
        if not self._calls:
            return self._run(*self._group(tensors, options)), None, ()
        if known is not None and known.bound is not None and (made := known.bound(flat)) is not None:
            results = made[known.picks[0]] if self.single else [made[pick] for pick in known.picks]
            return results, None if bind_to is None else known.bound.of_tensors(flat, bind_to), known.picks
        call: Call = self._run(*self._group(tensors, options))
        agreed, outputs = GROUPS.make_call(call.group, call)
        results = call.results_of(outputs)
        allocated = call.allocated or chain.from_iterable(outputs.values())
        numbers = dict(zip(map(id, allocated), count(), strict=False))
        picks = [numbers[id(result)] for result in results if id(result) in numbers]
        bound = None if known is None else known.bound
        if identity is not None and (known is None or (bound is not None and not bound.makes(agreed))):
            bound = bind(agreed, call, outputs, flat)
            GROUPS.remembered.add(identity, flat, RememberedCall(group_named(call.group), bound, picks))
        if bind_to is not None:
            bound = (bound and bound.of_tensors(flat, bind_to)) or bind(agreed, call, outputs, bind_to)
        return results[0] if self.single else results, bound, picks

    def _kernel(self, *flat: Any) -> Any:
        tensors, options = self._split(flat)
        identity, given, known = self._find(tensors, options)
        if known is None:
            self._refuse_tangents(tensors)
        return self._compute_plain(tensors, options, None, identity, given, known)[0]

    def _refuse_tangents(self, tensors: Sequence[Any]) -> None:
        """Raise ValueError for a dual tensor (forward-mode derivatives).

        torch's own autograd kernel would drop its tangent if no tensor requires a gradient.
        """
        if forward_mode() and any(map(has_tangent, tree_leaves(tensors))):
            raise ValueError(
                f"weft::{self.name} has no forward-mode derivative, and an argument is a dual tensor"
                " (torch.autograd.forward_ad, torch.func.jvp); use reverse mode"
            )

    def _autograd_kernel(self, *flat: Any) -> Any:
        self._refuse_tangents(flat)
        tensors, options = self._split(flat)
        places, given = flatten(tensors)
        if not (torch.is_grad_enabled() and any(one.requires_grad for one in given)):
            return self.forward(*flat)
        results = Recording(self, places, options).apply(None, given)
        return results if self.single or self.returns_tuple else list(results)

    def group_options(self, options: Sequence[Any]) -> list[Any]:
        """Return the options with each NamedTuple as one value, as the functions of `define` get them."""
        return self._group([None] * self._count, options)[self._count :]

    def _group(self, tensors: Sequence[Any], options: Sequence[Any]) -> list[Any]:
        """Return what `run` and `fake` get."""
        found = [*tensors[: self._count], *options[: self._option_count]]
        for kind, place in self._places:
            found[place] = [kind._make(found[place])]
        if self.is_scaled(tensors):
            a, b = [one[0] if isinstance(one, (list, tuple)) else one for one in tensors[:2]]
            found.append(_scaled_operands(a, b, *tensors[self._count :], *options[self._option_count :]))
        return found

    def is_scaled(self, tensors: Sequence[Any]) -> bool:
        """Return whether a call has FP8 operands. tensors: those of the call, or one value for each."""
        return len(tensors) > self._count

    def arguments(self, tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments in the order of the schema, in which scales come last."""
        own, count = tensors[: self._count], self._option_count
        return (*own, *options[:count], *tensors[self._count :], *options[count:])

    def _split(self, flat: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the tensors and the options of arguments in the order of the schema. torch leaves out defaults at the end."""
        end = self._count + self._option_count
        tensors, options, scales = flat[: self._count], flat[self._count : end], flat[end : end + 2]
        if len(scales) < 2 or scales[1] is None:
            return tensors, options
        return (*tensors, *scales), (*options, *flat[end + 2 :])


def _scaled_operands(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_bs: Sequence[torch.Tensor],
    recipe: Any,
    output_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> ScaledOperands:
    names: Any = FLOAT8.get(a.dtype, FLOAT8[QUANTISED]), FLOAT8[b.dtype]
    scaling = Scaling(a=names[0], b=names[1], recipe=recipe, use_fast_accum=use_fast_accum, quantises=scale_a is None)
    return ScaledOperands(scale_a, scale_bs, scaling, output_dtype)


def define(name: str, run: Function, fake: Function, **options: Any) -> LibraryOperator:
    """Define the operator weft::name, and return it.

    The annotations of `run` say what the operator takes and returns. An option is a plain value or a NamedTuple of plain
    values. The operator takes a NamedTuple as its fields, one positional argument each. The functions that are passed here get
    it as one NamedTuple:

        run(*tensors, *options)                       computes the results
        fake(*tensors, *options)                      makes empty results of the same shapes
        run or fake(*tensors, *options, scales)       the same with FP8 operands, for an operator that takes them: its `run` has
                                                      a parameter `scales: ScaledOperands | None = None`. There is no backward.
        save(ctx, (*tensors, *options), results)      keeps in ctx what the backward needs
        backward(ctx, *grads)                         returns the gradients of the tensors

    returns: what the operator returns, if `run` returns a Call that computes it.
    double_backward: whether the backward is itself differentiable; if not, gradients of its gradients raise ValueError.
    saves_results: whether `save` may need the results. If not, an activation checkpoint that computes its function again gets
        what is saved before the operator runs. It ends there if it needs nothing more, as before torch's own operators.
    """
    return LibraryOperator(name, run, fake, **options)


Places = tuple[int | None, ...]
"""For each argument of an operator that is a tensor, how many tensors it is: None for no tensor, -1 for one, else the length of
a list."""


def flatten(tensors: Sequence[Any]) -> tuple[Places, list[torch.Tensor]]:
    """Return the structure of an operator's tensors, and the tensors in one list."""
    places: list[int | None] = []
    found: list[torch.Tensor] = []
    for one in tensors:
        if one is None:
            places.append(None)
        elif isinstance(one, torch.Tensor):
            places.append(-1)
            found.append(one)
        else:
            places.append(len(one))
            found += one
    return tuple(places), found


def unflatten(places: Places, flat: Sequence[Any]) -> list[Any]:
    """Return values, one for each tensor, in the structure of the operator's arguments."""
    rest, found = iter(flat), []
    for place in places:
        found.append(None if place is None else next(rest) if place < 0 else list(islice(rest, place)))
    return found


class Reading(Protocol):
    """A Reading is how an operator reads a tensor of a graph of autograd: in another shape, or as a part of it.

                 forward                                      backward
        operand  read: what the operator computes with        restore: from the operator's gradient to the tensor's
        result   restore: from the operator's result to the   read: from the gradient of what the caller got to that of the
                 caller's                                      operator's result

    Both are differentiable if gradients are recorded.
    """

    def read(self, x: torch.Tensor, /) -> torch.Tensor: ...

    def restore(self, x: torch.Tensor, /) -> torch.Tensor: ...


class Recording:
    """A Recording is a kind of call that autograd records. Forward and backward are one node of its graph.

    operator: the operator.
    places: the structure of its tensors.
    options: its options, one for each argument.
    reads: how the operator reads each tensor of the graph. The memory that it reads is the same.
    view: how the results are viewed. None if they are the operator's.
    """

    __slots__ = ("_grouped", "_needs", "_scaled", "_sources", "operator", "options", "places", "reads", "view")

    def __init__(
        self,
        operator: LibraryOperator,
        places: Places,
        options: Sequence[Any],
        reads: Sequence[Reading | None] | None = None,
        view: Reading | None = None,
    ) -> None:
        self.operator, self.places, self.options, self.reads, self.view = operator, places, tuple(options), reads, view
        self._grouped, self._scaled = operator.group_options(options), operator.is_scaled(places)
        self._sources: list[Reading | None] | None = None
        """How the backward reads each saved tensor. Saved tensors are those of the graph: otherwise they would have no
        derivatives."""
        self._needs: tuple[Sequence[bool], list[Any]] = (), []
        """The last needs_input_grad of autograd, and the same in the structure of the operator's arguments."""

    def apply(
        self, known: RememberedCall | None, tensors: Sequence[torch.Tensor], memory: Sequence[torch.Tensor] | None = None
    ) -> Any:
        """Compute a call. Return its result, or a tuple of them.

        known: has the BoundCall of such calls, or gets it. None if torch's dispatcher is to compute it.
        tensors: those of the graph of autograd: ordinary ones, or what `reads` can read.
        memory: tensors with the memory that the operator reads, by which the BoundCall is called. None for `tensors`.
        """
        apply = self.operator.function.apply if known is None else self.operator.apply
        return apply(self, known, tensors if memory is None else memory, *tensors)

    def compute(
        self, known: RememberedCall | None, tensors: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Compute a call without a BoundCall that makes it, and return its results. The arguments are as for `apply`."""
        read = unflatten(self.places, self._read(tensors, self.reads))
        if known is None:
            found = self.operator.forward(*self.operator.arguments(read, self.options))
        else:
            found, bound, picks = self.operator.compute_plain(read, self.options, memory)
            known.keep(bound, picks, self.view)
        found = [found] if self.operator.single else found
        return found if self.view is None else [self.view.restore(one) for one in found]

    def save(
        self,
        ctx: Any,
        tensors: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        hooks: SavedTensorsHooks | None = None,
    ) -> None:
        """Keep in the context what the backward needs. hooks: pack it by these, now; autograd does so after the forward."""
        ctx.recording, save = self, self.operator.save
        if save is None or self._scaled:
            return
        context = _Context()
        context.ctx = ctx
        given = (*unflatten(self.places, tensors), *self._grouped)
        save(context, given, results[0] if results and self.operator.single else results)
        kept = context.__dict__
        del kept["ctx"]  # a cycle
        saved = kept.pop("saved", ())
        if self._sources is None:
            readings = {id(one): read for one, read in zip(tensors, self.reads or (), strict=False)}
            readings |= {id(one): self.view for one in results}
            self._sources = [readings.get(id(one)) for one in saved]
        ctx.kept, ctx.packed = kept, None
        if hooks is None:
            ctx.save_for_backward(*saved)
        else:
            pack, unpack = hooks
            ctx.packed = [pack(one) for one in saved], unpack

    def differentiate(self, ctx: Any, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients of the tensors.

        Raises ValueError for FP8 operands, and for a batch of gradients, before it calls an operator in which ranks wait.
        """
        operator, view = self.operator, self.view
        if self._scaled:
            raise ValueError("b or scale_b requires a gradient, and operators with FP8 operands have none; use b.detach()")
        for grad in grads:
            if grad is not None and is_batch_of_gradients(grad):
                raise ValueError(
                    f"weft::{operator.name} takes one gradient at a time; leave out is_grads_batched=True of"
                    " torch.autograd.grad, and vectorize=True of torch.autograd.functional"
                )
        if view is not None:
            grads = [None if grad is None else view.read(grad) for grad in grads]
        needs = ctx.needs_input_grad
        last, structured = self._needs  # other threads may write it
        if needs != last:
            structured = unflatten(self.places, needs[3:])
            self._needs = needs, structured
        context = _Context()
        context.__dict__.update(ctx.kept)
        context.ctx, context.needs_input_grad = ctx, structured
        # An operator that returns a list gets the gradients as one list.
        flow = grads if operator.single or operator.returns_tuple else [grads]
        if not autocast_enabled():
            found = operator.backward(context, *flow)
        else:
            with without_autocast():  # matmuls use the dtypes of their operands, as the operator does
                found = operator.backward(context, *flow)
        flat: list[torch.Tensor | None] = []
        for place, grad in zip(self.places, found, strict=True):
            if place is not None:
                if place < 0:
                    flat.append(grad)
                else:
                    flat += [None] * place if grad is None else grad
        if self.reads is not None:
            for number, read in enumerate(self.reads):
                grad = flat[number]
                if grad is not None and read is not None:
                    flat[number] = read.restore(grad)
        return flat

    def unpack(self, saved: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what the operator has saved, given what autograd has saved."""
        assert self._sources is not None
        return self._read(saved, self._sources)

    def _read(self, tensors: Sequence[torch.Tensor], reads: Sequence[Reading | None] | None) -> list[torch.Tensor]:
        if reads is None:
            return list(tensors)
        return [one if read is None else read.read(one) for one, read in zip(tensors, reads, strict=True)]


class _Recorded(torch.autograd.Function):
    """_Recorded is an operator's call in the graph of autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        recording: Recording,
        known: RememberedCall | None,
        memory: Sequence[torch.Tensor],
        *tensors: torch.Tensor,
    ) -> Any:
        results: Any
        hooks = None if recording.operator.saves_results else recomputation_hooks()
        if hooks is not None:
            recording.save(ctx, tensors, (), hooks)
        if known is not None and known.bound is not None and (made := known.bound(memory)) is not None:
            results = [made[pick] for pick in known.picks]
            if known.view is not None:
                results = [known.view.restore(one) for one in results]
        else:
            results = recording.compute(known, tensors, memory)
        if hooks is None:
            recording.save(ctx, tensors, results)
        return results[0] if recording.operator.single else tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (None, None, None, *ctx.recording.differentiate(ctx, grads))


class _Context:
    """A _Context is what an operator's `save` and `backward` get as the context of autograd. They may set further attributes.

    ctx: autograd's own.
    needs_input_grad: in the structure of the operator's arguments.
    """

    ctx: Any
    needs_input_grad: list[Any]

    def save_for_backward(self, *saved: torch.Tensor) -> None:
        self.saved = saved

    def set_materialize_grads(self, value: bool) -> None:
        self.ctx.set_materialize_grads(value)

    def mark_non_differentiable(self, *results: torch.Tensor) -> None:
        self.ctx.mark_non_differentiable(*results)

    @property
    def saved_tensors(self) -> list[torch.Tensor]:
        saved = self.ctx.saved_tensors
        if self.ctx.packed is not None:
            packed, unpack = self.ctx.packed
            saved = [unpack(one) for one in packed]
        found: list[torch.Tensor] = self.ctx.recording.unpack(saved)
        return found


def can_skip_dispatcher(arguments: Iterable[torch.Tensor | Sequence[torch.Tensor] | None]) -> bool:
    """Return whether a call with these tensors can skip torch's dispatcher, which takes some 15 us of host time.

    The dispatcher is needed for gradients, for modes that observe the call, for subclasses of Tensor, and for views that torch
    has yet to negate or conjugate. torch.compile also needs it, because it traces calls (see `LibraryOperator.compute`).
    """
    if observed():
        if in_functional_gradient():
            raise ValueError(
                "torch.func's grad, vjp and jacrev cannot be taken of weft's operators, which are an autograd.Function each;"
                " use torch.autograd.grad, or backward"
            )
        return False
    return _are_plain(arguments, torch.is_grad_enabled())


def _are_plain(arguments: Iterable[Any], grad: bool) -> bool:
    """Return whether all arguments are ordinary tensors without gradients, or lists of these. grad: whether autograd is on."""
    for argument in arguments:
        if type(argument) in PLAIN:
            if (grad and argument.requires_grad) or argument.is_neg() or argument.is_conj():
                return False
        elif argument is not None and not (isinstance(argument, (list, tuple)) and _are_plain(argument, grad)):
            return False
    return True


def _refuse_second_derivatives(backward: Function, what: str) -> Function:
    """Return a backward whose results raise ValueError if they are differentiated.

    create_graph=True alone raises nothing, because other operators of the graph may need it.
    """

    @wraps(backward)
    def guarded(ctx: Any, *flow: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *flow)
        once = _UnpackedContext(ctx)
        with torch.no_grad():
            leaves, structure = tree_flatten(backward(once, *flow))
        grads = {at: leaf for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        sources = [leaf for leaf in tree_leaves((flow, once.saved_tensors)) if isinstance(leaf, torch.Tensor)]
        found = _NotDifferentiable.apply(what, len(grads), *grads.values(), *sources)  # type: ignore[no-untyped-call]
        for at, grad in zip(grads, found, strict=True):
            leaves[at] = grad
        return tree_unflatten(leaves, structure)

    return guarded


class _UnpackedContext:
    """An _UnpackedContext unpacks an autograd context's saved tensors once, because torch.utils.checkpoint allows only one."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _NotDifferentiable(torch.autograd.Function):
    """_NotDifferentiable returns `count` gradients unchanged. Its backward raises ValueError that names the operator `what`.

    The tensors after the gradients are those from which the gradients were computed.
    """

    @staticmethod
    def forward(ctx: Any, what: str, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.what = what
        return tuple(grad.detach() for grad in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ValueError(f"{ctx.what} has first derivatives alone; for second ones, use torch's operators in its place")
