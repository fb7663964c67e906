"""This module compares the figures that T3 publishes with those of a T3Study.

No constant of a T3System was set for a single configuration or sub-layer. All published values are from T3, arXiv 2401.16677,
sections 3, 6 and 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft_studies.published import Evidence, Figure, geomean
from weft_studies.t3.configurations import Configuration, SubLayerRun
from weft_studies.t3.study import Pass, T3Study

TITLES: dict[Configuration, str] = {
    "sequential": "Sequential",
    "t3": "T3",
    "t3_mca": "T3-MCA",
    "ideal": "Ideal-GEMM-RS-Overlap",
    "ideal_nmc": "Ideal-RS+NMC",
}


SEEN = Evidence(
    label="calibrated",
    because="The assumed numbers were chosen with the speed-ups and the traffic of these 16 sub-layers in view.",
)
DILUTED = Evidence(
    label="calibrated",
    because="A model's speed-up is that of its sub-layers, which were calibrated, and the share of time that they take.",
)
COUNTED = Evidence(
    label="derived",
    because="It is a count of chunks, such as (2N - 1) / (N - 2) reads, in which no simulated time takes part.",
)
EIGHT_UNITS = Evidence(
    label="calibrated",
    because="unit_gbps was solved from the all-reduce on 8 units, and the choice of sub-layers was made to meet this figure.",
)
POTENTIAL = Evidence(
    label="derived",
    because="It is arithmetic on the times of each half alone, which the derived rates of units and link set.",
)
LARGE = Evidence(
    label="calibrated",
    because="The figure could be seen while constants were chosen, though the 16 sub-layers of smaller models were aimed at.",
)
LARGE_WHOLE = Evidence(
    label="predicted",
    because="It was compared only when every number stood, and nothing was chosen for models at TP32.",
)
SIXTEEN_UNITS = Evidence(
    label="derived",
    because="It is arithmetic on the times of each half alone on fewer units, for sub-layers that were chosen to meet 8 units.",
)


def figures(study: T3Study) -> tuple[Figure, ...]:
    """Return the published figures that the study also has, each with the study's value."""
    return (*_speedups(study), *_near_memory(study), *_traffic(study), *_wider(study), *_concurrent(study))


def _gains(runs: Sequence[SubLayerRun], configuration: Configuration) -> tuple[float, float]:
    """Return the geometric mean and the maximum of the speed-ups over sequential, minus 1."""
    speedups = [run.speedup(configuration) for run in runs]
    return geomean(speedups) - 1, max(speedups) - 1


def _speedups(study: T3Study) -> Iterator[Figure]:
    published: tuple[tuple[Configuration, tuple[float, float], tuple[float, float]], ...] = (
        ("ideal", (0.35, 0.50), (0.03, 0.04)),
        ("t3", (0.20, 0.39), (0.04, 0.06)),
        ("t3_mca", (0.30, 0.47), (0.03, 0.05)),
    )
    for configuration, theirs, tolerances in published:
        ours = _gains(study.sublayers, configuration)
        for kind, *row in zip(("geomean", "max"), theirs, ours, tolerances, strict=True):
            yield SEEN.percent(f"{TITLES[configuration]}, speed-up, {kind}", *row)
    gains = [run.t3.ns / run.t3_mca.ns for run in study.sublayers]
    yield SEEN.percent("T3-MCA over T3 before the all-gather, speed-up, geomean", 0.13, geomean(gains) - 1, 0.03)
    yield SEEN.percent("T3-MCA over T3 before the all-gather, speed-up, max", 0.29, max(gains) - 1, 0.05)


def _near_memory(study: T3Study) -> Iterator[Figure]:
    for world_size, published in ((8, 0.07), (16, 0.03)):
        runs = [run for run in study.sublayers if run.world_size == world_size]
        gain = 1 - geomean(run.reduce_scatter_nmc.ns / run.reduce_scatter.ns for run in runs)
        yield SEEN.percent(f"reduce-scatter with near-memory reduction, time saved, TP{world_size}", published, gain, 0.015)
    more = max(run.speedup("ideal_nmc") / run.speedup("ideal") for run in study.sublayers) - 1
    yield SEEN.percent("Ideal-RS+NMC over Ideal-GEMM-RS-Overlap, speed-up, max", 0.04, more, 0.015)


