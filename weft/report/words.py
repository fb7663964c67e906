"""This module turns numbers, sizes and reasons into text, for all tables and charts."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from weft.core.problem import LookupProblem, Problem
from weft.schedules import judge, overlaps

if TYPE_CHECKING:
    from weft.planner.values import Plan


def judge_plan(plan: Plan) -> str:
    """Judge the schedule that a plan has chosen."""
    return judge(plan.chosen.schedule, plan.chosen.predicted_us, plan.sequential_us)


def ms(us: float) -> str:
    """Return microseconds as milliseconds, with about three digits.

    >>> ms(4.321), ms(432.1), ms(43210.0), ms(4321000.0), ms(0.0)
    ('0.00432', '0.432', '43.2', '4,321', '0')
    """
    digits = 2 - math.floor(math.log10(abs(us) / 1e3)) if us else 0
    return f"{us / 1e3:,.{min(max(digits, 0), 6)}f}"


def reason(plan: Plan) -> str:
    """Explain the planner's choice: the time that could be hidden, and the cost of hiding it."""
    work, exchange = halves(plan.problem)
    alone = f"The {work} alone takes {ms(plan.computation_us)} ms and the {exchange} alone {ms(plan.communication_us)} ms."
    best = plan.chosen
    if overlaps(best.schedule):
        gain, rest = (_versus(best.predicted_us - us) for us in (plan.sequential_us, plan.ideal_us))
        return f"{alone} {best.spec} takes {ms(best.predicted_us)} ms: {gain} than sequential and {rest} than the ideal."
    rival = next((one for one in plan.candidates if overlaps(one.schedule)), None)
    if rival is None:
        return alone
    return (
        f"{alone} The planner chooses {best.spec}, in which nothing overlaps. It takes "
        f"{ms(best.predicted_us - plan.ideal_us)} ms more than the ideal. The fastest schedule that overlaps, {rival.spec}, "
        f"takes {ms(rival.predicted_us - plan.ideal_us)} ms more than the ideal, for smaller matmuls, copies and flags, so it "
        "gains nothing."
    )


def _versus(us: float) -> str:
    return f"{ms(abs(us))} ms {'more' if us > 0 else 'less'}"


def halves(problem: Problem) -> tuple[str, str]:
    """Return the names of an operator's computation and its collective."""
    work = "lookup" if isinstance(problem, LookupProblem) else "matmul"
    collective = re.sub("ragged|matmul|embedding_bag|columns", "", problem.op).strip("_")
    return work, collective.replace("_", "-")


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def mib(nbytes: float) -> str:
    """Return bytes as MiB.

    >>> mib(256), mib(1.5 * 2**20), mib(2**34)
    ('0.00024 MiB', '1.5 MiB', '16,384.0 MiB')
    """
    number = nbytes / 2**20
    return f"{number:,.1f} MiB" if number >= 1 else f"{number:.2g} MiB"


def sizes(problem: Problem) -> str:
    """Return the global M, N and K in words."""
    return f"{problem.m:,} × {problem.n:,} × {problem.k:,}"


def count(number: int, noun: str) -> str:
    """Return a number with a noun, in the plural unless the number is 1.

    >>> count(1, "rank"), count(4, "rank")
    ('1 rank', '4 ranks')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"
