"""The tables of commands and pages, as values: `weft.cli.output` prints one in a terminal, `table` makes HTML of it.

HTML escapes text unless it is Html already, so no string of a run can become markup or script.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.planner.words import factor, mib, percent, sizes, us

if TYPE_CHECKING:
    from weft.planner.simulated import LaneUse, Signature, Simulation
    from weft.planner.values import Plan
    from weft.tools.results import Run, Speeds

UNITS: Mapping[str, Callable[[float], str]] = {
    "us": us,
    "%": percent,
    "x": factor,
    "MiB": mib,
    "ratio": lambda value: f"{value:.2f}",
    "error": lambda value: f"{value:.2g}",
}
"""The function that formats the numbers of a column, by the column's unit. Times are given and shown in us, so that a table and
its chart have one unit; sizes are given in bytes. Sentences give the time of a whole model in ms."""
NOTHING = "-"
"""The text of a number that is not known."""


class Judged(NamedTuple):
    """Judged is a cell that says whether something is right. Terminals and pages colour it."""

    text: str
    right: bool


Cell = str | float | None | Judged


class Column(NamedTuple):
    """Column describes a column of a table.

    name: the heading. unit: one of UNITS, or any other if the cells are text. words: the cells are words, aligned to the left.
    """

    name: str
    unit: str = ""
    words: bool = False

    @property
    def head(self) -> str:
        shown = "" if self.unit in ("%", "x", "ratio", "error") else self.unit
        return f"{self.name} {shown}".strip()

    def text(self, cell: Cell) -> str:
        if isinstance(cell, Judged):
            return cell.text
        if isinstance(cell, str):
            return cell
        if cell is None:
            return NOTHING
        return UNITS[self.unit](cell) if self.unit in UNITS else f"{cell:,}"


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """ReportTable is a title, columns, and rows of cells. The first cell of a row names the row."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


LAYER, SCHEDULE, SIZES = Column("layer", words=True), Column("schedule", words=True), Column("M x N x K", words=True)


TIMES = (
    Column("speed-up", "x"),
    *(Column(name, "us") for name in ("sequential", "weft", "ideal")),
    Column("of ideal", "%"),
)


def _times(times: Plan | Speeds, overlapped_us: float) -> tuple[Cell, ...]:
    gain = times.sequential_us / overlapped_us if overlapped_us else None
    return gain, times.sequential_us, overlapped_us, times.ideal_us, times.share_of_ideal


def plans_table(title: str, plans: Iterable[tuple[str, Plan]], *, short: bool = False) -> ReportTable:
    """Return a row for each layer with its schedule and its predicted times. short: without sizes and the share
    of the ideal, so that it fits a terminal of 80 columns."""
    columns = (LAYER, SCHEDULE, Column("verdict", words=True), *TIMES, SIZES)
    rows = [
        (layer, plan.chosen.spec, plan.verdict, *_times(plan, plan.chosen.predicted_us), sizes(plan.problem))
        for layer, plan in plans
    ]
    shown = len(columns) - 2 * short
    return ReportTable(title=title, columns=columns[:shown], rows=[row[:shown] for row in rows])


def ran_table(title: str, run: Run) -> ReportTable:
    """Return a row for each layer that was proved, run and checked."""
    return ReportTable(
        title=title,
        columns=(
            *(LAYER, SCHEDULE, Column("proof", words=True), Column("result", words=True)),
            *(Column("largest error", "error"), Column("allowed error", "error"), SIZES),
        ),
        rows=[
            (
                *(layer.name, layer.spec, "proved", Judged("right" if layer.ok else "WRONG", layer.ok)),
                *(layer.max_error, layer.tolerance, sizes(layer.problem)),
            )
            for layer in run.layers
        ],
    )


def speeds_table(run: Run) -> ReportTable:
    """Return a row for each layer that was timed on GPUs, with the predicted time for the named machine."""
    return ReportTable(
        title=f"Measured: medians of the slowest rank. {run.machine} is the prediction, for {run.machine_ranks} ranks and "
        f"{run.machine_tokens:,} tokens",
        columns=(LAYER, SCHEDULE, *TIMES, Column(run.machine, "us")),
        rows=[
            (layer.name, layer.spec, *_times(speeds, speeds.overlapped_us), layer.plan.chosen.predicted_us)
            for layer, speeds in run.measured_layers
        ],
    )


