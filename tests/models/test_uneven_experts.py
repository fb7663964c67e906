"""Experts over ranks in random steps: any number of tokens on each rank, tokens without experts, all tokens at one expert.

WEFT_EXPERT_STEPS: how many steps; 1,000 take some minutes. Each is compared with the same experts in float64 on every rank's
tokens: results, and gradients of tokens, of routing weights and of experts.
"""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import interpreted_ranks, on_ranks
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import weft
from weft.models.experts import Experts, MoE
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
        found, expected = found.detach(), expected.detach()
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


@pytest.mark.timeout(120 + STEPS)
@pytest.mark.parametrize("settings", [{}, {"max_tokens": MOST}, {"capacity": 4.0}], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_steps(ranks: RankFixture, world_size: int, settings: dict[str, Any]) -> None:
    ranks(world_size).run(_steps, 1000 * world_size, STEPS, torch.float32, 1e-4, settings, timeout_s=100 + STEPS)


interpreted = interpreted_ranks(2)


@pytest.mark.timeout(120 + STEPS)
@pytest.mark.slow
def test_steps_interpreted(interpreted: Ranks) -> None:
    interpreted.run(_steps, 0, max(6, STEPS // 10), torch.float16, 2e-2, {})


def _over_ranks(module: Any, **settings: Any) -> Any:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(module, mesh, weft.ExpertParallel(**settings))


def _batches(*counts: tuple[int, int]) -> list[list[torch.Tensor]]:
    """By step and rank."""
    generator = torch.Generator().manual_seed(len(counts))
    return [[torch.randn(count, HIDDEN, generator=generator) for count in step] for step in counts]


@on_ranks(2)
@pytest.mark.parametrize(
    "how",
    [
        "eager",
        "checkpoint",
        pytest.param("compiled", marks=pytest.mark.slow),
        pytest.param("compiled, of max_tokens", marks=pytest.mark.slow),
    ],
)
def test_gradients_add_up(how: str) -> None:
    """The gradients of several steps, with another number of tokens each, and of forwards before the backward of another."""
    torch.manual_seed(0)
    alone = MoE(HIDDEN, WIDTH, 4)
    shared = _over_ranks(
        copy.deepcopy(alone), **({"max_tokens": 32, "capacity": 4.0} if how == "compiled, of max_tokens" else {})
    )
    torch._dynamo.reset()
    runs = {
        "eager": shared,
        "checkpoint": lambda x: checkpoint(shared, x, use_reentrant=False),
        "compiled": torch.compile(shared, fullgraph=True, backend="aot_eager"),
    }[how.partition(",")[0]]
    steps, losses = _batches((5, 9), (9, 5), (31, 8), (0, 3), (1, 0), (2, 2)), []
    for step in steps:
        out = runs(step[dist.get_rank()])
        torch.testing.assert_close(out, alone(step[dist.get_rank()]), rtol=1e-4, atol=1e-4)
        losses.append(out.square().sum())
    for loss in losses:
        loss.backward()
    for x in (x for step in steps for x in step):
        alone(x).square().sum().backward()
    for name in ("gate_up_proj", "down_proj"):
        found, wanted = (model.experts.get_parameter(name).grad for model in (shared, alone))
        torch.testing.assert_close(found.full_tensor(), wanted, rtol=1e-3, atol=1e-3)


@on_ranks(2)
def test_tokens_of_one_rank_that_need_no_gradient() -> None:
    """Of one rank, as those of an empty batch that was made anew; the other rank's do."""
    torch.manual_seed(0)
    alone = MoE(HIDDEN, WIDTH, 4)
    shared, rank = _over_ranks(copy.deepcopy(alone)), dist.get_rank()
    for frozen in ((), ("gate_up_proj",), ("down_proj",)):
        for name in frozen:
            shared.experts.get_parameter(name).requires_grad_(False)
        (step,) = _batches((5, 0))
        mine, whole = (step[rank].clone().requires_grad_(rank == 0) for _ in range(2))
        shared(mine).square().sum().backward()
        alone(whole).square().sum().backward()
        if rank == 0:
            torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-3, atol=1e-3)
        shared.experts.requires_grad_(True)


def _with_index(value: int, settings: dict[str, Any]) -> str:
    """What is said of an index of rank 1; the group then goes on."""
    torch.manual_seed(0)
    experts, rank = _over_ranks(Experts(4, HIDDEN, WIDTH), **settings), dist.get_rank()
    index = torch.zeros(6, 2, dtype=torch.int64)
    index[3, 1] = value if rank == 1 else -1
    said = ""
    try:
        experts(torch.ones(6, HIDDEN), index, torch.ones(6, 2))
    except ValueError as error:
        said = str(error)
    assert not experts(torch.ones(6, HIDDEN), torch.full_like(index, -1), torch.ones(6, 2)).any()
    return said


@pytest.mark.parametrize("settings", [{}, {"max_tokens": 6}], ids=str)
@pytest.mark.parametrize("value", [4, -2, 1000, 1 << 40])
def test_any_other_index_is_refused_on_every_rank(ranks: RankFixture, value: int, settings: dict[str, Any]) -> None:
    for said in ranks(2).run(_with_index, value, settings):
        assert f"top_k_index has {value} on rank 1" in said
    with pytest.raises(ValueError, match=f"top_k_index has {value}"):
        Experts(4, 8, 8)(torch.ones(1, 8), torch.tensor([[value]]), torch.ones(1, 1))


def _with_index_interpreted() -> str:
    """What a later call raises of an index that is refused; then all go on."""
    weft.close()
    torch.manual_seed(0)
    experts, said = _over_ranks(Experts(4, HIDDEN, WIDTH).half()), ""

    def call(tokens: int, value: int) -> None:
        experts(torch.ones(tokens, HIDDEN).half(), torch.tensor([[0, value]]).expand(tokens, 2), torch.ones(tokens, 2))

    for tokens, value in ((9, 0), (3, 7), (9, 0)):
        dist.barrier()
        try:
            call(tokens, value)
        except ValueError as error:
            said = str(error)
            break
    dist.barrier()
    weft.close()
    call(9, -1)
    return said


def test_a_refused_index_is_raised_by_a_later_call(interpreted: Ranks) -> None:
    for said in interpreted.run(_with_index_interpreted):
        assert "top_k_index has 7 on rank 0 in an earlier call" in said


def _nothing_of_a_skipped_weight() -> None:
    """Not even where the router's weight is no number."""
    torch.manual_seed(0)
    experts: Any = _over_ranks(Experts(4, HIDDEN, WIDTH))
    x, index = torch.randn(4 - dist.get_rank(), HIDDEN, requires_grad=True), torch.tensor([[1, -1]])
    weights = torch.tensor([[1.0, torch.nan]]).repeat(len(x), 1).requires_grad_()
    experts(x, index.expand(len(x), 2), weights).sum().backward()
    for leaf in (x, weights):
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
    assert not weights.grad[:, 1].any()  # type: ignore[index]
    assert experts.down_proj.grad.full_tensor().isfinite().all()


def test_a_skipped_slot_adds_nothing(ranks: RankFixture) -> None:
    ranks(2).run(_nothing_of_a_skipped_weight)


def test_a_skipped_slot_adds_nothing_interpreted(interpreted: Ranks) -> None:
    interpreted.run(_nothing_of_a_skipped_weight)


def _more_tokens_than_allowed() -> str:
    torch.manual_seed(0)
    moe, rank = _over_ranks(MoE(HIDDEN, WIDTH, 4), max_tokens=8), dist.get_rank()
    (step,) = _batches((9, 2))
    with pytest.raises(ValueError, match="max_tokens=8") as raised:
        moe(step[rank])
    moe(step[rank][:8])
    return str(raised.value)


def test_more_tokens_than_max_tokens_are_refused_on_every_rank(ranks: RankFixture) -> None:
    assert all("rank 0 has 18" in said for said in ranks(2).run(_more_tokens_than_allowed))
    for wrong in (0, 2.5, True, "4"):
        with pytest.raises(ValueError, match="max_tokens is"):
            weft.ExpertParallel(max_tokens=wrong)  # type: ignore[arg-type]


@on_ranks(2)
def test_gradients_of_operators_with_other_rows_on_each_rank() -> None:
    """The operators by themselves, whose callers say nothing of the other ranks' rows."""
    rows = (4, 40)[dist.get_rank()]
    b, splits = torch.randn(2, 8, 8), torch.full((2, 2), rows // 4)
    for operator in (weft.all_to_all_matmul, weft.matmul_all_to_all):
        a = torch.randn(rows, 8, requires_grad=True)
        out, counts = operator(a, b, splits=splits, max_rows=64)
        (2 * out).sum().backward()
        assert int(counts.sum()) == 22
        assert a.grad is not None
        assert a.grad.abs().sum(1).all()


def _zaya() -> None:
    """transformers' experts skip an index of num_experts."""
    from transformers.models.zaya.configuration_zaya import ZayaConfig
    from transformers.models.zaya.modeling_zaya import ZayaExperts

    config = ZayaConfig(hidden_size=HIDDEN, num_experts=4, moe_intermediate_size=WIDTH)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    alone, rank = ZayaExperts(config).float(), dist.get_rank()
    for parameter in alone.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    shared = _over_ranks(copy.deepcopy(alone))
    index = torch.tensor([[4], [0], [1], [2], [3], [4]])[: 6 - 2 * rank]
    mine, whole = (torch.ones(len(index), HIDDEN, requires_grad=True) for _ in range(2))
    outs = [model(x, index, torch.full(index.shape, 0.5)) for model, x in ((shared, mine), (alone, whole))]
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)
    for out in outs:
        out.square().sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-3, atol=1e-3)


def test_experts_of_transformers_skip_their_number(ranks: RankFixture) -> None:
    pytest.importorskip("transformers.models.zaya", reason="transformers has no Zaya")
    ranks(2).run(_zaya)
