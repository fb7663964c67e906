"""How close is the fused GEMM kernel to cuBLAS, alone on one GPU?

Cases: the local matmul of each of the 14 cases as one of 8 ranks has it, bf16, normal data. Baseline: torch.mm (cuBLAS).
Methods: the kernel plain; with open gates (a part for each eighth of the rows, all but the first from a second tensor); with
counts; with open gates between eight slices of K, too, for all parts but the first. Gated ones have the plain kernel's tile
shape. Trap: outputs and inputs are larger than the L2 cache in all but the smallest cases.
"""

from __future__ import annotations

import argparse
import math
from functools import partial

import torch

from benchmarks.cases import CASES
from benchmarks.cases import Case as Site
from benchmarks.kernels.operands import CALLS, ROUNDS, Launches, step
from benchmarks.kernels.single_gpu import Case, Part, Work
from weft.kernels.gemm import fits, gemm
from weft.perf.shapes import SHAPES, TileShape


def sizes(site: Site) -> tuple[int, int, int]:
    """M, N and K of one of 8 ranks."""
    problem = site.problem(8)
    return problem.m, problem.columns(0), problem.inner(0)


def methods(site: Site, shapes: bool) -> dict[str, Work]:
    """What is timed, ready to run, by name. Raises AssertionError where a method has another result than torch."""
    m, n, k = sizes(site)
    launches = Launches()
    a, b = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((m, k), (k, n)))
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    assert fits(a, b)

    def kernel(blocks: TileShape | None = None, *, split: bool = False, **parts: int) -> Work:
        made = step(m, n, k, gates=split, **parts)  # type: ignore[arg-type]
        sources = (a, a.clone()) if split else (a,)
        plan = launches.plan(made, blocks or launches.best(made), split=split)
        return lambda: gemm(sources, b, out, plan, launches.status, sms=launches.sms)

    # Gates that are open do not ask for the tile shape that is best where chunks arrive late.
    plain = launches.best(step(m, n, k))
    kernels = {
        "kernel": kernel(),
        "gated": kernel(plain, split=True, parts=8),
        "counted": kernel(parts=8, counts=True),
        "sliced": kernel(plain, split=True, parts=8, slices=8),
    }
    kernels |= {f"{blocks.m}x{blocks.n}": kernel(blocks) for blocks in (SHAPES if shapes else ())}
    reference = torch.mm(a, b)
    for work in kernels.values():
        out.zero_()
        work()
        torch.testing.assert_close(out, reference, rtol=2e-2, atol=2e-2 * math.sqrt(k))
    return {"cublas": lambda: torch.mm(a, b, out=out), **kernels}


def calls(site: Site, shapes: bool) -> dict[str, list[Work]]:
    return {f"computation/{name}": [work] * CALLS for name, work in methods(site, shapes).items()}


def cases(given: argparse.Namespace) -> list[Case]:
    return [Case(op=s.op, name=s.name, shape=sizes(s), calls=partial(calls, s, given.shapes)) for s in CASES]


PART = Part(
    bench="gemm",
    about=__doc__,
    dtype="bfloat16",
    baseline="computation/cublas",
    rounds=ROUNDS,
    cases=cases,
    options=lambda parser: parser.add_argument("--shapes", action="store_true", help="also each tile shape by itself"),
)
