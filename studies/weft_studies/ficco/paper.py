"""This module compares the figures that FiCCO publishes with those of a FiccoStudy.

The accepted range of each figure was set before the comparison. No constant of the machine was set for a single scenario. All
published values are from FiCCO, arXiv 2512.10236. The losses of peer to peer and of a wrong choice are from its evaluation, the
others from its abstract.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft_studies.ficco.study import CHOSEN_FROM, FiccoStudy, Scenario, chosen_exactly, wrong_costs
from weft_studies.published import Evidence, Figure

NEAR = 0.05
BY_RATES = Evidence(
    label="predicted",
    because="It follows from the rates of links, collectives and GEMMs, none of which was chosen with the figure in view.",
)
BY_CONSTRUCTION = Evidence(
    label="derived",
    because="The ranking that chooses and the simulator that judges share their cost terms, so they agree by construction.",
)


def figures(study: FiccoStudy) -> tuple[Figure, ...]:
    """Return the published figures that the study has. The maxima are left out unless it has all of FiCCO's scenarios."""
    unseen = study.unseen
    exact, costs = chosen_exactly(unseen), wrong_costs(unseen)
    return (
        *(maxima(study.mesh) if study.whole else ()),
        BY_CONSTRUCTION.figure("heuristic chooses the best of unseen scenarios", 0.81, exact, (0.81, 1.0), "percent"),
        BY_CONSTRUCTION.figure("a wrong choice costs", 0.14, costs, (0.0, 0.14), "percent"),
    )


def maxima(mesh: Sequence[Scenario]) -> tuple[Figure, ...]:
    """Return the figures that are maxima, over these scenarios."""
    p2p, ideal = max(one.p2p_loss for one in mesh), max(one.ideal for one in mesh)
    best = max(one.speedup(one.bespoke) for one in mesh)
    return (
        BY_RATES.figure("peer to peer, slower than sequential, max", 3.9, p2p, (3.0, 4.5), "ratio"),
        BY_RATES.figure("ideal, speed-up, max", 1.7, ideal, (1.6, 1.8), "ratio"),
        BY_RATES.figure("best of FiCCO's four, speed-up, max", 1.6, best, (1.45, 1.7), "ratio"),
    )


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Topology has the results of a topology. Pairs are the geometric mean and the maximum over scenarios.

    p2p_loss: the time of peer to peer, divided by that of sequential.
    bespoke, over_p2p: the speed-ups of the best of FiCCO's four, over sequential and over peer to peer.
    realised: the mean share of the ideal's gain that the best of FiCCO's four reaches."""

    name: str
    p2p_loss: tuple[float, float]
    bespoke: tuple[float, float]
    over_p2p: tuple[float, float]
    realised: float


def topologies(study: FiccoStudy) -> Iterator[Topology]:
    """Yield the results of the mesh, and of the same GPUs behind a switch."""
    for name, found in (("full mesh", study.mesh), ("switch", study.switch)):
        yield Topology(
            name=name,
            p2p_loss=_mean_and_most([one.p2p_loss for one in found]),
            bespoke=_mean_and_most([one.speedup(one.bespoke) for one in found]),
            over_p2p=_mean_and_most([one.us["shard_p2p"] / one.us[one.bespoke] for one in found]),
            realised=statistics.fmean(map(_realised, found)),
        )


def _mean_and_most(values: Sequence[float]) -> tuple[float, float]:
    return statistics.geometric_mean(values), max(values)


def _realised(one: Scenario) -> float:
    return (one.speedup(one.bespoke) - 1) / (one.ideal - 1)


@dataclass(frozen=True, kw_only=True)
class ChooserScore:
    """ChooserScore rates a method that chooses among sequential and FiCCO's four, over unseen scenarios.

    exact: the share of best choices. near: the share within NEAR of the best. costs, most: the mean and the largest loss of a
    choice that is not the best."""

    name: str
    exact: float
    near: float
    costs: float
    most: float


def choosers(study: FiccoStudy) -> Iterator[ChooserScore]:
    """Yield the scores of the ranking, and of always choosing the best single schedule."""
    yield _chooser("the ranking", study.unseen)
    fixed = {name: [replace(one, scored=name) for one in study.unseen] for name in CHOSEN_FROM}
    best = min(fixed, key=lambda name: sum(one.wrong_by for one in fixed[name]))
    yield _chooser(f"always {best}", fixed[best])


def _chooser(name: str, found: Sequence[Scenario]) -> ChooserScore:
    return ChooserScore(
        name=name,
        exact=chosen_exactly(found),
        near=statistics.fmean(one.wrong_by <= NEAR for one in found),
        costs=wrong_costs(found),
        most=max(one.wrong_by for one in found),
    )
