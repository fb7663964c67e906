"""Experts over ranks in random steps: any number of tokens on each rank, tokens without experts, all tokens at one expert.

WEFT_EXPERT_STEPS: how many steps; 1,000 take some minutes. Each is compared with the same experts in float64 on every rank's
tokens: results, and gradients of tokens, of routing weights and of experts.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import interpreted_ranks
from torch.distributed.tensor.parallel import parallelize_module

import weft
from weft.models.experts import Experts
from weft.runtime.ranks import Ranks

pytestmark = pytest.mark.ranks

STEPS = int(os.environ.get("WEFT_EXPERT_STEPS", "30"))
HIDDEN, WIDTH, MOST = 16, 24, 24


class Step:
    """One step of all ranks, drawn the same on each: tokens, indices and routing weights by rank."""

    def __init__(self, seed: int, experts: int, dtype: torch.dtype) -> None:
        size, draw = dist.get_world_size(), random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        top = draw.choice((1, 2, experts))
        pattern = draw.choice(("any", "any", "none", "some without", "one expert", "equal"))
        counts = [draw.choice((0, 1, draw.randint(0, MOST))) for _ in range(size)]
        if pattern in ("none", "equal"):
            counts = [0 if pattern == "none" else MOST // 2] * size
        self.trains = draw.random() < 0.8
        self.x = [torch.randn(count, HIDDEN, generator=generator).to(dtype) for count in counts]
        self.weights = [torch.rand(count, top, generator=generator) for count in counts]
        self.index = [torch.rand(count, experts, generator=generator).topk(top).indices for count in counts]
        for index in self.index:
            if pattern == "one expert":
                index.fill_(draw.randrange(experts))
            skipped = draw.choice((0.0, 0.3, 1.0)) if pattern in ("any", "one expert") else 0.0
            index[torch.rand(index.shape, generator=generator) < skipped] = -1
        self.words = f"step {seed}: {pattern}, top {top}, tokens {counts}"


def dense(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, into: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Every token by every expert, in float64."""
    each = torch.zeros(x.shape[0], len(into), dtype=torch.float64)
    each = each.scatter_add(1, index.clamp(min=0), weights.double() * (index >= 0))
    gate, up = torch.einsum("th,efh->tef", x.double(), into).chunk(2, -1)
    return torch.einsum("te,tef,ehf->th", each, torch.nn.functional.silu(gate) * up, out)


def _compared(step: Step, shared: Any, weights: list[torch.Tensor], tolerance: float) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [each[rank].clone().requires_grad_(step.trains) for each in (step.x, step.weights)]
    with torch.set_grad_enabled(step.trains):
        got = shared(mine[0], step.index[rank], mine[1])
    wanted = [[each[r].double().requires_grad_() for each in (step.x, step.weights)] for r in range(size)]
    outs = [dense(one[0], step.index[r], one[1], *weights) for r, one in enumerate(wanted)]

    def close(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        scale = max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
        error = float((found.double() - expected).abs().max()) if expected.numel() else 0.0
        assert found.shape == expected.shape, f"{step.words}: {what}"
        assert error <= tolerance * scale, f"{step.words}: {what} is off by {error}"

    close("result", got, outs[rank])
    if not step.trains:
        return
    got.float().square().sum().backward()
    sum(out.square().sum() for out in outs).backward()  # type: ignore[union-attr]
    for what, one, other in zip(("tokens", "weights"), mine, wanted[rank], strict=True):
        assert one.grad is not None
        assert other.grad is not None
        close(f"gradient of {what}", one.grad, other.grad)
    for name, whole in zip(("gate_up_proj", "down_proj"), weights, strict=True):
        assert whole.grad is not None
        close(f"gradient of {name}", shared.get_parameter(name).grad.full_tensor(), whole.grad)


def _steps(first: int, steps: int, dtype: torch.dtype, tolerance: float, settings: dict[str, Any]) -> None:
    """Gradients of experts add up over three steps."""
    torch.manual_seed(first)
    experts = 2 * dist.get_world_size()
    shared: Any = Experts(experts, HIDDEN, WIDTH).to(dtype)
    weights = [whole.detach().double().requires_grad_() for whole in (shared.gate_up_proj, shared.down_proj)]
    parallelize_module(shared, dist.init_device_mesh("cpu", (dist.get_world_size(),)), weft.ExpertParallel(**settings))
    for seed in range(first, first + steps):
        if (seed - first) % 3 == 0:
            shared.zero_grad()
            for whole in weights:
                whole.grad = None
        _compared(Step(seed, experts, dtype), shared, weights, tolerance)


@pytest.mark.parametrize("settings", [{}, {"max_tokens": MOST}, {"capacity": 4.0}], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_steps(ranks: RankFixture, world_size: int, settings: dict[str, Any]) -> None:
    ranks(world_size).run(_steps, 1000 * world_size, STEPS, torch.float32, 1e-4, settings, timeout_s=100 + STEPS)


interpreted = interpreted_ranks(2)


def test_steps_interpreted(interpreted: Ranks) -> None:
    interpreted.run(_steps, 0, max(6, STEPS // 10), torch.float16, 2e-2, {})
