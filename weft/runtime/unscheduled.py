"""Work of all ranks that no schedule describes: what moves in it, and what goes along with it.

On GPUs it is a collective of NCCL's, watched as a first call is. On CPUs ranks meet first, as in calls, so that a rank that
does not come is named; and what moves are messages of the group's own (weft.runtime.host_wire).
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


def watched(rank_group: RankGroup, resources: Any, what: str, alike: str, work: Callable[[], T]) -> T:
    """Run it. what: in an error's words; alike: what ranks must have in common, a line each. What it raises ends all ranks'."""
    with rank_group.failing():
        if isinstance(resources, CudaResources):
            return resources.watchdog.watch(what, resources.current_stream(), work)
        rank_group.enter(f"op: {what}\n{alike}")
        return work()


def by_group(group: dist.ProcessGroup) -> AllToAll:
    """By a collective of the process group: on GPUs the current stream waits, and the host does not."""

    def begin(taken: torch.Tensor, given: torch.Tensor, takes: Sequence[int], gives: Sequence[int]) -> Callable[[], None]:
        work = dist.all_to_all_single(taken, given, list(takes), list(gives), group=group, async_op=True)
        return lambda: None if work is None else work.wait()  # type: ignore[func-returns-value, unused-ignore]

    return begin


def by_messages(wire: Callable[[], HostWire], what: str) -> AllToAll:
    """By messages of the group's own, on CPUs. wire: collective at its first use."""

    def begin(taken: torch.Tensor, given: torch.Tensor, takes: Sequence[int], gives: Sequence[int]) -> Callable[[], None]:
        return wire().all_to_all(torch.split(given, list(gives)), torch.split(taken, list(takes)), what)

    return begin
