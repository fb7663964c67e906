"""Tables of a Study, as rows of text whose first one names the columns: for the command line and the documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.machine import numbers
from weft.sim.t3.configurations import CONFIGURATIONS, SubLayerRun
from weft.sim.t3.paper import TITLES, figures
from weft.sim.t3.sensitivity import Sensitivity
from weft.sim.t3.study import Study
from weft.sim.t3.system import System

Row = tuple[str, ...]
COMPARED = CONFIGURATIONS[1:]


def figures_table(study: Study) -> list[Row]:
    """Published numbers and ours."""
    rows = [
        (f.name, f.text(f.published), f.text(f.ours), f.text(f.tolerance), "" if f.ok else "missed") for f in figures(study)
    ]
    return [("figure", "published", "ours", "tolerance", ""), *rows]


def sublayers_table(runs: Iterable[SubLayerRun]) -> list[Row]:
    """Times of sequential's kernels, speed-ups over it, and what T3-MCA does to traffic and tracker."""
    heads = ("GEMM us", "RS us", "AG us", *(TITLES[name] for name in COMPARED), "traffic", "entries", "spilled")
    return [("sub-layer", *heads), *map(_sublayer, runs)]


def _sublayer(run: SubLayerRun) -> Row:
    traffic = sum(run.traffic("t3_mca").values()) / sum(run.traffic("sequential").values()) - 1
    times = (f"{part.ns / 1e3:.0f}" for part in (run.gemm, run.reduce_scatter, run.all_gather))
    gains = (f"{run.speedup(name):.2f}x" for name in COMPARED)
    return (run.name, *times, *gains, f"{100 * traffic:.0f} %", str(run.t3_mca.entries), str(run.t3_mca.spilled))


def mappings_table(study: Study) -> list[Row]:
    """The other collectives of one GEMM."""
    rows = [
        (m.collective, *(f"{ns / 1e3:.0f}" for ns in (m.gemm_ns, m.communication_ns, m.fused.ns)), str(m.fused.entries))
        for m in study.mapped
    ]
    return [("collective", "GEMM alone us", "transfers alone us", "fused us", "entries"), *rows]


def sensitivity_table(rows: Sequence[Sensitivity]) -> list[Row]:
    """The headline by assumed number and factor."""
    return [("assumed number", "times", "T3", "T3-MCA", "traffic saved"), *map(_headline, rows)]


def _headline(row: Sensitivity) -> Row:
    values = [f"{100 * value:.1f} %" for value in (row.t3, row.t3_mca, row.saved)]
    return (row.path or "as it is", f"{row.factor:g}", *(["-"] * 3 if row.refused else values))


def system_table(system: System) -> list[Row]:
    """Every number, by its path; the rows of a list together."""
    values: dict[str, list[str]] = {}
    for path, value in numbers(system):
        values.setdefault(path, []).append(f"{value:g}" if isinstance(value, float) else str(value))
    return [("number", "value"), *((path, ", ".join(found)) for path, found in values.items())]
