"""Record: a Study as plain data, for --json and whoever compares runs. Times in microseconds, traffic in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft import codec
from weft.sim.published import geomean
from weft.sim.t3.configurations import CONFIGURATIONS, SubLayerRun
from weft.sim.t3.paper import figures
from weft.sim.t3.sensitivity import Sensitivity
from weft.sim.t3.study import Study


def record(study: Study, sensitivity: Sequence[Sensitivity] = ()) -> dict[str, Any]:
    """Everything that a Study has, each sub-layer with the time, speed-up and traffic of every configuration."""
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
