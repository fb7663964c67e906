"""The operators share this code, which checks their arguments, and reshapes tensors to matrices.

The file of an operator has, from top to bottom: the public function, which returns an OperatorRequest (weft.ops.front); the
options of its torch.library operator, which are its non-tensor arguments; the function that computes it, or returns the Call
that does; the shapes for torch.compile; what autograd saves, and the backward; and the definition (weft.ops.operator).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft import schedules
from weft.comm.texts import no_group
from weft.compat.dispatch import ends_recomputation
from weft.core.errors import require
from weft.core.problem import Op
from weft.core.schedule import Schedule
from weft.ops.schema import SymInt
from weft.runtime.bound_call import PLAIN
from weft.runtime.choose import MODES
from weft.runtime.groups import GROUPS

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
FLOAT8 = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
QUANTISED = torch.float8_e4m3fn
"""The dtype to which an a of 16 or 32 bits is quantised."""


# Backward passes.


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
    missing = family in schedules.FAMILIES and family not in schedules.names(op)
    return "auto" if missing or schedule.startswith("value:") else schedule


def is_registered(schedule: str) -> bool:
    """Return whether a schedule's family was added by weft.schedule.register. It then has no gradients of weights."""
    family = schedules.FAMILIES.get(schedule.partition(":")[0])
    return family is not None and family.registered


