"""This module defines the Study of DLRM at scale, with its tables, charts and spans."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from weft.core.span import Span
from weft_studies.dlrm import study
from weft_studies.dlrm.iteration import IterationRun
from weft_studies.dlrm.kernels import bags
from weft_studies.dlrm.paper import ITERATION, MEAN, figures, published
from weft_studies.dlrm.study import PUBLISHED, Case, DlrmStudy, Operator
from weft_studies.dlrm.system import DlrmSystem, load
from weft_studies.profile import changed_by
from weft_studies.published import Figure, Row
from weft_studies.study import Chart, ColumnChart, Study, StudyTable, TimelineChart

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
    return published(system, study.case(system, *PUBLISHED).saved, tuple(study.two_nodes(system)))


STUDY = Study(
    name="dlrm",
    title="DLRM at scale",
    paper="2305.06942",
    example="nodes=128",
    load=load,
    apply_settings=changed_by,
    facts=facts,
    run=lambda system, progress: study.run(system, progress),
    figures=figures,
    tables=tables,
    charts=charts,
    spans=spans,
    sample=sample,
    headlines={ITERATION: "percent", MEAN: "percent"},
)
