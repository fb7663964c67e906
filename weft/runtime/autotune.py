"""An autotuning run measures a few candidate schedules of one problem, and finds the fastest.

The candidates are measured with calls like those that follow. Every rank goes through the same steps in the same order:

    for each candidate                                         what the ranks exchange
    bind it                                                    whether each rank could; if one could not, all skip it
    2 calls            the first prepares the call, the second captures a graph
    2 calls            the second is timed                     its time; the slowest sets the calls of a run
    3 runs             one call, then 3 to 20 timed calls      after each run: its time; the slowest counts
    3 runs, queued     the same, but the GPU starts when       the same; only if the host may bound a call (see below)
                       all calls are enqueued
    keep the fastest candidate so far, drop the other

    final              candidates within 10% of the fastest, at most 4 with it: all bound at once and interleaved, 5 runs each,
                       then up to 25 until all but one are slower beyond chance, or half a second is over

Each exchange gives every rank the numbers of all ranks. So all ranks make the same number of calls, compare the same times and
choose the same schedule, and they begin each run together. Candidates are compared by the median of their runs, and finalists
by their runs in the final. The final is needed because a GPU warms up during the run, or cools while a kernel is compiled.
Measured one after the other, close candidates are then ordered by chance: on 4 x H200, shard_p2p was chosen over flag_gated:1,
which is 6% faster when the two are interleaved. Runs of one schedule differ by 1 to 3%, so that five of them do not order
candidates that differ by as much. The final therefore goes on for those that are not apart: the differences of their times to
the leader's, run by run, must be positive in the mean by twice their standard error.

A short call is bound by the host when Python makes it, and by the GPU when a CUDA graph does, so one schedule may be faster
in a graph and slower outside it. Calls are timed both eagerly and queued if sequential takes less than 0.3 ms, or takes more
than 5% longer eagerly than queued. An overlapping schedule is then chosen only if it is slower than sequential in neither.

A run measures sequential and `weft.runtime.choose.MEASURED` more candidates. Each takes at most 67 calls (16 if a call takes
1.7 ms or more), and in a final of 5 runs 107 more (22). Calls that are timed both eagerly and queued are made about twice as
often.
Binding, and Triton's compilation once per machine, come on top.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch

from weft.core.errors import WeftError, warn_once
from weft.core.problem import Problem
from weft.schedules import judge

P = TypeVar("P")
"""The type of a bound candidate. For an operator's schedules it is BoundProgram."""

Timer = Callable[[Callable[[], object], int], int]
"""A function (call, calls) -> ns that returns the time of one of `calls` calls on this rank. It first makes one more."""

