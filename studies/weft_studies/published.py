"""This module compares published numbers with those of a simulation.

A figure is reproduced if our value is in the accepted range. A study's headline counts only figures that the simulation
predicts. A figure by which a constant was chosen, or that follows from the inputs by arithmetic, is shown with that label.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from weft.core.machine import numbers

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

        >>> from weft_studies.published import text
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
