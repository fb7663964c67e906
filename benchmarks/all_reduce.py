"""How much faster than a matmul and an all-reduce is matmul_all_reduce, where a decode step has few rows?

Protocol: measure.py's; bf16, normal data, weights as linear layers keep them (b = weight.t()). Cases: K x N of each rank, by
batch. Baselines of the same run: torch.mm, then NCCL in each of its ways (default; symmetric kernels on registered buffers)
or one of PyTorch's symmetric-memory all-reduces (one_shot_all_reduce, two_shot_all_reduce_), which reduce what torch.mm has
left in symmetric memory; the same by torch.compile; and torch.mm alone. `sequential_us` is torch.mm + NCCL's default,
`best_us` the fastest baseline of all.

Traps: multicast stays off, so PyTorch's multimem all-reduces are not among them. Calls follow each other on one weight: of what
a cache keeps of it every method profits alike. Baselines reduce in place and in registered memory, which favours them. A
kernel is compiled for each tile shape at its first call, some seconds.

A part of benchmarks/fused.py, which runs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from collectives import Way, compiled
from measure import Job, Times, Work, close_to, geomean, row, together, trial

import weft
from weft.core.problem import Problem

REPEAT = 20
CASES = ((3584, 8192), (1024, 8192), (6656, 16384), (8192, 8192))
"""K and N of each rank."""
BATCHES = (1, 8, 32, 64, 128)
SPECS = ("one_shot", "two_shot", "sequential", "sequential_stores")
FLOAT8 = ("one_shot", "two_shot", "sequential_stores", "auto")
"""Schedules of FP8 operands."""
TORCH = ("one_shot", "two_shot")
"""PyTorch's symmetric-memory all-reduces."""


class Site:
    """One case on this rank: its tensors, and every method that is timed."""

    def __init__(self, problem: Problem) -> None:
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        inner = problem.inner(dist.get_rank())
        self.problem = problem
        self.a = torch.randn(problem.m, inner, **options)
        self.b = (torch.randn(problem.n, inner, **options) * problem.k**-0.5).t()
        self.product = torch.empty(problem.m, problem.n, **options)
        group = dist.group.WORLD
        assert group is not None
        self.group = group.group_name

    def works(self, found: Sequence[Way], specs: Sequence[str]) -> dict[str, Work]:
        """Everything that is timed, by name: baselines as `mm + NAME`."""
        works: dict[str, Work] = {"mm": lambda: torch.mm(self.a, self.b, out=self.product)}
        works |= {f"mm + {way.name}": self._nccl(way) for way in found}
        works |= {f"mm + torch {kind}": self._torch(kind) for kind in TORCH}
        works["mm + torch.compile"] = compiled(self.problem.op, self.a, self.b)
        return works | {spec: self._weft(spec) for spec in specs} | {f"float8 {spec}": self._float8(spec) for spec in FLOAT8}

    def _nccl(self, way: Way) -> Work:
        whole = way.whole(self.problem.m, self.problem.n)

        def run() -> torch.Tensor:
            torch.mm(self.a, self.b, out=whole)
            dist.all_reduce(whole, group=way.group)
            return whole

        return run

    def _torch(self, kind: str) -> Work:
        whole = symmetric_memory.empty((self.problem.m, self.problem.n), device=torch.device("cuda"), dtype=torch.bfloat16)
        symmetric_memory.rendezvous(whole, self.group)

        def one_shot() -> object:
            torch.mm(self.a, self.b, out=whole)
            return torch.ops.symm_mem.one_shot_all_reduce(whole, "sum", self.group)

        def two_shot() -> object:
            torch.mm(self.a, self.b, out=whole)
            return torch.ops.symm_mem.two_shot_all_reduce_(whole, "sum", self.group)

        return one_shot if kind == "one_shot" else two_shot

    def _weft(self, spec: str) -> Work:
        return lambda: weft.matmul_all_reduce(self.a, self.b, schedule=spec)

    def _float8(self, spec: str) -> Work:
        """The same of operands of float8_e4m3fn with rowwise scales."""
        (a, scale_a), (b, scale_b) = quantised(self.a), quantised(self.b.t())
        scales: dict[str, Any] = {"scale_a": scale_a, "scale_b": scale_b.t(), "use_fast_accum": True}
        return lambda: weft.matmul_all_reduce(a, b.t(), schedule=spec, **scales)


