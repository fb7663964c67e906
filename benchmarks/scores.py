"""What the planner's lines say: how often each method of choice takes the fastest schedule, and what it loses.

A pick's loss is its time over the fastest one's, less one. It is *exact* if no measured candidate was faster, and near if none
was by more than 5% (NEAR). Medians of repeated runs of one schedule differ by some 2%, so that of candidates which are closer
it is luck which one is exact. Candidates that are one program under several names, as some are on 2 ranks
(weft.schedules.same_program), are one: its name is the simplest, its time the mean of theirs.

Problems are split once, by a hash of what they are (`half`): a person who changes a constant looks at the first half, `fit`,
and says how it does on the second, `test`. The methods, among all that a line has:

    ranking       the least estimate (weft.perf.ranking)
    plan          the best few of the ranking, simulated: the least (weft.plan)
    simulation    all candidates simulated: the least
    sequential    always
    one schedule  always the one of its operator and number of ranks that loses least on the half that is fitted to
    auto          the fastest measured of sequential and those that are ranked first (schedule="auto")

Pure functions of lines; nothing is measured here.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from benchmarks.rows import CASE, Row, name_of, read_as
from weft.core import codec
from weft.core.machine import Machine
from weft.core.problem import LookupProblem, Problem
from weft.perf.ranking import choice, estimates
from weft.perf.terms import warm
from weft.planner.choose import MAX_SIMULATED
from weft.runtime.choose import MEASURED
from weft.schedules import FAMILIES, build, parse, programs, spec, synonym

NEAR = 0.05
FICCO = ("uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d", "uniform_fused_2d")
Half = Literal["fit", "test"]


def half(problem: Problem) -> Half:
    """Which half of all problems one belongs to, for good."""
    return "test" if hashlib.sha256(codec.dumps(problem).encode()).digest()[0] % 2 else "fit"


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
    def half(self) -> Half:
        return half(self.problem)

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
    return tuple(read_as(path, line_of))


def line_of(row: Row) -> Line:
    """A row's schedules."""
    return Line(
        case=row.case,
        problem=codec.load(Problem | LookupProblem, row.problem),
        us={name_of(name): us for name, us in row.us.items() if name.startswith("weft/")},
        machine=row.machine,
        simulated=row.machine.startswith("simulated"),
        failed=row.missing.get(CASE, ""),
        commit=row.commit,
    )


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A line, and what the ranking and the simulator say of each of its candidates, by spec, in us."""

    line: Line
    ranking: Mapping[str, float]
    simulated: Mapping[str, float]

    @cached_property
    def ranked(self) -> list[str]:
        """Specs, the least estimate first."""
        return sorted(self.ranking, key=self.ranking.__getitem__)

    @property
    def picks(self) -> dict[str, str]:
        """The choice of each method, except of methods that choose the same schedule for many problems."""
        plan = {*self.ranked[:MAX_SIMULATED], "sequential"} & self.simulated.keys()
        auto = {*self.ranked[:MEASURED], "sequential"}
        return {
            "ranking": choice(self.ranking),
            "plan": min(plan, key=lambda name: (self.simulated[name], self.ranked.index(name))),
            "simulation": min(self.simulated, key=self.simulated.__getitem__),
            "sequential": "sequential",
            "auto": min(auto, key=self.line.us.__getitem__),
        }

    def loss(self, name: str) -> float:
        """Of a spec."""
        return self.line.us[name] / self.line.best_us - 1

    @property
    def errors(self) -> list[float]:
        """By how much the simulator misses each candidate's time, as a share."""
        return [self.simulated[name] / us - 1 for name, us in self.line.us.items()]


