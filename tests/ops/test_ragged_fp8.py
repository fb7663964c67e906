"""splits with FP8 operands, on CPU ranks and as interpreted kernels, against float64 products of what they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from float8 import E4M3, E5M2, dequantised, quantise
from ragged_work import counts_of, padded, room_for
from rank_pools import interpreted_ranks, on_ranks
from rank_work import here

import weft
from weft.core.problem import RECIPES, Recipe
from weft.ops.ragged_all_to_all import ragged_gated
from weft.schedules import ragged

pytestmark = pytest.mark.ranks

K, N = 256, 256
Dtypes = tuple[torch.dtype, torch.dtype]


@dataclass
class Quantised:
    """What a rank multiplies: FP8 elements and their scales, and in float64 what they stand for."""

    elements: torch.Tensor
    scales: torch.Tensor
    exact: torch.Tensor


class Case:
    """Every rank's rows and experts, the same on all ranks. counts: [src_rank, dst_rank, expert]."""

    def __init__(self, counts: torch.Tensor, recipe: Recipe, dtypes: Dtypes = (E4M3, E4M3), seed: int = 0) -> None:
        self.counts, (self.size, _, self.experts) = counts, counts.shape
        self.recipe, self.dtypes, draw = recipe, dtypes, torch.Generator().manual_seed(seed)
        self.dispatched = [self._rows(int(counts[rank].sum()) + 3, draw) for rank in range(self.size)]
        self.combined = [self._rows(int(counts[:, rank].sum()) + 3, draw) for rank in range(self.size)]
        self.b = [self._experts(draw) for _ in range(self.size)]

    def _rows(self, rows: int, draw: torch.Generator) -> Quantised:
        matrix = torch.randn(rows, K, generator=draw) * torch.rand(rows, 1, generator=draw) * 8
        found = quantise(matrix, self.recipe, "a", self.dtypes[0])
        return Quantised(*found, dequantised(*found, self.recipe, "a"))

    def _experts(self, draw: torch.Generator) -> Quantised:
        drawn = [
            quantise(torch.randn(K, N, generator=draw) / 16, self.recipe, "b", self.dtypes[1]) for _ in range(self.experts)
        ]
        exact = torch.stack([dequantised(*one, self.recipe, "b") for one in drawn])
        # Side by side, each expert's columns are together.
        elements = torch.stack([one.t().view(torch.uint8) for one, _ in drawn]).view(self.dtypes[1]).transpose(1, 2)
        scales = torch.stack([scales for _, scales in drawn])
        return Quantised(elements, scales.view(-1, 1, 1) if self.recipe == "tensorwise" else scales, exact)

    def arriving(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a dispatch: the rows that a rank receives, and their products."""
        found = [(e, self._sent(src)[rank * self.experts + e]) for e in range(self.experts) for src in range(self.size)]
        return torch.cat([rows for _, rows in found]), torch.cat([rows @ self.b[rank].exact[e] for e, rows in found])

    def _sent(self, src: int) -> tuple[torch.Tensor, ...]:
        return self.dispatched[src].exact.split([*self.counts[src].flatten().tolist(), 3])

    def returning(self, rank: int) -> torch.Tensor:
        """Of a combine: the products that a rank receives."""
        found = []
        for src in range(self.size):
            parts = self.combined[src].exact.split([*self.counts[:, src].t().flatten().tolist(), 3])
            found += [parts[e * self.size + rank] @ self.b[src].exact[e] for e in range(self.experts)]
        return torch.cat(found)


def close(found: torch.Tensor, exact: torch.Tensor, what: object) -> None:
    """Within the rounding of the result's dtype. Tensor cores add products of FP8 with 14 bits."""
    assert found.shape == exact.shape, what
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-13 if found.is_cuda else 2**-20}[found.dtype]
    bound = 4 * unit * exact.abs() + 4 * unit * (exact.abs().max() if exact.numel() else 0)
    assert ((found.cpu().double() - exact).abs() <= bound).all(), what


