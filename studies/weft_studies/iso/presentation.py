"""This module defines the Study of ISO, with its figure, tables, charts and spans."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from weft.core.machine import Machine
from weft.core.machine import load as load_machine
from weft.core.span import Span
from weft_studies.iso import study
from weft_studies.iso.study import MODEL, IsoStudy, LayerModel, PromptRun
from weft_studies.profile import Progress
from weft_studies.published import Evidence, Figure, Row
from weft_studies.study import Chart, ColumnChart, Study, StudyTable

SAVED = "prefill time saved on A800s, mean"
PREDICTED = Evidence(
    label="predicted",
    because="No number of the machine was chosen with it in view. The paper's mean is over prompts and numbers of GPUs that we "
    "do not know; ours is over the lengths of the table.",
)
PHASES = "how the streams share the GPU (plain; the collective's with priority; that, and NCCL on 16 blocks)"
SHORT = {"nccl": "plain", "nccl+priority": "priority", "nccl+priority+ctas=16": "16 blocks"}


def facts(machine: Machine) -> list[tuple[str, str]]:
    """Return a summary of the machine."""
    return [
        ("Machine", f"{machine.description}, {machine.links.gbps:g} GB/s a GPU"),
        ("Model", f"{MODEL}, one decoder layer, prefill"),
        ("GEMM peak", f"{machine.gpu.tflops['bfloat16']:g} TFLOP/s, bfloat16"),
    ]


def figures(done: IsoStudy) -> tuple[Figure, ...]:
    """Return the one published figure for this machine."""
    return _saved(done.runs)


def _saved(runs: Sequence[PromptRun]) -> tuple[Figure, ...]:
    return (PREDICTED.percent(SAVED, 0.15, statistics.fmean(run.iso_saved for run in runs), 0.05),)


def sample(machine: Machine) -> tuple[Figure, ...]:
    """Return the figure of a machine without planning weft's own overlap, which it does not need."""
    layer = LayerModel(machine, machine.world_size)
    return _saved([study.prompt(layer, tokens, overlapped=False) for tokens in study.TOKENS])


def tables(done: IsoStudy) -> tuple[StudyTable, ...]:
    """Return a table by prompt length: computation and all-reduces alone, the three programs, and what they save."""
    return (StudyTable(name="prompts", title=f"A layer's prefill. Phases: {PHASES}", rows=_prompts(done.runs), words=(9,)),)


def variants(done: IsoStudy, progress: Progress) -> tuple[StudyTable, ...]:
    """Simulate the study on H200s, for which the slowdown of a computation by a concurrent collective was measured."""
    machine = load_machine("h200x8")
    found = []
    for at, ranks in enumerate((2, 8)):
        progress(f"{ranks} x H200", at, 2)
        runs = [study.prompt(LayerModel(machine, ranks), tokens) for tokens in study.TOKENS]
        found.append(StudyTable(name=f"h200x{ranks}", title=f"The same on {ranks} H200s", rows=_prompts(runs), words=(9,)))
    return tuple(found)


def _prompts(runs: Sequence[PromptRun]) -> list[Row]:
    heads = (
        *("tokens", "compute us", "all-reduces us", "sequential us", "ISO us", "weft us"),
        *("ISO saves", "weft saves", "at most", "phases"),
    )
    return [heads, *map(_prompt, runs)]


def _prompt(run: PromptRun) -> Row:
    times = (run.compute_us, run.all_reduce_us, run.sequential_us, run.iso_us, run.weft_us or math.nan)
    shares = (run.iso_saved, run.weft_saved, run.bound)
    methods = ", ".join(SHORT[name] for name in dict.fromkeys(run.methods))
    return (str(run.tokens), *(f"{us:.0f}" for us in times), *(f"{100 * share:.1f} %" for share in shares), methods)


def charts(done: IsoStudy) -> tuple[Chart, ...]:
    """Return a chart of the time that each program saves by prompt length."""
    saved = {
        "ISO": [100 * run.iso_saved for run in done.runs],
        "weft's overlap": [100 * run.weft_saved for run in done.runs],
        "at most": [100 * run.bound for run in done.runs],
    }
    places = [f"{run.tokens} tokens" for run in done.runs]
    return (ColumnChart(name="saved", title="Prefill time saved", places=places, series=saved, unit="% of sequential"),)


def spans(done: IsoStudy) -> dict[str, tuple[Span, ...]]:
    """Return the spans of each phase of the longest prompt."""
    return LayerModel(done.machine, done.machine.world_size).spans(done.runs[-1].tokens)


def changed(machine: Machine, settings: Mapping[str, str]) -> Machine:
    """Return the machine with these settings and the numbers that follow from them."""
    return machine.what_if(settings)


def run(machine: Machine, progress: Progress) -> IsoStudy:
    """Simulate all prompt lengths."""
    return study.run(machine, progress=progress)


STUDY = Study(
    name="iso",
    title="ISO",
    paper="2409.11155",
    example="links.gbps=270",
    load=study.load,
    apply_settings=changed,
    facts=facts,
    run=run,
    figures=figures,
    tables=tables,
    charts=charts,
    spans=spans,
    variants=variants,
    sample=sample,
    headlines={SAVED: "percent"},
)
