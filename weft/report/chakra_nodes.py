"""Graph: a schedule as nodes that compute, send and receive, rank by rank, for simulators of whole systems.

Contract: `graph(schedule, machine)` returns for every rank the nodes of one call, each behind those it depends on. A node may
start once all of `after` and `needs` have ended: `after` are what its lane does before it, `needs` what flags and messages
bring. Computing takes the time that it takes alone on the machine; what sending takes is the other simulator's to say.

    step                                  nodes
    Gemm, Reduce, Lookup                  one that computes for each part, and for each slice between inner gates
    Copy, Push or store to a peer         a send there, and a receive of the peer
    Copy or load from a peer              a request, as a message, behind which the peer sends
    Copy within a rank                    one that computes
    Collective, UserCall                  one
    Signal or count at a peer             a message of FLAG_BYTES; a lane's receives at one rank are in the order of its sends
    Signal or count within a rank, Wait   none: what waits depends on what was before the signal

A wait for the calls before (at_least 0) is over.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from weft.core.fused_collective import spelled_out
from weft.core.machine import Machine
from weft.core.schedule import (
    Collective,
    Copy,
    Flag,
    Gemm,
    Lane,
    Lookup,
    Part,
    Push,
    Reduce,
    Region,
    Schedule,
    SendReceive,
    Signal,
    Step,
    UserCall,
    Wait,
)
from weft.core.work import label, region_bytes
from weft.perf.terms import copy_us, hbm_us, lookup_us, parts_us, sum_us

FLAG_BYTES = 4
Kind = Literal["compute", "send", "receive", "collective"]
Walk = Iterator[None]
"""A lane on its way: it stops where it must wait."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """id: within its rank. us: of what computes, alone. flops, bytes: its work; of messages and collectives, what a rank gives.

    peer, tag: the other end of a message, and what tells it from others between the two. op: of a collective.
    """

    id: int
    name: str
    kind: Kind
    after: tuple[int, ...] = ()
    needs: tuple[int, ...] = ()
    us: float = 0.0
    flops: int = 0
    bytes: int = 0
    peer: int = -1
    tag: int = 0
    op: str = ""


Ids = tuple[int, ...]


@dataclass
class _At:
    """Where a lane is: what its next node comes after, and what it needs besides."""

    rank: int
    lane: str
    after: Ids = ()
    needs: Ids = ()

    @property
    def before(self) -> Ids:
        return tuple(dict.fromkeys((*self.after, *self.needs)))


@dataclass
class _Builder:
    """ranks: the nodes so far. signals: by flag, what each signal comes after, on the rank that waits. tags: messages between
    two ranks so far. received: by rank, lane and receiver, the last receive. mail: the tags of a pair's messages that have two
    ends in the schedule; counted: how many of them each end has come to. done: rises with all that happens."""

    schedule: Schedule
    machine: Machine
    ranks: list[list[Node]] = field(default_factory=list)
    signals: dict[Flag, list[Ids]] = field(default_factory=dict)
    tags: Counter[tuple[int, int]] = field(default_factory=Counter)
    received: dict[tuple[int, str, int], Ids] = field(default_factory=dict)
    mail: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    counted: Counter[tuple[tuple[int, int], int]] = field(default_factory=Counter)
    done: int = 0

    def node(self, at: _At, kind: Kind, name: str, *, posted: bool = False, **values: object) -> int:
        """One more node of a lane; what comes next is behind it, unless it is posted."""
        nodes = self.ranks[at.rank]
        nodes.append(Node(id=len(nodes), name=name, kind=kind, after=at.after, needs=at.needs, **values))  # type: ignore[arg-type]
        self.done += 1
        if not posted:
            at.after, at.needs = (nodes[-1].id,), ()
        return nodes[-1].id

    def message(self, at: _At, dst: int, size: int, name: str, *, posted: bool = False) -> tuple[int, int]:
        """From a lane to a rank that waits for nothing but what the lane sent it before: (the send, the receive)."""
        tag = self.tag(at.rank, dst)
        sent = self.node(at, "send", name, posted=posted, bytes=size, peer=dst, tag=tag)
        there = _At(dst, at.lane, after=self.received.get((at.rank, at.lane, dst), ()))
        got = self.node(there, "receive", name, bytes=size, peer=at.rank, tag=tag)
        self.received[at.rank, at.lane, dst] = (got,)
        return sent, got

    def tag(self, src: int, dst: int) -> int:
        self.tags[src, dst] += 1
        return self.tags[src, dst] - 1

    def pull(self, at: _At, region: Region, name: str) -> None:
        """Ask a peer for what lies there, and go on once it has come."""
        _, asked = self.message(at, region.rank, FLAG_BYTES, f"ask for {name}", posted=True)
        size, tag = region_bytes(self.schedule, region), self.tag(region.rank, at.rank)
        self.node(_At(region.rank, at.lane, needs=(asked,)), "send", name, bytes=size, peer=at.rank, tag=tag)
        self.node(at, "receive", name, bytes=size, peer=region.rank, tag=tag)

    def signal(self, at: _At, flag: Flag) -> None:
        seen = at.before
        if flag.rank != at.rank:
            seen = (self.message(at, flag.rank, FLAG_BYTES, f"signal {flag}", posted=True)[1],)
        self.signals.setdefault(flag, []).append(seen)
        self.done += 1

    def waits(self, at: _At, waits: Sequence[Wait]) -> Walk:
        for wait in waits:
            while len(self.signals.get(wait.flag, ())) < wait.at_least:
                yield
            if wait.at_least > 0:
                at.needs = tuple(dict.fromkeys((*at.needs, *self.signals[wait.flag][wait.at_least - 1])))

    def lane(self, rank: int, lane: Lane) -> Walk:
        at = _At(rank, lane.name)
        for step in lane.steps:
            yield from self.step(at, lane, step)

    def step(self, at: _At, lane: Lane, step: Step) -> Walk:
        if isinstance(step, Wait):
            yield from self.waits(at, (step,))
        elif isinstance(step, Signal):
            self.signal(at, step.flag)
        elif isinstance(step, Copy):
            self.copy(at, lane, step)
        elif isinstance(step, Push):
            for part in step.parts:
                self.copy(at, lane, Copy(part.src, part.dst))
                self.signal(at, part.count)
        elif isinstance(step, Gemm):
            yield from self.gemm(at, step)
        elif isinstance(step, Reduce):
            yield from self.reduce(at, step)
        elif isinstance(step, Lookup):
            self.lookup(at, step)
        elif isinstance(step, Collective):
            self.node(at, "collective", label(at.rank, step), op=step.op, bytes=region_bytes(self.schedule, step.src))
        elif isinstance(step, UserCall):
            self.call(at, step)
        else:
            assert isinstance(step, SendReceive), "a FusedCollective is spelled out"
            self.messages(at, step)

    def call(self, at: _At, step: UserCall) -> None:
        """The user's computation, or communication that is not described: a collective of no known size."""
        if step.collective is None:
            problem = self.schedule.problem
            self.node(at, "compute", str(step), us=getattr(problem, "compute_us", None) or 0.0)
        else:
            self.node(at, "collective", str(step), op=step.name)

    def copy(self, at: _At, lane: Lane, step: Copy) -> None:
        name, size = label(at.rank, step), region_bytes(self.schedule, step.src)
        if step.dst.rank != at.rank:
            self.message(at, step.dst.rank, size, name)
        elif step.src.rank != at.rank:
            self.pull(at, step.src, name)
        else:
            self.node(at, "compute", name, us=copy_us(self.machine, lane.kind, size), bytes=2 * size)

    def gemm(self, at: _At, step: Gemm) -> Walk:
        """Parts one after the other; those that add do so beside the parts that follow."""
        ends: list[int] = []
        times = parts_us(self.schedule, self.machine, at.rank, step)
        for part, us in zip(step.parts, times, strict=True):
            side = at
            if not part.adds:
                yield from self.waits(at, part.gates)
            yield from self.multiply(at, step, part, us)
            if part.adds:
                side = replace(at)
                yield from self.waits(side, part.gates)
                size = sum(region_bytes(self.schedule, add) for add in part.adds)
                self.node(side, "compute", f"add {part.out}", us=hbm_us(self.machine, size), bytes=size)
            ends += self.finish(side, part.out, part.count)
        at.after = tuple(dict.fromkeys((*at.after, *ends)))

    def multiply(self, at: _At, step: Gemm, part: Part, us: float) -> Walk:
        """Slice by slice, each behind its gate."""
        if part.a.rank != at.rank:
            self.pull(at, part.a, f"load {part.a}")
        columns = (0, *(column for column, _ in part.inner), part.a.shape[1])
        gates = ((), *((wait,) for _, wait in part.inner))
        for (low, high), gate in zip(pairwise(columns), gates, strict=True):
            yield from self.waits(at, gate)
            share = (high - low) / max(1, columns[-1])
            flops = 2 * part.a.shape[0] * (high - low) * step.b.shape[1]
            size = round(share * sum(region_bytes(self.schedule, region) for region in (part.a, part.out)))
            self.node(
                at, "compute", f"gemm {part.a.shape[0]}x{step.b.shape[1]}x{high - low}", us=share * us, flops=flops, bytes=size
            )

    def finish(self, at: _At, out: Region, count: Flag | None) -> Ids:
        """A part's store to a peer, and its count. Returns what the kernel does not end before."""
        stored: Ids = ()
        if out.rank != at.rank:
            stored = (self.message(at, out.rank, region_bytes(self.schedule, out), f"store {out}", posted=True)[0],)
        if count is not None:
            self.signal(at, count)
        return (*at.after, *stored)

    def reduce(self, at: _At, step: Reduce) -> Walk:
        for part in step.parts:
            yield from self.waits(at, part.gates)
            for src in part.srcs:
                if src.rank != at.rank:
                    self.pull(at, src, f"load {src}")
            size = region_bytes(self.schedule, part.out) + sum(region_bytes(self.schedule, src) for src in part.srcs)
            us = sum_us(self.schedule, self.machine, part, first=part is step.parts[0])
            self.node(at, "compute", f"sum {part.out}", us=us, bytes=size)
            if part.count is not None:
                self.signal(at, part.count)

    def lookup(self, at: _At, step: Lookup) -> None:
        ends: list[int] = []
        for part in step.parts:
            us = lookup_us(self.schedule, self.machine, part, first=part is step.parts[0])
            self.node(at, "compute", f"lookup {part.out}", us=us, bytes=region_bytes(self.schedule, part.out))
            ends += self.finish(at, part.out, part.count)
        at.after = tuple(dict.fromkeys((*at.after, *ends)))

    def messages(self, at: _At, step: SendReceive) -> None:
        ends: list[int] = []
        legs = [("send", send.to, send.src) for send in step.sends]
        legs += [("receive", receive.source, receive.dst) for receive in step.receives]
        for kind, peer, region in legs:
            pair = (at.rank, peer) if kind == "send" else (peer, at.rank)
            size, tag = region_bytes(self.schedule, region), self.posted(pair, at.rank)
            ends.append(self.node(at, kind, f"{kind} {region}", posted=True, bytes=size, peer=peer, tag=tag))  # type: ignore[arg-type]
        at.after, at.needs = tuple(ends), ()

    def posted(self, pair: tuple[int, int], rank: int) -> int:
        """The tag of the next message of a pair that this end comes to."""
        number = self.counted[pair, rank]
        self.counted[pair, rank] += 1
        known = self.mail.setdefault(pair, [])
        if number == len(known):
            known.append(self.tag(*pair))
        return known[number]


def graph(schedule: Schedule, machine: Machine) -> tuple[tuple[Node, ...], ...]:
    """The nodes of each rank. Raises ValueError as `weft.perf.run` does."""
    machine.require_for(schedule.problem)
    schedule = spelled_out(schedule).schedule
    builder = _Builder(schedule, machine, [[] for _ in schedule.ranks])
    lanes = deque((rank, lane, builder.lane(rank, lane)) for rank, lanes in enumerate(schedule.ranks) for lane in lanes)
    idle = 0
    while lanes:
        rank, lane, walk = lanes.popleft()
        before = builder.done
        ended = next(walk, 0) is not None
        if not ended:
            lanes.append((rank, lane, walk))
        idle = 0 if ended or builder.done != before else idle + 1
        if idle > len(lanes):
            raise ValueError(
                f"schedule {schedule.name} never ends: rank {rank}, lane {lane.name} waits for what nobody signals"
            )
    return tuple(map(tuple, builder.ranks))
