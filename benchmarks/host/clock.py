"""Clocks of benchmarks.host: host times and wall times of methods that take turns.

A method is made, then warmed up and checked, on all ranks together. A method that fails on any rank is left out on all ranks,
with its reason, and the others are measured.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from benchmarks.measure import Failed, alarm, describe_error, in_turn, raise_first, release, say, synchronize, together
from benchmarks.rows import CASE

TOLERANCE = 0.05
"""The largest relative difference from the reference (of norms) with which a method is still measured."""
Timed = Callable[[], int]
"""Makes one call, and returns the nanoseconds that it kept the host busy."""
M = TypeVar("M")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Host time of a call in us, of the slowest rank: the median and two percentiles of its calls."""

    median: float
    p10: float
    p90: float


def measure_methods(
    makers: Mapping[str, Callable[[], M]],
    check: Callable[[str, M], object],
    warm_up: Callable[[str, M], object],
    measure: Callable[[Mapping[str, M]], R],
    recover: Callable[[], None] = release,
) -> tuple[R, dict[str, str]]:
    """Make, check and warm up all methods, then measure those that work. Return the result, and why the others are missing.

    check: raises an error for a wrong result of one call. The ranks agree on it before they warm up, since a rank that raises
    makes no further calls. recover: is called after a failure, which may have ended weft's programs. All methods that are left
    are then checked and warmed up again. Collective. Raises Failed if no method is left.
    """
    missing: dict[str, str] = {}
    made: dict[str, M] = {}
    for name, make in makers.items():
        try:
            made[name] = together(name, make)
        except Failed as failed:
            _leave_out(failed, missing)
    while made:
        try:
            for name, method in made.items():
                together(name, partial(check, name, method))
                together(name, partial(warm_up, name, method))
            return measure(made), missing
        except Failed as failed:
            _leave_out(failed, missing)
            del made[failed.name]
        recover()
    raise Failed(CASE, "; ".join(f"{name}: {reason}" for name, reason in missing.items()))


def _leave_out(failed: Failed, missing: dict[str, str]) -> None:
    missing[failed.name] = failed.reason
    say(f"LEFT OUT {failed}", file=sys.stderr)


def host_times(runs: Mapping[str, Timed], rounds: int, group: int) -> dict[str, Spread]:
    """Let methods take turns in `rounds` rounds of `group` calls, after each of which the GPU becomes idle."""
    samples: dict[str, list[int]] = {name: [] for name in runs}
    failures: list[tuple[int, str, str]] = []
    for turn, name, run in _turns(runs, rounds):
        try:
            samples[name] += [run() for _ in range(group)]
            synchronize()
        except Exception as error:
            failures.append((turn, name, describe_error(error)))
    raise_first(failures)
    spreads = [[statistics.median(some), *_tenths(some)] for some in samples.values()]
    return {
        name: Spread(median=median, p10=p10, p90=p90)
        for name, (median, p10, p90) in zip(samples, _of_slowest_rank(spreads), strict=True)
    }


def _tenths(samples: Sequence[int]) -> tuple[float, float]:
    if len(samples) < 2:
        return float(samples[0]), float(samples[0])
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def wall_times(runs: Mapping[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """Return the wall time of a call in us, in loops of `calls` that wait for the GPU only at their end."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    failures: list[tuple[int, str, str]] = []
    for turn, name, run in _turns(runs, rounds):
        begun_ns = time.perf_counter_ns()
        try:
            for _ in range(calls):
                run()
            synchronize()
        except Exception as error:
            failures.append((turn, name, describe_error(error)))
        samples[name].append((time.perf_counter_ns() - begun_ns) / calls)
    raise_first(failures)
    return {name: statistics.median(some) for name, some in zip(samples, _of_slowest_rank(list(samples.values())), strict=True)}


def _turns(runs: Mapping[str, R], rounds: int) -> Iterator[tuple[int, str, R]]:
    """Yield (number, name, method), when all GPUs are idle and all ranks are here."""
    turn = 0
    for round_ in range(rounds):
        for name, run in in_turn(runs, round_):
            if turn % 64 == 0:
                alarm()
            turn += 1
            synchronize()
            dist.all_reduce(torch.zeros(1))  # over gloo, so that the GPU does nothing
            yield turn, name, run


def _of_slowest_rank(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the largest of all ranks of each value in ns, in us."""
    slowest = torch.tensor(values, dtype=torch.float64) / 1e3
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    found: list[list[float]] = slowest.tolist()
    return found


def difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference divided by that of what is expected."""
    result, expected = result.float(), expected.float()
    return float((result - expected).norm() / expected.norm())


def check_differences(found: Mapping[str, float]) -> None:
    """Raise ArithmeticError for a difference above TOLERANCE, or NaN."""
    wrong = {what: value for what, value in found.items() if not value <= TOLERANCE}
    if wrong:
        raise ArithmeticError(f"WRONG RESULT: relative differences {wrong}; {TOLERANCE} is allowed")
