"""weft hides communication behind computation on several GPUs, at a grain finer than the shard.

Importing it touches no GPU, patches nothing and starts no process; what needs torch is loaded when it is first named. Import
torch first where a program names torch.ops.weft.* itself, as one that was saved by torch.export does.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from weft.core import __version__
from weft.core.lazy import lazy_names

if TYPE_CHECKING:
    from weft import models as models
    from weft import planner as planner
    from weft import schedule as schedule
    from weft import triton as triton
    from weft.core import codec as codec
    from weft.core import machine as machine
    from weft.core.errors import PeerLost, RankMismatch, WaitTimeout, WeftError
    from weft.core.machine import Machine
    from weft.core.problem import CollectiveProblem, LookupProblem, Problem
    from weft.models.experts import ExpertParallel
    from weft.models.inductor import CompilePass
    from weft.models.parallelize import parallelize
    from weft.models.styles import ColwiseParallel, RowwiseParallel, SequenceParallel, SharedInput
    from weft.models.tp_plan import register_tp_plan
    from weft.ops import (
        SGD,
        RowwiseAdagrad,
        all_gather_matmul,
        all_reduce_norm,
        all_to_all_matmul,
        choices,
        close,
        embedding_bag_all_to_all,
        matmul_all_reduce,
        matmul_all_reduce_norm,
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
    from weft.planner import plan
    from weft.planner.explanation import explain
    from weft.report.overlap import overlap_report
    from weft.runtime.products import matmul_choices


_HOMES = {
    "AllGather": "overlap.concurrent",
    "AllReduce": "overlap.concurrent",
    "AllToAll": "overlap.concurrent",
    "CollectiveProblem": "core.problem",
    "ColwiseParallel": "models.styles",
    "CompilePass": "models.inductor",
    "ExpertParallel": "models.experts",
    "LookupProblem": "core.problem",
    "Machine": "core.machine",
    "PeerLost": "core.errors",
    "Problem": "core.problem",
    "RankMismatch": "core.errors",
    "ReduceScatter": "overlap.concurrent",
    "RowwiseAdagrad": "ops",
    "RowwiseParallel": "models.styles",
    "SGD": "ops",
    "SendReceive": "overlap.concurrent",
    "SequenceParallel": "models.styles",
    "SharedInput": "models.styles",
    "WaitTimeout": "core.errors",
    "WeftError": "core.errors",
    "all_gather_matmul": "ops",
    "all_reduce_norm": "ops",
    "all_to_all_matmul": "ops",
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
    "matmul_all_reduce_norm": "ops",
    "matmul_all_to_all": "ops",
    "matmul_choices": "runtime.products",
    "matmul_reduce_scatter": "ops",
    "overlap_report": "report.overlap",
    "parallelize": "models.parallelize",
    "plan": "planner",
    "register_tp_plan": "models.tp_plan",
    "synchronize": "ops",
}
"""The module in which each public name is defined; some names stand for a module itself."""

_MODULES = ("codec", "collectives", "controls", "hooks", "machine", "models", "planner", "schedule", "triton")
"""Modules that users name, besides the names in __all__."""

__getattr__, _ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})


if sys.modules.get("torch") is not None:
    from weft.compat.dispatch import load_when_named

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
    "SendReceive",
    "SequenceParallel",
    "SharedInput",
    "WaitTimeout",
    "WeftError",
    "__version__",
    "all_gather_matmul",
    "all_reduce_norm",
    "all_to_all_matmul",
    "choices",
    "close",
    "concurrent",
    "concurrent_choices",
    "embedding_bag_all_to_all",
    "explain",
    "matmul_all_reduce",
    "matmul_all_reduce_norm",
    "matmul_all_to_all",
    "matmul_choices",
    "matmul_reduce_scatter",
    "overlap_report",
    "parallelize",
    "plan",
    "register_tp_plan",
    "synchronize",
]
