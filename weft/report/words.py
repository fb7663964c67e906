"""Numbers and sizes in words, alike in every table and chart."""

from __future__ import annotations

from weft.core.problem import Problem


def us(value: float) -> str:
    """Microseconds with about three digits.

    >>> us(4.321), us(43.21), us(4321.0)
    ('4.32', '43.2', '4,321')
    """
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def sizes(problem: Problem) -> str:
    """Global M, N and K."""
    return f"{problem.m:,} × {problem.n:,} × {problem.k:,}"


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "rank"), count(4, "rank")
    ('1 rank', '4 ranks')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"
