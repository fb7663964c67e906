"""A trial: which of a few schedules is fastest here, by calls like those that follow.

    for each spec      the same on every rank, in this order               meetings of the ranks
    bind                                                                   can all? else all leave it out
    2 calls            the first rehearses, the second captures a graph
    2 calls            the second timed                                    its slowest time sets the calls of a run
    3 runs             a call, then 3 to 20 calls timed together           after each: its slowest time counts
    3 runs, queued     the same behind a GPU that is held up               the same; of others where sequential takes < 0.3 ms
    the fastest so far stays bound, the other is given back

    final              specs within 10% of the fastest, at most 4: bound together, 5 runs each, in turns

A meeting gives every rank the numbers of all, so that they count, compare and choose alike; and ranks begin each run together.
The medians of the runs are compared: of the final's for those in it. One after the other alone, a GPU that has warmed up, or
cooled while a kernel was compiled, decides between specs that are close (on 4 x H200 shard_p2p was chosen over flag_gated:1,
6% faster in turns).

Calls of some 0.1 ms are bound by the host when Python makes them, and by the GPU when a CUDA graph does: one schedule may be
faster there and slower here. So such calls are timed both ways, and an overlap is chosen only if it is slower than sequential
in neither.

So a trial is of sequential and `weft.runtime.choose.MEASURED` more specs, and of each at most 67 calls, 16 where one takes
1.7 ms or more, and in the final 107 more, 22, besides binding, and what Triton compiles once a machine; about twice that where
calls are timed both ways.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch

from weft.core.errors import WeftError
from weft.core.logs import warn_once
from weft.core.problem import Problem

P = TypeVar("P")
"""What a spec is bound to: for an operator's schedules, a BoundProgram."""

Timer = Callable[[Callable[[], object], int], int]
"""(call, calls) -> ns that one of so many calls takes on this rank; calls once more before the clock starts."""

BASE = "sequential"
MARGIN = 0.01
"""An overlap is chosen if it takes less than sequential by more than this: medians of repeated runs differ by as much."""
_FIRST_CALLS = 2
_RUNS, _FINAL_RUNS = 3, 5
_FINALISTS, _CLOSE = 4, 0.1
_RUN_NS = 5_000_000
_HOST_BOUND_US = 300.0
"""The host takes some 0.1 ms a call: what takes longer than this on the GPU takes as long in a CUDA graph."""
_HELD_UP, _LONGEST_NS, _CYCLES_PER_NS = 1.5, 20_000_000, 2
"""By how much more than the host needs to enqueue a run, at most how long; a GPU's clock, at most."""
_FEWEST, _MOST = 3, 20


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What was measured of one schedule. us: a call's time on the slowest rank, the median of the runs; queued_us: the same
    where the host is far ahead, as in a CUDA graph, None if that was not measured."""

    spec: str
    us: float
    queued_us: float | None = None

    @property
    def least_us(self) -> float:
        """By the clock that shows less."""
        return self.us if self.queued_us is None else min(self.us, self.queued_us)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What "auto" stands for: the spec chosen for a problem, and what was measured, in this order; nothing where the choice
    is the planner's, or there was only one spec. kept: by an earlier process. like: the row count that was measured in place of
    the problem's (weft.runtime.buckets), if it was another one."""

    problem: Problem
    spec: str
    trials: tuple[Trial, ...] = ()
    kept: bool = False
    like: tuple[int, ...] = ()

    @property
    def us(self) -> dict[str, float]:
        """The measured times in us, by spec."""
        return {trial.spec: trial.us for trial in self.trials}

    def __str__(self) -> str:
        measured = ", ".join(f"{trial.spec} {trial.us:.0f} us" for trial in self.trials)
        earlier = "kept from an earlier run" if self.kept else ""
        like = f"as with {' and '.join(map(str, self.like))} rows" if self.like else ""
        return f"{self.problem}: {self.spec} ({', '.join(filter(None, (earlier, like, measured))) or 'not measured'})"


def _ratios(trial: Trial, other: Trial) -> tuple[float, ...]:
    """How long one takes over the other, by each clock that timed both."""
    eager = trial.us / other.us
    return (eager, trial.queued_us / other.queued_us) if trial.queued_us and other.queued_us else (eager,)


