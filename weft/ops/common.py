"""The operators share this code, which defines and calls operators, checks their arguments, and reshapes tensors to matrices.

The file of an operator has, from top to bottom: the public function; the options of its torch.library operator, which are its
non-tensor arguments; the function that computes it; the shapes for torch.compile; what autograd saves, and the backward; and
the definition.

Operators are defined by torch.library.Library and not by the custom_op decorator, because the wrapper of custom_op loads
torch._dynamo at the first call. If a process group exists by then, its threads outlive its destruction (docs/lab/log.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from weft import schedules
from weft.comm.texts import no_group
from weft.compat.dispatch import (
    autocast_enabled,
    forward_mode,
    has_tangent,
    in_functional_gradient,
    is_batch_of_gradients,
    observed,
    without_autocast,
)
from weft.compat.tensors import tree_flatten, tree_leaves, tree_unflatten
from weft.core.errors import require
from weft.core.problem import Op
from weft.core.schedule import Schedule
from weft.ops.schema import schema_of
from weft.runtime.bindings import scales_name
from weft.runtime.calls import MatmulCall
from weft.runtime.choose import MODES
from weft.runtime.groups import GROUPS

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
FLOAT8 = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
_GATHERED_SCALES = scales_name("gathered")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
Function = Callable[..., Any]
P = ParamSpec("P")
R = TypeVar("R")


# Definitions and calls of operators.


class _Library(torch.library.Library):
    """A _Library is a torch library whose kernels refuse dual tensors (forward-mode derivatives).

    Without that, torch's own autograd kernel would drop their tangents if no tensor requires a gradient.
    """

    def impl(self, op_name: Any, fn: Function, dispatch_key: str = "", **options: Any) -> None:
        super().impl(op_name, _refuse_tangents(fn, f"weft::{op_name}"), dispatch_key, **options)  # type: ignore[no-untyped-call]


_LIBRARY = _Library("weft", "DEF")  # type: ignore[no-untyped-call]


def define(
    name: str,
    run: Function,
    fake: Function,
    *,
    save: Function | None = None,
    backward: Function | None = None,
    double_backward: bool = True,
) -> Function:
    """Define the operator weft::name, and return the function that calls it.

    The annotations of `run` say what the operator takes and returns. An option is a plain value or a NamedTuple of plain
    values. The returned function takes a NamedTuple as its fields, one positional argument each. The functions that are passed
    here get it as one NamedTuple:

        run(*tensors, *options)                       computes the results
        fake(*tensors, *options)                      makes empty results of the same shapes
        save(ctx, (*tensors, *options), results)      keeps in ctx what the backward needs
        backward(ctx, *grads)                         returns the gradients of the tensors

    save and backward are for torch.library.register_autograd. double_backward: whether the backward is itself differentiable;
    if not, gradients of its gradients raise ValueError.
    """
    schema, tensors, options, places = schema_of(name, run)

    def group_options(flat: Sequence[Any]) -> list[Any]:
        found = list(flat)
        for kind, place in places:
            found[place] = [kind._make(flat[place])]
        return found

    def kernel(*flat: Any) -> Any:
        return run(*group_options(flat))

    def make_fake(*flat: Any) -> Any:
        return fake(*group_options(flat))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if save is not None:
            save(ctx, group_options(inputs), output)

    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", make_fake, lib=_LIBRARY)
    if backward is not None:
        checked = backward if double_backward else _refuse_second_derivatives(backward, f"weft::{name}")
        whole = _disable_autocast(_refuse_batched_gradients(checked, f"weft::{name}"), options)
        torch.library.register_autograd(f"weft::{name}", whole, setup_context=setup, lib=_LIBRARY)
    dispatched = getattr(torch.ops.weft, name)

    def call(*flat: Any) -> Any:
        if torch.compiler.is_compiling() or not can_skip_dispatcher(flat[:tensors]):
            return dispatched(*flat)
        given = list(flat)  # `group_options`, inlined to save a call
        for kind, place in places:
            given[place] = [kind._make(flat[place])]
        return run(*given)

    return call


def can_skip_dispatcher(arguments: Iterable[torch.Tensor | Sequence[torch.Tensor] | None]) -> bool:
    """Return whether a call with these tensors can skip torch's dispatcher, which takes some 15 us of host time.

    The dispatcher is needed for gradients, for modes that observe the call, for subclasses of Tensor, and for views that torch
    has yet to negate or conjugate. torch.compile also needs it, because it traces calls; `define` checks that.
    """
    if observed():
        if in_functional_gradient():
            raise ValueError(
                "torch.func's grad, vjp and jacrev cannot be taken of weft's operators, whose derivatives torch.library knows;"
                " use torch.autograd.grad, or backward"
            )
        return False
    return _are_plain(arguments, torch.is_grad_enabled())


def _are_plain(arguments: Iterable[Any], grad: bool) -> bool:
    """Return whether all arguments are ordinary tensors without gradients, or lists of these. grad: whether autograd is on."""
    for argument in arguments:
        if type(argument) in _PLAIN:
            if (grad and argument.requires_grad) or argument.is_neg() or argument.is_conj():
                return False
        elif argument is not None and not (isinstance(argument, (list, tuple)) and _are_plain(argument, grad)):
            return False
    return True


def make_empty_operand_after(like: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return an operand shaped like `like` but with zero columns, which depends on `after`.

    It orders a call behind the computation of `after` in a graph of torch.compile. Without it, an exchange that needs no
    gradient could be anywhere in the graph, where the compiler places it by the sizes of tensors. Ranks whose sizes differ
    would then make their calls in different orders.
    """
    return after.detach()[:0].reshape(*like.shape[:-1], 0)


