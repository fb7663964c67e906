"""Connections of gloo's, and process groups, that torch knows by no name.

torch names groups that only some ranks make by their ranks and by how many groups a rank has. So ranks could differ in a name,
of such a group or of the caller's next one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo


def connections(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """gloo's connections among `size` ranks that share a store: torch's backend. Collective. Blocks until all have come."""
    return ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))


def nameless_group(store: Any, rank: int, size: int, backend: Any) -> dist.ProcessGroup:
    """A process group for torch.distributed's collectives on CPUs, over some connections."""
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group
