"""This module chooses the machine profile for predictions if WEFT_MACHINE names none.

a GPU whose name a shipped profile has     that profile, unchanged
any other GPU                              the profile of the nearest architecture, with the GPU's own SMs, peak and memory
a CPU                                      h200x8, by which the planner chooses schedules; nothing is timed
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from weft.compat.device import architecture, flop_per_clock, memory_gbps
from weft.core import machine
from weft.core.machine import Machine

DEFAULT = "h200x8"
_LOG = logging.getLogger("weft")
_NEAREST = {"a100x8": "sm_80", "h200x8": "sm_90", "mi210x4": "gfx90a", "mi300x8": "gfx942"}
"""The shipped profiles, and the architectures of their GPUs."""
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
    return _load_shipped(named) if named else _estimated(name, device)


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
    faster = sms / near.gpu.sms * flop_per_clock(architecture(found)) / flop_per_clock(_NEAREST[nearest])
    says: dict[str, Any] = {"gpu.sms": sms} | ({"gpu.l2_bytes": found.L2_cache_size} if found.L2_cache_size else {})
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
