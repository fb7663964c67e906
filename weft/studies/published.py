"""Published numbers and those of a simulation, side by side.

A figure is reproduced if ours is within `tolerance` of theirs; what is not is reported as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from weft.core.machine import numbers

Row = tuple[str, ...]
Unit = Literal["percent", "ratio"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A published number and ours. percent: both are shares of 1, tolerance as well."""

    name: str
    published: float
    ours: float
    tolerance: float
    unit: Unit

    @property
    def ok(self) -> bool:
        return abs(self.ours - self.published) <= self.tolerance + 1e-9

    def text(self, value: float) -> str:
        """A value in the figure's unit.

        >>> Figure(name="x", published=0.3, ours=0.319, tolerance=0.03, unit="percent").text(0.319)
        '31.9 %'
        """
        return f"{100 * value:.1f} %" if self.unit == "percent" else f"{value:.2f}"


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers.

    >>> round(geomean([1.0, 4.0]), 6)
    2.0
    """
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def percent(name: str, published: float, ours: float, tolerance: float) -> Figure:
    """A Figure of shares."""
    return Figure(name=name, published=published, ours=ours, tolerance=tolerance, unit="percent")


def ratio(name: str, published: float, ours: float, tolerance: float) -> Figure:
    """A Figure of a ratio."""
    return Figure(name=name, published=published, ours=ours, tolerance=tolerance, unit="ratio")


def figures_table(figures: Iterable[Figure]) -> list[Row]:
    """Published numbers and ours, as rows of text whose first one names the columns."""
    rows = [(f.name, f.text(f.published), f.text(f.ours), f.text(f.tolerance), "" if f.ok else "missed") for f in figures]
    return [("figure", "published", "ours", "tolerance", ""), *rows]


def numbers_table(profile: object) -> list[Row]:
    """Every number of a profile, by its path; the rows of a list together."""
    values: dict[str, list[str]] = {}
    for path, value in numbers(profile):
        values.setdefault(path, []).append(f"{value:g}" if isinstance(value, float) else str(value))
    return [("number", "value"), *((path, ", ".join(found)) for path, found in values.items())]
