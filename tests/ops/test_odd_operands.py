"""Operands that are right and rare: one-row weights in one storage, empty middle dimensions, other capacities than before."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import interpreted_ranks, on_ranks

import weft
from weft.runtime.ranks import Ranks

pytestmark = pytest.mark.ranks
interpreted = interpreted_ranks([2])


def _one_row_weights() -> list[list[float]]:
    """The gradient of a, with weights that are parts of one row of a wider matrix, and with copies of them."""
    torch.manual_seed(0)
    wide, found = torch.randn(2, 8), []
    left, right = wide[0:1, :4], wide[0:1, 4:]
    for first, second in ((left, right), (left.clone(), right.clone())):
        a = torch.ones(2, 4, requires_grad=True)
        one, two = weft.all_gather_matmul(a, [first.t(), second.t()])
        (one.sum() + 2 * two.sum()).backward()
        assert a.grad is not None
        found.append(a.grad.flatten().tolist())
    return found


def test_weights_of_one_row_lie_where_they_lie(ranks: RankFixture) -> None:
    for parts, copies in ranks(2).run(_one_row_weights):
        assert parts == pytest.approx(copies)


def _empty_middles() -> list[tuple[int, ...]]:
    a, b = torch.zeros(4, 0, 8), torch.zeros(8, 6)
    outs = [
        weft.matmul_all_to_all(a, b),
        weft.all_to_all_matmul(a, b),
        weft.matmul_all_to_all(a, b, split_dim=-1),
        weft.all_to_all_matmul(a, torch.zeros(16, 6), gather_dim=-1),
    ]
    return [tuple(out.shape) for out in outs]


def test_empty_middle_dimensions_stay(ranks: RankFixture) -> None:
    shapes = [(4, 0, 6), (4, 0, 6), (8, 0, 3), (2, 0, 6)]
    assert ranks(2).run(_empty_middles) == [shapes] * 2


@on_ranks(2, 3)
def test_one_ranks_part_may_change_alone() -> None:
    """The last rank's b has another width in every other call, and in the second half every rank's has another one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for call in range(8):
        change = call % 2 if rank == size - 1 else call // 4
        a, b = torch.full((4, 8), float(call)), torch.ones(8, 5 - change)
        out = weft.all_gather_matmul(a, b, schedule="flag_gated:2")
        assert torch.equal(out, torch.full((4 * size, 5 - change), 8.0 * call))


def _capacities() -> list[bool]:
    """32 rows to the own rank, forward and backward, where as many, more, and fewer may arrive."""
    rank, found = dist.get_rank(), []
    torch.manual_seed(rank)
    splits = torch.tensor([32 * (peer == rank) for peer in range(2)], dtype=torch.int32)
    for most in (40, 64, 32):
        a = torch.randn(32, 16, dtype=torch.float16, requires_grad=True)
        b = torch.randn(16, 24, dtype=torch.float16, requires_grad=True)
        out, counts = weft.all_to_all_matmul(a, b, splits=splits, max_rows=most)
        home, _ = weft.matmul_all_to_all(out, b.t().contiguous(), splits=counts, max_rows=64)
        home[:32].float().sum().backward()
        ones = torch.ones(32, 16)
        assert a.grad is not None
        expected = ones @ b.detach().float() @ b.detach().float().t()
        found.append(torch.allclose(a.grad.float(), expected, rtol=2e-2, atol=0.5))
    return found


def test_as_many_rows_may_arrive_as_each_call_says(interpreted: Ranks) -> None:
    assert interpreted.run(_capacities) == [[True] * 3] * 2


def test_weights_of_lookups_are_a_tensor(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("store")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="per_sample_weights is a list; it must be a tensor"):
            weft.embedding_bag_all_to_all(
                torch.tensor([0, 1, 2]),
                torch.tensor([0, 2]),
                [torch.ones(4, 2)],
                per_sample_weights=[1.0, 1.0, 1.0],  # type: ignore[arg-type]
            )
    finally:
        weft.close()
        dist.destroy_process_group()
