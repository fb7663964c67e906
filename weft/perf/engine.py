"""Engine: runs the lanes of a Schedule on a Machine that need not exist, and returns what happened when.

Contract: `simulate(schedule, machine)` returns one span for every step of every rank, from 0 us on, ordered by start. It
is deterministic: the same values give the same spans, to the nanosecond. It simulates one call, with all ranks starting
together and no flag raised before. Where all ranks do the same, rank 0 is simulated and stands for all (weft.perf.rotation).
Row counts that only devices know are taken to be even (weft.perf.ragged).

Timeline of one rank's lanes, each a simpy process that runs its steps in order:

    compute   | launch, gemm ........ | wait ~~~~~~~~| launch, gemm .... | signal |
    copy      | wait | copy .... | signal ~> | copy .... | signal ~> |
                          \\ shares ports and links with every other transfer (weft.perf.network)

Costs: a lane beside the compute lane starts fork_us late, and a copy lane takes as long to come back; a kernel pays launch_us,
a copy copies.copy_us, a wait or signal step flag_us; a signal is seen by a peer a link's latency later. Of a lane's fused steps
only the first is launched, and flags among them cost that latency alone. A lane of communication blocks takes stores.sms SMs
from kernels that start before it has ended, one of a network network.sms; all lanes begin together, in whatever order they
are given. Copies within a GPU, sums and lookups share its memory's rate; GEMMs and copies to peers slow each other where the
profile says by how much (weft.perf.contention).
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
from weft.perf import concurrent, kernels, lookups, messages, ragged, transfers
from weft.perf.network import Carried, Resource
from weft.perf.terms import taken_sms
from weft.perf.world import Place, Process, Ran, World, ns

MOST_NS = 2**53
"""What is simulated at most: beyond, a float lacks the nanoseconds, and what waits for one of them would wait for ever."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A simulation's result. total_us: from the call to the end of the slowest rank. What is by rank is made when asked for:
    of most schedules that are weighed nobody does."""

    world: World
    total_us: float

    @property
    def schedule(self) -> Schedule:
        """What ran: FusedCollective steps are spelled out in it."""
        return self.world.schedule

    @cached_property
    def kernel_us(self) -> tuple[float, ...]:
        """By rank, how long its kernels worked, waiting left out."""
        return self.world.by_rank([total / 1e3 for total in self.world.kernels])

    @cached_property
    def transfer_us(self) -> tuple[float, ...]:
        """By rank, how long data that it moves was on the way."""
        return self.world.by_rank([busy.total / 1e3 for busy in self.world.transfers])

    @cached_property
    def usage(self) -> Mapping[Resource, Carried]:
        """What each port or link carried."""
        return self.world.network.carried

    @property
    def steps(self) -> tuple[Ran, ...]:
        """All steps of all ranks, in the order of their start."""
        return self.world.steps

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """One for each step."""
        return tuple(span(self.schedule, ran.rank, ran.lane, ran.step, ran.start / 1e3, ran.end / 1e3) for ran in self.steps)


def simulate(schedule: Schedule, machine: Machine | str | Path) -> tuple[Span, ...]:
    """The predicted spans of one call, by start, in us from 0 on; `weft.core.span.total_us` of them is what it takes.

    machine: a Machine, a shipped profile's name, or a JSON file's path. Raises ValueError if it has fewer GPUs than the
    schedule has ranks, or no rate for its dtype, or if the schedule never ends because a step waits for what nobody signals.
    """
    require("schedule", schedule, Schedule, "use a weft.schedule.Schedule, as weft.schedule.build makes")
    return run(schedule, as_machine(machine)).spans


def run(schedule: Schedule, machine: Machine, *, whole: bool = False) -> Outcome:
    """Interpret one call of `schedule` on `machine`. whole: simulate every rank, even where one stands for all
    (weft.perf.rotation); the outcome is the same.

    Raises ValueError if the machine has fewer GPUs than the schedule has ranks, or no rate for its dtype, or no SMs beside the
    lanes of a rank, or if the schedule never ends because a step waits for what nobody signals, or takes longer than is
    simulated.
    """
    world, _ = _ran(schedule, machine, MOST_NS, whole=whole)
    return Outcome(world=world, total_us=_ended(world) / 1e3)


def us_within(schedule: Schedule, machine: Machine, most_us: float) -> float:
    """`run(schedule, machine).total_us`, or inf where that is more than most_us: what comes later is not simulated.

    Raises ValueError as `run` does, but for a schedule that takes too long.
    """
    most_ns = min(math.ceil(most_us * 1e3), MOST_NS)
    world, ended = _ran(schedule, machine, most_ns)
    return _ended(world) / 1e3 if ended else math.inf


def _ended(world: World) -> int:
    return max((place.end for place in world.ran), default=0)


def _ran(schedule: Schedule, machine: Machine, most_ns: int, *, whole: bool = False) -> tuple[World, bool]:
    """The world after one call, or after most_ns of it; and whether all lanes have ended. Raises ValueError as `run` does."""
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
    """One lane's steps in order. place: of the lane on its rank. at: the step that each unfinished lane is in."""
    late_us = world.before(lane.kind)
    if late_us:
        yield world.env.timeout(ns(late_us))
    kernels = world.spelled_out.of_lane(rank, lane.name)
    along, launched = continued(lane, kernels), _launched(lane, kernels)
    inner = world.within_a_kernel() if along else world
    steps = STEPS_BESIDE if isinstance(world.schedule.problem, ConcurrentProblem) else STEPS
    for position, step in enumerate(lane.steps):
        at[rank, lane.name] = step
        start = world.now
        if position in launched:
            yield world.env.timeout(ns(world.machine.launch_us))
        yield from steps[type(step)](inner if position in along | launched else world, rank, lane, step)
        if position == len(lane.steps) - 1 and lane.kind == "copy" and world.machine.fork_us:
            yield world.env.timeout(ns(world.machine.fork_us))
        world.ran.append(Place(start, world.now, rank, place, position))
    world.free_sms[rank] += taken_sms(world.machine, lane.kind)
    at.pop((rank, lane.name), None)


