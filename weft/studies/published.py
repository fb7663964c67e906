"""Published numbers and those of a simulation, side by side.

A figure is reproduced if ours is in the accepted range. A study's headline counts those that the simulation
predicts. One that a constant was chosen by, or that follows from the inputs by arithmetic, is shown with that label.
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
"""calibrated: a constant of the system was chosen with the figure in view. derived: the figure was an input, or follows from
inputs by arithmetic. predicted: neither."""

LABELS = (
    "calibrated: a constant of the simulated system was chosen with this figure in view. derived: the figure was an input, or "
    "follows from inputs by arithmetic. predicted: neither of the two. missed: ours is outside the accepted range. A "
    "calibrated figure can be missed, too, because the constants are set once for the whole study."
)
"""What the columns of `figures_table` say."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A published number and ours. low, high: what is accepted, both included. because: the evidence for the label, in one
    sentence. percent: all are shares of 1."""

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
        """A value in the figure's unit.

        >>> from weft.studies.published import text
        >>> text(0.319, "percent"), text(1.55, "ratio")
        ('31.9 %', '1.55x')
        """
        return text(value, self.unit)


def text(value: float, unit: Unit) -> str:
    """A value as tables show it."""
    return f"{100 * value:.1f} %" if unit == "percent" else f"{value:.2f}x"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A label and its reason, which several figures share."""

    label: Label
    because: str

    def percent(self, name: str, published: float, ours: float, tolerance: float) -> Figure:
        """A figure of shares of 1, accepted within `tolerance`."""
        return self.figure(name, published, ours, (published - tolerance, published + tolerance), "percent")

    def ratio(self, name: str, published: float, ours: float, tolerance: float) -> Figure:
        """A figure of a ratio, accepted within `tolerance`."""
        return self.figure(name, published, ours, (published - tolerance, published + tolerance), "ratio")

    def figure(self, name: str, published: float, ours: float, accepted: tuple[float, float], unit: Unit) -> Figure:
        """A figure that is accepted from accepted[0] to accepted[1]."""
        low, high = accepted
        return Figure(
            name=name, published=published, ours=ours, low=low, high=high, unit=unit, label=self.label, because=self.because
        )


def headline(figures: Sequence[Figure]) -> str:
    """How many of the predicted figures are within tolerance, in words."""
    predicted = [figure for figure in figures if figure.label == "predicted"]
    if not predicted:
        return f"No figure is predicted: all {len(figures)} are calibrated or derived, and are shown with their labels."
    good = f"{sum(figure.ok for figure in predicted)} of {len(predicted)} predicted figures are within tolerance"
    return f"{good}; the others are shown with their labels."


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers.

    >>> round(geomean([1.0, 4.0]), 6)
    2.0
    """
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def figures_table(figures: Iterable[Figure]) -> list[Row]:
    """Published numbers and ours, as rows of text whose first one names the columns."""
    rows = [
        (f.name, f.label, f.text(f.published), f.text(f.ours), f"{f.text(f.low)} to {f.text(f.high)}", "" if f.ok else "missed")
        for f in figures
    ]
    return [("figure", "label", "published", "ours", "accepted", ""), *rows]


def labels_table(figures: Iterable[Figure]) -> list[Row]:
    """Each label that the figures have, with its reason and how many figures share it."""
    reasons = [(figure.label, figure.because) for figure in figures]
    rows = [(label, str(reasons.count((label, because))), because) for label, because in dict.fromkeys(reasons)]
    return [("label", "figures", "because"), *rows]


def numbers_table(profile: object) -> list[Row]:
    """Every number of a profile, by its path; the rows of a list together."""
    values: dict[str, list[str]] = {}
    for path, value in numbers(profile):
        values.setdefault(path, []).append(f"{value:g}" if isinstance(value, float) else str(value))
    return [("number", "value"), *((path, ", ".join(found)) for path, found in values.items())]
