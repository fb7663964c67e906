"""This module returns the HTML elements that hold charts, each with a text for screen readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.core.span import Span, total_us
from weft.report.charts import FAINT, SHOWN_RANKS, Figure, lanes_of, legend_of, timeline
from weft.report.html import Html, join, table, tag
from weft.report.words import count, ms, percent

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
    words = f"Timeline of {title}: {count(len(spans), 'step')} on {count(ranks, 'rank')} in {ms(total_us(spans))} ms"
    parts = [_legend(charts[name]), _place(name, words), _button(name, ranks), _busy(spans)]
    return tag("article", heading, *parts)


def _button(name: str, ranks: int) -> Html:
    if ranks <= SHOWN_RANKS:
        return Html("")
    few, every = f"Show {SHOWN_RANKS} ranks", f"Show all {ranks} ranks"
    return tag("button", every, type="button", data_chart=name, data_other=few)


def _busy(spans: Sequence[Span]) -> Html:
    """Return a table of the times that each lane worked and waited. A lane runs one step at a time, so durations add up."""
    whole = total_us(spans)
    by_lane: dict[tuple[int, str], list[Span]] = {lane: [] for lane in lanes_of(spans)}
    for span in spans:
        by_lane[span.rank, span.lane].append(span)
    rows = []
    for (rank, lane), items in by_lane.items():
        busy = sum(s.duration_us for s in items if s.kind not in FAINT)
        waiting = sum(s.duration_us for s in items if s.kind == "wait")
        rows.append((f"rank {rank} {lane}", str(len(items)), ms(busy), ms(waiting), percent(busy / whole if whole else 0.0)))
    heads = ("lane", "steps", "busy ms", "waiting ms", "share busy")
    return tag("details", tag("summary", "Lanes in numbers"), join([table(f"Of {ms(whole)} ms", heads, rows)]))
