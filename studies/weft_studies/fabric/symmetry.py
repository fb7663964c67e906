"""Symmetric simulates one rank of a fabric on which all ranks do the same at the same time.

On a SymmetricFabric, messages that differ only in their sender have the same rate, and all links of a kind carry the same load.
So one rank is enough to simulate N ranks. A message of this rank represents N messages. It loads one link of each kind on its
path as the N messages load each link of that kind on average:

    crossings of a link = links of the kind on the path * N / links of that kind.

In an all-to-all the rank sends N - 1 messages. Messages that cross the same kinds of links have the same rate at any time, so
they are merged into one flow with the sum of their loads. This gives 8 flows on a two-dimensional torus and 26 on a
three-dimensional one, for any N. The results are exact: tests/studies/test_dlrm.py compares them with a simulation of all ranks
and links.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from weft.perf.fluid import Fluid, Load, Resource
from weft_studies.fabric.topology import SymmetricFabric


@dataclass(frozen=True, slots=True)
class Route:
    """Route is the messages of one rank that cross the same kinds of links. `delay_ns` is the latency of the longest path."""

    load: Load
    delay_ns: int


@dataclass
class Symmetric(Fluid):
    """Symmetric simulates the links of `fabric` for one rank, one link of each kind. See the module's text."""

    fabric: SymmetricFabric

    def capacity(self, resource: Resource, flows: int) -> float:
        """See Fluid."""
        return self.fabric.rate(resource)

    def all_to_all(self, size: float) -> simpy.Event:
        """Send `size` bytes to each other rank. The returned event triggers when all data for this rank has arrived."""
        return self.env.all_of(
            [self.env.process(self._carry(size, route)) for route in routes(self.fabric, range(1, self.fabric.world_size))]
        )

    def shift(self, axis: int, size: float) -> simpy.Event:
        """Send `size` bytes to the next rank of an axis. The event triggers when the previous rank's data has arrived."""
        (route,) = routes(self.fabric, (self.fabric.after(0, axis),))
        return self.env.process(self._carry(size, route))

    def _carry(self, size: float, route: Route) -> Generator[simpy.Event, Any, None]:
        yield self.transfer_load(size, route.load)
        yield self.env.timeout(route.delay_ns)


@functools.lru_cache(maxsize=64)
def routes(fabric: SymmetricFabric, peers: Sequence[int]) -> tuple[Route, ...]:
    """Return the routes of rank 0's messages of equal size to `peers`, which is a range or a tuple.

    >>> from weft_studies.fabric.topology import Torus
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
