"""How much faster than torch._scaled_grouped_mm does weft multiply experts' rows in FP8, on one GPU?

Six cases, each the rows that one of several ranks has for its experts, split evenly. Operands are float8_e4m3fn of normal data
with rowwise scales; results are bfloat16. A graph has CALLS calls.
Baselines: torch._scaled_grouped_mm with rowwise scales and fast accumulation, and torch._grouped_mm of the same rows in
bfloat16. Methods: weft.all_to_all_matmul with splits in a group of one rank (`dispatch`), and weft.matmul_all_to_all
(`combine`). Each is a whole call: a kernel that lays the rows out by their counts comes before the product, and torch's
methods do without it.
Trap: a kernel is compiled at its first call, some seconds for each.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial

import torch

import weft
from benchmarks.kernels.single_gpu import Case, Part, Work

ROUNDS = 9
CALLS = 4
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SHAPES = {
    "mixtral gate+up, 8 ranks": (16384, 28672, 4096, 1),
    "mixtral gate+up, 4 ranks": (8192, 28672, 4096, 2),
    "deepseek-v3 gate+up, 32 ranks": (8192, 4096, 7168, 8),
    "deepseek-v3 down, 32 ranks": (8192, 7168, 2048, 8),
    "qwen3-235b gate+up, 8 ranks": (8192, 3072, 4096, 16),
    "qwen3-235b gate+up, decode": (256, 3072, 4096, 16),
}
"""Rows, N, K and experts: [rows, K] by [experts, K, N]."""
Method = Callable[[], torch.Tensor]


def quantised(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rowwise: elements, and scales [..., rows, 1]."""
    scales = matrix.abs().amax(-1, keepdim=True).float() / LARGEST
    return (matrix.float() / scales).to(torch.float8_e4m3fn), scales


def methods(count: int, n: int, k: int, experts: int, device: torch.device) -> dict[str, Method]:
    """What is timed, ready to run. The results of all of them are the same rows. device: on a CPU, for tests, weft's alone."""
    rows = torch.randn(count, k, device=device, dtype=torch.bfloat16)
    weights = torch.randn(experts, n, k, device=device, dtype=torch.bfloat16)
    a, scale_a = quantised(rows)
    elements, of_columns = quantised(weights)
    b, scale_b = elements.transpose(1, 2), of_columns.transpose(1, 2).contiguous()
    each = count // experts
    assert each * experts == count
    splits = torch.full((1, experts), each, device=device, dtype=torch.int32)
    ends = torch.arange(each, count + 1, each, device=device, dtype=torch.int32)
    scales = {"scale_a": scale_a, "scale_b": scale_b, "use_fast_accum": True}

    def dispatch() -> torch.Tensor:
        return weft.all_to_all_matmul(a, b, splits=splits, max_rows=count, **scales)[0]

    def combine() -> torch.Tensor:
        return weft.matmul_all_to_all(a, b, splits=splits.t(), max_rows=count, **scales)[0]

    found: dict[str, Method] = {"dispatch": dispatch, "combine": combine}
    if device.type == "cuda":
        flat = scale_a.view(-1), scale_b.view(experts, n)
        wide = weights.transpose(1, 2)
        found["torch_fp8"] = lambda: torch._scaled_grouped_mm(
            a, b, *flat, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        found["torch_bfloat16"] = lambda: torch._grouped_mm(rows, wide, offs=ends)
    return found


def check(k: int, found: dict[str, Method]) -> None:
    """Raises AssertionError where a method's result is not that of dispatch. Products of bfloat16 differ from those of FP8 by
    some 4% of their norm."""
    expected = found["dispatch"]().float()
    for name, work in found.items():
        result = work().float()
        if name == "torch_bfloat16":
            assert (result - expected).norm() <= 0.06 * expected.norm(), name
        else:
            torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2 * math.sqrt(k), msg=name)


def calls(count: int, n: int, k: int, experts: int) -> dict[str, list[Work]]:
    found = methods(count, n, k, experts, torch.device("cuda", 0))
    check(k, found)
    return {f"computation/{name}": [work] * CALLS for name, work in found.items()}


def cases(given: argparse.Namespace) -> list[Case]:
    return [Case(op="grouped", name=name, shape=shape, calls=partial(calls, *shape)) for name, shape in SHAPES.items()]


PART = Part(
    bench="grouped_fp8",
    about=__doc__,
    dtype="float8_e4m3fn",
    baseline="computation/torch_fp8",
    rounds=ROUNDS,
    cases=cases,
    world=True,
)