def given(a: Quantised, b: Quantised) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]:
    """The operands of a call on this rank's device, and their scales by keyword."""
    elements = b.elements.transpose(1, 2).to(here()).transpose(1, 2)
    return (a.elements.to(here()), elements), {"scale_a": a.scales.to(here()), "scale_b": b.scales.to(here())}


def check_both(case: Case, schedule: str, output_dtype: torch.dtype | None = None) -> None:
    """A dispatch, with the rows that it returns, a gated one, and a combine."""
    rank, what = dist.get_rank(), (case.recipe, schedule)
    most = room_for(case.size, case.experts)
    operands, scales = given(case.dispatched[rank], case.b[rank])
    splits = case.counts[rank].to(here())
    how: dict[str, Any] = scales | {"schedule": schedule, "output_dtype": output_dtype}
    out, counts, *received = weft.all_to_all_matmul(*operands, splits=splits, max_rows=most, return_received=True, **how)
    rows, product = case.arriving(rank)
    assert out.dtype == (output_dtype or torch.bfloat16)
    assert torch.equal(counts.cpu().long(), case.counts[:, rank].t())
    close(out, padded(product, most, product), what)
    elements, of_rows = (one.cpu() for one in received)
    travelled: Recipe = "rowwise" if case.recipe == "tensorwise" else case.recipe
    assert elements.dtype == case.dtypes[0]
    assert torch.equal(dequantised(elements, of_rows, travelled, "a"), padded(rows, most, rows)), what
    assert not elements[len(rows) :].double().any()
    again, _ = weft.all_to_all_matmul(*operands, splits=splits, max_rows=most, **how)
    assert torch.equal(again, out), what
    gate, up = product.chunk(2, -1)
    both: Any = scales | {"output_dtype": output_dtype}
    gated, _ = ragged_gated(*operands, None, splits, most, **both)
    close(gated, padded(torch.nn.functional.silu(gate) * up, most, product), what)
    operands, scales = given(case.combined[rank], case.b[rank])
    by_expert = case.counts[:, rank].t().contiguous().to(here())
    back, home = weft.matmul_all_to_all(*operands, splits=by_expert, max_rows=most, **(how | scales))
    assert torch.equal(home.cpu().long(), case.counts[rank])
    wanted = case.returning(rank)
    close(back, padded(wanted, most, wanted), what)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_family(recipe: Recipe) -> None:
    for seed, pattern in enumerate(("random", "empty_experts", "all_to_one", "nothing")):
        for schedule in ("auto", *ragged.FAMILIES):
            check_both(Case(counts_of(pattern, 1 + seed % 3, seed), recipe, seed=seed), schedule, torch.float32)
    check_both(Case(counts_of("random", 2, 7), recipe, (E5M2, E4M3)), "auto", torch.float16)
    check_both(Case(counts_of("random", 2, 8), recipe, (E4M3, E5M2)), "auto")


