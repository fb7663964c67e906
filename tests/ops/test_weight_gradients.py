"""The backward of all_gather_matmul is one call: the reduce-scatter of the input's gradient, with the gradients of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import interpreting, on_ranks

import weft
from weft import schedules
from weft.checker import ScheduleError, check
from weft.core.machine import load
from weft.core.problem import Problem
from weft.core.schedule import Copy, Gemm, Schedule, Step, Wait, steps_of
from weft.ops import tensor_parallel
from weft.perf.engine import run
from weft.runtime import tuner
from weft.runtime.calls import matmul_call

NAMES = schedules.names("matmul_reduce_scatter")
WIDTHS = (16, 8, 24)
K = 32
ROWS = {1: 6, 2: 22, 3: 20}
"""By ranks, the rows of all. Three ranks have 7, 7 and 6."""


def _problem(size: int, x: str = "whole", m: int = 24, products: int = 2) -> Problem:
    return Problem(op="matmul_reduce_scatter", m=m, n=12, k=32, world_size=size, products=products, weight_gradients=x)  # type: ignore[arg-type]


def _drawn(size: int, total: int, count: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Each rank's rows, and its weights [n, K], as nn.Linear has them."""
    generator, found = torch.Generator().manual_seed(total), []
    for low, high in Problem(op="matmul_reduce_scatter", m=total, n=K, k=1, world_size=size).shards:
        weights = [torch.randn(n, K, generator=generator).mul(K**-0.5).to(dtype) for n in WIDTHS[:count]]
        found.append((torch.randn(high - low, K, generator=generator).to(dtype), weights))
    return found


