"""Products by the algorithm that was fastest: each right, of every kind of operands, the same bits each time, in graphs."""

from __future__ import annotations

import math

import pytest
import torch
from on_gpus import NEEDS_ONE, alarm

import weft
from weft.compat.cublas import CublasProduct, library
from weft.overlap.controls import sm_budget
from weft.runtime import products
from weft.runtime.products import WORKSPACE, Products, by_torch, candidates

pytestmark = NEEDS_ONE
SIZES = [(448, 4096, 1024), (128, 2048, 512), (833, 1000, 520), (1, 4096, 4096), (256, 8, 8)]


def operands(
    m: int, n: int, k: int, dtype: torch.dtype, *, linear: bool, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn(k, m, device="cuda", dtype=dtype).t() if transposed else torch.randn(m, k, device="cuda", dtype=dtype)
    b = torch.randn(n, k, device="cuda", dtype=dtype).t() if linear else torch.randn(k, n, device="cuda", dtype=dtype)
    return a, b


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("linear", [False, True], ids=["b", "linear"])
@pytest.mark.parametrize("wide", [False, True], ids=["16 bits", "float32"])
@alarm(60)
def test_every_algorithm_is_right(dtype: torch.dtype, linear: bool, transposed: bool, wide: bool) -> None:
    """Also added to what is there in float32, and with a workspace of rubbish."""
    tried = 0
    for m, n, k in SIZES:
        if transposed and m % 8:
            continue
        a, b = operands(m, n, k, dtype, linear=linear, transposed=transposed)
        before = torch.randn(m, n, device="cuda", dtype=torch.float32 if wide else dtype)
        for accumulate in (False, True)[: 1 + wide]:
            exact = a.double() @ b.double() + (before.double() if accumulate else 0)
            product = CublasProduct(library(0), a, b, before, accumulate=accumulate)
            for algorithm in candidates(library(0), product, a, b, before, accumulate):
                workspace = torch.full((WORKSPACE,), 0xFF, dtype=torch.uint8, device="cuda")
                out = before.clone() if accumulate else torch.full_like(before, math.nan)
                product.run(algorithm, a, b, out, workspace, torch.cuda.current_stream().cuda_stream)
                step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
                bound = 1e-5 * math.sqrt(k) + (0 if wide else 1) * step * exact.abs() + 1e-4 * math.sqrt(k)
                over = ((out.double() - exact).abs() - bound).max()
                assert over <= 0, (
                    f"{m} x {k} x {n}, accumulate {accumulate}, workspace {algorithm.workspace}: {over:.3g} too far"
                )
                tried += 1
    assert tried >= 4


@alarm(60)
def test_a_product_is_timed_once_and_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_CHOSEN", {})
    monkeypatch.setattr(products, "GAIN", math.inf)  # whatever is fastest of the others is taken
    a, b = operands(448, 28672, 4096, torch.bfloat16, linear=True, transposed=False)
    out = torch.empty(448, 28672, device="cuda", dtype=torch.bfloat16)
    lane = Products(torch.device("cuda"))
    lane.multiply(a, b, out, accumulate=False, times=True)
    (choice,) = weft.matmul_choices()
    assert choice.algorithm is not None
    assert choice.torch_us
    assert len(choice.us) >= 3
    first = out.clone()
    for _ in range(20):
        out.fill_(math.nan)
        lane.multiply(a, b, out, accumulate=False, times=False)
        assert torch.equal(out, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lane.multiply(a, b, out, accumulate=False, times=False)
    for _ in range(5):
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, first)
    assert len(weft.matmul_choices()) == 1


@alarm(60)
def test_what_torch_is_told_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic algorithms, and a budget of SMs: then a product is torch's, bit by bit."""
    monkeypatch.setattr(products, "_CHOSEN", {})
    a, b = operands(448, 28672, 4096, torch.bfloat16, linear=True, transposed=False)
    lane, out, theirs = (
        Products(torch.device("cuda")),
        *(torch.empty(448, 28672, device="cuda", dtype=a.dtype) for _ in range(2)),
    )
    lane.multiply(a, b, out, accumulate=False, times=True)
    with sm_budget(64):
        lane.multiply(a, b, out, accumulate=False, times=False)
        by_torch(a, b, theirs, accumulate=False)
        assert torch.equal(out, theirs)
    monkeypatch.setattr(products, "_CHOSEN", {})
    torch.use_deterministic_algorithms(True)
    try:
        lane.multiply(a, b, out, accumulate=False, times=True)
        by_torch(a, b, theirs, accumulate=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(out, theirs)
    assert weft.matmul_choices() == []
