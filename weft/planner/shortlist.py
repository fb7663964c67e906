"""Which few candidates of a Plan are worth measuring. A pure function: ranks that plan alike measure alike."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.concurrent import ConcurrentProblem
from weft.core.problem import Problem
from weft.planner.values import Candidate, Plan
from weft.schedules import concurrent, synonym

AT_MOST = 8
"""Candidates, the sequential program among them."""
AT_MOST_BESIDE = 14
"""Likewise, of schedules of collectives beside a user's computation."""
WITHIN_BESIDE = 1.25
"""Of these, families predicted to take more than so many times as long as the fastest are measured last."""
WITHIN = 2.0
"""Families predicted to take more than so many times as long as the fastest are not measured."""
NEARLY = 1.05
"""Predictions this close are alike. Then fewer chunks: one a shard was up to 6% faster than two on 4 x H200."""


def shortlist(found: Plan, at_most: int | None = None) -> tuple[str, ...]:
    """Specs: the sequential program first, then one of each other family, the family that is predicted fastest first.

    A family stands with the fewest chunks that are predicted nearly as fast as its best; between nodes with all counts, since
    there is but one, and what a profile says of a network is often assumed. Where nothing is communicated, or nothing computed,
    there is only the sequential program. at_most: specs, the default is AT_MOST, or AT_MOST_BESIDE.

    Of a ConcurrentProblem two plain streams come second, then the best of each family that is predicted near the fastest, then
    the others, as predicted: of a computation that weft does not know a prediction says less than of its own kernels.
    """
    problem = found.problem
    if isinstance(problem, ConcurrentProblem):
        return _beside(found, AT_MOST_BESIDE if at_most is None else at_most)
    if problem.world_size == 1 or not problem.m or not problem.n:
        return ("sequential",)
    families: dict[str, list[Candidate]] = {}
    for candidate in found.candidates:
        families.setdefault(candidate.schedule, []).append(candidate)
    families.pop("sequential", None)
    limit_us = WITHIN * found.chosen.predicted_us
    near = [family for family in families.values() if problem.nodes or family[0].predicted_us <= limit_us]
    rivals = [each for family in near for each in (family if problem.nodes else [_simplest(family)])]
    return ("sequential", *(rival.spec for rival in rivals[: (at_most or AT_MOST) - 1]))


def _beside(found: Plan, at_most: int) -> tuple[str, ...]:
    base, plain = str(concurrent.SEQUENTIAL), str(concurrent.PLAIN)
    if not min(found.computation_us, found.communication_us) > 0:
        return (base,)
    ranked = [candidate for candidate in found.candidates if candidate.schedule not in (base, plain)]
    limit_us = WITHIN_BESIDE * found.chosen.predicted_us
    leaders = {concurrent.family(each.schedule): each for each in reversed(ranked) if each.predicted_us <= limit_us}
    others = sorted(ranked, key=lambda candidate: candidate not in leaders.values())
    return (base, plain, *(candidate.schedule for candidate in others[: at_most - 2]))


def joined(problem: Problem, listed: Sequence[str], named: str) -> tuple[str, ...]:
    """A list with the heuristic's choice, in the place of the last one if there are too many; as it is where that program is
    listed by another name."""
    return tuple(listed) if synonym(problem, named, listed) else (*listed[: AT_MOST - 1], named)


def _simplest(family: Sequence[Candidate]) -> Candidate:
    """family: best first."""
    near = (candidate for candidate in family if candidate.predicted_us <= NEARLY * family[0].predicted_us)
    return min(near, key=lambda candidate: candidate.chunks)
