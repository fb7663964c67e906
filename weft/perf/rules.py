"""The heuristic: from static sizes alone to a schedule, in some microseconds and without simulation.

Contract: `heuristic` is a pure function, total over problems that the machine has GPUs and a rate for, and what it names is
a schedule of the operator. It takes the schedule with the least estimate. An estimate is a sum of a few times, which are read
off sizes and the machine's profile, each with a weight of the schedule's (in us; G its matmuls, one after the other, C what it
sends, both in the pieces that it has them in, alone: weft.perf.pieces):

    longer    max(G, C)
    shorter   min(G, C)                                       hidden, but for the share that its weight says
    shards    the matmul in world_size pieces of rows, less the matmul whole: waves that gates or counts make ragged
    result    the product through the memory, once            sums, staging, what is added
    operand   a through the memory, once
    copies    a copy's fixed cost for each peer
    launches  a kernel's launch

So head, tail, losses and fixed costs are weights that hold on other sizes and, as far as its profile says, on other machines.
They are data (`decisions/*.json`, one file a kind of topology), fitted to measured and simulated times by
`benchmarks/fit_heuristic.py`; docs/planner.md prints them. Whole sizes are those of the rank with most work: its matmul is
rows x cols x inner.

FiCCO (arXiv 2512.10236) chooses by the GEMM's op-to-byte ratio, its memory traffic, and M against K, held against thresholds.
These and others are `FEATURES`, which losses are held against (weft.planner.signature); `sent_bytes` is what a rank sends:

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from weft.core import codec
from weft.core.errors import require
from weft.core.machine import Machine, Topology
from weft.core.problem import COLLECTIVE_OPS, LOOKUP_OPS, REDUCTIONS, DType, Op, Problem
from weft.perf.pieces import CUT, Pieces
from weft.schedules import FAMILIES, check_op, parse, spec

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
TERMS = ("longer", "shorter", "shards", "result", "operand", "copies", "launches")
"""The times of an estimate, in the order of its weights."""
MARGIN = 0.01
"""An overlap must be estimated to take less than the sequential program by more than this, as in a trial."""
_MIB = 1 << 20
_TILE = 128 * 256
_FOLDER = Path(__file__).with_name("decisions")
_FILES: dict[Topology, str] = {"switch": "switch", "pcie": "switch", "ring": "ring", "mesh": "mesh"}
"""A host's shared bridge is nearest to a switch: any pair, through ports that all traffic shares."""
_LIKE: dict[Op, Op] = {
    "matmul_all_to_all_columns": "matmul_all_to_all",
    "all_to_all_columns_matmul": "all_to_all_matmul",
}
"""Operators without weights of their own, and whose they take: as much is multiplied, and as much sent."""


_Row = tuple[str, tuple[str, int] | None, tuple[float, ...], float]
"""A spec, its family and count if that cuts matmuls, its weights but for the last two, and what these come to, in us."""


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


class Times:
    """What estimates of a problem are made of, in us. For problems as FEATURES are."""

    __slots__ = ("others", "pieces", "whole")
    pieces: Pieces | None

    def __init__(self, problem: Problem, machine: Machine) -> None:
        found, size = sizes(problem, machine), problem.world_size
        _, _, rows, cols, inner, _ = found
        memory, sent_us, shards_us = machine.gpu.hbm_gbps * 1e3 / problem.itemsize, found.sent_us, 0.0
        result_us = rows * cols / memory
        if problem.op in LOOKUP_OPS:
            self.pieces, whole_us = None, result_us * problem.k
        else:
            self.pieces = pieces = Pieces(problem, machine, rows=rows, cols=cols, inner=inner, links_us=sent_us)
            whole_us = pieces.whole_us
            shards_us = max(0.0, size * pieces.shard_us - whole_us)
        self.whole = (max(whole_us, sent_us), min(whole_us, sent_us))
        self.others = (shards_us, result_us, rows * inner / memory, (size - 1) * machine.copies.copy_us, machine.launch_us)


