"""Operators with FP8 operands on CPU ranks, against the float64 product of what the operands stand for."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from float8 import E4M3, E5M2, dequantised, quantise
from rank_pools import interpreted_ranks, on_ranks
from rank_work import here

import weft
from weft import schedules
from weft.core.problem import GATHERS, OPS, RECIPES, REDUCTIONS, Op, Problem, Recipe, Scaling
from weft.core.problem import split as parts_of
from weft.runtime.ranks import Ranks

K, N = 256, 144


def drawn(op: Op, rows: int, seed: int, recipe: Recipe, dtypes: tuple[torch.dtype, torch.dtype]) -> dict[str, Any]:
    """Every rank's operands, the same on all ranks: drawn, quantised, and what they stand for."""
    size = dist.get_world_size()
    draw = torch.Generator().manual_seed(seed)
    height = {rank: high - low for rank, (low, high) in enumerate(parts_of(rows, size))}
    a, b = [], []
    for rank in range(size):
        own = height[rank] if op == "all_gather_matmul" else rows
        spread = torch.rand(own, 1, generator=draw) * 8
        a.append(_there(quantise(torch.randn(own, K, generator=draw) * spread, recipe, "a", dtypes[0])))
        b.append(_there(quantise(torch.randn(K, N, generator=draw) / 16, recipe, "b", dtypes[1])))
    exact_a = [dequantised(*one, recipe, "a") for one in a]
    exact_b = [dequantised(*one, recipe, "b") for one in b]
    return {"a": a, "b": b, "exact": _results(op, exact_a, exact_b, rows), "gathered": _gathered(op, exact_a, rows)}