def _check_gradients(
    differentiate: Callable[[torch.Tensor, list[torch.Tensor], list[torch.Tensor]], list[torch.Tensor]],
    count: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compare gradients with those of float64.

    differentiate: returns those of (a rank's rows, its weights), given the gradients of its results.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    total = ROWS[size]
    every, generator = _drawn(size, total, count, dtype), torch.Generator().manual_seed(7)
    grads = [[torch.randn(total, n, generator=generator).to(dtype) for n in WIDTHS[:count]] for _ in range(size)]
    pairs = [(grad, weight) for (_, ws), some in zip(every, grads, strict=True) for grad, weight in zip(some, ws, strict=True)]
    wanted = torch.stack([grad.double() @ weight.double() for grad, weight in pairs]).sum(0)
    whole = torch.cat([a for a, _ in every]).double()
    low = sum(len(a) for a, _ in every[:rank])
    a, weights = every[rank]
    close = {"atol": 5e-2 if dtype != torch.float32 else 1e-4, "rtol": 1e-2 if dtype != torch.float32 else 1e-4}
    for _ in range(2):
        of_a, *of_weights = differentiate(a, weights, grads[rank])
        torch.testing.assert_close(of_a.double(), wanted[low : low + len(a)], **close)
        for grad, found in zip(grads[rank], of_weights, strict=True):
            assert found.is_contiguous()
            torch.testing.assert_close(found.double(), grad.double().t() @ whole, **close)


def _check_family(spec: str, x: str, count: int, dtype: torch.dtype) -> None:
    def differentiate(a: torch.Tensor, weights: list[torch.Tensor], grads: list[torch.Tensor]) -> list[torch.Tensor]:
        size = dist.get_world_size()
        given = torch.cat([one for one, _ in _drawn(size, ROWS[size], count, dtype)]) if x == "whole" else a
        options = (dist.group.WORLD.group_name, dist.get_rank(), size, 1, spec, x)  # type: ignore[union-attr]
        found: list[torch.Tensor] = tensor_parallel._all_gather_matmul_backward(grads, weights, given, *options)
        return found

    _check_gradients(differentiate, count, dtype)


def _every_family(dtype: torch.dtype) -> None:
    for spec in NAMES:
        for x in ("whole", "shard"):
            for count in (1, 2, 3):
                _check_family(spec, x, count, dtype)


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_family_computes_both_gradients(ranks: RankFixture, size: int) -> None:
    ranks(size).run(_every_family, torch.float32)


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_kernels_compute_both_gradients(size: int) -> None:
    interpreting(size).run(_every_family, torch.float16)


@on_ranks(3)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("view", [True, False])
def test_the_backward_of_a_gather_is_one_call(keep: bool, view: bool) -> None:
    calls: list[str] = []
    backward, again = tensor_parallel._all_gather_matmul_backward, tensor_parallel._gather_again

    def counted(*arguments: object) -> object:
        calls.append(str(arguments[-1]))
        return backward(*arguments)

    def differentiate(a: torch.Tensor, weights: list[torch.Tensor], grads: list[torch.Tensor]) -> list[torch.Tensor]:
        a, weights = a.requires_grad_(), [one.requires_grad_() for one in weights]
        passed = a.view(-1, 1, K) if view else a
        rows = ROWS[dist.get_world_size()]
        outs = weft.all_gather_matmul(passed, [one.t() for one in weights], rows=rows, keep_gathered=keep)
        return list(
            torch.autograd.grad(outs, [a, *weights], [one.view(out.shape) for one, out in zip(grads, outs, strict=True)])
        )

    with (
        mock.patch.object(tensor_parallel, "_all_gather_matmul_backward", counted),
        mock.patch.object(tensor_parallel, "_gather_again", side_effect=again) as gathers,
    ):
        _check_gradients(differentiate, 2)
        assert calls == ["whole" if keep else "shard"] * 2
        assert not gathers.called, "the gather is a part of the call"


@on_ranks(2)
def test_other_backwards_are_several_calls() -> None:
    """What one call does not compute: second derivatives, and where either the input or all weights need no gradient."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    a = torch.randn(4, K, generator=generator, requires_grad=True)
    weights = [torch.randn(n, K, generator=generator, requires_grad=True) for n in (8, 16)]
    with mock.patch.object(tensor_parallel, "_all_gather_matmul_backward", side_effect=AssertionError("one call")):
        outs = weft.all_gather_matmul(a, [one.detach().t() for one in weights])
        torch.autograd.grad(sum(one.sum() for one in outs), [a])
        out = weft.all_gather_matmul(a, weights[0].t())
        torch.autograd.grad(out.square().sum(), [a, weights[0]], create_graph=True)
        (only,) = torch.autograd.grad(weft.all_gather_matmul(a.detach(), weights[0].t()).sum(), [weights[0]])
        assert only.shape == (8, K)


@on_ranks(2)
def test_ranks_may_have_other_layouts_and_frozen_weights() -> None:
    """Ranks may pass weights of other layouts, and freeze others: a column that is contiguous is also transposed."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn(4, K, generator=generator, requires_grad=True)
    for width in (2 - rank, 8):
        for keep in (False, True):
            weight = torch.randn(width, K, generator=generator)
            b = (weight.t() if rank else weight.t().contiguous()).detach().requires_grad_()
            frozen = torch.randn(K, 8, generator=generator, requires_grad=not rank)
            outs = weft.all_gather_matmul(a, [b, frozen], keep_gathered=keep)
            a.grad = None
            sum(one.sum() for one in outs).backward()  # type: ignore[union-attr]
            whole = [torch.empty(4, K) for _ in range(2)]
            dist.all_gather(whole, a.detach())
            of_b = torch.cat(whole).sum(0)[:, None].expand(K, width)
            torch.testing.assert_close(b.grad, of_b)
            assert b.grad is not None
            assert b.grad.stride() == b.stride()
            assert (frozen.grad is None) == bool(rank)


@on_ranks(2)
def test_ranks_may_use_different_results() -> None:
    """Ranks may use different results. The gradient of a weight whose result is not used is None."""
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(4, K, generator=generator, requires_grad=True)
    weights = [torch.randn(n, K, generator=generator, requires_grad=True) for n in (8, 16)]
    outs = weft.all_gather_matmul(a, [one.t() for one in weights])
    used = dist.get_rank()
    outs[used].sum().backward()
    assert weights[1 - used].grad is None
    assert weights[used].grad is not None
    torch.testing.assert_close(a.grad, sum(one.detach().sum(0) for one in weights).expand(4, K))


# The schedules.


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("x", ["whole", "shard"])
@pytest.mark.parametrize("m", [24, 23, 2, 1, 0])
def test_every_schedule_is_proved_and_simulated(size: int, x: str, m: int) -> None:
    machine = load("h200x8")
    for fan_out in (False, True):
        for name in NAMES:
            for chunks in (1, 3):
                schedule = schedules.build(_problem(size, x, m), name, chunks, fan_out=fan_out)
                check(schedule)
                assert run(schedule, machine).total_us > 0 or not m


def test_a_result_without_columns_needs_no_x() -> None:
    for name in NAMES:
        check(schedules.build(replace(_problem(2, "shard"), n=0), name, 1))


def test_nodes_multiply_the_weights_gradients_too() -> None:
    of_nodes = replace(_problem(4), nodes=(2, 2))
    for name in ("sequential", "node_slices"):
        check(schedules.build(of_nodes, name, 2))
    sharded = replace(of_nodes, weight_gradients="shard")
    check(schedules.build(sharded, "sequential"))
    with pytest.raises(ValueError, match="could wait for each other; use sequential"):
        schedules.build(sharded, "node_slices", 2)


def _changed(schedule: Schedule, change: Callable[[Step], Step | None]) -> Schedule:
    """The schedule with changed steps. None leaves a step out."""
    ranks = tuple(
        tuple(replace(lane, steps=tuple(new for step in lane.steps if (new := change(step)) is not None)) for lane in lanes)
        for lanes in schedule.ranks
    )
    return replace(schedule, ranks=ranks)


def test_damaged_schedules_are_refused() -> None:
    schedule = schedules.build(_problem(2, "shard"), "uniform_fused_1d", 1)

    def without(name: str, step: Step) -> Step | None:
        return None if isinstance(step, Wait) and step.flag.name == name else step

    def straight(step: Step) -> Step:
        return replace(step, transposed=False) if isinstance(step, Gemm) else step

    def of_one_shard(step: Step) -> Step | None:
        return None if isinstance(step, Copy) and step.src.buffer == "x" and step.src.rank == step.dst.rank else step

    for change, message in (
        (lambda step: without("x_here", step), "x_full.*nothing orders|x_full.*no write"),
        (lambda step: without("x_free", step), "x_full.*nothing orders the two"),
        (straight, "a product needs them equal"),
        (of_one_shard, "x_full.*no write"),
        (lambda step: None if isinstance(step, Gemm) and step.transposed else step, "of gradients@.* are never written"),
    ):
        with pytest.raises(ScheduleError, match=message):
            check(_changed(schedule, change))
    buffers = tuple(replace(one, by_columns=one.name == "partial") for one in schedule.buffers)
    with pytest.raises(ScheduleError, match="by_columns=True; it must be False"):
        check(replace(schedule, buffers=buffers))


def test_the_product_of_another_input_is_not_the_gradient() -> None:
    schedule = schedules.build(_problem(2), "sequential")

    def swapped(step: Step) -> Step:
        if not (isinstance(step, Gemm) and step.transposed):
            return step
        (part,) = step.parts
        return replace(step, b=replace(step.b, rows=(0, 12)), parts=(replace(part, a=replace(part.a, rows=(12, 24))),))

    with pytest.raises(ScheduleError, match=r"a product of columns of X\^T with other rows of A"):
        check(_changed(schedule, swapped))


def test_one_chunk_hides_the_whole_exchange_beside_the_gradients() -> None:
    """No product is cut, and the copies run during the weights' product."""
    problem = Problem(op="matmul_reduce_scatter", m=8192, n=4096, k=28672, world_size=2, products=2, weight_gradients="whole")
    machine = load("h200x8")
    schedule = schedules.build(problem, "uniform_fused_1d", 1)
    assert [len(step.parts) for step in steps_of(Gemm, schedule.ranks[0])] == [2, 1]
    hidden, sequential = (
        run(schedules.build(problem, name, 1), machine).total_us for name in ("uniform_fused_1d", "sequential")
    )
    alone = run(schedules.build(replace(problem, weight_gradients=""), "sequential"), machine).total_us
    without_exchange = run(schedules.build(replace(problem, world_size=1, k=14336), "sequential"), machine).total_us
    assert sequential > alone
    assert hidden - without_exchange < 0.4 * (sequential - without_exchange)


def test_problems_that_have_no_gradients_of_weights() -> None:
    with pytest.raises(ValueError, match="use 'whole' or 'shard'"):
        _problem(2, "all")
    with pytest.raises(ValueError, match="all_gather_matmul has none"):
        Problem(op="all_gather_matmul", m=8, n=8, k=8, world_size=2, weight_gradients="whole")
    assert _problem(2).flops == 2 * replace(_problem(2), weight_gradients="").flops


def test_padding_is_zeros_where_rows_are_summed() -> None:
    a, x = torch.ones(6, 4), torch.ones(6, 8)
    call = matmul_call("matmul_reduce_scatter", a, [torch.ones(4, 8)], "", "auto", rows=6, x=x, weight_gradients="whole")
    padded = tuner.pad(call, 16, 0, 2)
    assert padded.x is not None
    torch.testing.assert_close(padded.x.t() @ padded.a, x.t() @ a)
    found = tuner.cut({"out": [torch.ones(8, 8)], "gradients": [torch.ones(4, 8)]}, call, 0, 2)
    assert [found["out"][0].shape, found["gradients"][0].shape] == [(3, 8), (4, 8)]
