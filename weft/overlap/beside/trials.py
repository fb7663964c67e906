"""Which way a key takes: found by a trial, in one go where the computation may be repeated, else a use at a time.

One go (`contest`). Computation and collectives are timed alone, which says which ways are worth measuring; weft.runtime.trial
measures them, and the best of them and sequential once more, in turns. What the collectives read is kept, and put back at the
end, where they would change it. What copy engines were bound to meanwhile goes, and its memory with it.

A use at a time (`rotation`). Every use is one the caller asked for, and runs once:

    uses                     way                              then
    3                        sequential                       ranks meet: the last two say what each part takes alone
    4 x each of at most 5    each in turn, sequential first   ranks meet: the last three of each are compared
    all others               the one that has been chosen

Where ranks meet, each waits on its host for its own device to have come so far, and all get the numbers of all; the slowest
rank's count, medians are compared, and sequential wins ties. No other use waits for anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.comm.rank_group import RankGroup
from weft.core.errors import WeftError
from weft.core.logs import warn_once
from weft.core.machine import Machine
from weft.overlap.beside.collectives import Collective, rehearsed
from weft.overlap.beside.device import Device
from weft.planner.ways import SEQUENTIAL, Abilities, Load, Way, parse, share_of_ideal, shortlist
from weft.runtime.bound import BoundProgram
from weft.runtime.groups import GROUPS, GroupState
from weft.runtime.nearest import nearest_profile
from weft.runtime.trial import BASE, MARGIN, Contest, Trial, calls_of_a_run, leader

SOUNDINGS, ROUNDS, FINAL_RUNS, FINAL_TURNS = 3, 3, 11, 5
"""In the final: a way's times differ by 7% from run to run, as its blocks come before a GEMM's or behind them."""
IN_ROTATION = 5
"""Ways that uses take in turn."""


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What a key's uses run as. way: its spec. load: each part alone; None where it was not measured by itself. trials: what
    was measured of each way, first the one that wins ties; nothing where there was only one."""

    key: str
    way: str
    load: Load | None = None
    trials: tuple[Trial, ...] = ()

    @property
    def us(self) -> dict[str, float]:
        """The measured times in us, by way."""
        return {trial.spec: trial.us for trial in self.trials}

    @property
    def why(self) -> str:
        """The choice, in a sentence."""
        if len(self.trials) < 2:
            return "it is the only way here" if self.load is None else "there is nothing to hide, or nothing to hide it behind"
        base, *others = self.trials
        if self.way == base.spec:
            best = min(others, key=lambda trial: trial.us)
            often = "" if best.us >= (1 - MARGIN) * base.us else " each time it is measured"
            return f"nothing is faster by more than 1%{often}: {best.spec} takes {best.us:.0f} us, {base.spec} {base.us:.0f}"
        us = self.us[self.way]
        why = f"{us:.0f} us is the least of {len(self.trials)} ways; {base.spec} takes {base.us:.0f}"
        if self.load is None:
            return why
        share = share_of_ideal(us, sequential_us=base.us, ideal_us=self.load.ideal_us)
        return f"{why}, {share:.2f} of the ideal speed-up"

    def __str__(self) -> str:
        measured = ", ".join(f"{trial.spec} {trial.us:.0f} us" for trial in self.trials)
        return f"{self.key}: {self.way}, because {self.why} ({measured or 'not measured'})"


@dataclass(frozen=True)
class Sample:
    """Marks of one use: its begin, where its collectives have been enqueued, its end."""

    begin: Any
    enqueued: Any
    end: Any


@dataclass(frozen=True)
class Turn:
    """What is known when a use begins. last: the sample of the one before, None where it has none. collectives: its own; those
    of another use may not be touched any more."""

    last: Sample | None
    collectives: Sequence[Collective]


