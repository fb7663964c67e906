"""Contention: kernels and copies of one GPU slow each other if the machine profile has the two numbers c and c'.

The time of a kernel's tiles is that of a SlowedClock, which runs slower while copies move. A tile alone takes the longer of its
multiplications and its memory traffic. While copies move `rate` through the GPU's memory, out and in,

    multiplying     (1 + (c - 1) * rate / full) times as long      c: contention "gemm during copy"
    its traffic     1 / (1 - rate / gpu.hbm_gbps) times as long    full: the rate of all copies of a GPU, out and in

While a kernel runs, all copies of its GPU together reach several_gbps / c', with c' = "copy during gemm". So c slows a matmul
with many operations per byte, and the memory rate slows one with few. A single copy at a time on a mesh slows either little.
A machine without these numbers has no contention. Kernels that wait count as running.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import simpy

from weft.core.machine import Machine
from weft.perf.terms import COPY_WITH_GEMM, GEMM_WITH_COPY, slowed

Shares = tuple[float, float]


class Time(Protocol):
    """Time measures a kernel's work in nanoseconds."""

    @property
    def now(self) -> int:
        """The nanoseconds of work that have passed."""

    def until(self, at: int) -> simpy.Event:
        """Return the event at which `at` nanoseconds of work have passed."""


class Steady:
    """Steady is the time of the simulation itself."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env

    @property
    def now(self) -> int:
        """See Time."""
        return int(self._env.now)

    def until(self, at: int) -> simpy.Event:
        """See Time."""
        return self._env.timeout(max(0, at - self.now))


class SlowedClock:
    """SlowedClock is a time that runs slower than the simulation's while copies move.

    shares: the parts of a tile's time alone that its multiplications and its traffic take. The longer one is 1."""

    def __init__(self, env: simpy.Environment, shares: Shares) -> None:
        self.shares = shares
        self._env = env
        self._since, self._gone, self._speed = int(env.now), float(env.now), 1.0
        self._waiting: list[tuple[int, int, simpy.Event]] = []
        self._serial = itertools.count()
        self._version = 0

    @property
    def now(self) -> int:
        """See Time."""
        return math.floor(self._exact + 1e-6)

    @property
    def _exact(self) -> float:
        return self._gone + (int(self._env.now) - self._since) * self._speed

    def until(self, at: int) -> simpy.Event:
        """See Time."""
        event = self._env.event()
        heapq.heappush(self._waiting, (at, next(self._serial), event))
        self._wake()
        return event

    def run_at(self, speed: float) -> None:
        """Run at this speed from now on."""
        if speed != self._speed:
            self._gone, self._since, self._speed = self._exact, int(self._env.now), speed
            self._wake()

    def _wake(self) -> None:
        """Set a timer for the next event. Earlier timers are ignored."""
        self._version += 1
        if self._waiting:
            left = max(0.0, self._waiting[0][0] - self._exact) / self._speed
            timer = self._env.timeout(max(0, math.ceil(left - 1e-6)), self._version)
            assert timer.callbacks is not None
            timer.callbacks.append(self._ring)

    def _ring(self, timer: simpy.Event) -> None:
        if timer.value != self._version:
            return
        while self._waiting and self._waiting[0][0] <= self.now:
            heapq.heappop(self._waiting)[2].succeed()
        self._wake()


class Contention:
    """Contention tracks the kernels and the copies of each rank in one simulation.

    changed: called when a kernel starts or ends, so that copies get new rates."""

    def __init__(self, env: simpy.Environment, machine: Machine, ranks: int, changed: Callable[[], None]) -> None:
        self._changed = changed
        known = machine.contention
        self.active = GEMM_WITH_COPY in known or COPY_WITH_GEMM in known
        self._env = env
        self._machine = machine
        self._slower_copy = max(1.0, known.get(COPY_WITH_GEMM, 1.0))
        self._clocks: dict[Hashable, list[SlowedClock]] = {rank: [] for rank in range(ranks)}
        self._computations: dict[Hashable, list[SlowedClock]] = {rank: [] for rank in range(ranks)}
        self._held: dict[Hashable, list[float]] = {rank: [] for rank in range(ranks)}
        self._gbps: Mapping[Hashable, float] = {}

    def copies_slower(self, rank: Hashable) -> float:
        """Return the current slowdown of all copies of a rank together."""
        return self._slower_copy if self._clocks[rank] else 1.0

    @contextmanager
    def kernel(self, rank: int, shares: Shares) -> Iterator[Time]:
        """Yield the time of a kernel, which runs until the context ends. shares: as in SlowedClock."""
        if not self.active:
            yield Steady(self._env)
            return
        clock = SlowedClock(self._env, shares)
        clock.run_at(self._speed(clock, self._gbps.get(rank, 0.0)))
        self._clocks[rank].append(clock)
        self._changed()
        yield clock
        self._clocks[rank].remove(clock)
        self._changed()

    @contextmanager
    def computation(self, rank: Hashable) -> Iterator[Time]:
        """Yield the time of a user's computation, which runs until the context ends. `hold` slows it, too."""
        clock = SlowedClock(self._env, (1.0, 0.0))
        self._computations[rank].append(clock)
        self._clocks[rank].append(clock)
        self.moving(self._gbps)
        self._changed()
        yield clock
        self._clocks[rank].remove(clock)
        self._computations[rank].remove(clock)
        self._changed()

    @contextmanager
    def hold(self, rank: Hashable, speed: float) -> Iterator[None]:
        """Slow the computations of a rank to a share of their speed until the context ends. Of several shares, the least
        counts."""
        self._held[rank].append(speed)
        self.moving(self._gbps)
        yield
        self._held[rank].remove(speed)
        self.moving(self._gbps)

    def moving(self, gbps: Mapping[Hashable, float]) -> None:
        """Set the rate of copies through each rank's memory from now on. A rank that is left out has none."""
        self._gbps = gbps
        for rank, clocks in self._clocks.items():
            for clock in clocks:
                slowed = min(self._held[rank], default=1.0) if clock in self._computations[rank] else 1.0
                clock.run_at(self._speed(clock, gbps.get(rank, 0.0)) * slowed)

    def _speed(self, clock: SlowedClock, gbps: float) -> float:
        return 1.0 / slowed(self._machine, clock.shares, gbps)
