"""Planner: from a Problem and a Machine to the Schedule that should be fastest, and why; and to the few worth measuring.

`heuristic` (weft.perf.ranking) chooses by closed forms, in milliseconds; `plan` simulates the best few of these.

    choose.py  values.py                         candidates, their predicted times, the fastest
    explain.py  explanation.py                   why: in a sentence; taken apart
    shortlist.py                                 of schedules beside a user's computation, the few that are worth measuring
    simulated.py  signature.py  sizes.py         one schedule simulated; its losses; static sizes to hold them against
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.core.lazy import lazy_names

if TYPE_CHECKING:
    from weft.perf.ranking import heuristic
    from weft.planner.choose import plan
    from weft.planner.values import Candidate, Plan

_HOMES = {"Candidate": "values", "Plan": "values", "heuristic": "weft.perf.ranking", "plan": "choose"}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
"""Planning needs the simulator, and so numpy and simpy; the models do not. So it is loaded when it is named."""

__all__ = ["Candidate", "Plan", "heuristic", "plan"]
