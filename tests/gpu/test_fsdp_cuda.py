"""FSDP2 over replicas of a model that weft shards, on a mesh of 2 x 2 ranks: gradients, and who waits for whom."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpus import GPUS, alarm
from rank_pools import ranks_on_gpus
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import weft
from weft.runtime.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 4, reason=f"needs four ranks on GPUs, this machine has {GPUS}")]
pool = ranks_on_gpus(4, 20)
WIDTH, TOKENS = 512, 256
LONG = 6_000_000_000
"""Cycles of a sleep that outlasts a forward pass, also where four ranks share a GPU in turns."""


class Block(nn.Module):
    """before, after: called in the forward pass, when the block's parameters are gathered, and at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.inner = Inner(self.gate, self.up, self.down)
        self.before: Callable[[], Any] = lambda: None
        self.after: Callable[[], Any] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        out: torch.Tensor = x + self.inner(self.norm(x))
        self.after()
        return out


class Inner(nn.Module):
    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def _model(grid: dist.DeviceMesh, schedule: str = "auto") -> tuple[nn.Sequential, nn.Sequential]:
    """The whole model, and the same sharded over tokens and columns, and then over replicas."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        alone = nn.Sequential(*(Block() for _ in range(3))).to(torch.bfloat16)
    model = copy.deepcopy(alone)
    plan: dict[str, Any] = {
        "norm": weft.SequenceParallel(use_local_output=True),
        "inner": weft.SharedInput(["gate", "up"], input_layouts=Shard(1), schedule=schedule),
        "inner.down": weft.RowwiseParallel(output_layouts=Shard(1), schedule=schedule),
    }
    for block in model:
        parallelize_module(block, grid["tp"], plan)
        fully_shard(block, mesh=grid["dp"])
    fully_shard(model, mesh=grid["dp"])
    return alone, model


def _grid() -> dist.DeviceMesh:
    return dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))


def _own(x: torch.Tensor, grid: dist.DeviceMesh) -> torch.Tensor:
    """This rank's part of sequences [2, S, H]: its replica's sequence, its shard of the tokens."""
    return x[[grid["dp"].get_local_rank()]].chunk(2, 1)[grid["tp"].get_local_rank()].contiguous()


@alarm(150)
def _gradients() -> None:
    grid = _grid()
    alone, model = _model(grid)
    torch.manual_seed(1)
    x, grad = torch.randn(2, 2, TOKENS, WIDTH, device="cuda").bfloat16()
    for _ in range(3):
        alone.zero_grad()
        model.zero_grad()
        alone(x).backward(grad)
        model(_own(x, grid)).backward(_own(grad, grid) * 2)  # fully_shard averages over two replicas
        for (name, whole), part in zip(alone.named_parameters(), model.parameters(), strict=True):
            assert whole.grad is not None
            assert part.grad is not None, name
            found = part.grad.full_tensor().float()  # type: ignore[attr-defined]
            worst = float((found - whole.grad.float()).abs().max() / whole.grad.float().abs().max())
            assert worst < 0.04, (name, worst)


def test_gradients_are_those_of_one_process(pool: Ranks) -> None:
    pool.run(_gradients)


@alarm(150)
def _independence(schedule: str) -> None:
    """A late gather delays the block that reads it, and not the weft calls before it. A late weft call delays no gather."""
    grid = _grid()
    _, model = _model(grid, schedule)
    torch.manual_seed(1)
    x = _own(torch.randn(2, TOKENS, WIDTH, device="cuda").bfloat16(), grid)
    for _ in range(3):  # programs and streams are made
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
    gathers = model._get_fsdp_state()._comm_ctx.all_gather_stream
    first, second, _ = model
    reached = {name: torch.cuda.Event() for name in ("late", "first block", "second gather")}

    def sleep(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            reached["late"].record()

    first.after = lambda: reached["first block"].record()
    second.before = lambda: reached["second gather"].record(gathers)
    torch.cuda.synchronize()
    dist.barrier()
    with torch.no_grad():
        first.before = lambda: sleep(gathers)
        model(x)
    reached["first block"].synchronize()
    assert not reached["late"].query(), "weft's calls have waited for a gather of the next block"
    torch.cuda.synchronize()
    dist.barrier()
    with torch.no_grad():
        first.before = lambda: sleep(torch.cuda.current_stream())
        model(x)
    reached["second gather"].synchronize()
    assert not reached["late"].query(), "the gather of the next block has waited for weft's calls"
    torch.cuda.synchronize()


@pytest.mark.parametrize("schedule", ["sequential", "shard_p2p", "direct_store"])
def test_gathers_of_units_and_wefts_calls_do_not_wait_for_each_other(pool: Ranks, schedule: str) -> None:
    pool.run(_independence, schedule)
