"""How much faster than torch._scaled_grouped_mm does weft multiply experts' rows in FP8, on one GPU?

Protocol: six cases, each the rows that one of several ranks has for its experts, split evenly. Operands are float8_e4m3fn of
normal data with rowwise scales; results are bfloat16. Each method is captured in a CUDA graph of CALLS calls; the graphs are
replayed in turn; medians of GPU event times, in us a call.
Baselines: torch._scaled_grouped_mm with rowwise scales and fast accumulation, and torch._grouped_mm of the same rows in
bfloat16. Methods: weft.all_to_all_matmul with splits in a group of one rank (`dispatch`), and weft.matmul_all_to_all
(`combine`). Each is a whole call: a kernel that lays the rows out by their counts comes before the product, and torch's
methods do without it.
Trap: a kernel is compiled at its first call, some seconds for each.

    python -m benchmarks.grouped_fp8 --json benchmarks/results/grouped_fp8.jsonl
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import weft
from benchmarks.checked_options import appended
from benchmarks.one_gpu import append, medians

ROUNDS = 9
CALLS = 4
LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, kw_only=True)
class Case:
    """rows [rows, k] by b [experts, k, n]."""

    name: str
    rows: int
    k: int
    n: int
    experts: int


CASES = (
    Case(name="mixtral gate+up, 8 ranks", rows=16384, k=4096, n=28672, experts=1),
    Case(name="mixtral gate+up, 4 ranks", rows=8192, k=4096, n=28672, experts=2),
    Case(name="deepseek-v3 gate+up, 32 ranks", rows=8192, k=7168, n=4096, experts=8),
    Case(name="deepseek-v3 down, 32 ranks", rows=8192, k=2048, n=7168, experts=8),
    Case(name="qwen3-235b gate+up, 8 ranks", rows=8192, k=4096, n=3072, experts=16),
    Case(name="qwen3-235b gate+up, decode", rows=256, k=4096, n=3072, experts=16),
)


def quantised(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rowwise: elements, and scales [..., rows, 1]."""
    scales = matrix.abs().amax(-1, keepdim=True).float() / LARGEST
    return (matrix.float() / scales).to(torch.float8_e4m3fn), scales


def methods(case: Case, device: torch.device) -> dict[str, Callable[[], torch.Tensor]]:
    """What is timed, ready to run. The results of all of them are the same rows. device: on a CPU, for tests, weft's alone."""
    rows = torch.randn(case.rows, case.k, device=device, dtype=torch.bfloat16)
    weights = torch.randn(case.experts, case.n, case.k, device=device, dtype=torch.bfloat16)
    a, scale_a = quantised(rows)
    elements, of_columns = quantised(weights)
    b, scale_b = elements.transpose(1, 2), of_columns.transpose(1, 2).contiguous()
    each = case.rows // case.experts
    assert each * case.experts == case.rows
    splits = torch.full((1, case.experts), each, device=device, dtype=torch.int32)
    ends = torch.arange(each, case.rows + 1, each, device=device, dtype=torch.int32)
    scales = {"scale_a": scale_a, "scale_b": scale_b, "use_fast_accum": True}

    def dispatch() -> torch.Tensor:
        return weft.all_to_all_matmul(a, b, splits=splits, max_rows=case.rows, **scales)[0]

    def combine() -> torch.Tensor:
        return weft.matmul_all_to_all(a, b, splits=splits.t(), max_rows=case.rows, **scales)[0]

    found: dict[str, Callable[[], torch.Tensor]] = {"dispatch": dispatch, "combine": combine}
    if device.type == "cuda":
        flat = scale_a.view(-1), scale_b.view(case.experts, case.n)
        wide = weights.transpose(1, 2)
        found["torch_fp8"] = lambda: torch._scaled_grouped_mm(
            a, b, *flat, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        found["torch_bfloat16"] = lambda: torch._grouped_mm(rows, wide, offs=ends)
    return found


def check(case: Case, found: dict[str, Callable[[], torch.Tensor]]) -> None:
    """Raises AssertionError where a method's result is not that of dispatch, within what FP8 keeps of bfloat16."""
    expected = found["dispatch"]().float()
    for name, work in found.items():
        tolerance = 0.2 if name == "torch_bfloat16" else 2e-2
        torch.testing.assert_close(work().float(), expected, rtol=tolerance, atol=tolerance * math.sqrt(case.k), msg=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=appended, help="append a row for each case (rows.py)")
    parser.add_argument("--commit", default="", help="what the tree is, for the rows")
    arguments = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    over: dict[str, list[float]] = {}
    for case in CASES:
        faulthandler.dump_traceback_later(120, exit=True)
        found = methods(case, torch.device("cuda", 0))
        check(case, found)
        us = medians({name: [work] * CALLS for name, work in found.items()}, rounds=ROUNDS)
        ratios = {name: us["torch_fp8"] / us[name] for name in us}
        print(f"{case.name:32}", *(f"{name} {us[name]:.1f} us ({ratio:.2f}x)" for name, ratio in ratios.items()), flush=True)
        for name, ratio in ratios.items():
            over.setdefault(name, []).append(ratio)
        if arguments.json:
            append(
                arguments.json,
                us,
                bench="grouped_fp8",
                op="grouped",
                case=case.name,
                extra={"shape": [case.rows, case.n, case.k, case.experts]},
                commit=arguments.commit,
                dtype="float8_e4m3fn",
                samples=ROUNDS,
            )
        weft.close()
    for name, ratios in over.items():
        geomean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(f"{name}: {geomean:.2f}x of torch._scaled_grouped_mm (geomean of {len(ratios)} cases, worst {min(ratios):.2f}x)")
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
