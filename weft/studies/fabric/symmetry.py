"""Symmetry: one rank of a fabric on which all ranks do the same at the same time, so that what it sends is also what arrives.

On a SymmetricFabric, messages that differ in their sender alone have the same rate, and all links of a kind carry the same.
So a simulation of all N ranks need not have N: a message of one rank stands for N, and loads one link of each kind that it
crosses as all N load all links of that kind,

    crossings of a link = links of the kind on the path * N / links of that kind.

An all-to-all has N - 1 messages of the rank. Those that cross the same kinds of links have the same rate at any time (the
first of their kinds that is full sets it), hence are one flow whose load is the sum of theirs: 8 flows on a torus of two
dimensions, 26 on one of three, whatever N is. What remains is exact: tests/studies/test_dlrm.py compares it with all
ranks and links.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from weft.perf.fluid import Fluid, Load, Resource
from weft.studies.fabric.topology import SymmetricFabric


@dataclass(frozen=True, slots=True)
class Route:
    """Messages of one rank that cross the same kinds of links. delay_ns: of the longest path."""

    load: Load
    delay_ns: int


@dataclass
class Symmetric(Fluid):
    """The links of `fabric` as one rank sees them, by kind. See the module's text."""

    fabric: SymmetricFabric

    def capacity(self, resource: Resource, flows: int) -> float:
        """See Fluid."""
        return self.fabric.rate(resource)

    def all_to_all(self, size: float) -> simpy.Event:
        """Send `size` bytes to each other rank; the event is when the last of what is sent to this one has arrived."""
        return self.env.all_of(
            [self.env.process(self._carry(size, route)) for route in routes(self.fabric, range(1, self.fabric.world_size))]
        )

    def shift(self, axis: int, size: float) -> simpy.Event:
        """Send `size` bytes to the next rank of an axis; the event is when those of the one before have arrived."""
        (route,) = routes(self.fabric, (self.fabric.after(0, axis),))
        return self.env.process(self._carry(size, route))

    def _carry(self, size: float, route: Route) -> Generator[simpy.Event, Any, None]:
        yield self.transfer_load(size, route.load)
        yield self.env.timeout(route.delay_ns)


@functools.lru_cache(maxsize=64)
def routes(fabric: SymmetricFabric, peers: Sequence[int]) -> tuple[Route, ...]:
    """What rank 0's messages to `peers`, a range or a tuple, of one size, load, by the kinds that they cross.

    >>> from weft.studies.fabric.topology import Torus
    >>> ring = Torus(dims=(5,), gbps=1.0, latency_ns=7)
    >>> for route in routes(ring, range(1, 5)):
    ...     print(route.load, route.delay_ns)
    ((('axis', 0, 1), 3),) 14
    ((('axis', 0, -1), 3),) 14
    """
    loads: dict[frozenset[Resource], Counter[Resource]] = {}
    delays: dict[frozenset[Resource], int] = {}
    for peer in peers:
        path = fabric.path(0, peer)
        kinds = Counter(map(fabric.kind, path))
        key = frozenset(kinds)
        loads.setdefault(key, Counter()).update(kinds)
        delays[key] = max(delays.get(key, 0), sum(map(fabric.delay_ns, path)))
    return tuple(Route(_load(fabric, found), delays[key]) for key, found in loads.items())


def _load(fabric: SymmetricFabric, crossed: Counter[Resource]) -> Load:
    return tuple((kind, times * fabric.world_size // fabric.count(kind)) for kind, times in crossed.items())
