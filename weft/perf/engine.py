"""Engine: simulates the lanes of a Schedule on any Machine, and returns the time of each step.

Contract: `simulate(schedule, machine)` returns one span for every step of every rank, from 0 us on, ordered by start. It
is deterministic: the same values give the same spans, to the nanosecond. It simulates one call, with all ranks starting
together and no flag raised before. If all ranks do the same, only rank 0 is simulated (weft.perf.rotation). Row counts that
only devices know are assumed to be even (weft.perf.ragged).

Timeline of one rank's lanes, each a simpy process that runs its steps in order:

    compute   | launch, gemm ........ | wait ~~~~~~~~| launch, gemm .... | signal |
    copy      | wait | copy .... | signal ~> | copy .... | signal ~> |
                          \\ shares ports and links with every other transfer (weft.perf.network)

Costs. A kernel costs launch_us, a copy copies.copy_us, and a wait or signal step flag_us. A peer sees a signal after the link's
latency. A lane other than the compute lane starts fork_us late, and a copy lane needs fork_us to join again. Of a lane's fused
steps only the first is launched, and flags among them cost the latency only. A lane of communication blocks takes stores.sms
SMs from kernels that start before it ends, and a network lane takes network.sms. All lanes begin at the same time. Copies
within a GPU, sums and lookups share the rate of its memory. GEMMs and copies to peers slow each other if the profile has the
numbers (weft.perf.contention).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.core.concurrent import ConcurrentProblem
from weft.core.errors import require
from weft.core.machine import Machine, as_machine
from weft.core.problem import CollectiveProblem, Span1D
from weft.core.schedule import (
    Collective,
    Copy,
    FusedCollective,
    Gemm,
    Lane,
    Lookup,
    Norm,
    Push,
    Reduce,
    Schedule,
    SendReceive,
    Signal,
    Step,
    Wait,
)
from weft.core.span import Span
from weft.core.work import WORK, continued, span
from weft.perf import concurrent, kernels, ragged, transfers
from weft.perf.network import Carried, Resource
from weft.perf.terms import taken_sms
from weft.perf.world import Process, SimulatedStep, StepProcess, StepRun, World, ns

MOST_NS = 2**53
"""The longest simulated time. Beyond it a float cannot represent single nanoseconds, and a wait for one would never end."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome is a simulation's result. total_us: the time from the call to the end of the slowest rank.

    Values by rank are computed on first use, because most candidates only need total_us."""

    world: World
    total_us: float

    @property
    def schedule(self) -> Schedule:
        """The schedule that ran, with the steps that FusedCollective steps stand for."""
        return self.world.schedule

    @cached_property
    def kernel_us(self) -> tuple[float, ...]:
        """The time that each rank's kernels worked, without waiting."""
        return self.world.by_rank([total / 1e3 for total in self.world.kernel_ns])

    @cached_property
    def transfer_us(self) -> tuple[float, ...]:
        """The time during which each rank moved data."""
        return self.world.by_rank([busy.total / 1e3 for busy in self.world.transfers])

    @cached_property
    def usage(self) -> Mapping[Resource, Carried]:
        """The traffic of each port or link."""
        return self.world.network.carried

    @property
    def steps(self) -> tuple[StepRun, ...]:
        """All steps of all ranks, ordered by start."""
        return self.world.steps

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The spans of all steps."""
        schedule = self.schedule
        return tuple(
            span(schedule, rank, lane, step, start / 1e3, end / 1e3, tuple((low / 1e3, high / 1e3) for low, high in waits))
            for start, rank, lane, end, step, waits in self.steps
        )


def simulate(schedule: Schedule, machine: Machine | str | Path) -> tuple[Span, ...]:
    """Return the predicted spans of one call in us, ordered by start. `weft.schedule.total_us` gives their total time.

    machine: a Machine, the name of a shipped profile, or the path of a JSON file.

    Raises ValueError if the machine has fewer GPUs than the schedule has ranks or no rate for its dtype, or if the schedule
    never ends because a step waits for a flag that no rank raises.
    """
    require("schedule", schedule, Schedule, "use a weft.schedule.Schedule, as weft.schedule.build makes")
    return run(schedule, as_machine(machine)).spans


def run(schedule: Schedule, machine: Machine, *, whole: bool = False) -> Outcome:
    """Simulate one call of `schedule` on `machine`.

    whole: simulate every rank, even if one rank can represent all (weft.perf.rotation). The outcome is the same.

    Raises ValueError as `simulate` does, if the lanes of a rank leave no SMs for kernels, and if the call takes longer than
    MOST_NS.
    """
    world, _ = _run_until(schedule, machine, MOST_NS, whole=whole)
    return Outcome(world=world, total_us=_end_ns(world) / 1e3)


def us_within(schedule: Schedule, machine: Machine, most_us: float) -> float:
    """Return `run(schedule, machine).total_us`, or inf once the simulation exceeds most_us.

    Raises ValueError as `run` does, except for a schedule that takes too long.
    """
    most_ns = min(math.ceil(most_us * 1e3), MOST_NS)
    world, ended = _run_until(schedule, machine, most_ns)
    return _end_ns(world) / 1e3 if ended else math.inf


def _end_ns(world: World) -> int:
    return max((place.end for place in world.step_runs), default=0)


def _run_until(schedule: Schedule, machine: Machine, most_ns: int, *, whole: bool = False) -> tuple[World, bool]:
    """Simulate one call up to most_ns. Return the world, and whether all lanes have ended. Raises ValueError as `run` does."""
    machine.require_for(schedule.problem)
    world = World(schedule, machine, whole=whole)
    at: dict[tuple[int, str], Step] = {}
    for rank in world.ranks:
        for place, lane in enumerate(world.schedule.ranks[rank]):
            world.env.process(_lane(world, rank, place, lane, at))
    while world.env.peek() <= most_ns:
        world.env.step()
    for (rank, name), step in at.items():
        if math.isinf(world.env.peek()):
            raise ValueError(f"schedule {schedule.name} never ends on {machine.name}: rank {rank}, lane {name} stays in {step}")
        if most_ns == MOST_NS:
            long = f"schedule {schedule.name} takes more than {MOST_NS / 8.64e13:.0f} days on {machine.name}"
            raise ValueError(f"{long}: rank {rank}, lane {name} is in {step}; use larger rates, shorter times or smaller sizes")
    return world, not at


def _lane(world: World, rank: int, place: int, lane: Lane, at: dict[tuple[int, str], Step]) -> Process:
    """Run the steps of a lane in order. place: the lane's number on its rank. at: the current step of each unfinished lane."""
    late_us = world.lane_delay_us(lane.kind)
    if late_us:
        yield world.env.timeout(ns(late_us))
    kernels = world.spelled_out.of_lane(rank, lane.name)
    along, launched = continued(lane, kernels), _launched(lane, kernels)
    inner = world.within_a_kernel() if along else world
    steps = CONCURRENT_STEPS if isinstance(world.schedule.problem, ConcurrentProblem) else STEPS
    for position, step in enumerate(lane.steps):
        at[rank, lane.name] = step
        start = world.now
        if position in launched:
            yield world.env.timeout(ns(world.machine.launch_us))
        waits = yield from steps[type(step)](inner if position in along | launched else world, rank, lane, step)
        if position == len(lane.steps) - 1 and lane.kind == "copy" and world.machine.fork_us:
            yield world.env.timeout(ns(world.machine.fork_us))
        world.step_runs.append(SimulatedStep(start, world.now, rank, place, position, waits or ()))
    world.free_sms[rank] += taken_sms(world.machine, lane.kind)
    at.pop((rank, lane.name), None)


