"""The Study of DLRM at scale: a training iteration, fused and unfused, on all node counts and topologies of a DlrmSystem.

Contract: `run(system)` is a pure function: the same system gives the same DlrmStudy, to the nanosecond. It takes about ten
seconds.

The published figures are those of arXiv 2305.06942 (fused computation-collective operations). No number of the DlrmSystem was
set for a single node count or configuration. For 128 nodes, 17 % to 25 % is accepted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from weft.core.span import Span
from weft_studies.dlrm import iteration, kernels
from weft_studies.dlrm.fabric import Torus, fabric
from weft_studies.dlrm.iteration import IterationRun, operator_ns
from weft_studies.dlrm.kernels import NodeLookups, bags
from weft_studies.dlrm.system import DlrmSystem, Topology, load
from weft_studies.figures import Evidence, Figure, Row
from weft_studies.profile import Progress, changed_by
from weft_studies.study import Chart, ColumnChart, Study, StudyTable, TimelineChart

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


ITERATION = f"training iteration on {PUBLISHED[1]} nodes, time saved"
MEAN = "embedding and all-to-all on two nodes, time saved, mean"
SEEN = Evidence(
    label="calibrated",
    because="The assumed numbers were chosen with these three figures in view.",
)


def figures(study: DlrmStudy) -> tuple[Figure, ...]:
    """Return the published figures, each with the study's value."""
    return published(study.system, study.saved, study.operators)


def published(system: DlrmSystem, iteration: float, operators: Sequence[Operator]) -> tuple[Figure, ...]:
    """Return the figures. `iteration` is the share that fusing saves of the published iteration.

    The published sweep is over batches and tables. It does not say how many rows are pooled, so its mean is compared with ours
    at the model's pooling, and its maximum with ours over all poolings.
    """
    same = [one.saved for one in operators if one.pooling == system.model.pooling]
    most = max(one.saved for one in operators)
    return (
        SEEN.percent(ITERATION, 0.21, iteration, 0.04),
        SEEN.percent(MEAN, 0.31, sum(same) / len(same), 0.05),
        SEEN.percent("embedding and all-to-all on two nodes, time saved, max", 0.58, most, 0.08),
    )


PARTS = {
    "lookup": ("lookup",),
    "wait for pooled rows": ("wait for pooled rows",),
    "MLPs and their steps": ("bottom", "top"),
    "interaction": ("interaction",),
    "repack": ("repack",),
    "sort": ("sort",),
    "wait for gradients": ("wait for gradients",),
    "wait for the MLPs' gradients": ("wait for bottom", "wait for top"),
    "update of the tables": ("update",),
}
"""The parts of an iteration, each with the prefixes of its spans' names."""


def facts(system: DlrmSystem) -> list[tuple[str, str]]:
    """Return a summary of the system."""
    model = system.model
    return [
        ("System", system.words),
        ("Model", f"{model.tables} tables of {model.rows} x {model.dim}, {model.pooling} rows a bag"),
        ("Batch", f"{system.batch} samples a node"),
        ("Memory", f"{system.gpu.hbm_gbps:g} GB/s, of which gathering reaches {system.gpu.gather_share:g}"),
        ("Link", f"{system.link.gbps:g} GB/s, {system.link.latency_ns} ns"),
    ]


def parts(run: IterationRun) -> dict[str, float]:
    """Return the time of each part of an iteration in milliseconds. The parts add up to the iteration."""
    found = [span for span in run.spans if span.lane == "compute"]
    return {
        name: sum(span.duration_us for span in found if span.name.startswith(starts)) / 1e3 for name, starts in PARTS.items()
    }


def tables(done: DlrmStudy) -> tuple[StudyTable, ...]:
    """Return the tables of node counts, the published iteration by its parts, gains, two nodes, and slices."""
    topology, nodes = PUBLISHED
    ran = (done.unfused, done.in_place, done.fused)
    split = [parts(run) for run in ran]
    rows = [(name, *(f"{times[name]:.2f}" for times in split)) for name in PARTS]
    whole = ("iteration", *(f"{run.ns / 1e6:.2f}" for run in ran))
    sliced = [(str(each.slices), f"{each.ns / 1e6:.2f}") for each in done.sliced]
    return (
        StudyTable(
            name="nodes",
            title="Iterations by topology and number of nodes",
            rows=cases_table(done.cases),
            note=_describe_cuts(done.system, max(case.nodes for case in done.cases)),
        ),
        StudyTable(
            name="iteration",
            title=f"An iteration on {nodes} nodes, {topology}: {100 * done.saved:.1f} % saved",
            rows=[("the GPU's time, ms", "unfused", "in place", "fused"), *rows, whole],
        ),
        StudyTable(name="gains", title="Where the gain is from", rows=_gains(done)),
        StudyTable(
            name="two_nodes", title="Embedding and all-to-all on two nodes, time saved", rows=_operators(done.operators)
        ),
        StudyTable(name="slices", title="Slices of the published case", rows=[("slices for each peer", "fused ms"), *sliced]),
    )


