"""The machine profile to predict with where WEFT_MACHINE names none.

a GPU whose name a shipped profile has     that profile, as it is
any other GPU                              the profile of the nearest architecture, with the GPU's own SMs, peak and memory
a CPU                                      h200x8: there, names of schedules are chosen by it, and nothing is timed
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
from weft.core.machine import STORES_SHARE, Gpu, Machine

DEFAULT = "h200x8"
_LOG = logging.getLogger("weft")
_NEAREST = {"a100x8": "sm_80", "h200x8": "sm_90", "mi210x4": "gfx90a", "mi300x8": "gfx942"}
"""Shipped profiles, and the architectures that their GPUs have."""
_MEMORY_SHARE = 0.9
"""Of the peak of its memory, what a GPU reaches by reading and writing: 4300 of 4800 GB/s on H200."""


def nearest_profile(device: torch.device) -> Machine:
    """The shipped profile of a device, or one that is estimated from the nearest; the log then says so, once."""
    if device.type != "cuda":
        return _shipped(DEFAULT)
    name = torch.cuda.get_device_name(device)
    named = profile_named_in(name)
    return _shipped(named) if named else _estimated(name, device)


def profile_named_in(device_name: str) -> str | None:
    """The shipped profile whose GPU a device's name, as its driver gives it, speaks of; None if none does."""
    words = device_name.lower().replace(" ", "")
    return next((name for name in machine.names() if re.sub(r"x\d+$", "", name) in words), None)


@cache
def _shipped(name: str) -> Machine:
    return machine.load(name)


@cache
def _estimated(name: str, device: torch.device) -> Machine:
    found = torch.cuda.get_device_properties(device)
    made = estimated(name, found)
    _LOG.warning(
        "no machine profile was measured on %s: its profile is estimated (%s, %d SMs, %.0f TFLOP/s in bfloat16); "
        "`weft calibrate` measures one for WEFT_MACHINE",
        *(name, made.words, made.gpu.sms, made.gpu.tflops["bfloat16"]),
    )
    return made


def estimated(name: str, found: Any) -> Machine:
    """The nearest profile with what a GPU's properties say. found: as torch.cuda.get_device_properties returns it."""
    nearest = _nearest(architecture(found))
    near = _shipped(nearest)
    gpu = _gpu(near.gpu, found, flop_per_clock(architecture(found)) / flop_per_clock(_NEAREST[nearest]))
    blocks = max(1, min(near.stores.sms, gpu.sms // STORES_SHARE)), max(1, min(near.stores.sms_alone, gpu.sms // 2))
    stores = replace(near.stores, sms=blocks[0], sms_alone=blocks[1])
    changed = {"gpu.sms": "the device's own report", "gpu.l2_bytes": "the device's own report"}
    estimated = ("stores.sms", "stores.sms_alone", "gpu.hbm_gbps", *(f"gpu.tflops.{dtype}" for dtype in gpu.tflops))
    changed |= dict.fromkeys(estimated, "estimated")
    return replace(
        near,
        name=f"{nearest}-estimated",
        words=f"{nearest} with what {name} reports",
        gpu=gpu,
        stores=stores,
        device="",
        sources={**near.sources, **changed},
    )


def _nearest(arch: str) -> str:
    """The shipped profile of the newest architecture that is no newer, of the same vendor; else of the oldest."""
    ours = {name: theirs for name, theirs in _NEAREST.items() if theirs[:2] == arch[:2]}
    older = {name: theirs for name, theirs in ours.items() if (len(theirs), theirs) <= (len(arch), arch)}
    return max(older, key=lambda name: (len(ours[name]), ours[name])) if older else min(ours, key=lambda name: ours[name])


def _gpu(near: Gpu, found: Any, faster: float) -> Gpu:
    """faster: an SM of this GPU in a clock, relative to one of the nearest."""
    sms = found.multi_processor_count
    tflops = {dtype: rate * faster * sms / near.sms for dtype, rate in near.tflops.items()}
    reported = memory_gbps(found)
    hbm_gbps = _MEMORY_SHARE * reported if reported else near.hbm_gbps
    return replace(near, sms=sms, tflops=tflops, l2_bytes=found.L2_cache_size or near.l2_bytes, hbm_gbps=hbm_gbps)
