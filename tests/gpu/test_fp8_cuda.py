"""FP8 operands on GPUs: every family and recipe against the float64 product of what the operands stand for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from float8 import E4M3
from on_gpus import NEEDS_TWO, SIZES, alarm, late
from rank_pools import ranks_on_gpus
from test_fp8 import check_families, check_options, check_special, drawn
from test_fp8_quantised import TRAVELS, check_no_numbers, check_quantised

import weft
from weft.core.problem import OPS, RECIPES, Op, Recipe
from weft.runtime.ranks import Ranks

pytestmark = NEEDS_TWO
pool = ranks_on_gpus(SIZES, 10)


@alarm(90)
def _families(op: Op, recipe: Recipe, output_dtype: torch.dtype) -> None:
    for call in range(2):
        late(call)
        check_families(op, recipe, output_dtype)
    weft.close()


@pytest.mark.parametrize("output_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("op", OPS)
def test_every_family(pool: Ranks, op: Op, recipe: Recipe, output_dtype: torch.dtype) -> None:
    pool.run(_families, op, recipe, output_dtype)


@alarm(90)
def _options(op: Op) -> None:
    check_options(op)
    weft.close()


@pytest.mark.parametrize("op", OPS)
def test_dtypes_bias_and_shapes(pool: Ranks, op: Op) -> None:
    pool.run(_options, op)


def test_special_values_are_those_of_torch(pool: Ranks) -> None:
    pool.run(check_special)


@alarm(90)
def _graphs(recipe: Recipe) -> None:
    """A CUDA graph of a call gives what the call gives, with new elements and new scales."""
    first, second = (drawn("all_gather_matmul", 64, seed, recipe, (E4M3, E4M3)) for seed in (1, 2))
    rank = dist.get_rank()
    (a, scale_a), (b, scale_b) = first["a"][rank], first["b"][rank]

    def call() -> torch.Tensor:
        return weft.all_gather_matmul(a, b, scale_a=scale_a, scale_b=scale_b, schedule="flag_gated:2")

    for _ in range(3):
        out = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    assert torch.equal(captured, out)
    (new_a, new_scale_a), (new_b, new_scale_b) = second["a"][rank], second["b"][rank]
    a.view(torch.uint8).copy_(new_a.view(torch.uint8))
    b.t().view(torch.uint8).copy_(new_b.t().view(torch.uint8))
    scale_a.copy_(new_scale_a)
    scale_b.copy_(new_scale_b)
    graph.replay()
    assert torch.equal(captured, call())
    torch.testing.assert_close(captured.double(), second["exact"][rank], rtol=2e-2, atol=2e-1)
    weft.close()


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_graphs_take_new_elements_and_scales(pool: Ranks, recipe: Recipe) -> None:
    pool.run(_graphs, recipe)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_what_is_no_number_stays_so(pool: Ranks, recipe: Recipe) -> None:
    pool.run(check_no_numbers, recipe)


@alarm(90)
def _quantised(op: Op, recipe: Recipe, dtype: torch.dtype) -> None:
    for call in range(4):
        late(call)
        check_quantised(op, recipe, dtype)
    weft.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("op", TRAVELS)
def test_rows_are_quantised_on_their_way(pool: Ranks, op: Op, recipe: Recipe, dtype: torch.dtype) -> None:
    pool.run(_quantised, op, recipe, dtype)
