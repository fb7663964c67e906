"""World has the state that all simulated steps share: clock, flags, links, collectives, and the steps that have run.

The clock counts whole nanoseconds. One call is simulated, the first, so no flag has been signalled when it starts.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import simpy

from weft.core.fused_collective import spelled_out
from weft.core.machine import Machine
from weft.core.schedule import Copy, Flag, Gemm, Lane, LaneKind, Schedule, Step, Wait, steps_of
from weft.core.work import is_plain
from weft.perf.network import Fabric, Resource
from weft.perf.rotation import rotation
from weft.perf.shapes import push_sms
from weft.perf.terms import GemmCost, free_sms, hbm_us

Waits = tuple[tuple[int, int], ...]
Process = Generator[simpy.Event, Any, None]
StepProcess = Generator[simpy.Event, Any, Waits | None]
"""Returns the times in nanoseconds in which all work of a step waited for flags, if it has work that can."""


def ns(us: float) -> int:
    """Convert microseconds to whole nanoseconds."""
    return round(us * 1e3)


def _count_copies_per_peer(lane: Lane) -> int:
    """Return how many copies a lane makes to one peer, at most, if it copies to several peers; else 1."""
    pairs = [(step.src.rank, step.dst.rank) for step in steps_of(Copy, [lane] if lane.kind == "copy" else [])]
    copies = Counter(pair for pair in pairs if pair[0] != pair[1])
    return max(copies.values()) if len(copies) > 1 else 1


class Flags:
    """Flags knows which flags have been signalled in the call, and the events that wait for the others."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._signalled: set[Flag] = set()
        self._waiting: dict[Flag, list[simpy.Event]] = {}

    def reached(self, wait: Wait) -> simpy.Event | None:
        """Return None if the wait has ended, else the event at which it does."""
        if wait.on_previous_call or wait.flag in self._signalled:
            return None
        event = self._env.event()
        self._waiting.setdefault(wait.flag, []).append(event)
        return event

    def signal(self, flag: Flag) -> None:
        """Signal a flag, and trigger the events that wait for it."""
        self._signalled.add(flag)
        for event in self._waiting.pop(flag, []):
            event.succeed()


@dataclass(slots=True)
class Busy:
    """Busy measures the time during which at least one of several activities runs.

    running: the number of activities that run now.
    since: the start of the current busy time, in ns.
    total: the sum of the earlier busy times, in ns.
    """

    running: int = 0
    since: int = 0
    total: int = 0

    def start(self, now: int) -> None:
        if not self.running:
            self.since = now
        self.running += 1

    def stop(self, now: int) -> None:
        self.running -= 1
        if not self.running:
            self.total += now - self.since


@dataclass(slots=True)
class Rendezvous:
    """Rendezvous is a collective that starts when all ranks have called it.

    begun: the event of its start.
    joined: the number of ranks that have called it.
    shard_bytes: the bytes of the largest shard.
    """

    begun: simpy.Event
    joined: int = 0
    shard_bytes: int = 0


@dataclass(slots=True)
class Message:
    """Message is data that one rank sends to another one. Its attributes are events.

    sent: the sender has begun to send.
    awaited: the receiver has begun to receive.
    arrived: the data has arrived.
    """

    sent: simpy.Event
    awaited: simpy.Event
    arrived: simpy.Event


@dataclass(frozen=True, slots=True)
class FullKernel:
    """FullKernel is a kernel that occupies all SMs.

    ended: the event of its end.
    since: the start of its first tiles.
    tile_ns: the time of a tile, or 0 if its SMs are busy until its end.
    """

    ended: simpy.Event
    since: int = 0
    tile_ns: int = 0

    def next_free(self, env: simpy.Environment) -> simpy.Event:
        """Return the event at which SMs are next free: when the running tiles end, or when the kernel ends."""
        if self.ended.processed or not self.tile_ns:
            return self.ended
        wait_ns = max(0, self.since - int(env.now)) or (self.since - int(env.now)) % self.tile_ns
        return self.ended | env.timeout(wait_ns + self.tile_ns * (env.now < self.since))


