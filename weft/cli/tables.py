"""Tables and charts of predictions and measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from weft.cli.gantt import gantt
from weft.cli.output import share, table, us

if TYPE_CHECKING:
    from weft.planner.values import Plan
    from weft.problem import Problem
    from weft.results import Run, SiteRun, Skipped

    SitePlan = tuple[str, Plan]

ON_CPU = "Times are of processes on this host's CPU: they show that it runs and is right, not that it is fast."


def shape(problem: Problem) -> tuple[str, str, str]:
    return str(problem.m), str(problem.n), str(problem.k)


def prediction_table(title: str, plans: Sequence[SitePlan]) -> Table:
    """One row a site: the chosen schedule and what it is predicted to reach."""
    columns = ("site", "schedule", "M", "N", "K", "sequential us", "overlapped us", "ideal us", "of ideal", "speed-up")
    made = table(title, *columns, left=2)
    for site, plan in plans:
        best = plan.chosen.predicted_us
        made.add_row(
            site,
            plan.chosen.spec,
            *shape(plan.problem),
            us(plan.sequential_us),
            us(best),
            us(plan.ideal_us),
            share(plan.share_of_ideal),
            f"{plan.sequential_us / best:.2f}x" if best else "",
        )
    return made


def prediction_chart(plans: Sequence[SitePlan], width: int) -> Group:
    """The predicted timeline of the site with the most work, on rank 0."""
    site, plan = max(plans, key=lambda item: item[1].problem.flops)
    title = f"{site} as predicted on {plan.machine}, rank 0: {plan.chosen.spec}"
    return Group(Text(title, style="bold"), gantt(plan.spans, rank=0, width=min(width, 120)), Text())


def measured_table(run: Run) -> Table:
    """One row a site: checked, timed, and beside it the prediction for the named machine."""
    columns = ("site", "schedule", "M", "N", "K", "max error", "sequential us", "overlapped us", "ideal us", "of ideal")
    made = table(_measured_title(run), *columns, f"{run.machine} us", left=2, caption=ON_CPU if run.device == "cpu" else None)
    for site in run.sites:
        made.add_row(
            site.site,
            f"{site.schedule}:{site.chunks}" if site.chunks > 1 else site.schedule,
            *shape(site.problem),
            _error(site),
            us(site.sequential_us),
            us(site.overlapped_us),
            us(site.ideal_us),
            share(site.share_of_ideal),
            us(site.plan.chosen.predicted_us),
        )
    return made


def print_skipped(out: Console, skipped: Sequence[Skipped]) -> None:
    """Sites that weft cannot overlap yet, one a line."""
    for site in skipped:
        out.print(str(site))


def candidates_table(plans: Sequence[SitePlan]) -> Table:
    """Every candidate's predicted time, a column a site; the chosen one is marked."""
    made = table("Candidates, predicted us (* chosen)", "schedule", *(site for site, _ in plans))
    times = [{c.spec: c.predicted_us for c in plan.candidates} for _, plan in plans]
    for spec in dict.fromkeys(c.spec for _, plan in plans for c in plan.candidates):
        cells = [
            us(found[spec]) + ("*" if plan.chosen.spec == spec else " ") if spec in found else ""
            for found, (_, plan) in zip(times, plans, strict=True)
        ]
        made.add_row(spec, *cells)
    return made


def _measured_title(run: Run) -> str:
    return f"Measured on {run.world_size} {run.device} ranks: {run.tokens} tokens, {run.dtype}"


def _error(site: SiteRun) -> Text:
    return Text(f"{site.max_error:.1e}") if site.ok else Text(f"{site.max_error:.1e} WRONG", style="bold red")
