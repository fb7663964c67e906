"""Which schedule runs collectives beside a computation: what the planner predicts, or what is measured.

`Chooser.planned` measures nothing: it is a function of the collectives and the machine profile, so ranks choose alike. A
computation that is not known is taken to last as long as the collectives, which is where overlap gains most.

`Chooser.measured` is for a computation that may be repeated. Computation and collectives are timed alone, the planner says
which schedules are worth measuring, and weft.runtime.trial measures them. The caller passes collectives that may be run again
(`rehearsed`). Programs that were bound for the trial are released, with their memory.
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
from weft.runtime.bound import BoundProgram
from weft.runtime.choose import profile_for
from weft.runtime.groups import GROUPS, GroupState
from weft.runtime.trial import MARGIN, Contest, Trial
from weft.schedules.concurrent import PLAIN, SEQUENTIAL, Abilities, build, candidates, parse

BASE = str(SEQUENTIAL)
RUNS, FINAL_RUNS = 3, 11
"""How often each part is timed alone, and each schedule of the final. The time of one schedule varies by 7% between runs, as
its blocks are scheduled before those of the GEMM or after them."""


def share_of_ideal(us: float, *, sequential_us: float, ideal_us: float) -> float:
    """Of the speed-up that hiding everything would bring, the share that `us` reaches: ConCCL's measure. 1 where there is none.

    >>> share_of_ideal(120.0, sequential_us=150.0, ideal_us=100.0)
    0.5
    """
    whole = sequential_us / ideal_us - 1
    return (sequential_us / us - 1) / whole if whole > 0 else 1.0


@dataclass(frozen=True, kw_only=True)
class ConcurrentChoice:
    """The schedule that was chosen for a key of weft.concurrent, or for a hook of DDP or FSDP2. way: the schedule's name.
    problem: with what each part takes alone, as it was measured or predicted; None where it is not known. trials: what was
    measured of each schedule, first the one that wins ties. note: why, where nothing was measured."""

    key: str
    way: str
    problem: ConcurrentProblem | None = None
    trials: tuple[Trial, ...] = ()
    note: str = ""

    @property
    def us(self) -> dict[str, float]:
        """The measured times in us, by name."""
        return {trial.spec: trial.us for trial in self.trials}

    @property
    def ideal_us(self) -> float | None:
        """The longer of the two parts alone."""
        return max(self.problem.compute_us or 0.0, self.problem.communication_us or 0.0) if self.problem else None

    @property
    def why(self) -> str:
        """The choice, in a sentence."""
        if self.note:
            return self.note
        if len(self.trials) < 2:
            return "there is nothing to hide, nothing to hide it behind, or no other schedule that every rank can run"
        base, *others = self.trials
        if self.way == base.spec:
            best = min(others, key=lambda trial: trial.us)
            often = "" if best.us >= (1 - MARGIN) * base.us else " each time it is measured"
            return f"nothing is faster by more than 1%{often}: {best.spec} takes {best.us:.0f} us, {base.spec} {base.us:.0f}"
        us = self.us[self.way]
        why = f"{us:.0f} us is the least of {len(self.trials)} ways; {base.spec} takes {base.us:.0f}"
        if not self.ideal_us:
            return why
        share = share_of_ideal(us, sequential_us=base.us, ideal_us=self.ideal_us)
        return f"{why}, {share:.2f} of the ideal speed-up"

    def __str__(self) -> str:
        measured = ", ".join(f"{trial.spec} {trial.us:.0f} us" for trial in self.trials)
        return f"{self.key}: {self.way}, because {self.why} ({measured or 'not measured'})"


@dataclass(frozen=True, kw_only=True)
class Chooser:
    """One choice. key: names it. problem: what is to run. device: where it runs. abilities: what the device can do of it."""

    key: str
    problem: ConcurrentProblem
    device: torch.device
    abilities: Abilities

    def planned(self, specs: Sequence[str] = ()) -> ConcurrentChoice:
        """The planner's choice among specs, default: all candidates. Without a prediction it is two plain streams, and the note
        says why."""
        # Only here is the simulator needed, with its packages: a stock PyTorch container runs what is named.
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
            return ConcurrentChoice(key=self.key, way=str(PLAIN), note=f"nothing is predicted here: {error}")
        return ConcurrentChoice(key=self.key, way=found.chosen.schedule, problem=problem, note=f"it is planned: {found.why}")

    def measured(
        self,
        executor: Executor,
        meet: Callable[[str, int], tuple[int, ...]],
        programs: Callable[[str], Program],
        run: Callable[[Program], object],
        compute: Callable[[], object],
        collectives: Sequence[ConcurrentCollective],
    ) -> ConcurrentChoice:
        """The fastest of a few. meet: ranks exchange a number. programs: by name. run: computation and collectives, by a
        program. compute: the computation alone."""

        def agree(text: str, mine: int) -> tuple[int, ...]:
            return meet(f"concurrent {self.key}: {text}", mine)

        def alone_us(name: str, call: Callable[[], object]) -> float:
            """A part by itself, on the slowest rank. The first call does not count: libraries load what they need."""
            call()
            runs = [max(agree(f"{name} alone: run {number}", executor.time_ns(call, 1))) for number in range(RUNS)]
            return statistics.median(runs) / 1e3

        def communicate(spec: str = BASE) -> None:
            with executor.running(programs(spec), collectives):
                pass

        def ready(spec: str) -> bool:
            """Whether every rank has what a schedule needs; a warning where one has not."""
            reason = ""
            try:
                executor.prepare(programs(spec), collectives)
            except WeftError:  # some are ValueErrors, too, but the group is broken
                raise
            except ValueError as error:
                reason = str(error)
            if all(agree(f"{spec} is ready", int(not reason))):
                return True
            warn_once(f"{spec} is not tried for {self.key}: {reason or 'another rank cannot'}")
            return False

        def bind(spec: str) -> Program:
            """A program, rehearsed once without its computation."""
            communicate(spec)
            return programs(spec)

        compute_us, communication_us = alone_us("computation", compute), alone_us("collectives", communicate)
        problem = replace(self.problem, compute_us=compute_us, communication_us=communication_us)
        base, *others = self._shortlist(problem)
        specs = (base, *filter(ready, others))
        if len(specs) == 1:
            return ConcurrentChoice(key=self.key, way=specs[0], problem=problem)
        bound = _bound(collectives)
        contest = Contest(
            bind=bind,
            drop=lambda program: None,
            call=run,
            timer=executor.time_ns,
            meet=agree,
            final_runs=FINAL_RUNS,
            base_again=True,
        )
        program, trials = contest.fastest(specs)
        _forget_since(bound, collectives)
        return ConcurrentChoice(key=self.key, way=program.name, problem=problem, trials=trials)

    def _shortlist(self, problem: ConcurrentProblem) -> tuple[str, ...]:
        """What is measured. A pure function of what ranks have agreed on."""
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


def _bound(collectives: Sequence[ConcurrentCollective]) -> dict[GroupState, set[BoundProgram]]:
    """The programs of the collectives' groups."""
    states = (GROUPS.known(collective.ranks.group_name) for collective in collectives)
    return {state: set(state.programs.bound()) for state in states if state}


def _forget_since(bound: Mapping[GroupState, set[BoundProgram]], collectives: Sequence[ConcurrentCollective]) -> None:
    """Give back what has been bound since, also that of the schedule that won: a use sums where its rehearsal took means."""
    for state, programs in _bound(collectives).items():
        state.forget(programs.difference(bound.get(state, ())))
