"""Last-level cache: how much of a GEMM's input is read from memory, wave by wave.

A wave's tiles go through K together, so each panel (tile rows of a, tile columns of b) is fetched once a wave, and what
decides is whether it is still there from the wave that read it last. Between the two lie D bytes: all distinct panels read
since, and the outputs written since, unless they bypass the cache. In a cache of `ways` ways whose sets are hashed, the lines
of those D bytes that fall into one set are Poisson distributed, and least-recently-used replacement keeps a line exactly if
fewer than `ways` of them came after it:

    hit = P(Poisson(ways * D / capacity) < ways)

Sources: stack distances, Mattson et al. 1970; for set-associative caches, Smith 1978; bypassing outputs, T3 section 4.3.
The cache is empty when a kernel starts: GPUs write back and drop what they hold between kernels.
"""

from __future__ import annotations

import math

from weft.sim.t3.grid import Grid
from weft.sim.t3.system import System
from weft.sim.t3.work import ITEMSIZE


def hit_rate(system: System, distance: float) -> float:
    """Probability that a line survives `distance` bytes of other lines.

    >>> from weft.sim.t3.system import load
    >>> [round(hit_rate(load(), share * load().llc.bytes), 2) for share in (0.0, 0.5, 1.0, 2.0)]
    [1.0, 0.99, 0.47, 0.0]
    """
    mean = system.llc.ways * distance / system.llc.bytes
    term = total = math.exp(-mean)
    for lines in range(1, system.llc.ways):
        term *= mean / lines
        total += term
    return min(1.0, total)


def input_reads(grid: Grid, units: int, *, bypass: bool) -> tuple[int, ...]:
    """Bytes that each wave reads from memory. bypass: outputs do not enter the cache."""
    system = grid.system
    written = 0 if bypass else units * system.tile.rows * system.tile.cols * ITEMSIZE
    waves = [grid.panels(wave) for wave in grid.waves(units)]
    last: dict[tuple[str, int], int] = {}
    reads = []
    for now, panels in enumerate(waves):
        hits = {seen: _kept(grid, waves[seen:now], written) for seen in {last[p] for p in panels if p in last}}
        reads.append(round(sum(grid.panel_bytes(p) * (1 - (hits[last[p]] if p in last else 0.0)) for p in panels)))
        last.update(dict.fromkeys(panels, now))
    return tuple(reads)


def _kept(grid: Grid, between: list[frozenset[tuple[str, int]]], written: int) -> float:
    """Share that is still there of a panel that the first of these waves has read, after them all."""
    distinct = frozenset[tuple[str, int]]().union(*between)
    return hit_rate(grid.system, sum(map(grid.panel_bytes, distinct)) + written * len(between))
