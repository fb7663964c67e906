"""Charts as plain Plotly figures (JSON data): bars of times, and timelines of spans.

Measured and predicted spans go through the same `timeline`. A figure is {"data", "layout", "all"}; "all" is what to change
to show every rank, or null. Colours of text and grid are left to the page, which knows whether it is light or dark.

Every string is escaped, since Plotly reads a subset of HTML in labels.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from weft.core.span import Kind, Span
from weft.report.words import us

Figure = dict[str, Any]

# Told apart by people who do not see all colours (Okabe and Ito's set), and by lightness on white and on black.
KIND_COLOURS: dict[str, str] = {
    "gemm": "#0072b2",
    "lookup": "#56b4e9",
    "copy": "#e69f00",
    "reduce": "#009e73",
    "collective": "#cc79a7",
    "message": "#f0e442",
    "call": "#000000",
    "wait": "#8c8c8c",
    "signal": "#d55e00",
}
BAR_COLOURS: dict[str, str] = {"sequential": "#8c8c8c", "overlapped": "#0072b2", "ideal": "#009e73"}
FAINT = frozenset({"wait", "signal"})
SHOWN_RANKS = 2
LANE_PX, BAR_PX = 26, 24
TOP_PX, BOTTOM_PX = 28, 84


def bars(sites: Sequence[str], series: Mapping[str, Sequence[float]]) -> Figure:
    """Times in microseconds, grouped by site; series are named as in BAR_COLOURS."""
    places = list(range(len(sites)))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": places,
            "x": list(values),
            "text": [us(v) for v in values],
            "textposition": "auto",
            "marker": {"color": BAR_COLOURS[name]},
            "hovertemplate": f"{name} %{{text}} µs<extra></extra>",
        }
        for name, values in series.items()
    ]
    layout = _layout([_label(s) for s in sites], len(sites), BAR_PX * (len(series) + 1) * len(sites))
    return {"data": data, "layout": layout, "all": None}


def timeline(spans: Iterable[Span], marks: Mapping[str, float]) -> Figure:
    """Spans by rank and lane over time; marks: named times to draw a line at. Ranks after the first few start hidden."""
    items = list(spans)
    lanes = lanes_of(items)
    first = set(sorted({rank for rank, _ in lanes})[:SHOWN_RANKS])
    shown = sum(rank in first for rank, _ in lanes)
    layout = _layout([_label(f"rank {rank} {lane}") for rank, lane in lanes], shown, LANE_PX * shown)
    layout.update(barmode="overlay", shapes=[_line(x) for x in marks.values()], annotations=_names(marks))
    layout["xaxis"]["range"] = [0, 1.02 * max((*marks.values(), *(s.end_us for s in items)), default=1.0)]
    every = {"range": [len(lanes) - 0.5, -0.5], "height": TOP_PX + LANE_PX * len(lanes) + BOTTOM_PX}
    return {"data": _kind_traces(items, lanes, first), "layout": layout, "all": every if shown < len(lanes) else None}


def lanes_of(spans: Iterable[Span]) -> list[tuple[int, str]]:
    """(rank, lane) of the spans, ranks in order; what computes first, then by name, with numbers in names by size."""
    return sorted({(s.rank, s.lane) for s in spans}, key=lambda key: (key[0], key[1] != "compute", _natural(key[1])))


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(digits or 0), words) for words, digits in re.findall(r"(\D*)(\d*)", text)]


def _kind_traces(spans: Sequence[Span], lanes: Sequence[tuple[int, str]], first: set[int]) -> list[Figure]:
    """A trace a kind for the first ranks and a hidden one for the others, with one entry in the legend for both."""
    out: list[Figure] = []
    for early in (True, False):
        for kind in get_args(Kind):
            chosen = [s for s in spans if s.kind == kind and (s.rank in first) == early]
            if chosen:
                listed = any(trace["name"] == kind for trace in out)
                out.append(_kind_trace(kind, chosen, lanes) | {"visible": early, "showlegend": not listed})
    return out


def _kind_trace(kind: str, spans: Sequence[Span], lanes: Sequence[tuple[int, str]]) -> Figure:
    """One trace for all spans of a kind: a trace for each span would take minutes to draw."""
    place = {lane: index for index, lane in enumerate(lanes)}
    faint = kind in FAINT
    colour = KIND_COLOURS[kind]
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "legendgroup": kind,
        "y": [place[s.rank, s.lane] for s in spans],
        "base": [round(s.start_us, 3) for s in spans],
        "x": [round(s.duration_us, 3) for s in spans],
        "width": 0.16 if faint else 0.72,
        "customdata": [f"{_label(s.name)}<br>{us(s.start_us)} to {us(s.end_us)} µs" for s in spans],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": colour, "opacity": 0.55 if faint else 1, "line": _outline(colour, faint=faint)},
    }


def _outline(colour: str, *, faint: bool) -> Figure:
    """Keeps in sight what is shorter than a pixel (a signal has no length at all), and neighbours apart."""
    return {"color": colour, "width": 1} if faint else {"color": "rgba(0, 0, 0, 0.35)", "width": 0.5}


def _layout(labels: Sequence[str], shown: int, rows_px: int) -> Figure:
    """Rows from the top, one a label, of which the first `shown` are in view; time to the right; the legend at the foot."""
    rows = {"tickvals": list(range(len(labels))), "ticktext": list(labels), "range": [shown - 0.5, -0.5], "automargin": True}
    return {
        "height": TOP_PX + rows_px + BOTTOM_PX,
        "margin": {"l": 8, "r": 64, "t": TOP_PX, "b": BOTTOM_PX},
        "xaxis": {"title": {"text": "µs", "standoff": 4}, "rangemode": "tozero", "zeroline": False},
        "yaxis": {**rows, "showgrid": False, "zeroline": False, "fixedrange": True},
        "bargap": 0.25,
        "legend": {"orientation": "h", "x": 0, "yref": "container", "y": 0, "yanchor": "bottom", "traceorder": "normal"},
        "hovermode": "closest",
    }


def _line(x: float) -> Figure:
    return {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "line": {"width": 1, "dash": "dot"},
    }


def _names(marks: Mapping[str, float]) -> list[Figure]:
    """The lines' names above the rows: the earliest left of its line and the others right, so that close ones do not meet."""
    place = {"yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False}
    ordered = sorted(marks.items(), key=lambda item: item[1])
    return [{"text": name, "x": x, "xanchor": "left" if i else "right", **place} for i, (name, x) in enumerate(ordered)]


def _label(text: str) -> str:
    return html.escape(text, quote=False)
