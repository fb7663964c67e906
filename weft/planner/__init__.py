"""Planner: from a Problem and a Machine to the Schedule that should be fastest, and why; and to the few worth measuring.

`heuristic` (weft.perf.rules) chooses by sizes alone, in microseconds; `plan` by simulating every candidate.

    choose.py  values.py                         candidates, their predicted times, the fastest
    explain.py  explanation.py                   why: in a sentence; taken apart
    shortlist.py                                 the few that are worth measuring
    simulated.py  signature.py                   one schedule simulated; its losses
    ways.py                                      ways to run computation beside collectives, and what each is predicted to take
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.perf.rules import heuristic
    from weft.planner.choose import plan
    from weft.planner.values import Candidate, Plan

_HOMES = {
    "Candidate": "weft.planner.values",
    "Plan": "weft.planner.values",
    "heuristic": "weft.perf.rules",
    "plan": "weft.planner.choose",
}


def __getattr__(name: str) -> Any:
    """Planning needs the simulator, and so numpy and simpy; the models do not. So it is loaded when it is named."""
    if name not in _HOMES:
        raise AttributeError(f"module 'weft.planner' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


__all__ = ["Candidate", "Plan", "heuristic", "plan"]
