"""How much of the All-to-All does embedding_bag_all_to_all hide, and how fast does its kernel gather?

Protocol: measure.py's; float32, bags of a set length, uniform random rows of tables far larger than any cache, int64
indices; results are compared with torch's before anything is timed. Baselines of the same run: torch's embedding
bags and NCCL's all_to_all_single (sequential: the faster of a call for each table and one call over all tables as one), each of
the two alone, and `weft_sequential`: weft's own lookup kernel, then NCCL. ideal = the larger of weft's lookup alone and NCCL
alone. overlapped = the best of the schedules that are named; auto = weft's own choice. gather_tbps counts the rows that are
read, of weft's kernel alone (lookup_us). Traps: tables of a case are views of one matrix, so that both of torch's ways read the
same memory; what NCCL brings must be laid side by side, which is part of every sequential program.

A part of benchmarks/fused.py, which runs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measure import Failed, Job, Times, Work, close_to, geomean, row, together, trial
from torch.nn.functional import embedding_bag

import weft
from weft.core.schedule import Bags, Lookup, Region
from weft.kernels import lookup as kernel

REPEAT = 2
SPECS = ("direct_store:1", "direct_store:2", "track_and_trigger:1")


@dataclass(frozen=True, kw_only=True)
class Case:
    """tables: a GPU, of `rows` rows. batch: of all GPUs."""

    tables: int
    dim: int
    pooling: int
    batch: int
    rows: int = 200_000

    @property
    def name(self) -> str:
        return f"{self.tables}x{self.dim} pooling={self.pooling} batch={self.batch}"

    @property
    def gathered_bytes(self) -> int:
        """Of rows that a GPU reads."""
        return self.batch * self.tables * self.pooling * self.dim * 4


CASES = (
    Case(tables=8, dim=128, pooling=32, batch=8192),
    Case(tables=32, dim=128, pooling=32, batch=8192),
    Case(tables=32, dim=128, pooling=32, batch=65536),
    Case(tables=16, dim=256, pooling=70, batch=16384),
    Case(tables=64, dim=92, pooling=70, batch=8192),
)


class Site:
    """One case on this rank: its tables and bags, and every method that is timed."""

    def __init__(self, case: Case) -> None:
        self.case, self.size = case, dist.get_world_size()
        bags = case.tables * case.batch
        self.all = torch.randn(case.tables * case.rows, case.dim, device="cuda")
        self.tables = list(self.all.split(case.rows))
        self.indices = torch.randint(0, case.rows, (bags * case.pooling,), device="cuda")
        self.offsets = torch.arange(0, (bags + 1) * case.pooling, case.pooling, device="cuda")
        first = torch.arange(case.tables, device="cuda") * case.rows
        self.flat = self.indices + first.repeat_interleave(case.batch * case.pooling)
        self.columns = case.tables * case.dim
        self.rows = case.batch // self.size
        self.pooled = torch.empty(case.batch, self.columns, device="cuda")
        self.recv = torch.empty_like(self.pooled)

    def works(self, specs: Sequence[str]) -> dict[str, Work]:
        works: dict[str, Work] = {"lookup": self.lookup()}
        for name, bags in (("by table", self._by_table), ("as one", self._as_one)):
            works[f"computation {name}"] = bags
            works[f"sequential {name}"] = lambda bags=bags: self._exchange(bags())  # type: ignore[misc]
        works["communication"] = lambda: dist.all_to_all_single(self.recv, self.pooled)
        works["weft_sequential"] = self.overlapped("sequential")
        return works | {spec: self.overlapped(spec) for spec in specs}

    def _by_table(self) -> torch.Tensor:
        """[batch, columns], by a call for each table."""
        step = self.case.batch * self.case.pooling
        offsets = self.offsets[: self.case.batch]
        parts = zip(self.indices.split(step), self.tables, strict=True)
        return torch.cat([embedding_bag(indices, table, offsets, mode="sum") for indices, table in parts], 1)

    def _as_one(self) -> torch.Tensor:
        """[batch, columns], by one call over all tables, and a copy that turns tables into columns."""
        bags = embedding_bag(self.flat, self.all, self.offsets[:-1], mode="sum")
        return bags.view(self.case.tables, self.case.batch, -1).transpose(0, 1).reshape(self.case.batch, -1)

    def _exchange(self, pooled: torch.Tensor) -> torch.Tensor:
        dist.all_to_all_single(self.recv, pooled)
        return self.recv.view(self.size, self.rows, self.columns).transpose(0, 1).reshape(self.rows, -1)

    def lookup(self) -> Work:
        """weft's kernel alone, into local memory."""
        case, device = self.case, self.all.device
        columns = [(at * case.dim, (at + 1) * case.dim) for at in range(case.tables)]
        whole = Region("bags", 0, (0, case.batch), (0, self.columns))
        plan = kernel.lookup_tables(
            Lookup((Bags(whole, whole),)),
            self.tables,
            columns=columns,
            batch=case.batch,
            device=device,
            target=lambda _: kernel.OutputPlace(self.pooled.data_ptr(), self.columns * 4, False),
            count_address=lambda _: 0,
        )
        launched_by, sms = kernel.launcher(), torch.cuda.get_device_properties(device).multi_processor_count

        def work() -> torch.Tensor:
            options: dict[str, Any] = {"mean": False, "dtype": torch.float32, "sms": sms, "launched_by": launched_by}
            kernel.lookup(plan, self.indices, self.offsets, None, stream=torch.cuda.current_stream().cuda_stream, **options)
            return self.pooled

        return work

    def overlapped(self, spec: str) -> Work:
        options = {"schedule": spec, "pooling": self.case.pooling}
        return lambda: weft.embedding_bag_all_to_all(self.indices, self.offsets, self.tables, **options)  # type: ignore[arg-type]


