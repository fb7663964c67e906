"""Charts as Plotly figures (JSON data): bars of times, and timelines of spans; and the HTML elements that hold them.

Measured and predicted spans use the same `timeline`. A figure is {"data", "layout", "all"}. "all" has the changes of the layout
that show every rank, or is null. The page sets the colours of text and grid, because it knows whether it is light or dark.

Every string is escaped, because Plotly reads a subset of HTML in labels. Every element has a text for
screen readers.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, get_args

from weft.core.span import Kind, Span, total_us
from weft.planner.simulated import lane_uses, lanes_of
from weft.planner.words import count, us
from weft.report.tables import Html, join, lanes_table, table, tag

Figure = dict[str, Any]

# Okabe and Ito's colours, which people with colour blindness can distinguish. They differ in lightness on white and on black.
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
BAR_COLOURS: dict[str, str] = {"sequential": "#8c8c8c", "weft": "#0072b2", "ideal": "#009e73"}
FAINT = frozenset({"wait", "signal"})
SHOWN_RANKS = 2
LANE_PX, BAR_PX = 26, 24
TOP_PX, NAME_PX, BOTTOM_PX = 12, 16, 44


def bars(layers: Sequence[str], series: Mapping[str, Sequence[float]]) -> Figure:
    """Return bars of times grouped by layer. Times are in us. Series have names from BAR_COLOURS."""
    places = list(range(len(layers)))
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
            "hovertemplate": f"{name} %{{text}} us<extra></extra>",
        }
        for name, values in series.items()
    ]
    layout = _layout([_label(s) for s in layers], len(layers), BAR_PX * (len(series) + 1) * len(layers))
    return {"data": data, "layout": layout, "all": None}


def timeline(spans: Iterable[Span], marks: Mapping[str, float]) -> Figure:
    """Return spans by rank and lane over time, waits within steps as waits. All but the first ranks are hidden at first.

    marks: the times in us, by name, at which a line is drawn."""
    items = [piece for span in spans for piece in span.pieces()]
    lanes = lanes_of(items)
    first = set(sorted({rank for rank, _ in lanes})[:SHOWN_RANKS])
    shown = sum(rank in first for rank, _ in lanes)
    layout = _layout([_label(f"rank {rank} {lane}") for rank, lane in lanes], shown, LANE_PX * shown, marks)
    end = 1.02 * max((*marks.values(), *(s.end_us for s in items)), default=1.0)
    layout.update(barmode="overlay", shapes=[_line(x) for x in marks.values()], annotations=_names(marks, end))
    layout["xaxis"]["range"] = [0, end]
    every = {"range": [len(lanes) - 0.5, -0.5], "height": layout["height"] + LANE_PX * (len(lanes) - shown)}
    return {"data": _kind_traces(items, lanes, first), "layout": layout, "all": every if shown < len(lanes) else None}


def legend_of(figure: Figure) -> dict[str, str]:
    """Return the colour of each series or kind of span."""
    return {trace["name"]: trace["marker"]["color"] for trace in figure["data"]}


def _kind_traces(spans: Sequence[Span], lanes: Sequence[tuple[int, str]], first: set[int]) -> list[Figure]:
    """Return for each kind of span a trace of the first ranks, and a hidden trace of the others."""
    out: list[Figure] = []
    for early in (True, False):
        for kind in get_args(Kind):
            chosen = [s for s in spans if s.kind == kind and (s.rank in first) == early]
            if chosen:
                out.append(_kind_trace(kind, chosen, lanes) | {"visible": early})
    return out


def _kind_trace(kind: str, spans: Sequence[Span], lanes: Sequence[tuple[int, str]]) -> Figure:
    """Return one trace for all spans of a kind, because drawing a trace for each span would take minutes."""
    place = {lane: index for index, lane in enumerate(lanes)}
    faint = kind in FAINT
    colour = KIND_COLOURS[kind]
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "y": [place[s.rank, s.lane] for s in spans],
        "base": [round(s.start_us, 3) for s in spans],
        "x": [round(s.duration_us, 3) for s in spans],
        "width": 0.16 if faint else 0.72,
        "customdata": [f"{_label(s.name)}<br>{us(s.start_us)} to {us(s.end_us)} us" for s in spans],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": colour, "opacity": 0.55 if faint else 1, "line": _outline(kind)},
    }


def _outline(kind: str) -> Figure:
    """Return an outline that makes steps shorter than a pixel visible, and separates the parts of a matmul."""
    return {"color": "rgba(0, 0, 0, 0.35)", "width": 0.5} if kind == "gemm" else {"color": KIND_COLOURS[kind], "width": 1}


def _layout(labels: Sequence[str], shown: int, rows_px: int, marks: Collection[str] = ()) -> Figure:
    """Return a layout with a row for each label from the top, below a text line for each mark. Time runs to the right.

    The first `shown` rows are in view. Plotly's legend, which would cover a narrow chart, is off. See `legend_of`."""
    top = TOP_PX + NAME_PX * len(marks)
    rows = {"tickvals": list(range(len(labels))), "ticktext": list(labels), "range": [shown - 0.5, -0.5], "automargin": True}
    return {
        "height": top + rows_px + BOTTOM_PX,
        "margin": {"l": 8, "r": 12, "t": top, "b": BOTTOM_PX},
        "xaxis": {"title": {"text": "us", "standoff": 4}, "rangemode": "tozero", "zeroline": False},
        "yaxis": {**rows, "showgrid": False, "zeroline": False, "fixedrange": True},
        "bargap": 0.25,
        "showlegend": False,
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


def _names(marks: Mapping[str, float], end: float) -> list[Figure]:
    """Return the names of the marks above the rows. Each has its own text line and faces the middle, so they do not overlap."""
    place = {"yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False}
    return [
        {"text": name, "x": x, "xanchor": "right" if x > end / 2 else "left", "yshift": NAME_PX * row, **place}
        for row, (name, x) in enumerate(marks.items())
    ]


def _label(text: str) -> str:
    return html.escape(text, quote=False)


Charts = dict[str, Figure]


def chart_panel(name: str, words: str) -> Html:
    """Return an empty element into which the page's script draws charts[name]. words: its text for screen readers.

    In a narrow window it scrolls, because Plotly would lay its legend over the chart."""
    return tag("div", _place(name, words), class_="scrolls")


def _place(name: str, words: str) -> Html:
    return tag("div", id=name, class_="chart", role="img", aria_label=words)


def bars_panel(name: str, words: str, figure: Figure, charts: Charts) -> Html:
    """Return an element with a figure of bars below its legend. words: its text for screen readers."""
    charts[name] = figure
    return join([_legend(figure), _place(name, words)])


def _legend(figure: Figure) -> Html:
    entries = (tag("li", tag("i", style=f"background: {colour}"), name) for name, colour in legend_of(figure).items())
    return tag("ul", *entries, class_="legend")


def timeline_panel(
    name: str, title: str, spans: Sequence[Span], marks: Mapping[str, float], charts: Charts, *words_before: str
) -> Html:
    """Return a call's timeline below a heading and paragraphs, with a button that shows all ranks and a table of numbers."""
    heading = join([tag("h3", title), *(tag("p", text) for text in words_before)])
    if not spans:
        return tag("article", heading, tag("p", "No spans were recorded."))
    charts[name] = timeline(spans, marks)
    ranks = len({s.rank for s in spans})
    words = f"Timeline of {title}: {count(len(spans), 'step')} on {count(ranks, 'rank')} in {us(total_us(spans))} us"
    whole = total_us(spans)
    lanes = table(lanes_table(f"Of {us(whole)} us", lane_uses(spans), whole))
    numbers = tag("details", tag("summary", "Lanes in numbers"), lanes)
    return tag("article", heading, _legend(charts[name]), _place(name, words), _button(name, ranks), numbers)


def _button(name: str, ranks: int) -> Html:
    if ranks <= SHOWN_RANKS:
        return Html("")
    few, every = f"Show {SHOWN_RANKS} ranks", f"Show all {ranks} ranks"
    return tag("button", every, type="button", data_chart=name, data_other=few)
