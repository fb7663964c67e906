"""A Study is a published evaluation that weft simulates. This module runs studies and collects their results.

Each study is the value STUDY of a module `weft_studies.NAME.study`, which `load_study` imports.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core import codec
from weft.core.span import Span
from weft.report.tables import Column, ReportTable
from weft_studies.figures import (
    LABELS,
    Figure,
    JointSweep,
    Row,
    SweptRow,
    Unit,
    figures_table,
    headline,
    joint,
    joint_table,
    joint_words,
    labels_table,
    numbers_table,
    one_at_a_time,
    swept_table,
    unmoved,
)
from weft_studies.profile import Progress

STUDIES: dict[str, str] = {
    "t3": "track and trigger (arXiv 2401.16677)",
    "ficco": "overlap finer than the shard (arXiv 2512.10236)",
    "dlrm": "DLRM at scale (arXiv 2305.06942)",
    "iso": "a prompt's sequence in two halves (arXiv 2409.11155)",
}
"""The subject of each study, by the name that `weft simulate` takes."""
CHANGED = "The figures were published for another system, so they are shown but not counted."
"""The headline of a study whose system was changed by settings."""


@dataclass(frozen=True, kw_only=True)
class StudyTable:
    """A StudyTable is a table of text.

    name: the name by which documents refer to the table.
    title: the title above the table.
    rows: the rows. The first one has the headings.
    words: the indices of the columns that have text. The others have numbers.
    console: whether the command line prints the table. Pages and documents have all tables.
    note: an explanation below the table.
    """

    name: str
    title: str
    rows: Sequence[Row]
    words: tuple[int, ...] = (0,)
    console: bool = True
    note: str = ""

    @property
    def table(self) -> ReportTable:
        heads, *rows = self.rows
        columns = [Column(head, words=at in self.words) for at, head in enumerate(heads)]
        return ReportTable(title=self.title, columns=columns, rows=rows)


@dataclass(frozen=True, kw_only=True)
class ColumnChart:
    """A ColumnChart shows a column for each series at each place.

    name: the name of the chart, which is unique in its study.
    title: the title above the chart.
    places: the labels on the horizontal axis.
    series: the values of each series, one for each place.
    unit: the unit of the values.
    stacked: whether the columns of a place are stacked. Otherwise they stand side by side.
    """

    name: str
    title: str
    places: Sequence[str]
    series: Mapping[str, Sequence[float]]
    unit: str
    stacked: bool = False


@dataclass(frozen=True, kw_only=True)
class PointChart:
    """A PointChart shows points in panels.

    name: the name of the chart, which is unique in its study.
    title: the title above the chart.
    panels: for each panel, by the title of its horizontal axis, the points (x, y) of each series.
    """

    name: str
    title: str
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]


@dataclass(frozen=True, kw_only=True)
class TimelineChart:
    """A TimelineChart shows the spans of each lane over time."""

    name: str
    title: str
    spans: Sequence[Span]


Chart = ColumnChart | PointChart | TimelineChart


@dataclass(frozen=True, kw_only=True)
class Study:
    """A Study is a published evaluation that weft simulates.

    name: the name that `weft simulate` takes.
    title: the title of its page.
    paper: the arXiv identifier of the paper.
    example: an example of a setting, for --set.
    load: returns the shipped system, a frozen dataclass that has a source for each number.
    apply_settings: returns a system with settings applied, which are given by path.
    facts: returns a summary of a system, as names and texts.
    run: runs the whole evaluation of a system, and returns its result.
    figures: returns the figures of a result.
    tables: returns the tables of a result.
    charts: returns the charts of a result.
    spans: returns the spans of the calls of a result, by title.
    sample: returns the figures of a system by as few simulations as possible. Sweeps use it.
    headlines: the units of the figures in the table of the sweep that changes one number at a time, by name.
    variants: simulates systems that differ from that of a result, and returns tables of their results.
    left_out: a sentence that says which figures `sample` does not return.
    select_scenarios: returns the study of the named scenarios only. None if the study has no scenarios.
    """

    name: str
    title: str
    paper: str
    example: str
    load: Callable[[], Any]
    apply_settings: Callable[[Any, Mapping[str, str]], Any]
    facts: Callable[[Any], Sequence[tuple[str, str]]]
    run: Callable[[Any, Progress], Any]
    figures: Callable[[Any], tuple[Figure, ...]]
    tables: Callable[[Any], tuple[StudyTable, ...]]
    charts: Callable[[Any], tuple[Chart, ...]]
    spans: Callable[[Any], dict[str, tuple[Span, ...]]]
    sample: Callable[[Any], tuple[Figure, ...]]
    headlines: Mapping[str, Unit]
    variants: Callable[[Any, Progress], tuple[StudyTable, ...]] = lambda result, progress: ()
    left_out: str = ""
    select_scenarios: Callable[[Sequence[str]], Study] | None = None


@dataclass(frozen=True, kw_only=True)
class Done:
    """Done has what was simulated for a study.

    study: the study.
    system: the simulated system.
    result: what the study's `run` has returned.
    variants: the tables of variants, if they were requested.
    swept: the sweep that changes one number at a time, if it was requested.
    joint: the sweep that changes all numbers together, if it was requested.
    """

    study: Study
    system: Any
    result: Any
    variants: tuple[StudyTable, ...] = ()
    swept: tuple[SweptRow, ...] = ()
    joint: JointSweep | None = None

    @property
    def figures(self) -> tuple[Figure, ...]:
        return self.study.figures(self.result)


def load_study(name: str) -> Study:
    """Return the study with this name. Raises ValueError if there is none."""
    if name not in STUDIES:
        raise ValueError(f"study is {name!r}; weft simulates {', '.join(STUDIES)}, or a schedule in a JSON file")
    study: Study = importlib.import_module(f"weft_studies.{name}.study").STUDY
    return study


def simulate(study: Study, system: Any, progress: Progress, *, sensitivity: bool = False, draws: int = 0) -> Done:
    """Run a study on a system, and return what was simulated.

    sensitivity: whether to simulate the variants, and the sweep that changes one number at a time.
    draws: the number of draws of the sweep that changes all numbers together. 0 leaves it out.
    """
    result = study.run(system, progress)
    return Done(
        study=study,
        system=system,
        result=result,
        variants=study.variants(result, progress) if sensitivity else (),
        swept=tuple(one_at_a_time(system, study.sample, progress)) if sensitivity else (),
        joint=joint(system, study.sample, draws, progress) if draws else None,
    )


def record(done: Done) -> dict[str, Any]:
    """Return everything that was simulated as data that JSON can hold."""
    return {
        "study": done.study.name,
        "system": codec.dump(done.system),
        "headline": next(words(done)),
        "figures": [codec.dump(figure) | {"ok": figure.ok} for figure in done.figures],
        "tables": {each.name: [list(row) for row in each.rows] for each in (*done.study.tables(done.result), *done.variants)},
        "result": codec.dump(done.result),
        "sensitivity": codec.dump(done.swept),
        "joint": None if done.joint is None else codec.dump(done.joint),
    }


def sweep_tables(study: Study, swept: Sequence[SweptRow], drawn: JointSweep | None) -> Iterator[StudyTable]:
    """Yield the tables of the sweeps."""
    if swept:
        rows = swept_table(swept, study.headlines)
        title = "Each assumed or derived number a quarter lower and higher"
        yield StudyTable(name="sensitivity", title=title, rows=rows, words=(0, len(rows[0]) - 1))
    if drawn is not None:
        title = f"All assumed and derived numbers together, each within {drawn.reach:.0%}"
        yield StudyTable(name="joint", title=title, rows=joint_table(drawn), words=(0, 1))


def tables(done: Done) -> tuple[StudyTable, ...]:
    """Return all tables of a simulated study: its own, those of its figures and labels, of the sweeps, and of its system."""
    return (
        *done.study.tables(done.result),
        *done.variants,
        StudyTable(
            name="figures", title="Published and simulated", rows=figures_table(done.figures), words=(0, 1, 5), note=LABELS
        ),
        StudyTable(name="labels", title="Labels", rows=labels_table(done.figures), words=(0, 2), console=False),
        *sweep_tables(done.study, done.swept, done.joint),
        StudyTable(name="system", title="The system", rows=numbers_table(done.system), console=False),
    )


def words(done: Done) -> Iterator[str]:
    """Yield sentences about the results. The first is the headline: how many predicted figures are within tolerance."""
    yield headline(done.figures) if done.system == done.study.load() else CHANGED
    if done.joint is not None:
        left_out = f" {done.study.left_out}" if done.study.left_out else ""
        yield joint_words(done.joint) + left_out
    if done.swept and (paths := unmoved(done.swept)):
        yield f"No figure depends on {', '.join(paths)}."
