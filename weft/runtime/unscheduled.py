"""This module runs work of all ranks that no schedule describes.

On GPUs it is an NCCL collective, which is watched like a first call. On CPUs the ranks first agree, as in calls, so that an
error names a missing rank, and then exchange messages (weft.runtime.host_wire).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from weft.comm.rank_group import RankGroup
from weft.runtime.cuda_resources import CudaResources
from weft.runtime.host_wire import HostWire

T = TypeVar("T")
AllToAll = Callable[[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]], Callable[[], None]]
"""Begins to fill the first tensor, flat, with so many elements from each rank, and to send as many of the second one, also
flat, to each; returns a function that waits."""


def watched(rank_group: RankGroup, resources: Any, what: str, common: str, work: Callable[[], T]) -> T:
    """Run work of all ranks. An error ends it on all ranks.

    what: the name of the work in errors.
    common: what must be equal on all ranks, one line each.
    work: the function to run.
    """
    with rank_group.fail_group_on_error():
        if isinstance(resources, CudaResources):
            return resources.watchdog.watch(what, resources.current_stream(), work)
        rank_group.agree_on_call(f"op: {what}\n{common}")
        return work()


def by_group(group: dist.ProcessGroup) -> AllToAll:
    """Return an AllToAll by a collective of the process group. On GPUs the current stream waits, and the host does not."""

    def begin(taken: torch.Tensor, given: torch.Tensor, takes: Sequence[int], gives: Sequence[int]) -> Callable[[], None]:
        work = dist.all_to_all_single(taken, given, list(takes), list(gives), group=group, async_op=True)
        return lambda: None if work is None else work.wait()  # type: ignore[func-returns-value, unused-ignore]

    return begin


def by_messages(wire: Callable[[], HostWire], what: str) -> AllToAll:
    """Return an AllToAll by messages between CPUs. wire: returns the channel, which is collective at its first use."""

    def begin(taken: torch.Tensor, given: torch.Tensor, takes: Sequence[int], gives: Sequence[int]) -> Callable[[], None]:
        return wire().all_to_all(torch.split(given, list(gives)), torch.split(taken, list(takes)), what)

    return begin
