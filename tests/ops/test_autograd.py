"""Gradients of the operators against those of the sequential program in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from conftest import RankFixture
from rank_pools import on_ranks
from torch.autograd import forward_ad

import weft
import weft.ops.experts
from weft.core.problem import split

pytestmark = pytest.mark.ranks


def _leaf(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).requires_grad_()


def _gather_gradients(m: int, schedule: str, return_gathered: bool, keep: bool = False) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    n, k = 13, 6
    full, right, other = _leaf(m, k, seed=1), _leaf(k, n, seed=2), _leaf(k, 4 * size, seed=3)
    weights, more = _leaf(m, n + 4 * size, seed=4).detach(), _leaf(m, k, seed=5).detach()
    loss = (torch.cat([full @ right, full @ other], 1) * weights).sum() + size * (full * more).sum() * return_gathered
    loss.backward()

    low, high = split(m, size)[rank]
    left, last = split(n, size)[rank]
    a = full.detach()[low:high].clone().requires_grad_()
    bs = [
        right.detach()[:, left:last].clone().requires_grad_(),
        other.detach()[:, 4 * rank : 4 * rank + 4].clone().requires_grad_(),
    ]
    here = torch.cat([weights[:, left:last], weights[:, n + 4 * rank : n + 4 * rank + 4]], 1)
    if return_gathered:
        outs, gathered = weft.all_gather_matmul(a, bs, rows=m, schedule=schedule, return_gathered=True, keep_gathered=keep)
        ((torch.cat(outs, 1) * here).sum() + (gathered * more).sum()).backward()
    else:
        outs = weft.all_gather_matmul(a, bs, rows=m, schedule=schedule, keep_gathered=keep)
        (torch.cat(outs, 1) * here).sum().backward()
    assert full.grad is not None
    assert right.grad is not None
    assert other.grad is not None
    torch.testing.assert_close(a.grad, full.grad[low:high], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bs[0].grad, right.grad[:, left:last], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bs[1].grad, other.grad[:, 4 * rank : 4 * rank + 4], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("schedule", ["auto", "flag_gated:2", "flag_gated_2d:2"])
@pytest.mark.parametrize("return_gathered", [False, True])
def test_backward_of_all_gather_matmul(ranks: RankFixture, schedule: str, return_gathered: bool) -> None:
    for m in (12, 7):
        ranks(3).run(_gather_gradients, m, schedule, return_gathered)


@on_ranks(2)
def test_autocast_changes_nothing() -> None:
    """Results and gradients have the bits that they have without autocast, also where backward is called within."""
    a, b, splits = _leaf(4, 8, seed=dist.get_rank()), _leaf(8, 6, seed=9), torch.tensor([1, 3])
    for call in (
        lambda: weft.all_gather_matmul(a, b),
        lambda: weft.all_gather_matmul(a, b, schedule="uniform_fused_2d"),  # adds products up on the caller's thread
        lambda: weft.all_gather_matmul(a, b, schedule="flag_gated_2d:2"),
        lambda: weft.matmul_reduce_scatter(a, b),
        lambda: weft.matmul_all_reduce(a, b),
        lambda: weft.all_to_all_matmul(a, b, splits=splits, max_rows=8)[0],
        lambda: weft.matmul_all_to_all(a, b, splits=splits, max_rows=8)[0],
    ):
        found = []
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                with torch.no_grad():
                    alone = call()
                out = call()
                found.append([alone, out.detach(), *torch.autograd.grad(out.square().sum(), [a, b])])
        for one, other in zip(*found, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def _gathers_in_backward(keep: bool) -> int:
    """How often the backward gathers a, in the call of all gradients or by itself."""
    from weft.ops import tensor_parallel

    found = []
    again = tensor_parallel._gather_again
    tensor_parallel._gather_again = lambda *given: found.append("shard") or again(*given)
    backward = tensor_parallel._all_gather_matmul_backward
    tensor_parallel._all_gather_matmul_backward = lambda *given: found.append(given[-1]) or backward(*given)
    try:
        _gather_gradients(12, "flag_gated:2", False, keep)
        _gather_gradients(7, "auto", True, keep)
    finally:
        tensor_parallel._all_gather_matmul_backward, tensor_parallel._gather_again = backward, again
    return found.count("shard")


def test_what_was_gathered_is_kept_if_asked_for(ranks: RankFixture) -> None:
    assert ranks(2).run(_gathers_in_backward, False) == [2, 2]
    assert ranks(2).run(_gathers_in_backward, True) == [0, 0]


def _scatter_gradients(m: int, schedule: str, op: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    n, k = 5, 11
    left, right, weights = _leaf(m, k, seed=1), _leaf(k, n, seed=2), _leaf(m, n, seed=3).detach()
    ((left @ right) * weights / (size if op == "avg" else 1)).sum().backward()

    (low, high), (first, last) = split(m, size)[rank], split(k, size)[rank]
    a, b = left.detach()[:, first:last].clone().requires_grad_(), right.detach()[first:last].clone().requires_grad_()
    (weft.matmul_reduce_scatter(a, b, schedule=schedule, op=op) * weights[low:high]).sum().backward()
    assert left.grad is not None
    assert right.grad is not None
    torch.testing.assert_close(a.grad, left.grad[:, first:last], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(b.grad, right.grad[first:last], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("schedule", ["auto", "hetero_fused_1d:2"])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_backward_of_matmul_reduce_scatter(ranks: RankFixture, schedule: str, op: str) -> None:
    for m in (12, 7):
        ranks(3).run(_scatter_gradients, m, schedule, op)


def _squared(out: torch.Tensor, a: torch.Tensor) -> None:
    """The backward of out's gradient by a, squared."""
    (grad,) = torch.autograd.grad(torch.tanh(out).sum(), a, create_graph=True)
    grad.square().sum().backward()


