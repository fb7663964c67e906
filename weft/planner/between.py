"""Row counts between known ones: what was measured on both sides of a problem stands for it, too.

    both chose A                          A
    one's choice, or another spec, was    that one: of several that are as fast, which one a trial finds is
    as good on the other side, too        chance, and neighbours would seldom agree
    nothing is good on both sides         measure; where they are close to each other, sequential if one chose it, else what
                                          the one with more rows chose

For callers whose row count changes from call to call. A pure table: ranks that have made the same calls give the same answers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any

from weft.core.problem import Problem

WITHIN = 4.0
"""Known row counts further apart than this, as a ratio, say nothing of those between."""
NARROW = 1.25
"""No further apart than this, nothing between them is measured: so between any two a few trials are enough."""
_SAFE = "sequential"


@dataclass(frozen=True, slots=True)
class _Known:
    """spec: what was chosen. good: that, and what was as fast."""

    spec: str
    good: tuple[str, ...]


class Between:
    """Choices by problem, and by row count among problems that are alike in all else."""

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[int, _Known]] = {}
        self._rows: dict[Hashable, list[int]] = {}

    def add(self, problem: Problem, spec: str, close: Sequence[str] = ()) -> None:
        """What was found to be the best of a problem, by measuring that very one. close: what was as good, the best first."""
        alike = but_rows(problem)
        known = self._known.setdefault(alike, {})
        if problem.m not in known:
            insort(self._rows.setdefault(alike, []), problem.m)
        known[problem.m] = _Known(spec, (spec, *close))

    def find(self, problem: Problem) -> tuple[str, int, int] | None:
        """(spec, the row counts next to the problem's that speak for it); None where one is missing or far, or no spec is good
        with both."""
        alike = but_rows(problem)
        rows: list[int] = self._rows.get(alike, [])
        at = bisect_left(rows, problem.m)
        if not 0 < at < len(rows):
            return None
        low, high = rows[at - 1], rows[at]
        if high > WITHIN * low:
            return None
        fewer, more = self._known[alike][low], self._known[alike][high]
        spec = _of_both(fewer, more)
        if spec is None and high <= NARROW * low:
            spec = _SAFE if fewer.spec == _SAFE else more.spec
        return (spec, low, high) if spec is not None else None


def _of_both(fewer: _Known, more: _Known) -> str | None:
    """What is good with both: what was chosen rather than what was as fast."""
    return next((spec for spec in (fewer.spec, *more.good) if spec in more.good and spec in fewer.good), None)


def but_rows(problem: Problem) -> tuple[Any, ...]:
    """What is alike in problems that differ in m alone. No Problem: to make one takes several times as long."""
    kind: Any = type(problem)
    found: tuple[Any, ...] = _all_but_rows(kind)(problem)
    return found


@lru_cache(maxsize=1024)
def of_rows(alike: tuple[Any, ...], m: int) -> Problem:
    """The problem of which `but_rows` is `alike`, with so many rows."""
    kind, *rest = alike
    found: Problem = kind(m=m, **dict(zip(_names(kind), rest, strict=True)))
    return found


@cache
def _all_but_rows(kind: Any) -> attrgetter[Any]:
    return attrgetter("__class__", *_names(kind))


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind) if field.name != "m"]
