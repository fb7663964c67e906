"""torch's rendezvous of symmetric memory as it is on GPUs, but for the memory: what ranks tell each other, by which keys."""

from __future__ import annotations

import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch.distributed.distributed_c10d import _resolve_process_group

from weft.comm.rank_group import RankGroup
from weft.comm.symmetric_heap import rendezvous_of
from weft.compat import c10d
from weft.compat.c10d import HandleExchange
from weft.core.errors import WaitTimeout

NUMBERS = itertools.count()
"""Of the process, as torch's."""


def gather_numbers(area: torch.Tensor, group: Any) -> list[bytes]:
    """Return the number of every rank, after a barrier. The stores of torch 2.11 have none, so there ranks exchange again."""
    group = _resolve_process_group(group) if isinstance(group, str) else group
    store = group.get_group_store()
    found = _all(store, group, bytes([int(area[0])]).decode())
    if hasattr(dist.Store, "barrier"):
        store.barrier(f"CUDASymmetricMemory/{next(NUMBERS)}", group.size())
    else:
        _all(store, group, "0")
    return found


def _all(store: Any, group: Any, mine: str) -> list[bytes]:
    number = next(NUMBERS)
    store.set(f"CUDASymmetricMemory/{number}/{group.rank()}", mine)
    found: list[bytes] = store.multi_get([f"CUDASymmetricMemory/{number}/{rank}" for rank in range(group.size())])
    return found


def meet(rendezvous: HandleExchange) -> list[int]:
    area = torch.full((1,), dist.get_rank(), dtype=torch.uint8)
    return [value[0] for value in rendezvous.exchange(area)]


def groups_that_overlap() -> list[list[int]]:
    """By group of this rank, of three, who was met: twice two of them, once all, once the other two, and all again."""
    groups = dist.new_group([0, 1]), dist.group.WORLD, dist.new_group([1, 2])
    rank_groups = [RankGroup(group) if _member(group) else None for group in groups]  # type: ignore[arg-type]
    some, everyone, others = ([rendezvous_of(rank_group)] if rank_group else [] for rank_group in rank_groups)
    found = list[list[int]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "rendezvous", gather_numbers)
        for rendezvous in (*some, *some, *everyone, *others, *everyone):
            found.append(meet(rendezvous))
    for rank_group in filter(None, rank_groups):
        rank_group.close()
    return found


def _member(group: Any) -> bool:
    return group != dist.GroupMember.NON_GROUP_MEMBER


def the_same_names_again() -> list[list[int]]:
    """Whom ranks meet in a group, and in one that is made after it, with its name and in its store, where keys stayed."""
    world: Any = dist.group.WORLD
    found = list[list[int]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "rendezvous", gather_numbers)
        for turn in range(2):
            rank_group = RankGroup(world)
            patch.setattr(dist, "get_rank", lambda *_, turn=turn: world.rank() + 10 * turn)
            if turn and world.rank():
                time.sleep(0.5)  # what rank 0 finds until then is old
            found.append(meet(rendezvous_of(rank_group)))
            rank_group.close()
    return found


def two_threads(rounds: int) -> list[int]:
    """Two groups meet on two threads, which come to it in another order on each rank; how many were in it at once, at most, and
    how often ranks met."""
    world: Any = dist.group.WORLD
    every = [rendezvous_of(RankGroup(world)) for _ in range(2)]
    order = every if dist.get_rank() else every[::-1]
    inside, most, met = 0, 0, 0

    def slowly(area: torch.Tensor, group: Any) -> list[bytes]:
        nonlocal inside, most, met
        inside += 1
        most = max(most, inside)
        found = gather_numbers(area, group)
        time.sleep(0.01)
        inside, met = inside - 1, met + 1
        return found

    def all_of_them(rendezvous: HandleExchange) -> None:
        for _ in range(rounds):
            assert meet(rendezvous) == list(range(dist.get_world_size()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "rendezvous", slowly)
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(all_of_them, rendezvous) for rendezvous in order]
            for one in running:
                one.result()
    return [most, met]


def as_torch_meets() -> str:
    """The same without weft's store: what it says that comes to nothing."""
    some = dist.new_group([0, 1])
    world: Any = dist.group.WORLD
    store, before = world.get_group_store(), world.get_group_store().timeout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "NUMBERS", itertools.count())
        if dist.get_rank() < 2:
            gather_numbers(torch.zeros(1), some)
        store.set_timeout(timedelta(seconds=2))
        try:
            gather_numbers(torch.zeros(1), world)
        except RuntimeError as error:
            return str(error)
        finally:
            store.set_timeout(before)
    return ""


def one_stays_away() -> str:
    """What rank 0 is told where rank 1 has died on the way."""
    world: Any = dist.group.WORLD
    rendezvous = rendezvous_of(RankGroup(world))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "rendezvous", gather_numbers)
        patch.setattr(c10d, "BOUND_S", 1.0)
        if dist.get_rank() == 0:
            with pytest.raises(WaitTimeout) as caught:
                meet(rendezvous)
            return str(caught.value)
    return ""
