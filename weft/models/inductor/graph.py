"""Reading and writing the graphs that torch.compile hands to a pass: values, what only reshapes, new nodes.

Graphs are functional, of aten operators and functional collectives, and each node carries an example of its value in
meta["val"]. A reshape keeps elements in their order, so that chains of reshapes come to the shapes at their two ends.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.fx import Graph, Node

from weft.ops.common import DTYPES, FLOAT8

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

RESHAPES = frozenset(
    (
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.alias.default,
        aten.detach.default,
        aten.clone.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
    )
)
"""Operators whose result has the elements of their first argument, in their order."""
SPLITS = frozenset((aten.split.Tensor, aten.split_with_sizes.default))
CASTS = frozenset((aten._to_copy.default, torch.ops.prims.convert_element_type.default))
_SHARED = (
    RESHAPES - {aten.clone.default} | SPLITS | CASTS | {aten.cat.default, aten.slice.Tensor, aten.view.dtype, operator.getitem}
)
"""What follows a wait and makes the same of the same; a clone is another tensor on purpose."""


OTHER_GRAPH = "another graph of torch.compile's, behind a graph break (TORCH_LOGS=graph_breaks says where)"
"""Where the other half of a place may be."""


class Refused(Exception):
    """A place that cannot be rewritten. Its text says why, for the listing."""


def value(node: Node) -> torch.Tensor:
    """The example of a node's value. Raises Refused if it has none, or no fixed shape."""
    found = node.meta.get("val")
    if not isinstance(found, torch.Tensor):
        raise Refused(f"{node.name} has no single tensor as its value")
    if any(not isinstance(extent, int) for extent in found.shape):
        raise Refused("shapes are symbolic; compile with dynamic=False, or mark_static, for a graph of each size")
    return found


def check_value(node: Node, *, scaled: bool = False) -> None:
    """Raises Refused for what no operator of weft takes. scaled: whether it may be FP8, which may travel as bytes."""
    found = value(node)
    if found.dtype not in DTYPES and not (scaled and found.dtype in (*FLOAT8, torch.uint8)):
        raise Refused(f"{found.dtype} travels; weft takes {', '.join(DTYPES.values())}")
    if found.dim() < 2:
        raise Refused(f"a tensor of {found.dim()} dimensions travels; weft takes matrices, and tensors of more dimensions")


def place_in(group: str) -> tuple[int, int]:
    """(this rank, how many there are) in a process group."""
    found = _resolve_process_group(group)  # type: ignore[arg-type]
    return dist.get_rank(found), dist.get_world_size(found)


def shape(node: Node) -> list[int]:
    return list(value(node).shape)


def valued_alike(one: Node, two: Node) -> bool:
    """Whether both have the same fixed shape, and the same dtype."""
    try:
        return (shape(one), value(one).dtype) == (shape(two), value(two).dtype)
    except Refused:
        return False


def same_elements(node: Node) -> list[Node]:
    """This node, and all that reshape it."""
    found = [node]
    for one in found:
        found += [user for user in one.users if user.target in RESHAPES and user.args[0] is one]
    return found


def before_reshapes(node: Node) -> list[Node]:
    """This node, what it reshapes, and so on back to a node that is no reshape."""
    found = [node]
    while found[-1].target in RESHAPES:
        found.append(_node(found[-1].args[0]))
    return found


def cast_to(node: Node) -> torch.dtype | None:
    """The dtype that a node only casts to, or None."""
    if node.target not in CASTS:
        return None
    before, after = value(_node(node.args[0])), value(node)
    return after.dtype if before.device == after.device and before.dtype != after.dtype else None


