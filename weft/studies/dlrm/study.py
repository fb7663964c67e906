"""Study: a DLRM's training iteration, fused and not, on every node count and topology of a DlrmSystem, as one value.

Contract: `run(system)` is a pure function: the same system gives the same DlrmStudy, to the nanosecond. It takes some ten
seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft.studies.dlrm import iteration, kernels
from weft.studies.dlrm.fabrics import fabric
from weft.studies.dlrm.iteration import IterationRun, operator_ns
from weft.studies.dlrm.kernels import NodeLookups
from weft.studies.dlrm.system import DlrmSystem, Topology
from weft.studies.fabric import Torus
from weft.studies.profile import Progress

PUBLISHED: tuple[Topology, int] = ("torus_2d", 128)
"""The case that was published."""
SLICES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ENDS: tuple[iteration.Method, ...] = ("unfused", "fused")


@dataclass(frozen=True, kw_only=True)
class Times:
    """Unfused and fused, in ns."""

    unfused_ns: int
    fused_ns: int

    @property
    def saved(self) -> float:
        """Share of the unfused time."""
        return 1 - self.fused_ns / self.unfused_ns


@dataclass(frozen=True, kw_only=True)
class Case(Times):
    """An iteration. axes: of the fabric. waits: how long the GPU had nothing to do."""

    topology: Topology
    nodes: int
    axes: tuple[int, ...]
    unfused_waits_ns: int
    fused_waits_ns: int


@dataclass(frozen=True, kw_only=True)
class Operator(Times):
    """Embedding and all-to-all alone on two nodes. batch: of both; tables: of each."""

    batch: int
    tables: int
    pooling: int


@dataclass(frozen=True, kw_only=True)
class SliceResult:
    """The published case with another number of slices."""

    slices: int
    ns: int


@dataclass(frozen=True, kw_only=True)
class DlrmStudy:
    """unfused, in_place, fused: the published case in full."""

    system: DlrmSystem
    unfused: IterationRun
    in_place: IterationRun
    fused: IterationRun
    cases: tuple[Case, ...]
    operators: tuple[Operator, ...]
    sliced: tuple[SliceResult, ...]

    @property
    def saved(self) -> float:
        """By fusing, of an iteration of the published case."""
        return 1 - self.fused.ns / self.unfused.ns


def run(system: DlrmSystem, progress: Progress = lambda text, done, total: None) -> DlrmStudy:
    """Simulate all of it. progress: called with what comes next, how much is done, and of how much.

    Raises ValueError where a topology has no fabric of so many nodes, or the tables no columns for them, before anything is
    simulated.
    """
    wanted = list(itertools.product(system.topologies, system.nodes))
    for topology, nodes in (PUBLISHED, *wanted):
        fabric(system, topology, nodes)
        kernels.require_columns(system, nodes)
    total = len(wanted) + 3
    cases = []
    for done, (topology, nodes) in enumerate(wanted):
        progress(f"{topology} of {nodes}", done, total)
        cases.append(case(system, topology, nodes))
    progress("the published case", total - 3, total)
    unfused, in_place, fused = runs(system, *PUBLISHED)
    progress("two nodes", total - 2, total)
    operators = tuple(two_nodes(system))
    progress("slices", total - 1, total)
    sliced = tuple(SliceResult(slices=slices, ns=_sliced_ns(system, slices)) for slices in SLICES)
    progress("done", total, total)
    return DlrmStudy(
        system=system,
        unfused=unfused,
        in_place=in_place,
        fused=fused,
        cases=tuple(cases),
        operators=operators,
        sliced=sliced,
    )


def runs(
    system: DlrmSystem, topology: Topology, nodes: int, methods: Sequence[iteration.Method] = iteration.METHODS
) -> tuple[IterationRun, ...]:
    """An iteration with each of these methods."""
    made = fabric(system, topology, nodes)
    return tuple(iteration.run(system, made, method) for method in methods)


def case(system: DlrmSystem, topology: Topology, nodes: int) -> Case:
    """The same, in short."""
    unfused, fused = runs(system, topology, nodes, ENDS)
    return Case(
        topology=topology,
        nodes=nodes,
        axes=fabric(system, topology, nodes).axes,
        unfused_ns=unfused.ns,
        fused_ns=fused.ns,
        unfused_waits_ns=unfused.waits_ns,
        fused_waits_ns=fused.waits_ns,
    )


def two_nodes(system: DlrmSystem) -> Iterator[Operator]:
    """The operator alone, in all of the DlrmSystem's combinations, and with as many rows pooled as in the model."""
    pair = system.pair
    link = Torus(dims=(2,), gbps=pair.gbps, latency_ns=system.link.latency_ns)
    poolings = sorted({*pair.poolings, system.model.pooling})
    for batch, tables, pooling in itertools.product(pair.batches, pair.tables, poolings):
        bags = NodeLookups(nodes=2, batch=batch, tables=tables, width=pair.dim, pooling=pooling)
        unfused, fused = (operator_ns(system, link, bags, method) for method in ENDS)
        yield Operator(batch=batch, tables=tables, pooling=pooling, unfused_ns=unfused, fused_ns=fused)


def _sliced_ns(system: DlrmSystem, slices: int) -> int:
    cut = replace(system, fused=replace(system.fused, slices=slices))
    return iteration.run(cut, fabric(cut, *PUBLISHED), "fused").ns