BASE = "sequential"
MARGIN = 0.01
"""An overlapping schedule must be faster than sequential by more than 1%: medians of repeated runs differ by as much."""
_FIRST_CALLS = 2
_RUNS, _FINAL_RUNS, _MOST_FINAL_RUNS = 3, 5, 25
_FINAL_NS = 500_000_000
"""How long the GPU works in a final that goes on beyond its first runs."""
_APART = 2.0
"""A candidate is slower beyond chance if the mean of its differences to the leader is more than two standard errors."""
_FINALISTS, _CLOSE = 4, 0.1
_TARGET_RUN_NS = 5_000_000
_HOST_BOUND_US, _HOST_BOUND_RATIO = 300.0, 1.05
"""The host enqueues a call in about 0.1 ms, but on a busy host in up to 0.6 ms. A call that takes longer than 0.3 ms on the
GPU, and as long eagerly as when it is queued, is bound by the GPU."""
_DELAY_FACTOR, _MAX_DELAY_NS, _CYCLES_PER_NS = 1.5, 20_000_000, 2
"""A queued run delays the GPU by 1.5 times what the host needs to enqueue it, but at most 20 ms; GPUs run at 2 GHz at most."""
_MIN_CALLS, _MAX_CALLS = 3, 20


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A Measurement is what was measured of one candidate.

    spec: the candidate's name.
    us: the time of a call on the slowest rank, as the median of the runs.
    queued_us: the same with all calls enqueued before the GPU starts, as in a CUDA graph. None if that was not measured.
    """

    spec: str
    us: float
    queued_us: float | None = None

    @property
    def may_be_host_bound(self) -> bool:
        """True if eager calls of this length may be bound by the host instead of the GPU."""
        queued_us = self.us if self.queued_us is None else self.queued_us
        return min(self.us, queued_us) < _HOST_BOUND_US or self.us > _HOST_BOUND_RATIO * queued_us


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A Choice is the schedule that "auto", or "planned", runs for a problem.

    spec: the name of the schedule.
    measurements: the candidates in the order of measurement. It is empty if the planner chose, or if there was one candidate.
    from_cache: an earlier process measured it.
    like: the row count that was measured in place of the problem's (weft.runtime.tuner), if it was another one.
    predicted_for: the name of the machine profile by which the planner chose. Empty if it did not.
    """

    problem: Problem
    spec: str
    measurements: tuple[Measurement, ...] = ()
    from_cache: bool = False
    like: tuple[int, ...] = ()
    predicted_for: str = ""

    @property
    def us(self) -> dict[str, float]:
        """The measured times in us, by spec."""
        return {measurement.spec: measurement.us for measurement in self.measurements}

    def __str__(self) -> str:
        measured = ", ".join(f"{measurement.spec} {measurement.us:.0f} us" for measurement in self.measurements)
        verdict = judge(self.spec, self.us.get(self.spec), self.us.get("sequential"))
        earlier = "from an earlier run" if self.from_cache else ""
        like = f"as with {' and '.join(map(str, self.like))} rows" if self.like else ""
        predicted = f"predicted for {self.predicted_for}" if self.predicted_for else ""
        why = ", ".join(filter(None, (earlier, like, measured, predicted))) or "not measured"
        said = "" if self.spec == "sequential" else f", {verdict}"
        return f"{self.problem}: {self.spec}{said} ({why})"


class Choices(list[Choice]):
    """Choices is a list that prints a line for each choice."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or (
            'nothing was chosen: no call has used schedule="auto" or "planned", or WEFT_SCHEDULE is sequential'
        )


def _time_ratios(measurement: Measurement, other: Measurement) -> tuple[float, ...]:
    """Return the measurement's time over that of other: of eager calls, and of queued calls if both were timed so."""
    eager = measurement.us / other.us
    return (eager, measurement.queued_us / other.queued_us) if measurement.queued_us and other.queued_us else (eager,)


def _beats(measurement: Measurement, base: Measurement) -> bool:
    """Return whether measurement is slower than base by neither time, and faster by more than MARGIN by one of them."""
    ratios = _time_ratios(measurement, base)
    return max(ratios) <= 1 and min(ratios) < 1 - MARGIN


def leader(measurements: Sequence[Measurement]) -> Measurement:
    """Return the fastest candidate that beats the first one, which is sequential. Return the first one if none does."""
    base = measurements[0]
    return min(
        (t for t in measurements if _beats(t, base)), key=lambda measurement: sum(_time_ratios(measurement, base)), default=base
    )


def finalists(measurements: Sequence[Measurement], *, base_again: bool = False) -> tuple[str, ...]:
    """Return the candidates to measure again with the leader: those within 10% of it by either time, at most 3.

    Sequential comes first, then the fastest. base_again: include sequential however slow it was.
    """
    first, base = leader(measurements), measurements[0]
    rivals = [
        t for t in measurements if t is not first and (min(_time_ratios(t, first)) <= 1 + _CLOSE or (base_again and t is base))
    ]
    rivals.sort(key=lambda measurement: (measurement is not base, sum(_time_ratios(measurement, first))))
    return tuple(measurement.spec for measurement in rivals[: _FINALISTS - 1])


def _rotate(specs: tuple[str, ...], run: int) -> tuple[str, ...]:
    """Return the candidates in another order for each run, because one that runs on a heated GPU is slower."""
    first = run % len(specs)
    return specs[first:] + specs[:first]