def quantised(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as float8_e4m3fn, and their scales."""
    scales = matrix.abs().amax(1, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max
    return (matrix.float() / scales).to(torch.float8_e4m3fn), scales


def jobs(
    cases: Sequence[tuple[int, int, int]], specs: Sequence[str], found: Sequence[Way], arguments: argparse.Namespace
) -> list[Job]:
    """K and N of each rank, and rows, as cases to measure."""
    made = []
    for inner, columns, batch in cases:
        run = partial(measured, (inner, columns), batch, specs, found, arguments)
        made.append(Job(name=f"matmul_all_reduce {_name(inner, columns, batch)}", run=run))
    return made


def _name(inner: int, columns: int, batch: int) -> str:
    return f"{inner}x{columns} batch={batch}"


def measured(
    case: tuple[int, int], batch: int, specs: Sequence[str], found: Sequence[Way], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """One case in every mode: its JSON lines."""
    torch.manual_seed(dist.get_rank())
    (inner, columns), size = case, dist.get_world_size()
    problem = Problem(op="matmul_all_reduce", m=batch, n=columns, k=inner * size, world_size=size)
    site = Site(problem)
    works = site.works([way for way in found if way.runs("all_reduce")], specs)
    expected = together("mm + default", works["mm + default"])
    compare = close_to(expected.float())  # type: ignore[attr-defined]

    def check(name: str, result: object) -> None:
        if name != "mm" and not name.startswith("float8"):
            compare(name, result)  # type: ignore[arg-type]

    needed = ("mm", "mm + default")
    times, missing = trial(
        works, arguments.modes.split(","), check=check, needed=needed, rounds=arguments.rounds, repeat=REPEAT
    )
    plain = [choice.spec for choice in weft.choices() if choice.problem.scaling is None]
    chosen = plain[-1] if plain else None
    name = _name(inner, columns, batch)
    lines = []
    for mode, us in times.items():
        line = row(bench="fused", op=problem.op, case=name, dtype=problem.dtype, mode=mode, arguments=arguments)
        lines.append(line | figures(us, mode, specs) | {"chosen": chosen, "missing": missing})
    return lines


def figures(times: Mapping[str, Times], mode: str, specs: Sequence[str]) -> dict[str, Any]:
    """What one case's times say."""
    us = {method: t.us for method, t in times.items()}
    peers = {name.removeprefix("mm + "): us[name] for name in us if name.startswith("mm + ")}
    candidates = {spec: us[spec] for spec in specs if spec in us and spec != "auto"}
    float8 = {spec: us[f"float8 {spec}"] for spec in FLOAT8 if f"float8 {spec}" in us}
    best, rival = min(candidates, key=candidates.__getitem__, default=None), min(peers, key=peers.__getitem__)
    line = {
        "schedule": best,
        "sequential_us": peers["default"],
        "computation_us": us["mm"],
        "communication_us": peers[rival] - us["mm"],
        "ideal_us": us["mm"],
        "overlapped_us": candidates[best] if best else None,
        "auto_us": us.get("auto"),
        "best": rival,
        "best_us": peers[rival],
        "candidates": candidates,
        "float8": float8,
        "peers": peers,
    }
    if mode == "eager":
        line["host_us"] = {method: t.host_us for method, t in times.items()}
    return line


def sentence(line: Mapping[str, Any]) -> str:
    """One case on one line."""
    ours = " ".join(f"{spec}={us:.1f}" for spec, us in line["candidates"].items())
    peers = " ".join(f"{name}={us:.1f}" for name, us in line["peers"].items())
    auto = "" if line["auto_us"] is None else f" auto={line['auto_us']:.1f} ({line['chosen']})"
    narrow = " ".join(f"{spec}={us:.1f}" for spec, us in line["float8"].items())
    ratios = " ".join(f"{_over(line, key):.2f}x over {key.removesuffix('_us')}" for key in ("sequential_us", "best_us"))
    bfloat16 = f"mm {line['computation_us']:.1f} | {ours}{auto} | mm + {peers}"
    return f"{line['case']:22} {line['mode']:5} {bfloat16} | float8 {narrow} | {ratios}"


def _over(line: Mapping[str, Any], key: str) -> float:
    return float(line[key] / line["overlapped_us"]) if line["overlapped_us"] else float("nan")


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """Geometric means by mode, of small batches and of large ones, and the worst case."""
    told = []
    for mode in dict.fromkeys(line["mode"] for line in lines):
        for what, low, high in (("batch 1 to 32", 1, 32), ("batch 64 and more", 64, 1 << 30)):
            rows = [r for r in lines if r["mode"] == mode and r["overlapped_us"] and low <= _batch(r) <= high]
            for key in ("sequential_us", "best_us"):
                ratios = [_over(line, key) for line in rows]
                if ratios:
                    against = f"{key.removesuffix('_us')}: {geomean(ratios):.3f}x, worst {min(ratios):.3f}x"
                    told.append(f"{mode}, {what}, {len(rows)} cases, over {against}")
    return "\n".join(told)


def _batch(line: Mapping[str, Any]) -> int:
    return int(line["case"].rpartition("=")[2])
