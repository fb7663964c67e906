"""The simulated GPU of T3 by numbers (a T3System), and the GEMMs that T3 evaluates. All sub-layers and configurations use the
same value.

Contract: as in the profiles of weft.machine, a T3System is complete, every number is from 1e-12 to 1e15, and `sources` names
the source of each. weft_studies.profile returns copies with one number replaced.

Times are whole nanoseconds. Rates are in 1e9 bytes/s, which is bytes per nanosecond.

T3 evaluates the GEMMs of a transformer whose output is reduced over all ranks. In a layer that is sharded over the ranks, four
GEMMs end with an all-reduce. T3 splits it into a reduce-scatter, which it fuses with the GEMM, and an all-gather. With hidden
size H, these GEMMs have M = tokens, N = H and

    OP   attention's output projection, forward      K =     H / ranks
    FC2  the MLP's second matmul, forward            K = 4 * H / ranks
    FC1  gradient to the MLP's input, backward       K = 4 * H / ranks
    IP   gradient to attention's input, backward     K = 3 * H / ranks

Source of models and ranks: T3, arXiv 2401.16677, section 5. A batch has 16 x 1024 or 8 x 1024 tokens, or 2 x 1024 in the large
models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from weft.core import codec
from weft_studies import profile

PROFILE = Path(__file__).with_name("system.json")


@dataclass(frozen=True, kw_only=True)
class WorkgroupTile:
    """WorkgroupTile is the part of a GEMM's output that one workgroup computes.

    rows, cols: the size of the tile.
    k: the size along K of one slice of the operands.
    stages: the number of slices in shared memory.
    group_rows: the number of tile rows in a group. A group is computed column by column before the next group starts.
    wavefronts: the number of wavefronts of a workgroup.
    """

    rows: int
    cols: int
    k: int
    stages: int
    group_rows: int
    wavefronts: int


@dataclass(frozen=True, kw_only=True)
class Llc:
    """Llc is the last-level cache."""

    bytes: int
    latency_ns: int


@dataclass(frozen=True, kw_only=True)
class Hbm:
    """Hbm is the memory of the GPU.

    gbps: the total rate.
    latency_ns: the latency of a read if the queues are empty.
    channels: the number of channels. Each has a queue of `queue_entries` requests of `entry_bytes` bytes.
    update_cost: the memory time of a near-memory update, relative to a write.
    """

    gbps: float
    latency_ns: int
    channels: int
    queue_entries: int
    entry_bytes: int
    update_cost: float


@dataclass(frozen=True, kw_only=True)
class Arbiter:
    """Arbiter is T3-MCA, which limits the queue entries that communication may hold.

    thresholds: the limits. thresholds[i] applies from a memory intensity of intensities[i] of the GEMM's first stage on.
    intensities: the lower bounds of these ranges. There is no limit below the first.
    starvation: the number of compute requests after which a communication request is always served.
    """

    thresholds: tuple[int, ...]
    intensities: tuple[float, ...]
    starvation: int


@dataclass(frozen=True, kw_only=True)
class Link:
    """Link connects a GPU to the next one, or to each other one in a fully connected system."""

    gbps: float
    latency_ns: int


@dataclass(frozen=True, kw_only=True)
class TrackerSize:
    """TrackerSize is the capacity of the tracker.

    entries: the number of wavefront tiles that it tracks at a time.
    spill_bytes: the bytes that each update of a tile without an entry moves. The count of such a tile is in memory."""

    entries: int
    spill_bytes: int


@dataclass(frozen=True, kw_only=True)
class Mechanisms:
    """Mechanisms has a switch for each of T3's mechanisms. The shipped system has all of them on.

    | switch | when it is off |
    | --- | --- |
    | near_memory_compute | a near-memory update becomes a read and a write of the memory |
    | llc_bypass | the output goes through the last-level cache, evicts inputs, and reaches the memory one wave later |
    | arbiter | T3-MCA arbitrates round-robin, as T3 does |
    | rotation | every GPU produces the chunks in the same order |
    | tracker | tiles are not tracked: a chunk is sent once all of its tiles have received all updates |

    Without rotation the GPUs differ, so all of them are simulated: the whole study then takes about a minute of CPU time.
    """

    near_memory_compute: bool
    llc_bypass: bool
    arbiter: bool
    rotation: bool
    tracker: bool


@dataclass(frozen=True, kw_only=True)
class T3System:
    """T3System is one of N equal GPUs. See the module's text.

    units: the number of compute units.
    flops_per_clock: the half-precision operations of one unit per clock.
    unit_gbps: the highest rate of memory traffic of one unit.
    pipeline: the number of pieces into which the kernel of a ring collective cuts a chunk.
    dma_tiles: the number of tiles that a DMA command moves.
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
        """The time in which a unit multiplies one slice of a tile."""
        return 2 * self.tile.rows * self.tile.cols * self.tile.k / (self.flops_per_clock * self.clock_ghz)

    @property
    def slice_bytes(self) -> int:
        """The bytes of one slice of a tile's two operands, in half precision."""
        return 2 * self.tile.k * (self.tile.rows + self.tile.cols)

    @property
    def peak_tflops(self) -> float:
        return self.units * self.flops_per_clock * self.clock_ghz / 1e3

    @property
    def entry_ns(self) -> float:
        """The time in which a channel serves one request."""
        return self.hbm.entry_bytes * self.hbm.channels / self.hbm.gbps

    def assumed(self) -> tuple[str, ...]:
        """Return the paths of the numbers that are assumed because no source gives them."""
        return profile.assumed(self)


