"""A torch.compile pass that replaces collectives next to matmuls by weft's fused operators.

Models that torch parallelizes (parallelize_module with torch's own styles, DTensor, functional collectives) need no change:

    overlap = weft.CompilePass()
    compiled = torch.compile(model, options=overlap.options)
    ...
    print(overlap.report())

The pass sees each graph after autograd, so the forward and the backward pass are separate graphs. gathers.py and scatters.py
describe the patterns that they match, graph.py reads and writes graphs, and finds the source line and module of a
node. The report lists every collective that the pass leaves as it is, with the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.fx import Graph, Node

from weft.compat.inductor import CustomGraphPass, cache_hits, inductor_options
from weft.core import __version__
from weft.core.errors import require
from weft.core.problem import Op
from weft.models.communicating import CommunicatingLayer
from weft.models.inductor import gathers, scatters
from weft.models.inductor.graph import Refused, file_and_line, get_rank_and_size, get_shape, module_name, share_waits
from weft.ops.common import schedule_to_spec

_OPS: tuple[Op, ...] = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
_COLLECTIVES = frozenset(("_c10d_functional", "_c10d_functional_autograd", "_dtensor"))
"""The namespaces of torch's collectives, including DTensor's. The report also lists those that weft does not replace."""
_RESHAPES = frozenset((torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default))


class CompilePass(CustomGraphPass):
    """CompilePass replaces matmuls with collectives in each graph that torch.compile makes. The patterns are:

        all_gather of rows, then matmuls of them        all_gather_matmul
        a matmul, then reduce_scatter of its rows       matmul_reduce_scatter
        a matmul, then all_reduce                       matmul_all_reduce

    Args:
        schedule: a schedule's name or "auto", as the operators take it, or a mapping from operator names to schedules.
        operators: the names of the operators that the pass may use.

    A matmul may be an aten._scaled_mm of FP8 with tensorwise or rowwise scales. Gathered scales travel with their rows.
    DTensor divides the bias of a RowwiseParallel linear by the number of ranks before the reduction. The pass instead adds the
    mean of all ranks' biases afterwards, which costs a reduction of one row. A linear's bias is added in an operation of its
    own after the product, which rounds once more.

    The pass leaves these as they are, and reports why: other uses of a collective, a gather or scatter of the last dimension,
    bmm, symbolic shapes, and a product that is cast, or used elsewhere, before its reduction.

    All ranks must compile the same model with the same arguments. Raises ValueError for an unknown operator or schedule.
    Sources: those of the operators; PyTorch has such a pass for its own async tensor parallelism.
    """

    def __init__(
        self,
        *,
        schedule: str | Mapping[str, str] = "auto",
        operators: Sequence[str] = _OPS,
    ) -> None:
        self.operators = tuple(operators)
        for name in self.operators:
            if name not in _OPS:
                raise ValueError(f"operators has {name!r}; use {', '.join(_OPS)}")
        require("schedule", schedule, (str, Mapping), "use a schedule's name, or one for each operator by its name")
        named = dict.fromkeys(self.operators, schedule) if isinstance(schedule, str) else dict(schedule)
        for name, spec in named.items():
            if name not in self.operators or not isinstance(spec, str):
                raise ValueError(
                    f"schedule has {name!r}: {spec!r}; use a schedule's name for each of {', '.join(self.operators)}"
                )
            schedule_to_spec(spec, name)  # type: ignore[arg-type]
        self.schedules = {name: named.get(name, "auto") for name in self.operators}
        self.layers: list[CommunicatingLayer] = []
        self.graphs = 0
        self._hits_before = cache_hits()

    @cached_property
    def options(self) -> dict[str, Any]:
        """Return the options to pass to torch.compile(..., options=...) with the Inductor backend.

        To use a mode as well, merge in `torch._inductor.list_mode_options(mode)`.
        """
        return inductor_options(self)

    def __call__(self, graph: Graph) -> None:
        """Rewrite one graph in place."""
        self.graphs += 1
        share_waits(graph)
        starts = [node for node in graph.nodes if node.target is gathers.START]
        for start in [node for node in starts if not gathers.carries_scales(node)]:
            self._rewrite_gather(graph, start)
        self._rewrite_scatters(graph, [node for node in graph.nodes if node.target in scatters.OPERATORS])
        for node in graph.nodes:
            if _is_unsupported_collective(node):
                self._record(node, (), f"{_short_name(node)}: no operator of weft replaces it")
            if node.target in _RESHAPES:
                # A view fails if a weft operator returns other strides than the node it replaced; Inductor uses reshape, too.
                node.target = torch.ops.aten.reshape.default
        graph.lint()

    def _rewrite_gather(self, graph: Graph, start: Node) -> None:
        try:
            self._check_enabled("all_gather_matmul")
            gather = gathers.read(start)
        except Refused as refused:
            self._record(start, (), f"{_short_name(start)}: {refused}")
            return
        nodes = [product.node for product in gather.products]
        problem = {"n": gather.columns * gather.world_size, "k": get_shape(nodes[0].args[0])[-1], "group": gather.group}  # type: ignore[arg-type]
        self._record(nodes[0], nodes, "", "all_gather_matmul", problem)
        gathers.rewrite(graph, gather, self.schedules["all_gather_matmul"])

    def _rewrite_scatters(self, graph: Graph, starts: Sequence[Node]) -> None:
        found = []
        for start in starts:
            try:
                self._check_enabled(scatters.OPERATORS[start.target])
                found.append(scatters.read(start))
            except Refused as refused:
                self._record(start, (), f"{_short_name(start)}: {refused}")
        for scatter in scatters.merge_added(found):
            nodes = [term.node for term in scatter.terms]
            size = get_rank_and_size(scatter.group)[1]
            k = sum(get_shape(term.a)[1] for term in scatter.terms) * size
            problem = {"n": get_shape(nodes[0])[1], "k": k, "group": scatter.group}
            merged = f"{len(scatter.starts)} reductions of which the sum is used are one" if len(scatter.starts) > 1 else ""
            if scatter.terms[0].bias:
                merged = "its bias is the mean of all ranks', a reduction more"
            self._record(nodes[0], nodes, merged, scatter.op, problem)
            scatters.rewrite(graph, scatter, self.schedules[scatter.op])

    def _check_enabled(self, op: str) -> None:
        if op not in self.operators:
            raise Refused(f"{op} is not among the operators to put in")

    def _record(
        self, node: Node, products: Sequence[Node], reason: str, operator: str = "", problem: Mapping[str, Any] | None = None
    ) -> None:
        names = [module_name(product) for product in products or [node]]
        parts = tuple(dict.fromkeys(name for name in names if name))
        operators = (operator,) if operator else ()
        self.layers.append(
            CommunicatingLayer(parts=parts, operators=operators, reason=reason, where=file_and_line(node), **(problem or {}))
        )

    def uuid(self) -> str:
        """Return the key of this pass in Inductor's caches.

        It covers the sources of this package, the schedules, and this rank and the world size, which the graphs contain.
        """
        asked = __version__, sorted(self.schedules.items()), _rank_and_size()
        digest = hashlib.sha256(repr(asked).encode())
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def report(self) -> str:
        """Return a line of counts, and then a line for each pattern or collective that the pass has found.

        The pass does not see a graph that comes from torch.compile's caches, because it was rewritten when it was first
        compiled. An extra line says if there are such graphs.
        """
        done = sum(layer.overlapped for layer in self.layers)
        lines = [f"overlapped {done} of {len(self.layers)} places in {self.graphs} graphs"]
        if cache_hits() > self._hits_before:
            lines.append(
                "  graphs came from torch.compile's caches, as they were rewritten then; to have them here, compile with "
                "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1; weft.choices() has what runs"
            )
        return "\n".join([*lines, *(f"  {layer.where}  {layer}" if layer.parts else f"  {layer}" for layer in self.layers)])


def _is_unsupported_collective(node: Node) -> bool:
    """Return whether this is a collective that no weft operator replaces."""
    found = node.target
    if not isinstance(found, OpOverload) or found.namespace not in _COLLECTIVES:
        return False
    return found is not gathers.START and found not in scatters.OPERATORS and not _short_name(node).startswith("wait_tensor")


def _short_name(node: Node) -> str:
    """Return a collective's name without its namespace and overload."""
    return str(node.target).split(".")[1]


def _rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
