"""Activation checkpoints around weft's operators: gradients, and what a recomputation leaves out."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pools import on_ranks
from torch.utils.checkpoint import checkpoint

import weft
from weft.runtime.programs import Programs

Tensor = torch.Tensor


def _last_is(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function whose last operation is this operator."""

    def block(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        inner = torch.nn.functional.silu(weft.all_gather_matmul(x, first.t()))
        found: Tensor = getattr(weft, name)(inner, second.t())
        return found

    return block


def _counted(work: Callable[[], Tensor]) -> tuple[list[str], Tensor]:
    ops: list[str] = []
    make = Programs.make_call

    def noted(self: Programs, call: object) -> object:
        ops.append(call.op)  # type: ignore[attr-defined]
        return make(self, call)  # type: ignore[arg-type]

    with mock.patch.object(Programs, "make_call", noted):
        return ops, work()


@on_ranks(2)
@pytest.mark.parametrize("name", ["matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all"])
def test_the_last_call_of_a_checkpoint_is_not_made_again(name: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    x, first, second = (torch.randn(*shape, generator=generator) for shape in ((4, 16), (12, 16), (16, 12)))
    block = _last_is(name)

    def gradients(*, checkpointed: bool) -> tuple[list[str], list[Tensor]]:
        given = [one.clone().requires_grad_() for one in (x, first, second)]
        out: Tensor = checkpoint(block, *given, use_reentrant=False) if checkpointed else block(*given)
        ops, _ = _counted(lambda: out.square().sum().backward())  # type: ignore[func-returns-value]
        return ops, [one.grad for one in given if one.grad is not None]

    ops, grads = gradients(checkpointed=True)
    plain_ops, wanted = gradients(checkpointed=False)
    # The gather is computed again, because its result is not kept. What comes last is not.
    assert ops == ["all_gather_matmul", *plain_ops], (ops, plain_ops)
    assert len(grads) == 3
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert size


@on_ranks(2)
def test_gradients_through_checkpoints_of_every_kind() -> None:
    """A checkpoint inside of a checkpoint, a call that is not the last one, a backward inside, and second derivatives."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, first, second = (torch.randn(*shape, generator=generator) for shape in ((4, 16), (12, 16), (16, 12)))
    block = _last_is("matmul_reduce_scatter")

    def inner(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        found: Tensor = checkpoint(block, x, first, second, use_reentrant=False)
        return found.tanh()

    def twice(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        found: Tensor = block(block(x, first, second), first, second)
        return found

    for function in (inner, twice):
        results = []
        for checkpointed in (True, False):
            given = [one.clone().requires_grad_() for one in (x, first, second)]
            out = checkpoint(function, *given, use_reentrant=False) if checkpointed else function(*given)
            out.square().sum().backward()
            results.append([one.grad for one in given])
        torch.testing.assert_close(results[0], results[1])
    seconds = []
    for checkpointed in (True, False):
        given = [one.clone().requires_grad_() for one in (x, first, second)]
        out = checkpoint(block, *given, use_reentrant=False) if checkpointed else block(*given)
        (grad,) = torch.autograd.grad(out.square().sum(), given[0], create_graph=True)
        seconds.append(torch.autograd.grad(grad.square().sum(), given))
    torch.testing.assert_close(seconds[0], seconds[1])