class StepRun(NamedTuple):
    """StepRun is a step that ran on a rank's lane, with its start, its end, and its waits inside in nanoseconds."""

    start: int
    rank: int
    lane: str
    end: int
    step: Step
    waits: Waits


class SimulatedStep(NamedTuple):
    """SimulatedStep is a step that ran on a simulated rank.

    start, end: the times of the step, in nanoseconds.
    rank: the simulated rank.
    lane: the number of the lane on its rank.
    position: the number of the step on its lane.
    waits: the times within the step in which all of its work waits for flags.
    """

    start: int
    end: int
    rank: int
    lane: int
    position: int
    waits: Waits


@dataclass
class World:
    """World is the state of one simulation.

    schedule: the schedule, with FusedCollective steps replaced by the steps that they stand for.
    machine: the machine that is simulated.
    whole: whether every rank is simulated, even if rank 0 can represent all.
    env: simpy's environment, which has the clock.
    step_runs: the steps that have run on the simulated ranks.
    rendezvous: the collectives, by number.
    joined_collectives: the number of collectives that each rank has called.
    messages: the messages of each pair of ranks that either end has begun.
    begun_messages: the number of messages that an end has begun, by pair and whether it is the sender.
    full_kernels: the last kernel that occupies all SMs, by rank.
    costs: a cache of the costs of matmuls.

    These attributes are derived. Those with [rank] have one item for each simulated rank.

    spelled_out: the schedule with the FusedCollective steps from which its steps come.
    rotation: set if rank 0 represents all ranks.
    ranks: the simulated ranks.
    flags: the flags of all ranks.
    network: the links and memories, with the transfers on them.
    kernel_ns[rank]: the time that its kernels worked.
    transfers[rank]: the time during which its data moved.
    matmul_us[rank]: the time that its matmuls so far would take alone, by cuBLAS.
    copies_per_peer[rank]: the largest number of copies that one of its lanes makes to one peer in turns.
    free_sms[rank]: the SMs that its lanes leave free.
    push_sms[rank]: the SMs of its push kernels.
    engines[rank]: its copy engines.
    """

    schedule: Schedule
    machine: Machine
    whole: bool = False
    env: simpy.Environment = field(default_factory=simpy.Environment)
    step_runs: list[SimulatedStep] = field(default_factory=list)
    rendezvous: dict[int, Rendezvous] = field(default_factory=dict)
    joined_collectives: dict[int, int] = field(default_factory=dict)
    messages: dict[tuple[int, int], list[Message]] = field(default_factory=dict)
    full_kernels: dict[int, FullKernel] = field(default_factory=dict)
    begun_messages: Counter[tuple[int, int, bool]] = field(default_factory=Counter)
    costs: dict[tuple[object, ...], GemmCost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spelled_out = spelled_out(self.schedule)
        self.schedule = self.spelled_out.schedule
        self.rotation = None if self.whole else rotation(self.spelled_out, self.machine)
        ranks = self.ranks = range(1 if self.rotation else len(self.schedule.ranks))
        self.flags = Flags(self.env)
        self.network = Fabric(
            self.env, self.machine, len(self.schedule.ranks), self.schedule.problem.nodes, rotation=self.rotation
        )
        self.kernel_ns = [0 for _ in ranks]
        self.transfers = [Busy() for _ in ranks]
        self.matmul_us = [0.0 for _ in ranks]
        self.copies_per_peer = [
            max(map(_count_copies_per_peer, lanes), default=1) for lanes in self.schedule.ranks[: len(ranks)]
        ]
        self.free_sms = [free_sms(self.schedule, self.machine, rank) for rank in ranks]
        gemms = [[part for step in steps_of(Gemm, self.schedule.ranks[rank]) for part in step.parts] for rank in ranks]
        self.push_sms = [  # the pushes are alone on their SMs where cuBLAS runs all matmuls
            push_sms(self.machine, self.machine.gpu.sms, alone=all(is_plain(part, rank) for part in parts))
            for rank, parts in zip(ranks, gemms, strict=True)
        ]
        self.engines = [simpy.Resource(self.env, capacity=self.machine.copies.engines) for _ in ranks]

    @property
    def now(self) -> int:
        return int(self.env.now)

    def within_a_kernel(self) -> World:
        """Return a copy of this world in which steps have the costs that they have inside a running kernel."""
        inner = copy.copy(self)
        inner.machine = self.machine.within_a_kernel
        return inner

    def lane_delay_us(self, kind: LaneKind) -> float:
        """Return the time in us until a lane of this kind starts its first step."""
        fork_us = 0.0 if kind == "compute" else self.machine.fork_us or 0.0
        return fork_us + (self.machine.launch_us if kind == "blocks" else 0.0)

    def post(self, rank: int, flag: Flag, *, after: simpy.Event | None = None) -> None:
        """Raise `flag` from `rank`, now or after an event. A peer sees it after the link's latency."""
        if after is not None:
            assert after.callbacks is not None
            after.callbacks.append(lambda _: self.post(rank, flag))
            return
        delay = self.network.latency_ns(rank, flag.rank)
        seen = self.rotation.own[flag] if self.rotation else flag
        if seen is None:
            return
        if not delay:
            self.flags.signal(seen)
            return
        timer = self.env.timeout(delay)
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: self.flags.signal(seen))

    def representative_pair(self, src: int, dst: int) -> tuple[int, int]:
        """Return the simulated pair of ranks that represents this pair."""
        return (0, self.rotation.turns.away(src, dst)) if self.rotation else (src, dst)

    @cached_property
    def steps(self) -> tuple[StepRun, ...]:
        """The steps that have run on all ranks, ordered by start."""

        def run_on(rank: int, step: SimulatedStep) -> StepRun:
            lane = self.schedule.ranks[rank][step.lane]
            return StepRun(step.start, rank, lane.name, step.end, lane.steps[step.position], step.waits)

        ranks = range(len(self.schedule.ranks)) if self.rotation else None
        runs = [run_on(rank, step) for step in self.step_runs for rank in ranks or (step.rank,)]
        return tuple(sorted(runs, key=itemgetter(0, 1, 2, 3)))

    def by_rank(self, of_simulated: Sequence[float]) -> tuple[float, ...]:
        """Return a number for each rank, given those of the simulated ranks."""
        return tuple(of_simulated) * (len(self.schedule.ranks) // max(1, len(self.ranks)))

    def wait(self, wait: Wait) -> Generator[simpy.Event, Any, bool]:
        """Wait until the flag has been signalled. Return whether the wait took time."""
        event = self.flags.reached(wait)
        if event is not None:
            yield event
        return event is not None

    def move(self, rank: int, size: int, resources: tuple[Resource, ...]) -> Process:
        """Move `size` bytes over `resources` on behalf of `rank`."""
        self.transfers[rank].start(self.now)
        yield self.network.transfer(size, resources)
        self.transfers[rank].stop(self.now)

    def access_memory(self, rank: int, size: float, *limits: Resource) -> Process:
        """Read and write `size` bytes in all of a rank's own memory, whose rate is shared.

        An access of less than half a nanosecond takes no time.

        limits: further resources that the bytes use.
        """
        if ns(hbm_us(self.machine, size)) or limits:
            yield self.network.transfer(size, (*limits, ("hbm", rank)))

    def sm_path(self, rank: int, sms: int, src: int, dst: int, share: float = 1.0) -> tuple[Resource, ...]:
        """Return the resources of loads or stores by `rank`'s kernel on `sms` SMs, at a share of their rate."""
        limit = self.network.limit(("stores", rank, sms, share), self.machine.stores.rate(sms) * share)
        return (limit, *self.network.path(src, dst))
