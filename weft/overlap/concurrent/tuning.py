"""Which schedule runs collectives beside a computation: measured in one go, or while the computation is in use.

In one go, where the computation may be repeated (`ConcurrentTuner.in_one_go`): computation and collectives are timed alone,
the planner says which schedules are worth measuring, and weft.runtime.trial measures them. What the collectives read is kept,
and put back at the end, where they would change it. What copy engines were bound to meanwhile is given back, with its memory.

In use (`ConcurrentTuner.in_use`), by blocks of consecutive uses, or of training steps, that run the same schedule:

    screening   a block of each schedule, first the one to beat      ranks meet: at most 3 that come near it go on
    finals      3 or 4 rounds: a block of each of those, last the    ranks meet: the choice
                one to beat

No use waits for anything but where ranks meet. There each host waits for its own device to have come so far, and all get the
numbers of all; the slowest rank's count, and the schedule to beat wins ties. A block's first uses are not counted: copy engines
are bound and graphs captured in them, and the host enqueues a step while the GPU is still in the one before, so that a step's
time is also that of its neighbour. Finals are there because of several schedules that are as fast the fastest looks faster than
it is, so it has to be faster again, in blocks that did not choose it. Where a training step is bound by the host, blocks of one
schedule differ by 5% (fully_shard on 2 x H200), and a median of a few does not tell 2% from nothing: there a schedule is chosen
only if its slowest block is faster than the fastest of the one to beat (`StepBlocks.strict`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from weft.comm.rank_group import RankGroup
from weft.core.concurrent import ConcurrentProblem
from weft.core.errors import WeftError
from weft.core.logs import warn_once
from weft.overlap.concurrent.collectives import Collective, rehearsed
from weft.overlap.concurrent.executor import Executor
from weft.runtime.bound import BoundProgram
from weft.runtime.choose import profile_for
from weft.runtime.groups import GROUPS, GroupState
from weft.runtime.trial import MARGIN, Contest, Trial
from weft.schedules.concurrent import SEQUENTIAL, Abilities, Method, build, candidates, parse

BASE = str(SEQUENTIAL)
RUNS, FINAL_RUNS = 3, 11
"""Of a part alone, and of each schedule in the final in one go: its times differ by 7% from run to run, as its blocks come
before a GEMM's or behind them."""
SOUNDINGS = 3
"""Sequential uses before the screening; all but the first say what each part takes alone."""
IN_USE = 5
"""Schedules that uses try."""
FINALISTS, CLOSE = 3, 0.1
"""Schedules that go on to the finals, beside the one to beat: those within CLOSE of it."""


@dataclass(frozen=True, kw_only=True)
class StepBlocks:
    """counted: uses of a block that count; first, again: those before them, in the screening and in the finals. rounds: finals.
    strict: every block of the chosen one is faster than every block of the one to beat; else the median of their ratios."""

    counted: int
    first: int
    again: int
    rounds: int
    strict: bool

    def most(self, schedules: int) -> int:
        """Uses that trying so many schedules takes at most.

        >>> STEPS.most(6), USES.most(5)
        (94, 22)
        """
        finals = self.rounds * (1 + min(FINALISTS, schedules - 1))
        return schedules * (self.first + self.counted) + finals * (self.again + self.counted) if schedules > 1 else 0


USES = StepBlocks(counted=1, first=1, again=0, rounds=3, strict=False)
"""Uses of weft.concurrent: each begins and ends by itself."""
STEPS = StepBlocks(counted=3, first=2, again=1, rounds=4, strict=True)
"""Training steps: one begins where the other ends."""


def share_of_ideal(us: float, *, sequential_us: float, ideal_us: float) -> float:
    """Of the speed-up that hiding everything would bring, the share that `us` reaches: ConCCL's measure. 1 where there is none.

    >>> share_of_ideal(120.0, sequential_us=150.0, ideal_us=100.0)
    0.5
    """
    whole = sequential_us / ideal_us - 1
    return (sequential_us / us - 1) / whole if whole > 0 else 1.0


@dataclass(frozen=True, kw_only=True)
class ConcurrentChoice:
    """What a key's uses run as. way: the schedule's name. problem: with what each part takes alone; None where that was not
    measured. trials: what was measured of each schedule, first the one that wins ties; nothing where there was only one.
    note: of a hook, instead of a reason: that its way was given, or how far it has come in trying schedules; then way is what
    it runs now."""

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
            return (
                "it is the only way here" if self.problem is None else "there is nothing to hide, or nothing to hide it behind"
            )
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


class Sample(NamedTuple):
    """Marks of one use: its begin, where its collectives have been enqueued, its end."""

    begin: Any
    enqueued: Any
    end: Any


class UseTurn(NamedTuple):
    """What is known when a use begins. last: the sample of the one before. collectives: its own; those of another use may not
    be touched any more."""

    last: Sample
    collectives: Sequence[Collective]


