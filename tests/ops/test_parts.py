"""Tensors that are cut to parts and gathered: values, gradients and gradients of gradients, of even, uneven and empty parts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_pools import on_ranks
from torch.distributed.tensor.debug import CommDebugMode

from weft.ops.parts import cut, gathered

Tensor = torch.Tensor
CASES = [
    ((1, 6, 4), 1),
    ((2, 7, 4), 1),
    ((1, 5, 3), 1),
    ((2, 3, 6), -1),
    ((3, 2, 7), -1),
    ((2, 1, 3), 1),
    ((4, 2), 0),
    ((0, 6, 2), 1),
]
"""Shapes, and the dimension that is cut."""


def _values(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _mine(x: Tensor, dim: int) -> Tensor:
    """This rank's part, as torch.chunk cuts it."""
    size = -(-x.shape[dim] // dist.get_world_size())
    low = min(dist.get_rank() * size, x.shape[dim])
    return x.narrow(dim, low, min(size, x.shape[dim] - low))


@on_ranks(3)
@pytest.mark.parametrize("compiled", [False, True])
def test_parts_and_wholes_have_each_others_values_and_gradients(compiled: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    torch.compiler.reset()
    down, up = (torch.compile(f, dynamic=False) if compiled else f for f in (cut, gathered))
    for shape, dim in CASES:
        x, weights = _values(shape).requires_grad_(), _values(shape, 1)
        part = down(x.transpose(0, 1).contiguous().transpose(0, 1), group, dim)
        assert part.is_contiguous()
        assert part.equal(_mine(x, dim))
        whole = up(part, group, dim, shape[dim])
        assert whole.is_contiguous()
        assert whole.equal(x)
        (whole**2 * weights).sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach() * weights)
        x.grad = None
        # A rank's loss of its part has a gradient of all parts.
        (down(x, group, dim) ** 2 * _mine(weights, dim)).sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach() * weights)
        mine = _mine(x.detach(), dim).clone().requires_grad_()
        (up(mine, group, dim, shape[dim]) ** 2 * weights).sum().backward()
        torch.testing.assert_close(mine.grad, 2 * mine.detach() * _mine(weights, dim))


@on_ranks(3)
def test_gradients_of_moves_have_gradients() -> None:
    group = dist.group.WORLD
    assert group is not None
    for shape, dim in CASES:
        x, weights = _values(shape).requires_grad_(), _values(shape, 1)
        (first,) = torch.autograd.grad((cut(x, group, dim) ** 3 * _mine(weights, dim)).sum(), x, create_graph=True)
        torch.testing.assert_close(first, 3 * x**2 * weights)
        (second,) = torch.autograd.grad((first * weights).sum(), x)
        torch.testing.assert_close(second, 6 * x.detach() * weights**2)
        mine = _mine(x.detach(), dim).clone().requires_grad_()
        (first,) = torch.autograd.grad((gathered(mine, group, dim, shape[dim]) ** 3 * weights).sum(), mine, create_graph=True)
        torch.testing.assert_close(first, 3 * mine**2 * _mine(weights, dim))
        (second,) = torch.autograd.grad((first * _mine(weights, dim)).sum(), mine)
        torch.testing.assert_close(second, 6 * mine.detach() * _mine(weights, dim) ** 2)


@on_ranks(2)
def test_results_have_memory_of_their_own() -> None:
    """Results may be written in place, and keep no larger tensor alive."""
    group = dist.group.WORLD
    assert group is not None
    for shape, dim in CASES:
        x = _values(shape).requires_grad_()
        part = cut(x, group, dim)
        whole = gathered(part, group, dim, shape[dim])
        for found in (part, whole):
            assert found.untyped_storage().nbytes() == found.nbytes
            found.mul_(2)
        assert x.equal(_values(shape))


@on_ranks(2)
def test_modes_of_torch_see_the_collectives() -> None:
    group = dist.group.WORLD
    assert group is not None
    with CommDebugMode() as mode:
        found = gathered(cut(_values((1, 5, 3)), group, 1), group, 1, 5)
    assert mode.get_total_counts() == 1
    assert found.equal(_values((1, 5, 3)))
