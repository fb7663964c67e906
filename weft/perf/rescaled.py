"""Rescaled: a vendor's collectives on links of another rate than those they were measured on. For what-if questions."""

from __future__ import annotations

from dataclasses import replace

from weft.core.machine import AlphaBeta, Machine, Table, within
from weft.perf.terms import wire_us

BY_HAND = "set by hand"
"""The source of a number that was given for a what-if."""
RESCALED = f"scaled with links that are {BY_HAND}; before: "
"""What the source of a number begins with that went with such links."""


def faster(op: str, before: Machine, after: Machine) -> float:
    """How many times as fast the links of `after` carry what a collective of all ranks moves, by their rate and topology.

    >>> from weft.machine import load
    >>> one, mesh = load("h200x8"), load("mi300x8")
    >>> faster("all_gather", one, replace(one, links=replace(one.links, gbps=780.0)))
    2.0
    >>> round(faster("all_gather", mesh, replace(mesh, links=replace(mesh.links, topology="switch"))), 3)
    0.143
    """
    ranks = max(2, before.world_size)
    return wire_us(before, op, 1.0, ranks) / wire_us(after, op, 1.0, ranks)


def rescaled(model: Table | AlphaBeta, factor: float) -> Table | AlphaBeta:
    """`model` on links of `factor` times the rate: what grows with bytes takes as much less, latency stays. Numbers stay within
    what a machine's may be.

    >>> rescaled(Table(world_size=2, points=((64, 10.0), (1024, 30.0))), 2.0).points
    ((64, 10.0), (1024, 20.0))
    """
    if isinstance(model, AlphaBeta):
        return replace(model, gbps=within(model.gbps * factor))
    return _table(model, factor)


def _table(table: Table, factor: float) -> Table:
    fixed_us = min(us for _, us in table.points)
    points = tuple((size, within(fixed_us + (us - fixed_us) / factor)) for size, us in table.points)
    return replace(table, points=points, also=tuple(_table(other, factor) for other in table.also))
