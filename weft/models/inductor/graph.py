"""Read and change the graphs that torch.compile passes to a compile pass.

The graphs are functional: they consist of aten operators and functional collectives. The fake tensor meta["val"] of a node has
the shape and dtype of its value. A reshape keeps the order of the elements, so the first and the last shape describe a chain of
reshapes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
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
"""Operators whose result has the elements of their first argument in the same order."""
SPLITS = frozenset((aten.split.Tensor, aten.split_with_sizes.default))
"""Operators that return the parts of a tensor along one dimension."""
CASTS = frozenset((aten._to_copy.default, torch.ops.prims.convert_element_type.default))
"""Operators that may change the dtype of a tensor."""
_MERGEABLE = (
    RESHAPES - {aten.clone.default} | SPLITS | CASTS | {aten.cat.default, aten.slice.Tensor, aten.view.dtype, operator.getitem}
)
"""Operators after a wait whose equal calls are merged. A clone is left out, because it makes a separate tensor on purpose."""

OTHER_GRAPH = "another graph of torch.compile's, behind a graph break (TORCH_LOGS=graph_breaks says where)"
"""The place where the matmul or the collective of a pair may be if it is missing from this graph."""


class Refused(Exception):
    """Raised for a collective that cannot be replaced. Its text is the reason that is reported for the call."""


def get_value(node: Node) -> torch.Tensor:
    """Return the fake tensor of a node. Raises Refused if the node has none, or if its shape is symbolic."""
    tensor = node.meta.get("val")
    if not isinstance(tensor, torch.Tensor):
        raise Refused(f"{node.name} has no single tensor as its value")
    if any(not isinstance(extent, int) for extent in tensor.shape):
        raise Refused("shapes are symbolic; compile with dynamic=False, or mark_static, for a graph of each size")
    return tensor


def check_value(node: Node, *, scaled: bool = False) -> None:
    """Raise Refused if no operator of weft takes the value of a node.

    `scaled` says whether the value may be FP8. FP8 elements may be communicated as bytes.
    """
    tensor = get_value(node)
    if tensor.dtype not in DTYPES and not (scaled and tensor.dtype in (*FLOAT8, torch.uint8)):
        raise Refused(f"{tensor.dtype} is communicated; weft takes {', '.join(DTYPES.values())}")
    if tensor.dim() < 2:
        raise Refused(f"a tensor of {tensor.dim()} dimensions is communicated; weft takes tensors of two or more dimensions")


def get_rank_and_size(group_name: str) -> tuple[int, int]:
    """Return this rank and the number of ranks in a process group."""
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    return dist.get_rank(group), dist.get_world_size(group)


def get_shape(node: Node) -> list[int]:
    return list(get_value(node).shape)


def have_same_shape_and_dtype(a: Node, b: Node) -> bool:
    """Return whether both values have the same fixed shape and the same dtype."""
    try:
        return (get_shape(a), get_value(a).dtype) == (get_shape(b), get_value(b).dtype)
    except Refused:
        return False


def list_reshapes(node: Node) -> list[Node]:
    """Return a node and all nodes that reshape its value, also through several reshapes."""
    nodes = [node]
    for source in nodes:
        nodes += [user for user in source.users if user.target in RESHAPES and user.args[0] is source]
    return nodes


def trace_reshapes_back(node: Node) -> list[Node]:
    """Return a node, the node that it reshapes, and so on, up to the first node that is not a reshape."""
    nodes = [node]
    while nodes[-1].target in RESHAPES:
        nodes.append(_as_node(nodes[-1].args[0]))
    return nodes


def get_cast_dtype(node: Node) -> torch.dtype | None:
    """Return the new dtype if a node changes only the dtype of a tensor; otherwise None."""
    if node.target not in CASTS:
        return None
    before, after = get_value(_as_node(node.args[0])), get_value(node)
    return after.dtype if before.device == after.device and before.dtype != after.dtype else None


def find_descendants(node: Node) -> set[Node]:
    """Return a node, its users, their users, and so on."""
    found, rest = {node}, [node]
    while rest:
        new = [user for user in rest.pop().users if user not in found]
        found.update(new)
        rest += new
    return found


def get_argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a node, which may have been passed by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _as_node(found: object) -> Node:
    assert isinstance(found, Node)
    return found


@dataclass(frozen=True)
class Relayout:
    """A concatenation of all parts of a tensor along another dimension: cat(split(source, dim), new_dim).

    Slices may take the place of the split, and the parts may be viewed as bytes.
    """

    source: Node
    dim: int
    """The dimension along which the source is split."""
    new_dim: int
    """The dimension along which the parts are concatenated."""
    count: int
    """The number of parts, which have equal extents."""
    nodes: tuple[Node, ...]
    """The nodes between the source and the concatenation."""


def match_relayout(whole: Node) -> Relayout | None:
    """Return the Relayout that ends in a node, or None if the node ends none."""
    joined = whole.args[0] if whole.target is aten.cat.default else None
    if not isinstance(joined, list | tuple) or len(joined) < 2 or not all(isinstance(part, Node) for part in joined):
        return None
    views = [_as_node(part) for part in joined if _as_node(part).target is aten.view.dtype]
    parts = [_as_node(view.args[0]) for view in views] or [_as_node(part) for part in joined]
    match = _match_parts(parts)
    if match is None or (views and len(views) != len(joined)):
        return None
    source, dim, between = match
    extents = [part.meta["val"].shape[dim] for part in parts]
    if len(set(extents)) != 1 or extents[0] * len(parts) != source.meta["val"].shape[dim]:
        return None
    new_dim = _normalize_dim(whole, get_argument(whole, 1, "dim", 0))
    return Relayout(source, dim, new_dim, len(parts), (*between, *parts, *views))


def _match_parts(parts: Sequence[Node]) -> tuple[Node, int, list[Node]] | None:
    """Return the tensor whose parts these are, the dimension along which it is cut, and the split, if there is one.

    Returns None unless these are all parts of the tensor, in order.
    """
    first = parts[0]
    if first.target is operator.getitem:
        split = _as_node(first.args[0])
        equal = all(part.target is operator.getitem and part.args == (split, at) for at, part in enumerate(parts))
        if split.target not in SPLITS or not equal or len(split.meta["val"]) != len(parts):
            return None
        source = _as_node(split.args[0])
        return source, _normalize_dim(source, get_argument(split, 2, "dim", 0)), [split]
    if first.target is not aten.slice.Tensor:
        return None
    source, dim, place = _as_node(first.args[0]), get_argument(first, 1, "dim", 0), 0
    for part in parts:
        if part.target is not aten.slice.Tensor or part.args[0] is not source or get_argument(part, 1, "dim", 0) != dim:
            return None
        if (get_argument(part, 2, "start") or 0, get_argument(part, 4, "step", 1)) != (place, 1):
            return None
        place += part.meta["val"].shape[dim]
    return source, _normalize_dim(source, dim), []


def _normalize_dim(node: Node, dim: int) -> int:
    """Return a dimension of a node's value as a number that is not negative."""
    return dim % get_value(node).dim()


