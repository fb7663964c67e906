"""Collectives as functions of a tensor, along its first dimension. They support autograd and torch.compile.

    forward                    backward
    all_gather(x)              reduce_scatter(grad)
    reduce_scatter(x)          all_gather(grad)
    all_to_all(x)              all_to_all(grad)
    all_reduced(x)             all_reduced(grad)

The backward pass is collective: all ranks run it, or none. It has the options of the forward pass, except that it uses "auto"
if its operator does not have the forward's schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from weft.core.errors import require
from weft.core.problem import Op
from weft.core.schedule import Schedule
from weft.ops.collective import collective
from weft.ops.common import describe, resolve_group, schedule_to_spec
from weft.ops.front import OperatorRequest, public
from weft.overlap.collectives.checks import Reduction, check_sms, check_staging, check_tensor, reduction
from weft.runtime.collective_calls import check_summed
from weft.runtime.groups import GROUPS


@dataclass(frozen=True, kw_only=True)
class _Options:
    group: dist.ProcessGroup | None
    reduce_op: Reduction = "sum"
    schedule: str | Schedule = "auto"
    staging_bytes: int | None = None
    sms: int | None = None


@public
def all_gather(
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
) -> torch.Tensor:
    """Return [world_size * m, ...], the [m, ...] of all ranks in order. Any dtype. Options as for all_gather_into_tensor."""
    options = _Options(group=group, schedule=schedule, staging_bytes=staging_bytes, sms=sms)
    return _apply("all_gather", x, options)


@public
def reduce_scatter(
    x: torch.Tensor,
    op: Reduction = "sum",
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
) -> torch.Tensor:
    """Sum or average the [world_size * m, ...] of all ranks, and return this rank's [m, ...]. Options as for
    reduce_scatter_tensor."""
    options = _Options(group=group, reduce_op=reduction(op), schedule=schedule, staging_bytes=staging_bytes, sms=sms)
    return _apply("reduce_scatter", x, options)


@public
def all_to_all(
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
) -> torch.Tensor:
    """Send part d of [world_size * m, ...] to rank d, and return the parts from all ranks, with the same shape. Options as for
    all_to_all_single."""
    options = _Options(group=group, schedule=schedule, staging_bytes=staging_bytes, sms=sms)
    return _apply("all_to_all", x, options)


@public
def all_reduced(
    x: torch.Tensor,
    op: Reduction = "sum",
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
) -> torch.Tensor:
    """Return the sum, or average, of all ranks' x, as a new tensor. Options as for all_reduce."""
    options = _Options(group=group, reduce_op=reduction(op), schedule=schedule, staging_bytes=staging_bytes, sms=sms)
    return _apply("all_reduce", x, options)


@public
def empty(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return a zeroed tensor that peers can write.

    As the result of all_gather_into_tensor, all_to_all_single and all_reduce it needs no staging memory and no final copy. The
    same holds for a part of it at the same offset on every rank.

    The call is collective, with the same arguments on every rank. The memory belongs to the group until weft.close(group).
    device: "cpu" or "cuda"; default: torch's. Raises ValueError for another device, extents below 0, or a group on several
    nodes.
    """
    where = _device(device)
    require("dtype", dtype, torch.dtype, "it must be one of torch's, as torch.float32")
    if any(not isinstance(extent, int) or isinstance(extent, bool) or extent < 0 for extent in shape):
        raise ValueError(f"shape is {shape}; every extent must be a whole number of 0 or more")
    if math.prod(shape) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"shape is {shape}, of {dtype}; no memory has 2^63 bytes")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    count = math.prod(shape)
    found = GROUPS.state(resolve_group(group)[0]).symmetric(count * dtype.itemsize, where)
    return found[: count * dtype.itemsize].view(dtype).view(shape)


def _device(device: torch.device | str | None) -> torch.device:
    """Return the device for a tensor of `empty`. Raises ValueError for a device that weft does not support."""
    try:
        where = torch.empty(0).device if device is None else torch.device(device)
    except (RuntimeError, TypeError):  # torch does not know the name, or it is no name
        where = None
    if where is None or where.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; weft runs on cpu and cuda")
    return where


def _apply(op: Op, x: torch.Tensor, options: _Options) -> torch.Tensor:
    if not isinstance(x, torch.Tensor) or x.dim() < 1:
        raise ValueError(f"x is {describe(x)}; it must be a tensor of at least one dimension")
    group_name, _, world_size = resolve_group(options.group)
    if op in ("reduce_scatter", "all_to_all") and x.shape[0] % world_size:
        raise ValueError(f"x is {describe(x)}; its first dimension must be a multiple of world_size, {world_size}")
    check_tensor("x", x)
    if op in ("reduce_scatter", "all_reduce"):
        check_summed(op, "x", x)
    staging_bytes, sms = check_staging(options.staging_bytes), check_sms(options.sms)
    spec = schedule_to_spec(options.schedule, op)
    reduce_op = reduction(options.reduce_op)
    how = (op, reduce_op, group_name, world_size, spec, staging_bytes or 0, sms or 0)
    return cast(torch.Tensor, OperatorRequest(collective, (x,), how, options.group))  # `public` runs it
