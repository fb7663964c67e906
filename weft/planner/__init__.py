"""Planner: from a Problem and a Machine to the Schedule that should be fastest, and why."""

from weft.planner.choose import plan
from weft.planner.values import Candidate, Plan

__all__ = ["Candidate", "Plan", "plan"]
