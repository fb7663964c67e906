"""From what a caller asks for to schedules: a name, a kept value, or what the planner says of the machine that this is.

"auto" stands for the fastest of `contenders`, measured (weft.execute.trial), where calls can be timed, and for `predicted`
elsewhere; "planned" for `predicted` everywhere. Pure functions of agreed values, so that ranks choose alike.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from weft import machine, schedules
from weft.problem import Problem
from weft.schedule import Schedule

if TYPE_CHECKING:
    from weft.planner import Plan

CHOSEN_HERE = ("auto", "planned")
"""What `schedule=` takes beside what names a schedule."""


def choose(problem: Problem, spec: str, device: torch.device, kept: dict[str, Schedule]) -> Schedule:
    """The schedule that `spec` asks for. Raises ValueError if a kept value is for another problem."""
    if spec in kept:
        schedule = kept[spec]
        if schedule.problem != problem:
            raise ValueError(f"schedule is for {schedule.problem}; this call is {problem}")
        return schedule
    return schedules.build(problem, *schedules.parse(predicted(problem, device) if spec in CHOSEN_HERE else spec))


def predicted(problem: Problem, device: torch.device) -> str:
    """The spec that is predicted to be fastest; sequential, with a warning, where no profile has so many GPUs."""
    found = _plan(problem, device)
    return found.chosen.spec if found else "sequential"


def contenders(problem: Problem, device: torch.device) -> tuple[str, ...]:
    """The specs worth measuring, sequential first; it alone, with a warning, where no profile has so many GPUs."""
    from weft.planner import shortlist

    found = _plan(problem, device)
    return shortlist(found) if found else ("sequential",)


def _plan(problem: Problem, device: torch.device) -> Plan | None:
    # Only these need the simulator and its packages: a stock PyTorch container runs every schedule that is named.
    from weft.planner import plan

    profile = machine.load(machine_for(device))
    try:
        profile.require_for(problem)
    except ValueError as error:
        warnings.warn(f"no machine profile has {problem.world_size} GPUs ({error}): sequential", stacklevel=3)
        return None
    return plan(problem, profile)


def machine_for(device: torch.device) -> str:
    """The shipped profile that is nearest to a device; h200x8 where none is."""
    name = torch.cuda.get_device_name(device).lower().replace(" ", "") if device.type == "cuda" else ""
    return next((m for m in machine.names() if m.split("x8")[0] and m.split("x8")[0] in name), "h200x8")
