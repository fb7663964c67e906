"""What the planner's lines say: how often heuristic and cost model choose the fastest schedule, and what they lose otherwise.

A pick is exact if no measured candidate was faster. Its loss is its time over the fastest one's, less one. A pick that was not
measured (it failed, or was not tried) is counted by itself, and as neither exact nor within 5%. The cost model chooses among
the candidates of a line, and its error is of each of them, against the measured time. Pure functions of lines.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft import codec
from weft.machine import Machine
from weft.problem import LookupProblem, Problem
from weft.rules import heuristic
from weft.schedules import build, parse

NEAR = 0.05
AS_FAST = 0.01
"""Slower than sequential by less is not called slower: medians of repeated runs differ by as much."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """us: each candidate's time; none of a problem that could not be measured at all, and `failed` says why."""

    case: str
    problem: Problem | LookupProblem
    us: Mapping[str, float]
    machine: str
    simulated: bool
    failed: str = ""

    @property
    def best_us(self) -> float:
        return min(self.us.values())


def read_lines(path: Path) -> tuple[Line, ...]:
    """Those of benchmarks/planner.py. Raises ValueError that names the file and the line."""
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(_line(json.loads(text)))
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return tuple(found)


def _line(row: Mapping[str, Any]) -> Line:
    problem = codec.load(Problem | LookupProblem, row["problem"])
    machine = row["machine"]
    return Line(
        case=row["case"],
        problem=problem,
        us=row["candidates"],
        machine=machine,
        simulated=machine.startswith("simulated"),
        failed=row.get("failed", ""),
    )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """losses: of the picks that were measured. slower: picks slower than the sequential program. unmeasured: the others."""

    losses: tuple[float, ...]
    slower: int
    unmeasured: int

    @property
    def count(self) -> int:
        return len(self.losses) + self.unmeasured

    @property
    def exact(self) -> int:
        return sum(loss == 0 for loss in self.losses)

    @property
    def near(self) -> int:
        return sum(loss <= NEAR for loss in self.losses)

    @property
    def wrong_loss(self) -> float:
        """The mean over picks that are not exact."""
        return statistics.fmean([loss for loss in self.losses if loss] or [0.0])

    def __str__(self) -> str:
        other = f", {self.unmeasured} picks not measured" if self.unmeasured else ""
        return (
            f"exact {self.exact}/{self.count} ({_share(self.exact, self.count)}), within 5% {self.near}/{self.count} "
            f"({_share(self.near, self.count)}), a wrong pick costs {self.wrong_loss:.1%}, "
            f"at worst {max(self.losses, default=math.nan):.1%}, slower than sequential {self.slower}{other}"
        )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def verdict(lines: Sequence[Line], pick: Callable[[Line], str]) -> Verdict:
    """What comes of these choices."""
    picked = [(line, pick(line)) for line in lines]
    known = [(line, line.us[spec]) for line, spec in picked if spec in line.us]
    return Verdict(
        losses=tuple(us / line.best_us - 1 for line, us in known),
        slower=sum(us > (1 + AS_FAST) * line.us["sequential"] for line, us in known),
        unmeasured=len(picked) - len(known),
    )


def predictions(line: Line, machine: Machine) -> dict[str, float]:
    """The cost model's time of each candidate of a line."""
    from weft.sim import run  # here, since to read lines and collect them needs no simulator

    schedules = {spec: build(line.problem, *parse(spec), fan_out=machine.fans_out) for spec in line.us}
    return {spec: run(schedule, machine).total_us for spec, schedule in schedules.items()}


def errors(lines: Sequence[Line], predicted: Mapping[Problem, Mapping[str, float]]) -> list[float]:
    """|predicted / measured - 1| of every candidate, rising."""
    return sorted(abs(predicted[line.problem][spec] / us - 1) for line in lines for spec, us in line.us.items())


def percentile(rising: Sequence[float], share: float) -> float:
    """The least that so large a share does not exceed."""
    return rising[max(0, math.ceil(share * len(rising)) - 1)] if rising else math.nan


def _least(us: Mapping[str, float]) -> str:
    return min(us, key=lambda spec: us[spec])


def report(lines: Sequence[Line], machine: Machine, *, model: bool) -> str:
    """All figures, a line each, by operator and together. model: simulate, too."""
    failed, lines = [line for line in lines if line.failed], [line for line in lines if not line.failed]
    predicted = {line.problem: predictions(line, machine) for line in lines} if model else {}
    rows = [f"{len(lines)} problems of {', '.join(sorted({line.machine for line in lines}))}; profile {machine.name}"]
    rows += [f"NOT MEASURED {line.problem}: {line.failed}" for line in failed]
    for op in (*dict.fromkeys(line.problem.op for line in lines), ""):
        some = [line for line in lines if op in ("", line.problem.op)]
        rows.append(f"{op or 'all'}: heuristic {verdict(some, lambda line: heuristic(line.problem, machine))}")
        if model:
            found = errors(some, predicted)
            rows.append(f"{op or 'all'}: cost model {verdict(some, lambda line: _least(predicted[line.problem]))}")
            spread = f"median {percentile(found, 0.5):.1%}, p95 {percentile(found, 0.95):.1%}"
            rows.append(f"{op or 'all'}: cost model's error {spread} over {len(found)} candidates")
    return "\n".join(rows)