def _not_apart(times: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """Return the fastest candidate, and those that may be as fast. times: of the same runs of each, interleaved."""
    first = min(times, key=lambda spec: statistics.median(times[spec]))

    def may_be_as_fast(spec: str) -> bool:
        differences = [mine - firsts for mine, firsts in zip(times[spec], times[first], strict=True)]
        return statistics.fmean(differences) <= _APART * statistics.stdev(differences) / math.sqrt(len(differences))

    return tuple(spec for spec in times if spec == first or may_be_as_fast(spec))


def calls_of_a_run(call_ns: int) -> int:
    """Return how many calls fill 5 ms, but from 3 to 20."""
    return max(_MIN_CALLS, min(_MAX_CALLS, _TARGET_RUN_NS // max(1, call_ns)))


@dataclass(frozen=True, kw_only=True)
class AutotuningRun(Generic[P]):
    """An AutotuningRun measures the candidates on one rank.

    bind: returns a candidate's program. It is collective, and raises ValueError if this rank cannot run the candidate.
    drop: releases a program.
    call: makes one call of a program, like the calls that follow.
    timer: times calls that the host enqueues while the GPU runs.
    queued: times calls that the host has enqueued before the GPU starts. None if calls are not timed so.
    exchange: a function (text, mine) that returns the `mine` of every rank, by rank.
    base_again: put sequential into the final in any case. It was timed first, so a change of the GPU's temperature since then
        would otherwise favour it or the candidate that was timed last.
    """

    bind: Callable[[str], P]
    drop: Callable[[P], None]
    call: Callable[[P], object]
    timer: Timer
    queued: Timer | None = None
    exchange: Callable[[str, int], tuple[int, ...]]
    base_again: bool = False

    def fastest(self, specs: Sequence[str]) -> tuple[P, tuple[Measurement, ...]]:
        """Return the fastest candidate's program and all measurements, and drop the other programs. specs: sequential first.

        A candidate that one rank cannot bind is skipped on all ranks, with a warning. Any other error ends the run on this
        rank, and the caller must notify the other ranks.
        """
        assert specs[0] == BASE, specs
        best = self.bind(BASE)
        self._all_ranks_bound(BASE, True)
        measurements = [self.measure(BASE, partial(self._call_and_free, best))]
        for spec in specs[1:]:
            program = self._bind_on_all_ranks(spec)
            if program is not None:
                measurements.append(self.measure(spec, partial(self._call_and_free, program), measurements[0]))
                best, loser = (program, best) if leader(measurements) is measurements[-1] else (best, program)
                self.drop(loser)
        return self._run_final(best, measurements)

    def _run_final(self, best: P, measurements: list[Measurement]) -> tuple[P, tuple[Measurement, ...]]:
        """Measure close candidates again, interleaved, and drop all but the winner. best: the program of the leader so far."""
        first = leader(measurements).spec
        others = finalists(measurements, base_again=self.base_again)
        if not others:
            return best, tuple(measurements)
        programs = {first: best} | {spec: self._bind_and_prepare(spec) for spec in others}
        again = self._measure_interleaved(
            programs, {t.spec: calls_of_a_run(round(1e3 * t.us)) for t in measurements}, measurements[0]
        )
        measured = tuple(again.get(t.spec, t) for t in measurements)
        winner = leader([t for t in measured if t.spec in programs or t.spec == BASE]).spec
        winner = winner if winner in programs else min(again, key=lambda spec: again[spec].us)
        for spec, program in programs.items():
            if spec != winner:
                self.drop(program)
        return programs[winner], measured

    def _measure_interleaved(self, programs: dict[str, P], calls: dict[str, int], base: Measurement) -> dict[str, Measurement]:
        """Time candidates in turns. After the first runs, those go on of which it is not clear that they are slower."""
        times: dict[str, list[list[int]]] = {spec: [] for spec in programs}
        clocks, rivals = self._timers_for(base), tuple(programs)
        run = spent_ns = 0
        while run < _FINAL_RUNS or (len(rivals) > 1 and run < _MOST_FINAL_RUNS and spent_ns < _FINAL_NS):
            for spec in _rotate(rivals, run):
                call = partial(self._call_and_free, programs[spec])
                ns = [max(self.exchange(f"final of {spec}: run {run}", clock(call, calls[spec]))) for clock in clocks]
                times[spec].append(ns)
                spent_ns += sum(ns) * (1 + calls[spec])
            run += 1
            if run >= _FINAL_RUNS:
                rivals = _not_apart({spec: [sum(ns) for ns in times[spec]] for spec in rivals})
        return {spec: _take_medians(spec, *zip(*runs, strict=True)) for spec, runs in times.items()}

    def _timers_for(self, base: Measurement | None) -> tuple[Timer, ...]:
        """Return the timers for a candidate. base: what sequential took, or None while sequential itself is measured.

        Sequential is always timed by both, because its eager time may be all the host's.
        """
        if self.queued is None or (base is not None and not base.may_be_host_bound):
            return (self.timer,)
        return self.timer, self.queued

    def _bind_and_prepare(self, spec: str) -> P:
        program = self.bind(spec)
        self._all_ranks_bound(spec, True)
        for _ in range(_FIRST_CALLS):
            self._call_and_free(program)
        return program

    def _call_and_free(self, program: P) -> None:
        """Make a call and free its result at once, so that the next call gets the same memory from the allocator."""
        self.call(program)

    def _bind_on_all_ranks(self, spec: str) -> P | None:
        """Return the candidate's program. Return None, with a warning, if any rank cannot bind it."""
        program, reason = None, "another rank could not bind it"
        try:
            program = self.bind(spec)
        except WeftError:  # may also be a ValueError, but then the group has failed
            raise
        except ValueError as error:
            reason = str(error)
        if self._all_ranks_bound(spec, program is not None):
            return program
        if program is not None:
            self.drop(program)
        warn_once(f"schedule {spec} is not a candidate of auto: {reason}")
        return None

    def _all_ranks_bound(self, spec: str, mine: bool) -> bool:
        return all(self.exchange(f"autotuning of {spec}: bound", int(mine)))

    def measure(self, spec: str, call: Callable[[], object], base: Measurement | None = None) -> Measurement:
        """Time the calls of one candidate, or of any other work of all ranks. `spec` is its name.

        base: what sequential took, or None while sequential itself is measured.
        """
        for _ in range(_FIRST_CALLS):
            call()
        calls = calls_of_a_run(max(self.exchange(f"autotuning of {spec}: one call", self.timer(call, 1))))

        def runs(clock: Timer) -> list[int]:
            return [max(self.exchange(f"autotuning of {spec}: run {run}", clock(call, calls))) for run in range(_RUNS)]

        return _take_medians(spec, *map(runs, self._timers_for(base)))


def _take_medians(spec: str, ns: Sequence[int], queued_ns: Sequence[int] = ()) -> Measurement:
    """Take the median of the runs."""
    return Measurement(
        spec=spec, us=statistics.median(ns) / 1e3, queued_us=statistics.median(queued_ns) / 1e3 if queued_ns else None
    )


def time_on_host(call: Callable[[], object], calls: int) -> int:
    """Time calls that have ended when they return. This is a Timer."""
    call()
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - begin) // calls


def timer_for(device: torch.device) -> Timer | None:
    """Return a timer by CUDA events on the current stream. Return None for a device whose calls are not timed."""
    return (lambda call, calls: _time_on_gpu(device, call, calls)) if device.type == "cuda" else None


def queued_timer_for(device: torch.device) -> Timer | None:
    """Return a timer of calls that are enqueued before the GPU starts. Return None for a device whose calls are not timed."""
    return (lambda call, calls: _time_queued(device, call, calls)) if device.type == "cuda" else None


def _time_queued(device: torch.device, call: Callable[[], object], calls: int) -> int:
    begun_ns = time.perf_counter_ns()
    call()
    host_ns = (1 + calls) * (time.perf_counter_ns() - begun_ns)
    torch.cuda._sleep(_CYCLES_PER_NS * min(round(_DELAY_FACTOR * host_ns), _MAX_DELAY_NS))  # type: ignore[no-untyped-call]
    return _time_on_gpu(device, call, calls)


def _time_on_gpu(device: torch.device, call: Callable[[], object], calls: int) -> int:
    """Time calls with CUDA events.

    The call before the first event lets the host run ahead, and makes the ranks' GPUs wait for each other. A GPU that waits
    too long for another rank is released by weft's watchdog.
    """
    stream = torch.cuda.current_stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    call()
    start.record(stream)
    for _ in range(calls):
        call()
    end.record(stream)
    end.synchronize()
    return round(1e6 * float(start.elapsed_time(end)) / calls)
