"""How much faster than a matmul and an all-reduce is matmul_all_reduce, where a decode step has few rows?

Protocol: measure.py's; bf16, normal data, weights as linear layers keep them (b = weight.t()). Cases: K x N of each rank, by
batch. Baselines of the same run: torch.mm, then NCCL in each of its ways (default; symmetric kernels on registered buffers)
or one of PyTorch's symmetric-memory all-reduces (one_shot_all_reduce, two_shot_all_reduce_), which reduce what torch.mm has
left in symmetric memory; the same by torch.compile; and torch.mm alone.

Traps: multicast stays off, so PyTorch's multimem all-reduces are not among them. Calls follow each other on one weight: of what
a cache keeps of it every method profits alike. Baselines reduce in place and in registered memory, which favours them. A
kernel is compiled for each tile shape at its first call, some seconds.

A part of benchmarks/fused.py, which runs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

import weft
from benchmarks.collectives import Way, compiled
from benchmarks.measure import ALONE, Job, Work, check_of, each_mode, together, trial
from benchmarks.rows import Row
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
        """Everything that is timed, by name (rows.py)."""
        works: dict[str, Work] = {"computation/cublas": lambda: torch.mm(self.a, self.b, out=self.product)}
        works |= {f"sequential/{way.name}": self._nccl(way) for way in found}
        works |= {f"peer/torch {kind}": self._torch(kind) for kind in TORCH}
        works["peer/torch_compile"] = compiled(self.problem.op, self.a, self.b)
        works |= {f"weft/{spec}": self._weft(spec) for spec in specs}
        return works | {f"float8/{spec}": self._float8(spec) for spec in FLOAT8}

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
) -> list[Row]:
    """One case in every mode."""
    torch.manual_seed(dist.get_rank())
    (inner, columns), size = case, dist.get_world_size()
    problem = Problem(op="matmul_all_reduce", m=batch, n=columns, k=inner * size, world_size=size)
    site = Site(problem)
    works = site.works([way for way in found if way.runs("all_reduce")], specs)
    expected = together("sequential/default", works["sequential/default"])
    times, missing = trial(
        works,
        arguments.modes.split(","),
        check=check_of(expected.float(), apart=(*ALONE, "float8/")),  # type: ignore[attr-defined]
        needed=("computation/cublas", "sequential/default"),
        rounds=arguments.rounds,
        repeat=REPEAT,
    )
    plain = [choice.spec for choice in weft.choices() if choice.problem.scaling is None]
    return each_mode(
        times,
        bench="all_reduce",
        op=problem.op,
        case=_name(inner, columns, batch),
        problem=problem,
        dtype=problem.dtype,
        chosen=plain[-1] if plain else None,
        missing=missing,
        arguments=arguments,
    )
