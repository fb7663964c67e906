"""The performance model: what steps cost on a Machine; a ranking of schedules by closed forms of these costs, in milliseconds;
and a simulator that runs a Schedule event by event, with the same costs.

engine.py  world.py  rotation.py             lanes event by event; clock, flags, spans; when one rank stands for all
kernels.py  ragged.py                        GEMMs and sums; steps whose row counts live on devices
lookups.py  staging.py                       lookups; what NCCL needs done around its collectives
transfers.py  messages.py                    copies and collectives; sends and receives between nodes
network.py  fluid.py  contention.py          links that transfers share; kernels and copies that slow each other
terms.py  shapes.py  concurrent.py           what a kernel, a collective or a step takes alone; tile shapes; a collective
                                             beside the caller's computation
ranking.py  lanes.py                         a row for each family, three recurrences; the lanes that these run on
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.perf.engine import Outcome, run, simulate
    from weft.perf.terms import collective_us, gemm_us

_HOMES = {"Outcome": "engine", "collective_us": "terms", "gemm_us": "terms", "run": "engine", "simulate": "engine"}


def __getattr__(name: str) -> Any:
    """The simulator needs numpy and simpy; the ranking and its users do not. So the simulator is loaded when it is named."""
    if name not in _HOMES:
        raise AttributeError(f"module 'weft.perf' has no attribute {name!r}")
    return getattr(importlib.import_module(f"weft.perf.{_HOMES[name]}"), name)


__all__ = ["Outcome", "collective_us", "gemm_us", "run", "simulate"]
