"""Sweeps: the effect of numbers without a source on a study's figures, changed one at a time, and all at once.

A study is swept by its `sample`: the figures of a system, by as few simulations as they need.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.studies.profile import P, Progress, moved, uncertain
from weft.studies.published import Figure, Row, Unit, text

STEP = 0.25
"""The share by which a single number is lowered and raised."""
REACH = 0.1
"""The largest share by which numbers that change together are lowered or raised."""
SEED = 2401
MOST_REFUSED = 5000
"""Draws in a row that may be refused before the joint sweep gives up: a tenth of a percent of draws may be possible."""
Sample = Callable[[P], tuple[Figure, ...]]


@dataclass(frozen=True, kw_only=True)
class SweptRow:
    """The figures with one number moved. path: None for none. values: by the names of figures. refused: why there is no such
    system; there are no values then."""

    path: str | None = None
    factor: float = 1.0
    values: dict[str, float] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One figure over the draws of a joint sweep: 5th percentile, median, 95th percentile; within: in how many draws it is
    accepted."""

    figure: Figure
    low: float
    median: float
    high: float
    within: int


@dataclass(frozen=True, kw_only=True)
class JointSweep:
    """All numbers that no source gives, moved together. draws: systems that were simulated; refused: systems that were drawn
    in addition to these, and cannot be. within: draws in which all figures are accepted; predicted: those in which all
    predicted ones are (None: no figure is predicted)."""

    paths: tuple[str, ...]
    reach: float
    seed: int
    draws: int
    refused: int
    within: int
    predicted: int | None
    spreads: tuple[Spread, ...]


def one_at_a_time(system: P, sample: Sample[P], progress: Progress) -> Iterator[SweptRow]:
    """The figures as they are, then with each number a STEP lower and higher. A whole number moves by at least 1."""
    yield SweptRow(values=_values(sample(system)))
    cases = [(path, factor) for path in uncertain(system) for factor in (1 - STEP, 1 + STEP)]
    for done, (path, factor) in enumerate(cases):
        progress(f"{path} times {factor:g}", done, len(cases))
        try:
            yield SweptRow(path=path, factor=factor, values=_values(sample(moved(system, {path: factor}))))
        except ValueError as error:
            yield SweptRow(path=path, factor=factor, refused=str(error))


def joint(system: P, sample: Sample[P], draws: int, progress: Progress, seed: int = SEED) -> JointSweep:
    """So many systems, each with all numbers moved by factors of their own, uniform within REACH of 1. The same seed gives the
    same draws. A draw that cannot be is replaced by the next, and counted.

    Raises ValueError if no draw out of MOST_REFUSED can be simulated.
    """
    paths, drawn, refused, row = uncertain(system), random.Random(seed), 0, 0
    found: list[tuple[Figure, ...]] = []
    while len(found) < draws:
        progress("joint sweep", len(found), draws)
        factors = {path: drawn.uniform(1 - REACH, 1 + REACH) for path in paths}
        try:
            found.append(sample(moved(system, factors, reach=REACH)))
            row = 0
        except ValueError as error:
            refused, row = refused + 1, row + 1
            if row == MOST_REFUSED:
                raise ValueError(f"{row} draws in a row cannot be simulated, the last one since {error}") from None
    predicted = [[figure for figure in figures if figure.label == "predicted"] for figures in found]
    return JointSweep(
        paths=paths,
        reach=REACH,
        seed=seed,
        draws=draws,
        refused=refused,
        within=sum(all(figure.ok for figure in figures) for figures in found),
        predicted=sum(all(figure.ok for figure in some) for some in predicted) if any(predicted) else None,
        spreads=tuple(map(_spread, zip(*found, strict=True))),
    )


def _values(figures: Sequence[Figure]) -> dict[str, float]:
    return {figure.name: figure.ours for figure in figures}


def _spread(drawn: Sequence[Figure]) -> Spread:
    values = sorted(figure.ours for figure in drawn)
    twentieths = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else values * 19
    return Spread(
        figure=drawn[0],
        low=twentieths[0],
        median=statistics.median(values),
        high=twentieths[-1],
        within=sum(f.ok for f in drawn),
    )


def unmoved(rows: Sequence[SweptRow]) -> tuple[str, ...]:
    """Paths of the numbers that no figure depends on."""
    moving = {row.path for row in rows if row.refused or row.values != rows[0].values}
    return tuple(dict.fromkeys(row.path for row in rows if row.path is not None and row.path not in moving))


def swept_table(rows: Sequence[SweptRow], figures: Mapping[str, Unit]) -> list[Row]:
    """These figures by number and factor, for numbers that move any figure."""
    without, shown = unmoved(rows), []
    for row in rows:
        if row.path not in without:
            cells = [text(row.values[name], unit) if not row.refused else "-" for name, unit in figures.items()]
            shown.append((row.path or "as it is", f"{row.factor:g}", *cells, row.refused.partition(";")[0]))
    return [("number", "times", *figures, "refused"), *shown]


def joint_table(found: JointSweep) -> list[Row]:
    """Each figure over the draws."""
    rows = []
    for spread in found.spreads:
        cells = (spread.figure.text(value) for value in (spread.low, spread.median, spread.high))
        rows.append((spread.figure.name, spread.figure.label, *cells, f"{spread.within} of {found.draws}"))
    return [("figure", "label", "5th percentile", "median", "95th percentile", "draws within tolerance"), *rows]


def joint_words(found: JointSweep) -> str:
    """Return a sentence on all figures of the joint sweep."""
    moved = f"When {len(found.paths)} assumed and derived numbers move together, each by up to {found.reach:.0%}"
    moved += " (a small whole number by 1)"
    predicted = "" if found.predicted is None else f", and all predicted ones in {found.predicted}"
    figures = f"all {len(found.spreads)} figures are"
    if len(found.spreads) == 1:
        figures, predicted = "the figure is", ""
    within = f"{figures} within tolerance in {found.within} of {found.draws} draws{predicted}"
    refused = f" {found.refused} further draws were refused: such a system cannot be simulated." if found.refused else ""
    return f"{moved}, {within}.{refused}"
