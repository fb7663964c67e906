"""The kernels of embedding_bag_all_to_all, interpreted on the CPU across rank processes: lookups, and what backward does."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from embedding_backward import check_gradients, check_optimizer
from embedding_work import Case, cases, check, check_bad_index
from launch_counts import counting
from rank_pools import interpreted_ranks, on_ranks

from weft.runtime.ranks import Ranks

pytestmark = pytest.mark.ranks


interpreted = interpreted_ranks([2], slow=[4])


@on_ranks(pool="interpreted")
def test_every_family_runs_as_a_kernel() -> None:
    from weft.runtime.lookups import FusedLookup

    assert os.environ["TRITON_INTERPRET"] == "1"
    with counting(FusedLookup) as launches:
        wide = Case(dims=((1100, 8),) * dist.get_world_size(), batch=5)
        for turn, case in enumerate((*cases(dist.get_world_size()), wide)):
            specs = ("sequential", "track_and_trigger:2", "direct_store:2")
            for call, spec in enumerate(specs if turn < 2 else specs[-1:] * 2):
                dtype = torch.float16 if turn % 2 else torch.float32
                check(replace(case, dtype=dtype), spec, 10 * turn + call)
    assert launches.count == 2 * 3 + 5 * 2


@on_ranks(pool="interpreted")
def test_gradients_and_optimizers_as_kernels() -> None:
    size = dist.get_world_size()
    uneven = tuple((8, 12, 92)[: 1 + rank % 3] for rank in range(size))
    for turn, dtype in enumerate((torch.float32, torch.float16)[: 4 // size]):
        check_gradients(Case(dims=uneven, weighted=True, spare=3, dtype=dtype), "direct_store:1", turn)
        check_gradients(Case(dims=uneven, mode="mean", index=torch.int32, dtype=dtype), "direct_store:1", turn)
        for kind in ("sgd", "adagrad"):
            check_optimizer(Case(dims=uneven, dtype=dtype), "direct_store:1", turn, kind)


def test_an_index_out_of_range_as_a_kernel_sees_it(interpreted: Ranks) -> None:
    if interpreted.world_size == 2:
        interpreted.run(check_bad_index, 40)
        interpreted.run(check_bad_index, -(2**40))
