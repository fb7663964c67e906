"""The performance model: the costs of steps on a Machine, a ranking of schedules by closed forms of these costs, and a
simulator that runs a Schedule event by event with the same costs. The ranking takes milliseconds.

engine.py  world.py  rotation.py             lanes event by event; clock, flags, spans; one rank that represents all
kernels.py  ragged.py                        GEMMs and sums; steps whose row counts are known on devices only
transfers.py                                 copies, collectives, messages between nodes, lookups
network.py  fluid.py  contention.py          links that transfers share; kernels and copies that slow each other
terms.py  shapes.py  concurrent.py           the time of a kernel or collective alone; tile shapes; a user's computation
                                             and concurrent collectives
ranking/  lanes.py                           the properties of each family, three recurrences; the lanes that they use
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.perf.engine import Outcome, run, simulate
    from weft.perf.terms import collective_us, gemm_us

_HOMES = {"Outcome": "engine", "collective_us": "terms", "gemm_us": "terms", "run": "engine", "simulate": "engine"}


def __getattr__(name: str) -> Any:
    """Import the simulator on first use. It needs numpy and simpy, which the ranking and its users do not load."""
    if name not in _HOMES:
        raise AttributeError(f"module 'weft.perf' has no attribute {name!r}")
    return getattr(importlib.import_module(f"weft.perf.{_HOMES[name]}"), name)


__all__ = ["Outcome", "collective_us", "gemm_us", "run", "simulate"]
