"""Machine: the numbers of a host with GPUs. Profiles are data files in weft/core/machines, each number with its source.

Contract: a Machine that exists is complete. Every number is from 1e-12 to 1e15 (latencies and `stores.stall`: zero, too), so
that times made of them are finite, and `sources` says of each where it is from: measured (with its date), a paper, a data
sheet, or assumed. A file that lacks a number or a source, or has an unknown one, is refused with the name of the file and of
the field.

Numbers that are time are in microseconds, rates in 1e9 bytes/s (gbps) or 1e12 operations/s (tflops).
Topologies, for ranks 0 .. world_size-1:

    switch   each GPU has a port out and a port in of `gbps`; any pair at full speed
    mesh     a link of `gbps` in each direction between every pair
    ring     a link of `gbps` in each direction to both neighbours; traffic to further ranks passes through nearer ones
    pcie     as switch, and all traffic shares the host's `host_gbps`
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
"""The bounds of any number."""
_NOTHING_US = 1e-3
"""Numbers are above zero; times count whole nanoseconds."""
_PROFILES = Path(__file__).with_name("machines")


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What one block of a GEMM computes: rows x cols of the result, at this share of the GPU's peak."""

    rows: int
    cols: int
    efficiency: float


_TILE_SIDES = (64, 128, 192, 256)
_TILE_AREA = 128 * 256


def _between(known: Mapping[int, float], at: int) -> float:
    """Interpolate linearly between the neighbours of an area; clamp to the first and the last value."""
    below, above = (
        max((x for x in known if x <= at), default=min(known)),
        min((x for x in known if x >= at), default=max(known)),
    )
    share = (at - below) / (above - below) if above > below else 0.0
    return known[below] + share * (known[above] - known[below])


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """sms: streaming multiprocessors or compute units. tflops: dense matrix peak by dtype; of FP8 operands, where the GPU
    multiplies them, as float8, and as float8_blockwise with scales within K; and of weft's GEMM kernel, where it is slower, as
    float8_kernel, and as float8_promoted where it adds each 128 of K in float32. tiles: what its GEMMs may use.

    half_tile: time of a tile that is half as wide, over a whole one's; 0.5 at best, since its rows of a are loaded all the
    same. cut_k: no part of K is shorter where cuBLAS's GEMM cuts K. gather_share: rate of gathering rows, over the memory's
    rate of a copy; above 1 where reading alone is faster than reading and writing. burst_bytes: what memory is read by.
    tile_us: a tile's prologue and epilogue. flag_efficiency: speed of a GEMM kernel that waits on flags, counts tiles or
    stores to peers, relative to cuBLAS's plain one. hbm_gbps: read and write together. l2_bytes: whole GPU.
    burst_us, sustained: after matmuls have kept the GPU busy for burst_us within a call, its power limit reduces their rate by
    the factor `sustained`; both None: they run at full rate throughout. kernel_tiles: those that weft's own GEMM kernel
    may use, where they are others; stored_tiles: the same where hardware stores their results, since they neither count nor add
    nor go to peers. l2_gbps: what kernels read of the last-level cache, if known.
    tile_step: its library's tiles come in more shapes than `tiles` lists, one side in steps of so many rows or columns; see
    `library_tiles`. step_rate:
    their rate over that of the listed ones around, 1 where it is None: a library does not always find the best one.
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
        """Columns, and elements over efficiency, of few of `tiles`, by their rows: of each area the tile with fewest rows, but
        64 at least. On shapes of models their matmuls take within 1% of what all take, on average."""
        high = [tile for tile in self.tiles if tile.rows >= 64] or self.tiles
        largest = {tile.rows * tile.cols: tile for tile in sorted(high, key=lambda tile: -tile.rows)}
        found: dict[float, list[tuple[float, float]]] = {}
        for area, tile in largest.items():
            found.setdefault(float(tile.rows), []).append((float(tile.cols), area / tile.efficiency))
        return tuple((rows, tuple(wide)) for rows, wide in found.items())

    @cached_property
    def library_tiles(self) -> tuple[Tile, ...]:
        """`tiles`, and where there is a tile_step those in between: one side 64, 128, 192 or 256, the other a multiple of the
        step from 64 to 256, no larger than 128 x 256. Their efficiency is nearly between those of the areas around."""
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
        """What weft's own GEMM kernel reaches of the peak with a tile of this shape: as `kernel_tiles`, or `stored_tiles`, list
        it, else as the library's tiles of its area."""
        tiles = (self.stored_tiles if stored else ()) or self.kernel_tiles
        listed = (tile.efficiency for tile in tiles if (tile.rows, tile.cols) == (rows, cols))
        return next(listed, None) or _between(self._best_efficiency, rows * cols)

    @cached_property
    def _best_efficiency(self) -> dict[int, float]:
        """By area, of `tiles`."""
        best: dict[int, float] = {}
        for tile in self.tiles:
            best[tile.rows * tile.cols] = max(tile.efficiency, best.get(tile.rows * tile.cols, 0.0))
        return best

    def paced_us(self, busy_us: float) -> float:
        """What matmuls take that would take `busy_us` at full rate, one after the other.

        >>> gpu = load("h200x8").gpu
        >>> gpu.paced_us(100.0), gpu.paced_us(4000.0) > 4000.0
        (100.0, True)
        """
        if self.burst_us is None or self.sustained is None:
            return busy_us
        return busy_us + max(0.0, busy_us - self.burst_us) * (1 / self.sustained - 1)