@on_ranks(2)
def test_gradients_of_the_gradients_of_matmul_all_reduce() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = [_leaf(4, 6, seed=1), _leaf(6, 5, seed=2), _leaf(5, seed=3)]
    _squared(whole[0] @ whole[1] + whole[2], whole[0])

    low, high = split(6, size)[rank]
    left, right, bias = (one.detach() for one in whole)
    parts = [one.clone().requires_grad_() for one in (left[:, low:high], right[low:high], bias)]
    _squared(weft.matmul_all_reduce(parts[0], parts[1], bias=parts[2]), parts[0])
    wanted = [one.grad for one in whole if one.grad is not None]
    for part, expected in zip(parts, (wanted[0][:, low:high], wanted[1][low:high], wanted[2]), strict=True):
        torch.testing.assert_close(part.grad, expected, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_second_derivatives_are_refused_where_they_would_be_wrong() -> None:
    """Where they would be wrong they are refused, however the flow comes; not first ones with a graph for others' sake."""
    rows, table = _leaf(4, 8, seed=5), _leaf(5, 8, seed=7)
    hidden, weights = _leaf(3, 8, seed=8), _leaf(8, seed=6)
    indices, offsets, place = torch.arange(8) % 5, torch.arange(0, 9, 2), torch.arange(4)[:, None]

    def lookup(**options: Any) -> torch.Tensor:
        given = {"per_sample_weights": weights, "schedule": "sequential"}
        return weft.embedding_bag_all_to_all(indices, offsets, [table], **given, **options)

    calls = {
        "embedding_bag_all_to_all": (lookup, [table, weights]),
        "swiglu": (lambda: torch.ops.weft.swiglu(hidden, torch.tensor([2])), [hidden]),
        "experts_total": (lambda: torch.ops.weft.experts_total(rows, place, weights[:4, None]), [rows, weights]),
    }
    for name, (call, leaves) in calls.items():
        for loss in (torch.sum, lambda out: out.square().sum()):
            plain = torch.autograd.grad(loss(call()), leaves)
            with_graph = torch.autograd.grad(loss(call()), leaves, create_graph=True)
            assert all(map(torch.equal, plain, with_graph))
            for leaf in leaves:
                with pytest.raises(ValueError, match=f"weft::{name} has first derivatives alone"):
                    torch.autograd.grad(sum(one.square().sum() for one in with_graph), leaf, retain_graph=True)
    sparse = torch.autograd.grad(lookup(sparse=True).square().sum(), [table, weights], create_graph=True)
    with pytest.raises(ValueError, match="has first derivatives alone"):
        (sparse[0].to_dense().sum() + sparse[1].sum()).backward()
    lookup(optimizer=weft.SGD(lr=0.0)).sum().backward(create_graph=True, inputs=[table])
    checkpointed = torch.utils.checkpoint.checkpoint(calls["swiglu"][0], use_reentrant=False)
    (with_graph,) = torch.autograd.grad(checkpointed.square().sum(), hidden, create_graph=True)
    assert torch.equal(with_graph, torch.autograd.grad(calls["swiglu"][0]().square().sum(), hidden)[0])


@on_ranks(2)
def test_batches_of_gradients_are_refused() -> None:
    """A backward that gets several gradients at once refuses them before its peers wait for it."""
    a, b = _leaf(2, 4, seed=1), _leaf(4, 2, seed=2)
    for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all", "all_to_all_matmul"):
        operator = getattr(weft, name)
        out = operator(a, b)
        with pytest.raises(ValueError, match=f"weft::{name} takes one gradient at a time"):
            torch.autograd.grad(out, a, torch.ones(3, *out.shape), is_grads_batched=True)
        assert operator(a, b).equal(out)


def _empty_batch() -> None:
    """Tokens lie along dimension 1 of a batch without entries, and along dimension 0 beside one: results and gradients."""
    size = dist.get_world_size()
    for dtype, dim, shape in ((torch.float32, 1, (0, 2 * size, 6)), (torch.bfloat16, 0, (2 * size, 3, 0, 6))):
        wanted = [*shape[:-1], 5]
        for call, factor in ((weft.all_gather_matmul, size), (weft.matmul_reduce_scatter, 1 / size)):
            a, b = torch.ones(shape, dtype=dtype, requires_grad=True), torch.ones(6, 5, dtype=dtype, requires_grad=True)
            where = {"gather_dim" if factor > 1 else "scatter_dim": dim}
            out = call(a, b, **where)
            assert list(out.shape) == [*wanted[:dim], round(wanted[dim] * factor), *wanted[dim + 1 :]]
            assert out.dtype == dtype
            out.sum().backward()
            assert a.grad is not None
            assert a.grad.shape == a.shape
            assert b.grad is not None
            assert torch.equal(b.grad, torch.zeros(6, 5, dtype=dtype))


def test_a_batch_without_entries(ranks: RankFixture) -> None:
    ranks(2).run(_empty_batch)
    ranks(3).run(_empty_batch)


@on_ranks(2)
def test_dual_tensors_are_refused() -> None:
    """None is sent for a call that would lose a tangent; calls before, beside and after it are as ever."""
    x, b, rows = torch.ones(2, 4), torch.ones(4, 2), torch.arange(2)
    calls = {
        "collective": weft.collectives.all_reduced,
        "all_gather_matmul": lambda x: weft.all_gather_matmul(x, b),
        "matmul_reduce_scatter": lambda x: weft.matmul_reduce_scatter(x, b),
        "matmul_all_reduce": lambda x: weft.matmul_all_reduce(torch.ones(3, 4), b, residual=x.reshape(-1)[:6].view(3, 2)),
        "matmul_all_to_all": lambda x: weft.matmul_all_to_all(x, b),
        "all_to_all_matmul": lambda x: weft.all_to_all_matmul(x, b),
        "embedding_bag_all_to_all": lambda x: weft.embedding_bag_all_to_all(rows, torch.arange(3), [x]),
        "swiglu": lambda x: torch.ops.weft.swiglu(x, torch.tensor([2])),
    }
    for name, call in calls.items():
        for requires_grad in (False, True):
            refused = pytest.raises(ValueError, match=f"weft::{name} has no forward-mode derivative.*; use reverse mode")
            with forward_ad.dual_level():
                with refused:
                    call(forward_ad.make_dual(x.clone().requires_grad_(requires_grad), torch.ones_like(x)))
                assert weft.collectives.all_reduced(x).tolist() == [[2.0] * 4] * 2
            with refused:
                torch.func.jvp(call, (x.clone().requires_grad_(requires_grad),), (torch.ones_like(x),))
            if name != "swiglu":  # is not called by users
                with pytest.raises(ValueError, match=r"torch.func's grad, .* use torch.autograd.grad"):
                    torch.func.vjp(call, x)
            assert weft.collectives.all_reduced(x).tolist() == [[2.0] * 4] * 2