def choose_backward_schedule(schedule: str, op: Op) -> str:
    """Return the schedule of a backward that calls the operator `op`.

    It is the forward's schedule if `op` has its family. Otherwise it is "auto", also for a Schedule value, because such a value
    fits only the forward's problem.
    """
    family = schedule.partition(":")[0]
    missing = family in schedules.NAMES and family not in schedules.names(op)
    return "auto" if missing or schedule.startswith("value:") else schedule


def _refuse_tangents(kernel: Function, what: str) -> Function:
    @wraps(kernel)
    def checked(*given: Any, **named: Any) -> Any:
        if forward_mode() and any(map(has_tangent, tree_leaves((given, named)))):
            raise ValueError(
                f"{what} has no forward-mode derivative, and an argument is a dual tensor (torch.autograd.forward_ad,"
                " torch.func.jvp); use reverse mode"
            )
        return kernel(*given, **named)

    return checked


def _disable_autocast(backward: Function, options: int) -> Function:
    """Return a backward that runs without autocast, so that its matmuls use the dtypes of its operands, as the operator does.

    options: the number of options. The returned backward appends None as the gradient of each.
    """

    @wraps(backward)
    def complete(*given: Any) -> tuple[Any, ...]:
        if not autocast_enabled():
            return (*backward(*given), *[None] * options)
        with without_autocast():
            return (*backward(*given), *[None] * options)

    return complete


def _refuse_batched_gradients(backward: Function, what: str) -> Function:
    """Return a backward that raises ValueError for a batch of gradients, before it calls an operator in which ranks wait."""

    @wraps(backward)
    def checked(ctx: Any, *flow: Any) -> Any:
        if any(map(is_batch_of_gradients, tree_leaves(flow))):
            raise ValueError(
                f"{what} takes one gradient at a time; leave out is_grads_batched=True of torch.autograd.grad, and"
                " vectorize=True of torch.autograd.functional"
            )
        return backward(ctx, *flow)

    return checked


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


# Errors that are raised before a call begins are published to the peers.


