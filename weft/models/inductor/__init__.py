"""torch.compile: a pass that finds collectives beside matmuls in a graph, and puts weft's operators there.

Models that torch parallelizes (parallelize_module with torch's own styles, DTensor, functional collectives) need no change:

    overlap = weft.CompilePass()
    compiled = torch.compile(model, options=overlap.options)
    ...
    print(overlap.report())

The pass sees each graph after autograd, forward and backward apart: gathers.py and scatters.py say what it looks for, graph.py
reads and writes graphs, places.py tells where a node is from. A place that it leaves alone is listed, with the reason.
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
from weft.core.errors import require
from weft.core.problem import Op
from weft.core.version import __version__
from weft.models.inductor import gathers, scatters
from weft.models.inductor.graph import Refused, place_in, shape, share_waits
from weft.models.inductor.places import file_and_line, module_name
from weft.models.sites import CommunicatingLayer
from weft.ops.common import spec_of

_OPS: tuple[Op, ...] = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
_COLLECTIVES = frozenset(("_c10d_functional", "_c10d_functional_autograd", "_dtensor"))
"""Namespaces of torch's collectives in graphs, DTensor's own too. Those that no operator replaces are listed all the same."""
_RESHAPES = frozenset((torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default))


class CompilePass(CustomGraphPass):
    """Replaces, in each graph that torch.compile makes:

        all_gather of rows, then matmuls of them        all_gather_matmul
        a matmul, then reduce_scatter of its rows       matmul_reduce_scatter
        a matmul, then all_reduce                       matmul_all_reduce

    schedule: as the operators take it, a name or "auto"; or one for each operator, by its name. operators: the ones to put in.
    The matmuls may be aten._scaled_mm, of FP8 with tensorwise or rowwise scales; a scale that is gathered travels with its row.
    Of a bias that is divided by the number of ranks before a reduction, as DTensor divides a RowwiseParallel linear's, the mean
    of all ranks' is made, a reduction of one row.

    What is left alone, with a reason: other uses of a collective, a last dimension that is gathered or scattered, bmm,
    symbolic shapes, a product that is needed or cast before its reduction. A linear's bias is added after the product,
    which rounds once more.

    All ranks must compile the same model with the same values here. Raises ValueError for an unknown operator or schedule.
    Sources: as the operators'; PyTorch has such a pass for its own async tensor parallelism.
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
            spec_of(spec, name)  # type: ignore[arg-type]
        self.schedules = {name: named.get(name, "auto") for name in self.operators}
        self.sites: list[CommunicatingLayer] = []
        self.graphs = 0
        self._hits_before = cache_hits()

    @cached_property
    def options(self) -> dict[str, Any]:
        """For torch.compile(..., options=...), with Inductor; a mode's go along: `torch._inductor.list_mode_options(mode)`."""
        return inductor_options(self)

    def __call__(self, graph: Graph) -> None:
        """Rewrite one graph in place."""
        self.graphs += 1
        share_waits(graph)
        starts = [node for node in graph.nodes if node.target is gathers.START]
        for start in [node for node in starts if not gathers.carries_scales(node)]:
            self._gather(graph, start)
        self._scatters(graph, [node for node in graph.nodes if node.target in scatters.OPERATORS])
        for node in graph.nodes:
            if _is_other(node):
                self._note(node, (), f"{_short(node)}: no operator of weft replaces it")
            if node.target in _RESHAPES:
                # As Inductor has them all: what was put in may lie otherwise in memory.
                node.target = torch.ops.aten.reshape.default
        graph.lint()

    def _gather(self, graph: Graph, start: Node) -> None:
        try:
            self._check_asked("all_gather_matmul")
            site = gathers.read(start)
        except Refused as refused:
            self._note(start, (), f"{_short(start)}: {refused}")
            return
        nodes = [product.node for product in site.products]
        problem = {"n": site.columns * site.world_size, "k": shape(nodes[0].args[0])[-1], "group": site.group}  # type: ignore[arg-type]
        self._note(nodes[0], nodes, "", "all_gather_matmul", problem)
        gathers.rewrite(graph, site, self.schedules["all_gather_matmul"])

    def _scatters(self, graph: Graph, starts: Sequence[Node]) -> None:
        found = []
        for start in starts:
            try:
                self._check_asked(scatters.OPERATORS[start.target])
                found.append(scatters.read(start))
            except Refused as refused:
                self._note(start, (), f"{_short(start)}: {refused}")
        for site in scatters.added(found):
            nodes = [term.node for term in site.terms]
            size = place_in(site.group)[1]
            problem = {"n": shape(nodes[0])[1], "k": sum(shape(term.a)[1] for term in site.terms) * size, "group": site.group}
            merged = f"{len(site.starts)} reductions of which the sum is used are one" if len(site.starts) > 1 else ""
            if site.terms[0].bias:
                merged = "its bias is the mean of all ranks', a reduction more"
            self._note(nodes[0], nodes, merged, site.op, problem)
            scatters.rewrite(graph, site, self.schedules[site.op])

    def _check_asked(self, op: str) -> None:
        if op not in self.operators:
            raise Refused(f"{op} is not among the operators to put in")

    def _note(
        self, node: Node, products: Sequence[Node], reason: str, operator: str = "", problem: Mapping[str, Any] | None = None
    ) -> None:
        names = [module_name(product) for product in products or [node]]
        parts = tuple(dict.fromkeys(name for name in names if name))
        operators = (operator,) if operator else ()
        self.sites.append(
            CommunicatingLayer(parts=parts, operators=operators, reason=reason, where=file_and_line(node), **(problem or {}))
        )

    def uuid(self) -> str:
        """What Inductor's caches tell graphs apart by: this package's sources, what was asked for, and this rank, which is in
        the graphs."""
        asked = __version__, sorted(self.schedules.items()), _rank_and_size()
        digest = hashlib.sha256(repr(asked).encode())
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def report(self) -> str:
        """A line for each place that was found, after a line of counts. Graphs from torch.compile's caches were rewritten when
        they were compiled first: a line says that there are some."""
        done = sum(site.overlapped for site in self.sites)
        lines = [f"overlapped {done} of {len(self.sites)} places in {self.graphs} graphs"]
        if cache_hits() > self._hits_before:
            lines.append(
                "  graphs came from torch.compile's caches, as they were rewritten then; to have them here, compile with "
                "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1; weft.choices() has what runs"
            )
        return "\n".join([*lines, *(f"  {site.where}  {site}" if site.parts else f"  {site}" for site in self.sites)])


def _is_other(node: Node) -> bool:
    """Whether this is a collective that no operator replaces."""
    found = node.target
    if not isinstance(found, OpOverload) or found.namespace not in _COLLECTIVES:
        return False
    return found is not gathers.START and found not in scatters.OPERATORS and not _short(node).startswith("wait_tensor")


def _short(node: Node) -> str:
    """A collective's name, without its namespace and overload."""
    return str(node.target).split(".")[1]


def _rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