def _beats(trial: Trial, base: Trial) -> bool:
    """Slower by no clock, and faster by more than the margin by one."""
    ratios = _ratios(trial, base)
    return max(ratios) <= 1 and min(ratios) < 1 - MARGIN


def leader(trials: Sequence[Trial]) -> Trial:
    """The fastest that beats the first, which is the sequential program; the first if none does."""
    base = trials[0]
    return min((t for t in trials if _beats(t, base)), key=lambda trial: sum(_ratios(trial, base)), default=base)


def finalists(trials: Sequence[Trial], *, base_again: bool = False) -> tuple[str, ...]:
    """The leader's close rivals by any clock, sequential before all, then the fastest: what is measured again beside it.
    base_again: sequential in any case."""
    first, base = leader(trials), trials[0]
    rivals = [t for t in trials if t is not first and (min(_ratios(t, first)) <= 1 + _CLOSE or (base_again and t is base))]
    rivals.sort(key=lambda trial: (trial is not base, sum(_ratios(trial, first))))
    return tuple(trial.spec for trial in rivals[: _FINALISTS - 1])


def _rotated(specs: tuple[str, ...], run: int) -> tuple[str, ...]:
    """Another one first in each run: what comes after a hot one is slower."""
    first = run % len(specs)
    return specs[first:] + specs[:first]


