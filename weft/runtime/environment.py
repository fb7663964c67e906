"""This module checks weft's environment variables before ranks start. Each variable is also read where it is used."""

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
    """Load the machine profile. Raises ValueError if calls would."""
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
"""All variables that weft reads, each with a function that raises ValueError for a wrong value."""


def check_environment() -> None:
    """Raise ValueError for the first variable with a wrong value, as the first call would on every rank."""
    for read in READ.values():
        read()


def unknown() -> tuple[str, ...]:
    """Return the variables that have weft's prefix, but that weft does not read."""
    return tuple(sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in READ))
