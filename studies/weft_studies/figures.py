"""Figures are published numbers with our values of them, and sweeps show how far our values depend on assumed numbers.

A figure is reproduced if our value is in the accepted range. A study's headline counts only figures that the simulation
predicts. A figure by which a constant was chosen, or that follows from the inputs by arithmetic, is shown with that label.

A sweep changes the numbers without a source, one at a time or all at once. It calls the study's `sample`, which returns the
figures of a system by as few simulations as possible.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from weft.core.hardware import numbers
from weft_studies.profile import P, Progress, moved, uncertain

Row = tuple[str, ...]
Unit = Literal["percent", "ratio"]
Label = Literal["calibrated", "derived", "predicted"]
"""A figure is calibrated if a constant of the system was chosen with the figure in view. It is derived if it was an input, or
follows from inputs by arithmetic. All other figures are predicted."""

LABELS = (
    "calibrated: a constant of the simulated system was chosen with this figure in view. derived: the figure was an input, or "
    "follows from inputs by arithmetic. predicted: neither of the two. missed: ours is outside the accepted range. A "
    "calibrated figure can be missed, too, because the constants are set once for the whole study."
)
"""A note that explains the labels in `figures_table`."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Figure is a published number and our value of it.

    published, ours: the two values. If the unit is percent, they are shares of 1.
    low, high: the accepted range, both ends included.
    because: the evidence for the label, in one sentence."""

    name: str
    published: float
    ours: float
    low: float
    high: float
    unit: Unit
    label: Label
    because: str

    @property
    def ok(self) -> bool:
        return self.low - 1e-9 <= self.ours <= self.high + 1e-9

    def text(self, value: float) -> str:
        """Return a value as text in the figure's unit.

        >>> from weft_studies.figures import text
        >>> text(0.319, "percent"), text(1.55, "ratio")
        ('31.9 %', '1.55x')
        """
        return text(value, self.unit)


def text(value: float, unit: Unit) -> str:
    """Return a value as text for tables."""
    return f"{100 * value:.1f} %" if unit == "percent" else f"{value:.2f}x"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Evidence is a label with its reason. Several figures can share it."""

    label: Label
    because: str

    def percent(self, name: str, published: float, ours: float, tolerance: float) -> Figure:
        """Return a figure whose values are shares of 1. It is accepted within `tolerance`."""
        return self.figure(name, published, ours, (published - tolerance, published + tolerance), "percent")

    def ratio(self, name: str, published: float, ours: float, tolerance: float) -> Figure:
        """Return a figure whose values are ratios. It is accepted within `tolerance`."""
        return self.figure(name, published, ours, (published - tolerance, published + tolerance), "ratio")

    def figure(self, name: str, published: float, ours: float, accepted: tuple[float, float], unit: Unit) -> Figure:
        """Return a figure that is accepted from accepted[0] to accepted[1]."""
        low, high = accepted
        return Figure(
            name=name, published=published, ours=ours, low=low, high=high, unit=unit, label=self.label, because=self.because
        )


