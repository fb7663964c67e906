"""Makes process groups whose NCCL kernels have their own number of blocks and their own priority.

NCCL's kernels have one block (CTA) for each channel. More blocks move data faster, and take more SMs from compute kernels. The
number and the priority belong to a communicator, so each setting needs its own process group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

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
