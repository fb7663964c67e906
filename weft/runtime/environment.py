"""What the environment says to weft, looked at before anything starts: each variable is also read where it counts."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from weft.comm.membership import ranks_per_node, timeout_from_environment
from weft.runtime.choose import automatic, profile_for
from weft.runtime.collective_calls import staging_from_environment
from weft.runtime.programs import memory_from_environment
from weft.runtime.watchdog import on_failure_from_environment

_PREFIX = "WEFT_"


def _load_machine() -> None:
    """Raises ValueError where calls would."""
    profile_for(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


READ: dict[str, Callable[[], object]] = {
    "WEFT_TIMEOUT_S": timeout_from_environment,
    "WEFT_ON_FAILURE": on_failure_from_environment,
    "WEFT_MACHINE": _load_machine,
    "WEFT_SCHEDULE": automatic,
    "WEFT_CACHE_DIR": lambda: None,
    "WEFT_PROGRAM_MEMORY_GB": memory_from_environment,
    "WEFT_RANKS_PER_NODE": ranks_per_node,
    "WEFT_STAGING_BYTES": lambda: staging_from_environment(torch.device("cpu")),
}
"""All that weft reads, and what raises a ValueError where a value will not do."""


def check_environment() -> None:
    """Raises ValueError for the first variable whose value will not do, as the first call would on every rank."""
    for read in READ.values():
        read()


def unknown() -> tuple[str, ...]:
    """Variables that are named as weft's are, and that weft does not read."""
    return tuple(sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in READ))
