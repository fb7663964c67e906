"""The page of a simulated T3 evaluation: the published figures redrawn beside ours, each with its numbers as text.

From the top: every published number and ours; speed-ups by sub-layer and configuration; memory traffic by class; the large
models; what sharing the units costs; what the assumed numbers of the system do to the headline.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.report.html import Html, table, tag
from weft.report.page import document, facts_list, write_page
from weft.report.panels import Charts, chart_panel
from weft.report.study import columns_chart, published_section, sources, verdict
from weft.report.words import ms, percent
from weft.studies.published import geomean
from weft.studies.t3.configurations import CONFIGURATIONS, SubLayerRun
from weft.studies.t3.paper import TITLES, figures
from weft.studies.t3.sensitivity import T3Sensitivity
from weft.studies.t3.study import T3Study

COMPARED = CONFIGURATIONS[1:]
CLASSES = {
    "gemm_read": "GEMM reads",
    "gemm_write": "GEMM writes",
    "rs_read": "reduce-scatter reads",
    "rs_write": "reduce-scatter writes",
    "ag_read": "all-gather reads",
    "ag_write": "all-gather writes",
}


def write_t3_report(study: T3Study, sensitivity: Sequence[T3Sensitivity], folder: Path) -> Path:
    """Write `folder`/index.html; returns its path. Raises ValueError if it cannot be written."""
    return write_page(t3_page(study, sensitivity), folder)


def t3_page(study: T3Study, sensitivity: Sequence[T3Sensitivity]) -> str:
    """The whole page as text."""
    charts: Charts = {}
    sections = [
        _header(study),
        published_section(figures(study), "T3, arXiv 2401.16677, and this simulation", charts),
        _speedups("Speed-up by sub-layer", "speedups", study.sublayers, charts),
        _traffic(study, charts),
        _speedups("Large models at TP32", "large", study.large, charts),
        _concurrent(study),
        _sensitivity(sensitivity),
        sources(study.system.sources),
    ]
    return document("T3 simulated", sections, charts)


def _header(study: T3Study) -> Html:
    system = study.system
    facts = [
        ("System", system.words),
        ("Peak", f"{system.peak_tflops:.0f} TFLOP/s, half precision"),
        ("Memory", f"{system.hbm.gbps:g} GB/s; last-level cache of {system.llc.bytes >> 20} MiB"),
        ("Link", f"{system.link.gbps:g} GB/s, {system.link.latency_ns} ns"),
    ]
    return tag("header", tag("h1", "T3 simulated ", verdict(figures(study))), facts_list(facts))


def _speedups(title: str, name: str, runs: Sequence[SubLayerRun], charts: Charts) -> Html:
    columns = {TITLES[each]: [run.speedup(each) for run in runs] for each in COMPARED}
    means = {title: [*values, geomean(values)] for title, values in columns.items()}
    charts[name] = columns_chart([*(run.name for run in runs), "geomean"], means, "over sequential")
    heads = ("sub-layer", "GEMM ms", "reduce-scatter ms", "all-gather ms", *columns)
    rows = [
        (
            run.name,
            *(ms(part.ns / 1e3) for part in (run.gemm, run.reduce_scatter, run.all_gather)),
            *(f"{run.speedup(each):.2f}" for each in COMPARED),
        )
        for run in runs
    ]
    listed = table("Times of sequential's kernels, and speed-ups over sequential", heads, rows)
    return tag("section", tag("h2", title), chart_panel(name, f"Columns: {title}; the table has the numbers"), listed)


def _traffic(study: T3Study, charts: Charts) -> Html:
    places, columns = [], {words: list[float]() for words in CLASSES.values()}
    for run in study.sublayers:
        for kind in ("sequential", "t3_mca"):
            places.append(f"{run.name} {TITLES[kind]}")
            for name, size in run.traffic(kind).items():
                if name in CLASSES:
                    columns[CLASSES[name]].append(size / 1e6)
    charts["traffic"] = columns_chart(places, columns, "MB", stacked=True)
    rows = [_traffic_row(run) for run in study.sublayers]
    heads = ("sub-layer", *CLASSES.values(), "all")
    panel = chart_panel("traffic", "Columns: memory traffic by class; the table has the ratios")
    return tag("section", tag("h2", "Memory traffic"), panel, table("Bytes of T3-MCA, relative to sequential's", heads, rows))


def _traffic_row(run: SubLayerRun) -> tuple[str, ...]:
    before, after = run.traffic("sequential"), run.traffic("t3_mca")
    shares = [after[name] / before[name] for name in CLASSES]
    return (run.name, *map(percent, shares), percent(sum(after.values()) / sum(before.values())))


def _concurrent(study: T3Study) -> Html:
    rows = [
        (
            "all, each (what there is to gain)" if run.units is None else f"{run.units} of {study.system.units}",
            *(f"{geomean(values):.2f}" for values in (run.gemm_slowdowns, run.all_reduce_slowdowns, run.speedups)),
        )
        for run in study.concurrent
    ]
    heads = ("units of the all-reduce", "GEMM slower by", "all-reduce slower by", "speed-up")
    whole = (*study.end_to_end, *study.large_end_to_end)
    ends = [(run.name, run.kind, percent(run.share), f"{run.speedup_t3:.2f}", f"{run.speedup:.2f}") for run in whole]
    return tag(
        "section",
        tag("h2", "Beyond the sub-layers"),
        table("A GEMM beside an all-reduce, geometric means of the 16 sub-layers", heads, rows),
        table("Whole models: speed-ups", ("model", "pass", "of sequential's time", "T3", "T3-MCA"), ends, words=(0, 1)),
    )


def _sensitivity(rows: Sequence[T3Sensitivity]) -> Html:
    if not rows:
        return Html("")
    lines = [
        (
            row.path or "as it is",
            f"{row.factor:g}",
            *(f"{100 * value:.1f} %" if not row.refused else "–" for value in (row.t3, row.t3_mca, row.saved)),
        )
        for row in rows
    ]
    heads = ("assumed number", "times", "T3", "T3-MCA", "traffic saved")
    return tag("section", tag("h2", "What the assumed numbers do"), table("Geometric means of 16 sub-layers", heads, lines))
