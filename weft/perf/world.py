"""World: what the simulated steps of all ranks share. A clock, flags, links, rendezvous, and what has run so far.

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
    """Microseconds to whole nanoseconds."""
    return round(us * 1e3)


def _alone(schedule: Schedule, rank: int) -> bool:
    """Whether none of weft's kernels multiplies on a rank."""
    return all(is_plain(part, rank) for step in steps_of(Gemm, schedule.ranks[rank]) for part in step.parts)


def _rounds(lane: Lane) -> int:
    """How often a lane of copies comes to the same peer, if it goes to several in turns."""
    pairs = [(step.src.rank, step.dst.rank) for step in steps_of(Copy, [lane] if lane.kind == "copy" else [])]
    times = Counter(pair for pair in pairs if pair[0] != pair[1])
    return max(times.values()) if len(times) > 1 else 1


class Flags:
    """Counts of all flags, and who waits for which value."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._counts: dict[Flag, int] = {}
        self._waiting: dict[Flag, list[tuple[int, simpy.Event]]] = {}

    def reached(self, wait: Wait) -> simpy.Event | None:
        """None if `wait` is over, else the event that ends it."""
        if self._counts.get(wait.flag, 0) >= wait.at_least:
            return None
        event = self._env.event()
        self._waiting.setdefault(wait.flag, []).append((wait.at_least, event))
        return event

    def advance(self, flag: Flag) -> None:
        """One more signal has been seen by the flag's rank."""
        count = self._counts[flag] = self._counts.get(flag, 0) + 1
        waiting = self._waiting.pop(flag, [])
        for value, event in waiting:
            if value <= count:
                event.succeed()
        still = [(value, event) for value, event in waiting if value > count]
        if still:
            self._waiting[flag] = still


@dataclass(slots=True)
class Busy:
    """Time during which at least one of several activities runs."""

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
    """A collective that ranks come to. begun: when all have."""

    begun: simpy.Event
    here: int = 0
    shard_bytes: int = 0


@dataclass(slots=True)
class Message:
    """What one rank sends to another. sent, awaited: when either end has begun. through: when it has arrived."""

    sent: simpy.Event
    awaited: simpy.Event
    through: simpy.Event


@dataclass(frozen=True, slots=True)
class Filled:
    """A kernel that takes all SMs. ended: when it has ended. since: when its first tiles began; tile_ns: each of them takes, 0
    of one whose SMs are not free before its end."""

    ended: simpy.Event
    since: int = 0
    tile_ns: int = 0

    def room(self, env: simpy.Environment) -> simpy.Event:
        """When another kernel finds SMs: as tiles end and others would start, or at its end."""
        if self.ended.processed or not self.tile_ns:
            return self.ended
        ahead = max(0, self.since - int(env.now)) or (self.since - int(env.now)) % self.tile_ns
        return self.ended | env.timeout(ahead + self.tile_ns * (env.now < self.since))


class Ran(NamedTuple):
    """One step of a rank's lane: when it began and ended, in nanoseconds."""

    start: int
    rank: int
    lane: str
    end: int
    step: Step


class Place(NamedTuple):
    """A step that ran on a simulated rank: the lane's place on its rank, and the step's on its lane."""

    start: int
    end: int
    rank: int
    lane: int
    position: int


@dataclass
class World:
    """The state of one simulation. schedule: what FusedCollective steps do is spelled out in it. whole: simulate every rank
    also where one stands for all. rotation: why one does, or None. ranks: those that are simulated. ran: what has run on them.
    mail: by pair of ranks, the messages that either has begun; counted: how many of them each has, by pair and whether it
    is the sender. costs: of matmuls, by what they depend on, since most are alike. filled: by rank, the last kernel that takes
    all SMs. By simulated rank, kernels: ns that its kernels worked; transfers: while its data moved; multiplied: us that its
    matmuls so far take at full rate; free_sms: what its lanes leave, all of which begin together. push_sms: its
    kernels that push have so many."""

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
        """The same world as the steps of a kernel that runs see it."""
        inner = copy.copy(self)
        inner.machine = self.machine.within_a_kernel
        return inner

    def before(self, kind: LaneKind) -> float:
        """Microseconds until a lane of this kind takes its first step."""
        beside_us = 0.0 if kind == "compute" else self.machine.fork_us or 0.0
        return beside_us + (self.machine.launch_us if kind == "blocks" else 0.0)

    def post(self, rank: int, flag: Flag, *, after: simpy.Event | None = None) -> None:
        """Rank `rank` advances `flag`, now or at an event to come; a peer sees it a link's latency later."""
        if after is not None:
            assert after.callbacks is not None
            after.callbacks.append(lambda _: self.post(rank, flag))
            return
        delay = self.network.latency_ns(rank, flag.rank)
        seen = self.rotation.own[flag] if self.rotation else flag
        if seen is None:
            return
        if not delay:
            self.flags.advance(seen)
            return
        timer = self.env.timeout(delay)
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: self.flags.advance(seen))

    def pair(self, src: int, dst: int) -> tuple[int, int]:
        """Two ranks, as the pair that stands for them."""
        return (0, self.rotation.turns.away(src, dst)) if self.rotation else (src, dst)

    @cached_property
    def steps(self) -> tuple[Ran, ...]:
        """All that has run, on all ranks, in the order of its start."""

        def on(rank: int, place: Place) -> Ran:
            lane = self.schedule.ranks[rank][place.lane]
            return Ran(place.start, rank, lane.name, place.end, lane.steps[place.position])

        ranks = range(len(self.schedule.ranks)) if self.rotation else None
        found = [on(rank, place) for place in self.ran for rank in ranks or (place.rank,)]
        return tuple(sorted(found, key=itemgetter(0, 1, 2, 3)))

    def by_rank(self, of_simulated: Sequence[float]) -> tuple[float, ...]:
        """A number of each simulated rank, as one of every rank."""
        return tuple(of_simulated) * (len(self.schedule.ranks) // max(1, len(self.ranks)))

    def wait(self, wait: Wait) -> Generator[simpy.Event, Any, bool]:
        """Until `wait` is over; no time if it is. Returns whether it was not."""
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
        """Read and write `size` bytes of a rank's own memory, which others do meanwhile; no time if they take none alone.

        limits: further resources that they cross.
        """
        if ns(hbm_us(self.machine, size)) or limits:
            yield self.network.transfer(size, (*limits, ("hbm", rank)))

    def sm_path(self, rank: int, sms: int, src: int, dst: int, share: float = 1.0) -> tuple[Resource, ...]:
        """What loads or stores of `rank`'s kernel on `sms` SMs cross between two ranks, at a share of their rate."""
        limit = self.network.limit(("stores", rank, sms, share), self.machine.stores.rate(sms) * share)
        return (limit, *self.network.path(src, dst))
