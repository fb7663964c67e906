"""The values of a plan: candidates with their predicted times, the choice, and the reason."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

from weft.core.concurrent import ConcurrentProblem
from weft.core.machine import Machine
from weft.core.problem import CollectiveProblem, ColumnProblem, LookupProblem, Problem, RaggedProblem
from weft.core.schedule import Schedule
from weft.core.span import Span
from weft.perf.terms import whole_collective_us, whole_gemm_us
from weft.planner.words import us
from weft.schedules import NOT_OVERLAPPED, VERDICTS, judge, spec

if TYPE_CHECKING:
    from weft.perf import Outcome

NO_CLEAR_GAIN, SLOWER = "no clear gain", "slower"
PREDICTED_VERDICTS = (*VERDICTS[:-1], NO_CLEAR_GAIN, SLOWER, NOT_OVERLAPPED)
"""The verdicts on a plan."""
LEAST = 0.02
"""Gains below this share are no clear gain, whatever the error is."""


@functools.cache
def kept_accuracy() -> Any:
    """Return what accuracy.json has (weft.planner.accuracy)."""
    return json.loads(resources.files("weft.planner").joinpath("accuracy.json").read_text(encoding="utf-8"))


def median_error(ranks: int) -> float:
    """Return the median error of a predicted time with this number of ranks; of all times if none was measured with it."""
    return float(kept_accuracy()["errors"].get(str(ranks), kept_accuracy()["errors"]["all"])["median"])


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Candidate is the prediction of one schedule.

    predicted_us: the time of the whole call on the slowest rank.
    computation_us, communication_us: the time of the busiest rank's kernels, and of its transfers.
    over_ideal_us: the time beyond the ideal, which is the longer half of the problem alone; 0 if there is none.
    """

    schedule: str
    chunks: int
    predicted_us: float
    computation_us: float
    communication_us: float
    over_ideal_us: float

    @property
    def spec(self) -> str:
        """The name of the schedule, as `--schedule` and `schedule=` take it."""
        return spec(self.schedule, self.chunks)

    def __str__(self) -> str:
        return f"{self.spec} {us(self.predicted_us)} us"


def predicted(schedule: Schedule, outcome: Outcome, machine: Machine) -> Candidate:
    """Return the prediction for a schedule. outcome: the result of `weft.perf.run`."""
    ideal_us = max(whole_gemm_us(machine, schedule.problem), whole_collective_us(machine, schedule.problem))
    return Candidate(
        schedule=schedule.name,
        chunks=schedule.chunks,
        predicted_us=outcome.total_us,
        computation_us=max(outcome.kernel_us),
        communication_us=max(outcome.transfer_us),
        over_ideal_us=max(0.0, outcome.total_us - ideal_us),
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The planner's answer for one problem on one machine.

    candidates: the simulated candidates, best first. `chosen` is the first.
    estimates: the ranking's time of every candidate in us, shortest first. It is empty if the caller gave schedules.
    sequential_us: the time of the sequential program. computation_us, communication_us: the times of the whole GEMM alone and
        of the whole collective alone. ideal_us: the longer of these two.
    spans: the predicted spans of the chosen schedule. why: the reason, in one or two sentences.
    """

    problem: Problem | LookupProblem | CollectiveProblem | ColumnProblem | ConcurrentProblem | RaggedProblem
    machine: str
    candidates: tuple[Candidate, ...]
    sequential_us: float
    computation_us: float
    communication_us: float
    why: str
    estimates: Mapping[str, float] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]

    @property
    def verdict(self) -> str:
        """One of PREDICTED_VERDICTS, on the chosen schedule. Gains and losses within the error of predictions are not clear."""
        found = judge(self.chosen.schedule, self.chosen.predicted_us, self.sequential_us)
        least = max(LEAST, median_error(self.problem.world_size)) * self.chosen.predicted_us
        gain_us = self.sequential_us - self.chosen.predicted_us
        if found == NOT_OVERLAPPED or gain_us >= least > 0:
            return found
        return NO_CLEAR_GAIN if gain_us > -least else SLOWER

    @property
    def ideal_us(self) -> float:
        return max(self.computation_us, self.communication_us)

    @property
    def share_of_ideal(self) -> float:
        """The ideal time over the predicted time. It is 1 if the call takes no longer than the ideal."""
        return self.ideal_us / self.chosen.predicted_us if self.chosen.predicted_us else 1.0

    def __str__(self) -> str:
        return (
            f"{self.problem} on {self.machine}: {self.chosen} (sequential {us(self.sequential_us)}, ideal {us(self.ideal_us)})"
        )
