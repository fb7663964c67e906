"""Planner: from a Problem and a Machine to the Schedule that should be fastest, and why; and to the few worth measuring.

`heuristic` (weft.perf.rules) chooses by sizes alone, in microseconds; `plan` by simulating every candidate.

    choose.py  values.py                         candidates, their predicted times, the fastest
    explain.py  explanation.py                   why: in a sentence; taken apart
    shortlist.py                                 the few that are worth measuring
    simulated.py  signature.py                   one schedule simulated; its losses
    ways.py                                      ways to run computation beside collectives, and what each is predicted to take
"""

from weft.perf.rules import heuristic
from weft.planner.choose import plan
from weft.planner.shortlist import shortlist
from weft.planner.values import Candidate, Plan

__all__ = ["Candidate", "Plan", "heuristic", "plan", "shortlist"]
