"""Planner: from a Problem and a Machine to the Schedule that should be fastest, and why; and to the few worth measuring."""

from weft.planner.choose import plan
from weft.planner.shortlist import shortlist
from weft.planner.values import Candidate, Plan

__all__ = ["Candidate", "Plan", "plan", "shortlist"]
