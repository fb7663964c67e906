"""The choice of the schedule that runs collectives concurrently with a computation.

`planned` measures nothing. Its choice depends only on the collectives and the machine profile, so all ranks choose the same. If
the time of the computation is not known, it assumes that the computation takes as long as the collectives, where overlap gains
most.

`worth_measuring` names the schedules that an autotuning run (weft.runtime.autotune) measures if the computation may be
repeated (weft.overlap.concurrent.calls).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from weft.core.concurrent import ConcurrentProblem
from weft.core.errors import WeftError, warn_once
from weft.runtime.autotune import MARGIN, Measurement
from weft.runtime.choose import profile_for
from weft.schedules.concurrent import PLAIN, SEQUENTIAL, Abilities, build, candidates, parse

if TYPE_CHECKING:
    from weft.planner.values import Plan


def share_of_ideal(us: float, *, sequential_us: float, ideal_us: float) -> float:
    """Return the share of the ideal speed-up that `us` reaches, as ConCCL defines it. It is 1 if no speed-up is possible.

    The ideal speed-up is that of hiding the shorter part completely.

    >>> share_of_ideal(120.0, sequential_us=150.0, ideal_us=100.0)
    0.5
    """
    whole = sequential_us / ideal_us - 1
    return (sequential_us / us - 1) / whole if whole > 0 else 1.0


@dataclass(frozen=True, kw_only=True)
class ConcurrentChoice:
    """A ConcurrentChoice is the schedule that was chosen for a call of weft.concurrent, or for a DDP or FSDP2 hook.

    key: the name that the caller gave to this use.
    method: the schedule's name.
    problem: the collectives, with the measured or predicted time of each part alone. None if it is not known.
    measurements: the measurement of each candidate. The first candidate wins ties.
    note: the reason for the choice, if nothing was measured.
    """

    key: str
    method: str
    problem: ConcurrentProblem | None = None
    measurements: tuple[Measurement, ...] = ()
    note: str = ""

    @property
    def us(self) -> dict[str, float]:
        """Return the measured times in us, by name."""
        return {measurement.spec: measurement.us for measurement in self.measurements}

    @property
    def ideal_us(self) -> float | None:
        """Return the time of the longer part alone, in us, which is the least that any overlap can reach."""
        return max(self.problem.compute_us or 0.0, self.problem.communication_us or 0.0) if self.problem else None

    @property
    def why(self) -> str:
        """Return the reason for the choice, in one sentence."""
        if self.note:
            return self.note
        if len(self.measurements) < 2:
            return "there is nothing to hide, nothing to hide it behind, or no other schedule that every rank can run"
        base, *others = self.measurements
        if self.method == base.spec:
            best = min(others, key=lambda measurement: measurement.us)
            often = "" if best.us >= (1 - MARGIN) * base.us else " each time it is measured"
            return f"nothing is faster by more than 1%{often}: {best.spec} takes {best.us:.0f} us, {base.spec} {base.us:.0f}"
        us = self.us[self.method]
        why = f"its {us:.0f} us are the least of {len(self.measurements)} methods; {base.spec} takes {base.us:.0f} us"
        if not self.ideal_us:
            return why
        share = share_of_ideal(us, sequential_us=base.us, ideal_us=self.ideal_us)
        return f"{why}. That is {share:.2f} of the ideal speed-up"

    def __str__(self) -> str:
        measured = ", ".join(f"{measurement.spec} {measurement.us:.0f} us" for measurement in self.measurements)
        figures = f"Measured: {measured}." if measured else "Nothing was measured."
        return f"{self.key} uses {self.method}, because {self.why.rstrip('.')}. {figures}"


def planned(
    key: str, problem: ConcurrentProblem, device: torch.device, abilities: Abilities, specs: Sequence[str] = ()
) -> ConcurrentChoice:
    """Let the planner choose among specs, by default among all candidates.

    If the planner cannot predict, the choice is two plain streams, and the note says why.
    """
    specs = [spec for spec in specs or candidates(problem, abilities) if abilities.allow(parse(spec))]
    try:
        problem, found = _plan(problem, device, specs)
    except ValueError as error:
        return ConcurrentChoice(key=key, method=str(PLAIN), note=f"nothing can be predicted here: {error}")
    return ConcurrentChoice(key=key, method=found.chosen.schedule, problem=problem, note=f"the planner chose it: {found.why}")


def worth_measuring(key: str, problem: ConcurrentProblem, device: torch.device, abilities: Abilities) -> tuple[str, ...]:
    """Return the candidates to measure, sequential first. They depend only on values that are equal on all ranks."""
    from weft.planner.choose import AT_MOST, shortlist

    if not min(problem.compute_us or 0.0, problem.communication_us or 0.0) > 0:
        return (str(SEQUENTIAL),)
    specs = candidates(problem, abilities)
    try:
        return shortlist(_plan(problem, device, specs)[1])
    except WeftError:
        raise
    except ValueError as error:
        warn_once(f"the schedules of {key} are not ranked before they are measured: {error}")
        return specs[:AT_MOST]


def _plan(problem: ConcurrentProblem, device: torch.device, specs: Sequence[str]) -> tuple[ConcurrentProblem, Plan]:
    """Return the problem with the time of the computation, and the planner's plan."""
    # The simulator is imported only here, so that a schedule given by name also runs in a stock PyTorch container.
    from weft.perf.terms import whole_collective_us
    from weft.planner import plan

    machine = profile_for(device, problem.world_size)
    if problem.compute_us is None:
        problem = replace(problem, compute_us=whole_collective_us(machine, problem))
    return problem, plan(problem, machine, schedules=[build(problem, spec, fan_out=machine.fans_out) for spec in specs])
