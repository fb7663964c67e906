"""Draws the spans of one rank: a line for each lane, time from left to right, a mark for each kind of step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from weft.core.span import Kind, Span
from weft.planner.words import ms, us

MARKS: dict[Kind, tuple[str, str]] = {
    "wait": (".", "dim"),
    "signal": ("!", "magenta"),
    "collective": ("~", "yellow"),
    "message": ("^", "yellow"),
    "copy": ("=", "cyan"),
    "reduce": ("+", "blue"),
    "gemm": ("#", "green"),
    "call": ("$", "green"),
    "lookup": ("%", "green"),
}
"""The mark and colour of each kind. Kinds that are listed later are drawn over earlier ones."""


def gantt(spans: Iterable[Span], *, rank: int, width: int, unit: str = "us") -> Text:
    """Draw the lanes of `rank` on `width` columns, with a scale below in us or ms, and a legend of the marks."""
    own = [span for span in spans if span.rank == rank]
    if not own:
        return Text("(no spans)")
    start, end = min(s.start_us for s in own), max(s.end_us for s in own)
    lanes = list(dict.fromkeys(span.lane for span in own))
    label = max(map(len, lanes)) + 2
    columns = max(10, width - label)
    text = Text(no_wrap=True, overflow="crop")
    for lane in lanes:
        text.append(f"{lane:<{label}}")
        text.append_text(_line([s for s in own if s.lane == lane], start, (end - start) or 1.0, columns)).append("\n")
    last = f"{us(end - start)} us" if unit == "us" else f"{ms(end - start)} ms"
    text.append(" " * label + "0" + last.rjust(columns - 1) + "\n", style="dim")
    used = [kind for kind in reversed(MARKS) if any(s.kind == kind for s in own)]
    legend = [*(f"{MARKS[kind][0]} {kind}" for kind in used), "| a step starts"]
    text.append("\n".join(_folded(legend, indent=label, width=label + columns)), style="dim")
    return text


def _folded(entries: Sequence[str], *, indent: int, width: int) -> list[str]:
    """Arrange entries next to each other, on as many lines as they need."""
    lines = [" " * indent + entries[0]]
    for entry in entries[1:]:
        if len(lines[-1]) + 3 + len(entry) <= width:
            lines[-1] += "   " + entry
        else:
            lines.append(" " * indent + entry)
    return lines


def _line(spans: list[Span], start: float, length: float, columns: int) -> Text:
    """Draw one lane. A step is at least one column wide. From three columns on, its first column is a bar."""
    marks: list[tuple[str, str]] = [(" ", "")] * columns
    order = list(MARKS)
    for span in sorted(spans, key=lambda s: (order.index(s.kind), s.start_us)):
        low = min(int((span.start_us - start) / length * columns), columns - 1)
        high = max(low + 1, round((span.end_us - start) / length * columns))
        mark, style = MARKS[span.kind]
        for at in range(low, high):
            marks[at] = ("|" if at == low and high - low >= 3 else mark, style)
    text = Text()
    for mark, style in marks:
        text.append(mark, style=style)
    return text