def publish_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that all ranks of its argument `group` call.

    If it raises on this rank, peers that wait for this rank in the call get the error, and do not wait until the bound.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*arguments, **options)
        try:
            return function(*arguments, **options)
        except Exception as error:
            with suppress(TypeError):  # the arguments do not fit the function
                publish_error_instead(signature.bind(*arguments, **options).arguments.get("group"), error)
            raise

    return call


def publish_error_instead(group: dist.ProcessGroup | None, error: Exception) -> None:
    """Publish that this rank raises an error and does not make the call. Errors that have already failed the group are
    ignored."""
    with suppress(ValueError):  # `group` is no process group of this rank
        GROUPS.publish_error_instead(resolve_group(group)[0], error)


# Checks of an operator's arguments.


def resolve_group(group: dist.ProcessGroup | None) -> tuple[str, int, int]:
    """Return (name, this rank, world_size) of a group. Raises ValueError if there is none, or this rank is not in it."""
    if group is None:
        if not dist.is_initialized():
            raise ValueError("group: torch.distributed is not initialised; call init_process_group, or start with torchrun")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(no_group(group, "call the operator"))
    # The group's own methods: torch.distributed's functions of these names take ten times as long.
    return group.group_name, group.rank(), group.size()


def schedule_to_spec(schedule: str | Schedule, op: Op) -> str:
    """Return a schedule as the string that the operator `op` takes. A Schedule is stored, and its string has its digest.

    Raises ValueError if `op` does not have the schedule.
    """
    if isinstance(schedule, Schedule):
        return GROUPS.keep(schedule)
    if not isinstance(schedule, str):
        raise ValueError(f"schedule is a {type(schedule).__name__}; use a name or a weft.schedule.Schedule")
    if schedule not in MODES:
        _check_name(schedule, op)
    return schedule


@lru_cache(maxsize=1024)
def _check_name(schedule: str, op: Op) -> None:
    if schedule.partition(":")[0] not in schedules.NAMES:
        names = ", ".join(schedules.names(op))
        raise ValueError(
            f"schedule is {schedule!r}; {op} takes auto, planned, or one of {names}, with :CHUNKS for a chunk count"
        )
    schedules.check_op(schedules.parse(schedule)[0], op)


def check_operands(a: torch.Tensor, bs: Sequence[torch.Tensor], *, parts: int = 1, scaled: bool = False) -> None:
    """Raise ValueError unless the operands can be multiplied.

    parts: how many ranks' columns of a are concatenated before they are multiplied.
    scaled: whether operands may be FP8.
    """
    if not isinstance(a, torch.Tensor) or a.dim() < 2:
        raise ValueError(f"a is {describe(a)}; it must be a tensor of at least 2 dimensions")
    if not bs:
        raise ValueError("b is an empty list; pass one matrix or several")
    check_local_strided("a", a)
    if not (a.is_cuda or a.is_cpu):
        raise ValueError(f"a is on {a.device}; weft runs on cpu and cuda")
    is_float8 = scaled and a.dtype in FLOAT8
    if a.dtype not in DTYPES and not is_float8:
        also = f", and with scales {', '.join(FLOAT8.values())}" if scaled else ""
        raise ValueError(f"a is {a.dtype}; weft takes {', '.join(DTYPES.values())}{also}")
    for i, b in enumerate(bs):
        name = f"b[{i}]" if len(bs) > 1 else "b"
        if not isinstance(b, torch.Tensor) or b.dim() != 2:
            raise ValueError(f"{name} is {describe(b)}; it must be a matrix")
        check_local_strided(name, b)
        if b.shape[0] != parts * a.shape[-1]:
            columns = f"{a.shape[-1]} columns" + (f" on each of {parts} ranks" if parts > 1 else "")
            raise ValueError(f"{name} has {b.shape[0]} rows, a has {columns} ({describe(a)} @ {describe(b)}); they must agree")
        # An a of 16 or 32 bits is quantised for a b of FP8. get_device is fast, but -1 also for a meta tensor.
        same_dtype = b.dtype in FLOAT8 if is_float8 else a.dtype == b.dtype or (scaled and b.dtype in FLOAT8)
        if not same_dtype or b.get_device() != a.get_device() or b.is_cpu != a.is_cpu:
            raise ValueError(f"{name} is {b.dtype} on {b.device}, a is {a.dtype} on {a.device}; they must agree")


