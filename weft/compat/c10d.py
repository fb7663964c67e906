"""Private names of torch.distributed that weft uses. tests/test_compat_torch.py says what a new torch has changed of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    PrefixStore,
    _get_process_group_store,
    _resolve_process_group,
)


def store_of(group: dist.ProcessGroup, name: str) -> Any:
    """A part of the group's store that `name` alone uses, on a connection of its own: another thread may wait on torch's."""
    store: Any = _get_process_group_store(group)
    return PrefixStore(name, store.clone())


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What runs a group's collectives on a device: its communicator, with `abort`."""
    return group._get_backend(device)


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of this process that has a name, as custom operators are given it."""
    return _resolve_process_group(name)  # type: ignore[arg-type]