def chosen(site: Site) -> str | None:
    """What "auto" stands for, after a call of it."""
    try:
        together("auto", site.overlapped("auto"))
    except Failed:
        return None
    return weft.choices()[-1].spec


def jobs(cases: Sequence[Case], specs: Sequence[str], arguments: argparse.Namespace) -> list[Job]:
    """Cases to measure."""
    return [Job(name=f"embedding_bag_all_to_all {case.name}", run=partial(measured, case, specs, arguments)) for case in cases]


def measured(case: Case, specs: Sequence[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One case in every mode: its JSON lines."""
    torch.manual_seed(dist.get_rank())
    site = Site(case)
    works = site.works(specs)
    pooled = together("computation by table", works["computation by table"])
    out = together("sequential by table", works["sequential by table"])
    checks = {True: close_to(pooled, 1e-5), False: close_to(out, 1e-5)}  # type: ignore[arg-type]

    def check(name: str, result: object) -> None:
        if name != "communication":
            checks[name == "lookup" or name.startswith("computation")](name, result)  # type: ignore[arg-type]

    needed = ("sequential by table", "computation by table", "communication", "lookup")
    modes = arguments.modes.split(",")
    times, missing = trial(works, modes, check=check, needed=needed, rounds=arguments.rounds, repeat=REPEAT)
    named = [spec for spec in specs if spec != "auto"]
    name = chosen(site) if "auto" in specs and "auto" not in missing else None
    lines = []
    for mode, us in times.items():
        op = "embedding_bag_all_to_all"
        line = row(bench="embedding", op=op, case=case.name, dtype="float32", mode=mode, arguments=arguments)
        lines.append(line | figures(case, us, [spec for spec in named if spec in us], name) | {"missing": missing})
    return lines


def figures(case: Case, times: Mapping[str, Times], specs: Sequence[str], name: str | None) -> dict[str, Any]:
    """What one case's times say. name: what auto stands for."""
    us = {method: t.us for method, t in times.items()}
    best = min(specs, key=lambda spec: us[spec], default=None)
    first = {kind: min(us[m] for m in us if m.startswith(kind)) for kind in ("sequential", "computation")}
    return {
        "schedule": best,
        "sequential_us": first["sequential"],
        "communication_us": us["communication"],
        "computation_us": first["computation"],
        "lookup_us": us["lookup"],
        "gather_tbps": case.gathered_bytes / us["lookup"] / 1e6,
        "torch_gather_tbps": case.gathered_bytes / first["computation"] / 1e6,
        "ideal_us": max(us["communication"], us["lookup"]),
        "overlapped_us": us[best] if best else None,
        "auto_us": us.get("auto"),
        "chosen": name,
        "candidates": {spec: us[spec] for spec in specs},
        "peers": {method: us[method] for method in us if method not in specs and method != "auto"},
    }


def sentence(line: Mapping[str, Any]) -> str:
    """A line in words."""
    weft_us = line["peers"].get("weft_sequential")
    best = line["overlapped_us"] or float("nan")
    return (
        f"{line['case']} {line['mode']}: torch + NCCL {line['sequential_us']:.0f} us, weft's lookup + NCCL {weft_us or 0:.0f}, "
        f"{line['schedule']} {best:.0f} ({line['sequential_us'] / best:.2f}x, {(weft_us or 0) / best:.2f}x), "
        f"auto {line['auto_us'] or 0:.0f} = {line['chosen']}; lookup {line['lookup_us']:.0f} at {line['gather_tbps']:.2f} TB/s "
        f"(torch {line['torch_gather_tbps']:.2f}), all-to-all {line['communication_us']:.0f}; {line['candidates']}"
    )


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """The geometric mean of the speed-ups."""
    gains = [line["sequential_us"] / line["overlapped_us"] for line in lines if line["overlapped_us"]]
    return f"geometric mean of the speed-ups over torch + NCCL, {len(gains)} lines: {geomean(gains):.2f}x"
