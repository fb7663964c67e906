"""This module models T3's tracker, which counts the updates of each wavefront's tile and reports the tiles that are complete.

An entry lives from a tile's first update to its last. It counts updated elements: a wavefront's tile of E elements that each
get u updates is complete at E * u. The hardware has a fixed number of entries.

If the first update of a tile finds no free entry, the tile is counted in memory (it is spilled). Its count is written there,
is read at its next update, and is written again unless that was the last one. These accesses go through the memory controller
and take memory time. An update waits until its count has been read. So its store, or the command that it triggers, is late by
the memory's latency. Older tiles keep their entries, because tiles are completed in the order in which they are first updated.

The alternative would be to stall the update until an entry is free, but that deadlocks. In a ring, the peer's first chunk is
updated here before this GPU's second chunk, so all tiles of the peer's chunk need entries first. This GPU's GEMM would
complete them, but its stores wait behind the stalled ones on the same links. In each of the 16 sub-layers that most figures
show, a chunk has more wavefront tiles (532 to 1,536) than the tracker has entries.

Source: T3, arXiv 2401.16677, section 4.2.1: 256 entries, about 19 KB, next to the memory controller, off the critical path. The
paper says nothing about a full tracker, so the spill is assumed. 19 KB are 76 bytes for an entry, so an entry may hold the
counts of several wavefronts. If an entry holds four, set the number of entries to 1,024 here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from weft_studies.t3.mapping import Mapping
from weft_studies.t3.system import T3System


class Counted(NamedTuple):
    """The result of one update.

    ready: ranges of tiles that are complete now.
    ready_in_memory: ranges of tiles that are complete after their counts have been read from memory.
    reads, writes: the numbers of counts that are read from memory, and written there.
    """

    ready: list[tuple[int, int]]
    ready_in_memory: list[tuple[int, int]]
    reads: int
    writes: int


@dataclass
class Tracker:
    """The tracker of one GPU. It keeps one count for each (position of the chunk, tile of it), because the wavefronts of a tile
    store together.

    live: wavefront tiles that are being counted, including spilled ones.
    most: the largest value of `live` so far.
    spilled: wavefront tiles that were counted in memory so far.
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
        """Return the number of element updates after which a wavefront's tile of this chunk is complete."""
        return self.elements * self.mapping.routes[position].updates

    def update(self, position: int, low: int, high: int) -> Counted:
        """Count one update of each element of the tiles low .. high - 1 of a chunk."""
        threshold, wavefronts, elements = self.threshold(position), self.system.tile.wavefronts, self.elements
        ready: tuple[list[int], list[int]] = ([], [])
        reads = writes = 0
        for tile in range(low, high):
            key = (position, tile)
            first = key not in self._counts
            if first:
                self._allocate(key)
            outside = key in self._outside
            self._counts[key] += elements
            complete = self._counts[key] == threshold
            if outside:
                reads += 0 if first else wavefronts
                writes += 0 if complete else wavefronts
            if complete:
                ready[outside].append(tile)
                self._drop(key)
        return Counted(list(_ranges(ready[0])), list(_ranges(ready[1])), reads, writes)

    def _allocate(self, tile: tuple[int, int]) -> None:
        self._counts[tile] = 0
        wavefronts = self.system.tile.wavefronts
        self.live += wavefronts
        self.most = max(self.most, self.live)
        held = self.live - wavefronts * len(self._outside)
        if self.system.mechanisms.tracker and held > self.system.tracker.entries:
            self._outside.add(tile)
            self.spilled += wavefronts

    def _drop(self, tile: tuple[int, int]) -> None:
        del self._counts[tile]
        self._outside.discard(tile)
        self.live -= self.system.tile.wavefronts


def _ranges(tiles: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges (start, end) that rising numbers form.

    >>> list(_ranges([1, 2, 3, 7]))
    [(1, 4), (7, 8)]
    """
    start = 0
    for i, tile in enumerate(tiles):
        if i + 1 == len(tiles) or tiles[i + 1] != tile + 1:
            yield tiles[start], tile + 1
            start = i + 1
