"""Gradients of parameters that are whole on every rank: one all-reduce sums them, and all that autograd does stays right."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import on_ranks
from test_styles import SCHEDULE, TORCH, Block, Tensor, assert_close, drawn, gradients, mesh, mine, wefts, whole
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import weft
from weft.ops import parts

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]


class Blocks(nn.Module):
    """Four blocks: each has two replicated parameters of a norm, and the bias of a row linear."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.skipped: set[int] = set()
        self.call: Callable[..., Any] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i not in self.skipped:
                x = self.call(block, x)
        return x


def pair(seed: int = 0) -> tuple[Any, Any]:
    """The model in one process, and its copy over the ranks."""
    torch.manual_seed(seed)
    alone = Blocks()
    return alone, spread(copy.deepcopy(alone))


def spread(model: Any, **norms: Any) -> Any:
    plan = wefts() | {"norm": weft.SequenceParallel(**norms)}
    return parallelize_module(
        model, mesh(), {f"blocks.{i}.{name}": style for i in range(len(model.blocks)) for name, style in plan.items()}
    )


INPUT = drawn(3, 12, 6, seed=1)


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum() / 100
    return loss


def step(alone: Any, model: Any) -> int:
    """A backward pass of both. How many all-reduces summed gradients."""
    with counted() as sums:
        loss_of(alone, INPUT).backward()
        loss_of(model, mine(INPUT)).backward()
    return len(sums)


@contextmanager
def counted() -> Iterator[list[torch.dtype]]:
    """The dtypes of the all-reduces of gradients."""
    found, all_reduced = [], parts.all_reduced
    parts.all_reduced = lambda x, *args, **options: found.append(x.dtype) or all_reduced(x, *args, **options)  # type: ignore[func-returns-value]
    try:
        yield found
    finally:
        parts.all_reduced = all_reduced


def same(alone: Any, model: Any) -> None:
    assert_close(gradients(model), {name: p.grad for name, p in alone.named_parameters() if p.grad is not None})


def _warm(*models: Any) -> None:
    for model in models:
        loss_of(model, mine(INPUT)).backward()
        model.zero_grad()


def _one_sum() -> list[int]:
    """Steps that accumulate, and one that goes back twice."""
    alone, model = pair()
    counts = [step(alone, model) for _ in range(3)]
    same(alone, model)
    for one, x in ((alone, INPUT), (model, mine(INPUT))):
        loss = loss_of(one, x)
        loss.backward(retain_graph=True)
        with counted() as sums:
            loss.backward()
    same(alone, model)
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    return [*counts, len(sums)]


def test_one_all_reduce_sums_the_gradients_of_a_model(ranks: RankFixture) -> None:
    assert ranks(2).run(_one_sum) == [[12, 1, 1, 1]] * 2


@on_ranks(2)
def test_a_gradient_may_be_asked_for_alone() -> None:
    alone, model = pair()
    _warm(model)
    for name in ("blocks.0.norm.weight", "blocks.3.inner.down.bias"):
        with counted() as sums:
            wanted = [
                torch.autograd.grad(loss_of(one, x), one.get_parameter(name))[0]
                for one, x in ((alone, INPUT), (model, mine(INPUT)))
            ]
        assert len(sums) == 1
        assert_close(whole(wanted[1]), wanted[0])
    assert all(p.grad is None for p in model.parameters())
    assert step(alone, model) == 1, "the others stay together"
    same(alone, model)


@on_ranks(2)
@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11's DTensor drops gradients of gradients, of its own styles, too")
def test_summed_gradients_have_gradients() -> None:
    """Gradients of gradients that one all-reduce has summed."""
    alone, model = pair()
    _warm(model)
    for one, x in ((alone, INPUT), (model, mine(INPUT))):
        first = torch.autograd.grad(loss_of(one, x), list(one.parameters()), create_graph=True)
        parts = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in first]
        torch.stack([part.square().sum() for part in parts]).sum().backward()
    same(alone, model)


@on_ranks(2)
def test_hooks_of_parameters_see_the_sum() -> None:
    alone, model = pair()
    seen: dict[str, list[Tensor]] = {"hook": [], "after": []}
    norm, bias = model.blocks[1].norm, model.blocks[2].inner.down
    norm.weight.register_hook(lambda grad: seen["hook"].append(whole(grad).clone()))
    bias.bias.register_post_accumulate_grad_hook(lambda p: seen["after"].append(whole(p.grad).clone()))
    for _ in range(3):
        alone.zero_grad()
        model.zero_grad()
        step(alone, model)
    assert_close(seen["hook"], [alone.blocks[1].norm.weight.grad] * 3)
    assert_close(seen["after"], [alone.blocks[2].inner.down.bias.grad] * 3)


def _frozen_and_thawed() -> list[int]:
    alone, model = pair()
    counts = []
    _warm(model)
    for frozen in (False, True, True, False, False):
        for one in (alone, model):
            one.zero_grad()
            one.blocks[1].norm.requires_grad_(not frozen)
        counts.append(step(alone, model))
        same(alone, model)
        assert (model.blocks[1].norm.weight.grad is None) is frozen
    return counts


def test_a_norm_may_be_frozen_and_thawed(ranks: RankFixture) -> None:
    """When it is thawed, its weight and bias are summed one by one, and then together, apart from the others."""
    assert ranks(2).run(_frozen_and_thawed) == [[1, 1, 1, 3, 2]] * 2


def _used_now_and_then() -> list[int]:
    alone, model = pair()
    counts = []
    _warm(model)
    for skipped in ((), (2,), (), (2,), (1, 2)):
        for one in (alone, model):
            one.zero_grad()
            one.skipped = set(skipped)
        counts.append(step(alone, model))
        same(alone, model)
        assert all((p.grad is None) is (2 in skipped) for p in model.blocks[2].parameters())
    return counts