def predicted(line: Line, machine: Machine) -> Predicted:
    """The line's candidates, estimated and simulated: as calls that repeat on the same memory, which were measured, find the
    machine (weft.perf.terms.warm). In a model other weights come between."""
    from weft.perf import run  # here, since to read lines and collect them needs no simulator

    machine = warm(machine, line.problem)
    schedules = {name: build(line.problem, *parse(name), fan_out=machine.fans_out) for name in line.us}
    simulated = {name: run(schedule, machine).total_us for name, schedule in schedules.items()}
    return Predicted(line=line, ranking=estimates(line.problem, machine, line.us), simulated=simulated)


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score has the losses of a method of choice, one for each problem."""

    method: str
    losses: tuple[float, ...]

    @property
    def exact(self) -> float:
        return statistics.fmean(loss == 0 for loss in self.losses)

    @property
    def near(self) -> float:
        return statistics.fmean(loss <= NEAR for loss in self.losses)

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)

    def __str__(self) -> str:
        worst = max(self.losses)
        return f"{self.method}: exact {self.exact:.1%}, within 5% {self.near:.1%}, loss {self.loss:.2%}, at most {worst:.1%}"


def scores(found: Sequence[Predicted], fitted: Sequence[Predicted]) -> list[Score]:
    """Return the score of every method. fitted: the problems by which "one schedule" is chosen."""
    methods = [Score(method=method, losses=tuple(one.loss(one.picks[method]) for one in found)) for method in found[0].picks]
    always = Score(method="one schedule", losses=tuple(one.loss(_always(one.line, fitted)) for one in found))
    return [*methods, always]


def _always(line: Line, fitted: Sequence[Predicted]) -> str:
    """Of the candidates of a line, the one that loses least on average over the fitted lines of its operator and ranks."""
    same_target = [
        one
        for one in fitted
        if (one.line.problem.op, one.line.problem.world_size) == (line.problem.op, line.problem.world_size)
    ]
    mean = {name: statistics.fmean(one.loss(name) if name in one.line.us else 1.0 for one in same_target) for name in line.us}
    return min(mean, key=mean.__getitem__) if same_target else "sequential"


def percentile(rising: Sequence[float], share: float) -> float:
    """The least that so large a share does not exceed."""
    return rising[max(0, math.ceil(share * len(rising)) - 1)] if rising else math.nan


def like_ficco(found: Sequence[Predicted]) -> list[Predicted]:
    """As the paper has it: problems of 4 GPUs of which all of FiCCO's four and sequential were measured, and those alone."""
    some = []
    for one in found:
        specs = ficco_specs(one.line.problem)
        if one.line.problem.world_size == 4 and len(specs) == 1 + len(FICCO) and set(specs) <= one.line.us.keys():
            few = {name: {spec: us for spec, us in of.items() if spec in specs} for name, of in _times(one).items()}
            some.append(Predicted(line=replace(one.line, us=few["line"]), ranking=few["ranking"], simulated=few["simulated"]))
    return some


def _times(one: Predicted) -> dict[str, Mapping[str, float]]:
    return {"line": one.line.us, "ranking": one.ranking, "simulated": one.simulated}


def measured(paths: Sequence[Path], machine: Machine, progress: Callable[[int], None] = lambda at: None) -> list[Predicted]:
    """Every line that was measured, each program once."""
    lines = [pooled(line) for path in paths for line in read_lines(path) if not line.failed]
    found = []
    for at, line in enumerate(lines):
        progress(at)
        found.append(predicted(line, machine))
    return found


HEADS = ("operator", "GPUs", "problems", "plan: exact", "within 5%", "loss", "ranking", "sequential", "one schedule", "auto")


def table(found: Sequence[Predicted], part: Half = "test") -> Iterator[tuple[str, ...]]:
    """A row for each operator and number of GPUs, of one half; then all together. Losses are means."""
    yield HEADS
    groups: dict[tuple[str, int], list[Predicted]] = {}
    for one in found:
        if one.line.half == part:
            groups.setdefault((one.line.problem.op, one.line.problem.world_size), []).append(one)
    fitted = [one for one in found if one.line.half == "fit"]
    for (op, ranks), some in sorted(groups.items()):
        yield _row(op, str(ranks), some, fitted)
    yield _row("all", "", [one for some in groups.values() for one in some], fitted)


def _row(op: str, ranks: str, some: Sequence[Predicted], fitted: Sequence[Predicted]) -> tuple[str, ...]:
    of = {score.method: score for score in scores(some, fitted)}
    losses = (f"{of[method].loss:.1%}" for method in ("ranking", "sequential", "one schedule", "auto"))
    plan = of["plan"]
    return (op, ranks, str(len(some)), f"{plan.exact:.0%}", f"{plan.near:.0%}", f"{plan.loss:.1%}", *losses)


def errors(found: Sequence[Predicted]) -> str:
    """The simulator's, over all candidates."""
    rising = sorted(abs(error) for one in found for error in one.errors)
    spread = f"median {percentile(rising, 0.5):.1%}, 95th percentile {percentile(rising, 0.95):.1%}"
    return f"predicted times of {len(rising)} candidates: {spread}"


def summary(found: Sequence[Predicted]) -> Iterator[str]:
    """Both halves in a line each, and like for like with FiCCO's paper."""
    fitted = [one for one in found if one.line.half == "fit"]
    for part in ("test", "fit"):
        some = [one for one in found if one.line.half == part]
        (plan,) = (score for score in scores(some, fitted) if score.method == "plan")
        yield f"{part}, {len(some)} problems: {plan}; {errors(some)}"
    paper = like_ficco(found)
    ranking, plan, *_ = scores(paper, paper)
    yield f"all five options of FiCCO on 4 GPUs, {len(paper)} problems: {ranking}; {plan}"


def report(found: Sequence[Predicted]) -> str:
    """All figures, a line each: of both halves, and like for like with FiCCO's paper."""
    fitted, rows = [one for one in found if one.line.half == "fit"], []
    for part in ("fit", "test"):
        some = [one for one in found if one.line.half == part]
        if some:
            rows += [f"{part}: {len(some)} problems", *(f"  {score}" for score in scores(some, fitted)), f"  {errors(some)}"]
    paper = like_ficco(found)
    if paper:
        rows += [f"like FiCCO's paper: {len(paper)} problems", *(f"  {score}" for score in scores(paper, paper)[:2])]
    rows += ["  ".join(cell.ljust(26 if not at else 13) for at, cell in enumerate(row)).rstrip() for row in table(found)]
    return "\n".join(rows)
