"""Planner: from a Problem and a Machine to the Schedule that should be fastest, and why; and to the few worth measuring.

`heuristic` (weft.rules) chooses by sizes alone, in microseconds; `plan` by simulating every candidate.
"""

from weft.planner.choose import plan
from weft.planner.shortlist import shortlist
from weft.planner.values import Candidate, Plan
from weft.rules import heuristic

__all__ = ["Candidate", "Plan", "heuristic", "plan", "shortlist"]