@cache
def load() -> T3System:
    """Return the shipped profile, which describes the GPU of T3, arXiv 2401.16677, section 5."""
    return codec.read(T3System, PROFILE)


ITEMSIZE = 2
Layer = Literal["OP", "FC2", "FC1", "IP"]
LAYERS: tuple[Layer, ...] = get_args(Layer)
FACTOR: dict[Layer, int] = {"OP": 1, "FC2": 4, "FC1": 4, "IP": 3}


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Transformer is a model. `tokens` counts those of a batch. `heads` sets the work of attention between the GEMMs."""

    name: str
    hidden: int
    tokens: int
    heads: int
    sequence: int = 1024


@dataclass(frozen=True, kw_only=True)
class LayerGemm:
    """LayerGemm is a GEMM of M x N x K in half precision on one GPU. `name` is shown to people."""

    name: str
    m: int
    n: int
    k: int

    def __post_init__(self) -> None:
        for axis in ("m", "n", "k"):
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis} is {getattr(self, axis)}; a GEMM needs at least 1")

    @property
    def out_bytes(self) -> int:
        return self.m * self.n * ITEMSIZE

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True, kw_only=True)
class SubLayer:
    """SubLayer is one of a model's GEMMs with its all-reduce, on `world_size` GPUs."""

    model: Transformer
    layer: Layer
    world_size: int

    @property
    def name(self) -> str:
        return f"{self.model.name} TP{self.world_size} {self.layer}"

    @property
    def gemm(self) -> LayerGemm:
        """One rank's part of the GEMM. Raises ValueError if it would be empty because there are too many ranks."""
        model = self.model
        return LayerGemm(name=self.name, m=model.tokens, n=model.hidden, k=FACTOR[self.layer] * model.hidden // self.world_size)


MEGA_GPT2 = Transformer(name="Mega-GPT-2", hidden=3072, tokens=16 * 1024, heads=32)
T_NLG = Transformer(name="T-NLG", hidden=4256, tokens=8 * 1024, heads=28)
LARGE = (
    Transformer(name="GPT-3", hidden=12288, tokens=2 * 1024, heads=96),
    Transformer(name="PALM", hidden=18432, tokens=2 * 1024, heads=48),
    Transformer(name="MT-NLG", hidden=20480, tokens=2 * 1024, heads=128),
)
MODELS = (MEGA_GPT2, T_NLG)
SUBLAYERS = tuple(SubLayer(model=m, layer=layer, world_size=n) for m in MODELS for n in (8, 16) for layer in LAYERS)
LARGE_SUBLAYERS = tuple(SubLayer(model=m, layer=layer, world_size=32) for m in LARGE for layer in LAYERS)
