"""Prints tables and charts of predictions and measurements.

`gantt` draws the spans of one rank: a line for each lane, time from left to right, a letter for each kind of step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cli.output import print_table, share, table, us, width_of
from weft.core.problem import RaggedProblem
from weft.core.span import Kind, Span
from weft.report.words import judge_plan, mib, ms
from weft.schedules import VERDICTS, overlaps

if TYPE_CHECKING:
    from weft.core.problem import Problem
    from weft.planner import TrainingPlan
    from weft.planner.values import Plan
    from weft.tools.results import Run, Speeds

    LayerPlan = tuple[str, Plan]

    LayerRow = tuple[str, str, Problem, Sequence[str | Text]]
    """The layer, schedule and problem of a row, and a cell for each further column."""

MARKS: dict[Kind, tuple[str, str]] = {
    "wait": (".", "dim"),
    "signal": ("!", "magenta"),
    "collective": ("~", "yellow"),
    "message": ("^", "yellow"),
    "copy": ("=", "cyan"),
    "reduce": ("+", "blue"),
    "gemm": ("#", "green"),
    "call": ("$", "green"),
    "lookup": ("%", "green"),
}
"""The mark and colour of each kind. Kinds that are listed later are drawn over earlier ones."""


def gantt(spans: Iterable[Span], *, rank: int, width: int, unit: str = "us") -> Text:
    """Draw the lanes of `rank` on `width` columns, with a scale below in us or ms, and a legend of the marks."""
    own = [span for span in spans if span.rank == rank]
    if not own:
        return Text("(no spans)")
    start, end = min(s.start_us for s in own), max(s.end_us for s in own)
    lanes = list(dict.fromkeys(span.lane for span in own))
    label = max(map(len, lanes)) + 2
    columns = max(10, width - label)
    text = Text(no_wrap=True, overflow="crop")
    for lane in lanes:
        text.append(f"{lane:<{label}}")
        text.append_text(_line([s for s in own if s.lane == lane], start, (end - start) or 1.0, columns)).append("\n")
    last = f"{end - start:,.0f} us" if unit == "us" else f"{ms(end - start)} ms"
    text.append(" " * label + "0" + last.rjust(columns - 1) + "\n", style="dim")
    used = [kind for kind in reversed(MARKS) if any(s.kind == kind for s in own)]
    legend = [*(f"{MARKS[kind][0]} {kind}" for kind in used), "| a step starts"]
    text.append("\n".join(_folded(legend, indent=label, width=label + columns)), style="dim")
    return text


def _folded(entries: Sequence[str], *, indent: int, width: int) -> list[str]:
    """Arrange entries next to each other, on as many lines as they need."""
    lines = [" " * indent + entries[0]]
    for entry in entries[1:]:
        if len(lines[-1]) + 3 + len(entry) <= width:
            lines[-1] += "   " + entry
        else:
            lines.append(" " * indent + entry)
    return lines


def _line(spans: list[Span], start: float, length: float, columns: int) -> Text:
    """Draw one lane. A step is at least one column wide. From three columns on, its first column is a bar."""
    marks: list[tuple[str, str]] = [(" ", "")] * columns
    order = list(MARKS)
    for span in sorted(spans, key=lambda s: (order.index(s.kind), s.start_us)):
        low = min(int((span.start_us - start) / length * columns), columns - 1)
        high = max(low + 1, round((span.end_us - start) / length * columns))
        mark, style = MARKS[span.kind]
        for at in range(low, high):
            marks[at] = ("|" if at == low and high - low >= 3 else mark, style)
    text = Text()
    for mark, style in marks:
        text.append(mark, style=style)
    return text


OVER_IDEAL = "Over 100% of ideal: the slower half alone took longer than the overlapped call; times scatter by that much."
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
BROKEN = {"sequential": "sequen-\ntial"}


def print_answer(out: Console, setting: str, plans: Sequence[LayerPlan], counts: Sequence[int]) -> None:
    """Print what the whole model gains, then a line for each layer. setting: machine, ranks and sizes. counts: the number of
    the model's layers that have each of the plans."""
    before = sum(count * plan.sequential_us for count, (_, plan) in zip(counts, plans, strict=True))
    after = sum(count * plan.chosen.predicted_us for count, (_, plan) in zip(counts, plans, strict=True))
    verdicts = Counter(judge_plan(plan) for _, plan in plans)
    kinds = ", ".join(f"{verdicts[kind]} {kind}" for kind in VERDICTS if verdicts[kind])
    out.print(f"Predicted on {setting}.\n")
    gain = f"{before / after:.2f}x as fast: " if after else ""
    times = f"take {ms(after)} ms instead of {ms(before)} ms with each matmul and NCCL in turn"
    out.print(f"{gain}the communicating layers of one forward pass {times}; {kinds}.", style="bold")
    out.print()
    made = table("layer", "verdict", "schedule", "gain", "us", "why", left=3)
    made.columns[-1].justify = "left"
    rows = [(name, judge_plan(plan), plan.chosen.spec, _gain(plan, plan.chosen.predicted_us), plan) for name, plan in plans]
    for *cells, plan in rows:
        made.add_row(*cells, f"{us(plan.sequential_us)} -> {us(plan.chosen.predicted_us)}", give_reason(plan))
    if width_of(out, made) <= out.width:
        out.print(made)
    else:
        for name, verdict, schedule, gain, plan in rows:
            out.print(f"{name}: {verdict}, {gain} by {schedule}: {give_reason(plan)}")
    out.print()


