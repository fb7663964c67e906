"""What flows back through weft's styles where little or nothing is asked of a linear: as torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import on_ranks
from test_styles import SCHEDULE, TORCH, Inner, Tensor, assert_close, block, drawn, gradients, mesh, mine, wefts, whole
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import weft

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]


class Unused(Inner):
    """One of its linears has nothing to do in this step."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x))


def _without_a_use() -> int:
    """A weight that a step does not use has no gradient, as in one process, and a frozen one's is not even computed, where
    tokens are sharded, compiled too, and where they are whole. How many gradients of gathered weights were computed."""
    from weft.ops import tensor_parallel

    torch.manual_seed(0)
    computed, gradient_of = [], tensor_parallel._gradient_of
    alone, x = nn.Sequential(Unused()), drawn(3, 12, 6, seed=1)
    alone(x).square().sum().backward()
    tensor_parallel._gradient_of = lambda *given: computed.append(1) or gradient_of(*given)
    try:
        for layout, keep in ((Shard(1), True), (Shard(1), False), (Replicate(), True)):
            shared = weft.SharedInput(["gate", "up"], input_layouts=layout, schedule=SCHEDULE, keep_gathered=keep)
            model = parallelize_module(copy.deepcopy(alone), mesh(), {"0": shared, "0.down": weft.RowwiseParallel()})
            whole_input, compiled = layout == Replicate(), torch.compile(model, backend="aot_eager", fullgraph=True)
            for call in (model, compiled):
                model.zero_grad()
                call(x.clone().requires_grad_() if whole_input else mine(x)).square().sum().backward()
                assert_close(gradients(model), {name: p.grad for name, p in alone.named_parameters() if p.grad is not None})
                assert model[0].up.weight.grad is None
                assert not model[0].up._weft_shared._saved_products, "nor is its product kept"
        computed.clear()
        model = parallelize_module(block(), mesh(), wefts())
        model.inner.gate.weight.requires_grad_(False)
        model(mine(x)).square().sum().backward()
        return len(computed)
    finally:
        tensor_parallel._gradient_of = gradient_of


@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11's DTensor makes zeros of gradients that are not there")
def test_weights_that_are_not_used_have_no_gradient(ranks: RankFixture) -> None:
    """Zeros would let an optimizer's weight decay change them. What is computed apart is for down: gate and up are one call."""
    assert ranks(2).run(_without_a_use) == [1, 1]


@on_ranks(2)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_token_without_a_dimension_for_it(autocast: bool) -> None:
    """A vector, which is whole, through both styles: as torch's."""
    found = []
    for column, row in ((ColwiseParallel, RowwiseParallel), (weft.ColwiseParallel, weft.RowwiseParallel)):
        torch.manual_seed(0)
        model = parallelize_module(nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6)), mesh(), {"0": column(), "1": row()})
        x = drawn(6, seed=1).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x)
        out.square().sum().backward()
        found.append((out.detach(), x.grad, gradients(model)))
    assert found[1][0].shape == (6,)
    if autocast:
        torch.testing.assert_close(found[1], found[0], rtol=5e-2, atol=5e-2)
    else:
        assert_close(found[1], found[0])


def _errors_of_biases() -> dict[str, float]:
    """The largest error of a row linear's bias gradient in bfloat16, by whose style, relative to torch's in float32."""
    ranks, found = dist.get_world_size(), {}
    x, scale = drawn(2, 96 * ranks, 24, seed=1), drawn(2, 96 * ranks, 12, seed=2)
    whole_gradient = scale.bfloat16().double().sum((0, 1))
    for name, kind in (("torch", RowwiseParallel), ("weft", weft.RowwiseParallel)):
        torch.manual_seed(0)
        linear: Any = parallelize_module(nn.Linear(24, 12), mesh(), kind(output_layouts=Shard(1)))
        with torch.autocast("cpu", torch.bfloat16):
            out = linear(x.chunk(ranks, -1)[dist.get_rank()])
        assert out.dtype == torch.bfloat16
        out.backward(scale.chunk(ranks, 1)[dist.get_rank()].bfloat16())
        error = (whole(linear.bias.grad).double() - whole_gradient).abs().max() / whole_gradient.abs().max()
        found[name] = error.item()
    return found


def test_a_row_linears_bias_is_summed_before_it_is_rounded(ranks: RankFixture) -> None:
    """Its gradient is a sum over rows and ranks in the parameter's dtype, float32, of gradients in autocast's."""
    for world_size in (2, 3):
        for errors in ranks(world_size).run(_errors_of_biases):
            assert errors["weft"] < 1e-6, errors
            assert errors["weft"] <= errors["torch"], errors
