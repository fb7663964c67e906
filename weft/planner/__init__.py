"""Planner: from a Problem and a Machine to the Schedule that should be fastest, and why; and to the few worth measuring.

`heuristic` (weft.perf.rules) chooses by sizes alone, in microseconds; `plan` by simulating every candidate.

    choose.py  values.py                         candidates, their predicted times, the fastest
    explain.py  explanation.py                   why: in a sentence; taken apart
    shortlist.py                                 the few that are worth measuring
    simulated.py  signature.py                   one schedule simulated; its losses
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.core.lazy import lazy_names

if TYPE_CHECKING:
    from weft.perf.rules import heuristic
    from weft.planner.choose import plan
    from weft.planner.values import Candidate, Plan

_HOMES = {"Candidate": "values", "Plan": "values", "heuristic": "weft.perf.rules", "plan": "choose"}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
"""Planning needs the simulator, and so numpy and simpy; the models do not. So it is loaded when it is named."""

__all__ = ["Candidate", "Plan", "heuristic", "plan"]
