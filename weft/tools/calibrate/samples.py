"""One thing, measured several times: the value that probes return and profiles are made of."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ProbeSample:
    """what: which probe. key: its sizes, as the probe says. us: one call's time on the slowest rank, in each round."""

    what: str
    key: tuple[int, ...]
    us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.us)

    @property
    def spread(self) -> float:
        """Half of the interquartile range, as a share of the median; 0 for fewer than three rounds.

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
    """Those of one probe.

    Raises ValueError if there is none.
    """
    found = [sample for sample in samples if sample.what == what]
    if not found:
        raise ValueError(f"samples have none of {what!r}; a profile needs every probe")
    return found


def typical_spread(samples: Iterable[ProbeSample]) -> float:
    """The median of their spreads."""
    return round(statistics.median([sample.spread for sample in samples]), 4)
