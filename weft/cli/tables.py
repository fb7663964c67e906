"""Tables and charts of predictions and measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cli.gantt import gantt
from weft.cli.output import print_table, share, table, us, width_of
from weft.report.words import ms

if TYPE_CHECKING:
    from weft.core.problem import Problem
    from weft.planner.values import Plan
    from weft.tools.results import Run, Speeds

    SitePlan = tuple[str, Plan]

    SiteRow = tuple[str, str, Problem, Sequence[str | Text]]
    """layer, schedule, problem, and a cell for each further column."""

OVER_IDEAL = "Over 100% of ideal: the slower half alone took longer than the overlapped call; times scatter by that much."
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
BROKEN = {"sequential": "sequen-\ntial", "overlapped": "over-\nlapped"}


def print_predictions(out: Console, title: str, plans: Sequence[SitePlan], unit: str = "us") -> None:
    """One row a layer: the chosen schedule and what it is predicted to reach. unit: us or ms."""
    rows = [(name, plan.chosen.spec, plan.problem, _times(plan, plan.chosen.predicted_us, unit)) for name, plan in plans]
    _print_sites(out, title, _heads(unit), rows)


def print_ran(out: Console, run: Run) -> None:
    """One row a layer: proved, run and checked."""
    title = f"2. Run here on {run.world_size} {DEVICES[run.device]} ranks: {run.tokens} tokens, {run.dtype}"
    rows: list[SiteRow] = []
    for layer in run.layers:
        result = Text("right") if layer.ok else Text("WRONG", style="bold red")
        cells = "proved", result, f"{layer.max_error:.1e}", f"{layer.tolerance:.1e}"
        rows.append((layer.name, layer.spec, layer.problem, cells))
    _print_sites(out, title, ("schedule is", "result is", "max error", "allowed error"), rows)


def print_speeds(out: Console, run: Run) -> None:
    """One row a layer: what GPUs took, and the prediction for the named machine."""
    rows = [
        (
            *(layer.name, layer.spec, layer.problem),
            (*_times(speeds, speeds.overlapped_us, "ms"), ms(layer.plan.chosen.predicted_us)),
        )
        for layer, speeds in run.measured
    ]
    _print_sites(out, "Measured: medians of the slowest rank", (*_heads("ms"), f"{run.machine} ms"), rows)
    out.print(f"{run.machine} ms is the prediction above, for {run.machine_ranks} ranks and {run.machine_tokens} tokens.")
    if run.over_ideal:
        out.print(OVER_IDEAL)
    tried = [(layer.name, speeds) for layer, speeds in run.measured if speeds.tried]
    if tried:
        out.print("Chosen by measurement; ms of each schedule that was tried:")
    for name, speeds in tried:
        out.print(f"  {name}: " + ", ".join(f"{spec} {ms(time)}" for spec, time in speeds.fastest_first))


def _heads(unit: str) -> Sequence[str]:
    return (f"sequential {unit}", f"overlapped {unit}", f"ideal {unit}", "of ideal", "speed-up")


def _times(times: Plan | Speeds, overlapped_us: float, unit: str) -> Sequence[str]:
    number = {"us": us, "ms": ms}[unit]
    gain = f"{times.sequential_us / overlapped_us:.2f}x" if overlapped_us else ""
    found = (times.sequential_us, overlapped_us, times.ideal_us)
    return (*map(number, found), share(times.share_of_ideal), gain)


def print_chart(out: Console, plans: Sequence[SitePlan], unit: str = "us") -> None:
    """The predicted timeline of the layer with the most work, on rank 0. unit: us or ms."""
    name, plan = max(plans, key=lambda item: item[1].problem.flops)
    out.print(f"{name} as predicted on {plan.machine}, rank 0: {plan.chosen.spec}", style="bold")
    out.print(gantt(plan.spans, rank=0, width=min(out.width, 120), unit=unit))
    out.print()


def print_candidates(out: Console, plans: Sequence[SitePlan], *, every: bool) -> None:
    """Candidates' predicted times, a column for each layer; the chosen one is marked, and so are those that were ranked and not
    simulated. every: else the fastest of each family, with its chunk count."""
    made = table("schedule", *(site for site, _ in plans))
    columns = [_cells(plan, every=every) for _, plan in plans]
    for name in dict.fromkeys(name for cells in columns for name in cells):
        made.add_row(name, *(cells.get(name, "") for cells in columns))
    which = "every candidate" if every else "each family's best, behind :chunks"
    which += " (* chosen, ~ ranked, not simulated" + ("" if every else "; --why has all") + ")"
    out.print(f"Predicted us of {which}", style="bold")
    print_table(out, made)
    out.print()


def _cells(plan: Plan, *, every: bool) -> dict[str, str]:
    """By row, those that were simulated first, fastest first."""
    cells: dict[str, str] = {}
    known = {one.spec: ("", one.predicted_us, "*" if one == plan.chosen else " ") for one in plan.candidates}
    known |= {spec: ("~", estimate, " ") for spec, estimate in plan.estimates.items() if spec not in known}
    for spec, (sign, time, mark) in known.items():
        name, _, chunks = spec.partition(":")
        row, before = (spec, "") if every else (name, f":{chunks} " if chunks else "")
        cells.setdefault(row, f"{before}{sign}{us(time)}{mark}")
    return cells


def _print_sites(out: Console, title: str, heads: Sequence[str], rows: Sequence[SiteRow]) -> None:
    """A row for each layer on one line; on two or three lines where the console is too narrow for that."""
    made = _wide(heads, rows)
    if width_of(out, made) > out.width:
        made = _narrow(heads, rows)
    out.print(title, style="bold")
    print_table(out, made)
    out.print()


def _wide(heads: Sequence[str], rows: Sequence[SiteRow]) -> Table:
    made = table("layer", "schedule", "M", "N", "K", *heads, left=2)
    for site, schedule, problem, cells in rows:
        made.add_row(site, schedule, str(problem.m), str(problem.n), str(problem.k), *cells)
    return made


def _narrow(heads: Sequence[str], rows: Sequence[SiteRow]) -> Table:
    folded = ["\n".join(BROKEN.get(word, word) for word in head.split()) for head in heads]
    made = table("layer\nschedule", "M\nN x K", *folded)
    for site, schedule, problem, cells in rows:
        made.add_row(f"{site}\n{schedule}", f"{problem.m}\n{problem.n}x{problem.k}", *cells)
    return made
