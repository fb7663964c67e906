"""weft hides communication behind computation on several GPUs, at a grain finer than the shard.

Importing it touches no GPU, patches nothing and starts no process; what needs torch is loaded when it is first named. Import
torch first where a program names torch.ops.weft.* itself, as one that was saved by torch.export does.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from weft.core.lazy import lazy_names
from weft.core.version import __version__

if TYPE_CHECKING:
    from weft.checker import ScheduleError, check
    from weft.core import codec as codec
    from weft.core import machine as machine
    from weft.core.errors import PeerLost, RankMismatch, WaitTimeout, WeftError
    from weft.core.machine import Machine
    from weft.core.problem import CollectiveProblem, LookupProblem, Problem
    from weft.core.schedule import Schedule
    from weft.core.span import Span
    from weft.models.expert_parallel import ExpertParallel
    from weft.models.inductor import CompilePass
    from weft.models.parallelize import parallelize
    from weft.models.styles import ColwiseParallel, RowwiseParallel, SequenceParallel, SharedInput
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
        synchronize,
    )
    from weft.overlap import collectives as collectives
    from weft.overlap import controls as controls
    from weft.overlap import hooks as hooks
    from weft.overlap.concurrent import (
        AllGather,
        AllReduce,
        AllToAll,
        ReduceScatter,
        SendReceive,
        concurrent,
        concurrent_choices,
    )
    from weft.perf import simulate
    from weft.planner import plan
    from weft.planner.explanation import explain
    from weft.report.overlap import overlap_report
    from weft.runtime.products import matmul_choices
    from weft.schedules import build
    from weft.schedules.timelines import timeline


_HOMES = {
    "AllGather": "overlap.concurrent",
    "AllReduce": "overlap.concurrent",
    "AllToAll": "overlap.concurrent",
    "CollectiveProblem": "core.problem",
    "ColwiseParallel": "models.styles",
    "CompilePass": "models.inductor",
    "ExpertParallel": "models.expert_parallel",
    "LookupProblem": "core.problem",
    "Machine": "core.machine",
    "PeerLost": "core.errors",
    "Problem": "core.problem",
    "RankMismatch": "core.errors",
    "ReduceScatter": "overlap.concurrent",
    "RowwiseAdagrad": "ops",
    "RowwiseParallel": "models.styles",
    "SGD": "ops",
    "Schedule": "core.schedule",
    "ScheduleError": "checker",
    "SendReceive": "overlap.concurrent",
    "SequenceParallel": "models.styles",
    "SharedInput": "models.styles",
    "Span": "core.span",
    "WaitTimeout": "core.errors",
    "WeftError": "core.errors",
    "all_gather_matmul": "ops",
    "all_to_all_matmul": "ops",
    "build": "schedules",
    "check": "checker",
    "choices": "ops",
    "close": "ops",
    "codec": "core.codec",
    "collectives": "overlap.collectives",
    "concurrent": "overlap.concurrent",
    "concurrent_choices": "overlap.concurrent",
    "controls": "overlap.controls",
    "embedding_bag_all_to_all": "ops",
    "explain": "planner.explanation",
    "hooks": "overlap.hooks",
    "machine": "core.machine",
    "matmul_all_reduce": "ops",
    "matmul_all_to_all": "ops",
    "matmul_choices": "runtime.products",
    "matmul_reduce_scatter": "ops",
    "overlap_report": "report.overlap",
    "parallelize": "models.parallelize",
    "plan": "planner",
    "simulate": "perf",
    "synchronize": "ops",
    "timeline": "schedules.timelines",
}
"""The module in which each public name is defined; some names stand for a module itself."""

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
if sys.modules.get("torch") is not None:
    from weft.compat.namespace import load_when_named

    load_when_named("weft", "weft.ops")

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
    "synchronize",
    "timeline",
]
