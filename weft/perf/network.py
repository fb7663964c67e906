"""Network: transfers that share a machine's links, modelled as fluids (weft.perf.fluid).

A transfer between GPUs uses ports, links, and a GPU's copy engines or store path. Copies, sums and lookups within a GPU share
the rate of its memory. If kernels and copies slow each other (weft.perf.contention), a copy slows the kernels of both its ends.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import simpy

from weft.core.machine import Machine
from weft.perf.contention import Contention
from weft.perf.fluid import Carried, Fluid, Load, Resource
from weft.perf.rotation import Rotation

__all__ = ["Carried", "Fabric", "Resource"]


@dataclass
class Fabric(Fluid):
    """Fabric has the flows on a machine's links.

    ranks: the number of ranks of the problem.
    nodes: the number of ranks of each node, if there are several. Each node has its own links, host and ring.
    rotation: set if rank 0 represents all ranks. Then only its transfers exist, and each takes from rank 0's resources what the
    corresponding transfers of all ranks take."""

    machine: Machine
    ranks: int
    nodes: tuple[int, ...] = ()
    rotation: Rotation | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._caps: dict[Resource, float] = {}
        self._ends: dict[Load, tuple[int, int]] = {}
        self._loads: dict[Load, Load] = {}
        self._of: list[tuple[int, int, int]] = []  # by rank: its node, the node's first rank, and the node's size
        for node, size in enumerate(self.nodes or (self.ranks,)):
            self._of += [(node, len(self._of), size)] * size
        self.contention = Contention(self.env, self.machine, self.ranks, self._reset)

    def _reset(self) -> None:
        self.advance()
        self.touch()

    def copy_path(self, rank: int, src: int, dst: int, *limits: Resource) -> tuple[Resource, ...]:
        """Return the resources of a copy by an engine of `rank` between two ranks. limits: further resources."""
        path = (*limits, ("engine", rank), *self.path(src, dst))
        self._ends[self._load(tuple((resource, 1) for resource in path))] = (0, 0) if self.rotation else (src, dst)
        return path

    def transfer_load(self, size: float, load: Load) -> simpy.Event:
        """See Fluid."""
        return super().transfer_load(size, self._load(load))

    def _load(self, load: Load) -> Load:
        """Return the load on rank 0 that represents this load."""
        if self.rotation is None:
            return load
        found = self._loads.get(load)
        if found is None:
            found = self._loads[load] = self.rotation.load(load)
        return found

    @property
    def carried(self) -> Mapping[Resource, Carried]:
        """The traffic of each resource, including those that rank 0's resources represent."""
        if self.rotation is None:
            return self.usage
        return {one: carried for own, carried in self.usage.items() for one in self.rotation.everywhere(own)}

    def settle(self) -> None:
        """Set all rates, as Fluid does, and pass each rank's rate of copies to the contention of its kernels."""
        super().settle()
        if self.contention.active:
            moved: dict[Hashable, float] = defaultdict(float)
            for stream in self.streams.values():
                for rank in self._ends.get(stream.load, ()):
                    moved[rank] += stream.rate * len(stream.flows)
            self.contention.moving(moved)

    def path(self, src: int, dst: int) -> tuple[Resource, ...]:
        """Return the links from one rank to another on its node."""
        topology = self.machine.links.topology
        node, first, size = self._of[src]
        if topology == "mesh":
            return (("link", src, dst),)
        if topology == "ring":
            ahead = (dst - src) % size
            direction, hops = (1, ahead) if 2 * ahead <= size else (-1, size - ahead)
            stops = [first + (src - first + direction * i) % size for i in range(hops + 1)]
            return tuple(("link", a, b) for a, b in itertools.pairwise(stops))
        ports: tuple[Resource, ...] = (("out", src), ("in", dst))
        return (*ports, ("host", node)) if topology == "pcie" else ports

    def latency_ns(self, src: int, dst: int) -> int:
        """Return the time from a signal on `src` until `dst` sees it; 0 within a rank."""
        if src == dst:
            return 0
        hops = len(self.path(src, dst)) if self.machine.links.topology == "ring" else 1
        return round(hops * self.machine.links.latency_us * 1e3)

    def limit(self, resource: Resource, gbps: float) -> Resource:
        """Set the capacity of a resource, such as the store path of a kernel's SMs, and return the resource."""
        self._caps[self.rotation.resource(resource) if self.rotation else resource] = gbps
        return resource

    def capacity(self, resource: Resource, flows: int) -> float:
        """See Fluid."""
        copies = self.machine.copies
        if resource[0] == "engine":
            together = max(copies.gbps, copies.several_gbps) if flows == 1 else copies.several_gbps
            return min(together / self.contention.copies_slower(resource[1]), copies.gbps * flows)
        if resource[0] == "hbm":
            return self.machine.gpu.hbm_gbps
        if resource[0] == "host":
            return self.machine.links.host_gbps or math.inf
        return self._caps.get(resource, self.machine.links.gbps)
