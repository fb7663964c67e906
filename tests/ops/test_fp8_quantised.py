"""An a of 16 or 32 bits that is quantised on its way to the other ranks, against the product of an a quantised by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from float8 import E4M3, dequantised, quantise
from launch_counts import counting
from rank_pools import interpreted_ranks, on_ranks
from rank_work import here

import weft
from weft import schedules
from weft.core.problem import OPS, Op, Problem, Recipe, Scaling
from weft.core.problem import split as parts_of
from weft.runtime.products import quantise as by_torch
from weft.runtime.ranks import Ranks

K, N = 384, 144
TRAVELS: tuple[Op, ...] = ("all_gather_matmul", "all_to_all_matmul")
interpreted = interpreted_ranks([2])


def _elements(a: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as FP8, and their scales, by torch."""
    elements = torch.empty(a.shape, dtype=E4M3, device=a.device)
    scales = torch.empty(a.shape[0], 1 if recipe == "rowwise" else K // 128, device=a.device)
    by_torch(a, elements, scales, Scaling(recipe=recipe))
    return elements, scales


def _own(op: Op, rows: int, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """By rank, its a: rows of very different magnitudes, one of them zeros."""
    draw, size = torch.Generator().manual_seed(seed), dist.get_world_size()
    found = []
    for low, high in parts_of(rows, size):
        own = high - low if op == "all_gather_matmul" else rows
        a = torch.randn(own, K, generator=draw) * torch.logspace(-3, 3, max(own, 1))[:own, None]
        if own > 1:
            a[1] = 0
        found.append(a.to(here(), dtype))
    return found


def check_quantised(op: Op, recipe: Recipe, dtype: torch.dtype) -> None:
    """Elements and scales have the bits that torch gives them, in every family, and are multiplied."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for seed, rows in enumerate((23, 8)):
        every = _own(op, rows, seed, dtype)
        elements, scale_b = quantise(torch.randn(K, N, generator=torch.Generator().manual_seed(seed)) / 16, recipe, "b")
        b, scale_b = elements.t().to(here()).t(), scale_b.to(here())
        wanted = [_elements(a, recipe) for a in every]
        cut = slice(*parts_of(rows, size)[rank])
        travelled = [one if op == "all_gather_matmul" else (one[0][cut], one[1][cut]) for one in wanted]
        exact_scales = torch.cat([scales for _, scales in travelled])
        exact = torch.cat([dequantised(*one, recipe, "a") for one in travelled])
        problem = Problem(
            op=op,
            m=rows,
            n=N * (size if op == "all_gather_matmul" else 1),
            k=K,
            world_size=size,
            scaling=Scaling(recipe=recipe, quantises=True),
        )
        keyword: dict[str, Any] = {"return_gathered": True} if op == "all_gather_matmul" else {"return_received": True}
        keyword |= {"rows": rows} if op == "all_gather_matmul" else {}
        for name in ("auto", *(one for one in schedules.names(op) if not schedules.unfit(one, problem))):
            out, gathered, scales = getattr(weft, op)(every[rank], b, schedule=name, scale_b=scale_b, **keyword)
            what = (op, recipe, rows, name)
            assert out.dtype == dtype
            assert torch.equal(scales, exact_scales), what
            assert torch.equal(dequantised(gathered, scales, recipe, "a"), exact), what
            product = exact @ dequantised(b, scale_b, recipe, "b")
            torch.testing.assert_close(out.double(), product, rtol=2e-2, atol=2e-2 * float(product.abs().max()), msg=str(what))


def check_no_numbers(recipe: Recipe) -> None:
    """NaN and infinity are not lost on the way."""
    size, rank = dist.get_world_size(), dist.get_rank()
    a = torch.randn(6, K, generator=torch.Generator().manual_seed(rank))
    a[1, 200], a[3, 5], a[3, 6] = torch.nan, torch.inf, -torch.inf
    a = a.to(here(), torch.float16)
    elements, scale_b = quantise(torch.ones(K, N), recipe, "b")
    wanted, of_rows = _elements(a, recipe)
    options: dict[str, Any] = {"scale_b": scale_b.to(here()), "return_gathered": True}
    for name in ("sequential", "sequential_stores", "direct_store:2"):
        out, rows, scales = weft.all_gather_matmul(a, elements.t().to(here()).t(), schedule=name, **options)
        assert out.shape[0] == 6 * size
        mine = slice(6 * rank, 6 * rank + 6)
        assert torch.equal(scales[mine].nan_to_num(-1.0), of_rows.nan_to_num(-1.0)), name
        assert torch.equal(rows[mine].float().nan_to_num(1000.0), wanted.float().nan_to_num(1000.0)), name
        assert out[mine][1].isnan().all(), name


@pytest.mark.ranks
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_what_is_no_number_stays_so(ranks: RankFixture, recipe: Recipe) -> None:
    ranks(2).run(check_no_numbers, recipe)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_what_is_no_number_stays_so_in_the_kernel(interpreted: Ranks, recipe: Recipe) -> None:
    interpreted.run(check_no_numbers, recipe)


@pytest.mark.ranks
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("op", TRAVELS)
def test_rows_are_quantised_on_their_way(ranks: RankFixture, op: Op, recipe: Recipe) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        ranks(3).run(check_quantised, op, recipe, dtype)


@on_ranks(pool="interpreted")
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("op", TRAVELS)
def test_the_kernel_that_quantises(op: Op, recipe: Recipe) -> None:
    from weft.runtime.pushes import QuantisingPush

    with counting(QuantisingPush) as launches:
        check_quantised(op, recipe, torch.float16)
    assert launches.count > 0


@on_ranks(2)
@pytest.mark.parametrize("op", [op for op in OPS if op not in TRAVELS])
def test_rows_that_stay_are_quantised_here(op: Op) -> None:
    """Where no rows of a travel, it is quantised before it is multiplied."""
    a, b = torch.randn(6, K).bfloat16(), torch.randn(K, N) / 16
    for recipe in ("rowwise", "blockwise"):
        elements, scale_b = quantise(b, recipe, "b")  # type: ignore[arg-type]
        rows, scale_a = _elements(a, recipe)  # type: ignore[arg-type]
        out = getattr(weft, op)(a, elements, scale_b=scale_b)
        assert torch.equal(out, getattr(weft, op)(rows, elements, scale_a=scale_a, scale_b=scale_b))


@on_ranks(1)
def test_mistakes_are_named() -> None:
    scaling = torch.nn.functional.ScalingType
    b, scale_b = quantise(torch.randn(K, N), "rowwise", "b")
    good: dict[str, Any] = {"a": torch.randn(4, K).bfloat16(), "b": b, "scale_b": scale_b}
    for change, words in [
        ({"scale_a": torch.ones(4, 1)}, "FP8 operands come with scale_b alone: a has none yet"),
        ({"a": torch.randn(4, K, requires_grad=True)}, "a requires a gradient, and operators with FP8 operands have none"),
        ({"scale_b": None}, "FP8 operands come with scale_b alone: a has none yet"),
        ({"output_dtype": torch.float32}, "output_dtype is torch.float32; for an a that is quantised it must be a's"),
        ({"scale_recipe_a": scaling.TensorWise}, "scale_recipe_a is TensorWise; a is quantised by RowWise or BlockWise1x128"),
        ({"schedule": "flag_gated"}, "schedule is 'flag_gated', which sends rows unquantised"),
    ]:
        given = good | change
        with pytest.raises(ValueError, match=words):
            weft.all_gather_matmul(given.pop("a"), given.pop("b"), **given)
    residual = torch.zeros(4, N, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ValueError, match="residual requires a gradient"):
        weft.matmul_all_reduce(good["a"], b, scale_b=scale_b, residual=residual)
