"""A DlrmSystem describes a DLRM, the GPU of each node and the fabric between nodes by numbers. All node counts, topologies and
methods use the same value.

Contract: as in the profiles of weft.machine, a DlrmSystem is complete, every number is from 1e-12 to 1e15 (message_ns and
sort_bytes may be zero), and `sources` names the source of each. weft_studies.profile returns copies with one number replaced.

Times are in nanoseconds, except launch_us, which comes from a Machine. Rates are in 1e9 bytes/s, which is bytes per nanosecond.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from weft.core import codec, machine
from weft.core.hardware import Gpu
from weft.core.machine import Machine
from weft.core.problem import ITEMSIZE
from weft_studies import profile

PROFILE = Path(__file__).with_name("system.json")
Topology = Literal["torus_2d", "torus_3d", "fat_tree"]
MAY_BE_ZERO = frozenset({"message_ns", "model.sort_bytes"})


@dataclass(frozen=True, kw_only=True)
class DlrmModel:
    """DlrmModel has the sizes of the model.

    tables: the number of embedding tables. Each has `rows` rows of `dim` elements.
    pooling: the number of rows that a sample sums up in each table.
    index_bytes: the size of an index.
    bottom_layers, top_layers: the numbers of layers of the two MLPs. A layer's weight is width x width.
    interaction_mflop: the millions of operations of the interaction for one sample, forward.
    sort_bytes: the memory traffic to sort one index.
    """

    tables: int
    rows: int
    dim: int
    pooling: int
    index_bytes: int
    bottom_layers: int
    top_layers: int
    width: int
    interaction_mflop: float
    sort_bytes: int


@dataclass(frozen=True, kw_only=True)
class FabricLink:
    """FabricLink is one link of the fabric. `gbps` is its rate in each direction, `latency_ns` the latency of a hop."""

    gbps: float
    latency_ns: int


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Tree describes the fat tree. A switch has `leaf` nodes. Its trunk has the rate of their links, divided by `taper`."""

    leaf: int
    taper: float


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Collectives describes the collectives of the communication library, which run as separate kernels.

    share: the share of a link's rate that they reach.
    fixed_ns: the time before the first byte is sent.
    bucket_bytes: the least size of the weight gradients that one all-reduce takes. The last may be smaller."""

    share: float
    fixed_ns: int
    bucket_bytes: int


@dataclass(frozen=True, kw_only=True)
class Fused:
    """Fused describes the fused kernel.

    slices: the number of slices in which it sends its rows to each peer.
    occupancy: its occupancy relative to the unfused kernel."""

    slices: int
    occupancy: float


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Pair describes the operator alone on two nodes with a link of rate `gbps`.

    All combinations are simulated. A batch is that of both nodes together, and `tables` are those of each node."""

    gbps: float
    dim: int
    batches: tuple[int, ...]
    tables: tuple[int, ...]
    poolings: tuple[int, ...]


MOST_NODES = 1 << 16
MOST_SLICES = 1 << 12
"""Each slice is simulated as an event, and more than a few dozen do not gain anything."""


@dataclass(frozen=True, kw_only=True)
class DlrmSystem:
    """DlrmSystem is the simulated system. See the module's text.

    host: the profile of weft.machine that gives launch_us, and all numbers of gpu that the study does not set itself.
    batch: the number of samples of a node.
    message_ns: the time of a node's network interface for each message that it sends.
    nodes, topologies: the node counts and topologies that the study simulates.
    """

    name: str
    words: str
    host: str
    dtype: Literal["float32", "bfloat16", "float16"]
    gpu: Gpu
    launch_us: float
    model: DlrmModel
    batch: int
    link: FabricLink
    tree: Tree
    message_ns: int
    collectives: Collectives
    fused: Fused
    pair: Pair
    nodes: tuple[int, ...]
    topologies: tuple[Topology, ...] = field(metadata={"about": "choices"})
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        for path, row in (("nodes", self.nodes), ("topologies", self.topologies)):
            if not row:
                raise ValueError(f"{path} is empty; name at least one")
        profile.check(self, MAY_BE_ZERO)
        if max(self.nodes) > MOST_NODES:
            raise ValueError(f"nodes is {max(self.nodes)}; use at most {MOST_NODES}, which takes a minute")
        if self.fused.slices > MOST_SLICES:
            raise ValueError(f"fused.slices is {self.fused.slices}; use at most {MOST_SLICES}")
        for path, value in (
            ("collectives.share", self.collectives.share),
            ("fused.occupancy", self.fused.occupancy),
        ):
            if value > 1:
                raise ValueError(f"{path} is {value!r}; it is a share, at most 1")

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @cached_property
    def machine(self) -> Machine:
        """The machine with a node's GPU, as weft.perf.terms expects it."""
        return dataclasses.replace(machine.load(self.host), gpu=self.gpu, launch_us=self.launch_us)

    def assumed(self) -> tuple[str, ...]:
        """Return the paths of the numbers that are assumed because no source gives them."""
        return profile.assumed(self)


@cache
def load() -> DlrmSystem:
    """Return the shipped profile, which describes the system of arXiv 2305.06942 with the GPU of its `host`'s profile."""
    data = json.loads(PROFILE.read_text(encoding="utf-8"))
    host = machine.load(data["host"])
    data |= {"gpu": codec.dump(host.gpu) | data["gpu"], "launch_us": host.launch_us}
    gpu = {path: source for path, source in host.sources.items() if path.startswith("gpu.") or path == "launch_us"}
    data["sources"] = gpu | data["sources"]
    made: DlrmSystem = codec.load(DlrmSystem, data)
    return made
