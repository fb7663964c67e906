"""Places for charts on the page, each with its text: what the chart shows, for those who do not see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.core.span import Span, total_us
from weft.report.charts import FAINT, SHOWN_RANKS, Figure, lanes_of, timeline
from weft.report.html import Html, join, table, tag
from weft.report.words import count, percent, us

Charts = dict[str, Figure]


def chart_panel(name: str, words: str) -> Html:
    """An empty place that the page's script draws charts[name] into, which scrolls by itself where the window is narrow: Plotly
    lays labels, marks and legend over each other there. words: its text for screen readers."""
    return tag("div", tag("div", id=name, class_="chart", role="img", aria_label=words), class_="scrolls")


def timeline_panel(name: str, title: str, spans: Sequence[Span], marks: Mapping[str, float], charts: Charts) -> Html:
    """A call's timeline under a heading, with a button for all its ranks and the same as numbers."""
    heading = tag("h3", title)
    if not spans:
        return tag("article", heading, tag("p", "No spans were recorded."))
    charts[name] = timeline(spans, marks)
    ranks = len({s.rank for s in spans})
    words = f"Timeline of {title}: {count(len(spans), 'step')} on {count(ranks, 'rank')} in {us(total_us(spans))} µs"
    parts = [chart_panel(name, words), _button(name, ranks), _busy(spans)]
    return tag("article", heading, *parts)


def _button(name: str, ranks: int) -> Html:
    if ranks <= SHOWN_RANKS:
        return Html("")
    few, every = f"Show {SHOWN_RANKS} ranks", f"Show all {ranks} ranks"
    return tag("button", every, type="button", data_chart=name, data_other=few)


def _busy(spans: Sequence[Span]) -> Html:
    """How long each lane worked and waited. Steps of a lane come one after the other, so their durations add up."""
    whole = total_us(spans)
    by_lane: dict[tuple[int, str], list[Span]] = {lane: [] for lane in lanes_of(spans)}
    for span in spans:
        by_lane[span.rank, span.lane].append(span)
    rows = []
    for (rank, lane), items in by_lane.items():
        busy = sum(s.duration_us for s in items if s.kind not in FAINT)
        waiting = sum(s.duration_us for s in items if s.kind == "wait")
        rows.append((f"rank {rank} {lane}", str(len(items)), us(busy), us(waiting), percent(busy / whole if whole else 0.0)))
    heads = ("lane", "steps", "busy µs", "waiting µs", "busy")
    return tag("details", tag("summary", "Lanes in numbers"), join([table(f"Of {us(whole)} µs", heads, rows)]))
