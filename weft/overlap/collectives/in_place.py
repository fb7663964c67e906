"""Collectives into the caller's tensors, with the names and arguments of torch.distributed.

Every function takes these arguments in addition to torch's:

    schedule        "auto", "sequential" (NCCL), "copy_engine", "copy_engine_pull", or a weft.schedule.Schedule. :CHUNKS after a
                    copy-engine name cuts each part into that many pieces. "auto" runs the fastest of a short autotuning run.
                    On CPUs, for results above 1 GiB and for results in tensors of `empty` it runs the predicted fastest
    staging_bytes   symmetric memory per rank through which pieces pass; larger data passes in several turns. Default:
                    WEFT_STAGING_BYTES, or 1 GiB on a GPU (less if less is free) and 16 MiB on a CPU
    sms             SMs that sum. Default: twice the machine's `stores.sms`
    stream          the stream of a call with async_op=True on GPUs. Default: a stream of high priority

Each returns None, or with async_op=True a Work, whose wait() makes the current stream wait, as torch's does. Tensors are
contiguous, on one device. All raise ValueError that names a wrong argument, RankMismatch if ranks make different calls, and
PeerLost or WaitTimeout if a rank is lost. Call once with the same sizes before you capture a call in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft.core.schedule import Schedule
from weft.ops.front import public
from weft.overlap.collectives.checks import Reduction, check_splits, make_call
from weft.overlap.collectives.work import begin


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
    make = make_call("all_gather", group, schedule=schedule, staging_bytes=staging_bytes, sms=sms)
    return begin(make, output, input, group, async_op=async_op, stream=stream)


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
    make = make_call("reduce_scatter", group, reduce_op=op, schedule=schedule, staging_bytes=staging_bytes, sms=sms)
    return begin(make, output, input, group, async_op=async_op, stream=stream)


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
    make = make_call(
        "all_reduce",
        group,
        names=("tensor", "tensor"),
        reduce_op=op,
        schedule=schedule,
        staging_bytes=staging_bytes,
        sms=sms,
    )
    return begin(make, tensor, tensor, group, async_op=async_op, stream=stream)


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
    make = make_call("all_to_all", group, schedule=schedule, staging_bytes=staging_bytes, sms=sms)
    check_splits("output_split_sizes", output_split_sizes, output, group)
    check_splits("input_split_sizes", input_split_sizes, input, group)
    return begin(make, output, input, group, async_op=async_op, stream=stream)
