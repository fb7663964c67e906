"""Network: transfers that share links, as fluids. Rates are max-min fair and change whenever a transfer starts or ends.

Each transfer crosses resources (ports, links, a GPU's copy engines or store path), each with a capacity in bytes per
nanosecond, which is gbps. Progressive filling: the resource that gives its transfers least fixes their rate, its transfers
leave, and so on; hence no resource is ever above its capacity, and no transfer could be faster without slowing a slower one.

Time is whole nanoseconds and a transfer ends at the first one at which its last byte is through. Rates are computed once
for all starts and ends of the same nanosecond, after them all (priority LATE), so that equal ranks stay equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass, field

import simpy

from weft.machine import Machine

Resource = tuple[Hashable, ...]
LATE = 5
"""simpy runs lower numbers first at the same time; its own are 0 and 1."""
DONE = 1e-6
"""Bytes: what is left of a finished transfer by rounding."""


@dataclass(eq=False, slots=True)
class Flow:
    """A transfer under way. left: bytes."""

    resources: tuple[Resource, ...]
    left: float
    done: simpy.Event
    rate: float = 0.0


@dataclass(slots=True)
class Usage:
    """What a resource has carried, for conservation tests: bytes, and the highest rate seen."""

    bytes: float = 0.0
    peak_gbps: float = 0.0


@dataclass
class Network:
    """Flows on a machine's links, within a simpy environment. ranks: how many the problem uses (a ring closes over them)."""

    env: simpy.Environment
    machine: Machine
    ranks: int
    usage: dict[Resource, Usage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.flows: list[Flow] = []
        self._updated = 0
        self._dirty = False
        self._version = 0
        self._caps: dict[Resource, float] = {}

    def path(self, src: int, dst: int) -> tuple[Resource, ...]:
        """The links from one rank to another."""
        topology = self.machine.links.topology
        if topology == "mesh":
            return (("link", src, dst),)
        if topology == "ring":
            ahead = (dst - src) % self.ranks
            way, hops = (1, ahead) if 2 * ahead <= self.ranks else (-1, self.ranks - ahead)
            stops = [(src + way * i) % self.ranks for i in range(hops + 1)]
            return tuple(("link", a, b) for a, b in itertools.pairwise(stops))
        ports: tuple[Resource, ...] = (("out", src), ("in", dst))
        return (*ports, ("host",)) if topology == "pcie" else ports

    def latency_ns(self, src: int, dst: int) -> int:
        """From a signal on `src` to its sight on `dst`; 0 within a rank."""
        if src == dst:
            return 0
        hops = len(self.path(src, dst)) if self.machine.links.topology == "ring" else 1
        return round(hops * self.machine.links.latency_us * 1e3)

    def limit(self, resource: Resource, gbps: float) -> Resource:
        """A resource of its own capacity, such as the store path of a kernel's SMs. Returns it."""
        self._caps[resource] = gbps
        return resource

    def transfer(self, size: float, resources: tuple[Resource, ...]) -> simpy.Event:
        """Start to move `size` bytes over all of `resources`; the event is when they are through."""
        flow = Flow(resources, float(size), self.env.event())
        if size <= 0:
            flow.done.succeed()
            return flow.done
        self._advance()
        self.flows.append(flow)
        for resource in resources:
            self.usage.setdefault(resource, Usage()).bytes += size
        self._touch()
        return flow.done

    def _capacity(self, resource: Resource, flows: int) -> float:
        copies = self.machine.copies
        if resource[0] == "engine":
            return copies.gbps if flows == 1 else min(copies.several_gbps, copies.gbps * flows)
        if resource[0] == "host":
            return self.machine.links.host_gbps or math.inf
        return self._caps.get(resource, self.machine.links.gbps)

    def _touch(self) -> None:
        """Have rates computed once, after everything else of this nanosecond."""
        if self._dirty:
            return
        self._dirty = True
        later = simpy.Event(self.env)
        later._ok, later._value = True, None
        assert later.callbacks is not None
        later.callbacks.append(self._settle)
        self.env.schedule(later, priority=LATE)  # type: ignore[arg-type]

    def _advance(self) -> None:
        """Move what has flowed since the last change of rates."""
        elapsed = self.env.now - self._updated
        if elapsed:
            for flow in self.flows:
                flow.left -= flow.rate * elapsed
            self._updated = int(self.env.now)

    def _settle(self, _: simpy.Event) -> None:
        self._dirty = False
        self._advance()
        self._fill()
        self._version += 1
        if self.flows:
            wait = max(1, min(math.ceil((flow.left - DONE) / flow.rate) for flow in self.flows))
            timer = self.env.timeout(wait, self._version)
            assert timer.callbacks is not None
            timer.callbacks.append(self._finish)

    def _finish(self, timer: simpy.Event) -> None:
        if timer.value != self._version:
            return
        self._advance()
        ended = [flow for flow in self.flows if flow.left <= DONE]
        self.flows = [flow for flow in self.flows if flow.left > DONE]
        for flow in ended:
            flow.done.succeed()
        self._touch()

    def _fill(self) -> None:
        """Max-min fair rates by progressive filling; deterministic, as dicts keep the order of starts."""
        members: dict[Resource, list[Flow]] = {}
        for flow in self.flows:
            flow.rate = 0.0
            for resource in flow.resources:
                members.setdefault(resource, []).append(flow)
        left = {resource: self._capacity(resource, len(flows)) for resource, flows in members.items()}
        open_flows = {resource: len(flows) for resource, flows in members.items()}
        while open_flows:
            share = min(left[r] / count for r, count in open_flows.items())
            tight = [r for r, count in open_flows.items() if left[r] / count <= share * (1 + 1e-12)]
            for flow in [f for r in tight for f in members[r]]:
                if flow.rate == 0.0:
                    flow.rate = share
                    for resource in flow.resources:
                        left[resource] -= share
                        open_flows[resource] -= 1
            open_flows = {r: count for r, count in open_flows.items() if count}
        for resource, flows in members.items():
            usage = self.usage[resource]
            usage.peak_gbps = max(usage.peak_gbps, sum(f.rate for f in flows))
