"""Tables of a T3Study, as rows of text whose first one names the columns: for the command line and the documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from weft.studies.published import Row, figures_table
from weft.studies.t3.configurations import CONFIGURATIONS, SubLayerRun
from weft.studies.t3.paper import TITLES, figures
from weft.studies.t3.sensitivity import T3Sensitivity
from weft.studies.t3.study import T3Study

COMPARED = CONFIGURATIONS[1:]


def sublayers_table(runs: Iterable[SubLayerRun]) -> list[Row]:
    """Times of sequential's kernels, speed-ups over it, and what T3-MCA does to traffic and tracker."""
    heads = ("GEMM us", "RS us", "AG us", *(TITLES[name] for name in COMPARED), "traffic", "entries", "spilled")
    return [("sub-layer", *heads), *map(_sublayer, runs)]


def _sublayer(run: SubLayerRun) -> Row:
    traffic = sum(run.traffic("t3_mca").values()) / sum(run.traffic("sequential").values()) - 1
    times = (f"{part.ns / 1e3:.0f}" for part in (run.gemm, run.reduce_scatter, run.all_gather))
    gains = (f"{run.speedup(name):.2f}x" for name in COMPARED)
    return (run.name, *times, *gains, f"{100 * traffic:.0f} %", str(run.t3_mca.entries), str(run.t3_mca.spilled))


def mappings_table(study: T3Study) -> list[Row]:
    """The other collectives of one GEMM."""
    rows = [
        (m.collective, *(f"{ns / 1e3:.0f}" for ns in (m.gemm_ns, m.communication_ns, m.fused.ns)), str(m.fused.entries))
        for m in study.mapped
    ]
    return [("collective", "GEMM alone us", "transfers alone us", "fused us", "entries"), *rows]


def sensitivity_table(rows: Sequence[T3Sensitivity]) -> list[Row]:
    """The headline by assumed number and factor."""
    return [("assumed number", "times", "T3", "T3-MCA", "traffic saved"), *map(_headline, rows)]


def _headline(row: T3Sensitivity) -> Row:
    values = [f"{100 * value:.1f} %" for value in (row.t3, row.t3_mca, row.saved)]
    return (row.path or "as it is", f"{row.factor:g}", *(["-"] * 3 if row.refused else values))


def shown(study: T3Study, rows: Sequence[T3Sensitivity]) -> Iterator[str | list[Row]]:
    """What the command line prints: lines and tables."""
    system, found = study.system, figures(study)
    yield f"{system.words}; {system.peak_tflops:.0f} TFLOP/s, {system.hbm.gbps:g} GB/s of memory"
    yield sublayers_table((*study.sublayers, *study.large))
    yield figures_table(found)
    yield f"{sum(figure.ok for figure in found)} of {len(found)} figures are within their tolerance."
    yield mappings_table(study)
    if rows:
        yield sensitivity_table(rows)