class Writer:
    """Adds nodes with fake tensors at the insertion point of a graph. New nodes get the stack trace of `like`."""

    def __init__(self, graph: Graph, like: Node) -> None:
        self.graph, self._like = graph, like
        self._fake_mode = detect_fake_mode([n.meta["val"] for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)])

    def __call__(self, target: Any, *args: Any) -> Node:
        """Add a call of the operator `target`."""
        node = self.graph.call_function(target, args)
        node.meta.update({key: self._like.meta[key] for key in ("stack_trace", "nn_module_stack") if key in self._like.meta})
        values = torch.fx.node.map_arg(args, lambda arg: arg.meta["val"])
        if self._fake_mode is None:
            node.meta["val"] = target(*values)
        else:
            with self._fake_mode:
                node.meta["val"] = target(*values)
        return node

    def split_outputs(self, node: Node) -> list[Node]:
        """Add a node for each of the tensors that a node returns."""
        return [self(operator.getitem, node, at) for at in range(len(node.meta["val"]))]

    def reshape(self, node: Node, extents: Sequence[int]) -> Node:
        """Add a reshape, unless the node already has this shape."""
        return node if get_shape(node) == list(extents) else self(aten.reshape.default, node, list(extents))

    def flatten_rows(self, node: Node, dim: int) -> Node:
        """Make a value a matrix whose columns are the last dimension. Of the dimensions of its rows, `dim` is the outermost."""
        extents = get_shape(node)
        if dim and prod(extents[:dim]) > 1:
            order = [dim, *(d for d in range(len(extents)) if d != dim)]
            node = self(aten.permute.default, node, order)
        return self.reshape(node, [prod(extents[:-1]), extents[-1]])

    def unflatten_rows(self, rows: Node, dim: int, extents: Sequence[int]) -> Node:
        """Undo `flatten_rows`, where `extents` is the original shape. The matrix may have another number of columns."""
        columns = get_shape(rows)[1]
        if dim and prod(extents[:dim]) > 1:
            order = [dim, *(d for d in range(len(extents) - 1) if d != dim), len(extents) - 1]
            moved = self.reshape(rows, [*(extents[d] for d in order[:-1]), columns])
            back = [order.index(d) for d in range(len(extents))]
            return self(aten.permute.default, moved, back)
        return self.reshape(rows, [*extents[:-1], columns])


