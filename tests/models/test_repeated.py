"""The calls that a module's linears make again and again: what they multiply, and whom the gradients go to."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import on_ranks
from test_styles import Block, Inner, Tensor, assert_close, drawn, gradients, mesh, mine, wefts, whole
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import weft
from weft.core.errors import PeerLost
from weft.models import products
from weft.models.linear import SharedInputLinears
from weft.models.products import RepeatedProduct
from weft.runtime.groups import GROUPS

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]

INPUT = drawn(1, 12, 6, seed=1)
"""One sequence, so that a rank's part of its tokens is a matrix, and no copy is read."""


class InnerOfOne(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def pair() -> tuple[Any, Any]:
    """A block in one process, and its copy over the ranks, after some steps."""
    torch.manual_seed(0)
    alone: Any = Block()
    alone.inner.__class__ = InnerOfOne
    model = parallelize_module(copy.deepcopy(alone), mesh(), wefts())
    for _ in range(3):
        step(model, mine(INPUT))
    return alone, model


def step(model: Any, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().sum().backward()


def same(alone: Any, model: Any) -> None:
    """One step of both gives the same gradients."""
    step(alone, INPUT)
    step(model, mine(INPUT))
    assert_close(gradients(model), {name: p.grad for name, p in alone.named_parameters() if p.grad is not None})


def repeated_of(model: Any) -> list[RepeatedProduct]:
    """The RepeatedProduct of each place of a model."""
    found = [module._weft_repeated for module in model.modules() if hasattr(module, "_weft_repeated")]
    shared: dict[int, SharedInputLinears] = {
        id(module._weft_shared): module._weft_shared for module in model.modules() if hasattr(module, "_weft_shared")
    }
    return [*found, *(one.repeated for one in shared.values())]


def linears_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _three_sequences() -> list[int]:
    """How often a call is looked at for the first time."""
    torch.manual_seed(0)
    alone: Any = Block()
    model = parallelize_module(copy.deepcopy(alone), mesh(), wefts())
    x = drawn(3, 12, 6, seed=1)
    counts, record = [0], products.make_recorded

    def counting(*arguments: Any) -> Any:
        counts[-1] += 1
        return record(*arguments)

    products.make_recorded = counting
    try:
        for _ in range(3):
            step(model, mine(x))
            counts.append(0)
    finally:
        products.make_recorded = record
    step(alone, x)
    assert_close(gradients(model), {name: p.grad for name, p in alone.named_parameters()})
    return counts


def test_copies_of_the_input_are_found_out_once(ranks: RankFixture) -> None:
    """The tokens of several sequences are no matrix, so the operator reads a copy, which autograd records."""
    assert ranks(2).run(_three_sequences)[0] == [2, 0, 0, 0]


@on_ranks(2)
def test_a_call_and_its_weights_are_one_node_of_autograd() -> None:
    alone, model = pair()
    kinds = [len(one._calls) for one in repeated_of(model)]
    assert kinds == [1] * len(kinds)
    assert kinds
    begun, begin = [0], RepeatedProduct._begin
    RepeatedProduct._begin = lambda *arguments: begun.append(1) or begin(*arguments)  # type: ignore[func-returns-value, method-assign]
    try:
        step(model, mine(INPUT))
    finally:
        RepeatedProduct._begin = begin  # type: ignore[method-assign]
    assert sum(begun) == 0, "each place repeats its call"
    seen: set[Any] = set()

    def walk(node: Any) -> None:
        if node is not None and node not in seen:
            seen.add(node)
            for after, _ in node.next_functions:
                walk(after)

    walk(model(mine(INPUT)).grad_fn)
    names = [type(node).__name__ for node in seen]
    weights = len(linears_of(model))
    assert sum(isinstance(getattr(node, "variable", None), DTensor) for node in seen) >= weights
    assert "TBackward0" not in names, "the weights are read inside of the node"
    assert sum(name.startswith("weft_") for name in names) == len(kinds)
    same(alone, model)


def _new_values(alone: nn.Linear, sharded: nn.Linear) -> None:
    """As an optimizer does."""
    with torch.no_grad():
        alone.weight.mul_(2.0)
        sharded.weight.mul_(2.0)


def _new_parameter(alone: nn.Linear, sharded: nn.Linear) -> None:
    alone.weight = nn.Parameter(alone.weight.detach() * 3.0)
    sharded.weight = nn.Parameter(sharded.weight.detach() * 3.0)


def _frozen(alone: nn.Linear, sharded: nn.Linear) -> None:
    alone.weight.requires_grad_(False)
    sharded.weight.requires_grad_(False)


@on_ranks(2)
@pytest.mark.parametrize("change", [_new_values, _new_parameter, _frozen])
def test_a_replaced_weight_is_the_one_that_is_multiplied(change: Callable[[nn.Linear, nn.Linear], None]) -> None:
    alone, model = pair()
    for one, sharded in zip(linears_of(alone), linears_of(model), strict=True):
        change(one, sharded)
    with torch.no_grad():
        assert_close(model(mine(INPUT)), mine(alone(INPUT)))
    same(alone, model)
    same(alone, model)


@on_ranks(2)
def test_a_converted_model_multiplies_what_it_has_now() -> None:
    """`module.to` gives the same parameters other memory."""
    alone, model = pair()
    for one in (alone, model):
        one.double().float()
        with torch.no_grad():
            for linear in linears_of(one):
                linear.weight.mul_(2.0)
    same(alone, model)
    same(alone, model)


@on_ranks(2)
def test_weights_have_second_derivatives() -> None:
    alone, model = pair()
    found = []
    for one, x in ((alone, INPUT), (model, mine(INPUT))):
        one.zero_grad()
        weights = [linear.weight for linear in linears_of(one)]
        first = torch.autograd.grad(one(x).square().sum(), weights, create_graph=True)
        parts = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in first]
        second = torch.autograd.grad(sum(part.square().sum() for part in parts), weights)
        found.append([whole(grad) for grad in second])
    for expected, given in zip(*found, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-3)


@on_ranks(2)
def test_hooks_of_weights_see_dtensors() -> None:
    _, model = pair()
    seen: list[Any] = []
    for linear in linears_of(model):
        linear.weight.register_hook(lambda grad: seen.append(grad) or grad * 2)  # type: ignore[func-returns-value]
        linear.weight.register_post_accumulate_grad_hook(seen.append)
    before = [linear.weight.grad.to_local().clone() for linear in linears_of(model)]
    step(model, mine(INPUT))
    assert len(seen) == 2 * len(before)
    assert all(isinstance(one, DTensor) for one in seen)
    assert_close(
        {str(i): linear.weight.grad.to_local() for i, linear in enumerate(linears_of(model))},
        {str(i): 2 * grad for i, grad in enumerate(before)},
    )
    (grad,) = torch.autograd.grad(model(mine(INPUT)).square().sum(), [linears_of(model)[0].weight])
    assert isinstance(grad, DTensor)


@on_ranks(2)
def test_a_copy_multiplies_its_own_weights() -> None:
    alone, model = pair()
    twin = copy.deepcopy(model)
    assert [one._calls for one in repeated_of(twin)] == [{}] * len(repeated_of(model))
    with torch.no_grad():
        for linear in linears_of(model):
            linear.weight.zero_()
    same(alone, twin)
    assert all(linear.weight.grad is not None for linear in linears_of(model)), "those of its own last step"


@on_ranks(2)
def test_a_call_that_was_forgotten_is_made_anew() -> None:
    alone, model = pair()
    GROUPS.remembered.clear()
    same(alone, model)
    with torch.no_grad():
        expected = alone(INPUT)
        for _ in range(3):
            torch.testing.assert_close(model(mine(INPUT)), mine(expected))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(model(mine(INPUT)), mine(expected), rtol=0.1, atol=0.1)
    same(alone, model)


def _group() -> Any:
    world = dist.group.WORLD
    assert world is not None
    return GROUPS.state(world.group_name).rank_group


def _wrong_input() -> tuple[str, float]:
    _, model = pair()
    columns = 5 + (dist.get_rank() == 1)
    began = time.monotonic()
    with pytest.raises((ValueError, PeerLost)) as raised:
        model.inner.down(torch.ones(1, 12, columns, requires_grad=True))
    seconds = time.monotonic() - began
    dist.barrier()
    weft.close()
    return str(raised.value), seconds


def test_peers_get_the_error_of_a_rank_that_checks_its_call(ranks: RankFixture) -> None:
    (first, seconds), (second, _) = ranks(2).run(_wrong_input)
    assert "b has 5 rows, a has 6 columns" in second
    assert "rank 1 raised an error" in first
    assert seconds < 10


def _moved(place: Shard) -> str:
    _, model = pair()
    down = model.inner.down
    down.weight = nn.Parameter(distribute_tensor(torch.ones(6, 10), mesh(), [place]))
    found: str = ""
    try:
        model(mine(INPUT)).sum().backward()
    except ValueError as error:
        found = str(error)
    down.weight = nn.Parameter(distribute_tensor(torch.ones(6, 10), mesh(), [Shard(1)]))
    step(model, mine(INPUT))
    return found


@pytest.mark.parametrize(("dim", "expected"), [(0, "b has 10 rows, a has 5 columns"), (1, "")])
def test_a_weight_with_other_placements_is_checked_anew(ranks: RankFixture, dim: int, expected: str) -> None:
    for found in ranks(2).run(_moved, Shard(dim)):
        assert expected in found
        assert bool(expected) == bool(found)


def _early_stops() -> int:
    """The errors that a checkpoint's recomputation has published instead of a call."""
    _, model = pair()
    out = checkpoint(model.inner.down, torch.ones(1, 12, 5, requires_grad=True), use_reentrant=False)
    published: list[BaseException] = []
    group = _group()
    publish = group.publish_error_instead
    group.publish_error_instead = lambda error: published.append(error) or publish(error)
    try:
        out.sum().backward()
    finally:
        group.publish_error_instead = publish
    return len(published)


def test_the_end_of_a_checkpoints_recomputation_is_no_error_of_the_call(ranks: RankFixture) -> None:
    assert ranks(2).run(_early_stops) == [0, 0]


def _table_sizes() -> tuple[int, int, bool]:
    before = len(GROUPS.remembered._table)
    _, model = pair()
    (*_, one) = repeated_of(model)
    ((_, known, _),) = one._calls.values()
    assert known is not None
    known.bound = bound = cast(Any, SimpleNamespace(is_forgotten=True))
    GROUPS.remembered.drop_forgotten()
    dropped = known.bound is None and bound is not None
    alive = weakref.ref(known)
    del model, one, known
    gc.collect()
    return len(GROUPS.remembered._table) - before, int(alive() is not None), dropped


def test_the_calls_of_a_module_end_with_it(ranks: RankFixture) -> None:
    for _, alive, dropped in ranks(2).run(_table_sizes):
        assert (alive, dropped) == (0, True)
