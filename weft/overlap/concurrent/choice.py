"""A Chooser selects the schedule that runs collectives concurrently with a computation.

`Chooser.planned` measures nothing. Its choice depends only on the collectives and the machine profile, so all ranks choose the
same. If the time of the computation is not known, it assumes that the computation takes as long as the collectives, where
overlap gains most.

`Chooser.measured` is for a computation that may be repeated. It times the computation and the collectives separately, lets the
planner select candidates, and measures them in an autotuning run (weft.runtime.autotune). The caller passes collectives that
may run repeatedly (`rehearsed`). All programs that were bound for the autotuning run are released with their memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from weft.core.concurrent import ConcurrentProblem
from weft.core.errors import WeftError
from weft.core.logs import warn_once
from weft.overlap.concurrent.collectives import ConcurrentCollective
from weft.overlap.concurrent.executor import Executor
from weft.overlap.concurrent.program import Program
from weft.runtime.autotune import MARGIN, AutotuningRun, Measurement
from weft.runtime.bound import BoundProgram
from weft.runtime.choose import profile_for
from weft.runtime.groups import GROUPS, GroupState
from weft.schedules.concurrent import PLAIN, SEQUENTIAL, Abilities, build, candidates, parse

BASE = str(SEQUENTIAL)
RUNS, FINAL_RUNS = 3, 11
"""Each part is timed alone 3 times, and each finalist 11 times. The time of one schedule varies by 7% between runs, because the
GPU schedules its blocks before or after those of the GEMM."""


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


@dataclass(frozen=True, kw_only=True)
class Chooser:
    """A Chooser makes one choice.

    key: the name of this use.
    problem: the collectives, and the time of the computation if it is known.
    device: the device that runs both.
    abilities: which options of schedules the device supports.
    """

    key: str
    problem: ConcurrentProblem
    device: torch.device
    abilities: Abilities

    def planned(self, specs: Sequence[str] = ()) -> ConcurrentChoice:
        """Let the planner choose among specs, by default among all candidates.

        If the planner cannot predict, the choice is two plain streams, and the note says why.
        """
        # The simulator is imported only here, so that a schedule given by name also runs in a stock PyTorch container.
        from weft.perf.terms import whole_collective_us
        from weft.planner import plan

        specs = [spec for spec in specs or candidates(self.problem, self.abilities) if self.abilities.allow(parse(spec))]
        problem = self.problem
        try:
            machine = profile_for(self.device, problem.world_size)
            if problem.compute_us is None:
                problem = replace(problem, compute_us=whole_collective_us(machine, problem))
            found = plan(problem, machine, schedules=[build(problem, spec, fan_out=machine.fans_out) for spec in specs])
        except ValueError as error:
            return ConcurrentChoice(key=self.key, method=str(PLAIN), note=f"nothing can be predicted here: {error}")
        return ConcurrentChoice(
            key=self.key, method=found.chosen.schedule, problem=problem, note=f"the planner chose it: {found.why}"
        )

    def measured(
        self,
        executor: Executor,
        exchange: Callable[[str, int], tuple[int, ...]],
        programs: Callable[[str], Program],
        run: Callable[[Program], object],
        compute: Callable[[], object],
        collectives: Sequence[ConcurrentCollective],
    ) -> ConcurrentChoice:
        """Measure a few candidates, and choose the fastest.

        executor: runs and times calls on the device.
        exchange: (text, mine) -> the `mine` of every rank, by rank.
        programs: returns the program of a schedule by its name.
        run: runs the computation and the collectives by a program.
        compute: runs the computation alone.
        collectives: those to run, which may run repeatedly.
        """

        def agree(text: str, mine: int) -> tuple[int, ...]:
            return exchange(f"concurrent {self.key}: {text}", mine)

        def alone_us(name: str, call: Callable[[], object]) -> float:
            """Time one part alone on the slowest rank. The first call is not timed, because libraries load kernels in it."""
            call()
            runs = [max(agree(f"{name} alone: run {number}", executor.time_ns(call, 1))) for number in range(RUNS)]
            return statistics.median(runs) / 1e3

        def communicate(spec: str = BASE) -> None:
            with executor.running(programs(spec), collectives):
                pass

        def ready(spec: str) -> bool:
            """Return whether every rank can prepare a schedule. Warns if one cannot."""
            reason = ""
            try:
                executor.prepare(programs(spec), collectives)
            except WeftError:  # may also be a ValueError, but then the group has failed
                raise
            except ValueError as error:
                reason = str(error)
            if all(agree(f"{spec} is ready", int(not reason))):
                return True
            warn_once(f"{spec} is not tried for {self.key}: {reason or 'another rank cannot'}")
            return False

        def bind(spec: str) -> Program:
            """Return a program after one call of its collectives without the computation."""
            communicate(spec)
            return programs(spec)

        compute_us, communication_us = alone_us("computation", compute), alone_us("collectives", communicate)
        problem = replace(self.problem, compute_us=compute_us, communication_us=communication_us)
        base, *others = self._select_candidates(problem)
        specs = (base, *filter(ready, others))
        if len(specs) == 1:
            return ConcurrentChoice(key=self.key, method=specs[0], problem=problem)
        bound = _bound_programs(collectives)
        autotuning = AutotuningRun(
            bind=bind,
            drop=lambda program: None,
            call=run,
            timer=executor.time_ns,
            exchange=agree,
            final_runs=FINAL_RUNS,
            base_again=True,
        )
        program, measurements = autotuning.fastest(specs)
        _release_programs_since(bound, collectives)
        return ConcurrentChoice(key=self.key, method=program.name, problem=problem, measurements=measurements)

    def _select_candidates(self, problem: ConcurrentProblem) -> tuple[str, ...]:
        """Return the candidates to measure. They depend only on values that are equal on all ranks."""
        from weft.planner import plan
        from weft.planner.shortlist import AT_MOST, shortlist

        if not min(problem.compute_us or 0.0, problem.communication_us or 0.0) > 0:
            return (BASE,)
        specs = candidates(problem, self.abilities)
        try:
            machine = profile_for(self.device, problem.world_size)
            found = [build(problem, spec, fan_out=machine.fans_out) for spec in specs]
            return shortlist(plan(problem, machine, schedules=found))
        except WeftError:
            raise
        except ValueError as error:
            warn_once(f"the schedules of {self.key} are not ranked before they are measured: {error}")
            return specs[:AT_MOST]


def _bound_programs(collectives: Sequence[ConcurrentCollective]) -> dict[GroupState, set[BoundProgram]]:
    """Return the programs that are bound in the collectives' process groups."""
    states = (GROUPS.known(collective.ranks.group_name) for collective in collectives)
    return {state: set(state.bound()) for state in states if state}


def _release_programs_since(bound: Mapping[GroupState, set[BoundProgram]], collectives: Sequence[ConcurrentCollective]) -> None:
    """Release the programs that were bound after `bound` was taken.

    This includes the winner's. The measured calls average, but the user's call may sum, so it cannot reuse the program.
    """
    for state, programs in _bound_programs(collectives).items():
        state.forget(programs.difference(bound.get(state, ())))