def speeds_notes(run: Run) -> list[str]:
    """Return the sentences below the table of speeds."""
    notes = []
    if run.exceeds_ideal:
        notes.append(
            "Over 100% of ideal: the slower half alone took longer than the overlapped call; times scatter by that much, or "
            "the schedule's exchange is faster than the collective."
        )
    for layer, speeds in run.measured_layers:
        if speeds.tried:
            tried = ", ".join(f"{spec} {us(time_us)}" for spec, time_us in speeds.candidates_us)
            notes.append(f"{layer.name}: chosen by measurement; us of each schedule that was tried: {tried}")
    return notes


def unpredicted_notes(run: Run) -> list[str]:
    """Return a sentence for each layer that ran another schedule than the predicted one."""
    return [
        f"{layer.name} ran {layer.spec}, which was chosen for these ranks; {layer.plan.chosen.spec} is predicted."
        for layer in run.unpredicted_layers
    ]


def simulation_table(found: Simulation) -> ReportTable:
    """Return the times of a simulated schedule next to the sequential program's."""
    losses = found.losses
    times = {
        losses.spec: found.total_us,
        "sequential": found.sequential_us,
        "whole computation alone": losses.computation_us,
        "whole communication alone": losses.communication_us,
        "exposed": losses.exposed_us,
    }
    rows = [(name, us, us / found.sequential_us if found.sequential_us else None) for name, us in times.items()]
    return ReportTable(
        title="Times", columns=(Column("", words=True), Column("", "us"), Column("of sequential", "%")), rows=rows
    )


def losses_table(losses: Signature) -> ReportTable:
    """Return a row with each loss of a schedule."""
    return ReportTable(
        title="Losses. DIL, decomposition: pieces alone over the whole alone; CIL, contention: concurrent over alone",
        columns=(Column("loss", words=True), Column("ratio", "ratio")),
        rows=list(losses.losses.items()),
    )


def lanes_table(title: str, lanes: Iterable[LaneUse], total_us: float) -> ReportTable:
    """Return a row for each lane: how long it worked and waited in a call of total_us."""
    columns = (
        Column("lane", words=True),
        Column("steps"),
        Column("busy", "us"),
        Column("waiting", "us"),
        Column("busy share", "%"),
    )
    rows = [
        (
            f"rank {each.rank} {each.lane}",
            each.steps,
            each.busy_us,
            each.waiting_us,
            each.busy_us / total_us if total_us else None,
        )
        for each in lanes
    ]
    return ReportTable(title=title, columns=columns, rows=rows)


class Html(str):
    """Html is markup that needs no escaping."""


def tag(name: str, *children: str, **attributes: str) -> Html:
    """Return `<name attributes>children</name>`. A trailing _ in an attribute's name is dropped, and other _ become -.

    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    words = "".join(f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{words}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Html:
    """Return the children one after the other, each escaped unless it is Html."""
    return Html("".join(c if isinstance(c, Html) else html.escape(c) for c in children))


def table(of: ReportTable) -> Html:
    """Return a table in a frame. Narrow windows show a row as a card, in which each cell has its column's name."""

    def cell(name: str, column: Column, content: Cell, **attributes: str) -> Html:
        text = content if isinstance(content, Html) else column.text(content)
        if isinstance(content, Judged):
            text = tag("span", text, class_="right" if content.right else "wrong")
        return tag(name, text, class_="words" if column.words else "number", **attributes)

    first, *others = of.columns
    head = tag("tr", *(cell("th", column, column.head, scope="col") for column in of.columns))
    body = [
        tag(
            "tr",
            cell("th", first, row[0], scope="row"),
            *(cell("td", column, each, data_name=column.head) for column, each in zip(others, row[1:], strict=True)),
        )
        for row in of.rows
    ]
    parts = tag("caption", of.title), tag("thead", head), tag("tbody", *body)
    return tag("div", tag("table", *parts), class_="frame", tabindex="0", role="region", aria_label=of.title)


def json_script(name: str, data: Any) -> Html:
    """Return an element with `data` for the page's script. Every "<" is escaped, so the data cannot end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Html(f'<script type="application/json" id="{html.escape(name)}">{text}</script>')


def html_page(title: str, *children: Html, scripts: Iterable[Html] = ()) -> str:
    """Return a self-contained page. Its policy makes the browser refuse to load anything, and scripts if none are passed."""
    body = tag("main", *children), *scripts
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    policy += "; script-src 'unsafe-inline'; img-src data: blob:" if len(body) > 1 else ""
    head = tag(
        "head",
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        tag("title", f"weft: {title}"),
        Html(f"<style>{text_of('page.css')}</style>"),
    )
    return f'<!doctype html>\n<html lang="en">{head}{tag("body", *body)}</html>\n'


def text_of(name: str) -> str:
    """Return the text of a file in this package."""
    return files("weft.report").joinpath(name).read_text(encoding="utf-8")
