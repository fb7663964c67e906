"""This module simulates a DLRM's training iteration, fused and unfused, on all node counts and topologies of a DlrmSystem.

Contract: `run(system)` is a pure function: the same system gives the same DlrmStudy, to the nanosecond. It takes about ten
seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft_studies.dlrm import iteration, kernels
from weft_studies.dlrm.fabrics import fabric
from weft_studies.dlrm.iteration import IterationRun, operator_ns
from weft_studies.dlrm.kernels import NodeLookups
from weft_studies.dlrm.system import DlrmSystem, Topology
from weft_studies.fabric import Torus
from weft_studies.profile import Progress

PUBLISHED: tuple[Topology, int] = ("torus_2d", 128)
"""The topology and the number of nodes of the published result."""
SLICES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ENDS: tuple[iteration.Method, ...] = ("unfused", "fused")


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times has the unfused and the fused time in nanoseconds."""

    unfused_ns: int
    fused_ns: int

    @property
    def saved(self) -> float:
        """The saved time, as a share of the unfused time."""
        return 1 - self.fused_ns / self.unfused_ns


@dataclass(frozen=True, kw_only=True)
class Case(Times):
    """Case has the times of an iteration. `axes` are those of the fabric. The waits are the times in which the GPU is idle."""

    topology: Topology
    nodes: int
    axes: tuple[int, ...]
    unfused_waits_ns: int
    fused_waits_ns: int


@dataclass(frozen=True, kw_only=True)
class Operator(Times):
    """Operator has the times of embedding and all-to-all alone on two nodes.

    batch: the samples of both nodes. tables: the tables of each node."""

    batch: int
    tables: int
    pooling: int


@dataclass(frozen=True, kw_only=True)
class SliceResult:
    """SliceResult is the time of the published case with another number of slices."""

    slices: int
    ns: int


@dataclass(frozen=True, kw_only=True)
class DlrmStudy:
    """DlrmStudy has all results. `unfused`, `in_place` and `fused` are the runs of the published case."""

    system: DlrmSystem
    unfused: IterationRun
    in_place: IterationRun
    fused: IterationRun
    cases: tuple[Case, ...]
    operators: tuple[Operator, ...]
    sliced: tuple[SliceResult, ...]

    @property
    def saved(self) -> float:
        """The share of an iteration's time that fusing saves in the published case."""
        return 1 - self.fused.ns / self.unfused.ns


def run(system: DlrmSystem, progress: Progress = lambda text, done, total: None) -> DlrmStudy:
    """Simulate the whole study. progress: called with the next item, the items done and the total.

    Before it simulates anything, it raises ValueError if a topology cannot have a number of nodes, or if the tables have fewer
    columns than nodes.
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
    """Simulate iterations with each of these methods."""
    made = fabric(system, topology, nodes)
    return tuple(iteration.run(system, made, method) for method in methods)


def case(system: DlrmSystem, topology: Topology, nodes: int) -> Case:
    """Simulate iterations, unfused and fused, and return their times only."""
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
    """Simulate the operator alone, in all combinations of the system's `pair` and the pooling of its model."""
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
