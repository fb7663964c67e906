"""How much of an all-to-all do matmul_all_to_all and all_to_all_matmul hide, in even shares and with splits on the device?

Protocol: measure.py's; bf16, normal data; results are compared with sequential's before anything is timed. M k N of each rank.
Baselines of the same run: sequential (torch.mm and NCCL's all_to_all), the same by torch.compile (torch_compile), NCCL alone,
cuBLAS alone; NCCL is the fastest of its ways (collectives.py), by case and mode. ideal = the larger of NCCL alone and cuBLAS
alone. overlapped = the best of the schedules that are named; auto = weft's own choice.

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
from typing import Any

import torch
import torch.distributed as dist
from collectives import Way, compiled
from measure import Job, Times, Work, check_of, geomean, row, together, trial

import weft
from weft.core.problem import Op

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
    """Everything that is timed, by name: NCCL's ways as `sequential NAME` and `communication NAME`."""
    a, b = drawn(case.m, case.k), drawn(case.k, case.n) * case.k**-0.5
    works: dict[str, Work] = {}
    for way in (way for way in found if way.runs("all_to_all")):
        sent, landed = way.shard(case.m, case.width(op)), way.whole(case.m, case.width(op))
        product = torch.empty(case.m, case.n, device="cuda", dtype=torch.bfloat16)
        if op == "matmul_all_to_all":
            works[f"sequential {way.name}"] = partial(_product_first, way, a, b, sent, landed)
        else:
            sent.copy_(a)
            works[f"sequential {way.name}"] = partial(_rows_first, way, sent, landed, b, product)
        works[f"communication {way.name}"] = partial(way.all_to_all, landed, sent)
    works["computation"] = partial(torch.mm, a, b)
    works["torch_compile"] = compiled(op, a, b)
    call = weft.matmul_all_to_all if op == "matmul_all_to_all" else weft.all_to_all_matmul
    return works | {spec: partial(call, a, b, schedule=spec) for spec in specs}


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
            "sequential default": self.sequential,
            "communication default": lambda: self.exchange(travelling),
            "computation": lambda: self.matmul(computed),
            "splits": self.fused,
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


def lines_of(
    op: Op, case: Case, make: Callable[[], Mapping[str, Work]], specs: Sequence[str], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """One case in every mode: its JSON lines. make: what is timed; called first, since it takes memory."""
    torch.manual_seed(dist.get_rank())
    works = make()
    expected = together("sequential default", works["sequential default"])
    times, missing = trial(
        works,
        arguments.modes.split(","),
        check=check_of(expected.float(), apart=("communication", "computation")),  # type: ignore[attr-defined]
        needed=("sequential default", "communication default", "computation"),
        rounds=arguments.rounds,
        repeat=REPEAT,
    )
    chosen = weft.choices()[-1].spec if "auto" in works and "auto" not in missing else None
    lines = []
    for mode, us in times.items():
        line = row(bench="all_to_all", op=op, case=str(case), dtype="bfloat16", mode=mode, arguments=arguments)
        told = figures(us, [spec for spec in specs if spec in us and spec != "auto"])
        lines.append(line | told | {"chosen": chosen, "missing": missing})
    return lines


def figures(times: Mapping[str, Times], specs: Sequence[str]) -> dict[str, Any]:
    """What one case's times say. A method that is missing has no figure."""
    us = {method: t.us for method, t in times.items()}

    def least(prefix: str) -> float:
        return min(value for method, value in us.items() if method.startswith(prefix))

    best = min(specs, key=lambda spec: us[spec], default=None)
    return {
        "schedule": best,
        "sequential_us": least("sequential "),
        "communication_us": least("communication "),
        "computation_us": us["computation"],
        "ideal_us": max(least("communication "), us["computation"]),
        "overlapped_us": us[best] if best else None,
        "auto_us": us.get("auto"),
        "candidates": {spec: us[spec] for spec in specs},
        "peers": {name: value for name, value in us.items() if " " in name or name == "torch_compile"},
        "host_us": {name: t.host_us for name, t in times.items() if name in ("auto", "splits", "torch_compile", best)},
    }


def sentence(line: Mapping[str, Any]) -> str:
    """One case on one line, as it is measured."""
    numbers = " ".join(f"{spec}={us:.0f}" for spec, us in line["candidates"].items())
    best_us = line["overlapped_us"]
    share = f"{line['ideal_us'] / best_us:.2f} of ideal" if best_us else "nothing ran"
    auto = "-" if line["auto_us"] is None else f"{line['auto_us']:.0f} ({line['chosen']})"
    return (
        f"{line['op']:18} {line['case']:26} {line['mode']:5} comm {line['communication_us']:.0f} comp "
        f"{line['computation_us']:.0f} seq {line['sequential_us']:.0f} auto {auto} best {line['schedule']} ({share}) | "
        f"{numbers}"
    )


def jobs(op: Op, cases: Sequence[Case], specs: Sequence[str], found: Sequence[Way], arguments: argparse.Namespace) -> list[Job]:
    """Cases of one operator to measure. Ragged cases have one way alone."""
    made = []
    for case in cases:
        make = partial(_ragged_works, op, case) if case.experts else partial(even_works, op, case, found, specs)
        named = ("splits",) if case.experts else specs
        made.append(Job(name=f"{op} {case}", run=partial(lines_of, op, case, make, named, arguments)))
    return made


def _ragged_works(op: Op, case: Case) -> dict[str, Work]:
    return Ragged(op, case).works()


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """By operator, the mean share of the ideal."""
    told = []
    for op in SPECS:
        shares_of = [ln["ideal_us"] / ln["overlapped_us"] for ln in lines if ln["op"] == op and ln["overlapped_us"]]
        told.append(f"{op}: {geomean(shares_of):.2f} of the ideal over {len(shares_of)} lines")
    return "\n".join(told)
