"""The kernels of the simulated GPU when nothing is fused: a GEMM, with the cache that its waves share, and ring collectives.

This module simulates a GEMM as waves of tiles on the units of one GPU, with their memory traffic.

    a wave    | fill | slice | slice | .... | slice | store |      the next wave starts when this one ends

fill: the units fetch the first slice from memory.
slice: a slice is multiplied while the next one is fetched, so each step takes the longer of the two times. With S slices in
shared memory this is max(multiply, latency / (S - 1)). A unit has at most `unit_gbps` * memory latency bytes in flight, which
limits the latency that deep or wide slices hide. The memory's rate can also be the limit: a wave's slices cause the reads that
miss the cache, and the writes of the output lines that they evict.
store: a unit hands over `unit_gbps` * memory latency bytes of output per cache latency. Outputs in the cache are evicted during
the next wave, or when the kernel ends.

Ring collectives run as kernels on compute units, as NCCL's do. Each of N - 1 steps passes a chunk of c bytes on.

| a step of | reads here | writes here (what arrives) | a unit touches |
| --- | --- | --- | --- |
| reduce-scatter, the first | c | c | 2 c |
| reduce-scatter, further ones | 2 c | c | 3 c |
| reduce-scatter, at last the own sum | 2 c | c | 3 c |
| reduce-scatter with near-memory reduction | c | c, as updates | 2 c |
| all-gather | c | c | 2 c |

In total, a reduce-scatter reads (2 N - 1) c bytes and writes N c bytes. With near-memory reduction it reads and writes
(N - 1) c bytes each, and the last sum is not needed. The slowest of link, units and memory sets the rate of a step. The units
process the first of its `pipeline` pieces before the link starts. Each step adds the link's latency once. All GPUs do the same
at the same time, so the simulated GPU receives as many bytes as it sends.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import simpy

from weft_studies.t3.memory import GpuMemory
from weft_studies.t3.system import ITEMSIZE, LayerGemm, T3System

MOST_TILES = 100_000
"""The largest number of tiles of a GEMM. More would take minutes to simulate and would not change the results."""


@dataclass(frozen=True)
class Grid:
    """Grid has the tiles of one GEMM on one system.

    Tiles are produced in groups of `group_rows` rows, column by column. A wave is the tiles that all units compute at the same
    time. A chunk is the part of the reduced output that one rank owns. All chunks have the same number of consecutive tiles.

        group_rows = 2, 4 rows, 3 columns, 4 units, 3 ranks:    tile     order      wave     chunk
                                                                a c e    0 2  4     0 0 1    0 0 1
                                                                b d f    1 3  5     0 0 1    0 0 1
                                                                g i k    6 8 10     1 2 2    1 2 2
                                                                h j l    7 9 11     1 2 2    1 2 2

    Rotation (T3, arXiv 2401.16677, section 4.2): a rank produces its own chunk last. The chunk that it produces at one position
    is the one that its neighbour produces at the next position, so updates arrive while the neighbour produces the same chunk.
    """

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
    """Return the chunk that a rank produces at a position. See Grid on rotation.

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

    All tiles of a wave advance along K together, so a wave fetches each panel (a row of tiles of a or a column of tiles of b)
    once. A panel hits if it is still in the cache from the wave that last read it. With least-recently-used replacement, a line
    is still there if it fits together with all distinct lines that were used since. For a line at the share x of K that wave v
    has read and wave w reads next, these are

        wave v    |      x=======|   the lines that v used later: the rest of its panels, and its outputs
        between   |==============|   all lines that the waves in between read and wrote
        wave w    |======x       |   the lines that w read earlier

    Their total size is the distance of the line. It changes linearly with x, from the size of v's other panels to that of w's.
    The lines whose distance is within the capacity hit. Outputs that bypass the cache do not count.

    The model takes the cache as fully associative. Operands and outputs are contiguous, and sets that are chosen by address
    bits, plain or hashed, receive equal parts of contiguous memory. AMD's L2 hashes addresses over its channels for this
    reason. So conflict misses are few. `tests/studies/test_t3_llc.py` compares with line-by-line simulations of 16-way caches.

    Sources: Mattson et al. 1970 for stack distances; ROCm Compute Profiler, "L2 cache", for even channels; T3, section 4.3, for
    bypassing outputs. The cache is empty when a kernel starts, because GPUs write it back and invalidate it between kernels.

    bypass: whether outputs bypass the cache.
    enters: returns the bytes of a wave's outputs that enter the cache without `bypass`. All by default.
    """
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


Process = Generator[simpy.Event, Any, None]


def main_loop(memory: GpuMemory, grid: Grid, traffic: dict[str, int]) -> Process:
    """Simulate the fill and all slices of one wave. The slices move `traffic` bytes by class."""
    system = memory.system
    yield memory.env.timeout(round(memory.latency_ns()))

    multiply, under_way = system.slice_ns, slices_under_way(system)

    def pace() -> float:
        return 1 / max(multiply, memory.latency_ns() / under_way)

    yield memory.flow("compute", grid.slices, pace, traffic)


def slices_under_way(system: T3System) -> float:
    """Return the number of slices that a unit fetches at a time.

    The limits are the room in shared memory, of which the multiplied slice takes one place, and the bytes that a unit can have
    in flight."""
    return min(system.tile.stages - 1, system.unit_gbps * system.hbm.latency_ns / system.slice_bytes)


def store_gbps(system: T3System, units: int) -> float:
    """Return the rate at which this number of units hand their outputs over."""
    return units * system.unit_gbps * system.hbm.latency_ns / system.llc.latency_ns


def cached(memory: GpuMemory, grid: Grid, units: int) -> Process:
    """Simulate a GEMM that runs alone on this number of units. Its outputs go through the cache."""
    evicted = 0
    for wave, read in zip(grid.waves(units), input_reads(grid, units, bypass=False), strict=True):
        yield from main_loop(memory, grid, {"gemm_read": read, "gemm_write": evicted})
        evicted = grid.share(wave)
        rate = store_gbps(memory.system, len(wave))
        yield memory.flow("compute", evicted, lambda rate=rate: rate, {})  # type: ignore[misc]
    yield memory.flow("compute", evicted, lambda: memory.system.hbm.gbps, {"gemm_write": evicted})


def tracked(memory: GpuMemory, grid: Grid, store: Callable[[range], Process], enters: Callable[[range], int]) -> Process:
    """Simulate a GEMM on all units whose outputs go through `store`. They bypass the cache if the system's `llc_bypass` is on.

    store: stores a wave's tiles, and ends when the units are free again.
    enters: returns the bytes of a wave's outputs that enter the cache without `llc_bypass`."""
    units = memory.system.units
    reads = input_reads(grid, units, bypass=memory.system.mechanisms.llc_bypass, enters=enters)
    for wave, read in zip(grid.waves(units), reads, strict=True):
        yield from main_loop(memory, grid, {"gemm_read": read})
        yield from store(wave)


