"""Collectives into the caller's tensors, with the names and arguments of torch.distributed.

Every function takes these arguments in addition to torch's:

    schedule        "auto": the fastest of a short autotuning run (on CPUs, for results above 1 GiB, and for those in tensors of
                    `empty`: what is predicted to be); or "sequential", which is NCCL's,
                    "copy_engine", "copy_engine_pull", with :CHUNKS for pieces a part; or a weft.schedule.Schedule
    staging_bytes   symmetric memory that pieces pass through, a rank; default: WEFT_STAGING_BYTES, or 1 GiB on a GPU, less
                    where less is free, and 16 MiB on a CPU. More bytes go through it in turns
    sms             SMs that sum, default: twice the machine's `stores.sms`
    stream          with async_op=True on GPUs, where it runs; default: a stream of high priority

and returns None, or with async_op=True a Work, whose wait() is ordered on streams, as torch's. Tensors are contiguous, on one
device. All raise ValueError for what cannot be, naming the argument; RankMismatch where ranks call different things; PeerLost
and WaitTimeout where a rank is lost. In a CUDA graph: call once with the same sizes first.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft.core.schedule import Schedule
from weft.ops.common import publish_errors
from weft.overlap.collectives.checks import Reduction, call_of, check_splits
from weft.overlap.collectives.work import Work, run


@publish_errors
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
) -> Work | None:
    """output = the inputs of all ranks, in the order of ranks. Replaces dist.all_gather_into_tensor(output, input).

    input: any dtype and shape, the same on every rank; may be this rank's part of output. output: world_size times as many
    elements.
    """
    name, call = call_of("all_gather", output, input, group, schedule=schedule, staging_bytes=staging_bytes, sms=sms)
    return run(name, call, async_op=async_op, stream=stream)


@publish_errors
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
) -> Work | None:
    """output = this rank's part of the sum, or average, of all ranks' inputs.

    Replaces dist.reduce_scatter_tensor(output, input).

    input: bfloat16, float16 or float32, world_size parts of as many elements as output has. output: may be this rank's part
    of input. op: "sum" or "avg", or torch's. Bits do not depend on chunks, SMs or timing; only NCCL's ("sequential")
    are its own.
    """
    name, call = call_of(
        "reduce_scatter", output, input, group, reduce_op=op, schedule=schedule, staging_bytes=staging_bytes, sms=sms
    )
    return run(name, call, async_op=async_op, stream=stream)


@publish_errors
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
) -> Work | None:
    """tensor = the sum, or average, of all ranks' tensors, in place. Replaces dist.all_reduce(tensor).

    tensor: bfloat16, float16 or float32, of any number of elements. op: as for reduce_scatter_tensor; the bits are the same
    on every rank.
    """
    name, call = call_of(
        "all_reduce",
        tensor,
        tensor,
        group,
        names=("tensor", "tensor"),
        reduce_op=op,
        schedule=schedule,
        staging_bytes=staging_bytes,
        sms=sms,
    )
    return run(name, call, async_op=async_op, stream=stream)


@publish_errors
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
) -> Work | None:
    """Part d of input goes to rank d, whose output has the parts of all ranks in their order. Replaces
    dist.all_to_all_single(output, input).

    input: any dtype and shape, world_size equal parts. output: as many elements, in separate memory. Split sizes, rows of the
    first dimension by rank, are there for torch's sake, and must be equal.
    """
    name, call = call_of("all_to_all", output, input, group, schedule=schedule, staging_bytes=staging_bytes, sms=sms)
    check_splits("output_split_sizes", output_split_sizes, output, group)
    check_splits("input_split_sizes", input_split_sizes, input, group)
    return run(name, call, async_op=async_op, stream=stream)
