"""How close is the fused GEMM kernel to cuBLAS, alone on one GPU?

Protocol: the local matmul of each of the 14 cases as one of 8 ranks has it, bf16, normal data; every method in a CUDA
graph of its own, replayed in turn round by round; medians of GPU event times. Baseline: torch.mm (cuBLAS). Methods: the
kernel plain; with open gates (a part for each eighth of the rows, all but the first from a second tensor); with counts; with
open gates between eight slices of K, too, for all parts but the first. Gated ones have the plain kernel's tile shape.
Traps: outputs and inputs are larger than the L2 cache in all but the smallest cases; the first rounds are thrown away.

    python -m benchmarks.gemm --json benchmarks/results/gemm.jsonl
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import statistics
from collections.abc import Callable

import torch

from benchmarks.cases import CASES, Case
from benchmarks.checked_options import appended
from benchmarks.one_gpu import append, medians
from weft.core.schedule import Flag, Gemm, Part, Region, Wait
from weft.kernels.gemm import fits, gemm, tables
from weft.kernels.shapes import SHAPES, TileShape, blocks_for
from weft.runtime.nearest import nearest_profile
from weft.schedules.builder import aligned_slices

CALLS, ROUNDS = 3, 12


def methods(case: Case, shapes: bool) -> dict[str, Callable[[], None]]:
    """What is timed, ready to run."""
    problem = case.problem(8)
    m, n, k = problem.m, problem.columns(0), problem.inner(0)
    device = torch.device("cuda")
    a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    b = torch.randn(k, n, device=device, dtype=torch.bfloat16)
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    assert fits(a, b)
    words = torch.ones(64, device=device, dtype=torch.int32)
    status = torch.zeros(2, device=device, dtype=torch.int32)
    sms, profile = torch.cuda.get_device_properties(device).multi_processor_count, nearest_profile(device)

    def step(gates: bool, counts: bool, parts: int, slices: int) -> Gemm:
        inner = tuple((low, Wait(Flag("open", 0, 16 + i))) for i, (low, _) in enumerate(aligned_slices(k, slices)[1:]))
        rows = [(i * m // parts, (i + 1) * m // parts) for i in range(parts)]
        made = [
            Part(
                Region("a", 0, r, (0, k)),
                Region("out", 0, r, (0, n)),
                (Wait(Flag("open", 0, i)),) if gates else (),
                Flag("made", 0, i) if counts else None,
                inner=inner if i else (),
            )
            for i, r in enumerate(rows)
        ]
        return Gemm(Region("b", 0, (0, k), (0, n)), tuple(made))

    def kernel(
        gates: bool, counts: bool, parts: int, blocks: TileShape | None = None, split: bool = False, slices: int = 1
    ) -> Callable[[], None]:
        sources = (a, a.clone()) if split else (a,)
        plan = tables(
            step(gates, counts, parts, slices),
            device=device,
            blocks=blocks or blocks_for(step(gates, counts, parts, slices), device, profile),
            source=lambda part: int(split and part.a.rows[0] > 0),
            gate_address=lambda flag: words.data_ptr() + 4 * flag.index,
            count_address=lambda flag: words.data_ptr() + 4 * (flag.index + 32),
            stored_at=None,
            need=lambda _: 1,
        )
        return lambda: gemm(sources, b, out, plan, status, sms=sms)

    def check() -> None:
        reference = torch.mm(a, b)
        for name in list(found)[1:]:
            out.zero_()
            found[name]()
            torch.testing.assert_close(out, reference, rtol=2e-2, atol=2e-2 * math.sqrt(k))

    # Gates that are open do not ask for the tile shape that is best where chunks arrive late.
    alike = blocks_for(step(False, False, 1, 1), device, profile)
    found = {
        "cublas": lambda: torch.mm(a, b, out=out),
        "kernel": kernel(False, False, 1),
        "gated": kernel(True, False, 8, alike, split=True),
        "counted": kernel(False, True, 8),
        "sliced": kernel(True, False, 8, alike, split=True, slices=8),
    }
    for blocks in SHAPES if shapes else ():
        found[f"{blocks.m}x{blocks.n}"] = kernel(False, False, 1, blocks)
    check()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=appended, help="append a row for each case (rows.py)")
    parser.add_argument("--commit", default="", help="what the tree is, for the rows")
    parser.add_argument("--shapes", action="store_true", help="also each tile shape by itself")
    arguments = parser.parse_args()
    ratios: dict[str, list[float]] = {"kernel": [], "gated": [], "counted": [], "sliced": []}
    for case in CASES:
        faulthandler.dump_traceback_later(60, exit=True)
        works = methods(case, arguments.shapes)
        us = medians({name: [work] * CALLS for name, work in works.items()}, rounds=ROUNDS)
        for name, values in ratios.items():
            values.append(us["cublas"] / us[name])
        print(f"{case.op:22} {case.name:18}", *(f"{name} {value:.0f} us" for name, value in us.items()), flush=True)
        if arguments.json:
            problem = case.problem(8)
            append(
                arguments.json,
                us,
                bench="gemm",
                op=case.op,
                case=case.name,
                extra={"shape": [problem.m, problem.columns(0), problem.inner(0)]},
                commit=arguments.commit,
                dtype="bfloat16",
                samples=ROUNDS,
            )
    for name, values in ratios.items():
        print(f"{name}: {math.exp(statistics.fmean(map(math.log, values))):.3f} of cuBLAS (geomean of {len(values)} cases)")


if __name__ == "__main__":
    main()
