"""Operators whose matmuls have nothing to sum, K = 0, on CPU ranks: zeros, as torch has them, and backwards of no columns."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import on_ranks

import weft
from weft.schedules import names

pytestmark = pytest.mark.ranks
COLUMNS: list[tuple[str, dict[str, Any], str]] = [
    ("all_gather_matmul", {}, "all_gather_matmul"),
    ("matmul_reduce_scatter", {}, "matmul_reduce_scatter"),
    ("matmul_all_reduce", {}, "matmul_all_reduce"),
    ("matmul_all_to_all", {}, "matmul_all_to_all"),
    ("all_to_all_matmul", {}, "all_to_all_matmul"),
    ("matmul_all_to_all", {"split_dim": -1}, "matmul_all_to_all_columns"),
    ("all_to_all_matmul", {"gather_dim": -1}, "all_to_all_columns_matmul"),
]


def _called(operator: str, options: dict[str, Any], spec: str, k: int, n: int) -> list[torch.Tensor]:
    """Results and gradients of a [6, k] @ b [k, n], with what was multiplied where an operator gives that."""
    rows = k * dist.get_world_size() if "gather_dim" in options else k
    a, b = torch.ones(6, k, requires_grad=True), torch.ones(rows, n, requires_grad=True)
    option = {"all_gather_matmul": "return_gathered", "all_to_all_matmul": "return_received"}.get(operator)
    given = {**options, **({option: True} if option else {})}
    found = getattr(weft, operator)(a, b, schedule=spec, **given)
    out, *moved = found if option else (found,)
    (out.sum() + sum(each.sum() for each in moved[: int(k > 0)])).backward()
    return [out.detach(), a.grad, b.grad, *[each.detach() for each in moved]]


def _all() -> None:
    for operator, options, op in COLUMNS:
        for spec in ("auto", *names(op)):
            like = _called(operator, options, spec, 2, 6)[0]
            for _ in range(2):
                out, grad_a, grad_b, *moved = _called(operator, options, spec, 0, 6)
                assert torch.equal(out, torch.zeros_like(like)), (operator, spec)
                assert (grad_a.shape, grad_b.shape) == ((6, 0), (0, 6))
                assert [each.shape[1] for each in moved] == [0] * len(moved)
        out, grad_a, grad_b, *moved = _called(operator, options, "auto", 2, 0)
        assert not out.numel()
        assert not grad_b.numel()
        assert torch.equal(grad_a, torch.full((6, 2), _times(operator) if moved else 0.0)), operator
    residual = torch.arange(12.0).view(2, 6)
    out = weft.matmul_all_reduce(torch.ones(2, 0), torch.ones(0, 6), bias=torch.ones(6), residual=residual)
    assert torch.equal(out, residual + 1)


def _times(operator: str) -> float:
    """How often the rows that an operator gives beside its product have each row of a."""
    return float(dist.get_world_size()) if operator == "all_gather_matmul" else 1.0


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_products_of_no_columns_are_zeros(ranks: RankFixture, world_size: int) -> None:
    ranks(world_size).run(_all)


def _differ() -> str:
    try:
        weft.all_to_all_matmul(torch.ones(4, dist.get_rank()), torch.ones(dist.get_rank(), 4))
    except weft.WeftError as error:
        return str(error)
    finally:
        weft.close()
    return ""


def test_ranks_that_differ_in_it_are_named(ranks: RankFixture) -> None:
    for message in ranks(2).run(_differ):
        assert re.match(r"ranks disagree in call \d+:\n  K: rank", message)


@on_ranks(3)
def test_a_rank_without_columns() -> None:
    """Rows in several dimensions, of which only rank 0 has columns to sum."""
    k = 2 if dist.get_rank() == 0 else 0
    a, b = torch.ones(2, 3, k, requires_grad=True), torch.ones(k, 4, requires_grad=True)
    residual = torch.ones(2, 3, 4, requires_grad=True)
    out = weft.matmul_all_reduce(a, b, residual=residual)
    assert torch.equal(out, torch.full((2, 3, 4), 3.0))
    out.sum().backward()
    assert torch.equal(a.grad, torch.full((2, 3, k), 4.0))
    assert torch.equal(b.grad, torch.full((k, 4), 6.0))
    assert weft.matmul_all_reduce(a, b[:, :0], residual=residual[..., :0]).shape == (2, 3, 0)
