"""A ProbeSample has repeated measurements of one operation. Probes return samples, and profiles are derived from them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ProbeSample:
    """ProbeSample has the times of one operation.

    what: the name of the samples. key: the sizes, as the probe's docstring lists them.
    us: for each round, the time of a call on the slowest rank."""

    what: str
    key: tuple[int, ...]
    us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.us)

    @property
    def spread(self) -> float:
        """Return half of the interquartile range as a share of the median. 0 for fewer than three rounds.

        >>> ProbeSample(what="", key=(), us=(9.0, 10.0, 11.0)).spread
        0.1
        """
        if len(self.us) < 3 or not self.median_us:
            return 0.0
        low, _, high = statistics.quantiles(self.us, n=4)
        return (high - low) / 2 / self.median_us

    def __str__(self) -> str:
        return f"{self.what} {' x '.join(map(str, self.key))}: {self.median_us:.1f} us (+-{self.spread:.1%})"


def of(samples: Iterable[ProbeSample], what: str) -> list[ProbeSample]:
    """Return the samples with this name.

    Raises ValueError if there is none.
    """
    found = [sample for sample in samples if sample.what == what]
    if not found:
        raise ValueError(f"samples have none of {what!r}; a profile needs every probe")
    return found


def typical_spread(samples: Iterable[ProbeSample]) -> float:
    """Return the median of the samples' spreads."""
    return round(statistics.median([sample.spread for sample in samples]), 4)
