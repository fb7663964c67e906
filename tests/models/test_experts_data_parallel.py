"""Experts over ranks that are also data parallel, with FSDP2: trained as in one process, on the mean of the ranks' losses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from model_work import assert_close, whole
from rank_pools import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

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


@on_ranks(4)
def test_experts_of_the_mean_of_losses_are_trained_as_in_one_process() -> None:
    """Two steps on a mesh of 2 x 2 (dp, ep), where every rank has other tokens."""
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


def _said(wrap: Callable[[DeviceMesh, nn.Module], nn.Module], *, compiled: bool = False, **settings: Any) -> str:
    """Return the first line of the error of a forward and backward on a mesh of 2 x 2 (dp, ep), or ""."""
    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = Layer()
    parallelize_module(model, grid["ep"], {"moe": weft.ExpertParallel(**settings)})
    model = wrap(grid, model)
    try:
        (torch.compile(model, backend="aot_eager") if compiled else model)(torch.randn(2, 3, HIDDEN)).square().mean().backward()
    except ValueError as error:
        return str(error)
    return ""


def _fsdp(grid: DeviceMesh, model: Any, *, over: str = "all", divisor: float | None = None) -> nn.Module:
    fully_shard(model.moe.experts, mesh=grid["dp"])
    if divisor is not None:
        model.moe.experts.set_gradient_divide_factor(divisor)
        model.moe.experts.set_force_sum_reduction_for_comms(True)  # gloo multiplies in no reduction
    # The module of the shared parameters is not the experts' parent.
    fully_shard(model.first, mesh=grid[("dp", "ep")]._flatten() if over == "all" else grid["dp"])
    fully_shard(model, mesh=grid["dp"])
    return cast(nn.Module, model)


def _ddp(grid: DeviceMesh, model: Any) -> nn.Module:
    ignored = [name for name, each in model.named_parameters() if isinstance(each, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(model)


def _choices() -> dict[str, str]:
    return {
        "fsdp": _said(_fsdp),
        "compiled": _said(_fsdp, compiled=True),
        "fsdp, sum": _said(_fsdp, gradients="sum"),
        "fsdp, mean": _said(_fsdp, gradients="mean"),
        "fsdp, divided by the caller": _said(partial(_fsdp, divisor=4.0)),
        "fsdp over dp alone": _said(partial(_fsdp, over="dp")),
        "ddp": _said(_ddp),
        "ddp, mean": _said(_ddp, gradients="mean"),
        "none": _said(lambda grid, model: model),
    }


def test_a_step_that_averages_all_but_the_experts_is_refused(ranks: RankFixture) -> None:
    for rank, said in enumerate(ranks(4).run(_choices)):
        wrong = {"fsdp": "fully_shard", "compiled": "fully_shard", "ddp": "DistributedDataParallel"}
        assert {case for case, message in said.items() if message} == set(wrong)
        for case, by in wrong.items():
            pair = "0, 1" if rank < 2 else "2, 3"
            assert said[case].startswith(f"{by} averages gradients over ranks {pair}, while those of moe.experts are sums")
            assert 'gradients="mean"' in said[case]
            assert 'gradients="sum"' in said[case]


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="gradients is 'avg'; it must be 'sum' or 'mean', or None"):
        weft.ExpertParallel(gradients="avg")  # type: ignore[arg-type]
