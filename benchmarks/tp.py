"""How much of the communication do the tensor-parallel operators hide, on the 14 cases?

Protocol: measure.py's; bf16, normal data; results are compared with sequential's before anything is timed. Baselines of the
same run: sequential (torch.mm and NCCL's collective), NCCL alone, cuBLAS alone, the sequential program by torch.compile
(torch_compile), PyTorch's asynchronous tensor parallelism (async_tp: symm_mem.fused_*). NCCL, alone and in sequential, is the
fastest of its ways (collectives.py), by case and mode. ideal = the larger of NCCL alone and cuBLAS alone. Of FP8 operands,
which have rowwise scales and fast accumulation, cuBLAS alone is the faster of rowwise and tensorwise products, and
`quantised/...` compare an a of bfloat16 that weft quantises on its way with a compiled quantisation before sequential. Traps:
multicast stays off, so async TP is always asked for the gathered a: without that it may take multimem kernels for small M; each
case gives its memory back; registered buffers are used in place, which favours NCCL; host time of weft includes that ranks meet
at each call, that of the others does not.

    torchrun --nproc-per-node 4 -m benchmarks.tp --json benchmarks/results/tp.jsonl
    torchrun --nproc-per-node 2 -m benchmarks.tp --dtype float8_e4m3fn --json benchmarks/results/tp_fp8.jsonl
    torchrun --nproc-per-node 4 -m benchmarks.tp --cases M=512 --ops matmul_reduce_scatter --specs direct_store:1,flag_gated:2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # registers torch.ops.symm_mem

import weft
from benchmarks.cases import CASES, Case
from benchmarks.collectives import REGISTERED, Way, compiled, ways
from benchmarks.measure import ALONE, Failed, Job, Work, check_of, each_mode, parser, start, stop, together, trial
from benchmarks.parts import run_jobs
from benchmarks.rows import Row, summary
from weft import schedules
from weft.core.problem import Problem

ROUNDS = 11
REPEAT, REPEAT_LONG = 4, 2
FLOAT8 = torch.float8_e4m3fn
LONG_FLOPS = 8e11
"""A rank's matmul of about 1 ms: fewer calls are enough."""
SPECS = {
    "all_gather_matmul": (
        "shard_p2p",
        "hetero_unfused_1d:2",
        "flag_gated:1",
        "flag_gated:2",
        "track_and_trigger:1",
        "direct_store:1",
        "sequential",
        "sequential_stores",
        "flag_gated_2d:4",
    ),
    "matmul_reduce_scatter": (
        "shard_p2p",
        "hetero_unfused_1d:2",
        "track_and_trigger:1",
        "track_and_trigger:2",
        "track_and_trigger:4",
        "direct_store:1",
        "sequential",
        "sequential_stores",
    ),
}


class Site:
    """One case on this rank: its tensors, and every method that is timed."""

    def __init__(self, problem: Problem) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.problem, self.gather = problem, problem.op == "all_gather_matmul"
        self.shard_rows, rows = problem.m // size, problem.m
        inner, columns = problem.inner(rank), problem.columns(rank)
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.a = torch.randn(self.shard_rows if self.gather else rows, inner, **options)
        self.b = torch.randn(inner, columns, **options) * problem.k**-0.5
        self.product = torch.empty(rows, columns, **options)

    def works(self, found: Sequence[Way], specs: Sequence[str]) -> dict[str, Work]:
        """Everything that is timed, by name (rows.py)."""
        works: dict[str, Work] = {}
        for way in found:
            if way.runs("all_gather" if self.gather else "reduce_scatter"):
                works |= self._gathers(way) if self.gather else self._scatters(way)
        works["peer/async_tp"] = self._async_tp
        works["peer/torch_compile"] = compiled(self.problem.op, self.a, self.b)
        return works | {f"weft/{spec}": self.overlapped(spec) for spec in (*specs, "auto")}

    def _gathers(self, way: Way) -> dict[str, Work]:
        shard = way.shard(*self.a.shape).copy_(self.a)
        whole = way.whole(self.problem.m, self.a.shape[1])

        def sequential() -> torch.Tensor:
            way.all_gather(whole, shard)
            return torch.mm(whole, self.b, out=self.product)

        works: dict[str, Work] = {f"sequential/{way.name}": sequential}
        works[f"communication/{way.name}"] = lambda: way.all_gather(whole, shard)
        if way.name == "default":
            works["computation/cublas"] = lambda: torch.mm(whole, self.b, out=self.product)
        return works

    def _scatters(self, way: Way) -> dict[str, Work]:
        shard = way.shard(self.shard_rows, self.b.shape[1])
        whole = way.whole(*self.product.shape)

        def sequential() -> torch.Tensor:
            torch.mm(self.a, self.b, out=whole)
            return way.reduce_scatter(shard, whole)

        works: dict[str, Work] = {f"sequential/{way.name}": sequential}
        works[f"communication/{way.name}"] = lambda: way.reduce_scatter(shard, whole)
        if way.name == "default":
            works["computation/cublas"] = lambda: torch.mm(self.a, self.b, out=whole)
        return works

    def _async_tp(self) -> torch.Tensor:
        group = dist.group.WORLD
        assert group is not None
        if self.gather:
            outs: list[torch.Tensor] = torch.ops.symm_mem.fused_all_gather_matmul(self.a, [self.b], 0, group.group_name)[1]
            return outs[0]
        out: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(self.a, self.b, "sum", 0, group.group_name)
        return out

    def overlapped(self, spec: str) -> Work:
        if self.gather:
            return lambda: weft.all_gather_matmul(self.a, self.b, schedule=spec)
        return lambda: weft.matmul_reduce_scatter(self.a, self.b, schedule=spec)


