"""This module finds the versions of the libraries and the properties of the machine, for stored results."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import torch

from weft.compat.device import gpu_number
from weft.compat.streams import checked, driver_api
from weft.core.version import __version__


def versions(device: str) -> dict[str, str]:
    """Return the versions of the libraries that a run uses, and its device."""
    found = {"weft": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if device == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found["gpu"] = torch.cuda.get_device_name(0)
    else:
        found["cpu"] = f"{os.cpu_count()} cores, {platform.machine()}"
    return found


def machine_of(device: torch.device, world_size: int) -> dict[str, str]:
    """Return the properties that distinguish this machine's speed from another's, for the key of stored plans."""
    if device.type != "cuda":
        return {"cpu": f"{os.cpu_count()} cores, {platform.machine()}", "ranks": str(world_size)}
    found = torch.cuda.get_device_properties(device)
    others = (peer for peer in range(torch.cuda.device_count()) if peer != device.index)
    reached = sum(torch.cuda.can_device_access_peer(device, peer) for peer in others)
    return {
        "gpu": found.name,
        "sms": str(found.multi_processor_count),
        "memory": str(found.total_memory >> 30),
        "gpus": str(torch.cuda.device_count()),
        "peers in reach": str(reached),
        "ranks": str(world_size),
    }


def links_between(numbers: Sequence[int]) -> str:
    """Return a text with the kinds of links between GPUs with these numbers, and the number of pairs of each kind.

    A kind is the driver's performance rank. Pairs that this process does not see, and pairs that cannot access each other, are
    separate kinds.
    """
    driver, seen = driver_api(), {gpu_number(torch.device("cuda", at)): at for at in range(torch.cuda.device_count())}
    kinds: Counter[str] = Counter()
    for pair in combinations(numbers, 2):
        if len(set(pair)) == 1:
            kinds["the same"] += 1
            continue
        if not all(number in seen for number in pair):
            kinds["not seen"] += 1
            continue
        one, other = (seen[number] for number in pair)
        asked = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK
        reached = torch.cuda.can_device_access_peer(one, other)
        kinds[f"rank {checked(driver.cuDeviceGetP2PAttribute(asked, one, other))}" if reached else "none"] += 1
    return ", ".join(f"{kind} x {count}" for kind, count in sorted(kinds.items()))
