"""How far predictions are from what was measured. Commands and pages say it wherever they print a prediction.

accuracy.json has the errors of predicted times by number of ranks, for the profile that they were predicted with, and the
measured times of single calls. `python docs/kept_accuracy.py` makes the file from benchmarks/results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.core import codec
from weft.core.machine import Machine, load, names
from weft.core.problem import Problem
from weft.planner.values import Plan, kept_accuracy
from weft.planner.words import factor, percent, us


def accuracy_notes(machine: Machine, plans: Sequence[tuple[str, Plan]]) -> tuple[str, ...]:
    """Return sentences for what stands below predictions: the error of such times, and what was measured of the same calls.

    plans: by layer. Numbers of a profile that was changed, or that is not shipped, are of no machine that was measured."""
    shipped = machine.name in names() and machine == load(machine.name)
    ranks = plans[0][1].problem.world_size if plans else 0
    if not plans or ranks == 1:
        return ()
    kept, of_ranks = kept_accuracy(), str(ranks)
    if not shipped or machine.name != kept["machine"] or of_ranks not in kept["errors"]:
        found, where = kept["errors"]["all"], f"on {kept['machine']}, with {kept['ranks']} ranks"
        error = f"Nobody has measured how wrong predictions for this machine and number of ranks are; {where}, "
    else:
        found, error = kept["errors"][of_ranks], f"How wrong predictions are, with {of_ranks} ranks: "
    error += (
        f"half of {found['times']:,} predicted times differ from the measured ones by less than {percent(found['median'])}, "
        f"and 95 of 100 by less than {percent(found['p95'])}."
    )
    gpu = machine.name.partition("x")[0].upper()  # a shipped profile is called as the GPU is in its driver's name
    gains = [one for one in kept["gains"] if shipped and gpu in one["gpu"].split()]
    problems = [(one, codec.load(Problem, one["problem"])) for one in gains]
    return error, *(_measured(*layer, one) for one, problem in problems for layer in plans if layer[1].problem == problem)


def _measured(name: str, plan: Plan, one: Any) -> str:
    gain = f"{factor(one['sequential_us'] / one['auto_us'])}, {us(one['auto_us'])} us by {one['chosen']}"
    when = f"in CUDA graphs, on {one['date']} at commit {one['commit']}"
    return (
        f"{name} was measured: {gain}, and {us(one['sequential_us'])} us by the matmul and NCCL in turn ({when}). "
        f"{factor(plan.sequential_us / plan.chosen.predicted_us)} is predicted."
    )
