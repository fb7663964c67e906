"""The versions of all that takes part in a run, for results that are kept."""

from __future__ import annotations

import os
import platform

import torch

from weft.version import __version__


def versions(device: str) -> dict[str, str]:
    """Of all that took part in a run."""
    found = {"weft": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if device == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found["gpu"] = torch.cuda.get_device_name(0)
    else:
        found["cpu"] = f"{os.cpu_count()} cores, {platform.machine()}"
    return found


def machine_of(device: torch.device, world_size: int) -> dict[str, str]:
    """What tells this machine's speed from another's, for plans that are kept."""
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
