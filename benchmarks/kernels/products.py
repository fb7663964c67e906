"""How much faster is a product by the algorithm of cuBLAS that weft finds fastest than by the one that torch takes?

Cases: bfloat16, normal data, k and n of Llama 3, Qwen 3 and Mixtral as a rank of 2, 4 or 8 has them, weights as matmul's b
(k x n) and as a linear's (n x k, transposed); numbers of rows that batches and prompts have. Results are compared with
float64's of some rows. Traps: a and b stay the same, so that small weights stay in the L2 cache; which is fastest is found by
a measurement of its own, so that what is shown is no minimum over what is timed here.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import Any

import torch

import weft
from benchmarks.kernels.single_gpu import Case, Part, Work, medians
from weft.runtime.products import Products

SHAPES = (
    (4096, 28672),
    (5120, 25600),
    (14336, 4096),
    (14336, 8192),
    (4096, 8192),
    (8192, 29568),
    (8192, 10240),
    (8192, 3584),
    (2048, 7168),
    (4096, 5120),
)
"""(k, n) of a rank's product."""
ROWS = (16, 64, 112, 128, 192, 224, 256, 320, 393, 400, 448, 512, 544, 640, 704, 832, 1024, 1856, 2048, 4096, 8192)
MOST_FLOPS = 2 * 8192 * 8192 * 14336
ROUNDS, WARM_UP, SAMPLE_US, MOST_CALLS = 9, 2, 1000.0, 10
TORCH, WEFT = "computation/cublas", "weft/auto"


def name_of(m: int, n: int, k: int, linear: bool) -> str:
    return f"{m}x{k}x{n}" + (" linear" if linear else "")


def calls(m: int, n: int, k: int, linear: bool) -> dict[str, list[Work]]:
    """torch's product and weft's, which has found the fastest algorithm. Raises AssertionError if its result is wrong."""
    device = torch.device("cuda")
    a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    weight = torch.randn(n, k, device=device, dtype=torch.bfloat16) if linear else None
    b = torch.randn(k, n, device=device, dtype=torch.bfloat16) if weight is None else weight.t()
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    products = Products(device)
    products.multiply(a, b, out, accumulate=False, times=True)
    out.fill_(math.nan)
    products.multiply(a, b, out, accumulate=False, times=False)
    some = torch.arange(0, m, max(1, m // 7), device=device)
    torch.testing.assert_close(out[some].double(), a[some].double() @ b.double(), rtol=1e-2, atol=1e-2 * math.sqrt(k))
    works = {
        TORCH: lambda: torch.mm(a, b, out=out),
        WEFT: lambda: products.multiply(a, b, out, accumulate=False, times=False),
    }
    return {name: [work] * calls_of(2 * m * n * k) for name, work in works.items()}


def calls_of(flops: int) -> int:
    """Of a graph, so that it takes about SAMPLE_US."""
    return max(2, min(MOST_CALLS, round(SAMPLE_US / (20 + flops / 6e8))))


def measure(m: int, n: int, k: int, linear: bool) -> dict[str, float]:
    """Median times in us, by TORCH and WEFT."""
    return medians(calls(m, n, k, linear), rounds=ROUNDS, warm_up=WARM_UP)


def cases(given: argparse.Namespace) -> list[Case]:
    sizes = [(m, n, k, linear) for m in ROWS for k, n in SHAPES if 2 * m * n * k <= MOST_FLOPS for linear in (False, True)]
    return [
        Case(op="matmul", name=name_of(*one), shape=one[:3], groups=(f"{one[0]} rows", "all"), calls=partial(calls, *one))
        for one in sizes
    ]


def found(case: Case) -> dict[str, Any]:
    choice = weft.matmul_choices()[-1]
    chosen = None if choice.algorithm is None else str(choice.algorithm)
    return {"chosen": chosen, "extra": {"rows": case.shape[0], "tried": len(choice.us)}}


PART = Part(
    bench="products",
    about=__doc__,
    dtype="bfloat16",
    baseline=TORCH,
    rounds=ROUNDS,
    warm_up=WARM_UP,
    cases=cases,
    found=found,
)
