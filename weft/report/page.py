"""Writes pages: of a run, of a plan, and of one schedule that was simulated on one machine.

Each is one HTML file that shows every number as text next to its chart. The page of a run explains weft and the rows of its
tables, then shows the predictions for the named machine, then what ran here. The file contains everything that it needs,
plotly.js included. Its content security policy makes browsers refuse to load more.

Sections add their figures to `charts` by the id of the element that shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from plotly.offline import get_plotlyjs

from weft.core.machine import Machine
from weft.core.schedule import Schedule
from weft.planner.accuracy import accuracy_notes
from weft.planner.simulated import Simulation
from weft.planner.values import Plan, median_error
from weft.planner.words import count, factor, percent, us
from weft.report.charts import Charts, Figure, bars, bars_panel, timeline_panel
from weft.report.tables import (
    Column,
    Html,
    ReportTable,
    html_page,
    join,
    json_script,
    losses_table,
    plans_table,
    ran_table,
    simulation_table,
    speeds_notes,
    speeds_table,
    table,
    tag,
    text_of,
    unpredicted_notes,
)
from weft.schedules import overlaps
from weft.tools.results import Run, Speeds

Times = Sequence[tuple[str, Plan | Speeds, float]]
"""For each layer, its name, its times, and the time of the overlapped call in us."""


def predicted_section(title: str, plans: Sequence[tuple[str, Plan]], charts: Charts, *, ranks: int, tokens: int) -> Html:
    """Return the section with the predicted times on the machine in the title. plans: by layer."""
    if not plans:
        return tag("section", tag("h2", title), tag("p", "No layer was planned."))
    times = [(name, plan, plan.chosen.predicted_us) for name, plan in plans]
    error = median_error(ranks)
    texts = (
        f"A rank is one process with one GPU; here there are {ranks}. A schedule says what each rank computes and "
        "sends, in which order, and what waits for what. A name that ends in :N sends each rank's part in N chunks.",
        "Sequential is the matmul and the collective one after the other. The column weft is the named schedule, which weft's "
        "planner chose unless it was asked for. The verdict says whether it overlaps both or is only faster. There is no clear "
        f"gain where the times differ by less than predictions err: {percent(error)} in the median. "
        "Ideal is the longer of the matmul alone and the collective alone, as if the other one were hidden completely. The "
        "column of ideal is ideal divided by weft, and the speed-up is sequential divided by weft. M, N and K are those of all "
        "ranks.",
    )
    caption = f"One call, {count(ranks, 'rank')}, {count(tokens, 'token')}"
    chart = bars_panel("bars-predicted", "Bars: predicted times; the table has the numbers", _bars(times), charts)
    lines = [
        timeline_panel(*(f"timeline-predicted-{i}", f"{name}: {plan.chosen.spec}"), plan.spans, _marks(plan), charts, plan.why)
        for i, (name, plan) in enumerate(plans)
    ]
    parts = [*(tag("p", text) for text in texts), table(plans_table(caption, plans)), chart, _how_to_read()]
    return tag("section", tag("h2", title), *parts, *lines)


def _headline(plans: Sequence[tuple[str, Plan]], accuracy: Iterable[str]) -> list[Html]:
    """Return what all layers together gain, and how far such predictions are from what was measured."""
    if not plans:
        return []
    before = sum(plan.sequential_us for _, plan in plans)
    after = sum(plan.chosen.predicted_us for _, plan in plans)
    ideal = sum(plan.ideal_us for _, plan in plans)
    gain = f"{factor(before / after)} as fast is predicted: " if after else ""
    text = f"{gain}one call of each layer takes {us(after)} us in place of {us(before)} us; ideal is {us(ideal)} us."
    return [tag("p", text, class_="headline"), *(tag("p", note) for note in accuracy)]


def _how_to_read() -> Html:
    text = (
        "Each timeline below is one predicted call. Its rows are lanes: the steps of a lane run one after the other, and lanes "
        "run at the same time. A gemm is a matmul or a part of one, and a copy sends a chunk to another rank. A flag is a word "
        "of memory: a signal raises it when a chunk is complete, and a wait lasts until that has happened."
    )
    return tag("p", text)


def ran_section(run: Run, charts: Charts) -> Html:
    """Return the section with the schedules that ran here, the checks of their results, and on GPUs their times."""
    title = f"2. Run here on {run.world_size} {'CPU ranks' if run.device == 'cpu' else 'GPUs'}"
    if not run.layers:
        return tag("section", tag("h2", title), tag("p", "No layer was run."))
    lines = [
        timeline_panel(f"timeline-measured-{i}", f"{s.name}: {s.spec}", s.spans, _marks(speeds), charts)
        for i, (s, speeds) in enumerate(run.measured_layers)
    ]
    if lines:
        lines.insert(0, tag("p", "Each timeline below is one call that was recorded here, drawn as above."))
    caption = f"{count(run.world_size, 'rank')}, {count(run.tokens, 'token')}, {run.dtype}"
    ran = table(ran_table(caption, run))
    parts = [*_explained(run), ran, *(_speeds(run, charts) if run.measured_layers else ())]
    return tag("section", tag("h2", title), *parts, *lines)


def _explained(run: Run) -> list[Html]:
    texts = [
        "Proved means that weft's checker has shown of the predicted schedule, and of the one that ran here, that every "
        "element of the result is produced exactly once from data that has arrived, without races and deadlocks. The largest "
        "error is the difference from the sequential program in float32, relative to the largest element of that result."
    ]
    if run.device == "cpu":
        same = "" if run.unpredicted_layers else "the same schedules as above with "
        texts.insert(
            0,
            f"A rank is now a process of this machine's CPU. The ranks ran {same}{count(run.tokens, 'token')} instead of "
            f"{run.machine_tokens:,}: where a GPU would run several parts as one kernel, a CPU rank runs them one by one. "
            "Times of CPUs say nothing about GPUs, so they are neither compared nor drawn; `weft run --trace FILE` writes the "
            "steps of each rank in their order.",
        )
    notes = unpredicted_notes(run)
    notes += [
        f"{s.name}: nothing overlaps, since the predicted schedule, {s.spec}, is a sequential one."
        for s in run.layers
        if s.spec == s.plan.chosen.spec and not overlaps(s.schedule)
    ]
    return [*(tag("p", text) for text in texts), *(tag("p", text, class_="note") for text in notes)]


def _speeds(run: Run, charts: Charts) -> list[Html]:
    """Return the times on GPUs."""
    times = [(layer.name, speeds, speeds.overlapped_us) for layer, speeds in run.measured_layers]
    return [
        table(speeds_table(run)),
        *(tag("p", text, class_="note") for text in speeds_notes(run)),
        bars_panel("bars-measured", "Bars: measured times; the table has the numbers", _bars(times), charts),
    ]


def _bars(times: Times) -> Figure:
    sequential, ideal = [t.sequential_us for _, t, _ in times], [t.ideal_us for _, t, _ in times]
    overlapped = [overlapped_us for _, _, overlapped_us in times]
    return bars([name for name, _, _ in times], {"sequential": sequential, "weft": overlapped, "ideal": ideal})


def _marks(times: Plan | Speeds) -> dict[str, float]:
    return {"sequential": times.sequential_us, "ideal": times.ideal_us}


def write_report(run: Run, folder: Path) -> Path:
    """Write the page of a run as `folder`/index.html, and return the file's path. The folder is created if it does not exist.

    Raises ValueError if it cannot be written.
    """
    return write_page(run_page(run), folder)


def write_page(text: str, folder: Path) -> Path:
    """Write a page as `folder`/index.html, and return the file's path. Raises ValueError if it cannot be written.

    The page is first written to a temporary file, so an error does not leave half a page.
    """
    path, temporary = folder / "index.html", folder / ".index.html.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = error.strerror or error
        raise ValueError(f"folder is {str(folder)!r}; a report needs a folder that can be written to: {reason}") from None
    return path


def run_page(run: Run) -> str:
    """Return the page of a run as HTML."""
    charts: dict[str, Figure] = {}
    sections = [
        _header(run),
        predicted_section(
            f"1. Predicted for {run.machine_words}",
            [(layer.name, layer.plan) for layer in run.layers],
            charts,
            ranks=run.machine_ranks,
            tokens=run.machine_tokens,
        ),
        ran_section(run, charts),
    ]
    return document(run.model, sections, charts)


def document(title: str, sections: Sequence[Html], charts: Mapping[str, Figure]) -> str:
    """Return a page of these sections as HTML. charts: the figure for each chart in the sections, by the id of its element.

    Each chart has its height before the script draws it, so that what stands below does not move."""
    scripts = [
        json_script("charts", charts),
        Html(f"<script>{get_plotlyjs()}</script>"),
        Html(f"<script>{text_of('page.js')}</script>"),
    ]
    heights = "".join(f"#{name} {{ height: {figure['layout']['height']}px }}\n" for name, figure in charts.items())
    return html_page(title, Html(f"<style>\n{heights}</style>"), *sections, scripts=scripts)


def _header(run: Run) -> Html:
    right_results = sum(layer.ok for layer in run.layers)
    verdict = f"{right_results} of {count(len(run.layers), 'result')} right" if run.layers else "no layer ran"
    facts = [
        ("Predicted for", f"{run.machine}, {count(run.machine_ranks, 'rank')}, {count(run.machine_tokens, 'token')}"),
        ("Run on", f"{run.device}, {count(run.world_size, 'rank')}, {count(run.tokens, 'token')}"),
        ("Inputs", f"{run.dtype}, seed {run.seed}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in run.versions.items()) or "not recorded"),
    ]
    badge = tag("span", verdict, class_="verdict right" if run.ok and run.layers else "verdict wrong")
    title = tag("h1", f"{run.model}: communication hidden behind computation ", badge)
    headline = _headline([(layer.name, layer.plan) for layer in run.layers], run.accuracy)
    return tag("header", title, *headline, *(tag("p", text) for text in _introduction(run)), facts_list(facts))


def _introduction(run: Run) -> tuple[str, ...]:
    """Return paragraphs that explain weft, the rows and the sections of the page."""
    schedules = "schedules that were chosen for these ranks" if run.unpredicted_layers else "the same schedules"
    ran = f"{schedules} on {run.world_size} processes of this machine's CPU, at a size that CPUs can do"
    if run.device != "cpu":
        ran = f"schedules on {run.world_size} GPUs of this machine, and how long they took"
    return (
        "weft is a library for PyTorch that hides communication between GPUs behind computation. A model that is spread over "
        "several GPUs has communicating layers: a matmul, or a lookup, with the collective next to it that gathers its input "
        f"or combines its output. The rows on this page are the communicating layers of {run.model}.",
        f"The page shows two things. Section 1 predicts how long each communicating layer takes on {run.machine_words}, "
        "sequentially and with a schedule that overlaps communication and computation. Section 2 shows what ran here: "
        f"{ran}. Every schedule was proved, and every result was compared with the sequential program in float32. "
        "Times are in microseconds (us).",
    )


def facts_list(facts: Iterable[tuple[str, str]]) -> Html:
    """Return a list of facts, each with its name, as HTML."""
    return tag("dl", join(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts))


def write_plan_report(
    model: str, machine: Machine, plans: Sequence[tuple[str, Plan]], folder: Path, *, tokens: int, dtypes: str
) -> Path:
    """Write `folder`/index.html, and return its path. plans: by layer. Raises ValueError if it cannot be written."""
    charts: Charts = {}
    ranks = plans[0][1].problem.world_size if plans else machine.world_size
    size = f"{count(ranks, 'rank')}, {count(tokens, 'token')}"
    facts = [("Machine", machine.description), ("Size", size), ("Inputs", dtypes)]
    headline = _headline(plans, accuracy_notes(machine, plans))
    header = tag("header", tag("h1", f"{model}: schedules that weft plans"), *headline, facts_list(facts))
    section = predicted_section(f"Predicted for {machine.description}", plans, charts, ranks=ranks, tokens=tokens)
    return write_page(document(f"{model} planned", [header, section], charts), folder)


def write_schedule_report(schedule: Schedule, machine: Machine, found: Simulation, folder: Path) -> Path:
    """Write `folder`/index.html, and return its path. Raises ValueError if it cannot be written."""
    charts: Charts = {}
    spec = found.losses.spec
    marks = {"sequential": found.sequential_us, "ideal": found.losses.ideal_us}
    timeline = timeline_panel("timeline", f"{spec} on {machine.name}", found.spans, marks, charts)
    facts = [("Problem", str(schedule.problem)), ("Machine", machine.description), ("Steps", str(len(found.spans)))]
    sources = ReportTable(
        title="Each number of the machine",
        columns=(Column("number", words=True), Column("from", words=True)),
        rows=list(machine.sources.items()),
    )
    sections = [
        tag("header", tag("h1", f"{spec} simulated"), facts_list(facts)),
        tag("section", tag("h2", "Predicted"), table(simulation_table(found)), table(losses_table(found.losses))),
        tag("section", tag("h2", "Timeline"), timeline),
        tag("footer", tag("h2", "Sources"), table(sources)),
    ]
    return write_page(document(f"{spec} simulated", sections, charts), folder)
