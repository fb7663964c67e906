"""The parts of a machine and their numbers: GPU, copy engines, stores, kernels, links, network, collectives.

weft.core.machine has the whole, and says what its numbers may be. Tile shapes and launches are chosen from a GPU's
Capabilities: a launch asks the device for them (weft.compat.device), a prediction reads the machine's profile, and a test
passes its own. No choice depends on a GPU's name.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities of one GPU.

    sms: the number of streaming multiprocessors, or compute units.
    shared_bytes: the most shared memory that one block may ask for.
    matrix_16bit: the GPU has matrix units for 16-bit operands.
    tma: the hardware loads and stores tensor descriptors asynchronously.
    exact_fp8: the matrix units sum products of FP8 operands in float32. Those of Hopper keep about 14 bits.
    warp: the number of threads in a warp.
    """

    sms: int
    shared_bytes: int
    matrix_16bit: bool = True
    tma: bool
    exact_fp8: bool = False
    warp: int = 32


Topology = Literal["switch", "mesh", "ring", "pcie"]
LEAST, MOST = 1e-12, 1e15
"""Every number of a machine is within these bounds."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The rows x cols of the result that one block of a GEMM computes, at `efficiency` times the GPU's peak rate."""

    rows: int
    cols: int
    efficiency: float


_TILE_SIDES = (64, 128, 192, 256)
_TILE_AREA = 128 * 256


