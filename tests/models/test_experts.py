"""Experts over ranks, against the same experts on one rank: results, gradients, steps, experts that get nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import on_ranks
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import weft
from weft.models.communicating import communicating_layers
from weft.models.experts import Experts, MoE, Routing

pytestmark = pytest.mark.ranks

TOKENS, HIDDEN, WIDTH, EXPERTS = 10, 8, 12, 4


def test_routing_sorts_rows_by_expert() -> None:
    routing = Routing(torch.tensor([[2, 0], [0, 3]]), 5)
    assert routing.order.tolist() == [1, 2, 0, 3]
    assert routing.counts.tolist() == [2, 0, 1, 1, 0]
    x = torch.tensor([[1.0], [2.0]])
    rows = routing.spread(x)
    assert rows.flatten().tolist() == [1, 2, 1, 2]
    weights = torch.tensor([[0.5, 2.0], [1.0, 0.25]])
    assert routing.gather(rows, weights).flatten().tolist() == [2.5, 2.5]


def test_spreading_rows_has_the_gradient_of_indexing() -> None:
    index = torch.randint(0, 3, (5, 2), generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Routing(index, 3).spread, (x,))


class OldExpert(nn.Module):
    """An expert of transformers' Mixtral before 5.0."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(self.act_fn(self.w1(x)) * self.w3(x))
        return out


class OldBlock(nn.Module):
    """The block around them: every token by every expert, with weights of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(OldExpert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.gate(x)
        weights, index = logits.softmax(-1).topk(self.top_k)
        dense = torch.zeros_like(logits).scatter(-1, index, weights / weights.sum(-1, keepdim=True))
        return sum(dense[..., e, None] * expert(x) for e, expert in enumerate(self.experts)), logits.flatten(0, -2)


def _mixtral() -> nn.Module:
    """transformers' own block; weights that are not all zero."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=2, hidden_act="silu"
    )
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    return block


MAKES = {"weft": lambda: MoE(HIDDEN, WIDTH, EXPERTS), "list": OldBlock, "transformers": _mixtral}


def _whole_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Over all ranks' tokens: that of experts is, the others' are of this rank's."""
    grad: Any = parameter.grad
    if hasattr(grad, "full_tensor"):
        return grad.full_tensor()
    whole: torch.Tensor = grad.clone()
    dist.all_reduce(whole)
    return whole


