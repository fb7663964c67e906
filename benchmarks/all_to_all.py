"""How much of an all-to-all do matmul_all_to_all and all_to_all_matmul hide, in even shares and with splits on the device?

Protocol: measure.py's; bf16, normal data; results are compared with sequential's before anything is timed. M k N of each rank.
Baselines of the same run: sequential (torch.mm and NCCL's all_to_all), the same by torch.compile (torch_compile), NCCL alone,
cuBLAS alone; NCCL is the fastest of its ways (collectives.py), by case and mode. ideal = the larger of NCCL alone and cuBLAS
alone.

ragged: M rows of each rank for `experts` experts of each rank, in shares drawn anew by rank, one in four twice as large.
Sequential is torch._grouped_mm and NCCL with splits that the host knows: a real program of this kind would wait for the device
to learn them. Traps: rows that land by source are regrouped by expert before a grouped matmul, which is in its time; weft's
results have max_rows = 2 M rows, of which those past the counts are zeroed, in its time.

A part of benchmarks/fused.py, which runs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

import weft
from benchmarks.collectives import Way, compiled
from benchmarks.measure import AnyProblem, Job, Work, check_of, each_mode, together, trial
from benchmarks.rows import Row
from weft.core.problem import Op, Problem

REPEAT = 3
SPECS: dict[Op, tuple[str, ...]] = {
    "matmul_all_to_all": (
        "shard_p2p",
        "hetero_unfused_1d:2",
        "track_and_trigger:1",
        "track_and_trigger:2",
        "direct_store:1",
        "sequential",
        "sequential_stores",
    ),
    "all_to_all_matmul": (
        "shard_p2p",
        "hetero_unfused_1d:2",
        "flag_gated:1",
        "flag_gated:2",
        "direct_store:1",
        "sequential",
        "sequential_stores",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A matmul of each rank: M x k x N. experts: of each rank, in a ragged one."""

    m: int
    k: int
    n: int
    experts: int = 0

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}" + (f" experts={self.experts}" if self.experts else "")

    def width(self, op: Op) -> int:
        """Columns of the rows that travel."""
        return self.n if op == "matmul_all_to_all" else self.k


EVEN = tuple(
    Case(m=m, k=k, n=n)
    for m, k, n in (
        (4096, 14336, 4096),
        (8192, 2048, 7168),
        (16384, 1536, 4096),
        (4096, 4096, 4096),
        (16384, 8192, 8192),
    )
)
RAGGED = (Case(m=8192, k=4096, n=4096, experts=2), Case(m=16384, k=2048, n=7168, experts=8))


def drawn(*extents: int) -> torch.Tensor:
    return torch.randn(*extents, device="cuda", dtype=torch.bfloat16)


def even_works(op: Op, case: Case, found: Sequence[Way], specs: Sequence[str]) -> dict[str, Work]:
    """Everything that is timed, by name (rows.py)."""
    a, b = drawn(case.m, case.k), drawn(case.k, case.n) * case.k**-0.5
    works: dict[str, Work] = {}
    for way in (way for way in found if way.runs("all_to_all")):
        sent, landed = way.shard(case.m, case.width(op)), way.whole(case.m, case.width(op))
        product = torch.empty(case.m, case.n, device="cuda", dtype=torch.bfloat16)
        if op == "matmul_all_to_all":
            works[f"sequential/{way.name}"] = partial(_product_first, way, a, b, sent, landed)
        else:
            sent.copy_(a)
            works[f"sequential/{way.name}"] = partial(_rows_first, way, sent, landed, b, product)
        works[f"communication/{way.name}"] = partial(way.all_to_all, landed, sent)
    works["computation/cublas"] = partial(torch.mm, a, b)
    works["peer/torch_compile"] = compiled(op, a, b)
    call = weft.matmul_all_to_all if op == "matmul_all_to_all" else weft.all_to_all_matmul
    return works | {f"weft/{spec}": partial(call, a, b, schedule=spec) for spec in specs}


def _product_first(way: Way, a: torch.Tensor, b: torch.Tensor, sent: torch.Tensor, landed: torch.Tensor) -> torch.Tensor:
    torch.mm(a, b, out=sent)
    return way.all_to_all(landed, sent)


