"""This module builds the sections of the page. Each adds its figures to `charts` by the id of the element that shows them."""

from __future__ import annotations

from collections.abc import Sequence

from weft.planner.values import Plan
from weft.report.charts import Figure, bars
from weft.report.html import Html, table, tag
from weft.report.panels import Charts, bars_panel, timeline_panel
from weft.report.words import count, judge_plan, ms, percent, reason, sizes
from weft.schedules import overlaps
from weft.tools.results import LayerRun, Run, Speeds

Times = Sequence[tuple[str, Plan | Speeds, float]]
"""For each layer, its name, its times, and the time of the overlapped call in us."""
HEADS = ("communicating layer", "M × N × K", "schedule")
TIMES = ("sequential ms", "weft ms", "ideal ms", "share of ideal", "speed-up")


def predicted_section(title: str, plans: Sequence[tuple[str, Plan]], charts: Charts, *, ranks: int, tokens: int) -> Html:
    """Return the section with the predicted times on the machine in the title. plans: by layer."""
    if not plans:
        return tag("section", tag("h2", title), tag("p", "No layer was planned."))
    times = [(name, plan, plan.chosen.predicted_us) for name, plan in plans]
    texts = (
        f"A rank is one process with one GPU; here there are {ranks}. A schedule says what each rank computes and "
        "sends, in which order, and what waits for what. A name that ends in :N sends each rank's part in N chunks.",
        "Sequential is the matmul and the collective one after the other. The column weft is the named schedule, which weft's "
        "planner chose unless it was asked for: it overlaps both, or is only faster than sequential, or is sequential itself. "
        "Ideal is the longer of the matmul alone and the collective alone, as if the other one were hidden completely. The "
        "share of ideal is ideal divided by weft, and the speed-up is sequential divided by weft.",
    )
    rows = [
        (name, sizes(plan.problem), plan.chosen.spec, judge_plan(plan), *_times(plan, planned_us))
        for name, plan, planned_us in times
    ]
    caption = f"One call, {count(ranks, 'rank')}, {count(tokens, 'token')}; M, N and K of all ranks"
    lines = [
        timeline_panel(
            *(f"timeline-predicted-{i}", f"{name}: {plan.chosen.spec}"), plan.spans, _marks(plan), charts, reason(plan)
        )
        for i, (name, plan) in enumerate(plans)
    ]
    heads = (*HEADS, "verdict", *TIMES)
    parts = [*(tag("p", text) for text in texts), _lead(plans), table(caption, heads, rows, words=(0, 2, 3))]
    parts += [
        bars_panel("bars-predicted", "Bars: predicted times; the table has the numbers", _bars(times), charts),
        _how_to_read(),
    ]
    return tag("section", tag("h2", title), *parts, *lines)


def _lead(plans: Sequence[tuple[str, Plan]]) -> Html:
    before = sum(plan.sequential_us for _, plan in plans)
    after = sum(plan.chosen.predicted_us for _, plan in plans)
    ideal = sum(plan.ideal_us for _, plan in plans)
    gain = f"{before / after:.2f} times as fast as" if after else "as fast as"
    text = (
        f"One call of each layer is predicted to take {ms(before)} ms sequentially and {ms(after)} ms as planned, "
        f"which is {gain} sequential; ideal is {ms(ideal)} ms."
    )
    return tag("p", text, class_="lead")


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
        timeline_panel(
            *(f"timeline-measured-{i}", f"{s.name}: {s.spec}"), s.spans, _marks(s.speeds) if s.speeds else {}, charts
        )
        for i, s in enumerate(run.layers)
    ]
    read = tag("p", "Each timeline below is one call that was recorded here, drawn as above.")
    parts = [*_explained(run), _ran_table(run), *(_speeds(run, charts) if run.measured_layers else ()), read]
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
            "Times of CPUs say nothing about GPUs, so they are not compared: the timelines show the order of the steps. "
            "A copy within one memory is short, hence a thin line.",
        )
    notes = [
        f"{s.name}: ran {s.spec}, which was chosen for these ranks; {s.plan.chosen.spec} is predicted."
        for s in run.unpredicted_layers
    ]
    notes += [
        f"{s.name}: nothing overlaps, since the predicted schedule, {s.spec}, is a sequential one."
        for s in run.layers
        if s.spec == s.plan.chosen.spec and not overlaps(s.schedule)
    ]
    return [*(tag("p", text) for text in texts), *(tag("p", text, class_="note") for text in notes)]


def _ran_table(run: Run) -> Html:
    rows = [
        (s.name, sizes(s.problem), s.spec, "proved", _verdict(s), f"{s.max_error:.2g}", f"{s.tolerance:.2g}")
        for s in run.layers
    ]
    caption = f"{count(run.world_size, 'rank')}, {count(run.tokens, 'token')}, {run.dtype}; M, N and K of all ranks"
    heads = (*HEADS, "proof", "result", "largest error", "allowed error")
    return table(caption, heads, rows, words=(0, 2, 3, 4))


def _speeds(run: Run, charts: Charts) -> list[Html]:
    """Return the times on GPUs."""
    times = [(layer.name, speeds, speeds.overlapped_us) for layer, speeds in run.measured_layers]
    notes = []
    if run.exceeds_ideal:
        notes.append(
            "Where the share of ideal is over 100 %, the slower half alone took longer than the overlapped call; times scatter "
            "by that much, or the schedule's exchange is faster than the collective."
        )
    notes += [f"{s.name}: chosen by measurement, ms: {_tried(speeds)}" for s, speeds in run.measured_layers if speeds.tried]
    caption = "Medians over rounds of the slowest rank; bars below show the same"
    rows = [(s.name, s.spec, *_times(speeds, speeds.overlapped_us)) for s, speeds in run.measured_layers]
    return [
        table(caption, (HEADS[0], HEADS[2], *TIMES), rows, words=(0, 1)),
        *(tag("p", text, class_="note") for text in notes),
        bars_panel("bars-measured", "Bars: measured times; the table has the numbers", _bars(times), charts),
    ]


def _times(times: Plan | Speeds, overlapped_us: float) -> tuple[str, ...]:
    gain = f"{times.sequential_us / overlapped_us:.2f} ×" if overlapped_us else "–"
    found = (times.sequential_us, overlapped_us, times.ideal_us)
    return (*map(ms, found), percent(times.share_of_ideal), gain)


def _bars(times: Times) -> Figure:
    sequential, ideal = [t.sequential_us for _, t, _ in times], [t.ideal_us for _, t, _ in times]
    overlapped = [overlapped_us for _, _, overlapped_us in times]
    return bars([name for name, _, _ in times], {"sequential": sequential, "weft": overlapped, "ideal": ideal})


def _marks(times: Plan | Speeds) -> dict[str, float]:
    return {"sequential": times.sequential_us, "ideal": times.ideal_us}


def _tried(speeds: Speeds) -> str:
    """Return the time of every candidate in words, the fastest first."""
    return ", ".join(f"{name} {ms(time)}" for name, time in speeds.candidates_us)


def _verdict(layer: LayerRun) -> Html:
    return tag("span", "right" if layer.ok else "WRONG", class_="right" if layer.ok else "wrong")