def check_local_strided(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the tensor is strided and is not a DTensor."""
    if tensor.is_nested:
        raise ValueError(f"{name} is a nested tensor; weft takes tensors with one shape: use {name}.to_padded_tensor(0.0)")
    # torch.compile refuses to read a layout in the backward of a torch.autograd.Function.
    if tensor.is_sparse if torch.compiler.is_compiling() else tensor.layout is not torch.strided:
        raise ValueError(f"{name} is {tensor.layout}; weft takes strided tensors: use {name}.to_dense()")
    if type(tensor) not in _PLAIN and _is_dtensor(tensor):
        raise ValueError(f"{name} is a DTensor; operators are called with each rank's own part: use {name}.to_local()")


def _is_dtensor(tensor: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor  # imported here: `import weft` must not load torch.distributed.tensor

    return isinstance(tensor, DTensor)


def check_own_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the tensor's own memory holds its values."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ValueError(
            f"{name} is a {type(tensor).__name__}, which holds its values in other tensors; use {name}.to_local() of a "
            f"DTensor, {name}.wait() of an AsyncCollectiveTensor"
        )
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(
            f"{name} is a view of values that torch has yet to negate or conjugate; use {name}.resolve_conj().resolve_neg()"
        )


def to_list(name: str, values: Iterable[torch.Tensor], use: str) -> list[torch.Tensor]:
    """Return several tensors as a list. Raises ValueError for another type; `use` says what would work."""
    if not isinstance(values, (list, tuple)):
        require(name, values, Iterable, use)
    return list(values)


def describe(value: object) -> str:
    """Return the description of an argument in an error: the shape of a tensor, or the type of another value."""
    if isinstance(value, torch.Tensor):
        return "a nested tensor" if value.is_nested else str(list(value.shape))
    return f"a {type(value).__name__}"


def run_matmul(
    op: Op, a: torch.Tensor, bs: Sequence[torch.Tensor], group: str, schedule: str, *, rows: int, unit: int = 1, **more: Any
) -> list[torch.Tensor]:
    """Run a MatmulCall. Return its products, then the gathered rows and their scales, if these were requested."""
    call = MatmulCall(op=op, a=a, bs=bs, rows=rows, row_multiple=unit, schedule=schedule, **more)
    outputs = GROUPS.run(group, call)
    return outputs["out"] + outputs.get("gathered", []) + outputs.get(_GATHERED_SCALES, [])


# Tensors as matrices: [entries, ..., K] has a row for each entry and each index of its middle dimensions.


def count_rows_per_entry(a: torch.Tensor) -> int:
    """Return the number of rows for each entry of the first dimension.

    It may be 0: a rank without tokens still takes part in the call, with a matrix without rows.
    """
    rows = 1
    for extent in a.shape[1:-1]:
        rows *= extent
    return rows


def as_matrix(a: torch.Tensor) -> torch.Tensor:
    """Return the matrix of a tensor's rows."""
    return a.reshape(a.shape[0] * count_rows_per_entry(a), a.shape[-1]) if a.dim() > 2 else a


def as_tensor(rows: torch.Tensor, entries: int, like: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return a matrix as a tensor [entries, ...] with the middle dimensions of `like`. The entries become its dimension
    `dim`."""
    if like.dim() == 2:
        return rows
    out = rows.view(entries, *like.shape[1:-1], rows.shape[1])
    return out.movedim(0, dim) if dim else out
