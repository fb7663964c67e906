"""GPUs that need not be there: what torch would report of them, and a way to have it reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.compat.device import capabilities
from weft.core.machine import load

KIB = 1 << 10
BLOCK_OF_H200 = load("h200x8").gpu.capabilities or pytest.fail("the profile says nothing of blocks")
"""What kernels may use on an H200."""


def properties(name: str, capability: tuple[int, int], sms: int, shared_kib: int, l2_mib: int = 50, **more: Any) -> Any:
    """As torch.cuda.get_device_properties returns them. shared_kib: that a block may ask for."""
    major, minor = capability
    return SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=sms,
        shared_memory_per_block=48 * KIB,
        shared_memory_per_block_optin=shared_kib * KIB,
        L2_cache_size=l2_mib << 20,
        warp_size=32,
        uuid=name,
        **more,
    )


H200 = properties("NVIDIA H200", (9, 0), 132, 227, l2_mib=60)
H100 = properties("NVIDIA H100 80GB HBM3", (9, 0), 132, 227)
A100 = properties("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163, l2_mib=40)
L40S = properties("NVIDIA L40S", (8, 9), 142, 99, l2_mib=96, memory_clock_rate=9_001_000, memory_bus_width=384)
B200 = properties("NVIDIA B200", (10, 0), 148, 227, l2_mib=126)
V100 = properties("Tesla V100-SXM2-16GB", (7, 0), 80, 96, l2_mib=6)
MI300X = SimpleNamespace(
    name="AMD Instinct MI300X",
    gcnArchName="gfx942:sramecc+:xnack-",
    major=9,
    minor=4,
    multi_processor_count=304,
    shared_memory_per_block=64 * KIB,
    L2_cache_size=4 << 20,
    warp_size=64,
)


@contextmanager
def pretend(found: Any) -> Iterator[None]:
    """What torch reports of any GPU meanwhile."""
    capabilities.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: found)
        patch.setattr(torch.cuda, "get_device_name", lambda device=None: found.name)
        patch.setattr(torch.version, "hip", "7.0" if hasattr(found, "gcnArchName") else None)
        yield
    capabilities.cache_clear()