def _describe_cuts(system: DlrmSystem, nodes: int) -> str:
    """Return the reason why iterations take longer with more nodes than tables. Empty if no case has more."""
    width = bags(system, nodes).width
    if nodes <= system.model.tables:
        return ""
    return (
        f"With more than {system.model.tables} nodes a table is cut by columns, and every cut needs all indices: twice as many "
        f"nodes look up and sort twice as many rows each. On {nodes} nodes a row has {width * system.itemsize} bytes; each "
        f"row costs at least one burst of memory, {system.gpu.burst_bytes} bytes."
    )


def _gains(done: DlrmStudy) -> list[Row]:
    """Return the time that storing rows in place saves in the published iteration, and what overlap saves in addition."""
    whole = done.unfused.ns
    saved = {
        "pooled rows stored in place, not repacked": whole - done.in_place.ns,
        "lookup and exchange overlapped": done.in_place.ns - done.fused.ns,
        "both": whole - done.fused.ns,
    }
    rows = [(name, f"{ns / 1e6:.2f}", f"{100 * ns / whole:.1f} %") for name, ns in saved.items()]
    return [("gain", "ms", "of the unfused time"), *rows]


def cases_table(cases: Iterable[Case]) -> list[Row]:
    """Return the times of iterations by topology and number of nodes."""
    heads = ("topology", "nodes", "axes", "unfused ms", "of it waits", "fused ms", "of it waits", "saved")
    return [heads, *map(_case, cases)]


def _case(case: Case) -> Row:
    times = (case.unfused_ns, case.unfused_waits_ns, case.fused_ns, case.fused_waits_ns)
    axes = " x ".join(map(str, case.axes))
    return (case.topology, str(case.nodes), axes, *(f"{ns / 1e6:.1f}" for ns in times), f"{100 * case.saved:.1f} %")


def _operators(operators: Sequence[Operator]) -> list[Row]:
    """Return the share that fusing saves on two nodes, by pooling: for the least work, for the most, and the mean."""
    rows = []
    for pooling, found in itertools.groupby(sorted(operators, key=lambda o: o.pooling), key=lambda o: o.pooling):
        same = sorted(found, key=lambda o: o.batch * o.tables)
        mean = sum(o.saved for o in same) / len(same)
        rows.append((str(pooling), *(f"{100 * saved:.1f} %" for saved in (same[0].saved, same[-1].saved, mean))))
    least, most = (f(operators, key=lambda o: o.batch * o.tables) for f in (min, max))
    heads = (f"batch {o.batch}, {o.tables} tables" for o in (least, most))
    return [("rows pooled", *heads, "mean of all"), *rows]


def charts(done: DlrmStudy) -> tuple[Chart, ...]:
    """Return charts of an iteration's parts, a node's timelines, and the time saved by node count."""
    runs = (done.unfused, done.fused)
    split = [parts(run) for run in runs]
    return (
        ColumnChart(
            name="iteration",
            title="An iteration's parts, unfused and fused",
            places=[run.method for run in runs],
            series={part: [100 * times[part] * 1e6 / done.unfused.ns for times in split] for part in PARTS},
            unit="% of unfused",
            stacked=True,
        ),
        *(TimelineChart(name=f"timeline-{run.method}", title=f"A node, {run.method}", spans=run.spans) for run in runs),
        ColumnChart(
            name="cases",
            title="Time saved by number of nodes and topology",
            places=[f"{nodes} nodes" for nodes in dict.fromkeys(case.nodes for case in done.cases)],
            series={t: [100 * case.saved for case in done.cases if case.topology == t] for t in done.system.topologies},
            unit="% saved",
        ),
    )


def spans(done: DlrmStudy) -> dict[str, tuple[Span, ...]]:
    """Return the spans of the published iteration on one node, which represents all."""
    return {f"{PUBLISHED[0]} of {PUBLISHED[1]}, {run.method}": run.spans for run in (done.unfused, done.fused)}


def sample(system: DlrmSystem) -> tuple[Figure, ...]:
    """Return all figures of a system."""
    return published(system, case(system, *PUBLISHED).saved, tuple(two_nodes(system)))


STUDY = Study(
    name="dlrm",
    title="DLRM at scale",
    paper="2305.06942",
    example="nodes=128",
    load=load,
    apply_settings=changed_by,
    facts=facts,
    run=lambda system, progress: run(system, progress),
    figures=figures,
    tables=tables,
    charts=charts,
    spans=spans,
    sample=sample,
    headlines={ITERATION: "percent", MEAN: "percent"},
)
