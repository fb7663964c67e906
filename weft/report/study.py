"""What the pages of simulated evaluations share: published figures beside ours, columns of a chart, and sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.report.charts import Figure as Chart
from weft.report.html import Html, table, tag
from weft.report.panels import Charts, chart_panel
from weft.report.words import count
from weft.studies.published import Figure, Unit

COLOURS = ("#8c8c8c", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999933")
"""Told apart by people who do not see all colours (Okabe and Ito; the last: Tol)."""


def verdict(found: Sequence[Figure]) -> Html:
    """How many published figures are reproduced, as a badge."""
    good = sum(figure.ok for figure in found)
    words = f"{good} of {count(len(found), 'figure')} within tolerance"
    return tag("span", words, class_="verdict right" if good == len(found) else "verdict wrong")


def published_section(found: Sequence[Figure], caption: str, charts: Charts) -> Html:
    """Published figures and ours: as a table; those that are shares as charts["published"], ratios as charts["ratios"]."""
    panels = [_compared("published", "published shares and ours", "percent", found, charts)]
    if any(figure.unit == "ratio" for figure in found):
        panels.append(_compared("ratios", "published ratios and ours", "ratio", found, charts))
    rows = [(f.name, f.text(f.published), f.text(f.ours), f.text(f.tolerance), _verdict(good=f.ok)) for f in found]
    heads = ("figure", "published", "ours", "tolerance", "")
    return tag("section", tag("h2", "Published and simulated"), table(caption, heads, rows, words=(0, 4)), *panels)


def _compared(name: str, words: str, unit: Unit, found: Sequence[Figure], charts: Charts) -> Html:
    """Draw the figures of a unit as charts[name], published beside ours."""
    drawn = [figure for figure in found if figure.unit == unit]
    scale, label = (100, "%") if unit == "percent" else (1, "times")
    columns = {
        "published": [scale * figure.published for figure in drawn],
        "ours": [scale * figure.ours for figure in drawn],
    }
    charts[name] = columns_chart([figure.name for figure in drawn], columns, label)
    return chart_panel(name, f"Columns: {words}; the table has the numbers")


def _verdict(*, good: bool) -> Html:
    return tag("span", "within" if good else "missed", class_="right" if good else "wrong")


def sources(found: Mapping[str, str]) -> Html:
    """Where each number of a system is from."""
    rows = list(found.items())
    return tag("footer", tag("h2", "Sources"), table("Each number of the system", ("number", "from"), rows, words=(0, 1)))


def columns_chart(places: Sequence[str], series: Mapping[str, Sequence[float]], unit: str, *, stacked: bool = False) -> Chart:
    """Columns of every series at every place, side by side or stacked. unit: of the values."""
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
