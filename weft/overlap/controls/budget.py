"""Leaves SMs free of compute kernels whose residency cannot be lowered, and sets how many SMs NCCL's kernels take.

A persistent kernel, as cuBLAS GEMMs on Hopper often are, has one block per SM, and more shared memory cannot lower that. Such a
kernel can run on fewer SMs in two ways. With `sm_budget`, the library chooses a kernel and a grid for fewer SMs. With
`sm_partition`, any kernel runs in a green context that has fewer SMs.

|  | sm_budget | sm_partition |
| --- | --- | --- |
| what it is | a target for cuBLAS's choice of kernels | hardware: no block of the stream runs elsewhere |
| granularity | 1 SM | 8 SMs on compute capability 9.0 (the driver says) |
| applies to | torch.mm and the like, in this thread (cuBLAS) and process (cuBLASLt) | all work that is enqueued on its stream |

`nccl_group` makes a process group whose NCCL kernels have their own number of blocks and their own priority. NCCL's kernels
have one block (CTA) for each channel. More blocks move data faster, and take more SMs from compute kernels. The number and the
priority belong to a communicator, so each setting needs its own process group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from weft.compat import cublas
from weft.compat.streams import Priority, checked, driver_api, priority_number

_CARVING = threading.Lock()
_CARVED: dict[object, int] = {}
"""The number of free SMs of each active budget, in the order of entry."""
_FOUND: list[int | None] = []
"""The setting before the first active budget."""


@contextmanager
def sm_budget(sms: int, *, device: torch.device | int | None = None) -> Iterator[None]:
    """Let cuBLAS select matmul kernels for `sms` SMs within this context. device: default, the current one.

    Contexts nest, and each restores the setting that it found, also after an exception. A CUDA graph keeps the setting of its
    capture. torch runs GEMMs by cuBLASLt or cuBLAS, and both get the limit. cuBLASLt's setting belongs to the process, cuBLAS's
    to the calling thread, so a backward pass, which runs in another thread, may not have it. On ROCm only cuBLASLt's is set;
    this is untested. Raises ValueError for a number that the device does not have, and if this torch or library has no such
    setting.
    """
    total = _total(device)
    if not 1 <= sms <= total:
        raise ValueError(f"sms is {sms}; this device has {total}, use 1 to {total}")
    with ExitStack() as stack:
        stack.enter_context(_carved_out(total - sms))
        if torch.version.hip is None:
            stack.enter_context(_cublas_target(sms, device))
        yield


def _total(device: torch.device | int | None) -> int:
    if not torch.cuda.is_available():
        raise ValueError("sms: there is no GPU here")
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@contextmanager
def _carved_out(sms: int) -> Iterator[None]:
    """Let cuBLASLt and Inductor's persistent GEMMs leave `sms` SMs free.

    The setting belongs to the process. If several threads have budgets, the one entered last holds. When the last one ends, the
    setting from before the first is restored.
    """
    mine = object()
    with _CARVING:
        if not _CARVED:
            _FOUND[:] = [cublas.carveout()]
        cublas.set_carveout(sms)
        _CARVED[mine] = sms
    try:
        yield
    finally:
        with _CARVING:
            del _CARVED[mine]
            cublas.set_carveout(next(reversed(_CARVED.values())) if _CARVED else _FOUND[0])


@contextmanager
def _cublas_target(sms: int, device: torch.device | int | None) -> Iterator[None]:
    """Set the target of the cuBLAS handle that torch uses in this thread."""
    with torch.cuda.device(device):
        before = cublas.sm_target()
        cublas.set_sm_target(sms)
    try:
        yield
    finally:
        with torch.cuda.device(device):
            cublas.set_sm_target(before)


@dataclass(frozen=True, kw_only=True)
class SmPartition:
    """A stream whose kernels run on only `sms` SMs. Other streams may use these SMs, too."""

    stream: torch.cuda.Stream
    sms: int


def sm_partition(sms: int, *, priority: Priority = "normal", device: torch.device | int | None = None) -> SmPartition:
    """Return a stream that runs on at most `sms` SMs, rounded down to a partition that the hardware supports. device: default,
    the current one.

    Run compute kernels on this stream, and the other SMs are free for communication. There is one stream for each device,
    number and priority. It lives as long as the process, because torch's allocator may refer to it. Raises ValueError for a
    number that the device cannot partition, and without the green contexts of CUDA 13 (older versions, ROCm).
    """
    total = _total(device)
    if not 1 <= sms <= total:
        raise ValueError(f"sms is {sms}; this device has {total}, use 1 to {total}")
    if torch.version.hip is not None:
        raise ValueError("sms: ROCm builds have no green contexts; use sm_budget")
    with torch.cuda.device(device):
        return _partition(torch.cuda.current_device(), sms, priority_number(priority))


@cache
def _partition(index: int, sms: int, priority: int) -> SmPartition:
    api = driver_api()
    if not hasattr(api, "cuGreenCtxStreamCreate"):
        raise ValueError("sms: these cuda-bindings have no green contexts; use 13 or later")
    device = checked(api.cuDeviceGet(index))
    part = _part(api, device, sms)
    description = checked(api.cuDevResourceGenerateDesc([part], 1))
    green = checked(api.cuGreenCtxCreate(description, device, api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM))
    stream = checked(api.cuGreenCtxStreamCreate(green, api.CUstream_flags.CU_STREAM_NON_BLOCKING, priority))
    named = torch.cuda.ExternalStream(int(stream), device=index)  # type: ignore[no-untyped-call]
    return SmPartition(stream=named, sms=int(part.sm.smCount))


def _part(api: Any, device: Any, sms: int) -> Any:
    """Return a partition of a device with at most `sms` SMs."""
    whole = checked(api.cuDeviceGetDevResource(device, api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    if sms == whole.sm.smCount:
        return whole
    unit, least = (int(getattr(whole.sm, name, 0)) for name in ("smCoscheduledAlignment", "minSmPartitionSize"))
    if not unit:
        raise ValueError("sms: this driver, or these cuda-bindings, cannot partition SMs; those of CUDA 13 do")
    asked = sms // unit * unit
    if asked < least:
        raise ValueError(f"sms is {sms}; a part of this device has {least} SMs or more, in steps of {unit}")
    result = api.cuDevSmResourceSplitByCount(1, whole, 0, asked)
    checked(result[:1])
    return result[1][0]


_MOST = 64
"""The largest number of channels of an NCCL communicator."""


def nccl_group(
    group: dist.ProcessGroup | None = None,
    *,
    min_ctas: int | None = None,
    max_ctas: int | None = None,
    high_priority: bool = False,
) -> dist.ProcessGroup:
    """Make a group of the same ranks, whose collectives have min_ctas to max_ctas blocks and may run on streams of high
    priority.

    group: default, the world. NCCL chooses each value that is None.

    Every rank of the group must call it. If the world is bound to a device (`init_process_group(device_id=...)`), every rank of
    the world must, because NCCL then splits the world's communicator. The caller ends the group with
    `dist.destroy_process_group`. Make a group once and reuse it: a communicator takes GPU memory and about 0.1 s.

    Raises ValueError for numbers that NCCL does not take, for a group of another backend, and if this torch has no such
    options.
    """
    _check_counts(min_ctas, max_ctas)
    if not dist.is_initialized():
        raise ValueError("group: torch.distributed is not initialized; call init_process_group with the nccl backend first")
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    _check_backend(group)
    options = _options(min_ctas, max_ctas, high_priority)
    whole = len(ranks) == dist.get_world_size()
    made: dist.ProcessGroup = dist.new_group(
        None if whole else ranks, backend="nccl", pg_options=options, use_local_synchronization=not whole
    )
    return made


def _check_counts(min_ctas: int | None, max_ctas: int | None) -> None:
    for name, count in (("min_ctas", min_ctas), ("max_ctas", max_ctas)):
        if count is not None and not 1 <= count <= _MOST:
            raise ValueError(f"{name} is {count}; NCCL takes 1 to {_MOST}")
    if min_ctas is not None and max_ctas is not None and min_ctas > max_ctas:
        raise ValueError(f"min_ctas is {min_ctas}, more than max_ctas, {max_ctas}")


def _check_backend(group: dist.ProcessGroup | None) -> None:
    backends = str(dist.get_backend_config(group))
    if "nccl" not in backends:
        raise ValueError(f"group has the backends {backends}; blocks and stream priority are NCCL's")


def _options(min_ctas: int | None, max_ctas: int | None, high_priority: bool) -> Any:
    if not hasattr(dist, "ProcessGroupNCCL"):
        raise ValueError(f"group: torch {torch.__version__} is built without NCCL")
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
    if min_ctas is not None and max_ctas is None:
        # NCCL would use its lowest number as the unset maximum, which is then below min_ctas.
        max_ctas = _MOST
    for name, count in (("min_ctas", min_ctas), ("max_ctas", max_ctas)):
        if count is None:
            continue
        if not hasattr(options.config, name):
            raise ValueError(f"{name}: torch {torch.__version__} cannot say that to NCCL; 2.11 can")
        setattr(options.config, name, count)
    return options