def calls_of_a_run(call_ns: int) -> int:
    """As many as fill 5 ms, within bounds."""
    return max(_FEWEST, min(_MOST, _RUN_NS // max(1, call_ns)))


@dataclass(frozen=True, kw_only=True)
class Contest(Generic[P]):
    """One rank's side of a trial.

    bind: a spec's program; collective; ValueError where it cannot be. drop: gives a program back. call: one call of a
    program, as later ones will be. timer: times calls; queued: also, where the host is far ahead. meet: (text, mine) -> what
    each rank gave as mine, by rank. final_runs: of each spec in the final. base_again: sequential, which was timed first, is in
    the final in any case: a GPU that has warmed up since, or cooled, would choose between it and what was timed last.
    """

    bind: Callable[[str], P]
    drop: Callable[[P], None]
    call: Callable[[P], object]
    timer: Timer
    queued: Timer | None = None
    meet: Callable[[str, int], tuple[int, ...]]
    final_runs: int = _FINAL_RUNS
    base_again: bool = False

    def fastest(self, specs: Sequence[str]) -> tuple[P, tuple[Trial, ...]]:
        """The program of the best spec, the others dropped, and what was measured. specs: sequential first.

        A spec that a rank cannot bind is left out on all, with a warning. Any other error ends the trial on this rank: the
        caller tells the others.
        """
        assert specs[0] == BASE, specs
        best = self.bind(BASE)
        self._all_bound(BASE, True)
        trials = [self._measured(BASE, best)]
        for spec in specs[1:]:
            program = self._bound(spec)
            if program is not None:
                trials.append(self._measured(spec, program, trials[0]))
                best, loser = (program, best) if leader(trials) is trials[-1] else (best, program)
                self.drop(loser)
        return self._final(best, trials)

    def _final(self, best: P, trials: list[Trial]) -> tuple[P, tuple[Trial, ...]]:
        """Those that are close once more, in turns. best: the program of the leader so far."""
        first = leader(trials).spec
        others = finalists(trials, base_again=self.base_again)
        if not others:
            return best, tuple(trials)
        programs = {first: best} | {spec: self._bound_again(spec) for spec in others}
        again = self._in_turns(programs, {t.spec: calls_of_a_run(round(1e3 * t.us)) for t in trials}, trials[0])
        measured = tuple(again.get(t.spec, t) for t in trials)
        winner = leader([t for t in measured if t.spec in programs or t.spec == BASE]).spec
        winner = winner if winner in programs else min(again, key=lambda spec: again[spec].us)
        for spec, program in programs.items():
            if spec != winner:
                self.drop(program)
        return programs[winner], measured

    def _in_turns(self, programs: dict[str, P], calls: dict[str, int], base: Trial) -> dict[str, Trial]:
        times: dict[str, list[list[int]]] = {spec: [] for spec in programs}
        clocks = self._clocks(base)
        for run in range(self.final_runs):
            for spec in _rotated(tuple(programs), run):
                call = partial(self._drop_result, programs[spec])
                times[spec].append(
                    [max(self.meet(f"final of {spec}: run {run}", clock(call, calls[spec]))) for clock in clocks]
                )
        return {spec: _trial(spec, *zip(*runs, strict=True)) for spec, runs in times.items()}

    def _clocks(self, base: Trial | None) -> tuple[Timer, ...]:
        """base: what sequential took; None while that is measured, by all clocks: the host may take far longer than the GPU."""
        if self.queued is None or (base is not None and base.least_us >= _HOST_BOUND_US):
            return (self.timer,)
        return self.timer, self.queued

    def _bound_again(self, spec: str) -> P:
        program = self.bind(spec)
        self._all_bound(spec, True)
        for _ in range(_FIRST_CALLS):
            self._drop_result(program)
        return program

    def _drop_result(self, program: P) -> None:
        """A call whose result is dropped at once, so that the next one lies where it lay."""
        self.call(program)

    def _bound(self, spec: str) -> P | None:
        """The spec's program; None, said aloud, if a rank cannot bind it."""
        program, reason = None, "another rank could not bind it"
        try:
            program = self.bind(spec)
        except WeftError:  # some are ValueErrors, too, but the group is broken
            raise
        except ValueError as error:
            reason = str(error)
        if self._all_bound(spec, program is not None):
            return program
        if program is not None:
            self.drop(program)
        warn_once(f"schedule {spec} is left out of auto's trial: {reason}")
        return None

    def _all_bound(self, spec: str, mine: bool) -> bool:
        return all(self.meet(f"trial of {spec}: bound", int(mine)))

    def _measured(self, spec: str, program: P, base: Trial | None = None) -> Trial:
        """base: what sequential took; None while that is measured."""
        call = partial(self._drop_result, program)
        for _ in range(_FIRST_CALLS):
            call()
        calls = calls_of_a_run(max(self.meet(f"trial of {spec}: one call", self.timer(call, 1))))

        def runs(clock: Timer) -> list[int]:
            return [max(self.meet(f"trial of {spec}: run {run}", clock(call, calls))) for run in range(_RUNS)]

        return _trial(spec, *map(runs, self._clocks(base)))


def _trial(spec: str, ns: Sequence[int], queued_ns: Sequence[int] = ()) -> Trial:
    """The medians of runs."""
    return Trial(spec=spec, us=statistics.median(ns) / 1e3, queued_us=statistics.median(queued_ns) / 1e3 if queued_ns else None)


def timer_for(device: torch.device) -> Timer | None:
    """A clock for calls on `device`: CUDA's events on the caller's stream. None where calls are not timed."""
    return (lambda call, calls: _time_on_gpu(device, call, calls)) if device.type == "cuda" else None


def queued_timer_for(device: torch.device) -> Timer | None:
    """A clock for calls that the host has enqueued before the GPU begins them. None where calls are not timed."""
    return (lambda call, calls: _time_queued(device, call, calls)) if device.type == "cuda" else None


def _time_queued(device: torch.device, call: Callable[[], object], calls: int) -> int:
    begun_ns = time.perf_counter_ns()
    call()
    host_ns = (1 + calls) * (time.perf_counter_ns() - begun_ns)
    torch.cuda._sleep(_CYCLES_PER_NS * min(round(_HELD_UP * host_ns), _LONGEST_NS))  # type: ignore[no-untyped-call]
    return _time_on_gpu(device, call, calls)


def _time_on_gpu(device: torch.device, call: Callable[[], object], calls: int) -> int:
    """The call before the first event lets the host run ahead, and the ranks' GPUs meet. The space's watch bounds the wait."""
    stream = torch.cuda.current_stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    call()
    start.record(stream)
    for _ in range(calls):
        call()
    end.record(stream)
    end.synchronize()
    return round(1e6 * float(start.elapsed_time(end)) / calls)
