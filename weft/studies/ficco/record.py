"""Record: a FiccoStudy as plain data, for --json and whoever compares runs. Times in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.core import codec
from weft.studies.ficco.paper import choosers, figures, topologies
from weft.studies.ficco.sensitivity import FiccoSensitivity
from weft.studies.ficco.study import FiccoStudy, Scenario
from weft.studies.ficco.tables import LOSSES


def record(study: FiccoStudy, sensitivity: Sequence[FiccoSensitivity] = ()) -> dict[str, Any]:
    """Everything that a FiccoStudy has, each scenario with the time and the speed-up of every schedule."""
    losses = [codec.dump(found) | {name: of(found) for name, of in LOSSES.items()} for found in study.signatures]
    return {
        "machine": codec.dump(study.machine),
        "figures": [codec.dump(figure) | {"ok": figure.ok} for figure in figures(study)],
        "topologies": [codec.dump(row) for row in topologies(study)],
        "choosers": [codec.dump(row) for row in choosers(study)],
        "mesh": [_scenario(one) for one in study.mesh],
        "switch": [_scenario(one) for one in study.switch],
        "unseen": [_scenario(one) for one in study.unseen],
        "losses": losses,
        "sensitivity": codec.dump(tuple(sensitivity)),
    }


def _scenario(one: Scenario) -> dict[str, Any]:
    speedup = {name: one.speedup(name) for name in one.us}
    return {**codec.dump(one), "ideal": one.ideal, "speedup": speedup, "exact": one.exact}
