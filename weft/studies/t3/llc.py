"""Last-level cache: how much of a GEMM's input is read from memory, wave by wave.

A wave's tiles go through K together, so each panel (tile rows of a, tile columns of b) is fetched once a wave, and what
decides is whether it is still there from the wave that read it last. Least-recently-used replacement keeps a line exactly if
it and all others that came since fit. For a line at the share x of K, read by wave v and now by wave w, these others are

    wave v    |      x=======|   what v read after it: the rest of its panels, and its outputs
    between   |==============|   all that these waves read and wrote
    wave w    |======x       |   what w read before it

each distinct line once. So the lines of a panel that are still there are those x whose distance, which changes linearly from
v's other panels to w's, is within the capacity. Outputs that bypass the cache count for nothing.

Sets: operands and outputs are contiguous, and sets that are chosen by address bits, plain or folded, get equal parts of what
is contiguous; AMD's L2 hashes addresses over its channels to that end. So conflicts add little, and the cache is taken as fully
associative; sets that are chosen at random would smear every edge. `tests/studies/test_t3_llc.py` has the same GEMMs line by
line through caches of 16 ways.

Sources: stack distances, Mattson et al. 1970; even channels, ROCm Compute Profiler, "L2 cache"; bypassing
outputs, T3 section 4.3. The cache is empty when a kernel starts: GPUs write back and drop what they hold between kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft.studies.t3.grid import Grid

Panel = tuple[str, int]


def share_in_cache(capacity: float, first: float, last: float) -> float:
    """Share of a panel's lines that are still there, where the distance goes from `first` bytes to `last` along K.

    >>> [share_in_cache(16, *ends) for ends in ((8, 8), (16, 16), (17, 17), (12, 20), (20, 8))]
    [1.0, 1.0, 0.0, 0.5, 0.6666666666666666]
    """
    low, high = sorted((first, last))
    if high == low:
        return float(low <= capacity)
    return min(1.0, max(0.0, (capacity - low) / (high - low)))


def input_reads(grid: Grid, units: int, *, bypass: bool, enters: Callable[[range], int] | None = None) -> tuple[int, ...]:
    """Bytes that each wave reads from memory. bypass: outputs do not enter the cache. enters: if they do, how many bytes of a
    wave's outputs; all by default."""
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
    """Between two reads of a line, by the first and the last of these waves, of which none between has it: at the start of K,
    and at its end. written: to the cache in the meantime."""
    before, *between, now = waves
    all_along = (before & now).union(*between)
    common = written + _size(grid, all_along)
    return common + _size(grid, before - all_along), common + _size(grid, now - all_along)


def _size(grid: Grid, panels: Iterable[Panel]) -> int:
    return sum(map(grid.panel_bytes, panels))