def _launched(lane: Lane, kernels: Mapping[Span1D, FusedCollective]) -> frozenset[int]:
    """Positions of steps that begin a persistent kernel, and are none of those that pay a launch by themselves."""
    return frozenset(low for low, _ in kernels if WORK[type(lane.steps[low])].kind in ("wait", "signal", "message"))


def _wait(world: World, rank: int, lane: Lane, step: Wait) -> Process:
    waited = yield from world.wait(step)
    wake_us = world.machine.wake_us if waited and lane.kind == "copy" else None
    yield world.env.timeout(ns(world.machine.flag_us + (wake_us or 0.0)))


def _signal(world: World, rank: int, lane: Lane, step: Signal) -> Process:
    yield world.env.timeout(ns(world.machine.flag_us))
    world.post(rank, step.flag)


def _reduce(world: World, rank: int, lane: Lane, step: Reduce) -> Process:
    sms = world.schedule.problem.sms if isinstance(world.schedule.problem, CollectiveProblem) else None
    return kernels.reduce(world, rank, step, sms)


STEPS: dict[type, Callable[[World, int, Lane, Any], Process]] = {
    Wait: _wait,
    Signal: _signal,
    Copy: lambda world, rank, lane, step: transfers.copy(world, rank, lane.kind, step),
    Push: lambda world, rank, lane, step: transfers.push(world, rank, lane.kind, step),
    Gemm: lambda world, rank, lane, step: kernels.gemm(world, rank, step),
    Reduce: _reduce,
    Lookup: lambda world, rank, lane, step: lookups.lookup(world, rank, step),
    Collective: lambda world, rank, lane, step: transfers.collective(world, rank, step),
    SendReceive: lambda world, rank, lane, step: messages.send_receive(world, rank, step),
    **dict.fromkeys(ragged.STEPS, lambda world, rank, lane, step: ragged.step_of_counts(world, rank, step)),
}
"""By type of step, what it does on a rank and a lane. A FusedCollective is spelled out before."""
STEPS_BESIDE = {**STEPS, **concurrent.STEPS}
"""The same beside a user's computation."""