def _between(known: Mapping[int, float], at: int) -> float:
    """Interpolate linearly between the neighbouring areas, and clamp to the first and the last value."""
    below, above = (
        max((x for x in known if x <= at), default=min(known)),
        min((x for x in known if x >= at), default=max(known)),
    )
    share = (at - below) / (above - below) if above > below else 0.0
    return known[below] + share * (known[above] - known[below])


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The numbers of one GPU.

    sms: the number of streaming multiprocessors or compute units.
    tflops: the dense matrix peak by dtype. FP8 operands have rates of their own: float8; float8_blockwise for scales within K;
        and, where weft's GEMM kernel is slower, float8_kernel, and float8_promoted where it adds each 128 of K in float32.
    tiles: the tiles that the library's GEMMs may use. kernel_tiles: those of weft's own GEMM kernel, if they differ.
    stored_tiles: those of weft's kernel where hardware stores the results, because such tiles do not count, add or go to peers.
    tile_step: if set, the library has more shapes than `tiles` lists, in steps of this many rows or columns (`library_tiles`).
    step_rate: the rate of those shapes over that of the listed ones, because a library does not always find the best shape;
        None for 1.
    tile_us: the time of a tile's prologue and epilogue.
    half_tile: the time of a tile of half the width over a whole tile's. It is 0.5 at best, since all its rows of a are loaded.
    cut_k: the shortest part of K where cuBLAS's GEMM splits K.
    flag_efficiency: the speed, relative to cuBLAS, of a GEMM kernel that waits on flags, counts tiles or stores to peers.
    hbm_gbps: the rate of reads and writes together. burst_bytes: the unit in which memory is read.
    gather_share: the rate of gathering rows over the rate of a copy. It is above 1 where reading alone is faster than a copy.
    l2_bytes, l2_gbps: the size of the whole last-level cache, and the rate at which kernels read it, if known.
    shared_bytes, tma, matrix_16bit, exact_fp8: what a block of weft's own GEMM kernel may use (Capabilities), and so
        which tile shapes it has. Without shared_bytes, as for a simulated GPU, it has the library's tiles.
    burst_us, sustained: after matmuls have kept the GPU busy for burst_us within a call, its power limit reduces their rate by
        the factor `sustained`. If both are None, they run at full rate throughout.
    """

    sms: int
    tflops: Mapping[str, float]
    tiles: tuple[Tile, ...]
    tile_us: float
    flag_efficiency: float
    hbm_gbps: float
    l2_bytes: int
    half_tile: float
    cut_k: int
    gather_share: float
    burst_bytes: int
    burst_us: float | None = None
    sustained: float | None = None
    kernel_tiles: tuple[Tile, ...] = ()
    stored_tiles: tuple[Tile, ...] = ()
    l2_gbps: float | None = None
    tile_step: int | None = None
    step_rate: float | None = None
    shared_bytes: int | None = None
    tma: bool = False
    matrix_16bit: bool = True
    exact_fp8: bool = False

    def __post_init__(self) -> None:
        if self.shared_bytes is None and (self.kernel_tiles or self.stored_tiles):
            raise ValueError("gpu.shared_bytes is missing; gpu.kernel_tiles are those that fit it: give the bytes of a block")
        if (self.burst_us is None) != (self.sustained is None) or (self.sustained or 1.0) > 1.0:
            both = "give both, sustained at most 1, or neither"
            raise ValueError(f"gpu.sustained is {self.sustained}, and gpu.burst_us {self.burst_us}; {both}")

    @cached_property
    def capabilities(self) -> Capabilities | None:
        """What weft's own kernels may use, if the profile says it."""
        if self.shared_bytes is None:
            return None
        return Capabilities(
            sms=self.sms,
            shared_bytes=self.shared_bytes,
            matrix_16bit=self.matrix_16bit,
            tma=self.tma,
            exact_fp8=self.exact_fp8,
        )

    @cached_property
    def shapes(self) -> tuple[tuple[float, tuple[tuple[float, float], ...]], ...]:
        """The columns, and elements over efficiency, of a few of `tiles`, by their rows.

        Of each area this takes the tile with the fewest rows from 64 on. On shapes of models, the matmuls take on average
        within 1% of the time with all tiles."""
        high = [tile for tile in self.tiles if tile.rows >= 64] or self.tiles
        largest = {tile.rows * tile.cols: tile for tile in sorted(high, key=lambda tile: -tile.rows)}
        found: dict[float, list[tuple[float, float]]] = {}
        for area, tile in largest.items():
            found.setdefault(float(tile.rows), []).append((float(tile.cols), area / tile.efficiency))
        return tuple((rows, tuple(wide)) for rows, wide in found.items())

    @cached_property
    def library_tiles(self) -> tuple[Tile, ...]:
        """`tiles`, and the shapes in between if there is a tile_step.

        One side of such a shape is 64, 128, 192 or 256, and the other is a multiple of the step from 64 to 256. The area is at
        most 128 x 256. The efficiency is interpolated between the neighbouring areas."""
        if not self.tile_step:
            return self.tiles
        best = self._best_efficiency
        known = {(tile.rows, tile.cols) for tile in self.tiles}
        sides = [(wide, other) for wide in _TILE_SIDES for other in range(_TILE_SIDES[0], _TILE_SIDES[-1] + 1, self.tile_step)]
        shapes = dict.fromkeys(shape for side in sides for shape in (side, side[::-1]) if math.prod(side) <= _TILE_AREA)
        rate = self.step_rate or 1.0
        more = (Tile(rows=r, cols=c, efficiency=rate * _between(best, r * c)) for r, c in shapes if (r, c) not in known)
        return (*self.tiles, *more)

    def kernel_efficiency(self, rows: int, cols: int, *, stored: bool = False) -> float:
        """Return the share of the peak that weft's own GEMM kernel reaches with a tile of this shape: that of `kernel_tiles` or
        `stored_tiles` if they list it, else that of the library's tiles of the same area."""
        tiles = (self.stored_tiles if stored else ()) or self.kernel_tiles
        listed = (tile.efficiency for tile in tiles if (tile.rows, tile.cols) == (rows, cols))
        return next(listed, None) or _between(self._best_efficiency, rows * cols)

    @cached_property
    def _best_efficiency(self) -> dict[int, float]:
        """The best efficiency of `tiles`, by area."""
        best: dict[int, float] = {}
        for tile in self.tiles:
            best[tile.rows * tile.cols] = max(tile.efficiency, best.get(tile.rows * tile.cols, 0.0))
        return best

    def paced_us(self, busy_us: float) -> float:
        """Return the time of consecutive matmuls that would take `busy_us` at full rate.

        >>> gpu = load("h200x8").gpu
        >>> gpu.paced_us(100.0), gpu.paced_us(4000.0) > 4000.0
        (100.0, True)
        """
        if self.burst_us is None or self.sustained is None:
            return busy_us
        return busy_us + max(0.0, busy_us - self.burst_us) * (1 / self.sustained - 1)

    def power_slowdown(self, before_us: float, busy_us: float, speed: float = 1.0) -> float:
        """Return how many times as long a matmul takes because the power limit slows it.

        A kernel that is slower than cuBLAS needs less power, so the limit slows it less.

        before_us: the time of earlier matmuls at full rate, by cuBLAS.
        busy_us: the time of the matmul at full rate.
        speed: its speed relative to cuBLAS.
        """
        if not busy_us:
            return 1.0
        return max(1.0, (self.paced_us(before_us + speed * busy_us) - self.paced_us(before_us)) / busy_us)


