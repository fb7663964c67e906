"""The fabrics between nodes: which links a message uses, and a simulation of one rank for all.

A topology gives the links that a message uses from one rank to another, and their rates.

    torus    Neighbours in every dimension have a link in each direction (one dimension is a ring). A message follows the first
             dimension, then the second, each in the shorter direction. If both are equal, it goes upwards.
    fat tree Each rank has a port out and a port in. Each leaf switch has a trunk in each direction to all others.

Rates are usable rates for each direction in 1e9 bytes/s, which is bytes per nanosecond. Ranks count from 0. In a torus,
neighbours of the first dimension have consecutive numbers.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from weft.perf.fluid import Fluid, Load, Resource
from weft_studies.dlrm.system import DlrmSystem, Topology


class SymmetricFabric(ABC):
    """SymmetricFabric connects `world_size` ranks and is the same for each. If all ranks do the same, all resources of one kind
    have the same load, so one rank can represent all (weft_studies.dlrm.fabric)."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of ranks."""

    @abstractmethod
    def path(self, src: int, dst: int) -> tuple[Resource, ...]:
        """Return the resources that a message uses, in order. Raises ValueError for invalid or equal ranks."""

    @abstractmethod
    def rate(self, resource: Resource) -> float:
        """Return the rate of a resource in gbps."""

    @abstractmethod
    def delay_ns(self, resource: Resource) -> int:
        """Return the latency of a resource."""

    def check(self, src: int, dst: int) -> None:
        """Raise ValueError for invalid or equal ranks."""
        for name, rank in (("src", src), ("dst", dst)):
            if not 0 <= rank < self.world_size:
                raise ValueError(f"{name} is {rank}; the fabric has ranks 0 to {self.world_size - 1}")
        if src == dst:
            raise ValueError(f"src and dst are both {src}; a message goes to another rank")

    @property
    @abstractmethod
    def axes(self) -> tuple[int, ...]:
        """The lengths of the rings of each axis. Neighbours of the first axis have consecutive numbers."""

    @abstractmethod
    def kind(self, resource: Resource) -> Resource:
        """Return the kind of a resource. `rate` also accepts a kind."""

    @abstractmethod
    def count(self, kind: Resource) -> int:
        """Return the number of resources of a kind."""

    def after(self, rank: int, axis: int) -> int:
        """Return the next rank on a rank's ring of an axis."""
        stride, length = math.prod(self.axes[:axis]), self.axes[axis]
        place = rank // stride % length
        return rank + ((place + 1) % length - place) * stride


@dataclass(frozen=True, kw_only=True)
class _Linked(SymmetricFabric):
    """_Linked is a fabric whose links are all equal."""

    gbps: float
    latency_ns: int

    def __post_init__(self) -> None:
        if not self.gbps > 0:
            raise ValueError(f"gbps is {self.gbps!r}; it must be above zero")
        if self.latency_ns < 0:
            raise ValueError(f"latency_ns is {self.latency_ns}; it must be zero or more")
        if self.world_size < 2:
            raise ValueError(f"world_size is {self.world_size}; a fabric needs at least 2 ranks")

    def rate(self, resource: Resource) -> float:
        return self.gbps

    def delay_ns(self, resource: Resource) -> int:
        return self.latency_ns


