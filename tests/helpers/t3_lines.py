"""A GEMM's inputs line by line through a set-associative cache: what weft_studies.t3.kernels has a formula for.

All panels of a wave go through K together, line by line, as its tiles do; then its outputs are written. a (M x K), b as N x K
and the output (M x N) are contiguous, one after the other. Only some sets are followed, all their lines and no others, and
stand for all (set sampling; Kessler, Hill, Wood 1994).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from weft_studies.t3.kernels import Grid
from weft_studies.t3.system import ITEMSIZE

LINE = 128
Lines = npt.NDArray[np.int64]
Indexing = Callable[[Lines, int], Lines]


def modulo(lines: Lines, sets: int) -> Lines:
    """The set by the lowest bits of a line's number."""
    return lines % sets


def folded(lines: Lines, sets: int) -> Lines:
    """The set by all bits, folded by exclusive or. sets: a power of two."""
    index = np.zeros_like(lines)
    while lines.any():
        index, lines = index ^ lines % sets, lines // sets
    return index


def scattered(lines: Lines, sets: int) -> Lines:
    """The set by a hash that keeps nothing of the order (the finalizer of splitmix64)."""
    mixed = lines.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (mixed >> np.uint64(33)).astype(np.int64) % sets


def read_bytes(grid: Grid, ways: int, indexing: Indexing, *, bypass: bool, followed: int) -> float:
    """What the whole GEMM reads from memory, through a cache of so many ways. followed: how many sets are."""
    sets = grid.system.llc.bytes // (LINE * ways)
    chosen = np.random.default_rng(0).choice(sets, followed, replace=False)
    caches: dict[int, dict[int, None]] = {int(index): {} for index in chosen}
    misses = 0
    for inputs, outputs in _waves(grid, written=not bypass):
        for lines, counted in ((inputs, True), (outputs, False)):
            index = indexing(lines, sets)
            ours = np.isin(index, chosen)
            for line, where in zip(lines[ours].tolist(), index[ours].tolist(), strict=True):
                misses += _miss(caches[where], line, ways) and counted
    return misses * LINE * sets / followed


def _miss(cache: dict[int, None], line: int, ways: int) -> bool:
    """Touch a line; the oldest leaves where there is no room. A dict keeps the order."""
    missed = line not in cache
    if not missed:
        del cache[line]
    elif len(cache) == ways:
        del cache[next(iter(cache))]
    cache[line] = None
    return missed


def _waves(grid: Grid, *, written: bool) -> Iterator[tuple[Lines, Lines]]:
    """The lines that each wave reads, in order, and those that it writes."""
    gemm, tile = grid.gemm, grid.system.tile
    b = gemm.m * gemm.k * ITEMSIZE
    out = b + gemm.n * gemm.k * ITEMSIZE
    along = np.arange(0, gemm.k * ITEMSIZE, LINE)
    across = np.arange(0, tile.cols * ITEMSIZE, LINE) if written else np.arange(0)
    for wave in grid.waves(grid.system.units):
        panels = sorted(grid.panels(wave))
        starts = [(b if kind == "b" else 0) + _rows(grid, kind, index) * gemm.k * ITEMSIZE for kind, index in panels]
        tiles = [out + (_rows(grid, "a", row) * gemm.n + col * tile.cols) * ITEMSIZE for row, col in map(grid.place, wave)]
        yield _lines(along[:, None] + np.concatenate(starts)), _lines(np.concatenate(tiles)[:, None] + across)


def _rows(grid: Grid, kind: str, index: int) -> Lines:
    """The rows of a, or of b as N x K, that a panel has."""
    whole, part = (grid.gemm.m, grid.system.tile.rows) if kind == "a" else (grid.gemm.n, grid.system.tile.cols)
    return np.arange(index * part, min(whole, (index + 1) * part))


def _lines(addresses: Lines) -> Lines:
    return addresses.ravel() // LINE
