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
