"""This module chooses the few schedules of a ConcurrentProblem that are worth measuring. `shortlist` is a pure function, so all
ranks measure the same schedules. For other problems the ranking chooses them (weft.perf.ranking)."""

from __future__ import annotations

from weft.planner.values import Candidate, Plan
from weft.schedules import concurrent

AT_MOST = 14
"""The largest number of candidates, including the sequential program."""
WITHIN = 1.25
"""The best schedule of each family within this factor of the fastest time is measured first."""


def shortlist(found: Plan) -> tuple[str, ...]:
    """Return the specs to measure: the sequential program, two plain streams, the best of each family that is predicted near
    the fastest, and then all others in predicted order.

    Every family near the fastest comes early, because a prediction for unknown user code is less reliable than one for weft's
    kernels. If nothing is communicated, or nothing is computed, only the sequential program is left.
    """
    base, plain = str(concurrent.SEQUENTIAL), str(concurrent.PLAIN)
    if not min(found.computation_us, found.communication_us) > 0:
        return (base,)
    ranked: list[Candidate] = [candidate for candidate in found.candidates if candidate.schedule not in (base, plain)]
    limit_us = WITHIN * found.chosen.predicted_us
    leaders = {concurrent.family(each.schedule): each for each in reversed(ranked) if each.predicted_us <= limit_us}
    others = sorted(ranked, key=lambda candidate: candidate not in leaders.values())
    return (base, plain, *(candidate.schedule for candidate in others[: AT_MOST - 2]))