def share_waits(graph: Graph) -> None:
    """Merge the waits for each collective into one, and then merge equal calls of operators on its result.

    torch merges two gathers of one tensor. Since torch 2.14 it does not merge their waits, because it assumes that waits have
    side effects.
    """
    order = {node: at for at, node in enumerate(graph.nodes)}
    rest = [node for node in graph.nodes if sum(user.target is c10d.wait_tensor.default for user in node.users) > 1]
    while rest:
        first: dict[str, Node] = {}
        for user in sorted(rest.pop().users, key=order.__getitem__):
            if user.target not in _MERGEABLE and user.target is not c10d.wait_tensor.default:
                continue
            first_use = first.setdefault(str((user.target, user.args, user.kwargs)), user)
            if first_use is not user:
                user.replace_all_uses_with(first_use)
                graph.erase_node(user)
                rest.append(first_use)


def move_above(place: Node, wanted: Iterable[Node]) -> None:
    """Move nodes, and all nodes that they depend on, above `place`, in the same order. None of them may depend on `place`."""
    order = {node: at for at, node in enumerate(place.graph.nodes)}
    needed: set[Node] = set()
    rest = [node for node in wanted if order[node] > order[place]]
    while rest:
        node = rest.pop()
        if node not in needed:
            needed.add(node)
            rest += [source for source in node.all_input_nodes if order[source] > order[place]]
    for node in sorted(needed, key=order.__getitem__):
        place.prepend(node)


def erase_unused(nodes: Iterable[Node]) -> None:
    """Erase those of the nodes that have no users, beginning with the last.

    torch would not remove unused collectives, because it assumes that they have side effects.
    """
    present = set(nodes)
    if not present:
        return
    graph = next(iter(present)).graph
    for node in reversed(list(graph.nodes)):
        if node in present and not node.users:
            graph.erase_node(node)


_TORCH = str(Path(torch.__file__).parent)


def file_and_line(node: Node) -> str:
    """Return the innermost line outside torch, as "model.py:12", or "" if it is unknown."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(path, line) for path, line in frames if not path.startswith(_TORCH)] or frames
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def module_name(node: Node) -> str:
    """Return the module of a forward's node, as "layers.0.up", or "" if it is unknown, as in a backward."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    name = str(list(stack.values())[-1][0])
    inner = re.sub(r"^L\['\w+'\]\.?", "", name)
    return re.sub(r"\._modules\b|^_modules\b", "", re.sub(r"\['?(\w+)'?\]", r".\1", inner)).strip(".")
