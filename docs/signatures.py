"""Signatures of public names for generate.py: `signatures GROUP`, each with the first sentence of its docstring.

The site shows whole docstrings in their place (site_pages.py).
"""

from __future__ import annotations

import inspect
import pydoc
import re
import textwrap
from collections.abc import Callable
from typing import Any

WIDTH = 118
GROUPS: dict[str, tuple[str, ...]] = {
    "tensor_parallel": (
        "weft.all_gather_matmul",
        "weft.matmul_reduce_scatter",
        "weft.matmul_all_reduce",
        "weft.matmul_all_reduce_norm",
        "weft.all_reduce_norm",
    ),
    "all_to_all": (
        "weft.matmul_all_to_all",
        "weft.all_to_all_matmul",
    ),
    "lookups": (
        "weft.embedding_bag_all_to_all",
        "weft.SGD",
        "weft.RowwiseAdagrad",
    ),
    "groups": (
        "weft.choices",
        "weft.matmul_choices",
        "weft.close",
        "weft.synchronize",
    ),
    "models": (
        "weft.parallelize",
        "weft.register_tp_plan",
        "weft.ColwiseParallel",
        "weft.RowwiseParallel",
        "weft.SharedInput",
        "weft.SequenceParallel",
        "weft.overlap_report",
        "weft.CompilePass",
    ),
    "experts": (
        "weft.ExpertParallel",
        "weft.models.experts.MoE",
        "weft.models.embedding_bags.ShardedEmbeddingBags",
    ),
    "concurrent": (
        "weft.concurrent",
        "weft.concurrent_choices",
        "weft.AllReduce",
        "weft.AllGather",
        "weft.ReduceScatter",
        "weft.AllToAll",
        "weft.SendReceive",
        "weft.hooks.replicate",
        "weft.hooks.ddp",
        "weft.hooks.units",
        "weft.hooks.fsdp",
    ),
    "collectives": (
        "weft.collectives.all_gather_into_tensor",
        "weft.collectives.reduce_scatter_tensor",
        "weft.collectives.all_reduce",
        "weft.collectives.all_to_all_single",
        "weft.collectives.all_gather",
        "weft.collectives.reduce_scatter",
        "weft.collectives.all_to_all",
        "weft.collectives.all_reduced",
        "weft.collectives.empty",
    ),
    "controls": (
        "weft.controls.comm_stream",
        "weft.controls.give_back",
        "weft.controls.launch_order",
        "weft.controls.lane_priority",
        "weft.controls.nccl_group",
        "weft.controls.shape",
        "weft.controls.occupancy",
        "weft.controls.blocks_per_sm",
        "weft.controls.padding_bytes",
        "weft.controls.this_device",
        "weft.controls.sm_budget",
        "weft.controls.sm_partition",
    ),
    "plans": (
        "weft.Problem",
        "weft.LookupProblem",
        "weft.CollectiveProblem",
        "weft.plan",
        "weft.planner.training.plan_training",
        "weft.planner.training.TrainingPlan",
        "weft.planner.training.StepTimes",
        "weft.machine.load",
        "weft.Machine.what_if",
        "weft.perf.ranking.heuristic",
        "weft.explain",
        "weft.schedule.build",
        "weft.schedule.check",
        "weft.schedule.register",
        "weft.schedule.simulate",
        "weft.schedule.timeline",
        "weft.planner.models.load_model",
        "weft.planner.models.operator_calls",
    ),
    "errors": (
        "weft.WeftError",
        "weft.PeerLost",
        "weft.RankMismatch",
        "weft.WaitTimeout",
        "weft.schedule.ScheduleError",
    ),
}
"""What operators.md and reference.md show under each head: names as a user writes them."""


def signatures(group: str) -> str:
    """Return the signatures of a group."""
    return "\n\n".join(signature(name) for name in GROUPS[group])


def signature(name: str) -> str:
    found: Any = pydoc.locate(name)
    if found is None:
        raise ValueError(f"there is no {name}")
    first = re.split(r"(?<=\.)\s|\n\n", inspect.getdoc(found) or "")[0]
    below = textwrap.fill(" ".join(first.split()), WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"{_call(name, found)}\n{below}" if below.strip() else _call(name, found)


def _call(name: str, found: Any) -> str:
    """Return a call with names and defaults, as PyTorch's documents write it, in lines of at most WIDTH characters."""
    if inspect.isclass(found) and issubclass(found, Exception):
        return name
    given = inspect.signature(found)
    bare = [p.replace(annotation=p.empty) for p in given.parameters.values() if p.name not in ("self", "cls")]
    line = f"{name}{given.replace(parameters=bare, return_annotation=given.empty)}".replace("<factory>", "...")
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)


MAKERS: dict[str, Callable[..., str]] = {"signatures": signatures}
