"""Numbers as text. Every table, chart and sentence formats numbers with these functions, so a number looks the same everywhere.

Each function returns the number alone. The unit stands in the sentence around it, or in the heading of its column.
"""

from __future__ import annotations

import math

from weft.core.problem import Problem


def us(value: float) -> str:
    """Format microseconds with as many digits as are significant.

    >>> us(3.14159), us(31.4159), us(31415.9)
    ('3.14', '31.4', '31,416')
    """
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def ms(us: float) -> str:
    """Format microseconds as milliseconds, with about three digits.

    >>> ms(4.321), ms(432.1), ms(43210.0), ms(4321000.0), ms(0.0)
    ('0.00432', '0.432', '43.2', '4,321', '0')
    """
    digits = 2 - math.floor(math.log10(abs(us) / 1e3)) if us else 0
    return f"{us / 1e3:,.{min(max(digits, 0), 6)}f}"


def percent(share: float) -> str:
    return f"{share:.0%}"


def factor(value: float) -> str:
    """Format the factor of a speed-up.

    >>> factor(1.5)
    '1.50x'
    """
    return f"{value:.2f}x"


def mib(nbytes: float) -> str:
    """Format bytes as MiB.

    >>> mib(256), mib(1.5 * 2**20), mib(2**34)
    ('0.00024', '1.5', '16,384.0')
    """
    number = nbytes / 2**20
    return f"{number:,.1f}" if number >= 1 else f"{number:.2g}"


def sizes(problem: Problem) -> str:
    """Return the global M, N and K."""
    return f"{problem.m:,} x {problem.n:,} x {problem.k:,}"


def count(number: int, noun: str) -> str:
    """Return a number with a noun, in the plural unless the number is 1.

    >>> count(1, "rank"), count(4, "rank")
    ('1 rank', '4 ranks')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"
