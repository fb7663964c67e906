"""weft hides communication behind computation on several GPUs, at a grain finer than the shard.

Importing it touches no GPU, patches nothing and starts no process; what needs torch is loaded when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weft.version import __version__

if TYPE_CHECKING:
    from weft import collectives as collectives
    from weft import hooks as hooks
    from weft.beside import (
        AllGather,
        AllReduce,
        AllToAll,
        ReduceScatter,
        SendReceive,
        concurrent,
        concurrent_choices,
    )
    from weft.checker import ScheduleError, check
    from weft.errors import PeerLost, RankMismatch, WaitTimeout, WeftError
    from weft.execute.products import matmul_choices
    from weft.inductor import CompilePass
    from weft.machine import Machine
    from weft.nn.expert_parallel import ExpertParallel
    from weft.nn.models import parallelize
    from weft.nn.report import overlap_report
    from weft.nn.report import overlap_report as report  # noqa: F401 - the package, when it is called
    from weft.nn.styles import ColwiseParallel, RowwiseParallel, SequenceParallel, SharedInput
    from weft.ops import (
        SGD,
        RowwiseAdagrad,
        all_gather_matmul,
        all_to_all_matmul,
        choices,
        close,
        embedding_bag_all_to_all,
        matmul_all_reduce,
        matmul_all_to_all,
        matmul_reduce_scatter,
    )
    from weft.planner import plan
    from weft.planner.explanation import explain
    from weft.problem import CollectiveProblem, LookupProblem, Problem
    from weft.schedule import Schedule
    from weft.schedules import build
    from weft.sim import simulate
    from weft.span import Span
    from weft.timelines import timeline


_MODULES = ("collectives", "hooks", "report")
"""Those that are part of the front door as they are."""
_HOMES = {
    "AllGather": "beside",
    "AllReduce": "beside",
    "AllToAll": "beside",
    "ReduceScatter": "beside",
    "SendReceive": "beside",
    "concurrent": "beside",
    "concurrent_choices": "beside",
    "CollectiveProblem": "problem",
    "ColwiseParallel": "nn.styles",
    "CompilePass": "inductor",
    "ExpertParallel": "nn.expert_parallel",
    "LookupProblem": "problem",
    "PeerLost": "errors",
    "Machine": "machine",
    "Problem": "problem",
    "RankMismatch": "errors",
    "RowwiseAdagrad": "ops",
    "RowwiseParallel": "nn.styles",
    "SGD": "ops",
    "Schedule": "schedule",
    "ScheduleError": "checker",
    "SequenceParallel": "nn.styles",
    "SharedInput": "nn.styles",
    "Span": "span",
    "WaitTimeout": "errors",
    "WeftError": "errors",
    "all_gather_matmul": "ops",
    "all_to_all_matmul": "ops",
    "build": "schedules",
    "check": "checker",
    "choices": "ops",
    "close": "ops",
    "embedding_bag_all_to_all": "ops",
    "explain": "planner.explanation",
    "matmul_all_reduce": "ops",
    "matmul_all_to_all": "ops",
    "matmul_choices": "execute.products",
    "matmul_reduce_scatter": "ops",
    "overlap_report": "nn.report",
    "parallelize": "nn.models",
    "plan": "planner",
    "simulate": "sim",
    "timeline": "timelines",
}


def __getattr__(name: str) -> Any:
    """Looked up once: a call of an operator would pay some microseconds for it each time."""
    if name in _MODULES:
        found: Any = importlib.import_module(f"weft.{name}")
    elif name in _HOMES:
        found = getattr(importlib.import_module(f"weft.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])


__all__ = [
    "SGD",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "CollectiveProblem",
    "ColwiseParallel",
    "CompilePass",
    "ExpertParallel",
    "LookupProblem",
    "Machine",
    "PeerLost",
    "Problem",
    "RankMismatch",
    "ReduceScatter",
    "RowwiseAdagrad",
    "RowwiseParallel",
    "Schedule",
    "ScheduleError",
    "SendReceive",
    "SequenceParallel",
    "SharedInput",
    "Span",
    "WaitTimeout",
    "WeftError",
    "__version__",
    "all_gather_matmul",
    "all_to_all_matmul",
    "build",
    "check",
    "choices",
    "close",
    "concurrent",
    "concurrent_choices",
    "embedding_bag_all_to_all",
    "explain",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_choices",
    "matmul_reduce_scatter",
    "overlap_report",
    "parallelize",
    "plan",
    "simulate",
    "timeline",
]
