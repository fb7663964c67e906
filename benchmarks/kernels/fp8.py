"""How close is the GEMM kernel to cuBLAS with FP8 operands, alone on one GPU?

Cases: operands are float8_e4m3fn of normal data, results bfloat16. 14 dense cases are the local matmuls of the 14 cases as one
of 8 ranks has them. Their baseline is the fastest of torch._scaled_mm with tensorwise scales, with and without fast
accumulation, and with rowwise scales and fast accumulation. 6 cases have blockwise scales, 1 x 128 by 128 x 128, and
torch.nn.functional.scaled_mm as baseline.
Methods, rowwise scales in the dense cases: the kernel plain with fast accumulation (fast); with a part for each eighth of the
rows, all but the first from a second tensor, behind open gates (gated); with sums in float32 of each 128 of K (exact). With
blockwise scales the sums are always exact: plain (kernel) and gated.

    python -m benchmarks.kernels fp8 --shapes 128,256,128,8,3,8 128,128,128,8,3,8,pairs 64,128,128,4,3,8,exact,twice

A shape is m,n,k,warps,stages,group of a tile, and any of these words. exact: sums in float32, as blockwise scales always have
them. pairs: exact, by two steps over K a turn, of which a stage holds both. halves: half tiles in the last wave. twice: two
blocks on each SM, which compete for its registers and shared memory. Shapes of more than 128 columns are left out where scales
are blockwise.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.cases import CASES
from benchmarks.kernels.gemm import sizes
from benchmarks.kernels.operands import CALLS, ROUNDS, Launches, step
from benchmarks.kernels.single_gpu import Case, Part, Work
from weft.core.problem import SCALE_BLOCK, Scaling
from weft.kernels.gemm import fits, gemm
from weft.perf.shapes import TileShape

FAST, EXACT, BLOCKWISE = Scaling(use_fast_accum=True), Scaling(), Scaling(recipe="blockwise")
BLOCKWISE_SIZES = (
    *((8192, 3584, 8192), (8192, 8192, 3584), (8192, 7168, 8192)),
    *((2048, 7168, 8192), (512, 7168, 8192), (32768, 3584, 8192)),
)
"""M, N and K."""
PARTS = 8
WORDS = ("exact", "pairs", "halves", "twice")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A tile shape to try. text: as it was given. exact: sums in float32. per_sm: blocks on each SM."""

    text: str
    blocks: TileShape
    exact: bool
    per_sm: int


def candidate(text: str) -> Candidate:
    """One of --shapes."""
    fields = text.split(",")
    words = set(fields[6:])
    if len(fields) < 6 or not all(field.isdecimal() for field in fields[:6]) or not words <= set(WORDS):
        raise argparse.ArgumentTypeError(f"{text!r} is not m,n,k,warps,stages,group and any of {', '.join(WORDS)}")
    m, n, k, warps, stages, group = map(int, fields[:6])
    blocks = TileShape(m=m, n=n, k=k, warps=warps, stages=stages, group=group, itemsize=1)
    blocks = replace(blocks, pairs="pairs" in words, halves="halves" in words)
    return Candidate(text=text, blocks=blocks, exact=bool(words & {"exact", "pairs"}), per_sm=1 + ("twice" in words))