def reduce_scatter(memory: GpuMemory, chunk: int, world_size: int, units: int) -> Process:
    """Simulate a ring reduce-scatter of `world_size` chunks of `chunk` bytes."""
    for step in range(world_size - 1):
        reads = 2 if step else 1
        yield from _pass_on(memory, chunk, units, {"rs_read": reads * chunk, "rs_write": chunk}, touched=reads + 1)
    rate = memory.system.unit_gbps * units / 3
    yield memory.flow("communication", chunk, lambda: rate, {"rs_read": 2 * chunk, "rs_write": chunk})


def reduce_scatter_near_memory(memory: GpuMemory, chunk: int, world_size: int, units: int) -> Process:
    """Simulate a ring reduce-scatter whose arriving data is added by the memory."""
    for _ in range(world_size - 1):
        yield from _pass_on(memory, chunk, units, {"rs_read": chunk, "rs_write": chunk}, touched=2, update="rs_write")


def all_gather(memory: GpuMemory, chunk: int, world_size: int, units: int) -> Process:
    """Simulate a ring all-gather of `world_size` chunks of `chunk` bytes."""
    for _ in range(world_size - 1):
        yield from _pass_on(memory, chunk, units, {"ag_read": chunk, "ag_write": chunk}, touched=2)


def _pass_on(
    memory: GpuMemory, chunk: int, units: int, traffic: dict[str, int], *, touched: int, update: str | None = None
) -> Process:
    system = memory.system
    rate = system.unit_gbps * units / touched
    yield memory.env.timeout(round(chunk / system.pipeline / rate))
    pace = min(rate, system.link.gbps)
    yield memory.flow("communication", chunk, lambda: pace, traffic, update=frozenset([update] if update else []))
    yield memory.env.timeout(system.link.latency_ns)
