"""What the planner's lines say: how often heuristic, cost model and tuner choose the fastest schedule, and what they lose.

A pick's loss is its time over the fastest one's, less one. It is *exact* if no measured candidate was faster, within 2% (TIE)
and 5% (NEAR) if none was by more. Medians of repeated runs of one schedule differ by some 2%, so that of candidates which are
closer it is luck which one is exact: both are said. Candidates that are one program under several names, as some are on 2
ranks (weft.schedules.alike), are one: its name is the simplest, its time the mean of theirs, and a pick by any of the names is
a pick of it. A pick that was not measured (it failed, or was not tried) is counted by itself, and as none of these. Choices are
among

    FiCCO's     its four schedules, in world_size chunks a shard as the paper has them, and the sequential program
    all         whatever a line has: the full space

The cost model's error is of each candidate of a line, against the measured time. The tuner (`auto`) picks the fastest that it
measures: quick, of the shortlist; full, of the whole line. Its picks are read off the line's own times. Pure functions of
lines.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.core import codec
from weft.core.machine import Machine
from weft.core.problem import LookupProblem, Problem
from weft.perf.rules import choice, estimates, heuristic
from weft.schedules import FAMILIES, build, parse, programs, spec, synonym

NEAR, TIE = 0.05, 0.02
FICCO = ("uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d", "uniform_fused_2d")
AS_FAST = 0.01
"""Slower than sequential by less is not called slower: medians of repeated runs differ by as much."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """us: each candidate's time; none of a problem that could not be measured at all, and `failed` says why. commit: the
    tree that was measured."""

    case: str
    problem: Problem | LookupProblem
    us: Mapping[str, float]
    machine: str
    simulated: bool
    failed: str = ""
    commit: str = ""

    @property
    def best_us(self) -> float:
        return min(self.us.values())

    def among(self, specs: Collection[str]) -> Line:
        """The line of these candidates alone, by whatever names."""
        names = {synonym(self.problem, spec, self.us) for spec in specs}
        return replace(self, us={spec: us for spec, us in self.us.items() if spec in names})


def pooled(line: Line) -> Line:
    """The line with each program once, by its simplest name, with the mean of its times."""
    times: dict[str, list[float]] = {name: [] for name in programs(line.problem, line.us)}
    for name, us in line.us.items():
        times[synonym(line.problem, name, times) or name].append(us)
    return replace(line, us={name: statistics.fmean(known) for name, known in times.items()})


def ficco_specs(problem: Problem) -> tuple[str, ...]:
    """FiCCO's choices for a problem, those that its operator has, and the sequential program."""
    known = (name for name in FICCO if problem.op in FAMILIES[name].builders)
    return ("sequential", *(spec(name, problem.world_size) for name in known))


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
        commit=row.get("commit", ""),
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
    def tied(self) -> int:
        return sum(loss <= TIE for loss in self.losses)

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
            f"exact {self.exact}/{self.count} ({_share(self.exact, self.count)}), within 2% {self.tied} "
            f"({_share(self.tied, self.count)}), within 5% {self.near} "
            f"({_share(self.near, self.count)}), a wrong pick costs {self.wrong_loss:.1%}, "
            f"at worst {max(self.losses, default=math.nan):.1%}, slower than sequential {self.slower}{other}"
        )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def verdict(lines: Sequence[Line], pick: Callable[[Line], str]) -> Verdict:
    """What comes of these choices, by whatever names."""
    picked = [(line, synonym(line.problem, pick(line), line.us)) for line in lines]
    known = [(line, line.us[spec]) for line, spec in picked if spec is not None]
    return Verdict(
        losses=tuple(us / line.best_us - 1 for line, us in known),
        slower=sum(us > (1 + AS_FAST) * line.us["sequential"] for line, us in known),
        unmeasured=len(picked) - len(known),
    )


def by_sizes(line: Line, machine: Machine) -> str:
    """The heuristic's choice among a line's candidates."""
    us = estimates(machine.links.topology).us(line.problem, machine)
    found: dict[str, float] = {}
    for named, estimate in us.items():
        if (name := synonym(line.problem, named, line.us)) is not None:
            found[name] = min(estimate, found.get(name, math.inf))
    return choice(found)


def quick(line: Line, predicted: Mapping[str, float], machine: Machine) -> str:
    """What a quick tuner picks: the fastest of those that it measures, read off the line. predicted: by spec, in us."""
    listed = listing(line, predicted, machine)
    return min((spec for spec in line.us if spec in listed), key=lambda spec: line.us[spec])


def listing(line: Line, predicted: Mapping[str, float], machine: Machine) -> tuple[str, ...]:
    """The specs that a quick tuner measures: as weft.runtime.choose has them, of the line's candidates."""
    from weft.planner import Candidate, Plan
    from weft.planner.shortlist import joined, shortlist

    times = {"predicted_us": 0.0, "computation_us": 0.0, "communication_us": 0.0, "over_ideal_us": 0.0}
    rising = sorted((us, *parse(spec)) for spec, us in predicted.items())
    found = tuple(Candidate(schedule=name, chunks=chunks or 1, **times | {"predicted_us": us}) for us, name, chunks in rising)
    halves = {"sequential_us": predicted["sequential"], "computation_us": 0.0, "communication_us": 0.0}
    plan = Plan(problem=line.problem, machine=machine.name, candidates=found, why="", **halves)
    return joined(line.problem, shortlist(plan), by_sizes(line, machine))


def predictions(line: Line, machine: Machine) -> dict[str, float]:
    """The cost model's time of each candidate of a line."""
    from weft.perf import run  # here, since to read lines and collect them needs no simulator
    from weft.perf.terms import warm

    machine = warm(machine, line.problem)
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
    failed, lines = [line for line in lines if line.failed], [pooled(line) for line in lines if not line.failed]
    predicted = {line.problem: predictions(line, machine) for line in lines} if model else {}
    rows = [f"{len(lines)} problems of {', '.join(sorted({line.machine for line in lines}))}; profile {machine.name}"]
    rows += [f"NOT MEASURED {line.problem}: {line.failed}" for line in failed]
    for op in (*dict.fromkeys(line.problem.op for line in lines), ""):
        some = [line for line in lines if op in ("", line.problem.op)]
        rows += [f"{op or 'all'}: {row}" for row in _figures(some, predicted, machine)]
    return "\n".join(rows)


def _figures(some: Sequence[Line], predicted: Mapping[Problem, Mapping[str, float]], machine: Machine) -> Iterator[str]:
    paper = [line.among(ficco_specs(line.problem)) for line in some]
    paper = [line for line in paper if len(line.us) > 1]
    if paper:
        yield f"heuristic among FiCCO's {verdict(paper, lambda line: by_sizes(line, machine))}"
    yield f"heuristic among all {verdict(some, lambda line: heuristic(line.problem, machine))}"
    if not predicted:
        return
    yield f"cost model among all {verdict(some, lambda line: _least(predicted[line.problem]))}"
    yield f"tuner, quick {verdict(some, lambda line: quick(line, predicted[line.problem], machine))}"
    found = errors(some, predicted)
    spread = f"median {percentile(found, 0.5):.1%}, p95 {percentile(found, 0.95):.1%}"
    yield f"cost model's error {spread} over {len(found)} candidates"
