"""From what a caller asks for to schedules: a name, a kept value, or what the planner says of the machine that this is.

"auto" stands for the fastest of `contenders`, measured (weft.execute.trial), where calls can be timed, and for `predicted`
elsewhere; "planned" for `predicted` everywhere; "heuristic" for what sizes alone speak for (weft.rules). Pure functions of
agreed values, so that ranks choose alike.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from weft import machine, schedules
from weft.machine import Machine
from weft.problem import Problem
from weft.rules import heuristic
from weft.schedule import Schedule

if TYPE_CHECKING:
    from weft.planner import Plan

CHOSEN_HERE = ("auto", "planned", "heuristic")
"""What `schedule=` takes beside what names a schedule."""


def choose(problem: Problem, spec: str, device: torch.device, kept: dict[str, Schedule]) -> Schedule:
    """The schedule that `spec` asks for. Raises ValueError if a kept value is for another problem."""
    if spec in kept:
        schedule = kept[spec]
        if schedule.problem != problem:
            raise ValueError(f"schedule is for {schedule.problem}; this call is {problem}")
        return schedule
    if spec in CHOSEN_HERE:
        spec = by_sizes(problem, device) if spec == "heuristic" else predicted(problem, device)
    return schedules.build(problem, *schedules.parse(spec))


def by_sizes(problem: Problem, device: torch.device) -> str:
    """The spec that the problem's sizes speak for; sequential, with a warning, where no profile has so many GPUs."""
    profile = _profile(problem, device)
    return heuristic(problem, profile) if profile else "sequential"


def predicted(problem: Problem, device: torch.device) -> str:
    """The spec that is predicted to be fastest; sequential, with a warning, where no profile has so many GPUs."""
    found = _plan(problem, device)
    return found.chosen.spec if found else "sequential"


def contenders(problem: Problem, device: torch.device) -> tuple[str, ...]:
    """The specs worth measuring: the planner's shortlist, sequential first, and what sizes alone speak for, in the place of the
    last one if there are too many. Sequential alone, with a warning, where no profile has so many GPUs."""
    from weft.planner import shortlist
    from weft.planner.shortlist import joined

    found = _plan(problem, device)
    return joined(shortlist(found), by_sizes(problem, device)) if found else ("sequential",)


def _plan(problem: Problem, device: torch.device) -> Plan | None:
    # Only these need the simulator and its packages: a stock PyTorch container runs every schedule that is named.
    from weft.planner import plan

    profile = _profile(problem, device)
    return plan(problem, profile) if profile else None


def _profile(problem: Problem, device: torch.device) -> Machine | None:
    profile = machine.load(machine_for(device))
    try:
        profile.require_for(problem)
    except ValueError as error:
        warnings.warn(f"no machine profile has {problem.world_size} GPUs ({error}): sequential", stacklevel=3)
        return None
    return profile


def machine_for(device: torch.device) -> str:
    """The shipped profile that is nearest to a device; h200x8 where none is."""
    name = torch.cuda.get_device_name(device).lower().replace(" ", "") if device.type == "cuda" else ""
    return next((m for m in machine.names() if m.split("x8")[0] and m.split("x8")[0] in name), "h200x8")
