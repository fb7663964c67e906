"""Planner: chooses the Schedule of a Problem that should be fastest on a Machine, explains it, and lists the few to measure.

`heuristic` (weft.perf.ranking) chooses by closed forms, in milliseconds; `plan` simulates the best few of these.

    choose.py  values.py     candidates, their predicted times, the fastest and why; those that are worth measuring
    simulated.py             one schedule simulated: its spans, its losses, and its three taxes
    explanation.py           a plan in detail: the parts of its time, and what would change the choice
    training.py              a training step of a layer: its calls, and everything else
    models/                  models by their sizes, and the operator calls of one of their layers
    words.py                 numbers as text, for sentences, tables and charts
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.core.lazy import lazy_names

if TYPE_CHECKING:
    from weft.perf.ranking import heuristic
    from weft.planner.choose import plan
    from weft.planner.training import StepTimes, TrainingPlan, plan_training
    from weft.planner.values import Candidate, Plan

_HOMES = {
    "Candidate": "values",
    "Plan": "values",
    "StepTimes": "training",
    "TrainingPlan": "training",
    "heuristic": "weft.perf.ranking",
    "plan": "choose",
    "plan_training": "training",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
"""Import planning on first use: it needs the simulator with numpy and simpy. The models do not need them."""

__all__ = ["Candidate", "Plan", "StepTimes", "TrainingPlan", "heuristic", "plan", "plan_training"]