def _there(quantised: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """On this rank's device; b keeps its columns together."""
    elements, scales = quantised
    if elements.stride(-1) != 1:
        return elements.t().to(here()).t(), scales.to(here())
    return elements.to(here()), scales.to(here())


def _gathered(op: Op, a: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    """By rank, the rows that it multiplies."""
    if op == "all_gather_matmul":
        return [torch.cat(a)] * len(a)
    cuts = parts_of(rows, len(a))
    return [torch.cat([one[slice(*cut)] for one in a]) for cut in cuts] if op == "all_to_all_matmul" else a


def _results(op: Op, a: list[torch.Tensor], b: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    products = [one @ other for one, other in zip(_gathered(op, a, rows), b, strict=True)]
    cuts = parts_of(rows, len(a))
    if op == "matmul_reduce_scatter":
        return [sum(products)[slice(*cut)] for cut in cuts]  # type: ignore[index]
    if op == "matmul_all_reduce":
        return [sum(products)] * len(a)  # type: ignore[list-item]
    return [torch.cat([one[slice(*cut)] for one in products]) for cut in cuts] if op == "matmul_all_to_all" else products


def _close(found: torch.Tensor, exact: torch.Tensor, what: object) -> None:
    """Within the rounding of the result's dtype, and of partial results that are summed in it. Tensor cores add products of FP8
    with 14 bits."""
    assert found.shape == exact.shape, what
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-13 if found.is_cuda else 2**-20}[found.dtype]
    bound = 4 * unit * exact.abs() + 4 * unit * (exact.abs().max() if exact.numel() else 0)
    assert ((found.double() - exact).abs() <= bound).all(), what


def check_families(op: Op, recipe: Recipe, output_dtype: torch.dtype) -> None:
    """Every family of an operator, of even and uneven rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    public = getattr(weft, op)
    for seed, rows in enumerate((11, 8)):
        given = drawn(op, rows, seed, recipe, (E4M3, E4M3))
        (a, scale_a), (b, scale_b) = given["a"][rank], given["b"][rank]
        problem = Problem(
            op=op,
            m=rows,
            n=N * (size if op == "all_gather_matmul" else 1),
            k=K * (size if op in ("matmul_reduce_scatter", "matmul_all_reduce") else 1),
            world_size=size,
            scaling=Scaling(recipe="rowwise" if recipe == "tensorwise" and op in GATHERS else recipe),
        )
        extra = {"rows": rows} if op == "all_gather_matmul" else {}
        for name in ("auto", *(one for one in schedules.names(op) if not schedules.unfit(one, problem))):
            out = public(a, b, schedule=name, scale_a=scale_a, scale_b=scale_b, output_dtype=output_dtype, **extra)
            assert out.dtype == output_dtype
            _close(out, given["exact"][rank], (op, recipe, rows, name))


@pytest.mark.ranks
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("op", OPS)
def test_every_family(ranks: RankFixture, op: Op, recipe: Recipe) -> None:
    ranks(3).run(check_families, op, recipe, torch.float32)


interpreted = interpreted_ranks([2])


def _as_kernels(op: Op, recipe: Recipe, output_dtype: torch.dtype) -> tuple[int, int]:
    """How often weft's GEMM kernel ran in all families, and the kernel that multiplies, exchanges and sums."""
    from weft.runtime.fused import FusedGemm
    from weft.runtime.fused_collective import FusedCollectiveKernel

    kinds: tuple[Any, ...] = FusedGemm, FusedCollectiveKernel
    launches, launch = [0, 0], [kind.launch for kind in kinds]

    def counted(which: int, self: Any, *arguments: Any, **options: Any) -> None:
        launches[which] += which == 0 or self.step.multiplies
        launch[which](self, *arguments, **options)

    for which, kind in enumerate(kinds):
        kind.launch = functools.partialmethod(functools.partial(counted, which))
    try:
        check_families(op, recipe, output_dtype)
    finally:
        for kind, one in zip(kinds, launch, strict=True):
            kind.launch = one
    return launches[0], launches[1]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("op", OPS)
def test_every_family_as_kernels(interpreted: Ranks, op: Op, recipe: Recipe) -> None:
    output_dtype = torch.float32 if recipe == "rowwise" else torch.float16
    for gemms, exchanges in interpreted.run(_as_kernels, op, recipe, output_dtype):
        assert gemms > 0 or op == "matmul_all_reduce"
        assert (exchanges > 0) == (op in REDUCTIONS)


def _pairs(given: dict[str, Any]) -> list[tuple[Any, Any]]:
    """By rank, its a and its b with their scales."""
    return list(zip(given["a"], given["b"], strict=True))


@on_ranks(pool="interpreted")
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_special_rows_in_one_kernel(recipe: Recipe) -> None:
    """On rank 0 a row of zeros, one with a scale of 0, and rows with a NaN or whose scale is one, next to rows of numbers."""
    rank, rows = dist.get_rank(), 6
    given = drawn("matmul_all_reduce", rows, 11, recipe, (E4M3, E4M3))
    (a, scale_a), (b, scale_b) = given["a"][rank], given["b"][rank]
    exact = given["exact"][rank].clone()
    changed, scales = a.clone().view(torch.uint8), scale_a.clone()
    if rank == 0:
        changed[0], changed[1, 3] = 0, 0x7F  # zeros, NaN
        scales[2], scales[3] = 0.0, math.nan
    others = sum(dequantised(*each, recipe, "a") @ dequantised(*by, recipe, "b") for each, by in _pairs(given)[1:])
    exact[[0, 2]] = others[[0, 2]]  # type: ignore[index]
    for name in ("one_shot", "two_shot"):
        out = weft.matmul_all_reduce(
            changed.view(E4M3), b, schedule=name, scale_a=scales, scale_b=scale_b, output_dtype=torch.float16
        )
        numbers = [0, 2, 4, 5]
        assert out[[1, 3]].isnan().all()
        _close(out[numbers], exact[numbers], (name, recipe))
        zeros = weft.matmul_all_reduce(
            torch.zeros_like(a), b, schedule=name, scale_a=scales.nan_to_num(), scale_b=scale_b, output_dtype=torch.float16
        )
        assert torch.equal(zeros, torch.zeros_like(zeros))


def check_options(op: Op) -> None:
    """Every dtype, a bias, several calls with other operands, and rows of three dimensions."""
    rank, public = dist.get_rank(), getattr(weft, op)
    for seed, (dtypes, out_dtype) in enumerate(
        [((E4M3, E4M3), None), ((E5M2, E4M3), torch.float16), ((E4M3, E5M2), torch.bfloat16), ((E4M3, E4M3), torch.float32)]
    ):
        given = drawn(op, 6, 40 + seed, "rowwise", dtypes)
        (a, scale_a), (b, scale_b) = given["a"][rank], given["b"][rank]
        bias = torch.randn(N, generator=torch.Generator().manual_seed(seed)).to(here(), out_dtype or torch.bfloat16)
        shaped = a.view(-1, 1, K), scale_a.view(-1, 1, 1)
        out = public(shaped[0], b, scale_a=shaped[1], scale_b=scale_b, output_dtype=out_dtype, bias=bias, use_fast_accum=True)
        assert out.dtype == bias.dtype
        _close(out.view(-1, N), given["exact"][rank] + bias.double(), (op, dtypes))


@pytest.mark.ranks
@pytest.mark.parametrize("op", OPS)
def test_dtypes_bias_and_shapes(ranks: RankFixture, op: Op) -> None:
    ranks(2).run(check_options, op)


def _returned(op: Op, name: str, recipe: Recipe) -> None:
    rank = dist.get_rank()
    given = drawn(op, 10, 3, recipe, (E4M3, E4M3))
    (a, scale_a), (b, scale_b) = given["a"][rank], given["b"][rank]
    keyword = {"return_gathered": True} if op == "all_gather_matmul" else {"return_received": True}
    for schedule in ("sequential", "shard_p2p", "flag_gated:2"):
        if schedule.partition(":")[0] not in schedules.names(op):
            continue
        out, rows, scales = getattr(weft, op)(a, b, schedule=schedule, scale_a=scale_a, scale_b=scale_b, **keyword)
        travelled: Recipe = "rowwise" if recipe == "tensorwise" else recipe
        assert rows.dtype == E4M3
        assert torch.equal(dequantised(rows, scales, travelled, "a"), given["gathered"][rank]), (op, schedule)
        _close(out, given["exact"][rank], (op, schedule))


@pytest.mark.ranks
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("op", ["all_gather_matmul", "all_to_all_matmul"])
def test_rows_come_back_with_their_scales(ranks: RankFixture, op: Op, recipe: Recipe) -> None:
    ranks(2).run(_returned, op, "", recipe)


@on_ranks(2)
def test_several_b_have_a_scale_each() -> None:
    rank = dist.get_rank()
    given = [drawn("all_gather_matmul", 8, seed, "rowwise", (E4M3, E4M3)) for seed in (5, 6)]
    exact_a = torch.cat([dequantised(*one, "rowwise", "a") for one in given[0]["a"]])
    a, scale_a = given[0]["a"][rank]
    bs = [one["b"][rank] for one in given]
    outs = weft.all_gather_matmul(a, [b for b, _ in bs], scale_a=scale_a, scale_b=[scale for _, scale in bs])
    for out, b in zip(outs, bs, strict=True):
        _close(out, exact_a @ dequantised(*b, "rowwise", "b"), "several b")


def check_special() -> None:
    """What is no number, and what is none any more once it is scaled, comes out as torch's own product has it."""
    rank = dist.get_rank()
    given = drawn("all_gather_matmul", 8, 7, "rowwise", (E4M3, E4M3))
    (a, scale_a), (b, scale_b) = given["a"][rank], given["b"][rank]
    a = a.clone().view(torch.uint8)
    a[0, 3] = 0x7F  # NaN
    a[1, :] = 0x7E  # 448, the largest
    a, scale_a = a.view(E4M3), scale_a.clone()
    scale_a[1], scale_a[2], scale_a[3] = math.inf, 0.0, math.nan
    both = [torch.empty_like(a.view(torch.uint8)) for _ in range(2)], [torch.empty_like(scale_a) for _ in range(2)]
    dist.all_gather(both[0], a.view(torch.uint8))
    dist.all_gather(both[1], scale_a)
    whole, scales = torch.cat(both[0]).view(E4M3), torch.cat(both[1])
    wanted = torch._scaled_mm(whole, b, scales, scale_b, out_dtype=torch.float32)
    out = weft.all_gather_matmul(a, b, scale_a=scale_a, scale_b=scale_b, output_dtype=torch.float32)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.isinf(), wanted.isinf())
    assert out[0].isnan().all()
    assert (out[2] == 0).all()
    numbers = wanted.isfinite()
    torch.testing.assert_close(out[numbers], wanted[numbers], rtol=1e-4, atol=1e-4)


@pytest.mark.ranks
def test_special_values_are_those_of_torch(ranks: RankFixture) -> None:
    ranks(2).run(check_special)


@on_ranks(1)
def test_mistakes_are_named() -> None:
    a, scale_a = quantise(torch.randn(4, K), "rowwise", "a")
    b, scale_b = quantise(torch.randn(K, N), "rowwise", "b")
    good: dict[str, Any] = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
    scaling = torch.nn.functional.ScalingType
    for change, words in [
        (
            {"scale_b": None},
            "FP8 operands come with scale_a and scale_b, float32 tensors",
        ),
        ({"scale_a": scale_a[:3]}, r"scale_a is \[3, 1\]; for a of \[4, 256\] use \[1\] tensorwise, \[4, 1\] rowwise"),
        ({"scale_b": scale_b.t()}, r"scale_b is \[144, 1\]; for b of \[256, 144\] use"),
        ({"scale_a": scale_a.double()}, "scale_a is torch.float64 on cpu; it must be a float32 tensor on cpu"),
        ({"scale_b": torch.ones(1)}, "scale_a is rowwise and scale_b tensorwise; both operands must have the same recipe"),
        ({"scale_recipe_a": scaling.BlockWise1x32}, "scale_recipe_a is BlockWise1x32; weft has TensorWise, RowWise"),
        ({"scale_recipe_a": scaling.BlockWise1x128}, r"scale_a is \[4, 1\] and its recipe blockwise; for a of"),
        ({"b": b.contiguous()}, "b is row-major; the columns of an FP8 b must be contiguous"),
        ({"b": b[:, :140], "scale_b": scale_b[:, :140]}, "b has 140 columns; FP8 operands need a multiple of 16"),
        ({"a": a[:, :250], "b": b[:250]}, "K is 250; rowwise FP8 operands need a multiple of 16: pad a and b with zeros"),
        ({"output_dtype": torch.float64}, "output_dtype is torch.float64; weft writes bfloat16, float16, float32"),
        ({"bias": torch.ones(N)}, "bias is torch.float32 on cpu; it must be torch.bfloat16 on cpu"),
        ({"bias": torch.ones(N + 1)}, r"bias is \[145\]; it must be \[144\]"),
        ({"a": a.to(E5M2), "b": b.to(E5M2)}, "a and b are both float8_e5m2; one of them must be float8_e4m3fn"),
        ({"a": a.bfloat16(), "b": b.bfloat16()}, "scale_a is for FP8 operands, and a is torch.bfloat16; leave it out"),
    ]:
        given = good | change
        with pytest.raises(ValueError, match=words):
            weft.all_gather_matmul(given.pop("a"), given.pop("b"), **given)
    wide = {"scale_a": torch.ones(4, 1), "scale_b": torch.ones(1, 2)}
    with pytest.raises(ValueError, match="K is 144; blockwise FP8 operands need a multiple of 128"):
        weft.matmul_all_reduce(a[:, :144], b[:144], **(wide | {"scale_a": torch.ones(4, 2), "scale_b": torch.ones(2, 2)}))
    with pytest.raises(ValueError, match="scale_a is given with split_dim=-1, which does not support FP8 operands"):
        weft.matmul_all_to_all(a, b, split_dim=-1, scale_a=scale_a)
    for op in OPS:
        with pytest.raises(ValueError, match="b or scale_b requires a gradient, and operators with FP8 operands have none"):
            getattr(weft, op)(**good | {"b": b.detach().requires_grad_()}).sum().backward()


@on_ranks(1)
def test_a_tensorwise_scale_may_be_zero() -> None:
    a, scale_a = quantise(torch.randn(4, K), "tensorwise", "a")
    b, scale_b = quantise(torch.randn(K, N), "tensorwise", "b")
    for op in ("all_gather_matmul", "matmul_all_reduce"):
        out = getattr(weft, op)(a, b, scale_a=torch.zeros_like(scale_a), scale_b=scale_b)
        assert not out.any(), op


@on_ranks(2)
def test_torch_compile() -> None:
    rank = dist.get_rank()
    given = drawn("all_gather_matmul", 8, 9, "rowwise", (E4M3, E4M3))
    (a, scale_a), (b, scale_b) = given["a"][rank], given["b"][rank]

    def call(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
        return weft.all_gather_matmul(a, b, scale_a=scale_a, scale_b=scale_b)

    out = torch.compile(call, fullgraph=True, backend="aot_eager")(a, b, scale_a, scale_b)
    assert torch.equal(out, call(a, b, scale_a, scale_b))


@on_ranks(2)
@pytest.mark.parametrize("op", OPS)
def test_shapes_without_data_are_true(op: Op) -> None:
    more = {"all_gather_matmul": {"return_gathered": True}, "all_to_all_matmul": {"return_received": True}}.get(op, {})
    for recipe in RECIPES:
        given = drawn(op, 6, 9, recipe, (E4M3, E4M3))
        (a, scale_a), (b, scale_b) = given["a"][dist.get_rank()], given["b"][dist.get_rank()]
        for scales in ({"a": a, "scale_a": scale_a}, {"a": a.bfloat16()}):
            request = getattr(weft, op).__wrapped__(b=b, scale_b=scale_b, **scales, **more)
            arguments = request.operator.arguments(request.read(request.tensors), request.options)
            for name in (op, f"{op}_forward"):
                each = getattr(torch.ops.weft, name)
                torch.library.opcheck(each, arguments, test_utils="test_faketensor")  # test_schema multiplies FP8 elements


@on_ranks(2)
def test_many_row_counts() -> None:
    """Row counts past the first few are padded to a bucket, and their scales with them."""
    for rows in range(2, 26, 2):
        given = drawn("all_gather_matmul", rows, rows, "blockwise", (E4M3, E4M3))
        (a, scale_a), (b, scale_b) = given["a"][dist.get_rank()], given["b"][dist.get_rank()]
        out = weft.all_gather_matmul(a, b, scale_a=scale_a, scale_b=scale_b, output_dtype=torch.float32)
        _close(out, given["exact"][dist.get_rank()], rows)


@on_ranks(1)
@pytest.mark.parametrize("op", OPS)
def test_an_fp8_b_without_scales_is_named_before_the_call(op: Op) -> None:
    """Also in a list, where the operator takes one. The group can go on."""
    a, b = torch.ones(16, 32, dtype=torch.bfloat16), torch.ones(16, 32).to(E4M3).t()
    for given in (b, [b]) if op == "all_gather_matmul" else (b,):
        with pytest.raises(ValueError, match="FP8 operands come with scale_b"):
            getattr(weft, op)(a, given)
    assert getattr(weft, op)(a, torch.ones(32, 16, dtype=torch.bfloat16)).shape == (16, 16)
