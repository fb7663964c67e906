"""The page of a simulated DLRM at scale: the published figures redrawn beside ours, each with its numbers as text.

From the top: every published number and ours; an iteration of the published case, unfused against fused, as columns and as
timelines; all node counts and topologies; two nodes; slices; what the assumed numbers do; where each number is from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.report.html import Html, table, tag
from weft.report.page import document, facts_list, write_page
from weft.report.panels import Charts, chart_panel, timeline_panel
from weft.report.study import columns_chart, published_section, sources, verdict
from weft.studies.dlrm import tables
from weft.studies.dlrm.paper import figures
from weft.studies.dlrm.sensitivity import DlrmSensitivity
from weft.studies.dlrm.study import PUBLISHED, DlrmStudy
from weft.studies.published import Row


def write_dlrm_report(study: DlrmStudy, sensitivity: Sequence[DlrmSensitivity], folder: Path) -> Path:
    """Write `folder`/index.html; returns its path. Raises ValueError if it cannot be written."""
    return write_page(dlrm_page(study, sensitivity), folder)


def dlrm_page(study: DlrmStudy, sensitivity: Sequence[DlrmSensitivity]) -> str:
    """The whole page as text."""
    charts: Charts = {}
    found = figures(study)
    sections = [
        _header(study),
        published_section(found, "arXiv 2305.06942, and this simulation", charts),
        _iteration(study, charts),
        _cases(study, charts),
        _section("Embedding and all-to-all on two nodes, time saved", tables.operators_table(study.operators)),
        _section("Slices, published case", tables.sliced_table(study.sliced)),
    ]
    if sensitivity:
        sections.append(_section("What the assumed numbers do to the time saved", tables.sensitivity_table(sensitivity)))
    return document("DLRM at scale, simulated", [*sections, sources(study.system.sources)], charts)


def _header(study: DlrmStudy) -> Html:
    system, model = study.system, study.system.model
    facts = [
        ("System", system.words),
        ("Model", f"{model.tables} tables of {model.rows} x {model.dim}, {model.pooling} rows a bag"),
        ("Batch", f"{system.batch} samples a node"),
        ("Memory", f"{system.gpu.hbm_gbps:g} GB/s, of which gathering reaches {system.gpu.gather_share:g}"),
        ("Link", f"{system.link.gbps:g} GB/s, {system.link.latency_ns} ns"),
    ]
    return tag("header", tag("h1", "DLRM at scale, simulated ", verdict(figures(study))), facts_list(facts))


def _iteration(study: DlrmStudy, charts: Charts) -> Html:
    ways = (study.unfused, study.fused)
    split = [tables.parts(run) for run in ways]
    shares = {part: [100 * times[part] * 1e6 / study.unfused.ns for times in split] for part in tables.PARTS}
    charts["iteration"] = columns_chart([run.way for run in ways], shares, "% of unfused", stacked=True)
    topology, nodes = PUBLISHED
    return tag(
        "section",
        tag("h2", f"An iteration on {nodes} nodes, {topology}: {100 * study.saved:.1f} % saved"),
        chart_panel("iteration", "Columns: an iteration's parts, unfused and fused; the table has the numbers"),
        _listed("By its parts", tables.iteration_table(*ways)),
        *(timeline_panel(f"timeline-{run.way}", f"A node, {run.way}", run.spans, {}, charts) for run in ways),
    )


def _cases(study: DlrmStudy, charts: Charts) -> Html:
    nodes = dict.fromkeys(case.nodes for case in study.cases)
    saved: dict[str, list[float]] = {
        topology: [100 * case.saved for case in study.cases if case.topology == topology]
        for topology in study.system.topologies
    }
    charts["cases"] = columns_chart([f"{count} nodes" for count in nodes], saved, "% saved")
    panel = chart_panel("cases", "Columns: time saved by number of nodes and topology; the table has the numbers")
    return tag("section", tag("h2", "Nodes and topologies"), panel, _listed("Iterations", tables.cases_table(study.cases)))


def _section(title: str, rows: Sequence[Row]) -> Html:
    return tag("section", tag("h2", title), _listed(title, rows))


def _listed(caption: str, rows: Sequence[Row]) -> Html:
    return table(caption, rows[0], rows[1:])
