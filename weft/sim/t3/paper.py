"""Paper: the figures that T3 publishes, and the same ones of a Study, side by side.

A figure is reproduced if ours is within `tolerance` of theirs; what is not is reported as it is. No constant of a System was
set for a configuration or a sub-layer. Source of all published values: T3, arXiv 2401.16677, sections 3, 6 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from weft.sim.t3.configurations import Configuration, SubLayerRun
from weft.sim.t3.study import Pass, Study

Unit = Literal["percent", "ratio"]
TITLES: dict[Configuration, str] = {
    "sequential": "Sequential",
    "t3": "T3",
    "t3_mca": "T3-MCA",
    "ideal": "Ideal-GEMM-RS-Overlap",
    "ideal_nmc": "Ideal-RS+NMC",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A published number and ours. percent: both are shares of 1, tolerance as well."""

    name: str
    published: float
    ours: float
    tolerance: float
    unit: Unit

    @property
    def ok(self) -> bool:
        return abs(self.ours - self.published) <= self.tolerance + 1e-9

    def text(self, value: float) -> str:
        """A value in the figure's unit.

        >>> Figure(name="x", published=0.3, ours=0.319, tolerance=0.03, unit="percent").text(0.319)
        '31.9 %'
        """
        return f"{100 * value:.1f} %" if self.unit == "percent" else f"{value:.2f}"


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers.

    >>> round(geomean([1.0, 4.0]), 6)
    2.0
    """
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def figures(study: Study) -> tuple[Figure, ...]:
    """Every published number that the Study has, too."""
    return (*_speedups(study), *_near_memory(study), *_traffic(study), *_wider(study), *_concurrent(study))


def _percent(name: str, published: float, ours: float, tolerance: float) -> Figure:
    return Figure(name=name, published=published, ours=ours, tolerance=tolerance, unit="percent")


def _ratio(name: str, published: float, ours: float, tolerance: float) -> Figure:
    return Figure(name=name, published=published, ours=ours, tolerance=tolerance, unit="ratio")


def _gains(runs: Sequence[SubLayerRun], configuration: Configuration) -> tuple[float, float]:
    """Geometric mean and maximum of the speedups over sequential, less 1."""
    speedups = [run.speedup(configuration) for run in runs]
    return geomean(speedups) - 1, max(speedups) - 1


def _speedups(study: Study) -> Iterator[Figure]:
    published: tuple[tuple[Configuration, tuple[float, float], tuple[float, float]], ...] = (
        ("ideal", (0.35, 0.50), (0.03, 0.04)),
        ("t3", (0.20, 0.39), (0.04, 0.06)),
        ("t3_mca", (0.30, 0.47), (0.03, 0.05)),
    )
    for configuration, theirs, tolerances in published:
        ours = _gains(study.sublayers, configuration)
        for kind, *row in zip(("geomean", "max"), theirs, ours, tolerances, strict=True):
            yield _percent(f"{TITLES[configuration]}, speed-up, {kind}", *row)


def _near_memory(study: Study) -> Iterator[Figure]:
    for world_size, published in ((8, 0.07), (16, 0.03)):
        runs = [run for run in study.sublayers if run.world_size == world_size]
        gain = 1 - geomean(run.reduce_scatter_nmc.ns / run.reduce_scatter.ns for run in runs)
        yield _percent(f"reduce-scatter with near-memory reduction, time saved, TP{world_size}", published, gain, 0.015)


def _traffic(study: Study) -> Iterator[Figure]:
    pairs = [(run.traffic("sequential"), run.traffic("t3_mca")) for run in study.sublayers]
    left = [sum(after.values()) / sum(before.values()) for before, after in pairs]
    yield _percent("memory traffic saved, geomean", 0.22, 1 - geomean(left), 0.03)
    yield _percent("memory traffic saved, max", 0.36, 1 - min(left), 0.05)
    for name, words, published, tolerance in (
        ("rs_read", "reads of the reduce-scatter, sequential over T3", 2.4, 0.15),
        ("gemm_read", "reads of the GEMM, sequential over T3", 1.56, 0.2),
    ):
        yield _ratio(words, published, geomean(before[name] / after[name] for before, after in pairs), tolerance)
    writes = [_writes(after) / _writes(before) for before, after in pairs]
    yield _percent("writes of GEMM and reduce-scatter saved, geomean", 0.10, 1 - geomean(writes), 0.02)


def _writes(traffic: dict[str, int]) -> int:
    return traffic["gemm_write"] + traffic["rs_write"]


def _wider(study: Study) -> Iterator[Figure]:
    for kind, theirs, ours, tolerance in zip(
        ("geomean", "max"), (0.29, 0.35), _gains(study.large, "t3_mca"), (0.04, 0.05), strict=True
    ):
        yield _percent(f"large models at TP32, T3-MCA, speed-up, {kind}", theirs, ours, tolerance)
    published: tuple[tuple[Pass, float, float], ...] = (("training", 0.10, 0.12), ("prompt", 0.12, 0.15))
    for name, mean, most in published:
        speedups = [run.speedup for run in study.end_to_end if run.kind == name]
        yield _percent(f"{name} end to end, T3-MCA, speed-up, geomean", mean, geomean(speedups) - 1, 0.03)
        yield _percent(f"{name} end to end, T3-MCA, speed-up, max", most, max(speedups) - 1, 0.03)


def _concurrent(study: Study) -> Iterator[Figure]:
    published: dict[int | None, tuple[str, float]] = {
        None: ("GEMM beside all-reduce, each on all units, speed-up", 1.67),
        8: ("GEMM beside all-reduce, 8 units for it, speed-up", 1.18),
        16: ("GEMM beside all-reduce, 16 units for it, speed-up", 1.49),
    }
    for run in study.concurrent:
        name, speedup = published[run.units]
        yield _ratio(name, speedup, geomean(run.speedups), 0.1)
    shared = next(run for run in study.concurrent if run.units == 16)
    yield _percent("the all-reduce on these 16 units, slower by", 0.07, geomean(shared.all_reduce_slowdowns) - 1, 0.02)
    yield _percent("the GEMM on the other 64, slower by", 0.21, geomean(shared.gemm_slowdowns) - 1, 0.02)
