"""Private parts of torch.compile that the compile pass needs: Inductor's passes, AOT autograd's partitioner and call
convention, and the counters of graphs that came from a cache."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["CustomGraphPass", "cache_hits", "inductor_options", "without_inductor"]


def inductor_options(before_lowering: CustomGraphPass) -> dict[str, Any]:
    """Options of torch.compile by which Inductor gives each graph to a pass, after autograd and before its own lowering."""
    return {"post_grad_custom_pre_pass": before_lowering}


def without_inductor(compile_graph: Callable[[Any, Any], Callable[..., Any]]) -> Callable[..., Any]:
    """A backend of torch.compile, without Inductor: forward and backward graphs go to `compile_graph(module, inputs)`, which
    returns what runs instead. That is called with the graph's inputs, one by one."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def boxed(module: Any, inputs: Any) -> Callable[..., Any]:
        found: Callable[..., Any] = make_boxed_func(compile_graph(module, inputs))
        return found

    backend: Callable[..., Any] = aot_autograd(fw_compiler=boxed, partition_fn=min_cut_rematerialization_partition)
    return backend


def cache_hits() -> int:
    """Graphs that torch.compile took from a cache in this process, so that no pass has seen them. Loads nothing."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    counters = dynamo.counters
    return int(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
