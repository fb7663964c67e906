"""How close is the GEMM kernel to cuBLAS with FP8 operands, alone on one GPU?

Protocol: as benchmarks/gemm.py. Operands are float8_e4m3fn of normal data, results bfloat16. 14 dense cases are the local
matmuls of the 14 cases as one of 8 ranks has them. Their baseline is the fastest of torch._scaled_mm with tensorwise scales,
with and without fast accumulation, and with rowwise scales and fast accumulation. 6 cases have blockwise scales, 1 x 128 by
128 x 128, and torch.nn.functional.scaled_mm as baseline.
Methods, rowwise scales in the dense cases: the kernel plain with fast accumulation (fast); with a part for each eighth of the
rows, all but the first from a second tensor, behind open gates (gated); with sums in float32 of each 128 of K (exact). With
blockwise scales the sums are always exact: plain (kernel) and gated.
Traps: as benchmarks/gemm.py.

    python -m benchmarks.gemm_fp8 --json benchmarks/results/gemm_fp8.jsonl
    python -m benchmarks.gemm_fp8 --shapes 128,256,128,8,3,8 128,128,128,8,3,8,pairs 64,128,128,4,3,8,exact,twice

A shape is m,n,k,warps,stages,group of a tile, and any of these words. exact: sums in float32, as blockwise scales always have
them. pairs: exact, by two steps over K a turn, of which a stage holds both. halves: half tiles in the last wave. twice: two
blocks on each SM, which compete for its registers and shared memory. Shapes of more than 128 columns are left out where scales
are blockwise.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from benchmarks.cases import CASES
from benchmarks.checked_options import appended
from benchmarks.gemm import CALLS, ROUNDS
from benchmarks.one_gpu import append, medians
from weft.core.problem import SCALE_BLOCK, Scaling
from weft.core.schedule import Flag, Gemm, Part, Region, Wait
from weft.kernels.gemm import fits, gemm, tables
from weft.kernels.shapes import TileShape, blocks_for
from weft.runtime.nearest import nearest_profile

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
        device = torch.device("cuda")
        self.m, self.n, self.k = m, n, k
        self.a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
        self.b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
        self.again = self.a.clone()
        self.out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
        self.words = torch.ones(64, device=device, dtype=torch.int32)
        self.status = torch.zeros(2, device=device, dtype=torch.int32)
        self.one = torch.ones(1, 1, device=device)
        self.row_scales = 0.5 + torch.rand(m, 1, device=device), 0.5 + torch.rand(1, n, device=device)
        # As cuBLAS takes them: the scales of a's columns, and of b's, are contiguous.
        steps = -(-k // SCALE_BLOCK)
        self.block_scales = (
            0.5 + torch.rand(steps, m, device=device).t(),
            0.5 + torch.rand(-(-n // SCALE_BLOCK), steps, device=device).t(),
        )
        self.sms, self.profile = torch.cuda.get_device_properties(device).multi_processor_count, nearest_profile(device)
        assert fits(self.a, self.b)

    def step(self, gated: bool) -> Gemm:
        cuts = [i * self.m // PARTS for i in range(PARTS + 1)] if gated else [0, self.m]
        parts = [
            Part(
                Region("a", 0, rows, (0, self.k)),
                Region("out", 0, rows, (0, self.n)),
                (Wait(Flag("open", 0, number)),) if gated else (),
            )
            for number, rows in enumerate(pairwise(cuts))
        ]
        return Gemm(Region("b", 0, (0, self.k), (0, self.n)), tuple(parts))

    def best(self, scaling: Scaling) -> TileShape:
        """Of the plain kernel. Gates that are open do not ask for the shape that is best where chunks arrive late."""
        return blocks_for(self.step(False), self.a.device, self.profile, scaling)

    def kernel(
        self, scaling: Scaling, blocks: TileShape | None = None, *, gated: bool = False, per_sm: int = 1
    ) -> Callable[[], None]:
        plan = tables(
            self.step(gated),
            device=self.a.device,
            blocks=blocks or self.best(scaling),
            source=lambda part: int(gated and part.a.rows[0] > 0),
            gate_address=lambda flag: self.words.data_ptr() + 4 * flag.index,
            count_address=lambda flag: 0,
            stored_at=None,
            need=lambda _: 1,
        )
        sources = (self.a, self.again) if gated else (self.a,)
        scale_a, scale_b = self.block_scales if scaling.recipe == "blockwise" else self.row_scales
        scales = (scale_a,) * len(sources), scale_b, scaling.recipe
        fast = scaling.use_fast_accum
        return lambda: gemm(
            sources, self.b, self.out, plan, self.status, sms=per_sm * self.sms, scales=scales, use_fast_accum=fast
        )

    def scaled_mm(self, scales: tuple[torch.Tensor, torch.Tensor], fast: bool) -> torch.Tensor:
        return torch._scaled_mm(self.a, self.b, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def blockwise_mm(self) -> torch.Tensor:
        from torch.nn.functional import ScalingType, scaled_mm

        recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        return scaled_mm(self.a, self.b, self.block_scales[0], recipes[0], self.block_scales[1], recipes[1])

    def check(self, works: Mapping[str, Callable[[], None]], expected: torch.Tensor) -> None:
        """Raises AssertionError where a method of the kernel has other results than torch."""
        for work in works.values():
            self.out.fill_(torch.nan)
            work()
            torch.testing.assert_close(self.out, expected, rtol=3e-2, atol=8e-2 * math.sqrt(self.k))
        assert self.status.tolist() == [0, 0]


def dense(size: Sequence[int], tried: Sequence[Candidate]) -> dict[str, Callable[[], object]]:
    """What is timed with rowwise scales, ready to run."""
    product = Product(*size)
    kernels = {
        "fast": product.kernel(FAST),
        "gated": product.kernel(FAST, product.best(FAST), gated=True),
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


def blockwise(size: Sequence[int], tried: Sequence[Candidate]) -> dict[str, Callable[[], object]]:
    """What is timed with blockwise scales, ready to run."""
    product = Product(*size)
    kernels = {
        "kernel": product.kernel(BLOCKWISE),
        "gated": product.kernel(BLOCKWISE, product.best(BLOCKWISE), gated=True),
    }
    for one in tried:
        if one.exact and SCALE_BLOCK % one.blocks.n == 0:
            kernels[one.text] = product.kernel(BLOCKWISE, one.blocks, per_sm=one.per_sm)
    product.check(kernels, product.blockwise_mm())
    return {"cublas_blockwise": product.blockwise_mm, **kernels}


def report(name: str, size: Sequence[int], us: dict[str, float]) -> dict[str, float]:
    """Print a line of the table. Returns the share of the fastest baseline that each method of the kernel reaches."""
    best = min(time for method, time in us.items() if method.startswith("cublas"))
    shares = {method: best / time for method, time in us.items() if not method.startswith("cublas")}
    sizes = " x ".join(map(str, size))
    print(f"{name:30} {sizes:22}", *(f"{method} {time:.1f}" for method, time in us.items()), "us;", end=" ")
    print(*(f"{method} {share:.3f}" for method, share in shares.items()), flush=True)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=appended, help="append a row for each case (rows.py)")
    parser.add_argument("--commit", default="", help="what the tree is, for the rows")
    parser.add_argument("--shapes", type=candidate, nargs="*", default=[], help="tile shapes to try, see above")
    parser.add_argument("--only", choices=("dense", "blockwise"), help="one of the two kinds of cases")
    arguments = parser.parse_args()
    named = [(f"{case.op} {case.name}", case.problem(8)) for case in CASES]
    cases = [("dense", name, (problem.m, problem.columns(0), problem.inner(0))) for name, problem in named]
    cases += [("blockwise", "blockwise", size) for size in BLOCKWISE_SIZES]
    reached: dict[tuple[str, str], list[float]] = {}
    for kind, name, size in cases:
        if arguments.only not in (None, kind):
            continue
        faulthandler.dump_traceback_later(120, exit=True)
        works = {"dense": dense, "blockwise": blockwise}[kind](size, arguments.shapes)
        us = medians({method: [work] * CALLS for method, work in works.items()}, rounds=ROUNDS)
        for method, share in report(name, size, us).items():
            reached.setdefault((kind, method), []).append(share)
        if arguments.json:
            append(
                arguments.json,
                us,
                bench="gemm_fp8",
                op=kind,
                case=name,
                extra={"shape": size},
                commit=arguments.commit,
                dtype="float8_e4m3fn",
                samples=ROUNDS,
            )
    for (kind, method), shares in reached.items():
        geomean = math.exp(statistics.fmean(map(math.log, shares)))
        print(f"{kind} {method}: {geomean:.3f} of cuBLAS (geomean of {len(shares)} cases)")


if __name__ == "__main__":
    main()
