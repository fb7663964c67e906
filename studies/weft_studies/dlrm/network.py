"""NodeNetwork sends one node's data over a fabric: the library's collectives, and the puts of fused kernels.

    interface    | messages of a put, one after the other | messages of the next put | ..
    links                                   | put, max-min fair with all other transfers ............ |

A collective of the library takes `fixed_ns` to start. It reaches `share` of a link's rate, so its bytes take 1 / share times as
long.

An all-to-all has priority: while one is running, an all-reduce does not start its next step. An all-reduce uses the rings of
one axis after the other: a reduce-scatter along axis 0, 1, .., then an all-gather along .., 1, 0. All-reduces run one after the
other, in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import simpy

from weft_studies.dlrm.system import DlrmSystem

Process = Generator[simpy.Event, Any, Any]


class Port(Protocol):
    """A node's access to a fabric. Its events trigger when the data that all other nodes send to it has arrived."""

    def all_to_all(self, size: float) -> simpy.Event:
        """Send `size` bytes to each other node."""

    def shift(self, axis: int, size: float) -> simpy.Event:
        """Send `size` bytes to the next node of an axis."""


class NodeNetwork:
    """NodeNetwork is one node's network.

    axes: the lengths of the fabric's rings. log: the events as text, each with its time."""

    def __init__(self, env: simpy.Environment, port: Port, axes: tuple[int, ...], peers: int, system: DlrmSystem) -> None:
        self.env, self.port, self.axes, self.peers, self.system = env, port, axes, peers, system
        self.log: list[str] = []
        self._interface_free = 0
        self._urgent = 0
        self._calm = env.event()
        self._reduced = env.event().succeed()

    def note(self, what: str) -> None:
        self.log.append(f"{self.env.now} {what}")

    def put(self, name: str, size: float) -> simpy.Event:
        """Put `size` bytes into each other node. The returned event triggers when their data has arrived at this node."""
        return self.env.process(self._exchange(name, size))

    def all_to_all(self, name: str, size: float) -> simpy.Event:
        """Start the library's all-to-all of `size` bytes for each other node. Returns the event of its end."""
        library = self.system.collectives
        return self.env.process(self._exchange(name, size / library.share, library.fixed_ns))

    def all_reduce(self, name: str, size: int) -> simpy.Event:
        """Queue the library's all-reduce of `size` bytes after earlier all-reduces. Returns the event of its end."""
        self._reduced = self.env.process(self._all_reduce(name, size, self._reduced))
        return self._reduced

    def _exchange(self, name: str, size: float, fixed_ns: int = 0) -> Process:
        self._urgent += 1
        self.note(f"{name} starts")
        yield self.env.timeout(fixed_ns)
        yield from self._hand_over(self.peers)
        yield self.port.all_to_all(size)
        self.note(f"{name} arrived")
        self._urgent -= 1
        if not self._urgent:
            self._calm.succeed()
            self._calm = self.env.event()

    def _hand_over(self, messages: int) -> Process:
        """Wait until the interface has taken these messages, one after the other."""
        self._interface_free = max(int(self.env.now), self._interface_free) + messages * self.system.message_ns
        yield self.env.timeout(self._interface_free - self.env.now)

    def _all_reduce(self, name: str, size: int, before: simpy.Event) -> Process:
        yield before
        self.note(f"{name} starts")
        yield self.env.timeout(self.system.collectives.fixed_ns)
        steps = []
        for axis, length in enumerate(self.axes):
            size = -(-size // length)
            steps += [(axis, size)] * (length - 1)
        for axis, chunk in (*steps, *reversed(steps)):
            while self._urgent:
                yield self._calm
            yield from self._hand_over(1)
            yield self.port.shift(axis, chunk / self.system.collectives.share)
        self.note(f"{name} ends")
