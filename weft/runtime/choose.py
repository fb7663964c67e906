"""This module finds the schedule that a caller asks for by `schedule=`.

    auto        the fastest of `auto_candidates`, measured at the first call of a problem (weft.runtime.autotune). On devices
                whose calls are not timed it is the same as planned
    planned     what `planned` below chooses from the problem and the machine profile alone
    otherwise   a family's name, "name:chunks", or a Schedule value

WEFT_SCHEDULE replaces `auto` by `planned` or `sequential` in a whole process.

Every schedule is built with the number of copy lanes in the machine profile, one for all peers or one for each peer, so the
schedule that runs is the one whose time was predicted. The functions here depend only on values that all ranks agree on, so all
ranks choose the same schedule. WEFT_MACHINE names the profile, or its file, and must be the same on all ranks. By default the
nearest profile is used (weft.runtime.choose).

This module chooses the machine profile for predictions if WEFT_MACHINE names none.

a GPU whose name a shipped profile has     that profile, unchanged
any other GPU                              the profile of the nearest architecture, with the GPU's own SMs, peak and memory
a CPU                                      h200x8, by which the planner chooses schedules; nothing is timed
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from weft import schedules
from weft.comm.rank_group import RankGroup
from weft.compat.device import architecture, flop_per_clock, memory_gbps, of_properties
from weft.core import machine
from weft.core.errors import RankMismatch, warn_once
from weft.core.machine import Machine
from weft.core.problem import COLLECTIVE_OPS, Problem, RaggedProblem
from weft.core.schedule import Schedule
from weft.perf.ranking import best

if TYPE_CHECKING:
    from weft.planner import Plan

MEASURED = 5
"""Schedules that `auto` measures besides the sequential program."""
MODES = ("auto", "planned")
"""The values of `schedule=` that let weft choose."""
_BITS = 48
"""The bits of a profile's digest that ranks compare."""
AUTOMATIC = ("auto", "planned", "sequential")
"""The values of WEFT_SCHEDULE."""


def automatic() -> str:
    """Return what "auto" means in this process. WEFT_SCHEDULE=sequential disables overlapping without a change of code.

    Raises ValueError for another value of WEFT_SCHEDULE.
    """
    found = os.environ.get("WEFT_SCHEDULE", "auto")
    if found not in AUTOMATIC:
        raise ValueError(f"WEFT_SCHEDULE is {found!r}; use {', '.join(AUTOMATIC)}, or leave it unset")
    return found


