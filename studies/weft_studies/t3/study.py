"""The Study of T3's evaluation: the published figures beside those of a T3Study, tables, charts and spans.

No constant of a T3System was set for a single configuration or sub-layer. All published values are from T3, arXiv 2401.16677,
sections 3, 6 and 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from weft.core.span import Span
from weft_studies.figures import Evidence, Figure, Row, geomean
from weft_studies.profile import Progress, changed_by
from weft_studies.study import Chart, ColumnChart, Study, StudyTable
from weft_studies.t3 import evaluation
from weft_studies.t3.configurations import CONFIGURATIONS, Configuration, SubLayerRun
from weft_studies.t3.evaluation import Pass, T3Study, VariantRow
from weft_studies.t3.system import T3System, load

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


COMPARED = CONFIGURATIONS[1:]
CLASSES = {
    "gemm_read": "GEMM reads",
    "gemm_write": "GEMM writes",
    "rs_read": "reduce-scatter reads",
    "rs_write": "reduce-scatter writes",
    "ag_read": "all-gather reads",
    "ag_write": "all-gather writes",
}


def facts(system: T3System) -> list[tuple[str, str]]:
    """Return a summary of the system."""
    return [
        ("System", system.words),
        ("Peak", f"{system.peak_tflops:.0f} TFLOP/s, half precision"),
        ("Memory", f"{system.hbm.gbps:g} GB/s; last-level cache of {system.llc.bytes >> 20} MiB"),
        ("Link", f"{system.link.gbps:g} GB/s, {system.link.latency_ns} ns"),
    ]


def tables(done: T3Study) -> tuple[StudyTable, ...]:
    """Return the tables of sub-layers, their traffic, whole models, shared units and other mappings."""
    everything = (*done.sublayers, *done.large)
    mapped = [
        (m.collective, *(f"{ns / 1e3:.0f}" for ns in (m.gemm_ns, m.communication_ns, m.fused.ns)), str(m.fused.entries))
        for m in done.mapped
    ]
    shared = [
        (
            "all, each" if run.units is None else f"{run.units} of {done.system.units}",
            *(f"{geomean(values):.2f}" for values in (run.gemm_slowdowns, run.all_reduce_slowdowns, run.speedups)),
        )
        for run in done.concurrent
    ]
    ends = [
        (run.name, run.kind, f"{run.share:.0%}", f"{run.speedup_t3:.2f}x", f"{run.speedup:.2f}x")
        for run in (*done.end_to_end, *done.large_end_to_end)
    ]
    collective_heads = ("collective", "GEMM alone us", "transfers alone us", "fused us", "entries")
    unit_heads = ("units of the all-reduce", "GEMM slower by", "all-reduce slower by", "speed-up")
    model_heads = ("model", "pass", "share of time", "T3", "T3-MCA")
    return (
        StudyTable(
            name="sublayers", title="Sub-layers: times alone, speed-ups over sequential", rows=sublayers_table(everything)
        ),
        StudyTable(
            name="traffic",
            title="Memory traffic of T3-MCA, relative to sequential",
            rows=[("sub-layer", *CLASSES.values(), "all"), *map(_traffic_row, done.sublayers)],
            console=False,
        ),
        StudyTable(name="models", title="Whole models, speed-ups", rows=[model_heads, *ends], words=(0, 1), console=False),
        StudyTable(name="units", title="A GEMM during an all-reduce", rows=[unit_heads, *shared], console=False),
        StudyTable(name="mappings", title="Other collectives of one GEMM", rows=[collective_heads, *mapped]),
    )


def sublayers_table(runs: Iterable[SubLayerRun]) -> list[Row]:
    """Return a row per sub-layer: kernel times, speed-ups over sequential, and T3-MCA's traffic and tracker entries."""
    heads = ("GEMM us", "RS us", "AG us", *(TITLES[name] for name in COMPARED), "traffic", "entries", "spilled")
    return [("sub-layer", *heads), *map(_sublayer, runs)]


def _sublayer(run: SubLayerRun) -> Row:
    traffic = sum(run.traffic("t3_mca").values()) / sum(run.traffic("sequential").values()) - 1
    times = (f"{part.ns / 1e3:.0f}" for part in (run.gemm, run.reduce_scatter, run.all_gather))
    gains = (f"{run.speedup(name):.2f}x" for name in COMPARED)
    return (run.name, *times, *gains, f"{100 * traffic:.0f} %", str(run.t3_mca.entries), str(run.t3_mca.spilled))


def _traffic_row(run: SubLayerRun) -> Row:
    before, after = run.traffic("sequential"), run.traffic("t3_mca")
    shares = [after[name] / before[name] for name in CLASSES]
    return (run.name, *(f"{share:.0%}" for share in (*shares, sum(after.values()) / sum(before.values()))))


