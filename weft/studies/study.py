"""Study: one published evaluation that weft simulates, as a value, so that one runner serves all of them.

A module `weft.studies.NAME.presentation` has a study's STUDY. It is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core import codec
from weft.core.span import Span
from weft.studies.profile import Progress
from weft.studies.published import LABELS, Figure, Row, Unit, figures_table, headline, labels_table, numbers_table
from weft.studies.sweep import JointSweep, SweptRow, joint, joint_table, joint_words, one_at_a_time, swept_table, unmoved

STUDIES: dict[str, str] = {
    "t3": "track and trigger (arXiv 2401.16677)",
    "ficco": "overlap finer than the shard (arXiv 2512.10236)",
    "dlrm": "DLRM at scale (arXiv 2305.06942)",
    "iso": "a prompt's sequence in two halves (arXiv 2409.11155)",
}
"""The subject of each study, by the name that `weft simulate` takes."""


CHANGED = "This is not the system that the figures were published for: they are shown, and none is counted."
"""The headline of a system with settings of one's own."""


@dataclass(frozen=True, kw_only=True)
class StudyTable:
    """A titled table as rows of text, of which the first names the columns. words: columns of text, the others are numbers.
    console: whether the command line prints it; pages and documents have all. note: an explanation below it."""

    name: str
    title: str
    rows: Sequence[Row]
    words: tuple[int, ...] = (0,)
    console: bool = True
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """A chart of columns: a value of every series at every place, side by side or stacked."""

    name: str
    title: str
    places: Sequence[str]
    series: Mapping[str, Sequence[float]]
    unit: str
    stacked: bool = False


@dataclass(frozen=True, kw_only=True)
class Points:
    """A chart of points, one panel for each horizontal axis: of every series its (x, y)."""

    name: str
    title: str
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The spans of each lane."""

    name: str
    title: str
    spans: Sequence[Span]


Chart = Columns | Points | Timeline


@dataclass(frozen=True, kw_only=True)
class Study:
    """A published evaluation. paper: its arXiv identifier. example: a setting that --set could have.

    load: the shipped system, a frozen dataclass that says of each number where it is from. changed: a system with settings
    applied, by path. facts: a system in short. run: the whole evaluation of a system. figures, tables, charts: of what `run`
    gives; spans: its calls, by title.

    variants: tables of what becomes of the result on systems that differ, which takes more simulations.

    sample: the figures alone, by as few simulations as they need, for both sweeps. left_out: the figures that it does not have,
    in words. headlines: the figures that the table of the sweep of one number at a time has, by name. only: the study of some
    of its scenarios, by their names, if it has any.
    """

    name: str
    title: str
    paper: str
    example: str
    load: Callable[[], Any]
    changed: Callable[[Any, Mapping[str, str]], Any]
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
    only: Callable[[Sequence[str]], Study] | None = None


@dataclass(frozen=True, kw_only=True)
class Done:
    """A study that was simulated on a system. variants, swept, joint: empty and None unless they were asked for."""

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
    """The study of this name. Raises ValueError if there is none."""
    if name not in STUDIES:
        raise ValueError(f"study is {name!r}; weft simulates {', '.join(STUDIES)}, or a schedule in a JSON file")
    found: Study = importlib.import_module(f"weft.studies.{name}.presentation").STUDY
    return found


def simulate(which: Study, system: Any, progress: Progress, *, sensitivity: bool = False, draws: int = 0) -> Done:
    """Run a study on a system, then what is asked for: with `sensitivity` its variants, and one number at a time; and so many
    draws."""
    result = which.run(system, progress)
    return Done(
        study=which,
        system=system,
        result=result,
        variants=which.variants(result, progress) if sensitivity else (),
        swept=tuple(one_at_a_time(system, which.sample, progress)) if sensitivity else (),
        joint=joint(system, which.sample, draws, progress) if draws else None,
    )


def record(done: Done) -> dict[str, Any]:
    """Everything that was simulated, as plain data: its tables as text, and its result as the study has it."""
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


def sweep_tables(which: Study, swept: Sequence[SweptRow], drawn: JointSweep | None) -> Iterator[StudyTable]:
    """Return the results of the sweeps as data."""
    if swept:
        rows = swept_table(swept, which.headlines)
        title = "Each assumed or derived number a quarter lower and higher"
        yield StudyTable(name="sensitivity", title=title, rows=rows, words=(0, len(rows[0]) - 1))
    if drawn is not None:
        title = f"All assumed and derived numbers together, each within {drawn.reach:.0%}"
        yield StudyTable(name="joint", title=title, rows=joint_table(drawn), words=(0, 1))


def tables(done: Done) -> tuple[StudyTable, ...]:
    """All tables of a study that was simulated: its own, its figures with their labels, and what the sweeps found."""
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
    """Return the headline of a study: the number of predicted figures within tolerance, and their spread."""
    yield headline(done.figures) if done.system == done.study.load() else CHANGED
    if done.joint is not None:
        left_out = f" {done.study.left_out}" if done.study.left_out else ""
        yield joint_words(done.joint) + left_out
    if done.swept and (paths := unmoved(done.swept)):
        yield f"No figure depends on {', '.join(paths)}."