@on_ranks(1)
def test_mistakes_are_named() -> None:
    case = Case(counts_of("random", 2, 3), "rowwise")
    (a, b), scales = given(case.dispatched[0], case.b[0])
    good: dict[str, Any] = {"a": a, "b": b, **scales, "splits": case.counts[0], "max_rows": 40}
    wide = torch.ones(2, K // 128, N // 128)
    for change, words in [
        ({"scale_b": None}, "FP8 operands come with scale_a and scale_b"),
        ({"scale_b": scales["scale_b"][0]}, r"scale_b is \[1, 256\]; for b of \[2, 256, 256\] use .*\[2, 1, 256\] rowwise"),
        ({"scale_b": wide}, "scale_a is rowwise and scale_b blockwise; both operands must have the same recipe"),
        ({"b": b.view(torch.uint8).contiguous().view(E4M3)}, "b is row-major; the columns of an FP8 b must be contiguous"),
        ({"bias": torch.ones(N).bfloat16()}, "bias cannot be used with splits; add it to the rows that arrive"),
        ({"a": a.bfloat16(), "b": b.bfloat16()}, "scale_a is for FP8 operands, and a is torch.bfloat16; leave it out"),
        ({"output_dtype": torch.float64}, "output_dtype is torch.float64; weft writes bfloat16, float16, float32"),
    ]:
        for operator in (weft.all_to_all_matmul, weft.matmul_all_to_all):
            changed: Any = good | change
            if operator is weft.matmul_all_to_all:
                changed["splits"] = changed["splits"].t()
            with pytest.raises(ValueError, match=words):
                operator(changed.pop("a"), changed.pop("b"), **changed)
    with pytest.raises(TypeError, match=r"all_to_all_matmul\(\) got an unexpected keyword argument 'scale'"):
        weft.all_to_all_matmul(**good, scale=1)
    blocks: Any = {"scale_a": torch.ones(len(a), 2), "scale_b": torch.ones(2, 2, 2)}
    with pytest.raises(ValueError, match="in halves of 112 columns; blockwise FP8 operands of a gated product need halves"):
        ragged_gated(a, b[..., :224], None, case.counts[0], 40, **blocks)
    for operator in (weft.all_to_all_matmul, weft.matmul_all_to_all):
        splits = good["splits"] if operator is weft.all_to_all_matmul else good["splits"].t()
        with pytest.raises(ValueError, match="b or scale_b requires a gradient, and operators with FP8 operands have none"):
            operator(**good | {"b": b.detach().requires_grad_(), "splits": splits})[0].sum().backward()


@on_ranks(2)
def test_rows_past_max_rows_are_dropped_and_told() -> None:
    """The error is that of other dtypes."""
    case = Case(counts_of("even", 1, 0), "blockwise")
    rank = dist.get_rank()
    operands, scales = given(case.dispatched[rank], case.b[rank])
    words = "max_rows is 10, but 18 rows arrived at rank 0; 8 of them were dropped"
    with pytest.raises(ValueError, match=words):
        weft.all_to_all_matmul(*operands, splits=case.counts[rank], max_rows=10, **scales)
    with pytest.raises(ValueError, match=words):
        weft.matmul_all_to_all(*operands, splits=case.counts[rank].t(), max_rows=10, **scales)


@on_ranks(2)
def test_torch_compile() -> None:
    case = Case(counts_of("random", 2, 4), "blockwise")
    rank = dist.get_rank()
    operands, scales = given(case.dispatched[rank], case.b[rank])

    def layer(a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> Any:
        both = {"scale_a": scale_a, "scale_b": scale_b}
        out, counts, rows, of_rows = weft.all_to_all_matmul(a, b, splits=splits, max_rows=64, return_received=True, **both)
        home, _ = weft.matmul_all_to_all(rows, b, splits=counts, max_rows=64, scale_a=of_rows, scale_b=scale_b)
        return out, home

    arguments = (*operands, case.counts[rank], scales["scale_a"], scales["scale_b"])
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(*arguments)
    for one, two in zip(found, layer(*arguments), strict=True):
        assert torch.equal(one, two)


interpreted = interpreted_ranks([2], slow=[3])


@on_ranks(pool="interpreted")
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_every_family_as_kernels(recipe: Recipe) -> None:
    """Segments that share tiles, an expert without rows, several tiles of one; then no rows, and other dtypes."""
    check_both(Case(counts_of("random", 2, 1), recipe), "sequential", torch.float16)
    check_both(Case(counts_of("empty_experts", 2, 2, most=45), recipe), "fused", torch.float16)
    check_both(Case(counts_of("one_to_all", 1, 3), recipe, (E5M2, E4M3)), "fused", torch.float16)
    check_both(Case(counts_of("nothing", 1, 4), recipe), "fused", torch.float16)
