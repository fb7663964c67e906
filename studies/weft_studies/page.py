"""Writes the page of a simulated evaluation, which shows the published figures next to ours, with all numbers as text.

The page says how many predicted figures are within tolerance. Then it shows all published numbers with ours, the study's charts
and tables, the results of the sweeps, and the source of each number of the system.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.report.charts import Charts, chart_panel, timeline_panel
from weft.report.charts import Figure as Drawn
from weft.report.page import document, facts_list, write_page
from weft.report.tables import Column, Html, ReportTable, table, tag
from weft_studies.figures import Figure, Unit
from weft_studies.study import Chart, Done, PointChart, StudyTable, TimelineChart, tables, words

COLOURS = ("#8c8c8c", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999933")
"""Colours that people with colour blindness can distinguish (Okabe and Ito; the last: Tol)."""
FIRST = ("figures", "labels")
"""The tables that are shown before the study's own tables."""
SWEPT = ("sensitivity", "joint")


def write_study(done: Done, folder: Path) -> Path:
    """Write `folder`/index.html, and return its path. Raises ValueError if it cannot be written."""
    return write_page(study_page(done), folder)


def study_page(done: Done) -> str:
    """Return the page as HTML."""
    charts: Charts = {}
    found = {each.name: each for each in tables(done)}
    own = [each for name, each in found.items() if name not in (*FIRST, *SWEPT, "system")]
    swept = [_titled(found[name]) for name in SWEPT if name in found]
    title = f"{done.study.title}, simulated"
    paper = ("Paper", f"arXiv {done.study.paper}")
    verdict = [tag("p", sentence) for sentence in words(done)]
    sections = [
        tag("header", tag("h1", title), *verdict, facts_list([paper, *done.study.facts(done.system)])),
        _section("Published and simulated", *_published(done.figures, charts), *(_listed(found[name]) for name in FIRST)),
        *(_drawn(each, charts) for each in done.study.charts(done.result)),
        *(_titled(each) for each in own),
        *swept,
        _sources(found["system"], done.system.sources),
    ]
    return document(title, sections, charts)


def _section(title: str, *children: Html) -> Html:
    return tag("section", tag("h2", title), *children)


def _titled(each: StudyTable) -> Html:
    return _section(each.title, _listed(each), *_noted(each))


def _noted(each: StudyTable) -> list[Html]:
    return [tag("p", each.note)] if each.note else []


def _listed(each: StudyTable) -> Html:
    return table(each.table)


def _sources(system: StudyTable, sources: Mapping[str, str]) -> Html:
    """Return a footer with each number of the system and its source."""
    columns = (Column("number", words=True), Column("value"), Column("from", words=True))
    rows = [(path, value, sources[path]) for path, value in system.rows[1:]]
    listed = ReportTable(title="Each number of the system", columns=columns, rows=rows)
    return tag("footer", tag("h2", "Sources"), table(listed))


def _published(found: Sequence[Figure], charts: Charts) -> list[Html]:
    """Chart the published figures next to ours. Shares are in charts["published"], and ratios in charts["ratios"]."""
    units: dict[Unit, tuple[str, int, str]] = {"percent": ("published", 100, "%"), "ratio": ("ratios", 1, "times")}
    panels = []
    for unit, (chart, scale, label) in units.items():
        drawn = [figure for figure in found if figure.unit == unit]
        if drawn:
            values = {"published": [f.published for f in drawn], "ours": [f.ours for f in drawn]}
            series = {name: [scale * value for value in row] for name, row in values.items()}
            charts[chart] = columns([f.name for f in drawn], series, label)
            panels.append(chart_panel(chart, "Columns: published figures and ours; the table has the numbers"))
    return panels


def _drawn(each: Chart, charts: Charts) -> Html:
    """Return a chart's section, and add the chart to charts[name]."""
    if isinstance(each, TimelineChart):
        return tag("section", timeline_panel(each.name, each.title, each.spans, {}, charts))
    if isinstance(each, PointChart):
        charts[each.name] = _points(each.panels)
        return _section(each.title, chart_panel(each.name, f"Points: {each.title}; the tables have the numbers"))
    charts[each.name] = columns(each.places, each.series, each.unit, stacked=each.stacked)
    return _section(each.title, chart_panel(each.name, f"Columns: {each.title}; the tables have the numbers"))


def columns(places: Sequence[str], series: Mapping[str, Sequence[float]], unit: str, *, stacked: bool = False) -> Drawn:
    """Return a figure with a column for each series at each place, side by side or stacked. unit: the unit of the values."""
    data = [
        {
            "type": "bar",
            "name": name,
            "x": list(places),
            "y": [round(value, 4) for value in values],
            "marker": {"color": colour},
            "hovertemplate": f"{name} %{{y:.4g}} {unit}<extra>%{{x}}</extra>",
        }
        for (name, values), colour in zip(series.items(), COLOURS, strict=False)
    ]
    layout = {
        "height": 480,
        "barmode": "stack" if stacked else "group",
        "margin": {"l": 56, "r": 16, "t": 16, "b": 16},
        "xaxis": {"automargin": True, "tickangle": -45},
        "yaxis": {"title": {"text": unit}, "gridcolor": "rgba(128, 128, 128, 0.3)", "rangemode": "tozero"},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    }
    return {"data": data, "layout": layout, "all": None}


def _points(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> Drawn:
    """Return a figure with panels side by side. Horizontal axes are logarithmic, and each series has a colour."""
    width = 1 / len(panels)
    data: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    for place, (axis, series) in enumerate(panels.items()):
        number = str(place + 1) if place else ""
        domain = [place * width, (place + 1) * width - 0.04]
        axes[f"xaxis{number}"] = {"type": "log", "title": {"text": axis}, "domain": domain, "anchor": f"y{number}"}
        axes[f"yaxis{number}"] = {"anchor": f"x{number}", "gridcolor": "rgba(128, 128, 128, 0.3)"}
        data += [
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "legendgroup": name,
                "showlegend": not number,
                "x": [float(f"{x:.4g}") for x, _ in points],
                "y": [round(y, 4) for _, y in points],
                "xaxis": f"x{number}",
                "yaxis": f"y{number}",
                "marker": {"color": colour, "size": 8},
                "hovertemplate": f"{name} %{{y:.3g}}<extra></extra>",
            }
            for (name, points), colour in zip(series.items(), COLOURS[1:], strict=False)
        ]
    layout = {"height": 360, "margin": {"l": 40, "r": 16, "t": 16, "b": 48}, "legend": {"orientation": "h", "y": 1.1}}
    return {"data": data, "layout": layout | axes, "all": None}
