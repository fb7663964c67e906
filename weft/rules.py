"""The heuristic: from static sizes alone to a schedule, in some microseconds and without simulation.

Contract: `heuristic` is a pure function, total over problems that the machine has GPUs and a rate for, and what it names is
a schedule of the operator. Its decision trees are data (`decisions/*.json`, one file a kind of topology, a tree an operator),
fitted to measured and simulated times by `benchmarks/fit_heuristic.py`; docs/planner.md prints them.

After FiCCO (arXiv 2512.10236), which chooses by the GEMM's op-to-byte ratio, its memory traffic, and M against K; added is
what relates a size to the machine, so that thresholds hold on another one. Legend, of the rank with most work: its matmul is
rows x cols x inner; it sends `sent_bytes` in all.

    world_size       ranks
    shard_rows       M / world_size: what chunks cut
    m_over_k         M / K of the whole problem
    op_to_byte       2 rows cols inner / traffic, in operations a byte
    traffic_mib      (rows inner + inner cols + rows cols) elements, in MiB
    sent_mib         sent_bytes, in MiB
    balance          the matmul's time at the machine's peak / the time of sent_bytes at its links' rate
    copies_hidden    the time of a shard at the links' rate / the fixed cost of a copy
    waves            tiles of 128 x 256 / SMs
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from weft import codec
from weft.machine import Machine, Topology
from weft.problem import COLLECTIVE_OPS, REDUCTIONS, Op, Problem
from weft.schedules import FAMILIES, parse, spec

Feature = Literal[
    "world_size",
    "shard_rows",
    "m_over_k",
    "op_to_byte",
    "traffic_mib",
    "sent_mib",
    "balance",
    "copies_hidden",
    "waves",
]
_MIB = 1 << 20
_TILE = 128 * 256
_FOLDER = Path(__file__).with_name("decisions")
_FILES: dict[Topology, str] = {"switch": "switch", "pcie": "switch", "ring": "ring", "mesh": "mesh"}
"""A host's shared bridge is nearest to a switch: any pair, through ports that all traffic shares."""


_LIKE: dict[Op, Op] = {
    "matmul_all_to_all_columns": "matmul_all_to_all",
    "all_to_all_columns_matmul": "all_to_all_matmul",
}
"""Operators without a tree of their own, and whose they take: as much is multiplied, and as much sent."""


class Sizes(NamedTuple):
    """A problem's static sizes, of the rank with most work."""

    problem: Problem
    machine: Machine
    rows: int
    cols: int
    inner: int
    shard_bytes: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.cols * self.inner

    @property
    def traffic_bytes(self) -> int:
        elements = self.rows * self.inner + self.inner * self.cols + self.rows * self.cols
        return elements * self.problem.itemsize

    @property
    def sent_bytes(self) -> int:
        """An all-reduce scatters and gathers."""
        trips = 2 if self.problem.op == "matmul_all_reduce" else 1
        return trips * (self.problem.world_size - 1) * self.shard_bytes

    @property
    def shard_us(self) -> float:
        return self.shard_bytes / (self.machine.links.gbps * 1e3)

    @property
    def sent_us(self) -> float:
        """On a mesh all peers' links work at once."""
        links = self.problem.world_size - 1 if self.machine.links.topology == "mesh" else 1
        return self.sent_bytes / (self.machine.links.gbps * 1e3 * links)


def sizes(problem: Problem, machine: Machine) -> Sizes:
    """The sizes that features are made of."""
    most = max(problem.b_sizes, default=0)
    columns, inner = problem.columns(0), problem.inner(0)
    if problem.op in REDUCTIONS:
        inner = max(inner, most)
    else:
        columns = max(columns, most)
    return Sizes(problem, machine, problem.product_rows(0), columns, inner, problem.shard_bytes)


FEATURES: dict[Feature, Callable[[Sizes], float]] = {
    "world_size": lambda s: s.problem.world_size,
    "shard_rows": lambda s: s.problem.m / s.problem.world_size,
    "m_over_k": lambda s: s.problem.m / s.problem.k,
    "op_to_byte": lambda s: s.flops / s.traffic_bytes,
    "traffic_mib": lambda s: s.traffic_bytes / _MIB,
    "sent_mib": lambda s: s.sent_bytes / _MIB,
    "balance": lambda s: s.flops / (s.machine.tflops(s.problem.dtype) * 1e6) / s.sent_us,
    "copies_hidden": lambda s: s.shard_us / s.machine.copies.copy_us,
    "waves": lambda s: s.rows * s.cols / _TILE / s.machine.gpu.sms,
}
"""See the module's text. For problems on two ranks or more with a result that is not empty."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """spec: as `schedule=` takes it; without a count, world_size chunks. problems: of the fit that came here. loss: by which
    they are slower than the best schedule known for each, on average."""

    spec: str
    problems: int
    loss: float

    def __post_init__(self) -> None:
        parse(self.spec)


@dataclass(frozen=True, kw_only=True)
class Split:
    """then: where the feature is at least the threshold."""

    TAGGED: ClassVar[bool] = True
    feature: Feature
    at_least: float
    then: Split | Leaf
    otherwise: Split | Leaf


@dataclass(frozen=True, kw_only=True)
class Rules:
    """A tree for each operator. source: which times they were fitted to."""

    source: str
    trees: Mapping[str, Split | Leaf]


@functools.cache
def rules(topology: Topology) -> Rules:
    """The shipped rules for a kind of topology."""
    return codec.read(Rules, _FOLDER / f"{_FILES[topology]}.json")


def heuristic(problem: Problem, machine: Machine) -> str:
    """The schedule that static sizes speak for, as `schedule=` takes it. Sequential where there is nothing to overlap, for a
    collective by itself, and where an operator without a tree of its own lacks what its like has.

    Raises ValueError if the machine has fewer GPUs than the problem, or no rate for its dtype.
    """
    machine.require(problem.world_size)
    if problem.op in COLLECTIVE_OPS:
        return "sequential"
    machine.tflops(problem.dtype)
    if problem.world_size == 1 or not problem.m or not problem.n:
        return "sequential"
    tree = rules(machine.links.topology).trees[_LIKE.get(problem.op, problem.op)]
    name, chunks = parse(decide(tree, sizes(problem, machine)).spec)
    return spec(name, chunks or problem.world_size) if problem.op in FAMILIES[name].builders else "sequential"


def decide(tree: Split | Leaf, found: Sizes) -> Leaf:
    """Walk a tree."""
    while isinstance(tree, Split):
        tree = tree.then if FEATURES[tree.feature](found) >= tree.at_least else tree.otherwise
    return tree


def table(tree: Split | Leaf) -> str:
    """A tree as text: a line for each leaf and threshold, in the order in which they are tried."""
    return "\n".join(_lines(tree, ""))


def _lines(tree: Split | Leaf, indent: str) -> list[str]:
    if isinstance(tree, Leaf):
        return [f"{indent}{tree.spec}  ({tree.problems} problems, {tree.loss:.1%} from the best)"]
    condition = f"{indent}{tree.feature} >= {tree.at_least:g}"
    return [condition, *_lines(tree.then, indent + "    "), f"{indent}else", *_lines(tree.otherwise, indent + "    ")]
