"""From what a caller asks for to schedules: a name, a kept value, or what the planner says of the machine that this is.

"auto" stands for the fastest of `contenders`, measured (weft.runtime.trial), where calls can be timed, and for `predicted`
elsewhere; "planned" for `predicted` everywhere; "heuristic" for what sizes alone speak for (weft.perf.rules). Where calls can
be timed, what these two name is held against the sequential program in use (weft.runtime.kept). A name, whoever gives it, is
built as the profile has copies: in one lane, or in a lane for each peer; so what is predicted is what runs. Pure functions of
agreed values, so that ranks choose alike; and of the environment, which is to be the same on all ranks:

    WEFT_EFFORT          none: auto is planned, and nothing is measured. quick (default): auto measures a shortlist. full: every
                         candidate of the planner
    WEFT_MACHINE         a profile to predict with, by name or file, in place of the nearest one (weft.runtime.nearest)
    WEFT_MACHINE_FORCE   1: even if that profile was measured on another device
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, get_args

import torch

from weft import schedules
from weft.core import machine
from weft.core.logs import warn_once
from weft.core.machine import Machine
from weft.core.problem import COLLECTIVE_OPS, Problem
from weft.core.schedule import Schedule
from weft.perf.rules import heuristic
from weft.runtime.nearest import nearest_profile

if TYPE_CHECKING:
    from weft.planner import Plan

CHOSEN_HERE = ("auto", "planned", "heuristic")
"""What `schedule=` takes beside what names a schedule."""
Effort = Literal["none", "quick", "full"]
FULL_AT_MOST = 48
"""Candidates that a full trial measures."""


def effort() -> Effort:
    """How much "auto" measures. Raises ValueError for an unknown word."""
    word = os.environ.get("WEFT_EFFORT", "quick")
    if word not in get_args(Effort):
        raise ValueError(f"WEFT_EFFORT is {word!r}; use none, quick or full")
    return word  # type: ignore[return-value]


def choose(problem: Problem, spec: str, device: torch.device, kept: Mapping[str, Schedule]) -> Schedule:
    """The schedule that `spec` asks for. Raises ValueError if a value is for another problem, or is gone."""
    if spec.startswith("value:"):
        schedule = kept.get(spec)
        if schedule is None:
            raise ValueError(f"schedule {spec} is a weft.Schedule that no longer exists; keep it for as long as calls name it")
        if schedule.problem != problem:
            raise ValueError(f"schedule is for {schedule.problem}; this call is {problem}")
        return schedule
    if spec in CHOSEN_HERE:
        spec = by_sizes(problem, device) if spec == "heuristic" else predicted(problem, device)
    return schedules.build(problem, *schedules.parse(spec), fan_out=fans_out(device))


def fans_out(device: torch.device) -> bool:
    """Whether schedules have a copy lane for each peer here, as the profile has it. Not where there is none to predict with:
    a schedule that is named needs no profile."""
    try:
        return profile_for(device).fans_out
    except ValueError:
        return False


def by_sizes(problem: Problem, device: torch.device) -> str:
    """The spec that the problem's sizes speak for; sequential, with a warning, where the profile does not serve."""
    profile = _profile(problem, device)
    return heuristic(problem, profile) if profile else "sequential"


def predicted(problem: Problem, device: torch.device) -> str:
    """The spec that is predicted to be fastest; sequential, with a warning, where the profile does not serve."""
    found = _plan(problem, device)
    return found.chosen.spec if found else "sequential"


def contenders(problem: Problem, device: torch.device) -> tuple[str, ...]:
    """The specs worth measuring, sequential first: the planner's shortlist and what sizes alone speak for, or at full effort
    every candidate. Sequential alone, with a warning, where the profile does not serve."""
    from weft.planner.shortlist import joined, shortlist

    found = _plan(problem, device)
    if found is None:
        return ("sequential",)
    named = by_sizes(problem, device)
    if effort() == "full":
        specs = ["sequential", *(candidate.spec for candidate in found.candidates)]
        return joined(problem, tuple(dict.fromkeys(specs))[:FULL_AT_MOST], named, FULL_AT_MOST)
    return joined(problem, shortlist(found), named)


def _plan(problem: Problem, device: torch.device) -> Plan | None:
    # Only these need the simulator and its packages: a stock PyTorch container runs every schedule that is named.
    from weft.planner import plan

    profile = _profile(problem, device)
    return plan(problem, profile) if profile else None


def _profile(problem: Problem, device: torch.device) -> Machine | None:
    """None, with a warning, where it has too few GPUs, or no rate for the dtype."""
    profile, lacks = profile_for(device), f"no machine profile has {problem.world_size} GPUs"
    try:
        profile.require_for(problem)
        if problem.op not in COLLECTIVE_OPS:
            lacks = f"the machine profile says nothing of {problem.dtype}"
            profile.tflops(problem.dtype)
    except ValueError as error:
        warn_once(f"{lacks} ({error}): sequential")
        return None
    return profile


def profile_for(device: torch.device) -> Machine:
    """The profile to predict with: WEFT_MACHINE, else the one that is nearest to the device.

    Raises ValueError if WEFT_MACHINE cannot be read, or was measured on another device and is not forced.
    """
    named = os.environ.get("WEFT_MACHINE")
    if not named:
        return nearest_profile(device)
    found = _loaded(named, _written(named))
    here = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if found.device not in ("", here) and os.environ.get("WEFT_MACHINE_FORCE") != "1":
        cure = "calibrate this one (weft calibrate), or set WEFT_MACHINE_FORCE=1"
        raise ValueError(f"WEFT_MACHINE is {named}, measured on {found.device}; this is {here}: {cure}")
    return found


@lru_cache(maxsize=4)
def _loaded(name_or_path: str, written: tuple[int, ...] = ()) -> Machine:
    """As machine.load, which takes 4 ms; every schedule that is bound asks. written: which state of the file."""
    return machine.load(name_or_path)


def _written(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
