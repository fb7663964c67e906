"""Checks the arguments of collectives, and makes calls of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, cast

import torch
import torch.distributed as dist

from weft.core.errors import require
from weft.core.problem import CollectiveProblem, Op
from weft.core.schedule import Schedule
from weft.ops.collective import default_sms
from weft.ops.common import check_own_memory, describe, resolve_group, schedule_to_spec
from weft.runtime.collective_calls import CollectiveCall, check_summed, staging_from_environment
from weft.runtime.groups import GROUPS

Reduction = str | dist.ReduceOp | dist.ReduceOp.RedOpType
"""A reduction as weft's operators name it, "sum" or "avg", or as torch.distributed does."""


def reduction(op: Reduction, name: str = "op") -> Literal["sum", "avg"]:
    """Return the reduction that `op` names. `name` is the argument's name in the ValueError for a reduction that weft does not
    have."""
    require(name, op, (str, dist.ReduceOp, dist.ReduceOp.RedOpType), "use 'sum' or 'avg', or dist.ReduceOp.SUM or AVG")
    known = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}
    for text, value in known.items():
        if op in (text, value):
            return cast(Literal["sum", "avg"], text)
    raise ValueError(f"{name} is {op!r}; use 'sum' or 'avg', or dist.ReduceOp.SUM or AVG")


def make_call(
    op: Op,
    group: dist.ProcessGroup | None,
    *,
    names: tuple[str, str] = ("output", "input"),
    reduce_op: Reduction = "sum",
    schedule: str | Schedule,
    staging_bytes: int | None,
    sms: int | None,
) -> Callable[[torch.Tensor, torch.Tensor], CollectiveCall]:
    """Return the function (output, input) that returns the call. It raises ValueError for tensors that no rank could use.

    A Schedule value sets the call's staging memory and SMs. Raises ValueError for arguments that no rank could run.
    """
    group_name, rank, world_size = resolve_group(group)
    staging_bytes, sms, reachable, unit = check_staging(staging_bytes), check_sms(sms), op != "reduce_scatter", torch.uint8
    if isinstance(schedule, Schedule) and isinstance(schedule.problem, CollectiveProblem):
        given = schedule.problem
        staging_bytes, sms, reachable = staging_bytes or given.staging_bytes, sms or given.sms, given.reachable
        unit = unit if given.sums else getattr(torch, given.dtype)
    reduces, find_reach = reduction(reduce_op), partial(GROUPS.reach, group_name) if reachable else None

    def make(output: torch.Tensor, input: torch.Tensor) -> CollectiveCall:
        check_pair(op, output, input, rank, world_size, names=names)
        if op in ("reduce_scatter", "all_reduce"):
            check_summed(op, names[0], output)
        return CollectiveCall(
            op=op,
            schedule=schedule_to_spec(schedule, op),
            group=group_name,
            a=input,
            out=output,
            reduce_op=reduces,
            staging_bytes=staging_bytes or staging_from_environment(input.device),
            sms=sms or default_sms(input.device),
            reach=None if find_reach is None else find_reach(output),
            find_reach=find_reach,
            unit=unit,
        )

    return make


def check_pair(
    op: str,
    output: torch.Tensor,
    input: torch.Tensor,
    rank: int,
    world_size: int,
    *,
    names: tuple[str, str] = ("output", "input"),
) -> None:
    """Check that two tensors of a collective are valid, and match. Raises ValueError."""
    for name, tensor in zip(names, (output, input), strict=True):
        check_tensor(name, tensor, contiguous=True)
    if output.dtype != input.dtype or output.device != input.device:
        have, need = f"{output.dtype} on {output.device}", f"{input.dtype} on {input.device}"
        raise ValueError(f"{names[0]} is {have}, {names[1]} {need}; they must agree")
    _check_sizes(op, output, input, world_size)
    check_overlap(op, output, input, rank)


def check_tensor(name: str, tensor: torch.Tensor, *, contiguous: bool = False) -> None:
    """Check a tensor that is given to a collective. Raises ValueError."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is {describe(tensor)}; it must be a tensor")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {tensor.device}; weft runs on cpu and cuda")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} is {tensor.layout}; it must be strided")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} is {describe(tensor)} with strides {tensor.stride()}; it must be contiguous")
    if contiguous:
        check_own_memory(name, tensor)


def _check_sizes(op: str, output: torch.Tensor, input: torch.Tensor, world_size: int) -> None:
    have, given = output.numel(), input.numel()
    if op == "all_gather" and have != given * world_size:
        raise ValueError(f"output has {have} elements; {world_size} ranks give {given} each: it needs {given * world_size}")
    if op == "reduce_scatter" and given != have * world_size:
        raise ValueError(f"input has {given} elements; {world_size} ranks get {have} each: it needs {have * world_size}")
    if op == "all_to_all" and (given != have or given % world_size):
        raise ValueError(f"output has {have} elements, input {given}; they must be as many, a multiple of {world_size}")
    if op == "all_reduce" and given != have:
        raise ValueError(f"output has {have} elements, input {given}; they must be as many")


def check_splits(name: str, sizes: list[int] | None, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Check that split sizes, if there are any, are equal parts, which is what weft does without them. Raises ValueError."""
    if sizes is None:
        return
    require(name, sizes, (list, tuple), "it must be a list of numbers of rows, by rank, or None")
    world_size, rows = resolve_group(group)[2], tensor.shape[0] if tensor.dim() else 1
    if sizes and list(sizes) != [rows / world_size] * world_size:
        even = f"{world_size} times {rows // world_size}" if rows % world_size == 0 else f"a multiple of {world_size} rows"
        raise ValueError(f"{name} is {sizes}; weft exchanges equal parts, here {even}: pad them, or use torch.distributed")


def check_overlap(op: str, output: torch.Tensor, input: torch.Tensor, rank: int) -> None:
    """Check that input and output share no memory, or share it as CollectiveProblem allows. Raises ValueError."""
    a, out = input.data_ptr(), output.data_ptr()
    a_bytes, out_bytes = input.numel() * input.element_size(), output.numel() * output.element_size()
    if not (a_bytes and out_bytes) or a + a_bytes <= out or out + out_bytes <= a:
        return
    places = {"all_gather": out + rank * a_bytes, "reduce_scatter": out - rank * out_bytes, "all_reduce": out}
    if a != places.get(op):
        part = {"all_gather": "input as this rank's part of output", "reduce_scatter": "output as this rank's part of input"}
        allowed = part.get(op, "one tensor for both" if op == "all_reduce" else "")
        raise ValueError(f"output overlaps input; {op} allows {allowed or 'no overlap'}{' alone' * bool(allowed)}")


def check_staging(staging_bytes: int | None) -> int | None:
    """Return staging_bytes. Raises ValueError if it is no size, or too small."""
    least = CollectiveProblem.LEAST_STAGING
    if staging_bytes is not None and (not _is_count(staging_bytes) or staging_bytes < least):
        raise ValueError(f"staging_bytes is {staging_bytes!r}; it must be a whole number of at least {least}")
    return staging_bytes


def check_sms(sms: int | None) -> int | None:
    """Return sms. Raises ValueError if it is no number of SMs."""
    if sms is not None and (not _is_count(sms) or sms < 1):
        raise ValueError(f"sms is {sms!r}; it must be a whole number of at least 1")
    return sms


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
