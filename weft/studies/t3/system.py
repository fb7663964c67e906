"""System: the simulated GPU of T3, as numbers, each with its source. One value serves every sub-layer and configuration.

Contract: as weft.machine's profiles: a T3System that exists is complete, every number is from 1e-12 to 1e15, and `sources` says
of each where it is from. weft.studies.profile has what gives a T3System with one number replaced.

Times are whole nanoseconds, rates 1e9 bytes/s, which is bytes a nanosecond.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from weft.core import codec
from weft.studies import profile

PROFILE = Path(__file__).with_name("system.json")


@dataclass(frozen=True, kw_only=True)
class WorkgroupTile:
    """A workgroup's part of a GEMM's output. k: of one slice, of which `stages` are in shared memory.

    group_rows: rows of tiles that are finished, column by column, before the next ones. wavefronts: of one workgroup.
    """

    rows: int
    cols: int
    k: int
    stages: int
    group_rows: int
    wavefronts: int


@dataclass(frozen=True, kw_only=True)
class Llc:
    """Last-level cache."""

    bytes: int
    latency_ns: int


@dataclass(frozen=True, kw_only=True)
class Hbm:
    """Memory. latency_ns: of a read that finds no queue. channels: each with a queue of queue_entries requests of entry_bytes.

    update_cost: memory time of a near-memory update, relative to a write.
    """

    gbps: float
    latency_ns: int
    channels: int
    queue_entries: int
    entry_bytes: int
    update_cost: float


@dataclass(frozen=True, kw_only=True)
class Arbiter:
    """T3-MCA. thresholds: entries of a queue that communication may hold, by the memory intensity of a GEMM's first stage:
    none below intensities[0], thresholds[i] from intensities[i] on. starvation: compute requests after which one of
    communication is served whatever waits."""

    thresholds: tuple[int, ...]
    intensities: tuple[float, ...]
    starvation: int


@dataclass(frozen=True, kw_only=True)
class Link:
    """To the next GPU; on a fully connected system, to each."""

    gbps: float
    latency_ns: int


@dataclass(frozen=True, kw_only=True)
class TrackerSize:
    """entries: wavefront tiles that it follows at a time. spill_bytes: moved by each access to a count in
    memory, of a tile that has no entry."""

    entries: int
    spill_bytes: int


@dataclass(frozen=True, kw_only=True)
class Mechanisms:
    """Switches of T3's mechanisms. All are on in the shipped system; each can be switched off by itself.

    | switch | when it is off |
    | --- | --- |
    | near_memory_compute | a near-memory update becomes a read and a write of the memory |
    | llc_bypass | the output goes through the last-level cache, evicts inputs, and reaches the memory one wave later |
    | arbiter | T3-MCA arbitrates round-robin, as T3 does |
    | rotation | every GPU produces the chunks in the same order |
    | tracker | nothing follows single tiles: a chunk is sent once all of it has had all updates |

    Without rotation the GPUs differ, so all of them are simulated: the whole study then takes about a minute of CPU time.
    """

    near_memory_compute: bool
    llc_bypass: bool
    arbiter: bool
    rotation: bool
    tracker: bool


@dataclass(frozen=True, kw_only=True)
class T3System:
    """One of N equal GPUs. See the module's text.

    units: compute units. flops_per_clock: of one unit, half precision. unit_gbps: memory traffic that one unit can have
    under way. pipeline: pieces into which a kernel of a collective cuts a ring's chunk. dma_tiles: tiles a command moves.
    """

    name: str
    words: str
    units: int
    clock_ghz: float
    flops_per_clock: int
    unit_gbps: float
    pipeline: int
    tile: WorkgroupTile
    llc: Llc
    hbm: Hbm
    arbiter: Arbiter
    link: Link
    tracker: TrackerSize
    dma_tiles: int
    mechanisms: Mechanisms
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        profile.check(self)
        if len(self.arbiter.thresholds) != len(self.arbiter.intensities):
            raise ValueError("arbiter.intensities has another length than arbiter.thresholds; give one for each")
        if list(self.arbiter.intensities) != sorted(self.arbiter.intensities):
            raise ValueError(f"arbiter.intensities is {self.arbiter.intensities}; it must rise")
        if self.tile.stages < 2:
            raise ValueError("tile.stages is 1; use at least 2, one to multiply and one to fill")

    @property
    def slice_ns(self) -> float:
        """A unit multiplies one slice of a tile."""
        return 2 * self.tile.rows * self.tile.cols * self.tile.k / (self.flops_per_clock * self.clock_ghz)

    @property
    def slice_bytes(self) -> int:
        """A slice of a tile's two operands, in half precision."""
        return 2 * self.tile.k * (self.tile.rows + self.tile.cols)

    @property
    def peak_tflops(self) -> float:
        return self.units * self.flops_per_clock * self.clock_ghz / 1e3

    @property
    def entry_ns(self) -> float:
        """A channel serves one request."""
        return self.hbm.entry_bytes * self.hbm.channels / self.hbm.gbps

    def assumed(self) -> tuple[str, ...]:
        """Paths of the numbers that no source gives."""
        return profile.assumed(self)


@cache
def load() -> T3System:
    """The shipped profile: T3, arXiv 2401.16677, section 5."""
    return codec.read(T3System, PROFILE)
