"""Fluid: transfers that share resources. Rates are max-min fair and change whenever a transfer starts or ends.

Each transfer crosses resources. A resource has a capacity in bytes per nanosecond, which equals gbps. Progressive filling: the
resource that gives its transfers the least fixes their rate, these transfers are removed, and the next resource follows. So no
resource is above its capacity, and no transfer could be faster without slowing a slower one.

Time is in whole nanoseconds, and a transfer ends at the first one at which its last byte has arrived. Rates are computed once
for all starts and ends of a nanosecond, after all of them (priority LATE), so that equal ranks stay equal.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field

import simpy

Resource = tuple[Hashable, ...]
Load = tuple[tuple[Resource, int], ...]
"""The resources of a flow, each with a multiple: one flow may represent several equal ones."""
LATE = 5
"""The priority of rate changes. At the same time simpy runs lower numbers first, and its own are 0 and 1."""
DONE = 1e-6
"""A transfer with fewer bytes left than this is finished, because the rest is rounding."""


@dataclass
class Settled(ABC):
    """Settled has activities with constant rates between changes. Rates are set once for all changes of a nanosecond."""

    env: simpy.Environment

    def __post_init__(self) -> None:
        self._updated = 0
        self._dirty = False
        self._version = 0

    @abstractmethod
    def move(self, elapsed: int) -> None:
        """Advance all activities by `elapsed` nanoseconds at the current rates."""

    @abstractmethod
    def settle(self) -> None:
        """Set all rates."""

    @abstractmethod
    def next_end(self) -> float | None:
        """Return the nanoseconds until the first activity ends at these rates; None if there is none."""

    @abstractmethod
    def finish(self) -> None:
        """End the activities that are finished."""

    def advance(self) -> None:
        """Advance to the current time. Call this before an activity starts."""
        elapsed = int(self.env.now) - self._updated
        if elapsed:
            self.move(elapsed)
            self._updated = int(self.env.now)

    def touch(self) -> None:
        """Request new rates, which are set after all other events of this nanosecond."""
        if self._dirty:
            return
        self._dirty = True
        later = simpy.Event(self.env)
        later._ok, later._value = True, None
        assert later.callbacks is not None
        later.callbacks.append(self._settle)
        self.env.schedule(later, priority=LATE)  # type: ignore[arg-type]

    def _settle(self, _: simpy.Event) -> None:
        self._dirty = False
        self.advance()
        self.settle()
        self._version += 1
        wait = self.next_end()
        if wait is not None:
            timer = self.env.timeout(max(1, math.ceil(wait)), self._version)
            assert timer.callbacks is not None
            timer.callbacks.append(self._finish)

    def _finish(self, timer: simpy.Event) -> None:
        if timer.value != self._version:
            return
        self.advance()
        self.finish()
        self.touch()


@dataclass(eq=False, slots=True)
class Flow:
    """Flow is a running transfer. left: its remaining bytes."""

    left: float
    done: simpy.Event


@dataclass(eq=False, slots=True)
class Stream:
    """Stream has all flows with the same load. Each has the same rate."""

    load: Load
    flows: list[Flow] = field(default_factory=list)
    rate: float = 0.0

    @property
    def resources(self) -> tuple[Resource, ...]:
        return tuple(resource for resource, _ in self.load)


@dataclass(slots=True)
class Carried:
    """Carried has the bytes and the highest rate of a resource, for conservation tests."""

    bytes: float = 0.0
    peak_gbps: float = 0.0


@dataclass
class Fluid(Settled):
    """Fluid has the flows of a simpy environment. usage: the traffic of each resource."""

    usage: dict[Resource, Carried] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.streams: dict[Load, Stream] = {}

    @abstractmethod
    def capacity(self, resource: Resource, flows: int) -> float:
        """Return the capacity in gbps of a resource that `flows` flows use."""

    def transfer(self, size: float, resources: tuple[Resource, ...]) -> simpy.Event:
        """Start a transfer of `size` bytes over all of `resources`, and return the event of its end."""
        return self.transfer_load(size, tuple((resource, 1) for resource in resources))

    def transfer_load(self, size: float, load: Load) -> simpy.Event:
        """Start a transfer of `size` bytes with a load, and return the event of its end."""
        flow = Flow(float(size), self.env.event())
        if size <= 0:
            flow.done.succeed()
            return flow.done
        self.advance()
        self.streams.setdefault(load, Stream(load)).flows.append(flow)
        for resource, times in load:
            self.usage.setdefault(resource, Carried()).bytes += size * times
        self.touch()
        return flow.done

    def move(self, elapsed: int) -> None:
        """See Settled."""
        for stream in self.streams.values():
            moved = stream.rate * elapsed
            for flow in stream.flows:
                flow.left -= moved

    def next_end(self) -> float | None:
        """See Settled."""
        return min(((min(flow.left for flow in s.flows) - DONE) / s.rate for s in self.streams.values()), default=None)

    def finish(self) -> None:
        """See Settled."""
        for stream in list(self.streams.values()):
            for flow in stream.flows:
                if flow.left <= DONE:
                    flow.done.succeed()
            stream.flows = [flow for flow in stream.flows if flow.left > DONE]
            if not stream.flows:
                del self.streams[stream.load]

    def settle(self) -> None:
        """Set max-min fair rates by progressive filling. This is deterministic, because dicts preserve the order of starts."""
        members: dict[Resource, list[Stream]] = {}
        waiting: dict[Resource, int] = {}
        for stream in self.streams.values():
            stream.rate = 0.0
            for resource, times in stream.load:
                members.setdefault(resource, []).append(stream)
                waiting[resource] = waiting.get(resource, 0) + times * len(stream.flows)
        full = {resource: self.capacity(resource, count) for resource, count in waiting.items()}
        left = dict(full)
        while waiting:
            share = min(left[r] / count for r, count in waiting.items())
            assert share > 0, f"network: nothing is left of a resource that {waiting} wait for"
            tight = [r for r, count in waiting.items() if left[r] / count <= share * (1 + 1e-12)]
            for stream in [s for r in tight for s in members[r] if not s.rate]:
                if not stream.rate:
                    _give(stream, share, left, waiting)
            waiting = {r: count for r, count in waiting.items() if count}
        for resource, capacity in full.items():
            usage = self.usage[resource]
            usage.peak_gbps = max(usage.peak_gbps, capacity - left[resource])


def _give(stream: Stream, share: float, left: dict[Resource, float], waiting: dict[Resource, int]) -> None:
    """Set the rate of a stream's flows, and subtract it from their resources."""
    stream.rate = share
    for resource, times in stream.load:
        left[resource] -= share * times * len(stream.flows)
        waiting[resource] -= times * len(stream.flows)
