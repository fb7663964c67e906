"""Private parts of torch.compile that the compile pass needs: Inductor's passes, and the counters of graphs that came from a
cache."""

from __future__ import annotations

import sys
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["CustomGraphPass", "cache_hits", "inductor_options"]


def inductor_options(before_lowering: CustomGraphPass) -> dict[str, Any]:
    """Options of torch.compile by which Inductor gives each graph to a pass, after autograd and before its own lowering."""
    return {"post_grad_custom_pre_pass": before_lowering}


def cache_hits() -> int:
    """Graphs that torch.compile took from a cache in this process, so that no pass has seen them. Loads nothing."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    counters = dynamo.counters
    return int(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