def headline(figures: Sequence[Figure]) -> str:
    """Return a sentence that says how many of the predicted figures are within tolerance."""
    predicted = [figure for figure in figures if figure.label == "predicted"]
    if not predicted:
        return f"No figure is predicted: all {len(figures)} are calibrated or derived, and are shown with their labels."
    good = f"{sum(figure.ok for figure in predicted)} of {len(predicted)} predicted figures are within tolerance"
    return f"{good}; the others are shown with their labels."


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive numbers.

    >>> round(geomean([1.0, 4.0]), 6)
    2.0
    """
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def figures_table(figures: Iterable[Figure]) -> list[Row]:
    """Return the published numbers and ours as rows of text. The first row has the headings."""
    rows = [
        (f.name, f.label, f.text(f.published), f.text(f.ours), f"{f.text(f.low)} to {f.text(f.high)}", "" if f.ok else "missed")
        for f in figures
    ]
    return [("figure", "label", "published", "ours", "accepted", ""), *rows]


def labels_table(figures: Iterable[Figure]) -> list[Row]:
    """Return a row for each label and reason, with the number of figures that share them."""
    reasons = [(figure.label, figure.because) for figure in figures]
    rows = [(label, str(reasons.count((label, because))), because) for label, because in dict.fromkeys(reasons)]
    return [("label", "figures", "because"), *rows]


def numbers_table(profile: object) -> list[Row]:
    """Return every number of a profile by its path. The numbers of a list share a row."""
    values: dict[str, list[str]] = {}
    for path, value in numbers(profile):
        values.setdefault(path, []).append(f"{value:g}" if isinstance(value, float) else str(value))
    return [("number", "value"), *((path, ", ".join(found)) for path, found in values.items())]


STEP = 0.25
"""The share by which a single number is lowered and raised."""
REACH = 0.1
"""The largest share by which numbers that change together are lowered or raised."""
SEED = 2401
MOST_REFUSED = 5000
"""The joint sweep gives up after this many refused draws in a row, so it works even if one draw in a thousand is valid."""
Sample = Callable[[P], tuple[Figure, ...]]


@dataclass(frozen=True, kw_only=True)
class SweptRow:
    """SweptRow has the figures of a system with one number changed.

    path: the path of the number. None for the unchanged system.
    values: the values of the figures by name.
    refused: the reason if such a system is not valid. There are no values then."""

    path: str | None = None
    factor: float = 1.0
    values: dict[str, float] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Spread is the distribution of one figure over the draws of a joint sweep.

    low, median, high: the 5th percentile, the median and the 95th percentile.
    within: the number of draws in which the figure is accepted."""

    figure: Figure
    low: float
    median: float
    high: float
    within: int


@dataclass(frozen=True, kw_only=True)
class JointSweep:
    """JointSweep has the results of changing all numbers without a source together.

    draws: the number of simulated systems.
    refused: the number of further systems that were drawn but are not valid.
    within: the number of draws in which all figures are accepted.
    predicted: the number of draws in which all predicted figures are accepted. None if no figure is predicted."""

    paths: tuple[str, ...]
    reach: float
    seed: int
    draws: int
    refused: int
    within: int
    predicted: int | None
    spreads: tuple[Spread, ...]


def one_at_a_time(system: P, sample: Sample[P], progress: Progress) -> Iterator[SweptRow]:
    """Yield the figures of the system, and with each number lower and higher by STEP. Whole numbers change by at least 1."""
    yield SweptRow(values=_values(sample(system)))
    cases = [(path, factor) for path in uncertain(system) for factor in (1 - STEP, 1 + STEP)]
    for done, (path, factor) in enumerate(cases):
        progress(f"{path} times {factor:g}", done, len(cases))
        try:
            yield SweptRow(path=path, factor=factor, values=_values(sample(moved(system, {path: factor}))))
        except ValueError as error:
            yield SweptRow(path=path, factor=factor, refused=str(error))


def joint(system: P, sample: Sample[P], draws: int, progress: Progress, seed: int = SEED) -> JointSweep:
    """Simulate `draws` systems, in each of which every number is multiplied by a random factor, uniform within REACH of 1.

    The same seed gives the same draws. An invalid system is counted and replaced by the next draw.

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
    """Return the paths of the numbers on which no figure depends."""
    moving = {row.path for row in rows if row.refused or row.values != rows[0].values}
    return tuple(dict.fromkeys(row.path for row in rows if row.path is not None and row.path not in moving))


def swept_table(rows: Sequence[SweptRow], figures: Mapping[str, Unit]) -> list[Row]:
    """Return these figures by number and factor, for the numbers on which any figure depends."""
    without, shown = unmoved(rows), []
    for row in rows:
        if row.path not in without:
            cells = [text(row.values[name], unit) if not row.refused else "-" for name, unit in figures.items()]
            shown.append((row.path or "as it is", f"{row.factor:g}", *cells, row.refused.partition(";")[0]))
    return [("number", "times", *figures, "refused"), *shown]


def joint_table(found: JointSweep) -> list[Row]:
    """Return the distribution of each figure over the draws."""
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
