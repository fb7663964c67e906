"""GEMMs that add what arrived: the arithmetic part by part, which steps the kernel can keep in order, and the kernel itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pools import interpreting
from rank_work import check_scatter

import weft
from weft.checker import check
from weft.core.problem import Problem, split
from weft.core.schedule import Flag, Gemm, Part, Region, Wait
from weft.runtime.arithmetic import Product, groups
from weft.runtime.bindings import Bindings
from weft.runtime.launches import IssuedCall
from weft.schedules import build

NAMES = ("track_and_trigger", "direct_store")


def region(name: str, rows: tuple[int, int], cols: tuple[int, int]) -> Region:
    return Region(name, 0, rows, cols)


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulate: bool, scales: object = None) -> None:
    assert not accumulate
    assert scales is None
    out.copy_(a.to(out.dtype) @ b.to(out.dtype))


def test_matrices_without_columns_lie_side_by_side_as_one() -> None:
    """A rank of a column-sharded weight of few columns has none, of every linear that shares its input."""
    bindings = Bindings()
    bindings.bind("a", 0, torch.ones(2, 0), torch.ones(2, 0))
    assert [(view.shape, cols) for view, cols in bindings.pieces(region("a", (1, 2), (0, 0)))] == [((1, 0), (0, 0))]
    bindings.bind("b", 0, torch.ones(2, 0), torch.ones(2, 3))
    assert bindings.view(region("b", (0, 2), (0, 3))).shape == (2, 3)
    assert bindings.view(region("b", (0, 2), (1, 1))).shape == (2, 0)


def test_the_product_is_added_unrounded_and_the_sum_is_rounded_once() -> None:
    """1 + 2^-8 is 1 in bfloat16: rounded before it is added to, the product would lose what the sources bring back."""
    step = Gemm(
        region("b", (0, 2), (0, 3)),
        (Part(region("a", (1, 3), (0, 2)), region("out", (0, 2), (0, 3)), adds=(region("r", (0, 2), (0, 3)),) * 2),),
        divide_by=2,
    )
    bindings, small = Bindings(), 2.0**-8
    a, b = torch.tensor([[9.0, 9.0], [1.0, small], [1.0, small]]).bfloat16(), torch.ones(2, 3).bfloat16()
    received, out = torch.full((2, 3), small / 2).bfloat16(), torch.empty(2, 3).bfloat16()
    for name, matrix in (("a", a), ("b", b), ("r", received), ("out", out)):
        bindings.bind(name, 0, matrix)
    Product(step, step.parts).multiply("compute", IssuedCall(bindings=bindings, matmuls={"compute": matmul}))
    assert torch.equal(out, torch.full((2, 3), (1 + 2 * small) / 2).bfloat16())


def test_a_part_that_adds_is_multiplied_by_itself() -> None:
    plain = Part(region("a", (0, 2), (0, 2)), region("out", (0, 2), (0, 3)))
    adding = dataclasses.replace(plain, adds=(region("r", (0, 2), (0, 3)),))
    assert groups([plain, plain, adding, adding, plain]) == [[plain, plain], [adding], [adding], [plain]]


def test_what_the_kernel_keeps_in_order() -> None:
    gemm = pytest.importorskip("weft.kernels.gemm", reason="Triton is not installed")
    schedule = build(Problem(op="matmul_reduce_scatter", m=12, n=8, k=8, world_size=3), "track_and_trigger", 2)
    (step,) = (step for rank, _, _, step in schedule if rank == 1 and isinstance(step, Gemm))
    assert gemm.in_order(step)
    assert not gemm.in_order(dataclasses.replace(step, parts=step.parts[::-1])), "those that add come last"
    waits = dataclasses.replace(step.parts[1], gates=(Wait(Flag("x", 1)),))
    assert not gemm.in_order(dataclasses.replace(step, parts=(step.parts[0], waits))), "it waits behind one that counts"
    own = step.parts[-1]
    assert gemm.pitch(own) == 4
    assert gemm.pitch(dataclasses.replace(own, adds=own.adds[:1])) == 0
    three = (*own.adds, dataclasses.replace(own.adds[0], rows=(4, 6)))
    assert gemm.pitch(dataclasses.replace(own, adds=three)) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [(2, 4, 1, 3), (0, 4, 3, 2), (5, 0, 3, 2), (7, 4, 3, 1)])
def test_empty_shards_and_pieces(name: str, sizes: tuple[int, int, int, int]) -> None:
    m, n, k, world_size = sizes
    for reduce_op in ("sum", "avg"):
        problem = Problem(op="matmul_reduce_scatter", m=m, n=n, k=k, world_size=world_size, reduce_op=reduce_op)  # type: ignore[arg-type]
        check(build(problem, name, 4))


def _interpreted() -> tuple[int, int]:
    """Averages and sums, on whole and ragged tiles and on empty shards; how often a kernel added, and how often it stored at
    peers through one descriptor: rows of 64 elements divide a page."""
    from weft.runtime import fused

    adding = through_one = 0
    launch = fused.FusedGemm.launch

    def counted(self: fused.FusedGemm, bindings: Bindings, **options: Any) -> None:
        nonlocal adding, through_one
        adding += any(part.adds for part in self.step.parts)
        launch(self, bindings, **options)
        plan = self.tables.of(bindings)
        through_one += plan.at_peers and plan.scattered is not None

    fused.FusedGemm.launch = counted  # type: ignore[method-assign]
    try:
        for name in NAMES:
            for m, n, op in ((70, 80, "avg"), (70, 64, "sum"), (2, 80, "sum"), (192, 64, "avg")):
                for call in range(2):
                    check_scatter(m, n, 48, torch.float16, f"{name}:3", call, op=op)
            _rank_that_cannot_load(name)
    finally:
        fused.FusedGemm.launch = launch  # type: ignore[method-assign]
    return adding, through_one


def _rank_that_cannot_load(name: str) -> None:
    """The last rank's a starts at an odd address, so that it multiplies part by part, while its peers count tiles."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    a, b = torch.randn(size, 64, 33).half(), torch.randn(size, 32, 48).half()
    factors = [matrix[:, 1:] if r == size - 1 else matrix[:, :32].contiguous() for r, matrix in enumerate(a)]
    out = weft.matmul_reduce_scatter(factors[rank], b[rank], schedule=f"{name}:2")
    low, high = split(64, size)[rank]
    expected = sum(
        (factor[low:high].float() @ other.float() for factor, other in zip(factors, b, strict=True)), torch.zeros(())
    )
    assert torch.allclose(out.float(), expected, atol=0.1), (out.float() - expected).abs().max()


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_interpreted_kernel_adds(world_size: int) -> None:
    for adding, through_one in interpreting(world_size).run(_interpreted):
        assert adding >= 12
        assert through_one >= 4