def _rows_first(way: Way, sent: torch.Tensor, landed: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    way.all_to_all(landed, sent)
    return torch.mm(landed, b, out=out)


class Ragged:
    """Rows in drawn shares: counts[src_rank, dst_rank, expert], which hosts of the baseline know."""

    def __init__(self, op: Op, case: Case) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.case, self.dispatch = case, op == "all_to_all_matmul"
        self.counts = shares(case, size)
        mine = self.counts[rank] if self.dispatch else self.counts[rank].t()
        self.splits = mine.to("cuda", torch.int32).contiguous()
        self.a, self.b = drawn(case.m, case.k), drawn(case.experts, case.k, case.n) * case.k**-0.5
        self.sent, self.got = self.counts[rank].sum(1).tolist(), self.counts[:, rank].sum(1).tolist()
        arriving = self.counts[:, rank]
        self.grouped = regrouped(arriving if self.dispatch else mine)
        groups = arriving.sum(0) if self.dispatch else mine.sum(1)
        self.offsets = groups.cumsum(0).to("cuda", torch.int32)

    def exchange(self, rows: torch.Tensor) -> torch.Tensor:
        landed = rows.new_empty(sum(self.got), rows.shape[1])
        dist.all_to_all_single(landed, rows, self.got, self.sent)
        return landed

    def matmul(self, rows: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(rows, self.b, offs=self.offsets)

    def sequential(self) -> torch.Tensor:
        if self.dispatch:
            return self.matmul(self.exchange(self.a)[self.grouped])
        return self.exchange(self.matmul(self.a)[self.grouped])

    def fused(self) -> torch.Tensor:
        """As many rows as sequential has: the host reads no counts."""
        call = weft.all_to_all_matmul if self.dispatch else weft.matmul_all_to_all
        out: torch.Tensor = call(self.a, self.b, splits=self.splits, max_rows=2 * self.case.m)[0]
        return out[: sum(self.got)]

    def works(self) -> dict[str, Work]:
        travelling = drawn(self.case.m, self.case.k if self.dispatch else self.case.n)
        computed = drawn(sum(self.got) if self.dispatch else self.case.m, self.case.k)
        return {
            "sequential/default": self.sequential,
            "communication/default": lambda: self.exchange(travelling),
            "computation/cublas": lambda: self.matmul(computed),
            "weft/splits": self.fused,
        }


def shares(case: Case, size: int) -> torch.Tensor:
    """Rows by src_rank, dst_rank, expert; M of each src_rank. The same on every rank."""
    weights = torch.rand(size, size, case.experts, generator=torch.Generator().manual_seed(case.m)) + 0.5
    weights[..., ::4] *= 2
    counts = (weights / weights.sum((1, 2), keepdim=True) * case.m).long()
    counts[:, 0, 0] += case.m - counts.sum((1, 2))
    return counts


def regrouped(counts: torch.Tensor) -> torch.Tensor:
    """The order that takes rows which lie by counts' (first, second) to (second, first)."""
    first, second = counts.shape
    pieces = torch.arange(int(counts.sum())).split(counts.flatten().tolist())  # type: ignore[no-untyped-call]
    return torch.cat([pieces[i * second + j] for j in range(second) for i in range(first)]).cuda()


def rows_of(
    op: Op,
    case: object,
    make: Callable[[], Mapping[str, Work]],
    arguments: argparse.Namespace,
    problem: AnyProblem | None = None,
) -> list[Row]:
    """One case in every mode. make: what is timed; called first, since it takes memory."""
    torch.manual_seed(dist.get_rank())
    works = make()
    expected = together("sequential/default", works["sequential/default"])
    times, missing = trial(
        works,
        arguments.modes.split(","),
        check=check_of(expected.float()),  # type: ignore[attr-defined]
        needed=("sequential/default", "communication/default", "computation/cublas"),
        rounds=arguments.rounds,
        repeat=REPEAT,
    )
    chosen = weft.choices()[-1].spec if "weft/auto" in works and "weft/auto" not in missing else None
    return each_mode(
        times,
        bench="all_to_all",
        op=op,
        case=str(case),
        problem=problem,
        dtype="bfloat16",
        chosen=chosen,
        missing=missing,
        arguments=arguments,
    )


def jobs(op: Op, cases: Sequence[Case], specs: Sequence[str], found: Sequence[Way], arguments: argparse.Namespace) -> list[Job]:
    """Cases of one operator to measure. Ragged cases have one way alone, and no problem that the host knows."""
    made = []
    for case in cases:
        make = partial(_ragged_works, op, case) if case.experts else partial(even_works, op, case, found, specs)
        problem = None if case.experts else Problem(op=op, m=case.m, n=case.n, k=case.k, world_size=dist.get_world_size())
        made.append(Job(name=f"{op} {case}", run=partial(rows_of, op, case, make, arguments, problem)))
    return made


def _ragged_works(op: Op, case: Case) -> dict[str, Work]:
    return Ragged(op, case).works()
