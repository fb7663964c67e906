"""The collectives: into the caller's tensors, with the names and arguments of torch.distributed, and as functions of a tensor.

Every function takes these arguments. Only those into the caller's tensors take `stream`:

    schedule        "auto", "sequential" (NCCL), "copy_engine", "copy_engine_pull", or a weft.schedule.Schedule. :CHUNKS after a
                    copy-engine name cuts each part into that many pieces. "auto" runs the fastest of a short autotuning run.
                    On CPUs, for results above 1 GiB and for results in tensors of `empty` it runs the predicted fastest
    staging_bytes   symmetric memory per rank through which pieces pass; larger data passes in several turns. Default:
                    WEFT_STAGING_BYTES, or 1 GiB on a GPU (less if less is free) and 16 MiB on a CPU
    sms             SMs that sum. Default: twice the machine's `stores.sms`
    stream          the stream of a call with async_op=True on GPUs. Default: a stream of high priority

The former return None, or with async_op=True a Work, whose wait() makes the current stream wait, as torch's does. Tensors are
contiguous, on one device. All raise ValueError that names a wrong argument, RankMismatch if ranks make different calls, and
PeerLost or WaitTimeout if a rank is lost. Call once with the same sizes before you capture a call in a CUDA graph.

The latter work along the first dimension, and support autograd and torch.compile:

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
from typing import Any, cast

import torch
import torch.distributed as dist

from weft.core.errors import require
from weft.core.schedule import Schedule
from weft.ops.collective import collective
from weft.ops.common import describe, resolve_group
from weft.ops.front import OperatorRequest, public
from weft.overlap.collectives.calls import (
    CheckedOptions,
    Reduction,
    begin,
    check_options,
    check_splits,
    check_tensor,
)
from weft.runtime.collective_calls import check_summed
from weft.runtime.groups import GROUPS


@public
def all_gather_into_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Any:
    """Concatenate the inputs of all ranks in output, in the order of ranks. Replaces dist.all_gather_into_tensor(output,
    input).

    input: any dtype and shape, the same on every rank. It may be this rank's part of output.
    output: world_size times as many elements.
    """
    options = check_options("all_gather", group, "sum", schedule, staging_bytes, sms)
    return begin(options, output, input, group, async_op, stream)


@public
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Reduction = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Any:
    """Store this rank's part of the sum, or average, of all ranks' inputs in output.

    Replaces dist.reduce_scatter_tensor(output, input).

    input: bfloat16, float16 or float32, world_size parts with as many elements each as output.
    output: may be this rank's part of input.
    op: "sum" or "avg", or torch's.

    The bits do not depend on chunks, SMs or timing, except with "sequential", where NCCL sums in its own order.
    """
    options = check_options("reduce_scatter", group, op, schedule, staging_bytes, sms)
    return begin(options, output, input, group, async_op, stream)


@public
def all_reduce(
    tensor: torch.Tensor,
    op: Reduction = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Any:
    """Replace tensor by the sum, or average, of all ranks' tensors. Replaces dist.all_reduce(tensor).

    tensor: bfloat16, float16 or float32, of any number of elements.
    op: as for reduce_scatter_tensor. The bits are the same on every rank.
    """
    options = check_options("all_reduce", group, op, schedule, staging_bytes, sms)
    return begin(options, tensor, tensor, group, async_op, stream)


@public
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Any:
    """Send part d of input to rank d, and store the parts from all ranks in output, in their order.

    Replaces dist.all_to_all_single(output, input).

    input: any dtype and shape, world_size equal parts.
    output: as many elements as input, in separate memory.
    output_split_sizes, input_split_sizes: rows of the first dimension for each rank, as in torch. They must be equal.
    """
    options = check_options("all_to_all", group, "sum", schedule, staging_bytes, sms)
    check_splits("output_split_sizes", output_split_sizes, output, group)
    check_splits("input_split_sizes", input_split_sizes, input, group)
    return begin(options, output, input, group, async_op, stream)


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
    return _apply(x, group, check_options("all_gather", group, "sum", schedule, staging_bytes, sms))


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
    return _apply(x, group, check_options("reduce_scatter", group, op, schedule, staging_bytes, sms))


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
    return _apply(x, group, check_options("all_to_all", group, "sum", schedule, staging_bytes, sms))


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
    return _apply(x, group, check_options("all_reduce", group, op, schedule, staging_bytes, sms))


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


def _apply(x: torch.Tensor, group: dist.ProcessGroup | None, options: CheckedOptions) -> torch.Tensor:
    op, reduce_op, name, _, world_size, spec, staging_bytes, sms, _, _ = options
    if not isinstance(x, torch.Tensor) or x.dim() < 1:
        raise ValueError(f"x is {describe(x)}; it must be a tensor of at least one dimension")
    check_tensor("x", x)
    if op in ("reduce_scatter", "all_to_all") and x.shape[0] % world_size:
        raise ValueError(f"x is {describe(x)}; its first dimension must be a multiple of world_size, {world_size}")
    if op in ("reduce_scatter", "all_reduce"):
        check_summed(op, "x", x)
    of_call = (op, reduce_op, name, world_size, spec, staging_bytes or 0, sms or 0)
    return cast(torch.Tensor, OperatorRequest(collective, (x,), of_call, group))  # `public` runs it
