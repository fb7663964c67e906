"""Which way a key takes: found by a trial, in one go where the computation may be repeated, else a use at a time.

One go (`contest`). Computation and collectives are timed alone, which says which ways are worth measuring; weft.execute.trial
measures them. The collectives run on tensors of the trial's own where they would change what they read.

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
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.beside.collectives import Collective
from weft.beside.device import Device
from weft.errors import WeftError
from weft.execute.choose import machine_for
from weft.execute.trial import BASE, Contest, Trial, leader
from weft.machine import Machine, load
from weft.planner.ways import SEQUENTIAL, Abilities, Load, Way, parse, share_of_ideal, shortlist
from weft.team import Team

SOUNDINGS, ROUNDS = 3, 3
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
            return f"nothing is faster by more than 1%: {best.spec} takes {best.us:.0f} us, {base.spec} {base.us:.0f}"
        us = self.us[self.way]
        share = f", {share_of_ideal(self.load, us):.2f} of the ideal speed-up" if self.load else ""
        return f"{us:.0f} us is the least of {len(self.trials)} ways; {base.spec} takes {base.us:.0f}{share}"

    def __str__(self) -> str:
        measured = ", ".join(f"{trial.spec} {trial.us:.0f} us" for trial in self.trials)
        return f"{self.key}: {self.way}, because {self.why} ({measured or 'not measured'})"


@dataclass(frozen=True)
class Sample:
    """Marks of one use: its begin, where its collectives have been enqueued, its end."""

    begin: Any
    enqueued: Any
    end: Any


Steps = Generator[str, Sample | None, Settled]
"""Yields the way of each use, is sent that use's sample (None where it has none) before the next, and returns the choice."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """What all trials of one key have in common.

    team: the ranks that agree. device: runs and times. residents: caps of the computation's kernels to try, asked for once
    these have run. fixed: nothing of the computation can be changed any more: it is a graph.
    """

    key: str
    team: Team
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
        specs = shortlist(self._abilities(collectives), found, self._machine)
        if len(specs) == 1:
            return Settled(key=self.key, way=specs[0], load=found)
        way, trials = Contest(
            bind=lambda spec: self._ready(parse(spec), collectives),
            drop=lambda way: None,
            call=run,
            timer=self.device.time_ns,
            meet=self._meet,
        ).fastest(specs)
        return Settled(key=self.key, way=str(way), load=found, trials=trials)

    def rotation(self, collectives: Sequence[Collective]) -> Steps:
        """Find the way a use at a time, from what each part takes alone on."""
        sounded = []
        for use in range(SOUNDINGS):
            sample = yield BASE
            if use and sample is not None:
                sounded.append(sample)
        found = Load(
            compute_us=self._slowest_us("computation", [(s.enqueued, s.end) for s in sounded]),
            communication_us=self._slowest_us("collectives", [(s.begin, s.enqueued) for s in sounded]),
            reduces=any(collective.reduces for collective in collectives),
        )
        specs = shortlist(self._abilities(collectives), found, self._machine, IN_ROTATION)
        return (yield from self.turns(specs, [collective.rehearsal() for collective in collectives], found))

    def turns(self, specs: Sequence[str], collectives: Sequence[Collective], found: Load | None = None) -> Steps:
        """Find the fastest of some ways, each taken in turn; the first turn is not counted. specs: first what wins ties.

        collectives: for a rehearsal of each way, before the first turn; one that cannot be on some rank is left out on all,
        with a warning.
        """
        tried = (specs[0], *(spec for spec in specs[1:] if self._on_all(spec, collectives)))
        if len(tried) == 1:
            return Settled(key=self.key, way=tried[0], load=found)
        samples: dict[str, list[Sample]] = {spec: [] for spec in tried}
        for turn in range(1 + ROUNDS):
            for spec in tried:
                sample = yield spec
                if turn and sample is not None:
                    samples[spec].append(sample)
        spans = {spec: [(s.begin, s.end) for s in some] for spec, some in samples.items()}
        trials = tuple(Trial(spec=spec, us=self._slowest_us(spec, some)) for spec, some in spans.items())
        return Settled(key=self.key, way=leader(trials).spec, load=found, trials=trials)

    def _abilities(self, collectives: Sequence[Collective]) -> Abilities:
        found = self.device.abilities(collectives)
        return replace(found, left=False) if self.fixed else replace(found, residents=self.residents())

    @property
    def _machine(self) -> Machine:
        return load(machine_for(self.device.device))

    def _ready(self, way: Way, collectives: Sequence[Collective]) -> Way:
        """A way, rehearsed without its computation. Collective. Raises ValueError where it cannot be."""
        self.device.prepare(way, collectives)
        with self.device.running(way, collectives):
            pass
        return way

    def _on_all(self, spec: str, collectives: Sequence[Collective]) -> bool:
        reason = ""
        try:
            self._ready(parse(spec), collectives)
        except WeftError:  # some are ValueErrors, too, but the team is broken
            raise
        except ValueError as error:
            reason = str(error)
        if all(self._meet(f"{spec} is ready", int(not reason))):
            return True
        warnings.warn(f"{spec} is not tried for {self.key}: {reason or 'another rank cannot'}", stacklevel=2)
        return False

    def _meet(self, text: str, mine: int) -> tuple[int, ...]:
        return self.team.enter(f"concurrent {self.key}: {text}", mine)

    def _alone_us(self, name: str, call: Callable[[], object]) -> float:
        """A part by itself, on the slowest rank. Once before it counts, as libraries load what they need."""
        call()
        runs = [max(self._meet(f"{name} alone: run {run}", self.device.time_ns(call, 1))) for run in range(ROUNDS)]
        return statistics.median(runs) / 1e3

    def _slowest_us(self, name: str, spans: Sequence[tuple[Any, Any]]) -> float:
        """The median over spans of the slowest rank's time."""
        runs = [max(self._meet(f"{name}: use {use}", self._ns(*span))) for use, span in enumerate(spans)]
        return statistics.median(runs) / 1e3

    def _ns(self, begin: Any, end: Any) -> int:
        self.team.until(lambda: self.device.passed(end), lambda: f"concurrent {self.key}: the device did not come to its end")
        return self.device.between_ns(begin, end)