def descendants(node: Node) -> set[Node]:
    found, rest = {node}, [node]
    while rest:
        new = [user for user in rest.pop().users if user not in found]
        found.update(new)
        rest += new
    return found


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """An argument, however it was passed."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _node(found: object) -> Node:
    assert isinstance(found, Node)
    return found


@dataclass(frozen=True)
class Laid:
    """cat(split(source, dim), into), or of slices: `count` parts of equal extent, which may be viewed as bytes. nodes: what
    is between source and cat."""

    source: Node
    dim: int
    into: int
    count: int
    nodes: tuple[Node, ...]


def laid_anew(whole: Node) -> Laid | None:
    """Return the Laid of a cat of all parts of a tensor along another dimension; None for other nodes."""
    given = whole.args[0] if whole.target is aten.cat.default else None
    if not isinstance(given, list | tuple) or len(given) < 2 or not all(isinstance(part, Node) for part in given):
        return None
    views = [_node(part) for part in given if _node(part).target is aten.view.dtype]
    parts = [_node(view.args[0]) for view in views] or [_node(part) for part in given]
    cut = _cut(parts)
    if cut is None or (views and len(views) != len(given)):
        return None
    source, dim, between = cut
    extents = [part.meta["val"].shape[dim] for part in parts]
    if len(set(extents)) != 1 or extents[0] * len(parts) != source.meta["val"].shape[dim]:
        return None
    into = _dimension(whole, argument(whole, 1, "dim", 0))
    return Laid(source, dim, into, len(parts), (*between, *parts, *views))


def _cut(parts: Sequence[Node]) -> tuple[Node, int, list[Node]] | None:
    """(what they are cut from, along which dimension, the split itself), if these are all of its parts, in their order."""
    first = parts[0]
    if first.target is operator.getitem:
        split = _node(first.args[0])
        equal = all(part.target is operator.getitem and part.args == (split, at) for at, part in enumerate(parts))
        if split.target not in SPLITS or not equal or len(split.meta["val"]) != len(parts):
            return None
        source = _node(split.args[0])
        return source, _dimension(source, argument(split, 2, "dim", 0)), [split]
    if first.target is not aten.slice.Tensor:
        return None
    source, dim, place = _node(first.args[0]), argument(first, 1, "dim", 0), 0
    for part in parts:
        if part.target is not aten.slice.Tensor or part.args[0] is not source or argument(part, 1, "dim", 0) != dim:
            return None
        if (argument(part, 2, "start") or 0, argument(part, 4, "step", 1)) != (place, 1):
            return None
        place += part.meta["val"].shape[dim]
    return source, _dimension(source, dim), []


def _dimension(node: Node, dim: int) -> int:
    return dim % value(node).dim()


class Writer:
    """Adds nodes in one place of a graph, each with an example of its value."""

    def __init__(self, graph: Graph, like: Node) -> None:
        self.graph, self._like = graph, like
        self._mode = detect_fake_mode([n.meta["val"] for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)])

    def __call__(self, target: Any, *args: Any) -> Node:
        node = self.graph.call_function(target, args)
        node.meta.update({key: self._like.meta[key] for key in ("stack_trace", "nn_module_stack") if key in self._like.meta})
        values = torch.fx.node.map_arg(args, lambda one: one.meta["val"])
        if self._mode is None:
            node.meta["val"] = target(*values)
        else:
            with self._mode:
                node.meta["val"] = target(*values)
        return node

    def items(self, node: Node) -> list[Node]:
        """Each of the tensors that a node returns."""
        return [self(operator.getitem, node, at) for at in range(len(node.meta["val"]))]

    def reshape(self, node: Node, extents: Sequence[int]) -> Node:
        return node if shape(node) == list(extents) else self(aten.reshape.default, node, list(extents))

    def to_front(self, node: Node, dim: int) -> Node:
        """Rows of a matrix: dimension `dim` outermost, then the others but the last, which are its columns."""
        extents = shape(node)
        if dim and prod(extents[:dim]) > 1:
            order = [dim, *(d for d in range(len(extents)) if d != dim)]
            node = self(aten.permute.default, node, order)
        return self.reshape(node, [prod(extents[:-1]), extents[-1]])

    def from_front(self, rows: Node, dim: int, extents: Sequence[int]) -> Node:
        """What `to_front` has made a matrix of, for an original of `extents` but for the number of columns."""
        columns = shape(rows)[1]
        if dim and prod(extents[:dim]) > 1:
            order = [dim, *(d for d in range(len(extents) - 1) if d != dim), len(extents) - 1]
            moved = self.reshape(rows, [*(extents[d] for d in order[:-1]), columns])
            back = [order.index(d) for d in range(len(extents))]
            return self(aten.permute.default, moved, back)
        return self.reshape(rows, [*extents[:-1], columns])


def share_waits(graph: Graph) -> None:
    """One wait for each collective, and one node of those that then make the same of its result.

    Two gathers of one tensor are one in torch's graphs. Since torch 2.14 their waits are not: it takes them to have effects.
    """
    order = {node: at for at, node in enumerate(graph.nodes)}
    rest = [node for node in graph.nodes if sum(user.target is c10d.wait_tensor.default for user in node.users) > 1]
    while rest:
        first: dict[str, Node] = {}
        for user in sorted(rest.pop().users, key=order.__getitem__):
            if user.target not in _SHARED and user.target is not c10d.wait_tensor.default:
                continue
            first_use = first.setdefault(str((user.target, user.args, user.kwargs)), user)
            if first_use is not user:
                user.replace_all_uses_with(first_use)
                graph.erase_node(user)
                rest.append(first_use)


def raise_above(place: Node, wanted: Iterable[Node]) -> None:
    """Move nodes, and all that they need, above `place`, in their order. None of them needs `place`."""
    order = {node: at for at, node in enumerate(place.graph.nodes)}
    needed: set[Node] = set()
    rest = [node for node in wanted if order[node] > order[place]]
    while rest:
        node = rest.pop()
        if node not in needed:
            needed.add(node)
            rest += [one for one in node.all_input_nodes if order[one] > order[place]]
    for node in sorted(needed, key=order.__getitem__):
        place.prepend(node)


def erase_unused(nodes: Iterable[Node]) -> None:
    """Erase those that nobody uses, users first. Collectives stay in a graph otherwise: torch takes them to have effects."""
    present = set(nodes)
    if not present:
        return
    graph = next(iter(present)).graph
    for node in reversed(list(graph.nodes)):
        if node in present and not node.users:
            graph.erase_node(node)