Turns = Generator[str, UseTurn, ConcurrentChoice]
"""Yields the name of each use's schedule, is sent the next one's turn, and returns the choice."""


def in_blocks(
    tuner: ConcurrentTuner, blocks: StepBlocks, specs: Sequence[str], problem: ConcurrentProblem | None = None
) -> Turns:
    """The fastest of some schedules. specs: first the one to beat, which every other has to do by more than 1%."""
    base, *others = specs
    if not others:
        return ConcurrentChoice(key=tuner.key, way=base, problem=problem)
    us = _us(tuner, blocks, "screening", (yield from _round(specs, blocks.first, blocks.counted)))
    near = sorted((spec for spec in others if us[spec] <= (1 + CLOSE) * us[base]), key=lambda spec: us[spec])[:FINALISTS]
    spans = []
    for _ in range(blocks.rounds if near else 0):
        spans.append((yield from _round((*near, base), blocks.again, blocks.counted)))
    finals = [_us(tuner, blocks, f"final {number}", found) for number, found in enumerate(spans)]
    way, trials = _fastest(specs, us, finals, strict=blocks.strict)
    return ConcurrentChoice(key=tuner.key, way=way, problem=problem, trials=trials)


def _round(specs: Sequence[str], uncounted: int, counted: int) -> Generator[str, UseTurn, dict[str, tuple[Any, Any]]]:
    """A block of each schedule; where what counts of it begins and ends."""
    spans = {}
    for spec in specs:
        samples = []
        for _ in range(uncounted + counted):
            samples.append((yield spec).last)
        spans[spec] = samples[uncounted].begin, samples[-1].end
    return spans


