"""Pools of rank processes that tests share: one in which a rank failed is replaced for the next test."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist
from rank_pools import Pool

from weft.runtime.ranks import RankFailed

pytestmark = pytest.mark.ranks


def _rank() -> int:
    return dist.get_rank()


def _dies(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def _raises() -> None:
    raise ValueError("on purpose")


def test_a_pool_in_which_a_rank_raised_or_died_is_replaced() -> None:
    pool = Pool(2)
    try:
        assert pool.run(_rank) == [0, 1]
        first = [process.pid for process in pool.processes]
        with pytest.raises(RankFailed, match="on purpose"):
            pool.run(_raises, timeout_s=60)
        assert not set(first) & {process.pid for process in pool.processes}
        with pytest.raises(RankFailed, match="died with exit code 3"):
            pool.run(_dies, 1, timeout_s=60)
        assert pool.run(_rank) == [0, 1]
        second = [process.pid for process in pool.processes]
        assert not set(first) & set(second)
        pool.processes[0].kill()
        pool.processes[0].join()
        assert pool.run(_rank) == [0, 1]
    finally:
        pool.close()