def terms(problem: Problem, machine: Machine, name: str, chunks: int) -> tuple[float, ...]:
    """The times of one schedule's estimate, as TERMS names them, in us. For problems as FEATURES are."""
    times = Times(problem, machine)
    shards, *others = times.others
    if times.pieces is None or name not in CUT:
        return (*times.whole, shards, *others)
    return (*times.pieces.halves(name, chunks), 0.0, *others)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """How long a schedule takes: one weight for each of TERMS. spec: as `schedule=` takes it; without a count, world_size
    chunks. error: of the estimates, against the times that they were fitted to: the standard deviation of the logarithm.

    Raises ValueError for an unknown schedule, and for weights that are not as many as TERMS, or below zero.
    """

    spec: str
    weights: tuple[float, ...]
    error: float

    def __post_init__(self) -> None:
        parse(self.spec)
        if len(self.weights) != len(TERMS) or min(self.weights) < 0:
            raise ValueError(
                f"weights of {self.spec} are {self.weights}; give one of at least 0 for each of {', '.join(TERMS)}"
            )


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The range of the problems of one operator that the weights were fitted to: rank counts, dtypes, and the least and the
    greatest M, N and K."""

    world_sizes: tuple[int, ...]
    dtypes: tuple[DType, ...]
    m: tuple[int, int]
    n: tuple[int, int]
    k: tuple[int, int]

    def covers(self, problem: Problem) -> bool:
        """Whether a problem lies within. One whose b has shards of irregular sizes does not: there were none."""
        extents = ((self.m, problem.m), (self.n, problem.n), (self.k, problem.k))
        within = all(low <= extent <= high for (low, high), extent in extents)
        return within and problem.world_size in self.world_sizes and problem.dtype in self.dtypes and not problem.b_sizes


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """Weights of every schedule that the heuristic knows of an operator, simpler ones first. source: which times they were
    fitted to. measured_on: the profile of the machine whose measured times are among these; empty where all are simulated.
    fitted: the range of the problems, by operator. Raises ValueError for a schedule that the operator lacks."""

    source: str
    weights: Mapping[str, tuple[Weights, ...]]
    measured_on: str = ""
    fitted: Mapping[str, Fitted] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for op, rows in self.weights.items():
            for row in rows:
                check_op(parse(row.spec)[0], op)  # type: ignore[arg-type]

    @functools.cached_property
    def _known(self) -> dict[tuple[Op, int, float, float], tuple[_Row, ...]]:
        return {}

    def us(self, problem: Problem, machine: Machine) -> dict[str, float]:
        """Each schedule's estimate, in us."""
        times = Times(problem, machine)
        shards, result, operand, copies, launches = times.others
        whole, pieces, found = times.whole, times.pieces, {}
        for text, cut, (a, b, c, d, e), fixed in self._rows(problem.op, problem.world_size, copies, launches):
            longer, shorter = pieces.halves(*cut) if cut and pieces else whole
            found[text] = a * longer + b * shorter + c * shards + d * result + e * operand + fixed
        return found

    def _rows(self, op: Op, world_size: int, copies: float, launches: float) -> tuple[_Row, ...]:
        """Of schedules that the operator has. copies, launches: those of TERMS, which machine and ranks alone decide."""
        key = (op, world_size, copies, launches)
        known = self._known.get(key)
        if known is not None:
            return known
        found: list[_Row] = []
        for row in self.weights[_LIKE.get(op, op)]:
            name, chunks = parse(row.spec)
            if op in FAMILIES[name].builders:
                count = chunks or world_size
                cut = (name, count if FAMILIES[name].chunked else 1) if name in CUT else None
                *weights, of_copies, of_launches = row.weights
                found.append((spec(name, count), cut, tuple(weights), of_copies * copies + of_launches * launches))
        return self._known.setdefault(key, tuple(found))


@functools.cache
def estimates(topology: Topology) -> Estimates:
    """The shipped weights for a kind of topology."""
    return codec.read(Estimates, _FOLDER / f"{_FILES[topology]}.json")


def heuristic(problem: Problem, machine: Machine) -> str:
    """The schedule that static sizes speak for, as `schedule=` takes it. Sequential where there is nothing to overlap, for a
    collective by itself, between nodes, and where no overlap is estimated to be faster.

    Raises ValueError if the machine has fewer GPUs than the problem, or no rate for its dtype.
    """
    require(
        "machine", machine, Machine, "use a weft.Machine; weft.core.machine.load gives one by its name, once for many problems"
    )
    machine.require_for(problem)
    if problem.op in COLLECTIVE_OPS:
        return "sequential"
    machine.tflops(problem.dtype)
    if problem.world_size == 1 or not problem.m or not problem.n or problem.nodes:
        return "sequential"
    return choice(estimates(machine.links.topology).us(problem, machine))


def measured_for(problem: Problem, machine: Machine) -> bool:
    """Whether the heuristic's weights for a problem come from measurements of problems like it on this machine: the profile is
    the one that they were fitted with, and the operator's ranks, dtype and extents lie within the range of what was fitted."""
    found = estimates(machine.links.topology)
    known = found.fitted.get(problem.op)
    return machine.name == found.measured_on and not problem.nodes and known is not None and known.covers(problem)


def choice(us: Mapping[str, float]) -> str:
    """The spec with the least time, sequential unless another one takes less by MARGIN. us: by spec."""
    best = min(us, key=us.__getitem__)
    return best if us[best] < (1 - MARGIN) * us["sequential"] else "sequential"