class Product:
    """Operands of one size, and how they are multiplied."""

    def __init__(self, m: int, n: int, k: int) -> None:
        self.m, self.n, self.k = m, n, k
        self.launches = Launches()
        device = self.launches.device
        self.a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
        self.b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
        self.again = self.a.clone()
        self.out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
        self.one = torch.ones(1, 1, device=device)
        self.row_scales = 0.5 + torch.rand(m, 1, device=device), 0.5 + torch.rand(1, n, device=device)
        # As cuBLAS takes them: the scales of a's columns, and of b's, are contiguous.
        steps = -(-k // SCALE_BLOCK)
        self.block_scales = (
            0.5 + torch.rand(steps, m, device=device).t(),
            0.5 + torch.rand(-(-n // SCALE_BLOCK), steps, device=device).t(),
        )
        assert fits(self.a, self.b)

    def kernel(self, scaling: Scaling, blocks: TileShape | None = None, *, gated: bool = False, per_sm: int = 1) -> Work:
        """The tile shape is the plain kernel's: gates that are open do not ask for what is best where chunks arrive late."""
        launches, size = self.launches, (self.m, self.n, self.k)
        blocks = blocks or launches.best(step(*size), scaling)
        plan = launches.plan(step(*size, parts=PARTS if gated else 1, gates=gated), blocks, split=gated)
        sources = (self.a, self.again) if gated else (self.a,)
        scale_a, scale_b = self.block_scales if scaling.recipe == "blockwise" else self.row_scales
        scales, fast = ((scale_a,) * len(sources), scale_b, scaling.recipe), scaling.use_fast_accum
        sms = per_sm * launches.sms
        return lambda: gemm(sources, self.b, self.out, plan, launches.status, sms=sms, scales=scales, use_fast_accum=fast)

    def scaled_mm(self, scales: tuple[torch.Tensor, torch.Tensor], fast: bool) -> torch.Tensor:
        return torch._scaled_mm(self.a, self.b, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def blockwise_mm(self) -> torch.Tensor:
        from torch.nn.functional import ScalingType, scaled_mm

        recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        return scaled_mm(self.a, self.b, self.block_scales[0], recipes[0], self.block_scales[1], recipes[1])

    def check(self, works: Mapping[str, Work], expected: torch.Tensor) -> None:
        """Raises AssertionError where a method of the kernel has other results than torch."""
        for work in works.values():
            self.out.fill_(torch.nan)
            work()
            torch.testing.assert_close(self.out, expected, rtol=3e-2, atol=8e-2 * math.sqrt(self.k))
        assert self.launches.status.tolist() == [0, 0]


def dense(product: Product, tried: Sequence[Candidate]) -> dict[str, Work]:
    """What is timed with rowwise scales, ready to run."""
    kernels = {
        "fast": product.kernel(FAST),
        "gated": product.kernel(FAST, gated=True),
        "exact": product.kernel(EXACT),
    }
    for one in tried:
        kernels[one.text] = product.kernel(EXACT if one.exact else FAST, one.blocks, per_sm=one.per_sm)
    product.check(kernels, product.scaled_mm(product.row_scales, True))
    single = product.one, product.one
    return {
        "cublas_tensor": lambda: product.scaled_mm(single, False),
        "cublas_tensor_fast": lambda: product.scaled_mm(single, True),
        "cublas_row_fast": lambda: product.scaled_mm(product.row_scales, True),
        **kernels,
    }


def blockwise(product: Product, tried: Sequence[Candidate]) -> dict[str, Work]:
    """What is timed with blockwise scales, ready to run."""
    kernels = {"kernel": product.kernel(BLOCKWISE), "gated": product.kernel(BLOCKWISE, gated=True)}
    for one in tried:
        if one.exact and SCALE_BLOCK % one.blocks.n == 0:
            kernels[one.text] = product.kernel(BLOCKWISE, one.blocks, per_sm=one.per_sm)
    product.check(kernels, product.blockwise_mm())
    return {"cublas_blockwise": product.blockwise_mm, **kernels}


KINDS = {"dense": dense, "blockwise": blockwise}


def calls(kind: str, size: tuple[int, int, int], tried: Sequence[Candidate]) -> dict[str, list[Work]]:
    return {f"computation/{name}": [work] * CALLS for name, work in KINDS[kind](Product(*size), tried).items()}


def cases(given: argparse.Namespace) -> list[Case]:
    found = [("dense", f"{site.op} {site.name}", sizes(site)) for site in CASES]
    found += [("blockwise", "blockwise", size) for size in BLOCKWISE_SIZES]
    return [
        Case(op=kind, name=name, shape=size, groups=(kind,), calls=partial(calls, kind, size, given.shapes))
        for kind, name, size in found
        if given.only in (None, kind)
    ]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", type=candidate, nargs="*", default=[], help="tile shapes to try, see above")
    parser.add_argument("--only", choices=tuple(KINDS), help="one of the two kinds of cases")


PART = Part(
    bench="gemm_fp8",
    about=__doc__,
    dtype="float8_e4m3fn",
    baseline="computation/cublas",
    rounds=ROUNDS,
    cases=cases,
    options=options,
)
