"""Sensitivity: what the assumed numbers of the machine do to the headline, each taken a quarter lower and a quarter higher.

Of tiles the efficiency is varied, not their size. A contention below 1 is taken as 1: none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from weft.core import codec
from weft.core.machine import Machine, numbers
from weft.core.what_if import RESCALED
from weft.planner.models.gemms import FICCO_GEMMS, GemmCase
from weft.studies.ficco.study import CHOSEN_FROM, Scenario, changed, chosen_exactly, pick, scenario
from weft.studies.profile import Progress, swept

TILES = "gpu.tiles"
UNUSED = (
    *("stores.", "kernels.", "collectives.reduce_scatter.", "gpu.flag_efficiency"),
    *("gpu.half_tile", "gpu.gather_share", "gpu.burst_bytes"),
)
"""Numbers that none of the schedules in the headline depends on, by how their paths begin."""


@dataclass(frozen=True, kw_only=True)
class FiccoSensitivity:
    """The headline with one number changed; path: None for none. Maxima over the scenarios: p2p_loss, times sequential's that
    peer to peer takes; ideal, bespoke, speed-ups. exact: share of scenarios whose best the heuristic chooses; untold: the same
    where it goes by the machine as it was, and does not know of the change."""

    path: str | None
    factor: float
    p2p_loss: float
    ideal: float
    bespoke: float
    exact: float
    untold: float


def headline(
    machine: Machine, path: str | None = None, factor: float = 1.0, cases: Sequence[GemmCase] = FICCO_GEMMS
) -> FiccoSensitivity:
    """The headline of a machine with the number at `path` times `factor`."""
    other = machine if path is None else varied(machine, path, factor)
    found = [scenario(other, case, (*CHOSEN_FROM, "shard_p2p")) for case in cases]
    return FiccoSensitivity(
        path=path,
        factor=factor,
        p2p_loss=max(one.p2p_loss for one in found),
        ideal=max(one.ideal for one in found),
        bespoke=max(one.speedup(one.bespoke) for one in found),
        exact=chosen_exactly(found),
        untold=chosen_exactly([_chosen_by(machine, one) for one in found]),
    )


def _chosen_by(machine: Machine, one: Scenario) -> Scenario:
    return replace(one, scored=pick(one.case.problem(machine.world_size), machine))


def varied(machine: Machine, path: str, factor: float) -> Machine:
    """`machine` with the number at `path` times `factor`: see the module's text."""
    if path != TILES:
        (value,) = (number for name, number in numbers(machine) if name == path)
        return changed(machine, path, repr(round(value * factor) if isinstance(value, int) else value * factor))
    tiles = [codec.dump(tile) | {"efficiency": min(1.0, factor * tile.efficiency)} for tile in machine.gpu.tiles]
    return changed(machine, path, codec.dumps(tuple(tiles)))


def assumed(machine: Machine) -> tuple[str, ...]:
    """Paths of the numbers that no source gives, and that the headline depends on."""
    found = (path for path, source in machine.sources.items() if source.removeprefix(RESCALED).startswith("assumed"))
    return tuple(path for path in found if not path.startswith(UNUSED))


def sensitivity(
    machine: Machine,
    progress: Progress = lambda text, done, total: None,
    cases: Sequence[GemmCase] = FICCO_GEMMS,
) -> Iterator[FiccoSensitivity]:
    """The headline of these scenarios as it is, then with each assumed number a STEP lower and higher."""
    return swept(assumed(machine), partial(headline, machine, cases=cases), progress)