def print_training(out: Console, step: TrainingPlan) -> None:
    """Print the times of an average layer's training step, eager and compiled, with and without checkpointing."""
    made = table("program, us", "computation alone", "sequential", "weft", "sequential exposes", "weft exposes", "hidden")
    for name, found in step.steps().items():
        times = (found.computation_us, found.sequential_us, found.weft_us, *found.exposed_us)
        made.add_row(name, *map(us, times), share(found.hidden))
    out.print("A training step of a layer, forward and backward, tokens in one sequence:", style="bold")
    print_table(out, made)
    out.print(f"Gathered inputs that a layer keeps for the backward pass: {mib(step.kept_bytes)} on a rank.\n")


def give_reason(plan: Plan) -> str:
    """Return the reason of a choice in a few words, with the time that decided."""
    best, problem = plan.chosen, plan.problem
    if problem.world_size == 1 or not problem.m or not problem.n:
        return "there is nothing to communicate"
    saved, most = plan.sequential_us - best.predicted_us, plan.sequential_us - plan.ideal_us
    if overlaps(best.schedule):
        if saved < 0:
            why = "but calls with splits have no other" if isinstance(problem, RaggedProblem) else "but was asked for"
            return f"takes {us(-saved)} us more than sequential, {why}"
        return f"saves {us(saved)} of at most {us(most)} us" if saved < most else f"saves {us(saved)} us"
    rival = next((one for one in plan.candidates if overlaps(one.schedule)), None)
    other = "nothing that overlaps was considered"
    if rival is not None:
        other = f"{rival.spec} would take {us(rival.predicted_us - best.predicted_us)} us more"
    return f"its stores save {us(saved)} us over NCCL; {other}" if saved > 0 else other


def print_predictions(out: Console, title: str, plans: Sequence[LayerPlan], unit: str = "us") -> None:
    """Print a row for each layer: the chosen schedule and its predicted times. unit: us or ms."""
    rows = [(name, plan.chosen.spec, plan.problem, _times(plan, plan.chosen.predicted_us, unit)) for name, plan in plans]
    _print_layers(out, title, _heads(unit), rows)


def print_ran(out: Console, run: Run) -> None:
    """Print a row for each layer: whether it was proved, run and checked."""
    title = f"2. Run here on {run.world_size} {DEVICES[run.device]} ranks: {run.tokens} tokens, {run.dtype}"
    rows: list[LayerRow] = []
    for layer in run.layers:
        result = Text("right") if layer.ok else Text("WRONG", style="bold red")
        cells = "proved", result, f"{layer.max_error:.1e}", f"{layer.tolerance:.1e}"
        rows.append((layer.name, layer.spec, layer.problem, cells))
    _print_layers(out, title, ("schedule is", "result is", "max error", "allowed error"), rows)