def _us(tuner: ConcurrentTuner, blocks: StepBlocks, text: str, spans: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
    """A use's time in each block, on the slowest rank. Ranks meet."""
    return {spec: tuner.slowest_us(f"{text}, {spec}", [span]) / blocks.counted for spec, span in spans.items()}


def _fastest(
    specs: Sequence[str], screened: Mapping[str, float], finals: Sequence[Mapping[str, float]], *, strict: bool
) -> tuple[str, tuple[Trial, ...]]:
    """Ratios count: each block's to that of the schedule to beat in the same round. Times are told in that one's own."""
    base = specs[0]
    ratios = {spec: screened[spec] / screened[base] for spec in specs}
    for spec in finals[0] if finals else ():
        ratios[spec] = statistics.median(us[spec] / us[base] for us in finals)
    base_us = statistics.median(us[base] for us in finals or [screened])
    slowest = {spec: max(us[spec] for us in finals) for spec in (finals[0] if finals else ())}
    least_us = min((us[base] for us in finals), default=0.0)
    able = (spec for spec in slowest if ratios[spec] < 1 - MARGIN and (not strict or slowest[spec] < least_us))
    way = min(able, key=lambda spec: ratios[spec], default=base)
    return way, tuple(Trial(spec=spec, us=ratios[spec] * base_us) for spec in specs)


@dataclass(frozen=True, kw_only=True)
class ConcurrentTuner:
    """What all measurements of one key have in common.

    rank_group: the ranks that agree. meet: how they do. executor: runs and times. problem: of some collectives. residents: caps
    of the computation's kernels to try, asked for once these have run. fixed: nothing of the computation can be changed any
    more: it is a graph.
    """

    key: str
    rank_group: RankGroup
    meet: Callable[[str, int], tuple[int, ...]]
    executor: Executor
    problem: Callable[[Sequence[Collective]], ConcurrentProblem]
    residents: Callable[[], tuple[int, ...]] = tuple
    fixed: bool = False

    def in_one_go(
        self, run: Callable[[Method], object], compute: Callable[[], object], collectives: Sequence[Collective]
    ) -> ConcurrentChoice:
        """Choose now. run: computation and collectives, by a schedule. compute: the computation alone."""

        def communicate() -> None:
            with self.executor.running(SEQUENTIAL, collectives):
                pass

        compute_us, communication_us = self._alone_us("computation", compute), self._alone_us("collectives", communicate)
        problem = replace(self.problem(collectives), compute_us=compute_us, communication_us=communication_us)
        bound = _bound(collectives)
        specs = self.ready(self._contenders(problem, collectives, None), collectives)
        if len(specs) == 1:
            return ConcurrentChoice(key=self.key, way=specs[0], problem=problem)
        contest = Contest(
            bind=parse,
            drop=lambda method: None,
            call=run,
            timer=self.executor.time_ns,
            meet=self._meet,
            final_runs=FINAL_RUNS,
            base_again=True,
        )
        method, trials = contest.fastest(specs)
        _forget_since(bound, collectives)
        return ConcurrentChoice(key=self.key, way=str(method), problem=problem, trials=trials)

    def in_use(self) -> Turns:
        """Choose a use at a time, from what each part takes alone on. Between uses it holds none of their tensors."""
        before = []
        for _ in range(SOUNDINGS - 1):
            before.append((yield BASE).last)
        specs, problem = self._sounded(before[1:], (yield BASE))
        return (yield from in_blocks(self, USES, specs, problem))

    def _sounded(self, before: Sequence[Sample], turn: UseTurn) -> tuple[tuple[str, ...], ConcurrentProblem]:
        """(the schedules that uses try, what each part takes alone). turn: the use that begins now, whose collectives are
        rehearsed."""
        sounded, collectives = [*before, turn.last], turn.collectives
        problem = replace(
            self.problem(collectives),
            compute_us=self.slowest_us("computation", [(s.enqueued, s.end) for s in sounded]),
            communication_us=self.slowest_us("collectives", [(s.begin, s.enqueued) for s in sounded]),
        )
        specs = self._contenders(problem, collectives, IN_USE)
        with rehearsed(collectives) as again:
            return self.ready(specs, again), problem

    def _contenders(
        self, problem: ConcurrentProblem, collectives: Sequence[Collective], at_most: int | None
    ) -> tuple[str, ...]:
        """The planner's shortlist. A pure function of what ranks have agreed on."""
        # Only here is the simulator needed, with its packages: a stock PyTorch container runs what is named.
        from weft.planner import plan
        from weft.planner.shortlist import AT_MOST, shortlist

        if not min(problem.compute_us or 0.0, problem.communication_us or 0.0) > 0:
            return (BASE,)
        specs = candidates(problem, self._abilities(collectives))
        try:
            machine = profile_for(self.executor.device, problem.world_size)
            found = [build(problem, spec, fan_out=machine.fans_out) for spec in specs]
            return shortlist(plan(problem, machine, schedules=found), at_most)
        except ValueError as error:
            warn_once(f"the schedules of {self.key} are not ranked before they are measured: {error}")
            return specs[: at_most or AT_MOST]

    def _abilities(self, collectives: Sequence[Collective]) -> Abilities:
        found = self.executor.abilities(collectives)
        return replace(found, left=False) if self.fixed else replace(found, residents=self.residents())

    def ready(self, specs: Sequence[str], collectives: Sequence[Collective]) -> tuple[str, ...]:
        """Those that all ranks can run, the first without a question; for each other a warning. Each is rehearsed once, without
        its computation."""

        def rehearse(method: Method) -> None:
            with self.executor.running(method, collectives):
                pass

        def can(spec: str) -> bool:
            steps = (lambda method: self.executor.prepare(method, collectives), rehearse)
            return all(self._on_all(spec, step) for step in steps)

        return (specs[0], *(spec for spec in specs[1:] if can(spec)))

    def _on_all(self, spec: str, step: Callable[[Method], None]) -> bool:
        """Whether a step is possible on every rank; a warning where it is not."""
        reason = ""
        try:
            step(parse(spec))
        except WeftError:  # some are ValueErrors, too, but the group is broken
            raise
        except ValueError as error:
            reason = str(error)
        if all(self._meet(f"{spec} is ready", int(not reason))):
            return True
        warn_once(f"{spec} is not tried for {self.key}: {reason or 'another rank cannot'}")
        return False

    def _meet(self, text: str, mine: int) -> tuple[int, ...]:
        return self.meet(f"concurrent {self.key}: {text}", mine)

    def _alone_us(self, name: str, call: Callable[[], object]) -> float:
        """A part by itself, on the slowest rank. Once before it counts, as libraries load what they need."""
        call()
        runs = [max(self._meet(f"{name} alone: run {run}", self.executor.time_ns(call, 1))) for run in range(RUNS)]
        return statistics.median(runs) / 1e3

    def slowest_us(self, name: str, spans: Sequence[tuple[Any, Any]]) -> float:
        """The median over spans of the slowest rank's time."""
        runs = [max(self._meet(f"{name}: use {use}", self._ns(*span))) for use, span in enumerate(spans)]
        return statistics.median(runs) / 1e3

    def _ns(self, begin: Any, end: Any) -> int:
        self.rank_group.until(
            lambda: self.executor.passed(end), lambda: f"concurrent {self.key}: the device did not come to its end"
        )
        return self.executor.between_ns(begin, end)


def _bound(collectives: Sequence[Collective]) -> dict[GroupState, set[BoundProgram]]:
    """The programs of the collectives' groups."""
    states = (GROUPS.known(collective.ranks.group_name) for collective in collectives)
    return {state: set(state.programs.bound()) for state in states if state}


def _forget_since(bound: Mapping[GroupState, set[BoundProgram]], collectives: Sequence[Collective]) -> None:
    """Give back what has been bound since, also that of the schedule that won: a use sums where its rehearsal took means."""
    for state, programs in _bound(collectives).items():
        state.forget(programs.difference(bound.get(state, ())))
