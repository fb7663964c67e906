"""Record: a T3Study as plain data, for --json and whoever compares runs, and as spans. Microseconds, and bytes of traffic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.core import codec
from weft.core.span import Span
from weft.studies.published import geomean
from weft.studies.t3.configurations import CONFIGURATIONS, SubLayerRun
from weft.studies.t3.paper import figures
from weft.studies.t3.sensitivity import T3Sensitivity
from weft.studies.t3.study import T3Study


def record(study: T3Study, sensitivity: Sequence[T3Sensitivity] = ()) -> dict[str, Any]:
    """Everything that a T3Study has, each sub-layer with the time, speed-up and traffic of every configuration."""
    return {
        "system": codec.dump(study.system),
        "figures": [codec.dump(figure) | {"ok": figure.ok} for figure in figures(study)],
        "geomeans": {"sublayers": _geomeans(study.sublayers), "large": _geomeans(study.large)},
        "sublayers": [_sublayer(run) for run in study.sublayers],
        "large": [_sublayer(run) for run in study.large],
        "end_to_end": codec.dump(study.end_to_end),
        "large_end_to_end": codec.dump(study.large_end_to_end),
        "concurrent": codec.dump(study.concurrent),
        "mapped": codec.dump(study.mapped),
        "sensitivity": codec.dump(tuple(sensitivity)),
    }


def calls(study: T3Study) -> dict[str, tuple[Span, ...]]:
    """Every sub-layer as sequential, T3 and T3-MCA run it, as spans of the GPU that stands for all: by title."""
    found: dict[str, tuple[Span, ...]] = {}
    for run in (*study.sublayers, *study.large):
        found[f"{run.name} sequential"] = _in_turn(run, run.gemm.ns, run.gemm.ns + run.reduce_scatter.ns, tracked=False)
        for name, part in (("T3", run.t3), ("T3-MCA", run.t3_mca)):
            found[f"{run.name} {name}"] = _in_turn(run, part.gemm_ns, part.ns, tracked=True)
    return found


def _in_turn(run: SubLayerRun, gemm_ns: int, scattered_ns: int, *, tracked: bool) -> tuple[Span, ...]:
    """The GEMM, the reduce-scatter behind it or, tracked, beside it, and the all-gather."""
    begin_us, gemm_us, scattered_us = 0.0 if tracked else gemm_ns / 1e3, gemm_ns / 1e3, scattered_ns / 1e3
    end_us = scattered_us + run.all_gather.ns / 1e3
    return (
        Span(rank=0, lane="units", kind="gemm", name="gemm", start_us=0.0, end_us=gemm_us),
        Span(
            rank=0,
            lane="tracker" if tracked else "units",
            kind="collective",
            name="reduce_scatter",
            start_us=begin_us,
            end_us=scattered_us,
        ),
        Span(rank=0, lane="units", kind="collective", name="all_gather", start_us=scattered_us, end_us=end_us),
    )


def _geomeans(runs: Sequence[SubLayerRun]) -> dict[str, float]:
    return {name: geomean(run.speedup(name) for run in runs) for name in CONFIGURATIONS}


def _sublayer(run: SubLayerRun) -> dict[str, Any]:
    tracked = {
        name: {"threshold": part.threshold, "entries": part.entries, "spilled": part.spilled, "gemm_us": part.gemm_ns / 1e3}
        for name, part in (("t3", run.t3), ("t3_mca", run.t3_mca))
    }
    kernels = {
        "gemm": run.gemm,
        "reduce_scatter": run.reduce_scatter,
        "reduce_scatter_nmc": run.reduce_scatter_nmc,
        "all_gather": run.all_gather,
    }
    return {
        "name": run.name,
        "world_size": run.world_size,
        "us": {name: run.ns(name) / 1e3 for name in CONFIGURATIONS},
        "speedup": {name: run.speedup(name) for name in CONFIGURATIONS},
        "kernels_us": {name: part.ns / 1e3 for name, part in kernels.items()},
        "traffic": {name: run.traffic(name) for name in ("sequential", "t3", "t3_mca")},
        "tracked": tracked,
    }