def test_a_parameter_that_a_step_does_not_use_has_no_gradient(ranks: RankFixture) -> None:
    """From its first absence on, a block is summed by itself."""
    assert ranks(2).run(_used_now_and_then) == [[1, 1, 2, 1, 1]] * 2


def _two_models() -> list[int]:
    pairs = [pair(seed) for seed in (0, 1)]
    called: list[int] = []
    for i, (_, model) in enumerate(pairs):
        for parameter in model.parameters():
            parameter.register_hook(lambda grad, i=i: called.append(i))
    counts = []
    for turn in (0, 1, 0, 1, 1):
        called.clear()
        alone, model = pairs[turn]
        with torch.no_grad():
            pairs[1 - turn][1](mine(INPUT))
        pairs[1 - turn][1](mine(INPUT))
        counts.append(step(alone, model))
        assert set(called) == {turn}, "nothing reaches the other model's parameters"
        same(alone, model)
    return counts


def test_two_models_of_one_group_do_not_touch_each_other(ranks: RankFixture) -> None:
    assert ranks(2).run(_two_models) == [[12, 12, 1, 1, 1]] * 2


@on_ranks(2)
def test_a_deleted_model_is_freed() -> None:
    (_, kept), (_, gone) = pair(), pair()
    loss = loss_of(kept, mine(INPUT)) + loss_of(gone, mine(INPUT))
    loss.backward()  # so both are summed together
    with counted() as sums:
        (loss_of(kept, mine(INPUT)) + loss_of(gone, mine(INPUT))).backward()
    assert len(sums) == 1
    alone, last = pair()
    _warm(last)
    _warm(last)
    left = [weakref.ref(p) for p in last.parameters()] + [
        weakref.ref(p.to_local().untyped_storage()) for p in last.parameters()
    ]
    del last, loss
    gc.collect()
    assert not any(one() is not None for one in left)
    left = [weakref.ref(p) for p in gone.parameters()]
    del gone
    _warm(kept)
    _warm(kept)
    gc.collect()
    assert not any(one() is not None for one in left), "the others' next steps free it"
    alone.zero_grad()
    assert step(alone, kept) == 1
    same(alone, kept)


def _checkpointed(reentrant: bool) -> list[int]:
    alone, model = pair()
    model.call = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)
    counts = []
    for _ in range(3):
        counts.append(step(alone, model))
        same(alone, model)
    return counts


@pytest.mark.parametrize(("reentrant", "sums"), [(False, 1), (True, 4)])
def test_checkpointed_blocks(ranks: RankFixture, reentrant: bool, sums: int) -> None:
    """A reentrant checkpoint has a backward pass of its own, in which one all-reduce sums the block's gradients."""
    assert ranks(2).run(_checkpointed, reentrant) == [[12, sums, sums]] * 2


def _halve(model: Any) -> None:
    """Change the memory of parameters as an optimizer of plain tensors does. torch counts that as a change of their views."""
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).mul_(0.5)


def _changed() -> list[int]:
    """Steps of optimizers, other memory, a copy, loaded values, and a pass without gradients between two steps."""
    alone, model = pair()
    _warm(model)
    counts = []
    for change in (
        lambda one: torch.optim.SGD(one.parameters(), lr=0.1).step(),
        _halve,
        lambda one: one.to(torch.float64).to(torch.float32),
        copy.deepcopy,
        lambda one: one.load_state_dict({name: 1.5 * value for name, value in one.state_dict().items()}),
        lambda one: one.load_state_dict({name: value / 1.5 for name, value in one.state_dict().items()}, assign=True),
        lambda one: one.requires_grad_(True),
    ):
        alone, model = (made if isinstance(made := change(one), nn.Module) else one for one in (alone, model))
        for one in (alone, model):
            one.zero_grad()
        for _ in range(2):
            counts.append(step(alone, model))
            same(alone, model)
        with torch.no_grad():
            assert_close(model(mine(INPUT)), mine(alone(INPUT)))
    with torch.inference_mode():
        assert_close(model(mine(INPUT)), mine(alone(INPUT)))
    return counts


def test_a_model_may_change_between_steps(ranks: RankFixture) -> None:
    """A copy has a bundle of its own. Parameters that are other objects are summed one by one."""
    assert ranks(2).run(_changed) == [[1, 1] * 3 + [12, 1] + [1, 1] + [12, 12] * 2] * 2


def _no_dtensors() -> list[int]:
    """How many DTensors a warm forward makes, or converts, with norms that return plain tensors."""
    torch.manual_seed(0)
    model = spread(Blocks(), use_local_output=True)
    _warm(model)
    _warm(model)
    found: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        for name in ("__new__", "to_local", "from_local"):
            real = getattr(DTensor, name)
            patched.setattr(DTensor, name, lambda *args, real=real, **options: found.append(1) or real(*args, **options))
        loss_of(model, mine(INPUT))
    return found


def test_a_warm_forward_neither_makes_nor_converts_a_dtensor(ranks: RankFixture) -> None:
    assert ranks(2).run(_no_dtensors) == [[], []]


def _bias_of_float32() -> float:
    """256 and 1 are exact in bfloat16, and their sum is not."""
    linear = parallelize_module(nn.Linear(4, 3), mesh(), weft.RowwiseParallel(output_layouts=Shard(0), schedule=SCHEDULE))
    for _ in range(2):
        linear.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = linear(torch.ones(2, 2))
        (out.float() * (256.0, 1.0)[dist.get_rank()]).sum().backward()
    return float(whole(linear.bias.grad)[0])


def test_a_bias_is_summed_in_its_own_dtype(ranks: RankFixture) -> None:
    assert ranks(2).run(_bias_of_float32) == [257.0, 257.0]
