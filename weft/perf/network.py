"""Network: transfers that share a machine's links, as fluids (weft.perf.fluid).

Each transfer crosses ports, links, a GPU's copy engines or store path. What stays within a GPU's memory crosses that: copies,
sums and lookups of one rank share its rate. Where kernels and copies slow each other (weft.perf.contention), kernels of both
ends feel a copy.
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
    """Flows on a machine's links. ranks: how many the problem uses. nodes: ranks on each node, where there are several: each
    has links and a host of its own, and a ring closes over its ranks. rotation: where rank 0 stands for all, transfers are its
    own, and take what all ranks' transfers take of rank 0's resources."""

    machine: Machine
    ranks: int
    nodes: tuple[int, ...] = ()
    rotation: Rotation | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._caps: dict[Resource, float] = {}
        self._ends: dict[Load, tuple[int, int]] = {}
        self._loads: dict[Load, Load] = {}
        self._of: list[tuple[int, int, int]] = []  # by rank: its node, that one's first rank, and how many it has
        for node, size in enumerate(self.nodes or (self.ranks,)):
            self._of += [(node, len(self._of), size)] * size
        self.contention = Contention(self.env, self.machine, self.ranks, self._reset)

    def _reset(self) -> None:
        """Have rates set anew."""
        self.advance()
        self.touch()

    def copy_path(self, rank: int, src: int, dst: int, *limits: Resource) -> tuple[Resource, ...]:
        """What a copy by an engine of `rank` crosses between two ranks. limits: further resources."""
        path = (*limits, ("engine", rank), *self.path(src, dst))
        self._ends[self._load(tuple((resource, 1) for resource in path))] = (0, 0) if self.rotation else (src, dst)
        return path

    def transfer_alike(self, size: float, load: Load) -> simpy.Event:
        """See Fluid."""
        return super().transfer_alike(size, self._load(load))

    def _load(self, load: Load) -> Load:
        """What stands for a load."""
        if self.rotation is None:
            return load
        found = self._loads.get(load)
        if found is None:
            found = self._loads[load] = self.rotation.load(load)
        return found

    @property
    def carried(self) -> Mapping[Resource, Carried]:
        """What each resource has carried, those included that others stand for."""
        if self.rotation is None:
            return self.usage
        return {one: carried for own, carried in self.usage.items() for one in self.rotation.everywhere(own)}

    def settle(self) -> None:
        """See Fluid; and tell kernels what copies move beside them, out of their rank's memory and into it."""
        super().settle()
        if self.contention.active:
            moved: dict[Hashable, float] = defaultdict(float)
            for stream in self.streams.values():
                for rank in self._ends.get(stream.load, ()):
                    moved[rank] += stream.rate * len(stream.flows)
            self.contention.moving(moved)

    def path(self, src: int, dst: int) -> tuple[Resource, ...]:
        """The links from one rank to another of its node."""
        topology = self.machine.links.topology
        node, first, size = self._of[src]
        if topology == "mesh":
            return (("link", src, dst),)
        if topology == "ring":
            ahead = (dst - src) % size
            way, hops = (1, ahead) if 2 * ahead <= size else (-1, size - ahead)
            stops = [first + (src - first + way * i) % size for i in range(hops + 1)]
            return tuple(("link", a, b) for a, b in itertools.pairwise(stops))
        ports: tuple[Resource, ...] = (("out", src), ("in", dst))
        return (*ports, ("host", node)) if topology == "pcie" else ports

    def latency_ns(self, src: int, dst: int) -> int:
        """From a signal on `src` to its sight on `dst`; 0 within a rank."""
        if src == dst:
            return 0
        hops = len(self.path(src, dst)) if self.machine.links.topology == "ring" else 1
        return round(hops * self.machine.links.latency_us * 1e3)

    def limit(self, resource: Resource, gbps: float) -> Resource:
        """A resource of its own capacity, such as the store path of a kernel's SMs. Returns it."""
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