def _launched(lane: Lane, kernels: Mapping[Span1D, FusedCollective]) -> frozenset[int]:
    """Return the positions of steps that begin a persistent kernel and whose own cost includes no launch."""
    return frozenset(low for low, _ in kernels if WORK[type(lane.steps[low])].kind in ("wait", "signal", "message"))


def _wait(world: World, rank: int, lane: Lane, step: Wait) -> Process:
    began = world.now
    yield from world.wait(step)
    wake_ns = min(ns(world.machine.wake_us or 0.0), world.now - began) if lane.kind == "copy" else 0
    yield world.env.timeout(ns(world.machine.flag_us) + wake_ns)


def _signal(world: World, rank: int, lane: Lane, step: Signal) -> Process:
    yield world.env.timeout(ns(world.machine.flag_us))
    world.post(rank, step.flag)


def _reduce(world: World, rank: int, lane: Lane, step: Reduce) -> StepProcess:
    problem = world.schedule.problem
    sms = problem.sms if isinstance(problem, CollectiveProblem) and lane.kind == "blocks" else None
    return kernels.reduce(world, rank, step, sms)


STEPS: dict[type, Callable[[World, int, Lane, Any], StepProcess]] = {
    Wait: _wait,
    Signal: _signal,
    Copy: lambda world, rank, lane, step: transfers.copy(world, rank, lane.kind, step),
    Push: lambda world, rank, lane, step: transfers.push(world, rank, lane.kind, step),
    Gemm: lambda world, rank, lane, step: kernels.gemm(world, rank, step),
    Reduce: _reduce,
    Norm: lambda world, rank, lane, step: kernels.norm(world, rank, step),
    Lookup: lambda world, rank, lane, step: transfers.lookup(world, rank, step),
    Collective: lambda world, rank, lane, step: transfers.collective(world, rank, step),
    SendReceive: lambda world, rank, lane, step: transfers.send_receive(world, rank, step),
    **dict.fromkeys(ragged.STEPS, lambda world, rank, lane, step: ragged.step_of_counts(world, rank, step)),
}
"""The function of each type of step. A FusedCollective has been replaced by its steps before."""
CONCURRENT_STEPS = {**STEPS, **concurrent.STEPS}
"""The same for a schedule that runs concurrently with a user's computation."""
