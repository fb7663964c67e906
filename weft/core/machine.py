"""Machine: the numbers of a host with GPUs. Profiles are data files in weft/core/machines, each number with its source.

Contract: a Machine that exists is complete. Every number is from 1e-12 to 1e15, so that times computed from them are finite;
latencies and `stores.stall` may also be zero. Counts, such as SMs and the sides of tiles, are at most 65,536, because
predictions have an entry for each. `sources` says where each number is from: measured (with its date), a paper, a data sheet,
or assumed. A file that lacks a number or a source, or has an unknown one, is refused with the name of the file and
of the field.

Times are in microseconds, rates in 1e9 bytes/s (gbps) or 1e12 operations/s (tflops).
Topologies, for ranks 0 .. world_size-1:

    switch   each GPU has a port out and a port in of `gbps`; every pair communicates at full speed
    mesh     every pair has a link of `gbps` in each direction
    ring     each GPU has a link of `gbps` in each direction to both neighbours; traffic to others passes through them
    pcie     like switch, and all traffic shares the host's `host_gbps`
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from weft.core import codec
from weft.core.errors import require
from weft.core.problem import Problem, Scaling

Topology = Literal["switch", "mesh", "ring", "pcie"]
MAY_BE_ZERO = frozenset({"stores.stall", "links.latency_us", "network.latency_us"})
STORES_SHARE = 4
"""Communication blocks occupy at most a quarter of a small GPU's SMs."""
LEAST, MOST = 1e-12, 1e15
"""Every number of a machine is within these bounds."""
COUNTS = frozenset(
    {
        "world_size",
        "gpu.sms",
        "gpu.tiles",
        "gpu.kernel_tiles",
        "gpu.stored_tiles",
        "gpu.tile_step",
        "copies.engines",
        "stores.sms",
        "stores.sms_alone",
        "kernels.sums",
        "kernels.lookup_copy_bytes",
        "network.sms",
        "collective_sms",
        *(f"collectives.{op}.world_size" for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")),
    }
)
"""The numbers that count something. All other whole numbers are bytes, or extents of matrices."""
MOST_COUNT = 1 << 16
"""No machine has as many SMs or GPUs. Predictions take memory for each of them."""
_NOTHING_US = 1e-3
"""The smallest time, in microseconds. Numbers must be above zero, and times count whole nanoseconds."""
_PROFILES = Path(__file__).with_name("machines")


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

    def __post_init__(self) -> None:
        if (self.burst_us is None) != (self.sustained is None) or (self.sustained or 1.0) > 1.0:
            both = "give both, sustained at most 1, or neither"
            raise ValueError(f"gpu.sustained is {self.sustained}, and gpu.burst_us {self.burst_us}; {both}")

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


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs of one host and what connects them.

    help(weft.machine) has units and sources; weft.core.machine.load reads a profile.

    name: the name that `--machine` takes. description: one line for reports. world_size: the number of GPUs.
    launch_us: the time from the end of one kernel of a stream to the start of the next one's work.
    flag_us: the time of a stream's wait or signal.
    wake_us: the time from a signal to the next step of the copy lane that waited for it, if it waited longer than that. None
        for 0.
    fork_us: the time to start the lanes besides the compute lane, and from a copy lane back to it, if measured.
    stages: library matmuls and collectives are called through torch, with the staging around them (weft.perf.staging).
    collectives: NCCL's collectives by name. all_to_all may be missing, and then costs as much as all_gather. all_reduce may be
        missing, and then is a reduce_scatter and an all_gather.
    collective_sms: the SMs that an NCCL collective occupies. None for as many as stores.sms.
    contention: the slowdown of the first during the second ("gemm during copy"), if known. The simulator uses those of GEMMs
        and copies, of copies at the full rate, and of a user's computation and collectives (weft.perf.concurrent).
    slow_lookups: lookups and concurrent kernels that copy rows slow each other (weft.perf.lookups).
    network: the network between several such hosts, if known.
    device: the GPU on which the numbers were measured, as its driver names it. Empty if they have several sources.
    sources: the source of each number, by the path that `numbers` gives it.
    spreads: the variation of measured numbers: half of their interquartile range, as a share of the median.
    """

    name: str
    description: str
    world_size: int
    gpu: Gpu
    copies: CopyEngines
    stores: Stores
    kernels: Kernels
    links: Links
    launch_us: float
    flag_us: float
    collectives: Mapping[Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"], Table | AlphaBeta]
    sources: Mapping[str, str]
    contention: Mapping[str, float] = field(default_factory=dict)
    spreads: Mapping[str, float] = field(default_factory=dict, metadata={"about": "numbers"})
    network: Network | None = None
    wake_us: float | None = None
    device: str = ""
    stages: bool = False
    fork_us: float | None = None
    collective_sms: int | None = None
    slow_lookups: bool = True

    def __post_init__(self) -> None:
        texts = {"name": self.name, "description": self.description, "device": self.device}
        for path, text in (texts | {f"sources.{path}": text for path, text in self.sources.items()}).items():
            if not text.isprintable():
                raise ValueError(f"{path} is {text!r:.80}; it must be one line of letters that print")
        for path, value in numbers(self):
            if not value > 0 and not (path in MAY_BE_ZERO and value == 0):
                raise ValueError(f"{path} is {value!r}; it must be above zero")
            if value and not LEAST <= value <= MOST:
                raise ValueError(f"{path} is {value!r}; it must be from {LEAST:g} to {MOST:g}")
            if path in COUNTS and value > MOST_COUNT:
                raise ValueError(f"{path} is {value!r}; it must be at most {MOST_COUNT}")
        self._check_tables()
        self._check_sources()
        taken = {"stores.sms": self.stores.sms, "stores.sms_alone": self.stores.sms_alone}
        for path, sms in (taken | ({"network.sms": self.network.sms} if self.network else {})).items():
            if sms >= self.gpu.sms:
                raise ValueError(f"{path} is {sms}; it must be below gpu.sms, {self.gpu.sms}")
        shares = {"gpu.half_tile": self.gpu.half_tile, "kernels.l2_share": self.kernels.l2_share}
        for path, share in (shares | {"kernels.streamed": self.kernels.streamed}).items():
            if share > 1:
                raise ValueError(f"{path} is {share!r}; it is a share, at most 1")
        if self.links.topology == "pcie" and self.links.host_gbps is None:
            raise ValueError("links.host_gbps is missing; a pcie machine shares it: give its rate, too")
        for op in ("all_gather", "reduce_scatter"):
            if op not in self.collectives:
                raise ValueError(f"collectives.{op} is missing; give a Table or an AlphaBeta")

    def _check_tables(self) -> None:
        tables = {"stores.gbps": self.stores.gbps}
        for op, model in self.collectives.items():
            if isinstance(model, Table):
                tables |= {f"collectives.{op}.points": model.points}
                tables |= {f"collectives.{op}.also[{i}].points": table.points for i, table in enumerate(model.also)}
        for path, rows in tables.items():
            keys = [key for key, _ in rows]
            if not keys or keys != sorted(set(keys)):
                raise ValueError(f"{path} has {keys!r} in its first column; it must have at least one row, and rise")
        if not self.gpu.tiles:
            raise ValueError("gpu.tiles is empty; give at least one tile shape")
        if not self.gpu.tflops:
            raise ValueError("gpu.tflops is empty; give the matrix rate of at least one dtype")

    def _check_sources(self) -> None:
        paths = {path for path, _ in numbers(self)}
        for path in sorted(paths - set(self.sources)):
            raise ValueError(f"sources.{path} is missing; say where the number is from: measured, paper, data sheet or assumed")
        for path in sorted(set(self.sources) - paths):
            raise ValueError(f"sources.{path} is about no number of this machine")
        for path in sorted(set(self.spreads) - paths):
            raise ValueError(f"spreads.{path} is about no number of this machine")
        for path, source in self.sources.items():
            if not source.strip():
                raise ValueError(f"sources.{path} is empty; say where the number is from")

    def tflops(self, dtype: str) -> float:
        """Return the matrix peak for `dtype`, or for FP8 operands by the name of their rate (`Problem.rate_name`). Raises
        ValueError if the profile has none."""
        if dtype not in self.gpu.tflops:
            raise ValueError(
                f"dtype is {dtype!r}; machine {self.name} has rates for {', '.join(self.gpu.tflops)}: use one of these, or add "
                f"gpu.tflops.{dtype} and its source to the machine's file"
            )
        return self.gpu.tflops[dtype]

    def kernel_rate(self, scaling: Scaling | None, dtype: str) -> str:
        """Return the name of the rate at which weft's GEMM kernel multiplies operands of a dtype, or of FP8."""
        if scaling is None:
            return dtype
        return scaling.kernel_rate_name if scaling.kernel_rate_name in self.gpu.tflops else scaling.rate_name

    def what_if(self, changes: Mapping[str, Any] | None = None, /, **more: Any) -> Machine:
        """Return this machine with other numbers, and with those rescaled that depend on them: see weft.core.what_if.

        changes: the new value of each path, or its JSON as text. more: the same, with __ in place of a dot. Raises ValueError
        for a path that does not exist, and for a value that is not allowed, with what would work.

        >>> faster = load("h200x8").what_if(links__gbps=780.0)
        >>> faster.copies.gbps, faster.stores.rate(4), faster.sources["copies.gbps"][:23]
        (740.0, 230.0, 'scaled with what was se')
        """
        from weft.core.what_if import what_if

        return what_if(self, {**(changes or {}), **{name.replace("__", "."): value for name, value in more.items()}})

    @cached_property
    def within_a_kernel(self) -> Machine:
        """The machine as the steps of a running kernel see it: launches and flags take no time."""
        wake_us = self.wake_us and _NOTHING_US
        return dataclasses.replace(self, launch_us=_NOTHING_US, flag_us=_NOTHING_US, wake_us=wake_us)

    @cached_property
    def digest(self) -> str:
        """A hash of sixteen letters that changes with any field."""
        return hashlib.sha256(codec.dumps(self).encode()).hexdigest()[:16]

    @property
    def fans_out(self) -> bool:
        """True if copies to several peers should run concurrently. Schedules then have a copy lane for each peer."""
        return self.copies.engines > 1

    def require_for(self, problem: Problem) -> None:
        """Raise ValueError if a node of the problem needs more GPUs than the machine has, or several nodes need a network."""
        self.require(max(problem.nodes or (problem.world_size,)))
        if problem.nodes and self.network is None:
            raise ValueError(
                f"nodes is {problem.nodes}; machine {self.name} has no network: add one to its profile, or use one node"
            )

    def require(self, world_size: int) -> None:
        """Raise ValueError if the machine has fewer GPUs than `world_size`."""
        if world_size > self.world_size:
            raise ValueError(
                f"world_size is {world_size}; machine {self.name} has {self.world_size} GPUs: use at most that many, "
                "or a machine file with more"
            )

    def __str__(self) -> str:
        return f"{self.name}: {self.description} ({self.world_size} GPUs, {self.links.topology})"


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


@cache
def names() -> tuple[str, ...]:
    """Return the names of the shipped profiles."""
    return tuple(sorted(path.stem for path in _PROFILES.glob("*.json")))


def as_machine(machine: Machine | str | Path) -> Machine:
    """Return the machine that a public function's argument means. A Machine is returned as it is; a name or path is loaded.
    Raises ValueError for anything else."""
    require("machine", machine, (Machine, str, Path), "use a weft.Machine, a name of weft machines, or the path of a JSON file")
    return machine if isinstance(machine, Machine) else load(machine)


def load(name_or_path: str | Path) -> Machine:
    """Load a shipped profile by name, or one from a JSON file. Raises ValueError that names the file and the field."""
    if str(name_or_path) in names():
        return codec.read(Machine, _PROFILES / f"{name_or_path}.json")
    path = Path(name_or_path)
    if path.suffix == ".json" or os.path.isfile(path):  # isfile is also False where the user has no access
        return codec.read(Machine, path)
    raise ValueError(f"machine is {str(name_or_path)!r}; weft has {', '.join(names())}, or give the path of a JSON file")
