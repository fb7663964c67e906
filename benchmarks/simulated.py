"""How far are predictions from what was measured, on every row of benchmarks/results that the simulator can speak of?

    python -m benchmarks.simulated                 the errors by operator, by family, by file, and the worst times
    python -m benchmarks.simulated --machine FILE --ranks 4    another profile, and only what was measured on four GPUs
    python -m benchmarks.simulated --json FILE     what was measured and what is predicted, a line each
    python -m benchmarks.simulated --plot FILE     predicted against measured, as HTML (docs/picture.py takes the picture)

No GPU is needed; it takes some seconds. An error is |predicted / measured - 1|, bias the median of predicted / measured - 1.

Protocol: rows of FILES that have a problem, which ragged cases have not: their sizes are known to the device alone. Only times
inside CUDA graphs: the host, which eager calls may wait for, is not simulated. cuBLAS GEMMs, lookups and collectives alone are
held to their formulas (weft.perf.terms), schedules to the simulator. NCCL's collective is that on plain buffers. (Before
0ff3a39 `weft/sequential` of planner.jsonl and planner_fit.jsonl had registered ones where those were faster: up to 4 MiB a
rank, by some 10 us.) Predictions are for --machine (default: h200x8) with as many of its GPUs as the row had. What the
profile's numbers were fitted to is no test of them: collectives alone (`communication`) are listed, and left out of the sums.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.checked_options import count
from benchmarks.rows import AUTO, Row, read_as
from benchmarks.scores import percentile
from weft.core import codec
from weft.core.machine import Machine, load
from weft.core.problem import CollectiveProblem, LookupProblem, Problem
from weft.perf import run
from weft.perf.terms import warm, whole_collective_us, whole_gemm_us
from weft.schedules import build, parse

RESULTS = Path(__file__).with_name("results")
FILES = (
    *("h200x2/tp", "h200x2/all_to_all", "h200x2/all_reduce", "h200x2/embedding", "h200x2/dma", "h200x2/ficco_gemms"),
    *("h200x4/tp", "h200x4/all_reduce", "h200x4/ficco_gemms", "h200x8/tp", "h200x8/all_to_all", "h200x8/all_reduce", "planner"),
)
"""Results that predictions are compared with."""
MACHINE = "h200x8"
HALVES = ("computation", "communication")
ALONE = {
    "sequential/default": "sequential",
    "computation/cublas": "computation",
    "computation/weft": "computation",
    "communication/default": "communication",
}
"""Methods without weft's schedules, by what predicts them."""
FITTED = ("communication",)
GOAL = (0.08, 0.20)
"""Median and 95th percentile."""
WORST = 12
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c", "#f0e442", "#000000")
"""As in the report: which people who do not see all colours can distinguish."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measured time. spec: a schedule's, or computation or communication: the problem's cuBLAS GEMM (or lookup) or
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
    for bench in FILES:
        for found in read_as(RESULTS / f"{bench}.jsonl", partial(times, bench)):
            yield from found


def times(bench: str, row: Row) -> list[Measured]:
    """A row's times that can be predicted."""
    if row.mode != "graph" or not row.problem:
        return []
    whole = codec.load(Problem | LookupProblem | CollectiveProblem, row.problem)
    us = {name.removeprefix("weft/"): us for name, us in row.us.items() if name.startswith("weft/") and name != AUTO}
    us |= {spec: row.us[name] for name, spec in ALONE.items() if name in row.us}
    found = []
    for name, value in us.items():
        spec, _, how = name.partition(", ")
        problem = whole
        if isinstance(whole, CollectiveProblem) and spec not in HALVES:
            # collective.py says on how many SMs sums are, or that the result lies in symmetric memory.
            if whole.sums and not how.endswith("SMs"):
                continue
            problem = replace(whole, reachable=how == "straight", sms=int(how.split()[0]) if whole.sums else whole.sms)
        found.append(Measured(bench=bench, case=row.case, problem=problem, spec=spec, us=value))
    return found


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A measured time and its prediction."""

    of: Measured
    predicted_us: float

    @property
    def error(self) -> float:
        """Signed."""
        return self.predicted_us / self.of.us - 1

    def __str__(self) -> str:
        return f"{self.of}, predicted {self.predicted_us:.1f} ({self.error:+.0%})"


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Of some comparisons. bias: the median of the signed errors."""

    count: int
    median: float
    p95: float
    bias: float

    @property
    def good(self) -> bool:
        return self.median <= GOAL[0] and self.p95 <= GOAL[1]


