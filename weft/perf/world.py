"""World: the state that all simulated steps share: clock, flags, links, rendezvous, and the steps that have run.

The clock counts whole nanoseconds. Flags are those of one call, the first: a flag starts at zero and counts signals.
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

Process = Generator[simpy.Event, Any, None]


def ns(us: float) -> int:
    """Convert microseconds to whole nanoseconds."""
    return round(us * 1e3)


def _alone(schedule: Schedule, rank: int) -> bool:
    """Return whether all of a rank's matmuls are cuBLAS's."""
    return all(is_plain(part, rank) for step in steps_of(Gemm, schedule.ranks[rank]) for part in step.parts)


def _rounds(lane: Lane) -> int:
    """Return the number of copies of a lane to the same peer if it copies to several peers in turns; else 1."""
    pairs = [(step.src.rank, step.dst.rank) for step in steps_of(Copy, [lane] if lane.kind == "copy" else [])]
    times = Counter(pair for pair in pairs if pair[0] != pair[1])
    return max(times.values()) if len(times) > 1 else 1


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
    """Busy measures the time during which at least one of several activities runs."""

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
    """Rendezvous is a collective that starts when all ranks have called it. begun: the event of its start."""

    begun: simpy.Event
    here: int = 0
    shard_bytes: int = 0


@dataclass(slots=True)
class Message:
    """Message is data between two ranks. sent, awaited: either end has begun. through: the data has arrived."""

    sent: simpy.Event
    awaited: simpy.Event
    through: simpy.Event


@dataclass(frozen=True, slots=True)
class Filled:
    """Filled is a kernel that occupies all SMs.

    ended: the event of its end. since: the start of its first tiles. tile_ns: the time of a tile; 0 if its SMs are busy until
    its end."""

    ended: simpy.Event
    since: int = 0
    tile_ns: int = 0

    def room(self, env: simpy.Environment) -> simpy.Event:
        """Return the event at which another kernel gets SMs: when running tiles end, or when the kernel ends."""
        if self.ended.processed or not self.tile_ns:
            return self.ended
        ahead = max(0, self.since - int(env.now)) or (self.since - int(env.now)) % self.tile_ns
        return self.ended | env.timeout(ahead + self.tile_ns * (env.now < self.since))


class Ran(NamedTuple):
    """Ran is a step that ran on a rank's lane, with its start and end in nanoseconds."""

    start: int
    rank: int
    lane: str
    end: int
    step: Step


class Place(NamedTuple):
    """Place is a step that ran on a simulated rank. lane: the lane's number on its rank. position: the step's on its lane."""

    start: int
    end: int
    rank: int
    lane: int
    position: int


@dataclass
class World:
    """World is the state of one simulation.

    schedule: the schedule, with FusedCollective steps replaced by the steps that they stand for.
    whole: simulate every rank, even if rank 0 can represent all.
    rotation: set if rank 0 represents all ranks.
    ranks: the simulated ranks. ran: the steps that have run on them.
    rendezvous: the collectives, by number. joined: the number of collectives that each rank has called.
    mail: the messages of each pair of ranks that either end has begun.
    counted: the number of messages that an end has begun, by pair and whether it is the sender.
    filled: the last kernel that occupies all SMs, by rank.
    costs: a cache of the costs of matmuls.
    kernels[rank], transfers[rank]: the time in ns that its kernels worked, and during which its data moved.
    multiplied[rank]: the time in us that its matmuls so far would take alone.
    free_sms[rank], push_sms[rank]: the SMs that its lanes leave free, and those of its push kernels."""

    schedule: Schedule
    machine: Machine
    whole: bool = False
    env: simpy.Environment = field(default_factory=simpy.Environment)
    ran: list[Place] = field(default_factory=list)
    rendezvous: dict[int, Rendezvous] = field(default_factory=dict)
    joined: dict[int, int] = field(default_factory=dict)
    mail: dict[tuple[int, int], list[Message]] = field(default_factory=dict)
    filled: dict[int, Filled] = field(default_factory=dict)
    counted: Counter[tuple[int, int, bool]] = field(default_factory=Counter)
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
        self.kernels = [0 for _ in ranks]
        self.transfers = [Busy() for _ in ranks]
        self.multiplied = [0.0 for _ in ranks]
        self.rounds = [max(map(_rounds, lanes), default=1) for lanes in self.schedule.ranks[: len(ranks)]]
        self.free_sms = [free_sms(self.schedule, self.machine, rank) for rank in ranks]
        self.push_sms = [push_sms(self.machine, self.machine.gpu.sms, alone=_alone(self.schedule, rank)) for rank in ranks]
        self.engines = [simpy.Resource(self.env, capacity=self.machine.copies.engines) for _ in ranks]

    @property
    def now(self) -> int:
        return int(self.env.now)

    def within_a_kernel(self) -> World:
        """Return this world with the costs of steps inside a running kernel."""
        inner = copy.copy(self)
        inner.machine = self.machine.within_a_kernel
        return inner

    def before(self, kind: LaneKind) -> float:
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

    def pair(self, src: int, dst: int) -> tuple[int, int]:
        """Return the simulated pair of ranks that represents this pair."""
        return (0, self.rotation.turns.away(src, dst)) if self.rotation else (src, dst)

    @cached_property
    def steps(self) -> tuple[Ran, ...]:
        """The steps that have run on all ranks, ordered by start."""

        def on(rank: int, place: Place) -> Ran:
            lane = self.schedule.ranks[rank][place.lane]
            return Ran(place.start, rank, lane.name, place.end, lane.steps[place.position])

        ranks = range(len(self.schedule.ranks)) if self.rotation else None
        found = [on(rank, place) for place in self.ran for rank in ranks or (place.rank,)]
        return tuple(sorted(found, key=itemgetter(0, 1, 2, 3)))

    def by_rank(self, of_simulated: Sequence[float]) -> tuple[float, ...]:
        """Extend numbers of the simulated ranks to all ranks."""
        return tuple(of_simulated) * (len(self.schedule.ranks) // max(1, len(self.ranks)))

    def wait(self, wait: Wait) -> Generator[simpy.Event, Any, bool]:
        """Wait until the flag reaches the value. Return whether that took time."""
        event = self.flags.reached(wait)
        if event is not None:
            yield event
        return event is not None

    def move(self, rank: int, size: int, resources: tuple[Resource, ...]) -> Process:
        """Move `size` bytes over `resources` on behalf of `rank`."""
        self.transfers[rank].start(self.now)
        yield self.network.transfer(size, resources)
        self.transfers[rank].stop(self.now)

    def local(self, rank: int, size: float, *limits: Resource) -> Process:
        """Read and write `size` bytes of a rank's own memory, whose rate is shared. Less than half a nanosecond takes no time.

        limits: further resources that the bytes use.
        """
        if ns(hbm_us(self.machine, size)) or limits:
            yield self.network.transfer(size, (*limits, ("hbm", rank)))

    def sm_path(self, rank: int, sms: int, src: int, dst: int, share: float = 1.0) -> tuple[Resource, ...]:
        """Return the resources of loads or stores by `rank`'s kernel on `sms` SMs, at a share of their rate."""
        limit = self.network.limit(("stores", rank, sms, share), self.machine.stores.rate(sms) * share)
        return (limit, *self.network.path(src, dst))
