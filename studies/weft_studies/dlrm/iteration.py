"""This module simulates one node's training iterations of a DLRM, kernel by kernel. Embedding and all-to-all may be fused.

    unfused   compute     | lookup | bottom forward | ~~ wait ~~ | repack, interaction, top forward | top backward ..
              all-to-all           | all-to-all ............. ->|

    fused     compute     | slice 1 | slice 2 | .. | own samples | bottom forward | interaction, top forward | top backward ..
              all-to-all            | slice 1 .... ->|
                                              | slice 2 .... ->|

    both      compute     .. top backward | interaction backward, repack | bottom backward, sort | ~~ wait ~~ | update |
              all-to-all                                                 | gradients ................... ->|
              all-reduce     | bucket | bucket | (waits: gradients are urgent)                              | bucket | ..

The fused kernel first looks up the rows that other nodes need, in `slices` slices. Each slice has rows for all other nodes. It
looks up the rows for its own samples last. It stores each slice at its final place, so no repacking is needed. It occupies the
GPU until its last lookup. The interaction waits for the arrivals. The backward pass is the same with both methods. The
optimizer's step and the forward pass of an MLP wait for the all-reduces of its gradients of the iteration before. All nodes do
the same, so one represents all (Symmetric in fabric.py). Indices are in memory when an iteration begins.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import simpy

from weft.core.span import Kind, Span
from weft.perf.fluid import Carried, Resource
from weft_studies.dlrm import kernels
from weft_studies.dlrm.fabric import Symmetric, SymmetricFabric
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

        interface    | messages of a put, one after the other | messages of the next put | ..
        links                                   | put, max-min fair with all other transfers ............ |

    A collective of the library takes `fixed_ns` to start. It reaches `share` of a link's rate, so its bytes take 1 / share
    times as long.

    An all-to-all has priority: while one is running, an all-reduce does not start its next step. An all-reduce uses the rings
    of one axis after the other: a reduce-scatter along axis 0, 1, .., then an all-gather along .., 1, 0. All-reduces run one
    after the other, in the order of the calls.

    axes: the lengths of the fabric's rings. log: the events as text, each with its time.
    """

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


Method = Literal["unfused", "in_place", "fused"]
"""in_place is the unfused program with an all-to-all that stores each row at its final place, so no repacking is needed. This
is the advantage that the fused kernel has in addition to overlap."""
METHODS: tuple[Method, ...] = get_args(Method)
ITERATIONS = 3
"""The number of simulated iterations. The last one is reported, so that it includes all-reduces left by the one before."""


@dataclass(frozen=True, kw_only=True)
class IterationRun:
    """IterationRun has the results of a node's iterations. All nodes behave in the same way.

    ns: the time from the end of one iteration to the end of the next.
    spans: the spans of the last iteration, from time 0.
    log: every event of all iterations.
    usage: what a link of each kind carried over all iterations.
    waits_ns: the time in which the GPU is idle."""

    method: Method
    nodes: int
    ns: int
    spans: tuple[Span, ...]
    log: tuple[str, ...]
    usage: dict[Resource, Carried]

    @property
    def waits_ns(self) -> int:
        return round(1e3 * sum(span.duration_us for span in self.spans if span.kind == "wait"))


def run(system: DlrmSystem, fabric: SymmetricFabric, method: Method, iterations: int = ITERATIONS) -> IterationRun:
    """Simulate `iterations` iterations, which must be at least 2."""
    node, links = _one_node(system, fabric, kernels.bags(system, fabric.world_size), method)
    node.env.process(node.train(iterations))
    node.env.run()
    return node.result(links.usage)


def operator_ns(system: DlrmSystem, fabric: SymmetricFabric, bags: kernels.NodeLookups, method: Method) -> int:
    """Return the time of embedding and all-to-all alone, until a node has all rows that its samples need."""
    node, _ = _one_node(system, fabric, bags, method)

    def call() -> Process:
        yield from node.take((yield from node.pool()))

    node.env.run(until=node.env.process(call()))
    return int(node.env.now)


