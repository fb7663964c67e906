"""Tracker: counts the updates of each wavefront's tile, and says which tiles have had all of theirs.

An entry lives from a tile's first update to its last. It counts elements: a wavefront's tile of E elements that each get u
updates is ready at E * u. The hardware has a fixed number of entries; what does not fit is kept in memory, which costs a write
when it is put there and a read when it is needed again (the paper sizes its tracker so that it fits, and says nothing of the
case that it does not: this cost is assumed).

Source: T3, arXiv 2401.16677, section 4.2.1: 256 entries, about 19 KB, beside the memory controller, off the critical path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from weft.studies.t3.mapping import Mapping
from weft.studies.t3.system import T3System


@dataclass
class Tracker:
    """Of one GPU. elements: of a wavefront's tile. Counts are by (position of the chunk, tile of it); wavefronts of a tile
    store together, so one count serves all of them, and `live` counts entries of single wavefronts.

    spilled: entries that were put into memory so far; most: that lived at a time.
    """

    system: T3System
    mapping: Mapping
    live: int = 0
    most: int = 0
    spilled: int = 0
    _counts: dict[tuple[int, int], int] = field(default_factory=dict)
    _outside: set[tuple[int, int]] = field(default_factory=set)

    @property
    def elements(self) -> int:
        tile = self.system.tile
        return tile.rows * tile.cols // tile.wavefronts

    def threshold(self, position: int) -> int:
        """Elements that a wavefront's tile of this chunk must see updated."""
        return self.elements * self.mapping.routes[position].updates

    def update(self, position: int, low: int, high: int) -> list[tuple[int, int]]:
        """Tiles low .. high - 1 of a chunk have been updated, each element once. Returns the ranges that are ready now."""
        threshold = self.threshold(position)
        ready = [tile for tile in range(low, high) if self._count((position, tile)) == threshold]
        for tile in ready:
            self._drop((position, tile))
        return list(_ranges(ready))

    def _count(self, tile: tuple[int, int]) -> int:
        if tile not in self._counts:
            self._allocate(tile)
        self._counts[tile] += self.elements
        return self._counts[tile]

    def _allocate(self, tile: tuple[int, int]) -> None:
        self._counts[tile] = 0
        wavefronts = self.system.tile.wavefronts
        self.live += wavefronts
        self.most = max(self.most, self.live)
        held = self.live - wavefronts * len(self._outside)
        if held > self.system.tracker.entries:
            self._outside.add(tile)
            self.spilled += wavefronts

    def _drop(self, tile: tuple[int, int]) -> None:
        del self._counts[tile]
        self._outside.discard(tile)
        self.live -= self.system.tile.wavefronts


def _ranges(tiles: list[int]) -> Iterator[tuple[int, int]]:
    """Rising numbers as ranges.

    >>> list(_ranges([1, 2, 3, 7]))
    [(1, 4), (7, 8)]
    """
    start = 0
    for i, tile in enumerate(tiles):
        if i + 1 == len(tiles) or tiles[i + 1] != tile + 1:
            yield tiles[start], tile + 1
            start = i + 1
