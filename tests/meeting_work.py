"""torch's rendezvous of symmetric memory as it is on GPUs, but for the memory: what ranks tell each other, by which keys."""

from __future__ import annotations

import itertools
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch.distributed.distributed_c10d import _resolve_process_group

from weft import rendezvous as meetings
from weft.errors import WaitTimeout

NUMBERS = itertools.count()
"""Of the process, as torch's."""


def told(area: torch.Tensor, group: Any) -> list[bytes]:
    """What all ranks tell, and a barrier of the store."""
    group = _resolve_process_group(group) if isinstance(group, str) else group
    store, number = group.get_group_store(), next(NUMBERS)
    store.set(f"CUDASymmetricMemory/{number}/{group.rank()}", bytes([int(area[0])]).decode())
    found: list[bytes] = store.multi_get([f"CUDASymmetricMemory/{number}/{rank}" for rank in range(group.size())])
    store.barrier(f"CUDASymmetricMemory/{next(NUMBERS)}", group.size())
    return found


def meet(group: dist.ProcessGroup) -> list[int]:
    area = torch.full((1,), dist.get_rank(), dtype=torch.uint8)
    return [value[0] for value in meetings.rendezvous(area, group)]


def groups_that_overlap() -> list[list[int]]:
    """By group of this rank, of three, who was met: twice two of them, once all, once the other two, and all again."""
    some, others = dist.new_group([0, 1]), dist.new_group([1, 2])
    found = list[list[int]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "rendezvous", told)
        for group in (some, some, dist.group.WORLD, others, dist.group.WORLD):
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                assert group is not None
                found.append(meet(group))
    return found


def as_torch_meets() -> str:
    """The same without weft's store: what it says that comes to nothing."""
    some = dist.new_group([0, 1])
    world: Any = dist.group.WORLD
    store, before = world.get_group_store(), world.get_group_store().timeout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "NUMBERS", itertools.count())
        if dist.get_rank() < 2:
            told(torch.zeros(1), some)
        store.set_timeout(timedelta(seconds=2))
        try:
            told(torch.zeros(1), world)
        except RuntimeError as error:
            return str(error)
        finally:
            store.set_timeout(before)
    return ""


def one_stays_away() -> str:
    """What rank 0 is told where rank 1 has died on the way."""
    world: Any = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "rendezvous", told)
        patch.setattr(meetings, "BOUND_S", 1.0)
        if dist.get_rank() == 0:
            with pytest.raises(WaitTimeout) as caught:
                meet(world)
            return str(caught.value)
    return ""