def save_factors(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save what the backward of an operator (a, b, options) needs."""
    a, b, ctx.options = inputs
    ctx.save_for_backward(a, b)


def save_factors_and_received(ctx: Any, inputs: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
    """Save what `find_gradients_of_received` needs, of an operator (a, b, options, return_received)."""
    a, b, ctx.options, ctx.return_received = inputs
    # Without this, zeros would go through the whole backward if the received rows have no gradient.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, b, *outputs[1:])


def find_gradients_of_received(
    ctx: Any,
    saved: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    rows: int,
    give_back: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    receive: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of a and b of an operator that exchanges a, and returns received @ b and perhaps received.

    saved: a, b, and the received rows if they were returned.
    rows: the number of received rows.
    give_back: (x, y) returns x @ y to the ranks whose rows were received.
    receive: exchanges a again, given an operand b without columns.
    """
    (_, b, *received), grad_a, grad_b = saved, None, None
    grad = b.new_zeros(rows, b.shape[1]) if grads[0] is None else grads[0]
    if ctx.needs_input_grad[0]:
        factors, columns = grad, b
        if ctx.return_received and grads[-1] is not None:
            # The same exchange returns the gradient of the received rows, as a product with the identity.
            factors = torch.cat([grad, grads[-1]], 1)
            columns = torch.cat([b, torch.eye(b.shape[0], dtype=b.dtype, device=b.device)], 1)
        grad_a = give_back(factors, columns.t())
    if ctx.needs_input_grad[1]:
        # Saving the received rows would cost as much memory as a from forward to backward, so they are exchanged again by
        # default.
        nothing = make_empty_operand_after(b, grad if grad_a is None else grad_a)
        grad_b = (received[0] if received else receive(nothing)).t() @ grad
    return grad_a, grad_b


# Errors that are raised before a call begins are published to the peers.


def publish_error_instead(group: dist.ProcessGroup | None, error: Exception) -> None:
    """Publish that this rank raises an error and does not make the call.

    Errors that have already failed the group are ignored, and the one by which a checkpoint ends its recomputation, because the
    call was made then.
    """
    if ends_recomputation(error):
        return
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
    if schedule.partition(":")[0] not in schedules.FAMILIES:
        names = ", ".join(schedules.names(op))
        raise ValueError(
            f"schedule is {schedule!r}; {op} takes auto, planned, or one of {names}, with :CHUNKS for a chunk count; "
            "every rank must add a family of its own by weft.schedule.register first"
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
    check_device("a", a)
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


def check_device(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the tensor is on a device that weft runs on."""
    if not (tensor.is_cuda or tensor.is_cpu):
        raise ValueError(f"{name} is on {tensor.device}; weft runs on cpu and cuda")


def check_local_strided(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the tensor is strided and is not a DTensor."""
    if tensor.is_nested:
        raise ValueError(f"{name} is a nested tensor; weft takes tensors with one shape: use {name}.to_padded_tensor(0.0)")
    # torch.compile refuses to read a layout in the backward of a torch.autograd.Function.
    if tensor.is_sparse if torch.compiler.is_compiling() else tensor.layout is not torch.strided:
        raise ValueError(f"{name} is {tensor.layout}; weft takes strided tensors: use {name}.to_dense()")
    if type(tensor) not in PLAIN and _is_dtensor(tensor):
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


def check_addend(name: str, given: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless a tensor can be added to a result of this shape, dtype and device."""
    if not isinstance(given, torch.Tensor) or tuple(given.shape) != tuple(shape):
        raise ValueError(f"{name} is {describe(given)}; it must be {list(shape)}")
    check_local_strided(name, given)
    if given.dtype != dtype or given.device != device:
        raise ValueError(f"{name} is {given.dtype} on {given.device}; it must be {dtype} on {device}, as the result is")


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


# Tensors as matrices: [entries, ..., K] has a row for each entry and each index of its middle dimensions.


def count_rows_per_entry(shape: Sequence[int]) -> int:
    """Return the number of rows for each entry of the first dimension of a tensor.

    It may be 0: a rank without tokens still takes part in the call, with a matrix without rows.
    """
    rows = 1
    for extent in shape[1:-1]:
        rows *= extent
    return rows


def factors_of(a: Any, b: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the factors of the products that are added up. Raises ValueError unless there is a b for each a, and all fit."""
    several = isinstance(a, (list, tuple)), isinstance(b, (list, tuple))
    if not any(several):
        check_operands(a, [b], scaled=True)
        return [a], [b]
    if not all(several) or len(a) != len(b) or not a:
        counts = [f"{len(one)} tensors" if is_list else describe(one) for one, is_list in zip((a, b), several, strict=True)]
        raise ValueError(f"a is {counts[0]} and b {counts[1]}; pass two lists with an a for each b, or two tensors")
    for number, (factor, factor_b) in enumerate(zip(a, b, strict=True)):
        check_operands(factor, [factor_b], scaled=True)
        if factor.shape[:-1] != a[0].shape[:-1] or factor_b.shape[1] != b[0].shape[1] or factor.dtype != a[0].dtype:
            raise ValueError(
                f"a[{number}] is {describe(factor)} and b[{number}] {describe(factor_b)}; products that are added up have the "
                f"rows, the columns and the dtype of the first one, of {describe(a[0])} and {describe(b[0])}"
            )
    return list(a), list(b)


class RowsOf(NamedTuple):
    """RowsOf reads a tensor of 3 dimensions or more as the matrix of its rows (weft.ops.operator.Reading).

    moved: the dimension that is the outermost one of the matrix, if it must be moved there. Else 0.
    extents: those of the tensor but for the last one, with the dimension already moved.
    rows: the rows of the matrix.
    """

    moved: int
    extents: tuple[SymInt, ...]
    rows: SymInt

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """Return the matrix of x."""
        return (x.movedim(self.moved, 0) if self.moved else x).reshape(self.rows, x.shape[-1])

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the tensor whose rows are those of a matrix."""
        found = rows.reshape(*self.extents, rows.shape[1])
        return found.movedim(0, self.moved) if self.moved else found


def rows_of(shape: Sequence[int], dim: int = 0, entries: int | None = None) -> RowsOf | None:
    """Return how to read a tensor as the matrix of its rows, dimension `dim` outermost. None if it is one.

    entries: the extent of that dimension, if not as in the shape.
    """
    if len(shape) == 2:
        return None
    entries = shape[dim] if entries is None else entries
    # torch.compile does not look at the extents before the dimension, because it would guard on them.
    outermost = dim == 0 or (not torch.compiler.is_compiling() and all(extent == 1 for extent in shape[:dim]))
    moved = 0 if outermost else dim
    extents = (*shape[:dim], entries, *shape[dim + 1 : -1]) if not moved else (entries, *shape[:dim], *shape[dim + 1 : -1])
    rows = 1
    for extent in extents:
        rows *= extent
    return RowsOf(moved, extents, rows)
