"""How much of the communication do the tensor-parallel operators hide, on the 14 cases?

Protocol: one process a GPU; bf16, normal data; each method is captured in a CUDA graph of REPEAT calls (mode graph) or
called REPEAT times (mode eager); methods take turns round by round; a round's time is the slowest rank's, by GPU events
between two barriers; medians over ROUNDS. Baselines of the same run: sequential (torch.mm and NCCL's collective), NCCL alone,
cuBLAS alone, PyTorch's asynchronous tensor parallelism (symm_mem.fused_*). ideal = the larger of the two alone.
Traps: results are compared with sequential's before anything is timed; multicast stays off; each case gives its memory back.
NCCL here is its default algorithm on plain buffers: neither symmetric kernels nor the copy-engine policy.

    torchrun --nproc-per-node 4 benchmarks/tp.py --json benchmarks/results/tp.jsonl
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # registers torch.ops.symm_mem
from cases import CASES, Case

import weft
from weft.execute.versions import versions
from weft.problem import Problem

ROUNDS, WARM_UP, REPEAT = 11, 3, 4
SPECS = {
    "all_gather_matmul": (
        "shard_p2p",
        "hetero_unfused_1d:2",
        "hetero_fused_1d:2",
        "flag_gated:1",
        "flag_gated:2",
        "flag_gated:4",
        "track_and_trigger:1",
    ),
    "matmul_reduce_scatter": (
        "shard_p2p",
        "hetero_unfused_1d:2",
        "flag_gated:1",
        "track_and_trigger:1",
        "track_and_trigger:2",
        "direct_store:1",
    ),
}
Work = Callable[[], torch.Tensor]


def methods(problem: Problem, specs: tuple[str, ...]) -> dict[str, Work]:
    """Everything that is timed, by name."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gather = problem.op == "all_gather_matmul"
    shard = problem.m // size
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    a = torch.randn(shard if gather else problem.m, problem.inner(rank), **options)
    b = torch.randn(problem.inner(rank), problem.columns(rank), **options) * problem.k**-0.5
    full = torch.randn(problem.m, problem.inner(rank), **options)
    product = torch.empty(problem.m, problem.columns(rank), **options)
    scattered = torch.empty(shard, problem.n, **options)
    group = dist.group.WORLD
    assert group is not None

    def communicate() -> torch.Tensor:
        if gather:
            dist.all_gather_into_tensor(full, a)
            return full
        dist.reduce_scatter_tensor(scattered, product)
        return scattered

    def compute() -> torch.Tensor:
        return torch.mm(full if gather else a, b, out=product)

    def sequential() -> torch.Tensor:
        if gather:
            communicate()
            return compute()
        compute()
        return communicate()

    def async_tp() -> torch.Tensor:
        if gather:
            return torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, group.group_name)[1][0]
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, group.group_name)

    def overlapped(spec: str) -> Work:
        if gather:
            return lambda: weft.all_gather_matmul(a, b, schedule=spec)
        return lambda: weft.matmul_reduce_scatter(a, b, schedule=spec)

    found: dict[str, Work] = {
        "sequential": sequential,
        "communication": communicate,
        "computation": compute,
        "async_tp": async_tp,
    }
    return found | {spec: overlapped(spec) for spec in specs}


def check(works: dict[str, Work]) -> None:
    """Every method's result against sequential's."""
    expected = works["sequential"]().float().clone()
    for name, work in works.items():
        if name not in ("communication", "computation"):
            error = (work().float() - expected).abs().max() / expected.abs().max()
            assert float(error) < 0.03, f"{name} is off by {float(error):.3f}"


def captured(work: Work) -> Callable[[], None]:
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(REPEAT):
            work()
    return graph.replay


def repeated(work: Work) -> Callable[[], None]:
    def run() -> None:
        for _ in range(REPEAT):
            work()

    return run


def measure(works: dict[str, Work], mode: str) -> dict[str, float]:
    """Median over rounds of the slowest rank's time, in us a call."""
    runs = {name: (captured if mode == "graph" else repeated)(work) for name, work in works.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(ROUNDS + WARM_UP):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            dist.barrier()
            start.record()
            run()
            end.record()
            end.synchronize()
            if round_ >= WARM_UP:
                times[name].append(start.elapsed_time(end) * 1e3 / REPEAT)
    slowest = torch.tensor(list(times.values()), dtype=torch.float64, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {name: statistics.median(row) for name, row in zip(times, slowest.tolist(), strict=True)}


def line(case: Case, problem: Problem, mode: str, us: dict[str, float], commit: str) -> dict[str, Any]:
    specs = SPECS[problem.op]
    best = min(specs, key=lambda spec: us[spec])
    return {
        "bench": "tp",
        "op": problem.op,
        "case": case.name,
        "machine": f"{problem.world_size} x {torch.cuda.get_device_name()}",
        "versions": versions("cuda"),
        "commit": commit,
        "dtype": problem.dtype,
        "world_size": problem.world_size,
        "mode": mode,
        "schedule": best,
        "sequential_us": us["sequential"],
        "communication_us": us["communication"],
        "computation_us": us["computation"],
        "ideal_us": max(us["communication"], us["computation"]),
        "overlapped_us": us[best],
        "candidates": {spec: us[spec] for spec in specs},
        "peers": {"async_tp": us["async_tp"]},
        "samples": ROUNDS,
    }


def geomean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append a JSON line for each case and mode")
    parser.add_argument("--modes", default="graph,eager")
    parser.add_argument("--commit", default="", help="what the tree is, for the JSON lines")
    arguments = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    found: list[dict[str, Any]] = []
    for case in CASES:
        for mode in arguments.modes.split(","):
            faulthandler.dump_traceback_later(60, exit=True)
            problem = case.problem(dist.get_world_size())
            works = methods(problem, SPECS[problem.op])
            check(works)
            found.append(line(case, problem, mode, measure(works, mode), arguments.commit))
            weft.close()
            del works
            torch.cuda.empty_cache()
            dist.barrier()
            if rank == 0:
                report(found[-1], arguments.json)
    if rank == 0:
        summary(found)
    dist.destroy_process_group()


def report(row: dict[str, Any], path: Path | None) -> None:
    share = row["ideal_us"] / row["overlapped_us"]
    candidates = " ".join(f"{spec}={us:.0f}" for spec, us in row["candidates"].items())
    print(
        f"{row['op']:21} {row['case']:18} {row['mode']:5} seq {row['sequential_us']:.0f} comm {row['communication_us']:.0f} "
        f"comp {row['computation_us']:.0f} async {row['peers']['async_tp']:.0f} best {row['schedule']} "
        f"{row['overlapped_us']:.0f} ({share:.2f} of ideal) | {candidates}",
        time.strftime("%H:%M:%S"),
        flush=True,
    )
    if path:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def summary(found: list[dict[str, Any]]) -> None:
    for op in SPECS:
        for mode in ("graph", "eager"):
            rows = [r for r in found if r["op"] == op and r["mode"] == mode]
            if rows:
                share = geomean([r["ideal_us"] / r["overlapped_us"] for r in rows])
                over = geomean([r["sequential_us"] / r["overlapped_us"] for r in rows])
                peer = geomean([r["peers"]["async_tp"] / r["overlapped_us"] for r in rows])
                print(
                    f"{op} {mode}: {share:.3f} of the ideal, {over:.2f}x sequential, {peer:.2f}x async TP ({len(rows)} cases)"
                )


if __name__ == "__main__":
    main()
