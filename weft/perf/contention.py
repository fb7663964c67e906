"""Contention: kernels and copies of one GPU that slow each other, where the machine's profile says by how much.

A kernel's tiles are counted in time of their own, a SlowedClock's, which runs at the speed that copies leave it. A tile that is
alone takes the longer of multiplying and of its memory traffic; beside copies which move `rate` through the GPU's memory,
what leaves and what arrives together,

    multiplying     (1 + (c - 1) * rate / full) times as long      c: contention "gemm during copy"
    its traffic     1 / (1 - rate / gpu.hbm_gbps) times as long    full: the rate of all copies of a GPU, out and in

and while a kernel runs, the copies of its GPU reach together several_gbps / c', with c' = "copy during gemm". So a matmul of
many operations a byte loses by c alone, a thin one by the memory's rate; one copy at a time on a mesh slows neither much.
A machine without these two numbers has steady clocks: nothing slows anything. Kernels that wait count as running.
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
from weft.perf.terms import COPY_BESIDE_GEMM, GEMM_BESIDE_COPY, slowed

Shares = tuple[float, float]


class Time(Protocol):
    """Nanoseconds of a kernel's work."""

    @property
    def now(self) -> int:
        """So many have gone by."""

    def until(self, at: int) -> simpy.Event:
        """When `at` have gone by."""


class Steady:
    """Time as the simulation has it."""

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
    """Time that starts with the simulation's, and runs slower while copies move. shares: of a tile's time alone that
    multiplying takes, and that its traffic takes."""

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
        """From now on."""
        if speed != self._speed:
            self._gone, self._since, self._speed = self._exact, int(self._env.now), speed
            self._wake()

    def _wake(self) -> None:
        """A timer for the next event; earlier timers no longer count."""
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
    """What runs on each rank, and what its copies move. Of one simulation. changed: called when what runs has changed, so that
    copies get new rates."""

    def __init__(self, env: simpy.Environment, machine: Machine, ranks: int, changed: Callable[[], None]) -> None:
        self._changed = changed
        known = machine.contention
        self.active = GEMM_BESIDE_COPY in known or COPY_BESIDE_GEMM in known
        self._env = env
        self._machine = machine
        self._slower_copy = max(1.0, known.get(COPY_BESIDE_GEMM, 1.0))
        self._clocks: dict[Hashable, list[SlowedClock]] = {rank: [] for rank in range(ranks)}
        self._computations: dict[Hashable, list[SlowedClock]] = {rank: [] for rank in range(ranks)}
        self._held: dict[Hashable, list[float]] = {rank: [] for rank in range(ranks)}
        self._gbps: Mapping[Hashable, float] = {}

    def copies_slower(self, rank: Hashable) -> float:
        """Times that all copies of a rank together take longer now."""
        return self._slower_copy if self._clocks[rank] else 1.0

    @contextmanager
    def kernel(self, rank: int, shares: Shares) -> Iterator[Time]:
        """While a kernel runs, its time. shares: as a SlowedClock has them."""
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
        """While a user's computation runs, its time: a kernel that multiplies, and feels what is `held`, too."""
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
    def held(self, rank: Hashable, speed: float) -> Iterator[None]:
        """While others hold SMs of a rank, its computations run at that share of their speed; of several holders the least."""
        self._held[rank].append(speed)
        self.moving(self._gbps)
        yield
        self._held[rank].remove(speed)
        self.moving(self._gbps)

    def moving(self, gbps: Mapping[Hashable, float]) -> None:
        """What copies move through each rank's memory from now on; nothing where a rank is left out."""
        self._gbps = gbps
        for rank, clocks in self._clocks.items():
            for clock in clocks:
                slowed = min(self._held[rank], default=1.0) if clock in self._computations[rank] else 1.0
                clock.run_at(self._speed(clock, gbps.get(rank, 0.0)) * slowed)

    def _speed(self, clock: SlowedClock, gbps: float) -> float:
        return 1.0 / slowed(self._machine, clock.shares, gbps)