def _one_node(system: DlrmSystem, fabric: SymmetricFabric, bags: kernels.NodeLookups, method: Method) -> tuple[Node, Symmetric]:
    links = Symmetric(simpy.Environment(), fabric)
    return Node(NodeNetwork(links.env, links, fabric.axes, fabric.world_size - 1, system), bags, method), links


class Node:
    """Node runs one node's program. All times are simulated, in nanoseconds."""

    def __init__(self, network: NodeNetwork, bags: kernels.NodeLookups, method: Method) -> None:
        self.network, self.env, self.system = network, network.env, network.system
        self.bags, self.method = bags, method
        self.ends: list[int] = []
        self._spans: list[Span] = []
        self._lane_ends: dict[str, int] = {}

    def train(self, iterations: int) -> Process:
        """Run `iterations` iterations."""
        reduced: dict[str, list[simpy.Event]] = {"bottom": [], "top": []}
        for _ in range(iterations):
            yield from self._ahead(reduced)
            yield from self._back(reduced)
            self.ends.append(int(self.env.now))

    def _ahead(self, reduced: dict[str, list[simpy.Event]]) -> Process:
        """Run the forward pass. reduced: for each MLP, the all-reduces for which its optimizer step waits."""
        pooled = yield from self.pool()
        yield from self._forward("bottom", reduced)
        yield from self.take(pooled)
        yield from self.kernel("gemm", "interaction", kernels.interaction_ns(self.system, 1))
        yield from self._forward("top", reduced)

    def _back(self, reduced: dict[str, list[simpy.Event]]) -> Process:
        """Run the backward pass in the opposite order, then update the tables."""
        yield from self._backward("top", reduced)
        yield from self.kernel("gemm", "interaction backward", kernels.interaction_ns(self.system, 2))
        yield from self.kernel("copy", "repack", kernels.repack_ns(self.system, self.bags))
        gradients = self._traced("all-to-all", "gradients", self._exchange_by_library("gradients"))
        yield from self._backward("bottom", reduced)
        yield from self.kernel("reduce", "sort", kernels.sort_ns(self.system, self.bags))
        yield from self._wait("gradients", gradients)
        yield from self.kernel("reduce", "update", kernels.update_ns(self.system, self.bags))

    def result(self, usage: dict[Resource, Carried]) -> IterationRun:
        """Return the results after the simulation."""
        start, end = self.ends[-2:]
        spans = [_moved(span, start / 1e3) for span in self._spans if round(span.start_us * 1e3) >= start]
        return IterationRun(
            method=self.method,
            nodes=self.bags.nodes,
            ns=end - start,
            spans=tuple(spans),
            log=tuple(self.network.log),
            usage=usage,
        )

    def pool(self) -> Process:
        """Look up the rows that all nodes' samples need. Returns the event of the all-to-all, which may still be running."""
        return (yield from (self._fused() if self.method == "fused" else self._unfused()))

    def take(self, pooled: simpy.Event) -> Process:
        """Wait for the rows that others looked up for this node's samples, and order them by sample."""
        yield from self._wait("pooled rows", pooled)
        if self.method == "unfused":
            yield from self.kernel("copy", "repack", kernels.repack_ns(self.system, self.bags))

    def _unfused(self) -> Process:
        """Look up all rows, then start the all-to-all. Returns its event."""
        system = self.system
        launch = round(1e3 * system.launch_us)
        yield from self.kernel("lookup", "lookup", launch + round(1e3 * kernels.lookup_us(system, self.bags)))
        return self._traced("all-to-all", "all-to-all", self._exchange_by_library("all-to-all"))

    def _exchange_by_library(self, name: str) -> simpy.Event:
        return self.network.all_to_all(name, self.bags.message(self.system.itemsize))

    def _fused(self) -> Process:
        """Look up the rows for others and send each slice when it is complete, then look up the rows for this node."""
        system, nodes, slices = self.system, self.bags.nodes, self.system.fused.slices
        whole_ns = 1e3 * kernels.lookup_us(system, self.bags, system.fused.occupancy)
        launch = round(1e3 * system.launch_us)
        size = self.bags.message(system.itemsize) / slices
        start, puts, done = int(self.env.now), [], 0
        for number in range(1, slices + 1):
            ends = round(whole_ns * (nodes - 1) / nodes * number / slices)
            yield from self.kernel("lookup", f"lookup {number}", ends - done + (0 if done else launch))
            puts.append(self.network.put(f"slice {number}", size))
            done = ends
        arrived = self._traced("all-to-all", "slices", self.env.all_of(puts), start + launch + done // slices)
        yield from self.kernel("lookup", "lookup own", round(whole_ns) - done)
        return arrived

    def _forward(self, mlp: str, reduced: dict[str, list[simpy.Event]]) -> Process:
        layers = self._layers(mlp)
        if reduced[mlp]:
            yield from self._wait(f"{mlp} gradients", self.env.all_of(reduced[mlp]))
            yield from self.kernel("reduce", f"{mlp} step", kernels.step_ns(self.system, layers))
        yield from self.kernel("gemm", f"{mlp} forward", layers * kernels.layer_ns(self.system))

    def _backward(self, mlp: str, reduced: dict[str, list[simpy.Event]]) -> Process:
        """Run the backward pass from the last layer. A bucket's all-reduce starts when its last gradient is computed."""
        reduced[mlp] = []
        for bucket, layers in enumerate(buckets(self.system, self._layers(mlp)), 1):
            each = kernels.layer_ns(self.system) + kernels.weight_gradient_ns(self.system)
            yield from self.kernel("gemm", f"{mlp} backward {bucket}", layers * each)
            name = f"{mlp} bucket {bucket}"
            event = self.network.all_reduce(name, layers * kernels.layer_bytes(self.system))
            reduced[mlp].append(self._traced("all-reduce", name, event))

    def _layers(self, mlp: str) -> int:
        return self.system.model.bottom_layers if mlp == "bottom" else self.system.model.top_layers

    def kernel(self, kind: Kind, name: str, ns: int) -> Process:
        """Keep the GPU busy for `ns` nanoseconds, and record the span."""
        start = int(self.env.now)
        self.network.note(name)
        yield self.env.timeout(ns)
        self._span("compute", kind, name, start)

    def _wait(self, name: str, event: simpy.Event) -> Process:
        start = int(self.env.now)
        yield event
        if self.env.now > start:
            self._span("compute", "wait", f"wait for {name}", start)

    def _traced(self, lane: str, name: str, event: simpy.Event, start: int | None = None) -> simpy.Event:
        """Record a span from `start` (default: now) until `event`, and return `event`.

        The span starts after the spans of its lane that end before it."""
        asked = int(self.env.now) if start is None else start

        def over(_: simpy.Event) -> None:
            self._span(lane, "collective", name, max(asked, self._lane_ends.get(lane, 0)))
            self._lane_ends[lane] = int(self.env.now)

        assert event.callbacks is not None, f"{name} is over before it was recorded"
        event.callbacks.append(over)
        return event

    def _span(self, lane: str, kind: Kind, name: str, start: int) -> None:
        end_us = int(self.env.now) / 1e3
        self._spans.append(Span(rank=0, lane=lane, kind=kind, name=name, start_us=start / 1e3, end_us=end_us))


def buckets(system: DlrmSystem, layers: int) -> Sequence[int]:
    """Return the number of layers in each bucket. A bucket takes layers until it has bucket_bytes, and the last has the rest.

    >>> from weft_studies.dlrm.system import load
    >>> buckets(load(), 29)
    [15, 14]
    """
    each = -(-system.collectives.bucket_bytes // kernels.layer_bytes(system))
    return [min(each, layers - first) for first in range(0, layers, each)]


def _moved(span: Span, by_us: float) -> Span:
    start, end = round(span.start_us - by_us, 3), round(span.end_us - by_us, 3)
    return Span(rank=span.rank, lane=span.lane, kind=span.kind, name=span.name, start_us=start, end_us=end)