def _traffic(study: T3Study) -> Iterator[Figure]:
    pairs = [(run.traffic("sequential"), run.traffic("t3_mca")) for run in study.sublayers]
    left = [sum(after.values()) / sum(before.values()) for before, after in pairs]
    yield SEEN.percent("memory traffic saved, geomean", 0.22, 1 - geomean(left), 0.03)
    yield SEEN.percent("memory traffic saved, max", 0.36, 1 - min(left), 0.05)
    for evidence, name, words, published, tolerance in (
        (COUNTED, "rs_read", "reads of the reduce-scatter, sequential over T3", 2.4, 0.15),
        (SEEN, "gemm_read", "reads of the GEMM, sequential over T3", 1.56, 0.2),
    ):
        yield evidence.ratio(words, published, geomean(before[name] / after[name] for before, after in pairs), tolerance)
    writes = [_writes(after) / _writes(before) for before, after in pairs]
    yield COUNTED.percent("writes of GEMM and reduce-scatter saved, geomean", 0.10, 1 - geomean(writes), 0.02)


def _writes(traffic: dict[str, int]) -> int:
    return traffic["gemm_write"] + traffic["rs_write"]


def _wider(study: T3Study) -> Iterator[Figure]:
    for kind, theirs, ours, tolerance in zip(
        ("geomean", "max"), (0.29, 0.35), _gains(study.large, "t3_mca"), (0.04, 0.05), strict=True
    ):
        yield LARGE.percent(f"large models at TP32, T3-MCA, speed-up, {kind}", theirs, ours, tolerance)
    published: tuple[tuple[Pass, dict[str, tuple[float, float]], float], ...] = (
        ("training", {"T3": (0.07, 0.09), "T3-MCA": (0.10, 0.12)}, 0.12),
        ("prompt", {"T3": (0.09, 0.12), "T3-MCA": (0.12, 0.15)}, 0.14),
    )
    for name, by_title, large in published:
        runs = [run for run in study.end_to_end if run.kind == name]
        for title, (mean, most) in by_title.items():
            speedups = [run.speedup if title == "T3-MCA" else run.speedup_t3 for run in runs]
            yield DILUTED.percent(f"{name} end to end, {title}, speed-up, geomean", mean, geomean(speedups) - 1, 0.03)
            yield DILUTED.percent(f"{name} end to end, {title}, speed-up, max", most, max(speedups) - 1, 0.03)
        gain = max(run.speedup for run in study.large_end_to_end if run.kind == name) - 1
        yield LARGE_WHOLE.percent(f"large models at TP32, {name} end to end, T3-MCA, speed-up, max", large, gain, 0.03)


def _concurrent(study: T3Study) -> Iterator[Figure]:
    published: dict[int | None, tuple[Evidence, str, float]] = {
        None: (POTENTIAL, "GEMM during all-reduce, each on all units, speed-up", 1.67),
        8: (EIGHT_UNITS, "GEMM during all-reduce, 8 units for it, speed-up", 1.18),
        16: (SIXTEEN_UNITS, "GEMM during all-reduce, 16 units for it, speed-up", 1.49),
    }
    for run in study.concurrent:
        evidence, name, speedup = published[run.units]
        yield evidence.ratio(name, speedup, geomean(run.speedups), 0.1)
    shared = next(run for run in study.concurrent if run.units == 16)
    yield SIXTEEN_UNITS.percent(
        "the all-reduce on these 16 units, slower by", 0.07, geomean(shared.all_reduce_slowdowns) - 1, 0.02
    )
    yield SIXTEEN_UNITS.percent("the GEMM on the other 64, slower by", 0.21, geomean(shared.gemm_slowdowns) - 1, 0.02)
