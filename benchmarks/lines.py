"""Every measured time that the simulator can be held to, from benchmarks/results: what ran, and how long it took.

Only times inside CUDA graphs: the host, which eager calls may wait for, is not simulated. Left out, with the reason:

    ragged cases (all_to_all)     the sizes are known to the device alone: there is no Schedule of them
    nodes                         NVLink stood in for the network: no profile has such adapters
    concurrent                    the caller's own computation is measured there, not simulated
    mlp                           several operators in a row
    stores (transports)           a kernel alone, in no Schedule

A vendor's collective is as `sequential` runs it: NCCL's, on plain buffers. (Before 0ff3a39 `sequential` of planner.jsonl and
planner_fit.jsonl had registered ones where those were faster: up to 4 MiB a rank, by some 10 us.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.core import codec
from weft.core.problem import CollectiveProblem, LookupProblem, Problem

RESULTS = Path(__file__).with_name("results")
Row = Mapping[str, Any]
HALVES = ("computation", "communication")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measured time. spec: a schedule's, or computation or communication: the problem's vendor GEMM (or lookup) or
    collective alone. us: median of the slowest rank."""

    bench: str
    case: str
    problem: Problem | LookupProblem | CollectiveProblem
    spec: str
    us: float

    @property
    def family(self) -> str:
        return self.spec.partition(":")[0]

    def __str__(self) -> str:
        return f"{self.bench} {self.problem.op} {self.case} on {self.problem.world_size}: {self.spec} {self.us:.1f} us"


def measured() -> Iterator[Measured]:
    """All of them, in the order of the files. Raises ValueError that names a file and the line that it cannot read."""
    for bench, read in READERS.items():
        path = RESULTS / f"{bench}.jsonl"
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(text)
                if row["mode"] == "graph":
                    yield from read(bench, row)
            except (KeyError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None


def _of(bench: str, row: Row, problem: Problem, us: Mapping[str, float | None]) -> Iterator[Measured]:
    """One for each time that is there."""
    for spec, value in us.items():
        if value is not None:
            yield Measured(bench=bench, case=row["case"], problem=problem, spec=spec, us=value)


def _times(row: Row) -> dict[str, float | None]:
    """Candidates, the sequential program, and its halves."""
    return {name: row[f"{name}_us"] for name in ("sequential", *HALVES)} | row["candidates"]


def _sizes(text: str) -> tuple[int, ...]:
    """The whole numbers of a case's name."""
    return tuple(map(int, re.findall(r"\d+", text)))


def _tp(bench: str, row: Row) -> Iterator[Measured]:
    from cases import CASES

    case = next(case for case in CASES if (case.name, case.op) == (row["case"], row["op"]))
    plain = {half: row["nccl"]["default"].get(f"{half}_us") for half in ("sequential", "communication")}
    yield from _of(bench, row, case.problem(row["world_size"]), _times(row) | plain)


def _all_to_all(bench: str, row: Row) -> Iterator[Measured]:
    """M x k x N of each rank."""
    if "experts" not in row["case"]:
        m, k, n = _sizes(row["case"])
        us = _times(row) | {half: row["peers"][f"{half} default"] for half in ("sequential", "communication")}
        yield from _of(bench, row, Problem(op=row["op"], m=m, n=n, k=k, world_size=row["world_size"]), us)


def _all_reduce(bench: str, row: Row) -> Iterator[Measured]:
    """K and N of each rank, and rows. What sequential takes beyond the matmul is no measurement of the collective."""
    k, n, m = _sizes(row["case"])
    problem = Problem(op="matmul_all_reduce", m=m, n=n, k=k * row["world_size"], world_size=row["world_size"])
    yield from _of(bench, row, problem, _times(row) | {"communication": None})


def _embedding(bench: str, row: Row) -> Iterator[Measured]:
    """Lookups are weft's kernel, also in the sequential program."""
    tables, dim, pooling, batch = _sizes(row["case"])
    problem = LookupProblem.of(batch=batch, dims=((dim,) * tables,) * row["world_size"], pooling=pooling)
    yield from _of(
        bench, row, problem, _times(row) | {"computation": row["lookup_us"], "sequential": row["peers"]["weft_sequential"]}
    )


def _planner(bench: str, row: Row) -> Iterator[Measured]:
    """Its lookups alone are torch's."""
    problem = codec.load(Problem | LookupProblem, row["problem"])
    us: Mapping[str, float | None] = {} if row.get("failed") else _times(row)
    if isinstance(problem, LookupProblem):
        us = us | {"computation": None}
    yield from _of(bench, row, problem, us)


def _dma(bench: str, row: Row) -> Iterator[Measured]:
    """Collectives of bfloat16 alone. Of sums those whose line says on how many SMs."""
    plain = CollectiveProblem(op=row["op"], m=row["bytes"] // 2, world_size=row["world_size"])
    for name, us in row["us"].items():
        spec, _, how = name.partition(", ")
        sums = plain.sums and not how.endswith("SMs")
        if not name.startswith("NCCL") and not sums:
            problem = replace(plain, reachable=how == "straight", sms=int(how.split()[0]) if plain.sums else plain.sms)
            yield from _of(bench, row, problem, {spec: us})
    yield from _of(bench, row, plain, {"communication": row["us"]["NCCL default"]})


READERS: dict[str, Callable[[str, Row], Iterator[Measured]]] = {
    "tp": _tp,
    "tp_2gpus": _tp,
    "all_to_all": _all_to_all,
    "all_to_all_2gpus": _all_to_all,
    "all_reduce": _all_reduce,
    "all_reduce_2gpus": _all_reduce,
    "embedding": _embedding,
    "planner": _planner,
    "ficco_gemms": _planner,
    "ficco_gemms_2gpus": _planner,
    "dma": _dma,
}
