"""Writes the page of one schedule that was simulated on one machine: times, losses, and every rank's lanes over time."""

from __future__ import annotations

from pathlib import Path

from weft.core.machine import Machine
from weft.core.schedule import Schedule
from weft.planner.simulated import Simulation
from weft.report.html import Html, table, tag
from weft.report.page import document, facts_list, write_page
from weft.report.panels import Charts, timeline_panel
from weft.report.words import ms


def write_schedule_report(schedule: Schedule, machine: Machine, found: Simulation, folder: Path) -> Path:
    """Write `folder`/index.html, and return its path. Raises ValueError if it cannot be written."""
    return write_page(schedule_page(schedule, machine, found), folder)


def schedule_page(schedule: Schedule, machine: Machine, found: Simulation) -> str:
    """Return the page as HTML."""
    charts: Charts = {}
    losses = found.losses
    marks = {"sequential": found.sequential_us, "ideal": losses.ideal_us}
    timeline = timeline_panel("timeline", f"{losses.spec} on {machine.name}", found.spans, marks, charts)
    sections = [
        _header(schedule, machine, found),
        _times(found),
        tag("section", tag("h2", "Timeline"), timeline),
        _numbers(machine),
    ]
    return document(f"{losses.spec} simulated", sections, charts)


def _header(schedule: Schedule, machine: Machine, found: Simulation) -> Html:
    facts = [("Problem", str(schedule.problem)), ("Machine", machine.description), ("Steps", str(len(found.spans)))]
    return tag("header", tag("h1", f"{found.losses.spec} simulated"), facts_list(facts))


def _times(found: Simulation) -> Html:
    losses = found.losses
    times = [
        (losses.spec, ms(found.total_us)),
        ("sequential", ms(found.sequential_us)),
        ("whole computation alone", ms(losses.computation_us)),
        ("whole communication alone", ms(losses.communication_us)),
        ("exposed", ms(losses.exposed_us)),
    ]
    ratios = [
        ("decomposition of the matmul", _ratio(losses.gemm_dil)),
        ("contention of the matmul", _ratio(losses.gemm_cil)),
        ("decomposition of the communication", _ratio(losses.communication_dil)),
        ("contention of the communication", _ratio(losses.communication_cil)),
    ]
    parts = table("Times", ("", "ms"), times), table("Losses: times over those alone, or whole", ("", "ratio"), ratios)
    return tag("section", tag("h2", "Predicted"), *parts)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _numbers(machine: Machine) -> Html:
    rows = list(machine.sources.items())
    return tag("footer", tag("h2", "Sources"), table("Each number of the machine", ("number", "from"), rows, words=(0, 1)))
