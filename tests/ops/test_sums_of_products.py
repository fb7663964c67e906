"""matmul_reduce_scatter and matmul_all_reduce of several products, which each rank adds up: results and gradients by every
family, and mistakes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import interpreting, on_ranks

import weft
from weft import schedules
from weft.core.problem import Problem

NAMES = schedules.names("matmul_reduce_scatter")
WIDTHS = {1: (16,), 2: (16, 24), 3: (8, 16, 24)}


def _drawn(rank: int, rows: int, count: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The factors of a rank, whose widths differ between its products."""
    generator = torch.Generator().manual_seed(100 * rank + rows)
    pairs = [
        (torch.randn(rows, k, generator=generator), torch.randn(k, 32, generator=generator) * k**-0.5) for k in WIDTHS[count]
    ]
    return [a.to(dtype) for a, _ in pairs], [b.to(dtype) for _, b in pairs]


def _check(spec: str, count: int, dtype: torch.dtype, rows: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    every = [_drawn(r, rows, count, dtype) for r in range(size)]
    whole = sum(a.double() @ b.double() for factors, bs in every for a, b in zip(factors, bs, strict=True))
    assert isinstance(whole, torch.Tensor)
    factors, bs = ([one.requires_grad_() for one in some] for some in every[rank])
    # The transposes of weights are what a backward pass passes.
    passed = [b.t().contiguous().t() for b in bs]
    grad = torch.randn(rows, 32, generator=torch.Generator().manual_seed(7)).to(dtype)
    own = slice(*Problem(op="matmul_reduce_scatter", m=rows, n=32, k=sum(WIDTHS[count]), world_size=size).shards[rank])
    for _ in range(2):
        out = weft.matmul_reduce_scatter(factors, passed, schedule=spec)
        close = {"atol": 2e-2 if dtype != torch.float32 else 1e-4, "rtol": 1e-2 if dtype != torch.float32 else 1e-4}
        torch.testing.assert_close(out.double(), whole[own], **close)
    out.backward(grad[own])
    for a, b in zip(factors, bs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.double(), grad.double() @ b.detach().double().t(), **close)
        torch.testing.assert_close(b.grad.double(), a.detach().double().t() @ grad.double(), **close)


def _check_all_reduce(spec: str, count: int, dtype: torch.dtype, rows: int) -> None:
    """With the addends, and the gradients of all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every = [_drawn(r, rows, count, dtype) for r in range(size)]
    generator = torch.Generator().manual_seed(3)
    bias, residual, grad = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((32,), (rows, 32), (rows, 32)))
    products = [a.double() @ b.double() for factors, bs in every for a, b in zip(factors, bs, strict=True)]
    wanted = torch.stack(products).sum(0) + bias.double() + residual.double()
    factors, bs = ([one.requires_grad_() for one in some] for some in every[rank])
    out = weft.matmul_all_reduce(factors, bs, bias=bias, residual=residual, schedule=spec)
    close = {"atol": 4e-2 if dtype != torch.float32 else 1e-4, "rtol": 1e-2 if dtype != torch.float32 else 1e-4}
    torch.testing.assert_close(out.double(), wanted, **close)
    out.backward(grad)
    for a, b in zip(factors, bs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.double(), grad.double() @ b.detach().double().t(), **close)
        torch.testing.assert_close(b.grad.double(), a.detach().double().t() @ grad.double(), **close)


def _every_family(dtype: torch.dtype) -> None:
    for spec in schedules.names("matmul_all_reduce"):
        for count in WIDTHS:
            _check_all_reduce(spec, count, dtype, 22)
    for spec in NAMES:
        for count in WIDTHS:
            _check(spec, count, dtype, 22)


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2, 3])
def test_products_are_added_up_by_every_family(ranks: RankFixture, size: int) -> None:
    ranks(size).run(_every_family, torch.float32)


@on_ranks(1)
def test_mistakes_are_named() -> None:
    factors, bs = _drawn(0, 6, 2, torch.float32)
    for a, b, message in (
        (factors, bs[:1], "a is 2 tensors and b 1 tensors; pass two lists with an a for each b, or two tensors"),
        (factors, bs[0], "pass two lists"),
        (factors[0], bs, "pass two lists"),
        ([], [], "pass two lists"),
        ([factors[0], factors[1][:4]], bs, r"a\[1\] is .*products that are added up have the rows"),
        (factors, [bs[0], bs[1][:, :8]], r"a\[1\] is .*products that are added up have the rows"),
        (factors, bs[::-1], "b has 24 rows, a has 16 columns"),
    ):
        with pytest.raises(ValueError, match=message):
            weft.matmul_reduce_scatter(a, b)
    with pytest.raises(ValueError, match="products is 2; all_gather_matmul adds up none, use 1"):
        Problem(op="all_gather_matmul", m=8, n=8, k=8, world_size=2, products=2)


def _interpreted() -> int:
    """How often the kernel added up two products."""
    from weft.runtime import fused

    added = 0
    launch = fused.gemm

    def counted(*arguments: object, **options: object) -> None:
        nonlocal added
        added += options["added"] is not None
        launch(*arguments, **options)  # type: ignore[arg-type]

    fused.gemm = counted  # type: ignore[assignment]
    try:
        for count in WIDTHS:
            for spec in NAMES:
                _check(spec, count, torch.float16, 70)
            for spec in schedules.names("matmul_all_reduce"):
                _check_all_reduce(spec, count, torch.float16, 10)
    finally:
        fused.gemm = launch
    return added


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_interpreted_kernel_adds_up_two_products(size: int) -> None:
    for added in interpreting(size).run(_interpreted):
        assert added >= 6
