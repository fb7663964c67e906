"""The shortlist has the few schedules of a ConcurrentProblem that are worth measuring. It is a pure function, so all ranks
measure the same. For other problems the ranking chooses them (weft.perf.ranking)."""

from __future__ import annotations

from weft.planner.values import Candidate, Plan
from weft.schedules import concurrent

AT_MOST = 14
"""The largest number of candidates, including the sequential program."""
WITHIN = 1.25
"""Families that are predicted to take more than this factor of the fastest time are measured last."""


def shortlist(found: Plan) -> tuple[str, ...]:
    """Specs of a ConcurrentProblem: the sequential program, two plain streams, then the best of each family that is predicted
    near the fastest, then the others, as predicted: of a computation that weft does not know a prediction says less than of its
    own kernels. Where nothing is communicated, or nothing computed, there is only the sequential program."""
    base, plain = str(concurrent.SEQUENTIAL), str(concurrent.PLAIN)
    if not min(found.computation_us, found.communication_us) > 0:
        return (base,)
    ranked: list[Candidate] = [candidate for candidate in found.candidates if candidate.schedule not in (base, plain)]
    limit_us = WITHIN * found.chosen.predicted_us
    leaders = {concurrent.family(each.schedule): each for each in reversed(ranked) if each.predicted_us <= limit_us}
    others = sorted(ranked, key=lambda candidate: candidate not in leaders.values())
    return (base, plain, *(candidate.schedule for candidate in others[: AT_MOST - 2]))
