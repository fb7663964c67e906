"""Topologies: which links a message crosses from one rank to another, and what these can carry.

    torus    a link each way between neighbours of every dimension (one dimension: a ring); a message goes along the first
             dimension first, then the second, each the shorter way around, upwards where both are as long
    fat tree a port out and a port in for each rank, and a trunk each way from the switch of every so many ranks to all others

Rates are usable ones, each way, in 1e9 bytes/s, which is bytes a nanosecond. Ranks count from 0; in a torus the first
dimension's neighbours are next to each other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from weft.perf.fluid import Resource


class SymmetricFabric(ABC):
    """What connects `world_size` ranks, and looks the same from every one: its resources fall into kinds, and what all ranks do
    alike loads all resources of a kind alike. So one rank can stand for all (weft.studies.fabric.symmetry)."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Ranks."""

    @abstractmethod
    def path(self, src: int, dst: int) -> tuple[Resource, ...]:
        """The resources that a message crosses, in order. Raises ValueError for ranks that are none, or the same."""

    @abstractmethod
    def rate(self, resource: Resource) -> float:
        """What a resource carries, in gbps."""

    @abstractmethod
    def delay_ns(self, resource: Resource) -> int:
        """How long a byte takes to get across."""

    def check(self, src: int, dst: int) -> None:
        """Raises ValueError for ranks that are none, or the same."""
        for name, rank in (("src", src), ("dst", dst)):
            if not 0 <= rank < self.world_size:
                raise ValueError(f"{name} is {rank}; the fabric has ranks 0 to {self.world_size - 1}")
        if src == dst:
            raise ValueError(f"src and dst are both {src}; a message goes to another rank")

    @property
    @abstractmethod
    def axes(self) -> tuple[int, ...]:
        """Lengths of the rings that ranks lie on, one of each axis; those of the first axis are next to each other."""

    @abstractmethod
    def kind(self, resource: Resource) -> Resource:
        """Which kind a resource is of; `rate` takes a kind, too."""

    @abstractmethod
    def alike(self, kind: Resource) -> int:
        """How many resources of a kind there are."""

    def after(self, rank: int, axis: int) -> int:
        """The next rank on a rank's ring of an axis."""
        stride, length = math.prod(self.axes[:axis]), self.axes[axis]
        place = rank // stride % length
        return rank + ((place + 1) % length - place) * stride


@dataclass(frozen=True, kw_only=True)
class _Linked(SymmetricFabric):
    """All links alike."""

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
    """dims: ranks along each dimension, the first one's neighbours being next to each other. Latency is a hop's."""

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

    def alike(self, kind: Resource) -> int:
        return self.world_size

    def path(self, src: int, dst: int) -> tuple[Resource, ...]:
        self.check(src, dst)
        return tuple(self._hops(src, dst))

    def _hops(self, at: int, dst: int) -> Iterator[Resource]:
        stride = 1
        for size in self.dims:
            here, there = at // stride % size, dst // stride % size
            ahead = (there - here) % size
            way, hops = (1, ahead) if 2 * ahead <= size else (-1, size - ahead)
            for _ in range(hops):
                after = (at // stride % size + way) % size
                before, at = at, at + (after - at // stride % size) * stride
                yield "link", before, at
            stride *= size


@dataclass(frozen=True, kw_only=True)
class FatTree(_Linked):
    """Switches of `leaf` ranks, and trunks between each and the levels above, which carry `leaf` links' rate over `taper`.

    Above the trunks nothing is short of anything, as in a folded Clos network: there are as many levels of switches with `leaf`
    ports down as the ranks need. Latency is a link's; a message between leaves goes up to the last level.
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
        """Of switches.

        >>> [FatTree(ranks=ranks, leaf=16, gbps=25.0, latency_ns=700).levels for ranks in (8, 16, 128, 512)]
        [1, 1, 2, 3]
        """
        levels, reached = 1, self.leaf
        while reached < self.ranks:
            levels, reached = levels + 1, reached * self.leaf
        return levels

    def kind(self, resource: Resource) -> Resource:
        return (resource[0],)

    def alike(self, kind: Resource) -> int:
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
