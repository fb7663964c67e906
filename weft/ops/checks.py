"""What every operator checks of its arguments, one predicate each: groups, schedules, operands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist

from weft import schedules
from weft.comm.texts import no_group
from weft.core.errors import require
from weft.core.problem import Op
from weft.core.schedule import Schedule
from weft.runtime.choose import MODES
from weft.runtime.groups import GROUPS

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_USUAL = (torch.Tensor, torch.nn.Parameter)


def group_of(group: dist.ProcessGroup | None) -> tuple[str, int, int]:
    """(name, this rank, world_size) of a group. Raises ValueError if there is none, or this rank is not in it."""
    if not dist.is_initialized():
        raise ValueError("group: torch.distributed is not initialised; call dist.init_process_group, or start with torchrun")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(no_group(group, "call the operator"))
    # The group's own methods: torch.distributed's functions of these names take ten times as long.
    return group.group_name, group.rank(), group.size()


def spec_of(schedule: str | Schedule, op: Op) -> str:
    """A schedule as a string that the operator `op` takes; values are kept and named by their content."""
    if isinstance(schedule, Schedule):
        return GROUPS.keep(schedule)
    if not isinstance(schedule, str):
        raise ValueError(f"schedule is a {type(schedule).__name__}; use a name or a weft.Schedule")
    if schedule not in MODES:
        _check_name(schedule, op)
    return schedule


@lru_cache(maxsize=1024)
def _check_name(schedule: str, op: Op) -> None:
    try:
        schedules.check_op(schedules.parse(schedule)[0], op)
    except ValueError as error:
        if schedule.partition(":")[0] in schedules.NAMES:
            raise
        raise ValueError(f"{error}, or auto, or planned") from None


def check_operands(a: torch.Tensor, bs: Sequence[torch.Tensor], count: int, *, beside: int = 1) -> None:
    """One predicate for what operators need of their inputs. beside: how many ranks' columns of a lie side by side before they
    are multiplied."""
    if not isinstance(a, torch.Tensor) or a.dim() < 2:
        raise ValueError(f"a is {shape_of(a)}; it must be a tensor of at least 2 dimensions")
    if not bs:
        raise ValueError("b is an empty list; pass one matrix or several")
    check_own("a", a)
    if not (a.is_cuda or a.is_cpu):
        raise ValueError(f"a is on {a.device}; weft runs on cpu and cuda")
    if a.dtype not in DTYPES:
        raise ValueError(f"a is {a.dtype}; weft takes {', '.join(DTYPES.values())}")
    for i, b in enumerate(bs):
        name = "b" if count == 1 else f"b[{i}]"
        if not isinstance(b, torch.Tensor) or b.dim() != 2:
            raise ValueError(f"{name} is {shape_of(b)}; it must be a matrix")
        check_own(name, b)
        if b.shape[0] != beside * a.shape[-1]:
            columns = f"{a.shape[-1]} columns" + (f" on each of {beside} ranks" if beside > 1 else "")
            raise ValueError(f"{name} has {b.shape[0]} rows, a has {columns} ({shape_of(a)} @ {shape_of(b)}); they must agree")
        # get_device, which is fast, is -1 for a tensor without memory, too.
        if b.dtype != a.dtype or b.get_device() != a.get_device() or b.is_cpu != a.is_cpu:
            raise ValueError(f"{name} is {b.dtype} on {b.device}, a is {a.dtype} on {a.device}; they must agree")


def check_own(name: str, tensor: torch.Tensor) -> None:
    """That a tensor is strided, and this rank's part itself. Raises ValueError."""
    if tensor.is_nested:
        raise ValueError(f"{name} is a nested tensor; weft takes tensors with one shape: use {name}.to_padded_tensor(0.0)")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is {tensor.layout}; weft takes strided tensors: use {name}.to_dense()")
    if type(tensor) not in _USUAL and _of_several_ranks(tensor):
        raise ValueError(f"{name} is a DTensor; operators are called with each rank's own part: use {name}.to_local()")


def _of_several_ranks(tensor: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor  # import weft does not load it

    return isinstance(tensor, DTensor)


def check_values(name: str, tensor: torch.Tensor) -> None:
    """That its memory holds its values, for what is read or written there. Raises ValueError."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ValueError(
            f"{name} is a {type(tensor).__name__}, which holds its values in other tensors; use {name}.to_local() of a "
            f"DTensor, {name}.wait() of an AsyncCollectiveTensor"
        )
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(
            f"{name} is a view of values that torch has yet to negate or conjugate; use {name}.resolve_conj().resolve_neg()"
        )


def listed(name: str, values: Iterable[torch.Tensor], use: str) -> list[torch.Tensor]:
    """Several tensors as a list. Raises ValueError for what holds none."""
    if not isinstance(values, (list, tuple)):
        require(name, values, Iterable, use)
    return list(values)


def shape_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "a nested tensor" if value.is_nested else str(list(value.shape))
    return f"a {type(value).__name__}"
