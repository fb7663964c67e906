"""The calls that a module's linears make again and again: what they multiply, and whom the gradients go to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import RankFixture
from test_styles import Block, Inner, Tensor, assert_close, drawn, gradients, mesh, mine, wefts, whole
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from weft.models import repeated
from weft.models.linear import SharedInputLinears
from weft.models.repeated import RepeatedProduct
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
    counts, record = [0], repeated.record

    def counting(*arguments: Any) -> Any:
        counts[-1] += 1
        return record(*arguments)

    repeated.record = counting
    try:
        for _ in range(3):
            step(model, mine(x))
            counts.append(0)
    finally:
        repeated.record = record
    step(alone, x)
    assert_close(gradients(model), {name: p.grad for name, p in alone.named_parameters()})
    return counts


def test_copies_of_the_input_are_found_out_once(ranks: RankFixture) -> None:
    """The tokens of several sequences are no matrix, so the operator reads a copy, which autograd records."""
    assert ranks(2).run(_three_sequences)[0] == [2, 0, 0, 0]


def _one_node() -> None:
    alone, model = pair()
    kinds = [len(one._calls) for one in repeated_of(model)]
    assert kinds == [1] * len(kinds)
    assert kinds
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


def test_a_call_and_its_weights_are_one_node_of_autograd(ranks: RankFixture) -> None:
    ranks(2).run(_one_node)


def _replaced(change: Callable[[nn.Linear, nn.Linear], None]) -> None:
    alone, model = pair()
    for one, sharded in zip(linears_of(alone), linears_of(model), strict=True):
        change(one, sharded)
    with torch.no_grad():
        assert_close(model(mine(INPUT)), mine(alone(INPUT)))
    same(alone, model)
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


@pytest.mark.parametrize("change", [_new_values, _new_parameter, _frozen])
def test_a_replaced_weight_is_the_one_that_is_multiplied(
    ranks: RankFixture, change: Callable[[nn.Linear, nn.Linear], None]
) -> None:
    ranks(2).run(_replaced, change)


def _converted() -> None:
    alone, model = pair()
    for one in (alone, model):
        one.double().float()
        with torch.no_grad():
            for linear in linears_of(one):
                linear.weight.mul_(2.0)
    same(alone, model)
    same(alone, model)


def test_a_converted_model_multiplies_what_it_has_now(ranks: RankFixture) -> None:
    """`module.to` gives the same parameters other memory."""
    ranks(2).run(_converted)


def _gradients_of_gradients() -> None:
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


def test_weights_have_second_derivatives(ranks: RankFixture) -> None:
    ranks(2).run(_gradients_of_gradients)


def _observed_parameters() -> None:
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


def test_hooks_of_weights_see_dtensors(ranks: RankFixture) -> None:
    ranks(2).run(_observed_parameters)


def _copied() -> None:
    alone, model = pair()
    twin = copy.deepcopy(model)
    assert [one._calls for one in repeated_of(twin)] == [{}] * len(repeated_of(model))
    with torch.no_grad():
        for linear in linears_of(model):
            linear.weight.zero_()
    same(alone, twin)
    assert all(linear.weight.grad is not None for linear in linears_of(model)), "those of its own last step"


def test_a_copy_multiplies_its_own_weights(ranks: RankFixture) -> None:
    ranks(2).run(_copied)


def _forgotten() -> None:
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


def test_a_call_that_was_forgotten_is_made_anew(ranks: RankFixture) -> None:
    ranks(2).run(_forgotten)