@dataclass(frozen=True, kw_only=True)
class CopyEngines:
    """copy_us: fixed cost of a copy. gbps: one copy at a time; several_gbps: all copies of a GPU together, where several run.

    engines: copies that one GPU should have in flight; schedules for a machine with more than one have a copy lane a peer.
    turning: copies that go to several peers in turns take up to this share of their time more, because ranks get out of step
    and two of them send to one. None for 0.
    strided: what copies non-contiguous rows; a kernel waits for SMs.
    """

    copy_us: float
    gbps: float
    several_gbps: float
    engines: int
    strided: Literal["engine", "kernel"] = "engine"
    turning: float | None = None

    def turned_gbps(self, rounds: int) -> float:
        """The rate of copies that go to several peers in so many rounds.

        >>> CopyEngines(copy_us=1.0, gbps=300.0, several_gbps=300.0, engines=1, turning=1.0).turned_gbps(2)
        200.0
        """
        return self.gbps / (1 + (self.turning or 0.0) * (1 - 1 / rounds))


@dataclass(frozen=True, kw_only=True)
class Stores:
    """Loads and stores to peers from kernels. gbps: (SMs, rate) rising. sms: what a lane of communication blocks occupies;
    sms_alone: the same where no kernel multiplies meanwhile.

    stall: share of a remote store's time that the tile which stores cannot hide. tiles: share of the rate that stores from a
    matmul's tiles reach, all of it where that is None.
    """

    gbps: tuple[tuple[int, float], ...]
    sms: int
    sms_alone: int
    stall: float
    tiles: float | None = None

    def rate(self, sms: int) -> float:
        """Rate on `sms` SMs, on the line between the table's points (through zero below the first).

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
    """What weft's own kernels reach on the GPU.

    sm_gbps: rate at which one SM reads and writes the GPU's memory, with 16 warps and 16-byte loads; pull_gbps: rate at which
    it loads from peers, with 96 KiB in flight. l2_share: of the last-level cache, what a stream through it leaves to be found
    again. sums: of the blocks that sum what copy engines bring, so many share an SM.

    streamed: of the matrix peak, what the kernel reaches that multiplies and exchanges (weft.kernels.all_reduce). row_us: the
    least that a row of b takes it, since its loads are not asynchronous. exchange_us: what such a kernel takes besides, to look
    up the number of its call, fill its pipeline, and empty the places of the call before.

    lookup_copy_gbps: rate of a kernel that copies rows to a peer while rows are gathered. lookup_copy_bytes: what it takes of
    the memory's rate for each byte. lookup_copy_us: from a part's last row to the start of the copy that waits for it.
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
    """The links between GPUs. gbps: usable, in each direction, of one link of the topology. latency_us: of one hop. host_gbps:
    pcie only."""

    topology: Topology
    gbps: float
    latency_us: float
    host_gbps: float | None = None

    def wire_us(self, op: str, shard_bytes: float, world_size: int) -> float:
        """The least that a collective of one host takes: every other rank's shard comes in by a rank's links, at their rate. A
        mesh has a link for each, a ring two for all; all to all the shards of others pass through a ring's, too."""
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
    """The network between hosts: an adapter for each GPU. gbps: usable, in each direction. latency_us: of a message's last
    byte.
    step_us: fixed cost of a group of sends and receives. sms: SMs that it occupies while it runs.
    """

    gbps: float
    latency_us: float
    step_us: float
    sms: int