def print_speeds(out: Console, run: Run) -> None:
    """Print a row for each layer: the times on GPUs, and the prediction for the named machine."""
    rows = [
        (
            *(layer.name, layer.spec, layer.problem),
            (*_times(speeds, speeds.overlapped_us, "ms"), ms(layer.plan.chosen.predicted_us)),
        )
        for layer, speeds in run.measured_layers
    ]
    _print_layers(out, "Measured: medians of the slowest rank", (*_heads("ms"), f"{run.machine} ms"), rows)
    out.print(f"{run.machine} ms is the prediction above, for {run.machine_ranks} ranks and {run.machine_tokens} tokens.")
    if run.exceeds_ideal:
        out.print(OVER_IDEAL)
    tried = [(layer.name, speeds) for layer, speeds in run.measured_layers if speeds.tried]
    if tried:
        out.print("Chosen by measurement; ms of each schedule that was tried:")
    for name, speeds in tried:
        out.print(f"  {name}: " + ", ".join(f"{spec} {ms(time)}" for spec, time in speeds.candidates_us))


def _heads(unit: str) -> Sequence[str]:
    return (f"sequential {unit}", f"weft {unit}", f"ideal {unit}", "of ideal", "speed-up")


def _times(times: Plan | Speeds, overlapped_us: float, unit: str) -> Sequence[str]:
    number = {"us": us, "ms": ms}[unit]
    found = (times.sequential_us, overlapped_us, times.ideal_us)
    return (*map(number, found), share(times.share_of_ideal), _gain(times, overlapped_us))


def _gain(times: Plan | Speeds, overlapped_us: float) -> str:
    return f"{times.sequential_us / overlapped_us:.2f}x" if overlapped_us else ""


def print_chart(out: Console, plans: Sequence[LayerPlan], unit: str = "us") -> None:
    """Print the predicted timeline on rank 0 of the layer with the most work. unit: us or ms."""
    name, plan = max(plans, key=lambda item: item[1].problem.flops)
    out.print(f"{name} as predicted on {plan.machine}, rank 0: {plan.chosen.spec}", style="bold")
    out.print(gantt(plan.spans, rank=0, width=min(out.width, 120), unit=unit))
    out.print()


def print_candidates(out: Console, plans: Sequence[LayerPlan]) -> None:
    """Print the predicted time of every candidate, with a column for each layer. The chosen candidate is marked, and so are
    those that were ranked but not simulated."""
    made = table("schedule", *(layer for layer, _ in plans))
    columns = [_format_candidates(plan) for _, plan in plans]
    for name in dict.fromkeys(name for cells in columns for name in cells):
        made.add_row(name, *(cells.get(name, "") for cells in columns))
    out.print("Predicted us of every candidate (* chosen, ~ ranked, not simulated)", style="bold")
    print_table(out, made)
    out.print()


def _format_candidates(plan: Plan) -> dict[str, str]:
    """Return a cell for each schedule. The simulated ones come first, fastest first."""
    cells = {one.spec: f"{us(one.predicted_us)}{'*' if one == plan.chosen else ' '}" for one in plan.candidates}
    return cells | {spec: f"~{us(estimate)} " for spec, estimate in plan.estimates.items() if spec not in cells}


def _print_layers(out: Console, title: str, heads: Sequence[str], rows: Sequence[LayerRow]) -> None:
    """Print a row for each layer on one line, or on two or three lines if the console is too narrow."""
    made = _wide(heads, rows)
    if width_of(out, made) > out.width:
        made = _narrow(heads, rows)
    out.print(title, style="bold")
    print_table(out, made)
    out.print()


def _wide(heads: Sequence[str], rows: Sequence[LayerRow]) -> Table:
    made = table("layer", "schedule", "M", "N", "K", *heads, left=2)
    for layer, schedule, problem, cells in rows:
        made.add_row(layer, schedule, str(problem.m), str(problem.n), str(problem.k), *cells)
    return made


def _narrow(heads: Sequence[str], rows: Sequence[LayerRow]) -> Table:
    folded = ["\n".join(BROKEN.get(word, word) for word in head.split()) for head in heads]
    made = table("layer\nschedule", "M\nN x K", *folded)
    for layer, schedule, problem, cells in rows:
        made.add_row(f"{layer}\n{schedule}", f"{problem.m}\n{problem.n}x{problem.k}", *cells)
    return made
