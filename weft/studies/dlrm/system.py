"""System: a DLRM, the GPU of each node, and the fabric between nodes, as numbers, each with its source. One value serves every
node count, topology and method.

Contract: as weft.machine's profiles: a DlrmSystem that exists is complete, every number is from 1e-12 to 1e15 (message_ns and
sort_bytes may be zero), and `sources` says of each where it is from. weft.studies.profile has what gives a DlrmSystem with one
number replaced.

Times are nanoseconds, but launch_us, which is a Machine's; rates are 1e9 bytes/s, which is bytes a nanosecond.
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
from weft.core.machine import Gpu, Machine
from weft.core.problem import ITEMSIZE
from weft.studies import profile

PROFILE = Path(__file__).with_name("system.json")
Topology = Literal["torus_2d", "torus_3d", "fat_tree"]
MAY_BE_ZERO = frozenset({"message_ns", "model.sort_bytes"})


@dataclass(frozen=True, kw_only=True)
class DlrmModel:
    """tables: in all, each of `rows` rows of `dim` elements, `pooling` of which a sample sums up. index_bytes: an index's.

    bottom_layers, top_layers: of the MLPs, each width x width. interaction_mflop: of a sample, forward. sort_bytes: memory
    traffic for each index that is sorted.
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
    """One link of the fabric, in each direction. latency_ns: of a hop."""

    gbps: float
    latency_ns: int


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Of the fat tree: nodes on a switch, and how many times less its trunk carries than their links."""

    leaf: int
    taper: float


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """The communication library's collectives, kernels of their own. share: of a link's rate that they reach; fixed_ns: before
    the first byte moves. bucket_bytes: of weight gradients that one all-reduce takes, at least, but for the last."""

    share: float
    fixed_ns: int
    bucket_bytes: int


@dataclass(frozen=True, kw_only=True)
class Fused:
    """The fused kernel. slices: of what it sends to each peer. occupancy: relative to the plain kernel's."""

    slices: int
    occupancy: float


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The operator alone on two nodes: a link of `gbps`, and all combinations of batches (of both nodes), tables (of each
    node) and poolings."""

    gbps: float
    dim: int
    batches: tuple[int, ...]
    tables: tuple[int, ...]
    poolings: tuple[int, ...]


MOST_NODES = 1 << 16
MOST_SLICES = 1 << 12
"""Each is an event of its own, and beyond a few dozen none gains anything."""


@dataclass(frozen=True, kw_only=True)
class DlrmSystem:
    """See the module's text.

    host: the profile of weft.machine that gpu and launch_us are from, but for what the study says of
    gpu itself. batch: samples of a node. message_ns: of a node's network interface for each
    message that it sends. nodes, topologies: what the study goes through.
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
        """A node's GPU, for weft.perf.terms."""
        return dataclasses.replace(machine.load(self.host), gpu=self.gpu, launch_us=self.launch_us)

    def assumed(self) -> tuple[str, ...]:
        """Paths of the numbers that no source gives."""
        return profile.assumed(self)


@cache
def load() -> DlrmSystem:
    """The shipped profile: fused computation-collectives, arXiv 2305.06942, on the GPU of its `host`'s profile."""
    data = json.loads(PROFILE.read_text(encoding="utf-8"))
    host = machine.load(data["host"])
    data |= {"gpu": codec.dump(host.gpu) | data["gpu"], "launch_us": host.launch_us}
    gpu = {path: source for path, source in host.sources.items() if path.startswith("gpu.") or path == "launch_us"}
    data["sources"] = gpu | data["sources"]
    made: DlrmSystem = codec.load(DlrmSystem, data)
    return made
