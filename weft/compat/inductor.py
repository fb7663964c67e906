"""The compile pass needs these private parts of torch.compile: Inductor's passes, and the counters of graphs from a cache."""

from __future__ import annotations

import sys
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["CustomGraphPass", "cache_hits", "inductor_options"]


def inductor_options(before_lowering: CustomGraphPass) -> dict[str, Any]:
    """Return options of torch.compile with which Inductor runs a pass on each graph, after autograd and before its lowering."""
    return {"post_grad_custom_pre_pass": before_lowering}


def cache_hits() -> int:
    """Return the number of graphs that torch.compile took from a cache in this process, and on which no pass has run.

    It loads no module.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    counters = dynamo.counters
    return int(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
