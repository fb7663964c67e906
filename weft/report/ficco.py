"""The page of a simulated FiCCO evaluation: the published figures beside ours, each with its numbers as text.

From the top: every published number and ours; speed-ups by scenario, on the mesh and behind a switch; decomposition and
contention losses against the static sizes that FiCCO holds them against; what the assumed numbers of the machine do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.planner.sizes import FEATURES, Feature, sizes
from weft.report.charts import Figure as Chart
from weft.report.html import Html, table, tag
from weft.report.page import document, facts_list, write_page
from weft.report.panels import Charts, chart_panel
from weft.report.study import COLOURS, columns_chart
from weft.report.words import count
from weft.studies.ficco.paper import figures
from weft.studies.ficco.sensitivity import FiccoSensitivity
from weft.studies.ficco.study import BESPOKE, FiccoStudy, Scenario
from weft.studies.ficco.tables import (
    LOSSES,
    SIZES,
    Row,
    choosers_table,
    correlations_table,
    figures_table,
    losses_table,
    machine_table,
    scenarios_table,
    sensitivity_table,
    topologies_table,
)

AXES: dict[Feature, str] = {"op_to_byte": "operations a byte", "traffic_mib": "memory traffic, MiB", "m_over_k": "M / K"}


def write_ficco_report(study: FiccoStudy, sensitivity: Sequence[FiccoSensitivity], folder: Path) -> Path:
    """Write `folder`/index.html; returns its path. Raises ValueError if it cannot be written."""
    return write_page(ficco_page(study, sensitivity), folder)


def ficco_page(study: FiccoStudy, sensitivity: Sequence[FiccoSensitivity]) -> str:
    """The whole page as text."""
    charts: Charts = {}
    sections = [
        _header(study),
        _section(
            "Published and simulated", _listed("FiCCO, arXiv 2512.10236, and this simulation", figures_table(study), (0, 4))
        ),
        _section("Choices", _listed("Of unseen scenarios, among sequential and FiCCO's four", choosers_table(study))),
        _speedups("Speed-up on the full mesh", "mesh", study.mesh, charts),
        _speedups("Speed-up behind a switch", "switch", study.switch, charts),
        _section("Mesh and switch", _listed("Geometric means and maxima", topologies_table(study), (0, 1, 2, 3))),
        _losses(study, charts),
        *(
            [_section("What the assumed numbers do", _listed("The headline", sensitivity_table(sensitivity)))]
            * bool(sensitivity)
        ),
        tag("footer", tag("h2", "Sources"), _listed("Each number of the machine", machine_table(study), (0, 2))),
    ]
    return document("FiCCO simulated", sections, charts)


def _header(study: FiccoStudy) -> Html:
    found = figures(study)
    good = sum(figure.ok for figure in found)
    verdict = f"{good} of {count(len(found), 'figure')} as accepted"
    badge = tag("span", verdict, class_="verdict right" if good == len(found) else "verdict wrong")
    machine = study.machine
    facts = [
        ("Machine", machine.words),
        ("Links", f"{machine.world_size - 1} of {machine.links.gbps:g} GB/s each way"),
        ("Unseen scenarios", str(len(study.unseen))),
    ]
    return tag("header", tag("h1", "FiCCO simulated ", badge), facts_list(facts))


def _section(title: str, *children: Html) -> Html:
    return tag("section", tag("h2", title), *children)


def _listed(caption: str, rows: Sequence[Row], words: Sequence[int] = (0,)) -> Html:
    return table(caption, rows[0], rows[1:], words=words)


def _speedups(title: str, name: str, found: Sequence[Scenario], charts: Charts) -> Html:
    columns = {
        "ideal": [one.ideal for one in found],
        "best of FiCCO's four": [one.speedup(one.bespoke) for one in found],
        "shard_p2p": [one.speedup("shard_p2p") for one in found],
        "flag_gated": [one.speedup("flag_gated") for one in found],
    }
    charts[name] = columns_chart([one.case.name for one in found], columns, "over sequential")
    listed = _listed("Halves alone, and speed-ups over sequential", scenarios_table(found), (0, 1, 10))
    return _section(title, chart_panel(name, f"Columns: {title}; the table has the numbers"), listed)


def _losses(study: FiccoStudy, charts: Charts) -> Html:
    panels = []
    for position, loss in enumerate(LOSSES):
        name = f"loss{position}"
        charts[name] = _loss_chart(study, loss)
        panels += [tag("h3", loss), chart_panel(name, f"Points: {loss} against static sizes; the table has the numbers")]
    whole = _listed("DIL and CIL of each of FiCCO's four", losses_table(study))
    known = _listed("Rank correlations with static sizes", correlations_table(study), (0, 1))
    return _section("Losses against static sizes", *panels, known, whole)


def _loss_chart(study: FiccoStudy, loss: str) -> Chart:
    """One loss against each of SIZES, side by side, a colour for each of FiCCO's four."""
    width = 1 / len(SIZES)
    data: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    for place, size in enumerate(SIZES):
        number = str(place + 1) if place else ""
        domain = [place * width, (place + 1) * width - 0.04]
        axes[f"xaxis{number}"] = {"type": "log", "title": {"text": AXES[size]}, "domain": domain, "anchor": f"y{number}"}
        axes[f"yaxis{number}"] = {"anchor": f"x{number}", "gridcolor": "rgba(128, 128, 128, 0.3)"}
        data += [_points(study, loss, size, family, number) for family in BESPOKE]
    layout = {"height": 360, "margin": {"l": 40, "r": 16, "t": 16, "b": 48}, "legend": {"orientation": "h", "y": 1.1}}
    return {"data": data, "layout": layout | axes, "all": None}


def _points(study: FiccoStudy, loss: str, size: Feature, family: str, number: str) -> dict[str, Any]:
    some = [found for found in study.signatures if found.spec.partition(":")[0] == family]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": family,
        "legendgroup": family,
        "showlegend": not number,
        "x": [float(f"{FEATURES[size](sizes(found.problem, study.machine)):.4g}") for found in some],
        "y": [round(LOSSES[loss](found), 4) for found in some],
        "xaxis": f"x{number}",
        "yaxis": f"y{number}",
        "marker": {"color": COLOURS[1 + BESPOKE.index(family)], "size": 8},
        "hovertemplate": f"{family} %{{y:.3g}}<extra></extra>",
    }
