"""weft.close: of one group, and of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture

import weft
from weft.runtime.groups import GROUPS

pytestmark = pytest.mark.ranks


def _closed() -> list[Any]:
    """Which of two groups have been used and not closed: after a call of each, after one is closed, and after weft.close()."""
    weft.close()
    pair: Any = dist.new_group()
    world: Any = dist.group.WORLD
    a, b, seen = torch.ones(2, 4), torch.ones(4, 2), []

    def look() -> None:
        dist.barrier()
        seen.append([GROUPS.known(group.group_name) is not None for group in (world, pair)])
        dist.barrier()

    for close in (lambda: weft.close(pair), lambda: weft.close(world), weft.close):
        for group in (world, pair):
            assert weft.all_gather_matmul(a, b, group).shape == (4, 2)
        look()
        close()
        look()
    return seen


def test_without_a_group_all_are_closed(ranks: RankFixture) -> None:
    both, neither = [True, True], [False, False]
    for seen in ranks(2).run(_closed):
        assert seen == [both, [True, False], both, [False, True], both, neither]