def predict(one: Measured, machine: Machine) -> float:
    """In us. Raises ValueError as `weft.perf.run` does."""
    machine = warm(machine, one.problem)
    if one.spec == HALVES[0]:
        return whole_gemm_us(machine, one.problem)
    if one.spec == HALVES[1]:
        return whole_collective_us(machine, one.problem)
    return run(build(one.problem, *parse(one.spec), fan_out=machine.fans_out), machine).total_us


def compared(machine: Machine, ranks: int | None = None) -> tuple[Compared, ...]:
    """All lines, in the order of the files; only those of this many ranks, if `ranks` is given."""
    of_ranks = (one for one in measured() if ranks in (None, one.problem.world_size))
    return tuple(Compared(of=one, predicted_us=predict(one, machine)) for one in of_ranks)


def errors(some: Iterable[Compared]) -> Errors:
    """Raises ValueError for nothing."""
    signed = [one.error for one in some]
    rising = sorted(map(abs, signed))
    if not rising:
        raise ValueError("there is nothing to compare")
    return Errors(
        count=len(rising), median=percentile(rising, 0.5), p95=percentile(rising, 0.95), bias=statistics.median(signed)
    )


def held(found: Sequence[Compared]) -> list[Compared]:
    """Those that the profile was not fitted to."""
    return [one for one in found if one.of.family not in FITTED]


KEYS: dict[str, Callable[[Compared], str]] = {
    "operator": lambda one: one.of.problem.op,
    "family": lambda one: one.of.family,
    "file": lambda one: f"{one.of.bench}.jsonl",
}


def rows(found: Sequence[Compared], by: str) -> list[tuple[str, ...]]:
    """A table: head, a row a group, and all together. Of families those too that the profile was fitted to, marked so."""
    key = KEYS[by]
    sound = found if by == "family" else held(found)
    groups = {name: [one for one in sound if key(one) == name] for name in sorted({key(one) for one in sound})}
    made = [(by, "times", "median", "95th percentile", "bias")]
    made += [_row(f"{name} (fitted)" if name in FITTED else name, errors(some)) for name, some in groups.items()]
    return [*made, _row("all", errors(held(found)))]


def _row(name: str, found: Errors) -> tuple[str, ...]:
    return name, str(found.count), f"{found.median:.1%}", f"{found.p95:.1%}", f"{found.bias:+.1%}"


def as_line(one: Compared) -> dict[str, object]:
    """What a JSON line says."""
    of = one.of
    case = {"bench": of.bench, "op": of.problem.op, "case": of.case, "world_size": of.problem.world_size}
    return case | {"schedule": of.spec, "measured_us": of.us, "predicted_us": one.predicted_us}


def plot(found: Sequence[Compared], path: Path) -> None:
    """Predicted against measured, a colour an operator, with the goal's 95th percentile as a band."""
    import plotly.graph_objects as go

    made = go.Figure()
    sound = held(found)
    low, high = (pick(one.of.us for one in sound) for pick in (min, max))
    for factor, dash in ((1.0, "solid"), (1 + GOAL[1], "dot"), (1 - GOAL[1], "dot")):
        ends = {"x": [low, high], "y": [low * factor, high * factor]}
        made.add_scatter(**ends, mode="lines", line={"color": "#444444", "width": 1, "dash": dash}, showlegend=False)
    for op, colour in zip(dict.fromkeys(one.of.problem.op for one in sound), COLOURS * 2, strict=False):
        some = [one for one in sound if one.of.problem.op == op]
        made.add_scatter(
            x=[one.of.us for one in some],
            y=[one.predicted_us for one in some],
            text=[str(one) for one in some],
            name=op,
            mode="markers",
            marker={"color": colour, "size": 5, "opacity": 0.7},
        )
    total = errors(sound)
    title = f"{total.count} times on H200: median error {total.median:.1%}, 95th percentile {total.p95:.1%}"
    made.update_xaxes(type="log", title="measured, us")
    made.update_yaxes(type="log", title="predicted, us")
    made.update_layout(width=960, height=620, template="plotly_white", title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.write_html(path, include_plotlyjs=True, div_id="simulated", config={"displayModeBar": False})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--machine", default=MACHINE, help="profile: a name or a file (%(default)s)")
    options.add_argument("--ranks", type=count, help="only rows of this many ranks (all)")
    options.add_argument("--json", type=Path, help="write what was measured and what is predicted, a line each")
    options.add_argument("--plot", type=Path, help="write predicted against measured, as HTML")
    arguments = options.parse_args()
    found = compared(load(arguments.machine), arguments.ranks)
    for by in KEYS:
        for name, *figures in rows(found, by):
            print(f"{name:28}", *(f"{figure:>15}" for figure in figures))
        print()
    for one in sorted(held(found), key=lambda one: -abs(one.error))[:WORST]:
        print(one)
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(as_line(one)) + "\n" for one in found), encoding="utf-8")
    if arguments.plot:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()
