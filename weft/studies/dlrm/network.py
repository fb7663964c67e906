"""Network: what one node asks of a fabric, for the library's collectives and for what fused kernels put, with two priorities.

    interface    | messages of a put, one after the other | messages of the next put | ..
    links                                   | put, max-min fair with all else under way ............. |

A collective of the library takes `fixed_ns` to start, and its bytes hold links 1 / share times as long as they would need.

Exchanges (all-to-all) are urgent: while one is under way, an all-reduce starts no further step. An all-reduce goes around the
rings of one axis after the other, and back: a reduce-scatter along axis 0, 1, .., then an all-gather along .., 1, 0.
All-reduces run one after the other, in the order in which they were asked for.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import simpy

from weft.studies.dlrm.system import DlrmSystem

Process = Generator[simpy.Event, Any, Any]


class Port(Protocol):
    """A node's access to a fabric. Its events trigger when the data that all other nodes send to it has arrived."""

    def all_to_all(self, size: float) -> simpy.Event:
        """Send `size` bytes to each other node."""

    def shift(self, axis: int, size: float) -> simpy.Event:
        """Send `size` bytes to the next node of an axis."""


class NodeNetwork:
    """One node's side. axes: lengths of the fabric's rings. log: what was done, as text, by its time."""

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
        """Put `size` bytes at each other node; the event is when what they put has arrived here."""
        return self.env.process(self._exchange(name, size))

    def all_to_all(self, name: str, size: float) -> simpy.Event:
        """The library's all-to-all of `size` bytes for each other node; the event is its end."""
        library = self.system.collectives
        return self.env.process(self._exchange(name, size / library.share, library.fixed_ns))

    def all_reduce(self, name: str, size: int) -> simpy.Event:
        """The library's all-reduce of `size` bytes, after those asked for before; the event is its end."""
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
        """The interface takes a node's messages one after the other."""
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
