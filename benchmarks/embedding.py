"""How much of the All-to-All does embedding_bag_all_to_all hide?

Protocol: measure.py's; float32, bags of a set length, uniform random rows of tables far larger than any cache, int64
indices; results are compared with torch's before anything is timed. Baselines of the same run: torch's embedding
bags and NCCL's all_to_all_single (sequential: the faster of a call for each table and one call over all tables as one), each of
the two alone, and `weft/sequential`: weft's own lookup kernel, then NCCL. ideal = the larger of weft's lookup alone
(`computation/weft`) and NCCL alone. Traps: tables of a case are views of one matrix, so that both of torch's ways read the same
memory; what NCCL brings must be laid side by side, which is part of every sequential program.

A part of benchmarks/fused.py, which runs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

import weft
from benchmarks.measure import Failed, Job, Work, close_to, each_mode, together, trial
from benchmarks.rows import Row
from weft.core.problem import LookupProblem
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

    def problem(self, world_size: int) -> LookupProblem:
        dims = ((self.dim,) * self.tables,) * world_size
        return LookupProblem.of(batch=self.batch, dims=dims, pooling=self.pooling)


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
        works: dict[str, Work] = {"computation/weft": self.lookup()}
        for name, bags in (("by table", self._by_table), ("as one", self._as_one)):
            works[f"computation/torch {name}"] = bags
            works[f"sequential/torch {name}"] = lambda bags=bags: self._exchange(bags())  # type: ignore[misc]
        works["communication/default"] = lambda: dist.all_to_all_single(self.recv, self.pooled)
        works["weft/sequential"] = self.overlapped("sequential")
        return works | {f"weft/{spec}": self.overlapped(spec) for spec in specs}

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


def measured(case: Case, specs: Sequence[str], arguments: argparse.Namespace) -> list[Row]:
    """One case in every mode."""
    torch.manual_seed(dist.get_rank())
    site = Site(case)
    works = site.works(specs)
    pooled = together("computation/torch by table", works["computation/torch by table"])
    out = together("sequential/torch by table", works["sequential/torch by table"])
    checks = {True: close_to(pooled, 1e-5), False: close_to(out, 1e-5)}  # type: ignore[arg-type]

    def check(name: str, result: object) -> None:
        if not name.startswith("communication/"):
            checks[name.startswith("computation/")](name, result)  # type: ignore[arg-type]

    needed = ("sequential/torch by table", "computation/torch by table", "communication/default", "computation/weft")
    modes = arguments.modes.split(",")
    times, missing = trial(works, modes, check=check, needed=needed, rounds=arguments.rounds, repeat=REPEAT)
    name = chosen(site) if "auto" in specs and "weft/auto" not in missing else None
    return each_mode(
        times,
        bench="embedding",
        op="embedding_bag_all_to_all",
        case=case.name,
        problem=case.problem(site.size),
        dtype="float32",
        chosen=name,
        missing=missing,
        arguments=arguments,
    )