def _same_weights(shared: nn.Module, alone: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Parameters of both by name. Of a list of experts: side by side."""
    found = {}
    for name, parameter in shared.named_parameters():
        if isinstance(getattr(alone, "experts", None), nn.ModuleList) and name.startswith("experts."):
            keys = ("w1", "w3") if "gate_up" in name else ("w2",)
            parts = [[getattr(expert, key).weight for key in keys] for expert in alone.experts]
            found[name] = parameter, torch.stack([torch.cat([p.grad for p in one]) for one in parts])
        else:
            found[name] = parameter, alone.get_parameter(name).grad
    return found


def _compare(kind: str, dtype: torch.dtype, capacity: float | None) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone = MAKES[kind]().to(dtype)
    shared = copy.deepcopy(alone)
    mesh = dist.init_device_mesh("cpu", (size,))
    parallelize_module(shared, mesh, weft.ExpertParallel(capacity=capacity))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (alone, shared)]
    for step in range(2):
        x = torch.randn(size * 2, TOKENS, HIDDEN, dtype=dtype)
        mine = x[2 * rank : 2 * rank + 2].clone().requires_grad_()
        x.requires_grad_()
        wanted, got = (_first(model(each)) for model, each in ((alone, x), (shared, mine)))
        torch.testing.assert_close(got, wanted[2 * rank : 2 * rank + 2])
        for optimizer, out in zip(optimizers, (wanted, got), strict=True):
            optimizer.zero_grad()
            out.square().sum().backward()
        torch.testing.assert_close(mine.grad, x.grad[2 * rank : 2 * rank + 2])
        for name, (parameter, grad) in _same_weights(shared, alone).items():
            torch.testing.assert_close(_whole_gradient(parameter), grad, msg=f"{name} in step {step}")
        for parameter in shared.parameters():
            if not hasattr(parameter, "full_tensor"):
                parameter.grad = _whole_gradient(parameter)
        for optimizer in optimizers:
            optimizer.step()
    return [str(layer) for layer in communicating_layers(shared)]


def _first(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("kind", MAKES)
def test_as_on_one_rank(ranks: RankFixture, kind: str) -> None:
    if kind == "transformers":
        pytest.importorskip("transformers", reason="transformers is not installed")
    reports = ranks(2).run(_compare, kind, torch.float32, None)
    assert reports == [["experts: all_to_all_matmul, matmul_all_to_all; 4 experts"]] * 2


@on_ranks(3)
def test_experts_without_rows() -> None:
    """All tokens of all ranks go to two experts, on one rank, through the middle of several."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone = Experts(2 * size, HIDDEN, WIDTH)
    shared = copy.deepcopy(alone)
    parallelize_module(shared, dist.init_device_mesh("cpu", (size,)), weft.ExpertParallel())
    index = torch.tensor([[3, 2]]).expand(TOKENS, 2)
    x, weights = torch.randn(size, TOKENS, HIDDEN), torch.rand(size, TOKENS, 2)
    got = shared(x[rank], index, weights[rank])
    torch.testing.assert_close(got, alone(x[rank], index, weights[rank]))
    got.square().sum().backward()
    torch.stack([alone(one, index, each) for one, each in zip(x, weights, strict=True)]).square().sum().backward()
    grads = shared.gate_up_proj.grad.full_tensor()  # type: ignore[union-attr, operator]
    torch.testing.assert_close(grads, alone.gate_up_proj.grad)
    assert not grads[:2].any()
    assert grads[2].any()


@on_ranks(2)
def test_under_autocast() -> None:
    """Weights in float32 are multiplied as one rank's are, and their gradients are float32."""
    torch.manual_seed(0)
    alone = MoE(HIDDEN, WIDTH, EXPERTS)
    shared = copy.deepcopy(alone)
    parallelize_module(shared, dist.init_device_mesh("cpu", (2,)), weft.ExpertParallel())
    x = torch.randn(TOKENS, HIDDEN)
    for given in (x, x.bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            outs = alone(given), shared(given)
        assert outs[0].dtype == outs[1].dtype == torch.bfloat16
        torch.testing.assert_close(outs[1], outs[0], rtol=2e-2, atol=2e-2)
        outs[1].float().sum().backward()
    assert shared.experts.gate_up_proj.grad.dtype == torch.float32


@on_ranks(2)
def test_compiles_as_one_graph() -> None:
    torch.manual_seed(0)
    shared = MoE(HIDDEN, WIDTH, EXPERTS)
    parallelize_module(shared, dist.init_device_mesh("cpu", (2,)), weft.ExpertParallel())
    x = torch.randn(TOKENS, HIDDEN)
    torch._dynamo.reset()
    compiled = torch.compile(shared, fullgraph=True, backend="aot_eager")
    grads = []
    for model in (shared, compiled):
        shared.zero_grad()
        model(x).square().sum().backward()
        grads.append([p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in shared.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def _frozen() -> list[tuple[str, bool]]:
    """Of a list of experts that are frozen but for their last weights."""
    block = OldBlock()
    block.experts.requires_grad_(False)
    for expert in block.experts:
        expert.w2.requires_grad_(True)
    parallelize_module(block, dist.init_device_mesh("cpu", (2,)), weft.ExpertParallel())
    return [(name, parameter.requires_grad) for name, parameter in block.named_parameters()]


def test_experts_in_a_list_stay_frozen(ranks: RankFixture) -> None:
    for found in ranks(2).run(_frozen):
        assert dict(found) == {"gate.weight": True, "experts.gate_up_proj": False, "experts.down_proj": True}


def _mistakes() -> None:
    mesh = dist.init_device_mesh("cpu", (2,))
    index, weights = torch.zeros(TOKENS, 2, dtype=torch.int64), torch.ones(TOKENS, 2)
    small = parallelize_module(Experts(2, HIDDEN, WIDTH), mesh, weft.ExpertParallel(capacity=0.5))
    for _ in range(2):  # the group goes on
        with pytest.raises(ValueError, match=r"capacity=0.5\) leaves room for 10 rows, but 40 rows arrived at rank 0"):
            small(torch.ones(TOKENS, HIDDEN), index, weights)
    partly, uneven = OldBlock(), OldBlock()
    partly.experts[1].w3.requires_grad_(False)
    uneven.experts = uneven.experts[:3]
    for module, message in (
        (Experts(3, HIDDEN, WIDTH), "Experts has 3 experts; 2 ranks do not divide them"),
        (small, "Experts are already spread over ranks"),
        (nn.Linear(2, 2), "Linear has parameters bias, weight; ExpertParallel takes experts with gate_up_proj"),
        (nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])}), "list of experts that are not Mixtral's"),
        (partly, "experts have a w1 or w3 that is frozen, and one that is not"),
        (uneven, "Experts has 3 experts; 2 ranks do not divide them"),
    ):
        with pytest.raises(ValueError, match=message):
            parallelize_module(module, mesh, weft.ExpertParallel())
    assert type(uneven) is OldBlock
    assert [name for name, _ in uneven.experts.named_children()] == ["0", "1", "2"], "what was refused is as it was"


def test_mistakes(ranks: RankFixture) -> None:
    ranks(2).run(_mistakes)
    with pytest.raises(ValueError, match="capacity is 0; it must be above 0"):
        weft.ExpertParallel(capacity=0)
    with pytest.raises(ValueError, match="top_k is 5; of 4 experts"):
        MoE(8, 8, 4, top_k=5)
