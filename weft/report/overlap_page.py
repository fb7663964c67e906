"""Writes an overlap report as an HTML page with a row for each problem that a place has run, without scripts and charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.report.html import html_page, join, table, tag
from weft.report.places import ReportedCall, ReportedPlace
from weft.report.words import percent

_HEADS = ("place", "times", "verdict", "operator", "rows", "schedule", "time, us", "sequential, us", "of the ideal", "why")
_WORDS = (
    "Times were measured when a schedule was chosen, at the first call of a size; so was the sequential program. The ideal, "
    "the larger of the matmul alone and the collective alone, is predicted for this machine; 100 % hides one of the two wholly."
)


def page(model: str, headline: str, lead: str, places: Sequence[ReportedPlace]) -> str:
    """Return the page as HTML. lead: the sentence below the model's name."""
    rows = [row for place in places for row in _rows(place)]
    header = tag("header", tag("h1", model), tag("p", lead, class_="lead"))
    places_table = table("Places, and the problems that each has run", _HEADS, rows, words=(0, 2, 3, 5, 9))
    return html_page(headline, header, tag("section", tag("p", _WORDS), places_table))


def _rows(place: ReportedPlace) -> Iterator[tuple[str, ...]]:
    verdict = tag("span", place.verdict, class_="right" if place.overlapped else "wrong")
    said = "; ".join(filter(None, (place.layer.reason, "not called yet" if place.awaits_first_call else "")))
    yield place.layer.name, str(place.count), verdict, ", ".join(place.layer.operators), *[""] * 5, said
    for call in place.calls:
        yield "", "", "", *_cells(call)


def _cells(call: ReportedCall) -> tuple[str, ...]:
    """Return the cells of a call: operator, rows, schedule, time, sequential time with gain, share of the ideal, reason."""
    gain = f" ({call.sequential_us / call.measured_us:.2f}x)" if call.measured_us and call.sequential_us else ""
    share = (
        ""
        if call.share_of_ideal is None
        else join([tag("meter", value=f"{min(1.0, call.share_of_ideal):.2f}"), f" {percent(call.share_of_ideal)}"])
    )
    return call.op, f"{call.rows:,}", call.spec, _us(call.measured_us), _us(call.sequential_us) + gain, share, call.why


def _us(us: float | None) -> str:
    return "not measured" if us is None else f"{us:,.0f}" if us >= 100 else f"{us:.1f}"