@dataclass(frozen=True, kw_only=True)
class Torus(_Linked):
    """Torus has `dims` ranks along each dimension. Its latency is for each hop."""

    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.dims or min(self.dims) < 2:
            raise ValueError(f"dims is {self.dims}; a torus needs at least one dimension, each of at least 2")
        super().__post_init__()

    @property
    def world_size(self) -> int:
        return math.prod(self.dims)

    @property
    def axes(self) -> tuple[int, ...]:
        return self.dims

    def kind(self, resource: Resource) -> Resource:
        _, src, dst = resource
        assert isinstance(src, int)
        assert isinstance(dst, int)
        stride = 1
        for axis, size in enumerate(self.dims):
            ahead = (dst // stride - src // stride) % size
            if ahead:
                return "axis", axis, 1 if ahead == 1 else -1
            stride *= size
        raise AssertionError(f"{resource} goes from a rank to itself")

    def count(self, kind: Resource) -> int:
        return self.world_size

    def path(self, src: int, dst: int) -> tuple[Resource, ...]:
        self.check(src, dst)
        return tuple(self._hops(src, dst))

    def _hops(self, at: int, dst: int) -> Iterator[Resource]:
        stride = 1
        for size in self.dims:
            here, there = at // stride % size, dst // stride % size
            ahead = (there - here) % size
            direction, hops = (1, ahead) if 2 * ahead <= size else (-1, size - ahead)
            for _ in range(hops):
                after = (at // stride % size + direction) % size
                before, at = at, at + (after - at // stride % size) * stride
                yield "link", before, at
            stride *= size


@dataclass(frozen=True, kw_only=True)
class FatTree(_Linked):
    """FatTree has switches of `leaf` ranks, and trunks to the levels above at the rate of `leaf` links divided by `taper`.

    The levels above the trunks have full bandwidth, as in a folded Clos network. Latency is for each link. A message between
    leaves goes up to the last level.
    """

    ranks: int
    leaf: int
    taper: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.leaf < 2:
            raise ValueError(f"leaf is {self.leaf}; a switch needs at least 2 ranks")
        if self.ranks > self.leaf and self.ranks % self.leaf:
            raise ValueError(f"ranks is {self.ranks}; use a multiple of leaf, {self.leaf}, or fewer")
        if not 0 < self.taper < math.inf:
            raise ValueError(f"taper is {self.taper!r}; it must be above zero, and finite")

    @property
    def world_size(self) -> int:
        return self.ranks

    @property
    def axes(self) -> tuple[int, ...]:
        return (self.ranks,) if self.ranks <= self.leaf else (self.leaf, self.ranks // self.leaf)

    @property
    def levels(self) -> int:
        """The number of levels of switches.

        >>> [FatTree(ranks=ranks, leaf=16, gbps=25.0, latency_ns=700).levels for ranks in (8, 16, 128, 512)]
        [1, 1, 2, 3]
        """
        levels, reached = 1, self.leaf
        while reached < self.ranks:
            levels, reached = levels + 1, reached * self.leaf
        return levels

    def kind(self, resource: Resource) -> Resource:
        return (resource[0],)

    def count(self, kind: Resource) -> int:
        return self.ranks if kind[0] in ("out", "in") else self.ranks // self.leaf

    def path(self, src: int, dst: int) -> tuple[Resource, ...]:
        self.check(src, dst)
        ups = (src // self.leaf, dst // self.leaf)
        trunks: tuple[Resource, ...] = () if ups[0] == ups[1] else (("up", ups[0]), ("down", ups[1]))
        return ("out", src), *trunks, ("in", dst)

    def rate(self, resource: Resource) -> float:
        return self.gbps if resource[0] in ("out", "in") else self.gbps * self.leaf / self.taper

    def delay_ns(self, resource: Resource) -> int:
        return self.latency_ns if resource[0] in ("out", "in") else self.latency_ns * (self.levels - 1)


@dataclass(frozen=True, slots=True)
class Route:
    """Route is the messages of one rank that cross the same kinds of links. `delay_ns` is the latency of the longest path."""

    load: Load
    delay_ns: int


@dataclass
class Symmetric(Fluid):
    """Symmetric simulates the links of `fabric` for one rank, one link of each kind.

    On a SymmetricFabric, messages that differ only in their sender have the same rate, and all links of a kind carry the same
    load. So one rank is enough to simulate N ranks. A message of this rank represents N messages. It loads one link of each
    kind on its path as the N messages load each link of that kind on average:

        crossings of a link = links of the kind on the path * N / links of that kind.

    In an all-to-all the rank sends N - 1 messages. Messages that cross the same kinds of links have the same rate at any time,
    so they are merged into one flow with the sum of their loads. This gives 8 flows on a two-dimensional torus and 26 on a
    three-dimensional one, for any N. The results are exact: tests/studies/test_dlrm.py compares them with a simulation of all
    ranks and links.
    """

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

    >>> from weft_studies.dlrm.fabric import Torus
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


DIMENSIONS = {"torus_2d": 2, "torus_3d": 3}


def fabric(system: DlrmSystem, topology: Topology, nodes: int) -> SymmetricFabric:
    """Return the fabric of a topology with `nodes` nodes. Raises ValueError if there is none."""
    if topology == "fat_tree":
        leaf = system.tree.leaf
        if nodes < 2 or (nodes > leaf and nodes % leaf):
            raise ValueError(f"nodes is {nodes}; a fat tree has 2 to {leaf} (tree.leaf), or a multiple of {leaf}")
        return FatTree(
            ranks=nodes, leaf=leaf, taper=system.tree.taper, gbps=system.link.gbps, latency_ns=system.link.latency_ns
        )
    dims = torus_dims(nodes, DIMENSIONS[topology])
    return Torus(dims=dims, gbps=system.link.gbps, latency_ns=system.link.latency_ns)


def torus_dims(nodes: int, dimensions: int) -> tuple[int, ...]:
    """Return the most even dimensions of a torus, in rising order. Raises ValueError if there are none.

    >>> torus_dims(128, 2), torus_dims(128, 3)
    ((8, 16), (4, 4, 8))
    """
    found = list(_factors(nodes, dimensions, 2))
    if not found:
        raise ValueError(f"nodes is {nodes}; a {dimensions}D torus needs a product of {dimensions} numbers, each at least 2")
    return min(found, key=lambda dims: dims[::-1])


def _factors(nodes: int, count: int, least: int) -> Iterator[tuple[int, ...]]:
    """Yield all products of `count` non-decreasing numbers that give `nodes`, the first at least `least`."""
    if count == 1:
        if nodes >= least:
            yield (nodes,)
        return
    for first in range(least, math.isqrt(max(nodes, 0)) + 1):
        if nodes % first == 0:
            for others in _factors(nodes // first, count - 1, first):
                yield (first, *others)
