"""Writes the page of a plan, which has the predicted times of each communicating layer of a model on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.core.machine import Machine
from weft.planner.values import Plan
from weft.report.html import tag
from weft.report.page import document, facts_list, write_page
from weft.report.panels import Charts
from weft.report.sections import predicted_section
from weft.report.words import count


def write_plan_report(
    model: str, machine: Machine, plans: Sequence[tuple[str, Plan]], folder: Path, *, tokens: int, dtypes: str
) -> Path:
    """Write `folder`/index.html, and return its path. plans: by layer. Raises ValueError if it cannot be written."""
    charts: Charts = {}
    ranks = plans[0][1].problem.world_size if plans else machine.world_size
    size = f"{count(ranks, 'rank')}, {count(tokens, 'token')}"
    facts = [("Machine", machine.description), ("Size", size), ("Inputs", dtypes)]
    header = tag("header", tag("h1", f"{model}: schedules that weft plans"), facts_list(facts))
    section = predicted_section(f"Predicted for {machine.description}", plans, charts, ranks=ranks, tokens=tokens)
    return write_page(document(f"{model} planned", [header, section], charts), folder)
