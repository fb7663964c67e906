"""Experts over ranks that multiply FP8, against the same arithmetic in float64, and against experts in full precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from float8 import E4M3, dequantised, quantise
from rank_pools import interpreted_ranks, on_ranks
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import weft
from weft.models.experts import Experts
from weft.ops.experts import experts_quantise, quantised_weights
from weft.runtime.ranks import Ranks

HIDDEN, WIDTH, EXPERTS, TOP = 256, 128, 6, 2


def _by_blocks(rows: torch.Tensor) -> torch.Tensor:
    return dequantised(*quantise(rows.float(), "blockwise", "a"), "blockwise", "a")


def _weight(weight: torch.Tensor) -> torch.Tensor:
    """[N, K], to float64 [K, N]."""
    return dequantised(*quantise(weight.float().t(), "blockwise", "b"), "blockwise", "b")


def _expected(experts: Experts, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What both quantisations leave, in float64."""
    rows, total = _by_blocks(x), torch.zeros(x.shape, dtype=torch.float64)
    for e in range(EXPERTS):
        gate, up = (rows @ _weight(experts.gate_up_proj[e])).chunk(2, -1)
        middle = _by_blocks((experts.act_fn(gate) * up).to(x.dtype))
        share = (weights.double() * (index == e)).sum(1, keepdim=True)
        total += share * (middle @ _weight(experts.down_proj[e]))
    return total


def _layer(dtype: torch.dtype, act_fn: Any = nn.functional.silu, **options: Any) -> tuple[Experts, Experts]:
    """Alike on all ranks: whole, and over ranks."""
    torch.manual_seed(0)
    alone = Experts(EXPERTS, HIDDEN, WIDTH, act_fn).to(dtype).requires_grad_(False)
    shared = copy.deepcopy(alone)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(shared, mesh, weft.ExpertParallel(float8="blockwise", **options))
    return alone, shared


def _tokens(dtype: torch.dtype, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's tokens, with experts, some of which are none, and weights."""
    draw = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    x = torch.randn(count, HIDDEN, generator=draw) * torch.rand(count, 1, generator=draw) * 4
    index = torch.rand(count, EXPERTS, generator=draw).topk(TOP).indices
    index[1::3, 1] = -1
    return x.to(dtype), index, torch.rand(count, TOP, generator=draw).to(dtype)


def _off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The error's length as a part of the result's."""
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30))


def _compare(dtype: torch.dtype, rounding: float, counts: tuple[int, ...]) -> None:
    for act_fn in (nn.functional.silu, nn.functional.gelu):
        alone, shared = _layer(dtype, act_fn)
        for seed, first in enumerate(counts):
            x, index, weights = _tokens(dtype, first + 3 * dist.get_rank(), seed)
            out = shared(x, index, weights)
            assert out.dtype == dtype
            if len(x):
                # Some elements of the second quantisation lie between two others, and are rounded either way.
                assert _off(out, _expected(alone, x, index, weights)) < rounding
                whole = alone.double()
                plain = sum(
                    (weights.double() * (index == e)).sum(1, keepdim=True)
                    * (whole._apply_gate(x.double() @ whole.gate_up_proj[e].t()) @ whole.down_proj[e].t())
                    for e in range(EXPERTS)
                )
                assert _off(out, plain) < 0.1  # type: ignore[arg-type]
                alone.to(dtype)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_results(ranks: RankFixture, world_size: int) -> None:
    ranks(world_size).run(_compare, torch.float32, 1e-3, (0, 11, 4))
    ranks(world_size).run(_compare, torch.bfloat16, 2e-2, (7,))


interpreted = interpreted_ranks([2])


@pytest.mark.ranks
def test_kernels_interpreted(interpreted: Ranks) -> None:
    interpreted.run(_compare, torch.float16, 1e-2, (5,))


@on_ranks(1, interpreted=True)
def test_rows_are_quantised_alike() -> None:
    """Kernels and torch's operations give the same bits."""
    from weft.ops import experts

    rows = torch.randn(5, 384) * torch.tensor([1e-3, 1.0, 300.0, 0.0, 1.0])[:, None]
    rows[4, 7] = torch.nan
    for counts in (None, torch.tensor([[1, 1], [1, 0]])):
        by_kernels = experts_quantise(rows.half(), counts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts, "_by_kernels", lambda x: False)
            by_torch = experts_quantise(rows.half(), counts)
        there = 4 if counts is None else 3  # without the row of a NaN, which the interpreter does not convert
        assert torch.equal(by_kernels.scales[:there], by_torch.scales[:there])
        assert torch.equal(by_kernels.elements[:there].float(), by_torch.elements[:there].float())


def test_quantised_as_others_do() -> None:
    rows, weights = torch.randn(6, 256), torch.randn(3, 256, 384)
    elements, scales = experts_quantise(rows)
    assert elements.dtype == E4M3
    assert torch.equal(dequantised(elements, scales, "blockwise", "a"), _by_blocks(rows))
    found = quantised_weights(weights.mT.contiguous().mT)
    assert found.elements.stride(1) == 1
    for each, (elements, scales) in zip(weights, zip(*found, strict=True), strict=True):
        assert torch.equal(dequantised(elements, scales, "blockwise", "b"), _weight(each.t()))
    zeros = experts_quantise(torch.zeros(1, 128))
    assert not zeros.elements.float().any()
    assert zeros.scales.all()


@on_ranks(2)
def test_changed_weights() -> None:
    """Weights that change are quantised anew."""
    alone, shared = _layer(torch.float32)
    x, index, weights = _tokens(torch.float32, 5)
    before = shared(x, index, weights)
    assert torch.equal(shared(x, index, weights), before)
    for layer in (alone, shared):
        layer.down_proj.mul_(-2)
    torch.testing.assert_close(shared(x, index, weights), -2 * before)
    with torch.inference_mode():
        torch.testing.assert_close(shared(x, index, weights), -2 * before)


@on_ranks(2)
def test_mistakes() -> None:
    _, shared = _layer(torch.float32)
    x, index, weights = _tokens(torch.float32, 5)
    with pytest.raises(ValueError, match="has no gradients, and some are asked for: call the model under"):
        shared(x.requires_grad_(), index, weights)
    with torch.no_grad():
        shared(x, index, weights)
    _, shared = _layer(torch.float32, capacity=0.25)
    index.fill_(0)
    with pytest.raises(ValueError, match=r"ExpertParallel\(capacity=0.25\) leaves room for \d+ rows, but 20 rows arrived"):
        shared(x.detach(), index, weights)
    with pytest.raises(ValueError, match="float8 is 'rowwise'; it must be 'blockwise', or None"):
        weft.ExpertParallel(float8="rowwise")  # type: ignore[arg-type]
    narrow = Experts(EXPERTS, 64, WIDTH).requires_grad_(False)
    parallelize_module(narrow, dist.init_device_mesh("cpu", (2,)), weft.ExpertParallel(float8="blockwise"))
    with pytest.raises(ValueError, match="experts' weights are 64 x 256; blockwise FP8 needs multiples of 128"):
        narrow(torch.randn(5, 64), index, weights)


@on_ranks(2)
def test_torch_compile() -> None:
    _, shared = _layer(torch.float32)
    x, index, weights = _tokens(torch.float32, 5)
    with torch.no_grad():
        wanted = shared(x, index, weights)
        assert torch.equal(torch.compile(shared, backend="aot_eager")(x, index, weights), wanted)
