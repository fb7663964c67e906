"""Network: transfers that share a machine's links, as fluids (weft.sim.fluid).

Each transfer crosses ports, links, a GPU's copy engines or store path. What stays within a GPU's memory crosses that: copies,
sums and lookups of one rank share its rate.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from weft.machine import Machine
from weft.sim.fluid import Fluid, Resource, Usage

__all__ = ["Network", "Resource", "Usage"]


@dataclass
class Network(Fluid):
    """Flows on a machine's links. ranks: how many the problem uses (a ring closes over them)."""

    machine: Machine
    ranks: int

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def capacity(self, resource: Resource, flows: int) -> float:
        """See Fluid."""
        copies = self.machine.copies
        if resource[0] == "engine":
            return copies.gbps if flows == 1 else min(copies.several_gbps, copies.gbps * flows)
        if resource[0] == "host":
            return self.machine.links.host_gbps or math.inf
        if resource[0] == "hbm":
            return self.machine.gpu.hbm_gbps
        return self._caps.get(resource, self.machine.links.gbps)
