"""A System of DLRM whose numbers are small enough to follow by hand; and all nodes with all links, as Symmetric's judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import simpy

from weft.perf.fluid import Fluid, Resource
from weft_studies.dlrm import kernels
from weft_studies.dlrm.fabric import SymmetricFabric
from weft_studies.dlrm.iteration import IterationRun, Method, Node, NodeNetwork
from weft_studies.dlrm.system import DlrmSystem, load
from weft_studies.profile import changed

TINY = {
    "gpu.tflops.float32": 1e6,
    "gpu.tile_us": 0.001,
    "gpu.hbm_gbps": 1.0,
    "launch_us": 0.001,
    "gpu.gather_share": 1.0,
    "gpu.burst_bytes": 4,
    "model.tables": 4,
    "model.rows": 1000,
    "model.dim": 1,
    "model.pooling": 3,
    "model.index_bytes": 4,
    "model.bottom_layers": 1,
    "model.top_layers": 2,
    "model.width": 8,
    "model.interaction_mflop": 1e-6,
    "model.sort_bytes": 0,
    "batch": 10,
    "link.gbps": 0.05,
    "link.latency_ns": 7,
    "tree.leaf": 4,
    "tree.taper": 2.0,
    "message_ns": 1,
    "collectives.share": 0.5,
    "collectives.fixed_ns": 20,
    "collectives.bucket_bytes": 256,
    "fused.slices": 2,
    "fused.occupancy": 0.5,
}
"""4 tables of one 4-byte column: of 4 nodes each has one, and 10 samples x 4 bytes for each other. A layer has 256 bytes."""


def tiny(**changes: float) -> DlrmSystem:
    """The small system; names of changes have __ for a dot."""
    system = load()
    for path, value in (TINY | {name.replace("__", "."): value for name, value in changes.items()}).items():
        system = changed(system, path, value)
    return system


@dataclass
class Links(Fluid):
    """Every link of a fabric."""

    fabric: SymmetricFabric

    def capacity(self, resource: Resource, flows: int) -> float:
        return self.fabric.rate(resource)


class Everybody:
    """All nodes' ports. received: bytes by node; sent: likewise."""

    def __init__(self, fabric: SymmetricFabric) -> None:
        self.fabric, self.env = fabric, simpy.Environment()
        self.links = Links(self.env, fabric)
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self._missing: dict[Any, int] = {}
        self._events: dict[Any, simpy.Event] = {}

    def event(self, key: Any, messages: int) -> simpy.Event:
        """Of so many messages having arrived."""
        self._missing.setdefault(key, messages)
        return self._events.setdefault(key, self.env.event())

    def carry(self, src: int, dst: int, size: float, key: Any, messages: int) -> Iterator[simpy.Event]:
        self.sent[src] += size
        path = self.fabric.path(src, dst)
        yield self.links.transfer(size, path)
        yield self.env.timeout(sum(map(self.fabric.delay_ns, path)))
        self.received[dst] += size
        arrived = self.event(key, messages)
        self._missing[key] -= 1
        if not self._missing[key]:
            arrived.succeed()


class OnePort:
    """A node's port: the n-th call of a kind of one node belongs to the n-th of all others."""

    def __init__(self, everybody: Everybody, rank: int) -> None:
        self.all, self.rank, self.calls = everybody, rank, Counter[str]()

    def all_to_all(self, size: float) -> simpy.Event:
        self.calls["all_to_all"] += 1
        others = self.all.fabric.world_size - 1
        for away in range(1, others + 1):
            dst = (self.rank + away) % (others + 1)
            key = "all_to_all", dst, self.calls["all_to_all"]
            self.all.env.process(self.all.carry(self.rank, dst, size, key, others))
        return self.all.event(("all_to_all", self.rank, self.calls["all_to_all"]), others)

    def shift(self, axis: int, size: float) -> simpy.Event:
        self.calls["shift"] += 1
        dst = self.all.fabric.after(self.rank, axis)
        self.all.env.process(self.all.carry(self.rank, dst, size, ("shift", dst, self.calls["shift"]), 1))
        return self.all.event(("shift", self.rank, self.calls["shift"]), 1)


def run_all(
    system: DlrmSystem, fabric: SymmetricFabric, method: Method, iterations: int
) -> tuple[list[IterationRun], Everybody]:
    """Every node's iterations."""
    everybody = Everybody(fabric)
    nodes = []
    for rank in range(fabric.world_size):
        network = NodeNetwork(everybody.env, OnePort(everybody, rank), fabric.axes, fabric.world_size - 1, system)
        nodes.append(Node(network, kernels.bags(system, fabric.world_size), method))
        everybody.env.process(nodes[-1].train(iterations))
    everybody.env.run()
    return [node.result(everybody.links.usage) for node in nodes], everybody
