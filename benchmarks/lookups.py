"""Lookups on one rank: their tables and bags, and everything that is timed, by name (rows.py).

Traps: tables of a case are views of one matrix, so that both of torch's programs read the same memory; what NCCL brings must be
laid side by side, which is part of every sequential program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

import weft
from benchmarks.measure import Check, Work, close_to, together
from weft.core.problem import LookupProblem
from weft.core.schedule import Bags, Lookup, Region
from weft.kernels import lookup as kernel
from weft.kernels.launch import Launcher

REPEAT = 2
TABLE_ROWS = 100_000
"""Of a problem that names none."""
COMPARED = ("computation", "sequential")
NEEDED = ("sequential/torch by table", "computation/torch by table", "communication/default", "computation/weft")


@dataclass(frozen=True, kw_only=True)
class LookupCase:
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


class Tables:
    """One case on this rank."""

    def __init__(self, case: LookupCase) -> None:
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
        works["communication/default"] = self.exchange
        works["weft/sequential"] = self.weft("sequential")
        return works | {f"weft/{spec}": self.weft(spec) for spec in specs}

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

    def exchange(self) -> object:
        """NCCL's collective alone."""
        return dist.all_to_all_single(self.recv, self.pooled)

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
        launched_by, sms = Launcher(), torch.cuda.get_device_properties(device).multi_processor_count

        def work() -> torch.Tensor:
            options: dict[str, Any] = {"mean": False, "dtype": torch.float32, "sms": sms, "launched_by": launched_by}
            kernel.lookup(plan, self.indices, self.offsets, None, stream=torch.cuda.current_stream().cuda_stream, **options)
            return self.pooled

        return work

    def weft(self, spec: str) -> Work:
        options = {"schedule": spec, "pooling": self.case.pooling}
        return lambda: weft.embedding_bag_all_to_all(self.indices, self.offsets, self.tables, **options)  # type: ignore[arg-type]


def checked(works: Mapping[str, Work]) -> Check:
    """A check against torch's programs, of what is looked up and of what has been exchanged."""
    expected: dict[str, Any] = {kind: together(f"{kind}/torch by table", works[f"{kind}/torch by table"]) for kind in COMPARED}
    checks = {kind: close_to(result, 1e-5) for kind, result in expected.items()}

    def check(name: str, result: Any) -> None:
        if not name.startswith("communication/"):
            checks["computation" if name.startswith("computation/") else "sequential"](name, result)

    return check


class ProblemTables:
    """A problem's tables and indices on this rank, for weft alone."""

    def __init__(self, problem: LookupProblem) -> None:
        self.problem, dims = problem, problem.dims[dist.get_rank()]
        self.options: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, problem.dtype)}
        self.tables = [torch.randn(TABLE_ROWS, dim, **self.options) for dim in dims]
        bags = len(dims) * problem.m
        self.indices = torch.randint(0, TABLE_ROWS, (bags * problem.k,), device="cuda")
        self.offsets = torch.arange(0, bags * problem.k + 1, problem.k, device="cuda")

    def weft(self, spec: str) -> Work:
        """One call by this schedule, without a look at the indices."""
        problem = self.problem
        options: dict[str, Any] = {"dims": problem.dims, "batch": problem.m, "pooling": problem.k}
        options |= {"dtype": self.options["dtype"], "schedule": spec, "checked": False}
        return partial(weft.embedding_bag_all_to_all, self.indices, self.offsets, self.tables, **options)
