"""Sums over ranks are made in the order of ranks, in float32, by every schedule: so they have the same bits whoever adds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from families import of_one_node
from rank_pools import interpreted_ranks

import weft
from weft import collectives
from weft.runtime.ranks import Ranks

pytestmark = pytest.mark.ranks

PARTS = (2.0**-12, 2.0**13, -(2.0**13))
"""By rank, what it adds. In this order the first is lost and the sum is 0; in most others it is the first."""

interpreted = interpreted_ranks(len(PARTS))


def _sums(dtype: torch.dtype) -> dict[str, float]:
    """By operator and family, the largest element of the sum, where it is not 0."""
    part = PARTS[dist.get_rank()]
    a, b, x = torch.ones(6, 1, dtype=dtype), torch.full((1, 5), part, dtype=dtype), torch.full((48,), part, dtype=dtype)
    rows, weight = x.view(6, 8), torch.ones(8, dtype=dtype)

    def sum_of_rows(name: str) -> torch.Tensor:
        return weft.all_reduce_norm(rows, None, weight, schedule=name)[1]

    calls = {
        "matmul_reduce_scatter": lambda name: weft.matmul_reduce_scatter(a, b, schedule=name),
        "matmul_all_reduce": lambda name: weft.matmul_all_reduce(a, b, schedule=name),
        "reduce_scatter": lambda name: collectives.reduce_scatter(x, schedule=name),
        "all_reduce": lambda name: sum_of_rows(name) if name == "two_shot" else collectives.all_reduced(x, schedule=name),
    }
    found = {f"{op} {name}": float(call(name).abs().max()) for op, call in calls.items() for name in of_one_node(op)}  # type: ignore[arg-type]
    weft.close()
    return {what: largest for what, largest in found.items() if largest}


def test_on_hosts(ranks: RankFixture) -> None:
    assert ranks(len(PARTS)).run(_sums, torch.float32) == [{}] * len(PARTS)


def test_by_interpreted_kernels(interpreted: Ranks) -> None:
    assert interpreted.run(_sums, torch.float16) == [{}] * len(PARTS)
