"""Grid: a GEMM's output as tiles, in the order of their production, in waves over the units and in chunks for the ranks.

Tiles are produced in groups of `group_rows` rows, column by column. A wave is what all units compute together; a chunk is
what one rank owns of the reduced output: equally many tiles, that follow each other in that order.

    group_rows = 2, 4 rows, 3 columns, 4 units, 3 ranks:    tile     order      wave     chunk
                                                            a c e    0 2  4     0 0 1    0 0 1
                                                            b d f    1 3  5     0 0 1    0 0 1
                                                            g i k    6 8 10     1 2 2    1 2 2
                                                            h j l    7 9 11     1 2 2    1 2 2

Rotation (T3, arXiv 2401.16677, section 4.2): a rank ends with its own chunk, and what it finishes at one position is what its
neighbour produces at the next, so that every update finds its target being made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.studies.t3.system import T3System
from weft.studies.t3.work import ITEMSIZE, LayerGemm

MOST_TILES = 100_000
"""Of one GEMM: more would take minutes and say nothing new."""


@dataclass(frozen=True)
class Grid:
    """The tiles of one GEMM on one system."""

    gemm: LayerGemm
    system: T3System

    def __post_init__(self) -> None:
        if self.tiles > MOST_TILES:
            tile = self.system.tile
            raise ValueError(
                f"tile.rows is {tile.rows} and tile.cols {tile.cols}; {self.gemm.name} has {self.tiles} such tiles, "
                f"and at most {MOST_TILES} are simulated: use larger ones"
            )

    @property
    def rows(self) -> int:
        return -(-self.gemm.m // self.system.tile.rows)

    @property
    def cols(self) -> int:
        return -(-self.gemm.n // self.system.tile.cols)

    @property
    def tiles(self) -> int:
        return self.rows * self.cols

    @property
    def slices(self) -> int:
        """Slices of K that a tile multiplies; the last may be ragged and takes as long."""
        return -(-self.gemm.k // self.system.tile.k)

    def place(self, index: int) -> tuple[int, int]:
        """Row and column of the tile that is produced as number `index`."""
        height = self.system.tile.group_rows
        group, inside = divmod(index, height * self.cols)
        high = min(height, self.rows - group * height)
        return group * height + inside % high, inside // high

    def waves(self, units: int) -> Iterator[range]:
        """Indices of the tiles of each wave over so many units."""
        for start in range(0, self.tiles, units):
            yield range(start, min(start + units, self.tiles))

    def share(self, wave: range) -> int:
        """Bytes of the output that a wave writes. Each tile has its share of all bytes, so that they add up."""
        whole, tiles = self.gemm.out_bytes, self.tiles
        return whole * wave.stop // tiles - whole * wave.start // tiles

    def panels(self, wave: range) -> frozenset[tuple[str, int]]:
        """The rows of a and the columns of b that a wave reads: ("a", row of tiles) and ("b", column of tiles)."""
        places = [self.place(index) for index in wave]
        return frozenset([("a", row) for row, _ in places] + [("b", col) for _, col in places])

    def panel_bytes(self, panel: tuple[str, int]) -> int:
        """Of one panel; the last of each kind may be ragged."""
        kind, index = panel
        whole, part = (self.gemm.m, self.system.tile.rows) if kind == "a" else (self.gemm.n, self.system.tile.cols)
        return min(part, whole - index * part) * self.gemm.k * ITEMSIZE


@dataclass(frozen=True)
class Chunks:
    """The output as `world_size` chunks of equally many tiles, each of which has the same share of the bytes."""

    tiles: int
    out_bytes: int
    world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 2:
            raise ValueError(f"world_size is {self.world_size}; a collective needs at least 2")
        for what, whole in (("tiles", self.tiles), ("bytes", self.out_bytes)):
            if whole % self.world_size:
                raise ValueError(
                    f"world_size is {self.world_size}; the output's {whole} {what} do not divide among so many: "
                    "use another world_size, or other tile.rows and tile.cols"
                )

    @property
    def each(self) -> int:
        """Tiles of a chunk."""
        return self.tiles // self.world_size

    @property
    def bytes(self) -> int:
        """Of one chunk."""
        return self.out_bytes // self.world_size

    def size(self, low: int, high: int) -> int:
        """Bytes of tiles low .. high - 1 of a chunk."""
        return self.bytes * high // self.each - self.bytes * low // self.each

    def pieces(self, wave: range) -> Iterator[tuple[int, int, int]]:
        """(position, low, high): what a wave has of each chunk, positions from 0 in the order of production."""
        at = wave.start
        while at < wave.stop:
            position, low = divmod(at, self.each)
            high = min(self.each, low + wave.stop - at)
            yield position, low, high
            at += high - low


def chunk_at(rank: int, position: int, world_size: int) -> int:
    """The chunk that a rank produces at a position: its own comes last, and position p's is its neighbour's at p + 1.

    >>> [chunk_at(0, p, 4) for p in range(4)], [chunk_at(1, p, 4) for p in range(4)]
    ([3, 2, 1, 0], [0, 3, 2, 1])
    """
    return (rank - position - 1) % world_size


def position_of(rank: int, chunk: int, world_size: int) -> int:
    """The position at which a rank produces a chunk.

    >>> [chunk_at(2, position_of(2, chunk, 4), 4) for chunk in range(4)]
    [0, 1, 2, 3]
    """
    return (rank - chunk - 1) % world_size