class Float8Site(Site):
    """The same with operands of float8_e4m3fn, rowwise scales and fast accumulation. NCCL gathers rows, then their scales."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.given = self.a
        self.a, self.scale_a = self._quantised(self.a)
        rows, scales = self._quantised(self.b.t().contiguous())
        self.b, self.scale_b = rows.t(), scales.t()
        self.scales = self.scale_a.new_empty(problem.m, 1) if self.gather else self.scale_a

    @staticmethod
    def _quantised(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = matrix.abs().amax(1, keepdim=True).float() / torch.finfo(FLOAT8).max
        return (matrix.float() / scales).to(FLOAT8), scales

    def works(self, found: Sequence[Way], specs: Sequence[str]) -> dict[str, Work]:
        works = super().works(found, specs)
        del works["peer/torch_compile"]
        works["computation/tensorwise"] = self._tensorwise
        if self.gather:
            quantise = torch.compile(self._quantised, dynamic=False, fullgraph=True)
            after = works["sequential/default"]
            call = partial(weft.all_gather_matmul, scale_b=self.scale_b, use_fast_accum=True)
            works["quantised/sequential"] = lambda: (quantise(self.given), after())[1]
            works["quantised/auto"] = lambda: call(self.given, self.b)
        return works

    def _multiply(self, a: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        scales = self.scales, self.scale_b
        return torch._scaled_mm(a, self.b, *scales, out_dtype=out.dtype, use_fast_accum=True, out=out)

    def _tensorwise(self) -> torch.Tensor:
        a = self.a if not self.gather else self.a.new_empty(self.problem.m, self.a.shape[1])
        one = self.scale_a[:1]
        return torch._scaled_mm(a, self.b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True, out=self.product)

    def _gathers(self, way: Way) -> dict[str, Work]:
        shard = way.shard(self.a.shape[0], self.a.shape[1] // 2).view(torch.uint8).copy_(self.a.view(torch.uint8))
        whole = way.whole(self.problem.m, self.a.shape[1] // 2).view(torch.uint8)

        def gather() -> None:
            way.all_gather(whole, shard)
            dist.all_gather_into_tensor(self.scales, self.scale_a)

        def sequential() -> torch.Tensor:
            gather()
            return self._multiply(whole.view(FLOAT8), self.product)

        works: dict[str, Work] = {f"sequential/{way.name}": sequential, f"communication/{way.name}": gather}
        if way.name == "default":
            works["computation/cublas"] = lambda: self._multiply(whole.view(FLOAT8), self.product)
        return works

    def _scatters(self, way: Way) -> dict[str, Work]:
        shard = way.shard(self.shard_rows, self.b.shape[1])
        whole = way.whole(*self.product.shape)

        def sequential() -> torch.Tensor:
            return way.reduce_scatter(shard, self._multiply(self.a, whole))

        works: dict[str, Work] = {f"sequential/{way.name}": sequential}
        works[f"communication/{way.name}"] = lambda: way.reduce_scatter(shard, whole)
        if way.name == "default":
            works["computation/cublas"] = lambda: self._multiply(self.a, whole)
        return works

    def _async_tp(self) -> torch.Tensor:
        group = dist.group.WORLD
        assert group is not None
        ops, name = torch.ops.symm_mem, group.group_name
        if self.gather:
            scales, dtypes = [self.scale_b], [torch.bfloat16]
            call = ops.fused_all_gather_scaled_matmul
            outs: list[torch.Tensor] = call(self.a, [self.b], self.scale_a, scales, 0, name, [None], [None], dtypes, [True])[1]
            return outs[0]
        shape = [self.problem.m, self.b.shape[1]]
        scatter = partial(ops.fused_scaled_matmul_reduce_scatter, out_dtype=torch.bfloat16, use_fast_accum=True)
        out: torch.Tensor = scatter(self.a, self.b, self.scale_a, self.scale_b, "sum", 0, 0, name, shape)
        return out

    def overlapped(self, spec: str) -> Work:
        call = weft.all_gather_matmul if self.gather else weft.matmul_reduce_scatter
        scales: dict[str, Any] = {"scale_a": self.scale_a, "scale_b": self.scale_b, "use_fast_accum": True}
        return lambda: call(self.a, self.b, schedule=spec, **scales)


SITES = {"bfloat16": Site, "float8_e4m3fn": Float8Site}


def chosen(site: Site) -> str | None:
    """What "auto" stands for at this site, after a call of it."""
    group = dist.group.WORLD
    assert group is not None
    try:
        together("auto", site.overlapped("auto"))
    except Failed:
        return None
    scalings = ((choice.problem.scaling, choice.spec) for choice in weft.choices(group)[::-1])
    return next(spec for scaling, spec in scalings if not (scaling and scaling.quantises))


def measured(case: Case, found: Sequence[Way], arguments: argparse.Namespace) -> list[Row]:
    """One case in every mode."""
    torch.manual_seed(dist.get_rank())
    problem = case.problem(dist.get_world_size())
    asked = arguments.specs.split(",") if arguments.specs else SPECS[problem.op]
    specs = [spec for spec in asked if spec.partition(":")[0] in schedules.names(problem.op)]
    if arguments.dtype != "bfloat16":
        specs = [spec for spec in specs if spec.partition(":")[0] not in schedules.CUT_COLUMNS]
    site = SITES[arguments.dtype](problem)
    works = site.works(found, specs)
    expected = together("sequential/default", works["sequential/default"])
    times, missing = trial(
        works,
        arguments.modes.split(","),
        check=check_of(expected.float(), apart=(*ALONE, "quantised/")),  # type: ignore[attr-defined]
        needed=("sequential/default", "communication/default", "computation/cublas"),
        rounds=arguments.rounds,
        repeat=REPEAT if problem.flops < LONG_FLOPS else REPEAT_LONG,
    )
    return each_mode(
        times,
        bench="tp",
        op=problem.op,
        case=case.name,
        problem=problem,
        dtype=arguments.dtype,
        chosen=chosen(site) if "weft/auto" not in missing else None,
        missing=missing,
        arguments=arguments,
    )


def chosen_cases(arguments: argparse.Namespace) -> list[Case]:
    """The cases that are asked for. Raises ValueError where there is none."""
    wanted = arguments.cases.split(",")
    found = [case for case in CASES if any(w in case.name for w in wanted) and case.op in arguments.ops.split(",")]
    if not found:
        names = ", ".join(dict.fromkeys(case.name for case in CASES))
        raise ValueError(
            f"--cases {arguments.cases!r} --ops {arguments.ops!r}: no such case; there are {names} of {', '.join(SPECS)}"
        )
    return found


def windows(cases: Sequence[Case], world_size: int) -> tuple[int, int]:
    """Bytes of the largest shard and of the largest whole that the cases gather or scatter."""
    shard_bytes = max(case.problem(world_size).shard_bytes for case in cases)
    return shard_bytes, shard_bytes * world_size


def main() -> None:
    options = parser(__doc__, rounds=ROUNDS)
    options.add_argument("--cases", default="", help="only cases whose name contains one of these, with commas")
    options.add_argument("--ops", default=",".join(SPECS), help="only these operators (%(default)s)")
    options.add_argument("--specs", default="", help="schedules to try beside auto, each where its operator has it")
    options.add_argument("--dtype", choices=SITES, default="bfloat16", help="of the operands (%(default)s)")
    options.add_argument("--nccl", default=",".join(REGISTERED), help="NCCL's ways beside the default (%(default)s)")
    arguments = options.parse_args()
    cases = chosen_cases(arguments)
    for spec in filter(None, arguments.specs.split(",")):
        schedules.parse(spec)
    start()
    found, missing = ways(arguments.nccl, *windows(cases, dist.get_world_size()))
    jobs = [Job(name=f"{case.op} {case.name}", run=partial(measured, case, found, arguments)) for case in cases]
    lines, left_out = run_jobs(jobs, arguments, missing=missing)
    if dist.get_rank() == 0:
        print(summary(lines))
    for way in found:
        way.close()
    stop(left_out)


if __name__ == "__main__":
    main()