def variants(done: T3Study, progress: Progress) -> tuple[StudyTable, ...]:
    """Simulate other tracker sizes, mechanisms switched off, other costs of an update and other systems."""
    system, runs = done.system, done.sublayers
    progress("sizes of the tracker", 0, 5)
    sizes = [
        (
            f"{row.entries:,}",
            f"{row.spilled:.0%}",
            f"{row.traffic:.2%}",
            *_shares(row.variant.t3, row.variant.t3_max, row.variant.t3_mca, row.variant.t3_mca_max, row.variant.saved),
        )
        for row in evaluation.tracker_sizes(system, runs)
    ]
    progress("mechanisms switched off", 1, 5)
    off = [(row.off or "none", *_shares(row.t3_mca, row.t3_mca_max, row.saved)) for row in evaluation.ablation(system, runs)]
    progress("costs of an update", 2, 5)
    costs = evaluation.update_costs(system, runs)
    progress("more units", 3, 5)
    units = evaluation.more_units(system, runs)
    progress("the cliff", 4, 5)
    cliff = evaluation.cliff(system, runs)[1:]
    size_heads = ("entries", "tiles spilled", "of all traffic", "T3", "max", "T3-MCA", "max", "traffic saved")
    off_heads = ("switched off", "T3-MCA", "max", "traffic saved")
    return (
        StudyTable(name="tracker", title="Sizes of the tracker", rows=[size_heads, *sizes]),
        StudyTable(name="ablation", title="T3-MCA with a mechanism switched off", rows=[off_heads, *off]),
        StudyTable(name="updates", title="Memory time of a near-memory update, relative to a write", rows=_variants(costs)),
        StudyTable(name="other", title="Systems that differ in one number", rows=_variants((*units, *cliff))),
    )


def _shares(*shares: float) -> list[str]:
    return [f"{100 * share:.1f} %" for share in shares]


def _variants(rows: Iterable[VariantRow]) -> list[Row]:
    """Return a row per variant: speed-ups over sequential and of T3-MCA over T3, and times to multiply and fetch a slice."""
    heads = ("", "T3", "T3-MCA", "ideal", "MCA over T3", "in OP layers", "in others", "multiply ns", "fetch ns", "with MCA ns")
    found = [
        (
            row.name,
            *_shares(row.t3, row.t3_mca, row.ideal, row.gain, row.gain_op, row.gain_others),
            *(f"{ns:.0f}" for ns in (row.multiply_ns, row.fetch_ns, row.fetch_mca_ns)),
        )
        for row in rows
    ]
    return [heads, *found]


def charts(done: T3Study) -> tuple[Chart, ...]:
    """Return charts of the speed-ups by sub-layer and of memory traffic by class."""
    found = [
        (f"{run.name} {title}", traffic)
        for run in done.sublayers
        for title, traffic in (("Sequential", run.traffic("sequential")), ("T3-MCA", run.traffic("t3_mca")))
    ]
    traffic = {words: [sizes[name] / 1e6 for _, sizes in found] for name, words in CLASSES.items()}
    return (
        _speedup_chart("speedups", "Speed-up by sub-layer", done.sublayers),
        ColumnChart(
            name="traffic",
            title="Memory traffic",
            places=[place for place, _ in found],
            series=traffic,
            unit="MB",
            stacked=True,
        ),
        _speedup_chart("large", "Large models at TP32", done.large),
    )


def _speedup_chart(name: str, title: str, runs: Sequence[SubLayerRun]) -> ColumnChart:
    columns = {TITLES[each]: [run.speedup(each) for run in runs] for each in COMPARED}
    means = {words: [*values, geomean(values)] for words, values in columns.items()}
    return ColumnChart(
        name=name, title=title, places=[*(run.name for run in runs), "geomean"], series=means, unit="over sequential"
    )


def spans(done: T3Study) -> dict[str, tuple[Span, ...]]:
    """Return the spans of every sub-layer under sequential, T3 and T3-MCA, by title. The one GPU represents all."""
    found: dict[str, tuple[Span, ...]] = {}
    for run in (*done.sublayers, *done.large):
        found[f"{run.name} sequential"] = _in_turn(run, run.gemm.ns, run.gemm.ns + run.reduce_scatter.ns, tracked=False)
        for name, part in (("T3", run.t3), ("T3-MCA", run.t3_mca)):
            found[f"{run.name} {name}"] = _in_turn(run, part.gemm_ns, part.ns, tracked=True)
    return found


def _in_turn(run: SubLayerRun, gemm_ns: int, scattered_ns: int, *, tracked: bool) -> tuple[Span, ...]:
    """Return the spans of GEMM, reduce-scatter and all-gather. If tracked, the reduce-scatter starts with the GEMM."""
    end_ns = scattered_ns + run.all_gather.ns
    parts = (
        ("units", "gemm", 0, gemm_ns),
        ("tracker" if tracked else "units", "reduce_scatter", 0 if tracked else gemm_ns, scattered_ns),
        ("units", "all_gather", scattered_ns, end_ns),
    )
    return tuple(
        Span(
            rank=0,
            lane=lane,
            kind="gemm" if name == "gemm" else "collective",
            name=name,
            start_us=start / 1e3,
            end_us=end / 1e3,
        )
        for lane, name, start, end in parts
    )


def sample(system: T3System) -> tuple[Figure, ...]:
    """Return all figures of a system. No other mappings are simulated, because no figure needs them."""
    evaluation.require_tiles(system)
    return figures(evaluation.run(system, mapped=()))


STUDY = Study(
    name="t3",
    title="T3",
    paper="2401.16677",
    example="hbm.gbps=2000",
    load=load,
    apply_settings=changed_by,
    facts=facts,
    run=lambda system, progress: evaluation.run(system, progress),
    figures=figures,
    tables=tables,
    charts=charts,
    spans=spans,
    variants=variants,
    sample=sample,
    headlines={
        "T3, speed-up, geomean": "percent",
        "T3-MCA, speed-up, geomean": "percent",
        "large models at TP32, T3-MCA, speed-up, geomean": "percent",
        "GEMM during all-reduce, 16 units for it, speed-up": "ratio",
    },
)
