"""A Grid divides a GEMM's output into tiles, waves and chunks.

Tiles are produced in groups of `group_rows` rows, column by column. A wave is the tiles that all units compute at the same
time. A chunk is the part of the reduced output that one rank owns. All chunks have the same number of consecutive tiles.

    group_rows = 2, 4 rows, 3 columns, 4 units, 3 ranks:    tile     order      wave     chunk
                                                            a c e    0 2  4     0 0 1    0 0 1
                                                            b d f    1 3  5     0 0 1    0 0 1
                                                            g i k    6 8 10     1 2 2    1 2 2
                                                            h j l    7 9 11     1 2 2    1 2 2

Rotation (T3, arXiv 2401.16677, section 4.2): a rank produces its own chunk last. The chunk that it produces at one position is
the one that its neighbour produces at the next position, so updates arrive while the neighbour produces the same chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft_studies.t3.system import T3System
from weft_studies.t3.work import ITEMSIZE, LayerGemm

MOST_TILES = 100_000
"""The largest number of tiles of a GEMM. More would take minutes to simulate and would not change the results."""


@dataclass(frozen=True)
class Grid:
    """Grid has the tiles of one GEMM on one system."""

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
        """The number of slices of K. The last slice may be partial, but takes as long as the others."""
        return -(-self.gemm.k // self.system.tile.k)

    def place(self, index: int) -> tuple[int, int]:
        """Return the row and column of the tile at this index of the production order."""
        height = self.system.tile.group_rows
        group, inside = divmod(index, height * self.cols)
        high = min(height, self.rows - group * height)
        return group * height + inside % high, inside // high

    def waves(self, units: int) -> Iterator[range]:
        """Yield the indices of the tiles of each wave on this number of units."""
        for start in range(0, self.tiles, units):
            yield range(start, min(start + units, self.tiles))

    def share(self, wave: range) -> int:
        """Return the bytes of output that a wave writes. All tiles have the same share, and the waves add up to all bytes."""
        whole, tiles = self.gemm.out_bytes, self.tiles
        return whole * wave.stop // tiles - whole * wave.start // tiles

    def panels(self, wave: range) -> frozenset[tuple[str, int]]:
        """Return the panels that a wave reads: ("a", row of tiles) and ("b", column of tiles)."""
        places = [self.place(index) for index in wave]
        return frozenset([("a", row) for row, _ in places] + [("b", col) for _, col in places])

    def panel_bytes(self, panel: tuple[str, int]) -> int:
        """Return the bytes of one panel. The last row and the last column of tiles may be partial."""
        kind, index = panel
        whole, part = (self.gemm.m, self.system.tile.rows) if kind == "a" else (self.gemm.n, self.system.tile.cols)
        return min(part, whole - index * part) * self.gemm.k * ITEMSIZE


@dataclass(frozen=True)
class Chunks:
    """Chunks divides the output into `world_size` chunks with the same number of tiles and bytes each."""

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
        """The number of tiles of a chunk."""
        return self.tiles // self.world_size

    @property
    def bytes(self) -> int:
        """The number of bytes of a chunk."""
        return self.out_bytes // self.world_size

    def size(self, low: int, high: int) -> int:
        """Return the bytes of the tiles low .. high - 1 of a chunk."""
        return self.bytes * high // self.each - self.bytes * low // self.each

    def pieces(self, wave: range) -> Iterator[tuple[int, int, int]]:
        """Yield (position, low, high) for each chunk that has tiles in a wave: its position and the range of these tiles."""
        at = wave.start
        while at < wave.stop:
            position, low = divmod(at, self.each)
            high = min(self.each, low + wave.stop - at)
            yield position, low, high
            at += high - low


def chunk_at(rank: int, position: int, world_size: int) -> int:
    """Return the chunk that a rank produces at a position. See the module's text on rotation.

    >>> [chunk_at(0, p, 4) for p in range(4)], [chunk_at(1, p, 4) for p in range(4)]
    ([3, 2, 1, 0], [0, 3, 2, 1])
    """
    return (rank - position - 1) % world_size


def position_of(rank: int, chunk: int, world_size: int) -> int:
    """Return the position at which a rank produces a chunk.

    >>> [chunk_at(2, position_of(2, chunk, 4), 4) for chunk in range(4)]
    [0, 1, 2, 3]
    """
    return (rank - chunk - 1) % world_size
