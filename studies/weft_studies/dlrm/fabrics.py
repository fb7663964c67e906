"""This module builds the fabric of a topology and a number of nodes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from weft_studies.dlrm.system import DlrmSystem, Topology
from weft_studies.fabric import FatTree, SymmetricFabric, Torus

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
