"""From what a caller asks for to a schedule.

    auto        the fastest of `contenders`, measured at the first call of a problem (weft.runtime.trial) where calls can be
                timed; elsewhere as planned
    planned     nothing is measured: `planned` below, a function of the problem and the machine profile alone
    otherwise   a family's name, "name:chunks", or a Schedule value

WEFT_SCHEDULE replaces `auto` by `planned` or `sequential` in a whole process.

Every schedule is built with the copy lanes that the machine profile says: one for all peers, or one for each; so what was
predicted is what runs. These are pure functions of values that ranks agree on, so all ranks choose the same schedule, and of
one variable of the environment, which has to be the same on all ranks: WEFT_MACHINE names the profile to predict with, or its
file, in place of the nearest one (weft.runtime.nearest).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from weft import schedules
from weft.core import machine
from weft.core.logs import warn_once
from weft.core.machine import Machine
from weft.core.problem import COLLECTIVE_OPS, Problem, RaggedProblem
from weft.core.schedule import Schedule
from weft.perf.ranking import best
from weft.runtime.nearest import nearest_profile

if TYPE_CHECKING:
    from weft.planner import Plan

MEASURED = 5
"""Schedules that `auto` measures besides the sequential program."""
MODES = ("auto", "planned")
"""What `schedule=` takes besides what names a schedule."""
AUTOMATIC = ("auto", "planned", "sequential")
"""What WEFT_SCHEDULE takes."""


def automatic() -> str:
    """What "auto" stands for, by WEFT_SCHEDULE: `sequential` switches overlapping off without a change of code. Raises
    ValueError for a value that it does not take."""
    found = os.environ.get("WEFT_SCHEDULE", "auto")
    if found not in AUTOMATIC:
        raise ValueError(f"WEFT_SCHEDULE is {found!r}; use {', '.join(AUTOMATIC)}, or leave it unset")
    return found


def choose(problem: Problem, spec: str, device: torch.device, kept: Mapping[str, Schedule]) -> Schedule:
    """The schedule that `spec` asks for. Raises ValueError if a value is for another problem, or is gone."""
    if spec.startswith("value:"):
        schedule = kept.get(spec)
        if schedule is None:
            raise ValueError(
                f"schedule {spec} is a weft.schedule.Schedule that no longer exists; keep it for as long as calls name it"
            )
        if schedule.problem != problem:
            raise ValueError(f"schedule is for {schedule.problem}; this call is {problem}")
        return schedule
    if spec in MODES:
        spec = planned(problem, device)
    if isinstance(problem, RaggedProblem):
        return schedules.build(problem, spec)
    return schedules.build(problem, *schedules.parse(spec), fan_out=fans_out(device, ranks_of_a_host(problem)))


def ranks_of_a_host(problem: Problem) -> int:
    """At most."""
    return max(problem.nodes or (problem.world_size,))


def fans_out(device: torch.device, world_size: int | None = None) -> bool:
    """Whether schedules have a copy lane for each peer here, as the profile has it. Not where there is none to predict with:
    a schedule that is named needs no profile."""
    try:
        return profile_for(device, world_size).fans_out
    except ValueError:
        return False


def planned(problem: Problem, device: torch.device) -> str:
    """The spec that `weft.plan` chooses; nothing is measured. Sequential, with a warning, where the profile does not serve.
    With row counts on devices there is one schedule that overlaps, and it is taken."""
    if isinstance(problem, RaggedProblem):
        return "fused"
    profile = _profile(problem, device)
    return "sequential" if profile is None else _plan(problem, profile).chosen.spec


def contenders(problem: Problem, device: torch.device) -> tuple[str, ...]:
    """The specs that `auto` measures: sequential, and MEASURED of those that are ranked first. Sequential alone, with a
    warning, where the profile does not serve."""
    profile = _profile(problem, device)
    return ("sequential",) if profile is None else best(problem, profile, MEASURED)


def _plan(problem: Problem, profile: Machine) -> Plan:
    # Only this needs the simulator and its packages: a stock PyTorch container runs every schedule that is named.
    from weft.planner import plan

    return plan(problem, profile)


def _profile(problem: Problem, device: torch.device) -> Machine | None:
    """None, with a warning, where it has too few GPUs, or no rate for the dtype."""
    profile, lacks = profile_for(device, ranks_of_a_host(problem)), f"no machine profile has {problem.world_size} GPUs"
    try:
        profile.require_for(problem)
        if problem.op not in COLLECTIVE_OPS:
            lacks = f"the machine profile says nothing of {problem.rate_name}"
            profile.tflops(problem.rate_name)
    except ValueError as error:
        warn_once(f"{lacks} ({error}): sequential")
        return None
    return profile


def profile_for(device: torch.device, world_size: int | None = None) -> Machine:
    """The profile to predict with: WEFT_MACHINE, with a warning where it was measured on another device, else the one that is
    nearest to the device. world_size: ranks of a host, if known. Raises ValueError if WEFT_MACHINE cannot be read."""
    named = os.environ.get("WEFT_MACHINE")
    if not named:
        return nearest_profile(device, world_size)
    found = _loaded(named, _written(named))
    here = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if found.device not in ("", here):
        warn_once(f"WEFT_MACHINE is {named}, measured on {found.device}; this is {here}: weft calibrate measures this one")
    return found


def readable_profile(device: torch.device, world_size: int | None = None) -> Machine:
    """The same for kernels, which no error of WEFT_MACHINE may stop on one rank: then the nearest one, with a warning."""
    try:
        return profile_for(device, world_size)
    except ValueError as error:
        found = nearest_profile(device, world_size)
        warn_once(f"kernels choose their tiles by the profile {found.name}: {error}")
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