@dataclass(frozen=True, kw_only=True)
class Table:
    """A collective as measured on `world_size` ranks: (bytes of one shard, microseconds), rising.

    also: the same on fewer ranks, where that was measured, with as few points as there are.
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
    """A collective as a model: fixed_us + (n - 1) * (step_us + bytes / gbps), with gbps as of the whole machine."""

    TAGGED: ClassVar[bool] = True
    fixed_us: float
    step_us: float
    gbps: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One host's GPUs and what connects them. help(weft.machine) has units and sources; weft.core.machine.load reads one.

    name: as `--machine` takes it. description: one line for reports. world_size: its GPUs. launch_us: from the end of one
    kernel of a stream to the start of the next one's work. flag_us: a stream's wait or signal. wake_us: from a signal to the
    next step of the copy lane that waited for it, None for 0. fork_us: in a call on several lanes, the time to start the lanes
    other than
        the
    compute lane, and from a copy lane back to it, if measured. stages: whether library matmuls and collectives are
    called through torch, with what that does around them (weft.perf.staging). collectives: NCCL's, by name; all_to_all may be
    missing, and then costs what all_gather does; all_reduce, too, and then is a reduce_scatter and an all_gather.
    collective_sms: SMs that an NCCL collective holds by itself; None for as many as stores.sms.
    contention: the slowdown of the first during the second ("gemm during copy"), if known; the simulator uses that of gemm and
    copy, of copies at the full rate, and of a user's computation and collectives (weft.perf.concurrent). slow_lookups: whether
    lookups and concurrent kernels that copy rows slow each other (weft.perf.lookups). network: between several such hosts, if
        known.
    device: the GPU on which its numbers were measured, as its driver names it; empty if they have several sources.
    sources: the source of each number, by the path that `numbers` gives it. spreads: the variation of measured numbers: half of
    their interquartile range, as a share of the median.
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
        """Matrix peak for `dtype`, or for FP8 operands by the name of their rate (`Problem.rate_name`). Raises ValueError if
        the profile has none."""
        if dtype not in self.gpu.tflops:
            raise ValueError(
                f"dtype is {dtype!r}; machine {self.name} has rates for {', '.join(self.gpu.tflops)}: use one of these, or add "
                f"gpu.tflops.{dtype} and its source to the machine's file"
            )
        return self.gpu.tflops[dtype]

    def kernel_rate(self, scaling: Scaling | None, dtype: str) -> str:
        """The name of the rate at which weft's GEMM kernel multiplies operands of a dtype, or of FP8."""
        if scaling is None:
            return dtype
        return scaling.kernel_rate_name if scaling.kernel_rate_name in self.gpu.tflops else scaling.rate_name

    def what_if(self, changes: Mapping[str, Any] | None = None, /, **more: Any) -> Machine:
        """This machine with other numbers, and with what goes along with them: see weft.core.what_if.

        changes: by path, a value, or its JSON as text. more: the same, with __ for a dot. Raises ValueError for a path that
        there is not, and for a value that cannot be, with what would work.

        >>> faster = load("h200x8").what_if(links__gbps=780.0)
        >>> faster.copies.gbps, faster.stores.rate(4), faster.sources["copies.gbps"][:23]
        (740.0, 230.0, 'scaled with what was se')
        """
        from weft.core.what_if import what_if

        return what_if(self, {**(changes or {}), **{name.replace("__", "."): value for name, value in more.items()}})

    @cached_property
    def within_a_kernel(self) -> Machine:
        """As the steps of a kernel that runs see it: nothing is launched, and flags are looked at at once."""
        wake_us = self.wake_us and _NOTHING_US
        return dataclasses.replace(self, launch_us=_NOTHING_US, flag_us=_NOTHING_US, wake_us=wake_us)

    @cached_property
    def digest(self) -> str:
        """Sixteen letters that change with any of it."""
        return hashlib.sha256(codec.dumps(self).encode()).hexdigest()[:16]

    @property
    def fans_out(self) -> bool:
        """Whether copies to several peers should be in flight together: then schedules have a copy lane for each peer."""
        return self.copies.engines > 1

    def require_for(self, problem: Problem) -> None:
        """Raises ValueError if a node of the problem needs more GPUs than the machine has, or several nodes a network."""
        self.require(max(problem.nodes or (problem.world_size,)))
        if problem.nodes and self.network is None:
            raise ValueError(
                f"nodes is {problem.nodes}; machine {self.name} has no network: add one to its profile, or use one node"
            )

    def require(self, world_size: int) -> None:
        """Raises ValueError if the machine has fewer GPUs than `world_size`."""
        if world_size > self.world_size:
            raise ValueError(
                f"world_size is {world_size}; machine {self.name} has {self.world_size} GPUs: use at most that many, "
                "or a machine file with more"
            )

    def __str__(self) -> str:
        return f"{self.name}: {self.description} ({self.world_size} GPUs, {self.links.topology})"


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a machine with the path of its field; the rows of a table all have the table's path. Not its spreads,
    which are about numbers."""
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
    """The nearest that a machine may have."""
    return max(LEAST, min(number, MOST))


@cache
def names() -> tuple[str, ...]:
    """The shipped profiles."""
    return tuple(sorted(path.stem for path in _PROFILES.glob("*.json")))


def as_machine(machine: Machine | str | Path) -> Machine:
    """A machine as public functions take it: itself, or `load`ed. Raises ValueError for anything else."""
    require("machine", machine, (Machine, str, Path), "use a weft.Machine, a name of weft machines, or the path of a JSON file")
    return machine if isinstance(machine, Machine) else load(machine)


def load(name_or_path: str | Path) -> Machine:
    """A shipped profile by name, or one from a JSON file. Raises ValueError that names the file and the field."""
    if str(name_or_path) in names():
        return codec.read(Machine, _PROFILES / f"{name_or_path}.json")
    path = Path(name_or_path)
    if path.suffix == ".json" or os.path.isfile(path):  # False, too, where nobody may look
        return codec.read(Machine, path)
    raise ValueError(f"machine is {str(name_or_path)!r}; weft has {', '.join(names())}, or give the path of a JSON file")
