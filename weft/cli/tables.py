"""Tables and charts of predictions and measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cli.gantt import gantt
from weft.cli.output import print_table, share, table, us, width_of

if TYPE_CHECKING:
    from weft.core.problem import Problem
    from weft.planner.values import Plan
    from weft.tools.results import Run, SiteRun

    SitePlan = tuple[str, Plan]

    SiteRow = tuple[str, str, Problem, Sequence[str | Text]]
    """site, schedule, problem, and a cell for each further column."""

ON_CPU = "Times are of processes on this host's CPU: they show that it runs and is right, not that it is fast."
OVER_IDEAL = "Over 100% of ideal: the slower half alone took longer than the overlapped call; times scatter by that much."
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
BROKEN = {"sequential": "sequen-\ntial", "overlapped": "over-\nlapped"}


def print_predictions(out: Console, title: str, plans: Sequence[SitePlan]) -> None:
    """One row a site: the chosen schedule and what it is predicted to reach."""
    heads = ("sequential us", "overlapped us", "ideal us", "of ideal", "speed-up")
    _print_sites(out, title, heads, [(site, plan.chosen.spec, plan.problem, _predicted(plan)) for site, plan in plans])


def print_measured(out: Console, run: Run) -> None:
    """One row a site: checked, timed, and beside it the prediction for the named machine."""
    title = f"Measured on {run.world_size} {DEVICES[run.device]} ranks: {run.tokens} tokens, {run.dtype}"
    heads = ("max error", "sequential us", "overlapped us", "ideal us", "of ideal", f"{run.machine} us")
    _print_sites(out, title, heads, [(site.site, _spec(site), site.problem, _measured(site)) for site in run.sites])
    out.print(f"{run.machine} us is the prediction above, for {run.machine_ranks} ranks and {run.machine_tokens} tokens.")
    if run.over_ideal:
        out.print(OVER_IDEAL)
    _print_tried(out, run)
    if run.device == "cpu":
        out.print(ON_CPU)


def _print_tried(out: Console, run: Run) -> None:
    """Why these schedules, where that was measured: every candidate's time."""
    sites = [site for site in run.sites if site.tried]
    if sites:
        out.print("Chosen by measurement; us of each schedule that was tried:")
    for site in sites:
        out.print(f"  {site.site}: " + ", ".join(f"{spec} {us(time)}" for spec, time in site.fastest_first))


def print_chart(out: Console, plans: Sequence[SitePlan]) -> None:
    """The predicted timeline of the site with the most work, on rank 0."""
    site, plan = max(plans, key=lambda item: item[1].problem.flops)
    out.print(f"{site} as predicted on {plan.machine}, rank 0: {plan.chosen.spec}", style="bold")
    out.print(gantt(plan.spans, rank=0, width=min(out.width, 120)))
    out.print()


def print_candidates(out: Console, plans: Sequence[SitePlan], *, every: bool) -> None:
    """Candidates' predicted times, a column a site; the chosen one is marked. every: else the fastest of each family, with its
    chunk count."""
    made = table("schedule", *(site for site, _ in plans))
    columns = [_cells(plan, every=every) for _, plan in plans]
    for name in dict.fromkeys(name for cells in columns for name in cells):
        made.add_row(name, *(cells.get(name, "") for cells in columns))
    which = "every candidate (* chosen)" if every else "each family's best, behind :chunks (* chosen; --why has all)"
    out.print(f"Predicted us of {which}", style="bold")
    print_table(out, made)
    out.print()


def _cells(plan: Plan, *, every: bool) -> dict[str, str]:
    """By row, fastest first."""
    cells: dict[str, str] = {}
    for one in plan.candidates:
        row = one.spec if every else one.schedule
        chunks = "" if every else one.spec.removeprefix(one.schedule)
        cells.setdefault(row, f"{chunks} {us(one.predicted_us)}".strip() + ("*" if one == plan.chosen else " "))
    return cells


def _predicted(plan: Plan) -> Sequence[str]:
    best = plan.chosen.predicted_us
    gain = f"{plan.sequential_us / best:.2f}x" if best else ""
    return us(plan.sequential_us), us(best), us(plan.ideal_us), share(plan.share_of_ideal), gain


def _measured(site: SiteRun) -> Sequence[str | Text]:
    times = us(site.sequential_us), us(site.overlapped_us), us(site.ideal_us)
    return _error(site), *times, share(site.share_of_ideal), us(site.plan.chosen.predicted_us)


def _error(site: SiteRun) -> Text:
    return Text(f"{site.max_error:.1e}") if site.ok else Text(f"{site.max_error:.1e} WRONG", style="bold red")


def _spec(site: SiteRun) -> str:
    from weft.schedules import spec

    return spec(site.schedule, site.chunks)


def _print_sites(out: Console, title: str, heads: Sequence[str], rows: Sequence[SiteRow]) -> None:
    """A row a site on one line; on two or three lines where the console is too narrow for that."""
    made = _wide(heads, rows)
    if width_of(out, made) > out.width:
        made = _narrow(heads, rows)
    out.print(title, style="bold")
    print_table(out, made)
    out.print()


def _wide(heads: Sequence[str], rows: Sequence[SiteRow]) -> Table:
    made = table("site", "schedule", "M", "N", "K", *heads, left=2)
    for site, schedule, problem, cells in rows:
        made.add_row(site, schedule, str(problem.m), str(problem.n), str(problem.k), *cells)
    return made


def _narrow(heads: Sequence[str], rows: Sequence[SiteRow]) -> Table:
    folded = ["\n".join(BROKEN.get(word, word) for word in head.split()) for head in heads]
    made = table("site\nschedule", "M\nN x K", *folded)
    for site, schedule, problem, cells in rows:
        made.add_row(f"{site}\n{schedule}", f"{problem.m}\n{problem.n}x{problem.k}", *cells)
    return made
