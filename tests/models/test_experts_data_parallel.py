"""Experts over ranks that are also data parallel, with FSDP2: trained as in one process, on the mean of the ranks' losses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from model_work import assert_close, whole
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import weft
from weft.models.experts import MoE

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]
HIDDEN = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe = nn.Linear(HIDDEN, HIDDEN), MoE(HIDDEN, 12, 4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.moe(self.first(x))


def _trained() -> None:
    """Two steps on a mesh of 2 x 2 (dp, ep), where every rank has other tokens."""
    from torch.distributed.fsdp import fully_shard

    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    alone = Layer()
    for parameter in alone.parameters():
        nn.init.normal_(parameter, 0.0, 0.5)
    model = copy.deepcopy(alone)
    parallelize_module(model, grid["ep"], {"moe": weft.ExpertParallel(gradients="mean")})
    fully_shard(model.moe.experts, mesh=grid["dp"])
    fully_shard(model, mesh=grid[("dp", "ep")]._flatten())
    steps = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (alone, model)]
    for seed in range(2):
        x = torch.randn(8, 3, HIDDEN, generator=torch.Generator().manual_seed(seed))
        for one, given, step in ((alone, x, steps[0]), (model, x.chunk(4)[dist.get_rank()], steps[1])):
            step.zero_grad()
            one(given).square().mean().backward()
        assert_close(
            {name: whole(p.grad) for name, p in model.named_parameters()}, {n: p.grad for n, p in alone.named_parameters()}
        )
        for step in steps:
            step.step()
    assert_close({name: whole(p) for name, p in model.named_parameters()}, dict(alone.named_parameters()))


def test_experts_of_the_mean_of_losses_are_trained_as_in_one_process(ranks: RankFixture) -> None:
    ranks(4).run(_trained)


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="gradients is 'avg'; it must be 'sum' or 'mean'"):
        weft.ExpertParallel(gradients="avg")  # type: ignore[arg-type]