@dataclass(frozen=True, kw_only=True)
class CopyEngines:
    """The copy engines of a GPU.

    copy_us: the fixed cost of a copy.
    gbps: the rate of one copy at a time. several_gbps: the rate of all concurrent copies of a GPU together.
    engines: the copies that one GPU should have in flight. If it is more than one, schedules have a copy lane for each peer.
    strided: what copies non-contiguous rows. A kernel waits for SMs.
    turning: the share of time that copies to several peers in turn take longer at most, because ranks get out of step and two
        of them send to the same peer. None for 0.
    """

    copy_us: float
    gbps: float
    several_gbps: float
    engines: int
    strided: Literal["engine", "kernel"] = "engine"
    turning: float | None = None

    def turned_gbps(self, rounds: int) -> float:
        """Return the rate of copies that go to several peers in this many rounds.

        >>> CopyEngines(copy_us=1.0, gbps=300.0, several_gbps=300.0, engines=1, turning=1.0).turned_gbps(2)
        200.0
        """
        return self.gbps / (1 + (self.turning or 0.0) * (1 - 1 / rounds))


@dataclass(frozen=True, kw_only=True)
class Stores:
    """Loads and stores to peers from kernels.

    gbps: pairs (SMs, rate), ascending. sms: the SMs that a lane of communication blocks occupies. sms_alone: the same while no
    kernel multiplies.
    stall: the share of a remote store's time that the storing tile cannot hide. tiles: the share of the rate that stores from a
    matmul's tiles reach; None for all of it.
    """

    gbps: tuple[tuple[int, float], ...]
    sms: int
    sms_alone: int
    stall: float
    tiles: float | None = None

    def rate(self, sms: int) -> float:
        """Return the rate on `sms` SMs, interpolated between the table's points, and through zero below the first.

        >>> Stores(gbps=((4, 100.0), (8, 200.0)), sms=4, sms_alone=4, stall=0.0).rate(6)
        150.0
        """
        low, below = 0, 0.0
        for high, above in self.gbps:
            if sms <= high:
                return below + (above - below) * (sms - low) / (high - low)
            low, below = high, above
        return below


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The rates and times of weft's own kernels on the GPU.

    sm_gbps: the rate at which one SM reads and writes the GPU's memory, with 16 warps and 16-byte loads.
    pull_gbps: the rate at which one SM loads from peers, with 96 KiB in flight.
    l2_share: the share of the last-level cache that still holds its data after a stream has passed through.
    sums: the number of blocks on an SM that sum what copy engines bring.
    streamed: the share of the matrix peak that the kernel reaches that multiplies and exchanges (weft.kernels.all_reduce).
    row_us: the minimum time that this kernel takes for a row of b, because its loads are not asynchronous.
    exchange_us: the time that this kernel adds to look up its call's number, fill its pipeline, and empty the previous mailbox.
    lookup_copy_gbps: the rate of a kernel that copies rows to a peer while rows are gathered.
    lookup_copy_bytes: the bytes of memory traffic for each byte that it copies.
    lookup_copy_us: the time from the last row of a part to the start of the copy that waits for it.
    """

    sm_gbps: float
    pull_gbps: float
    l2_share: float
    sums: int
    streamed: float
    row_us: float
    exchange_us: float
    lookup_copy_gbps: float
    lookup_copy_bytes: int
    lookup_copy_us: float


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links between GPUs. gbps: the usable rate of one link in each direction. latency_us: the latency of one hop.
    host_gbps: the rate of the host, for pcie only."""

    topology: Topology
    gbps: float
    latency_us: float
    host_gbps: float | None = None

    def wire_us(self, op: str, shard_bytes: float, world_size: int) -> float:
        """Return the minimum time of a collective within one host.

        Each rank receives every other rank's shard at the rate of its links. On a mesh each shard has a link of its own, and on
        a ring all of them share two. In an all-to-all on a ring, shards for other ranks pass through these links, too."""
        shards = world_size - 1.0
        if self.topology == "mesh":
            shards = 1.0
        elif self.topology == "ring":
            hops = (min(ahead, world_size - ahead) for ahead in range(1, world_size))
            shards = (sum(hops) if op == "all_to_all" else shards) / 2
        if self.topology == "pcie" and self.host_gbps:
            shards = max(shards, world_size * (world_size - 1) * self.gbps / self.host_gbps)
        return shards * shard_bytes / (self.gbps * 1e3)


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network between hosts, with an adapter for each GPU.

    gbps: the usable rate in each direction. latency_us: the latency of a message's last byte. step_us: the fixed cost of a
    group of sends and receives. sms: the SMs that it occupies while it runs.
    """

    gbps: float
    latency_us: float
    step_us: float
    sms: int


@dataclass(frozen=True, kw_only=True)
class Table:
    """The measured times of a collective on `world_size` ranks.

    points: pairs (bytes of one shard, microseconds), ascending.
    also: the same for fewer ranks, where they were measured, with the same number of points.
    """

    TAGGED: ClassVar[bool] = True
    world_size: int
    points: tuple[tuple[int, float], ...]
    also: tuple[Table, ...] = ()

    def __post_init__(self) -> None:
        if any(table.also for table in self.also):
            raise ValueError("also holds a table that has also of its own; list all of them in the first one's")
        ranks = [table.world_size for table in self.also]
        if len(set(ranks)) < len(ranks) or max(ranks, default=0) >= self.world_size:
            raise ValueError(f"also is of {ranks} ranks; give each number once, below the first one's, {self.world_size}")


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """A model of a collective's time: fixed_us + (n - 1) * (step_us + bytes / gbps), with gbps as on the whole machine."""

    TAGGED: ClassVar[bool] = True
    fixed_us: float
    step_us: float
    gbps: float


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of a machine with the path of its field. All rows of a table have the table's path. Spreads are left
    out, because they describe other numbers."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value
    elif dataclasses.is_dataclass(value):
        for part in dataclasses.fields(value):
            if not part.metadata:
                yield from numbers(getattr(value, part.name), f"{path}.{part.name}" if path else part.name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from numbers(item, f"{path}.{key}")
    elif isinstance(value, tuple):
        for item in value:
            for _, number in numbers(item, path):
                yield path, number


def within(number: float) -> float:
    """Return the nearest number that a machine may have."""
    return max(LEAST, min(number, MOST))


DEFAULT_QUEUES, _MOST_QUEUES = 8, 32
"""How many hardware queues CUDA has for streams by default, and how many it can have."""


def hardware_queues() -> int:
    """Return how many hardware queues CUDA has in this process. Each stream or branch of a graph that has work takes one."""
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return min(max(1, int(given)), _MOST_QUEUES) if given.isdecimal() else DEFAULT_QUEUES