def choose(problem: Problem, spec: str, device: torch.device, values: Mapping[str, Schedule]) -> Schedule:
    """Return the schedule that `spec` asks for. Raises ValueError if a Schedule value is for another problem, or no longer
    exists.

    values: the Schedule values by the strings that name them in calls.
    """
    if spec.startswith("value:"):
        schedule = values.get(spec)
        if schedule is None:
            raise ValueError(
                f"schedule {spec} is a weft.schedule.Schedule that no longer exists; keep a reference to it while calls name it"
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
    """Return the number of ranks on the host that has most."""
    return max(problem.nodes or (problem.world_size,))


def fans_out(device: torch.device, world_size: int | None = None) -> bool:
    """Return whether schedules have a copy lane for each peer, as the machine profile says.

    Without a profile it is False, because a schedule that is named needs no profile.
    """
    try:
        return profile_for(device, world_size).fans_out
    except ValueError:
        return False


def planned(problem: Problem, device: torch.device) -> str:
    """Return the spec that `weft.plan` chooses from predicted times.

    It is sequential, with a warning, if the profile has no data for the problem. For a call with splits it is the one
    schedule that overlaps.
    """
    if isinstance(problem, RaggedProblem):
        return "fused"
    profile = _profile(problem, device)
    return "sequential" if profile is None else _plan(problem, profile).chosen.spec


def auto_candidates(problem: Problem, device: torch.device) -> tuple[str, ...]:
    """Return the specs that `auto` measures: sequential, and the MEASURED that are ranked first.

    It is sequential alone, with a warning, if the profile has no data for the problem.
    """
    profile = _profile(problem, device)
    return ("sequential",) if profile is None else best(problem, profile, MEASURED)


def _plan(problem: Problem, profile: Machine) -> Plan:
    # Only this needs the simulator and its packages: a stock PyTorch container runs every schedule that is named.
    from weft.planner import plan

    return plan(problem, profile)


def _profile(problem: Problem, device: torch.device) -> Machine | None:
    """Return the machine profile. Return None, with a warning, if it has too few GPUs, or no rate for the dtype."""
    profile, lacks = profile_for(device, ranks_of_a_host(problem)), f"no machine profile has {problem.world_size} GPUs"
    try:
        profile.require_for(problem)
        if problem.op not in COLLECTIVE_OPS:
            lacks = f"the machine profile has no rate for {problem.rate_name}"
            profile.tflops(problem.rate_name)
    except ValueError as error:
        warn_once(f"{lacks} ({error}); the schedule is sequential")
        return None
    return profile


def profile_for(device: torch.device, world_size: int | None = None) -> Machine:
    """Return the profile to predict with: WEFT_MACHINE, or else the profile that is nearest to the device.

    It warns if WEFT_MACHINE was measured on another device. Raises ValueError if WEFT_MACHINE cannot be read.

    world_size: the ranks of a host, if known.
    """
    named = os.environ.get("WEFT_MACHINE")
    if not named:
        return nearest_profile(device, world_size)
    found = _load(named, _file_state(named))
    here = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if found.device not in ("", here):
        warn_once(
            f"WEFT_MACHINE is {named}, which was measured on {found.device}, but this is {here}; `weft calibrate` measures it"
        )
    return found


def readable_profile(device: torch.device, world_size: int | None = None) -> Machine:
    """Return the profile by which kernels choose their tiles.

    An error of WEFT_MACHINE must not stop one rank, so then it is the nearest profile, with a warning.
    """
    try:
        return profile_for(device, world_size)
    except ValueError as error:
        found = nearest_profile(device, world_size)
        warn_once(f"kernels choose their tiles by the profile {found.name}: {error}")
        return found


def agreed_profile(group: RankGroup, device: torch.device) -> Machine:
    """Return the profile that all ranks of a group have for their devices. Collective.

    The tile shape determines how often a kernel counts, and a rank that waits for another rank's tiles computes that number
    from its own profile. With two profiles it could wait forever. So ranks compare their profiles before the first kernel of a
    group.

    If WEFT_MACHINE cannot be read, it is the nearest shipped profile, with a warning.
    Raises RankMismatch on every rank if two ranks have different profiles.
    """
    mine = readable_profile(device, group.world_size)
    digests = group.agree_on_call("call: machine profile", int(mine.digest, 16) >> (64 - _BITS))
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise RankMismatch(
                f"ranks 0 and {rank} have different machine profiles (rank {group.rank}: {mine.name}); kernels choose their "
                "tiles by it: set WEFT_MACHINE to one profile on all ranks, or to none"
            )
    return mine


@lru_cache(maxsize=4)
def _load(name_or_path: str, written: tuple[int, ...] = ()) -> Machine:
    """Load a profile, and cache it, because loading takes 4 ms and every schedule that is bound needs it.

    written: the state of the file (`_file_state`).
    """
    return machine.load(name_or_path)


def _file_state(path: str) -> tuple[int, ...]:
    """Return numbers that change if the file is replaced or written."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


DEFAULT = "h200x8"
_LOG = logging.getLogger("weft")
_NEAREST = {"a100x8": "sm_80", "h200x8": "sm_90", "b200x8": "sm_100", "mi210x4": "gfx90a", "mi300x8": "gfx942"}
"""The profiles from which others are estimated, one for each architecture."""
_MEMORY_SHARE = 0.9
"""The fraction of its peak memory rate that a GPU reaches by reading and writing: 4300 of 4800 GB/s on H200."""


def nearest_profile(device: torch.device, world_size: int | None = None) -> Machine:
    """Return the shipped profile of a device, or one that is estimated from the nearest profile. The log reports that once.

    world_size: of several profiles of one GPU, it chooses the smallest host with at least this many GPUs. If no host has them,
        or it is None, the largest host is chosen.
    """
    if device.type != "cuda":
        return _load_shipped(DEFAULT)
    name = torch.cuda.get_device_name(device)
    named = profile_named_in(name, world_size)
    # Other boards have the GPU's name and fewer SMs, such as NVIDIA H100 PCIe.
    same = named and _load_shipped(named).gpu.sms == torch.cuda.get_device_properties(device).multi_processor_count
    return _load_shipped(named) if named and same else _estimated(name, device)


def profile_named_in(device_name: str, world_size: int | None = None) -> str | None:
    """Return the name of the shipped profile whose GPU is in a device's name, or None.

    device_name: the name that the driver reports.
    world_size: as for nearest_profile.
    """
    words = device_name.lower().replace(" ", "")
    sizes = {name: _load_shipped(name).world_size for name in machine.names() if re.sub(r"x\d+$", "", name) in words}
    enough = [name for name, size in sizes.items() if world_size and size >= world_size]
    return min(enough, key=lambda name: sizes[name]) if enough else max(sizes, key=lambda name: sizes[name], default=None)


@cache
def _load_shipped(name: str) -> Machine:
    return machine.load(name)


@cache
def _estimated(name: str, device: torch.device) -> Machine:
    found = torch.cuda.get_device_properties(device)
    made = estimated(name, found)
    _LOG.warning(
        "no machine profile was measured on %s: its profile is estimated (%s, %d SMs, %.0f TFLOP/s in bfloat16); "
        "`weft calibrate` measures one for WEFT_MACHINE",
        *(name, made.description, made.gpu.sms, made.gpu.tflops["bfloat16"]),
    )
    return made


def estimated(name: str, found: Any) -> Machine:
    """Return the nearest profile, adapted to a GPU's properties. found: the result of torch.cuda.get_device_properties."""
    nearest = _nearest(architecture(found))
    near, sms, reported = _load_shipped(nearest), found.multi_processor_count, memory_gbps(found)
    block = {name: value for name, value in asdict(of_properties(found)).items() if name not in ("sms", "warp")}
    near = replace(near, gpu=replace(near.gpu, **block))
    faster = sms / near.gpu.sms * flop_per_clock(architecture(found)) / flop_per_clock(_NEAREST[nearest])
    says: dict[str, Any] = {"gpu.sms": sms} | ({"gpu.l2_bytes": found.L2_cache_size} if found.L2_cache_size else {})
    says["gpu.shared_bytes"] = block["shared_bytes"]
    guessed: dict[str, Any] = {f"gpu.tflops.{dtype}": rate * faster for dtype, rate in near.gpu.tflops.items()}
    guessed |= {"gpu.hbm_gbps": _MEMORY_SHARE * reported} if reported else {}
    made = near.what_if(says | guessed)
    sources = dict.fromkeys(says, "the device's own report") | dict.fromkeys(guessed, "estimated")
    return replace(
        made,
        name=f"{nearest}-estimated",
        description=f"{nearest} with what {name} reports",
        device="",
        sources={**made.sources, **sources},
    )


def _nearest(arch: str) -> str:
    """Return the profile with the newest architecture of the same manufacturer that is not newer, or else with the oldest."""
    ours = {name: theirs for name, theirs in _NEAREST.items() if theirs[:2] == arch[:2]}
    older = {name: theirs for name, theirs in ours.items() if (len(theirs), theirs) <= (len(arch), arch)}
    return max(older, key=lambda name: (len(ours[name]), ours[name])) if older else min(ours, key=lambda name: ours[name])