Steps = Generator[str, Turn, Settled]
"""Yields the way of each use, is sent the next one's turn, and returns the choice."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """What all trials of one key have in common.

    rank_group: the ranks that agree. meet: how they do. device: runs and times. residents: caps of the computation's kernels to
    try, asked for once these have run. fixed: nothing of the computation can be changed any more: it is a graph.
    """

    key: str
    rank_group: RankGroup
    meet: Callable[[str, int], tuple[int, ...]]
    device: Device
    residents: Callable[[], tuple[int, ...]] = tuple
    fixed: bool = False

    def contest(
        self, run: Callable[[Way], object], compute: Callable[[], object], collectives: Sequence[Collective]
    ) -> Settled:
        """Find the way in one go. run: computation and collectives, in a way. compute: the computation alone."""

        def communicate() -> None:
            with self.device.running(SEQUENTIAL, collectives):
                pass

        found = Load(
            compute_us=self._alone_us("computation", compute),
            communication_us=self._alone_us("collectives", communicate),
            reduces=any(collective.reduces for collective in collectives),
        )
        abilities, bound = self._abilities(collectives), _bound(collectives)
        specs = self.ready(shortlist(abilities, found, self._machine), collectives)
        if len(specs) == 1:
            return Settled(key=self.key, way=specs[0], load=found)
        contest = Contest(
            bind=parse, drop=lambda way: None, call=run, timer=self.device.time_ns, meet=self._meet, final_runs=FINAL_RUNS
        )
        way, trials = contest.fastest(specs)
        again = self._in_turns((SEQUENTIAL, way), run, trials) if way.beside else {}
        trials = tuple(Trial(spec=trial.spec, us=again.get(trial.spec, trial.us)) for trial in trials)
        chosen = leader([trial for trial in trials if trial.spec in (BASE, str(way))])
        _forget_since(bound, collectives)
        return Settled(key=self.key, way=chosen.spec, load=found, trials=trials)

    def _in_turns(self, ways: Sequence[Way], run: Callable[[Way], object], trials: Sequence[Trial]) -> dict[str, float]:
        """us of each way. The contest timed sequential first, and its best last: a GPU that has warmed up meanwhile, or cooled,
        would choose between them."""
        us = {trial.spec: trial.us for trial in trials}
        calls = {way: calls_of_a_run(round(1e3 * us[str(way)])) for way in ways}
        times: dict[str, list[int]] = {str(way): [] for way in ways}
        for turn in range(FINAL_TURNS):
            for way in ways:
                mine = self.device.time_ns(lambda way=way: run(way), calls[way])  # type: ignore[misc]
                times[str(way)].append(max(self._meet(f"{way} in turns: {turn}", mine)))
        return {spec: statistics.median(some) / 1e3 for spec, some in times.items()}

    def rotation(self) -> Steps:
        """Find the way a use at a time, from what each part takes alone on. Between uses it holds none of their tensors."""
        before = []
        for _ in range(SOUNDINGS - 1):
            before.append((yield BASE).last)
        tried, found = self._sounded(before, (yield BASE))
        return (yield from self.turns(tried, found))

    def _sounded(self, before: Sequence[Sample | None], turn: Turn) -> tuple[tuple[str, ...], Load]:
        """(the ways that uses take in turn, what each part takes alone), by all soundings but the first. turn: the use that
        begins now, whose collectives are rehearsed."""
        sounded, collectives = [sample for sample in (*before[1:], turn.last) if sample is not None], turn.collectives
        found = Load(
            compute_us=self.slowest_us("computation", [(s.enqueued, s.end) for s in sounded]),
            communication_us=self.slowest_us("collectives", [(s.begin, s.enqueued) for s in sounded]),
            reduces=any(collective.reduces for collective in collectives),
        )
        specs = shortlist(self._abilities(collectives), found, self._machine, IN_ROTATION)
        with rehearsed(collectives) as again:
            return self.ready(specs, again), found

    def turns(self, specs: Sequence[str], found: Load | None = None) -> Steps:
        """Find the fastest of some ways, each taken in turn; the first turn is not counted. specs: first what wins ties."""
        if len(specs) == 1:
            return Settled(key=self.key, way=specs[0], load=found)
        samples: dict[str, list[Sample]] = {spec: [] for spec in specs}
        for round_ in range(1 + ROUNDS):
            for spec in specs:
                last = (yield spec).last
                if round_ and last is not None:
                    samples[spec].append(last)
        spans = {spec: [(s.begin, s.end) for s in some] for spec, some in samples.items()}
        trials = tuple(Trial(spec=spec, us=self.slowest_us(spec, some)) for spec, some in spans.items())
        return Settled(key=self.key, way=leader(trials).spec, load=found, trials=trials)

    def _abilities(self, collectives: Sequence[Collective]) -> Abilities:
        found = self.device.abilities(collectives)
        return replace(found, left=False) if self.fixed else replace(found, residents=self.residents())

    @property
    def _machine(self) -> Machine:
        return nearest_profile(self.device.device)

    def ready(self, specs: Sequence[str], collectives: Sequence[Collective]) -> tuple[str, ...]:
        """Those that all ranks can run, the first without a question; for each other a warning. Each is rehearsed once, without
        its computation."""

        def rehearse(way: Way) -> None:
            with self.device.running(way, collectives):
                pass

        def can(spec: str) -> bool:
            steps = (lambda way: self.device.prepare(way, collectives), rehearse)
            return all(self._on_all(spec, step) for step in steps)

        return (specs[0], *(spec for spec in specs[1:] if can(spec)))

    def _on_all(self, spec: str, step: Callable[[Way], None]) -> bool:
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
        runs = [max(self._meet(f"{name} alone: run {run}", self.device.time_ns(call, 1))) for run in range(ROUNDS)]
        return statistics.median(runs) / 1e3

    def slowest_us(self, name: str, spans: Sequence[tuple[Any, Any]]) -> float:
        """The median over spans of the slowest rank's time."""
        runs = [max(self._meet(f"{name}: use {use}", self._ns(*span))) for use, span in enumerate(spans)]
        return statistics.median(runs) / 1e3

    def _ns(self, begin: Any, end: Any) -> int:
        self.rank_group.until(
            lambda: self.device.passed(end), lambda: f"concurrent {self.key}: the device did not come to its end"
        )
        return self.device.between_ns(begin, end)


def _bound(collectives: Sequence[Collective]) -> dict[GroupState, set[BoundProgram]]:
    """The programs of the collectives' groups."""
    states = (GROUPS.known(collective.ranks.group_name) for collective in collectives)
    return {state: state.programs() for state in states if state}


def _forget_since(bound: Mapping[GroupState, set[BoundProgram]], collectives: Sequence[Collective]) -> None:
    """Give back what has been bound since, also that of the way that won: a use sums where its rehearsal took means."""
    for state, programs in _bound(collectives).items():
        state.forget(programs.difference(bound.get(state, ())))
