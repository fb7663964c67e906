"""A topology gives the links that a message uses from one rank to another, and their rates.

    torus    Neighbours in every dimension have a link in each direction (one dimension is a ring). A message follows the first
             dimension, then the second, each in the shorter direction. If both are equal, it goes upwards.
    fat tree Each rank has a port out and a port in. Each leaf switch has a trunk in each direction to all others.

Rates are usable rates for each direction in 1e9 bytes/s, which is bytes per nanosecond. Ranks count from 0. In a torus,
neighbours of the first dimension have consecutive numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from weft.perf.fluid import Resource


class SymmetricFabric(ABC):
    """SymmetricFabric connects `world_size` ranks and is the same for each. If all ranks do the same, all resources of one kind
    have the same load, so one rank can represent all (weft_studies.fabric.symmetry)."""

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
