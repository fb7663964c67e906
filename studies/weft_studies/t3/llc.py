"""This module models the last-level cache: it computes how many bytes of a GEMM's input each wave reads from memory.

All tiles of a wave advance along K together, so a wave fetches each panel (a row of tiles of a or a column of tiles of b) once.
A panel hits if it is still in the cache from the wave that last read it. With least-recently-used replacement, a line is still
there if it fits together with all distinct lines that were used since. For a line at the share x of K that wave v has read and
wave w reads next, these are

    wave v    |      x=======|   the lines that v used later: the rest of its panels, and its outputs
    between   |==============|   all lines that the waves in between read and wrote
    wave w    |======x       |   the lines that w read earlier

Their total size is the distance of the line. It changes linearly with x, from the size of v's other panels to that of w's. The
lines whose distance is within the capacity hit. Outputs that bypass the cache do not count.

The model takes the cache as fully associative. Operands and outputs are contiguous, and sets that are chosen by address bits,
plain or hashed, receive equal parts of contiguous memory. AMD's L2 hashes addresses over its channels for this reason. So
conflict misses are few. `tests/studies/test_t3_llc.py` compares with line-by-line simulations of 16-way caches.

Sources: Mattson et al. 1970 for stack distances; ROCm Compute Profiler, "L2 cache", for even channels; T3, section 4.3, for
bypassing outputs. The cache is empty when a kernel starts, because GPUs write it back and invalidate it between kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft_studies.t3.grid import Grid

Panel = tuple[str, int]


def share_in_cache(capacity: float, first: float, last: float) -> float:
    """Return the share of a panel's lines that hit if the distance goes from `first` bytes to `last` bytes along K.

    >>> [share_in_cache(16, *ends) for ends in ((8, 8), (16, 16), (17, 17), (12, 20), (20, 8))]
    [1.0, 1.0, 0.0, 0.5, 0.6666666666666666]
    """
    low, high = sorted((first, last))
    if high == low:
        return float(low <= capacity)
    return min(1.0, max(0.0, (capacity - low) / (high - low)))


def input_reads(grid: Grid, units: int, *, bypass: bool, enters: Callable[[range], int] | None = None) -> tuple[int, ...]:
    """Return the bytes that each wave reads from memory.

    bypass: whether outputs bypass the cache.
    enters: returns the bytes of a wave's outputs that enter the cache without `bypass`. All by default."""
    ranges = list(grid.waves(units))
    waves = [grid.panels(wave) for wave in ranges]
    last: dict[Panel, int] = {}
    reads = []
    for now, panels in enumerate(waves):
        share: dict[int | None, float] = {None: 0.0}
        for seen in {last[panel] for panel in panels if panel in last}:
            written = 0 if bypass else sum(map(enters or grid.share, ranges[seen:now]))
            share[seen] = share_in_cache(grid.system.llc.bytes, *_distances(grid, waves[seen : now + 1], written))
        reads.append(round(sum(grid.panel_bytes(panel) * (1 - share[last.get(panel)]) for panel in panels)))
        last.update(dict.fromkeys(panels, now))
    return tuple(reads)


def _distances(grid: Grid, waves: list[frozenset[Panel]], written: int) -> tuple[int, int]:
    """Return the distances at the start and at the end of K of lines that the first of these waves and next the last one read.

    written: the bytes of output written to the cache in the meantime."""
    before, *between, now = waves
    all_along = (before & now).union(*between)
    common = written + _size(grid, all_along)
    return common + _size(grid, before - all_along), common + _size(grid, now - all_along)


def _size(grid: Grid, panels: Iterable[Panel]) -> int:
    return sum(map(grid.panel_bytes, panels))
