"""Row counts between known ones: what was measured on both sides of a problem stands for it, too.

For callers whose row count changes from call to call. A pure table: ranks that have made the same calls give the same answers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Mapping
from dataclasses import fields
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any

from weft.problem import Problem

WITHIN = 4.0
"""Known row counts further apart than this, as a ratio, say nothing of those between."""


class Between:
    """Choices by problem, and by row count among problems that are alike in all else."""

    def __init__(self) -> None:
        self._specs: dict[Hashable, dict[int, str]] = {}
        self._rows: dict[Hashable, list[int]] = {}

    def add(self, problem: Problem, spec: str) -> None:
        """What was found to be the best of a problem, by measuring that very one."""
        alike = but_rows(problem)
        specs = self._specs.setdefault(alike, {})
        if problem.m not in specs:
            insort(self._rows.setdefault(alike, []), problem.m)
        specs[problem.m] = spec

    def find(self, problem: Problem) -> tuple[str, int, int] | None:
        """(spec, the row counts next to the problem's that have it both); None where they differ, or one is missing or far."""
        alike = but_rows(problem)
        rows: list[int] = self._rows.get(alike, [])
        at = bisect_left(rows, problem.m)
        if not 0 < at < len(rows):
            return None
        low, high = rows[at - 1], rows[at]
        specs: Mapping[int, str] = self._specs[alike]
        if specs[low] != specs[high] or high > WITHIN * low:
            return None
        return specs[low], low, high


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
