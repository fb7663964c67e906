"""This module defines the Study of T3's evaluation, with its tables, charts and spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.core.span import Span
from weft_studies.profile import Progress, changed_by
from weft_studies.published import Figure, Row, geomean
from weft_studies.study import Chart, ColumnChart, Study, StudyTable
from weft_studies.t3 import study
from weft_studies.t3 import variants as system_variants
from weft_studies.t3.configurations import CONFIGURATIONS, SubLayerRun
from weft_studies.t3.paper import TITLES, figures
from weft_studies.t3.study import T3Study
from weft_studies.t3.system import T3System, load
from weft_studies.t3.variants import VariantRow

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
            rows=[("sub-layer", *CLASSES.values(), "all"), *map(_traffic, done.sublayers)],
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


def _traffic(run: SubLayerRun) -> Row:
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
            *_gains(row.variant.t3, row.variant.t3_max, row.variant.t3_mca, row.variant.t3_mca_max, row.variant.saved),
        )
        for row in system_variants.tracker_sizes(system, runs)
    ]
    progress("mechanisms switched off", 1, 5)
    off = [
        (row.off or "none", *_gains(row.t3_mca, row.t3_mca_max, row.saved)) for row in system_variants.ablation(system, runs)
    ]
    progress("costs of an update", 2, 5)
    costs = system_variants.update_costs(system, runs)
    progress("more units", 3, 5)
    units = system_variants.more_units(system, runs)
    progress("the cliff", 4, 5)
    cliff = system_variants.cliff(system, runs)[1:]
    size_heads = ("entries", "tiles spilled", "of all traffic", "T3", "max", "T3-MCA", "max", "traffic saved")
    off_heads = ("switched off", "T3-MCA", "max", "traffic saved")
    return (
        StudyTable(name="tracker", title="Sizes of the tracker", rows=[size_heads, *sizes]),
        StudyTable(name="ablation", title="T3-MCA with a mechanism switched off", rows=[off_heads, *off]),
        StudyTable(name="updates", title="Memory time of a near-memory update, relative to a write", rows=_variants(costs)),
        StudyTable(name="other", title="Systems that differ in one number", rows=_variants((*units, *cliff))),
    )


def _gains(*shares: float) -> list[str]:
    return [f"{100 * share:.1f} %" for share in shares]


def _variants(rows: Iterable[VariantRow]) -> list[Row]:
    """Return a row per variant: speed-ups over sequential and of T3-MCA over T3, and times to multiply and fetch a slice."""
    heads = ("", "T3", "T3-MCA", "ideal", "MCA over T3", "in OP layers", "in others", "multiply ns", "fetch ns", "with MCA ns")
    found = [
        (
            row.name,
            *_gains(row.t3, row.t3_mca, row.ideal, row.gain, row.gain_op, row.gain_others),
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
        _speedups("speedups", "Speed-up by sub-layer", done.sublayers),
        ColumnChart(
            name="traffic",
            title="Memory traffic",
            places=[place for place, _ in found],
            series=traffic,
            unit="MB",
            stacked=True,
        ),
        _speedups("large", "Large models at TP32", done.large),
    )


def _speedups(name: str, title: str, runs: Sequence[SubLayerRun]) -> ColumnChart:
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
    study.require_tiles(system)
    return figures(study.run(system, mapped=()))


STUDY = Study(
    name="t3",
    title="T3",
    paper="2401.16677",
    example="hbm.gbps=2000",
    load=load,
    apply_settings=changed_by,
    facts=facts,
    run=lambda system, progress: study.run(system, progress),
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
