"""all_gather, then matmuls of what was gathered: found in a graph, and made one all_gather_matmul.

    shard -> all_gather -> wait [-> split, cat]    -> reshape -> mm(., b0)          weft::all_gather_matmul(shard, [b0, b1])
                                 \\ or -> cast                 -> addmm(bias, ., b1)   +-> out0, out1 + bias, gathered
                                                              -> anything else

The gathered tensor itself is asked for where something else needs it: a backward, say. A cast between goes before the gather
if that does not make more bytes travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from weft.models.inductor.graph import (
    OTHER_GRAPH,
    RESHAPES,
    Refused,
    Writer,
    argument,
    aten,
    c10d,
    cast_to,
    check_value,
    descendants,
    erase_unused,
    laid_anew,
    raise_above,
    same_elements,
    shape,
    value,
)
from weft.ops.common import DTYPES

START = c10d.all_gather_into_tensor.default
_OTHER_USES: dict[object, str] = {
    aten._scaled_mm.default: "scaled_mm multiplies with scales, which weft's operators do not take",
    aten.bmm.default: "bmm multiplies a batch of matrices, each with a b of its own",
    aten.baddbmm.default: "bmm multiplies a batch of matrices, each with a b of its own",
    aten._grouped_mm.default: "a grouped matmul multiplies rows with several b",
}


@dataclass(frozen=True)
class GatheredMatmul:
    """A matmul whose first factor is what was gathered, as [rows, K]. bias: addmm's."""

    node: Node
    b: Node
    bias: Node | None


@dataclass(frozen=True)
class Gather:
    """One place. whole: the node with what was gathered along `dim`; between: the nodes from all_gather on up to it. cast: the
    node that casts `whole` before the products, if one does."""

    start: Node
    shard: Node
    world_size: int
    group: str
    whole: Node
    dim: int
    between: tuple[Node, ...]
    products: tuple[GatheredMatmul, ...]
    cast: Node | None

    @property
    def columns(self) -> int:
        return sum(shape(product.b)[1] for product in self.products)


def read(start: Node) -> Gather:
    """The gather that begins at an all_gather_into_tensor. Raises Refused if it is not one that all_gather_matmul replaces."""
    shard, world_size, group = start.args[0], argument(start, 1, "group_size"), argument(start, 2, "group_name")
    assert isinstance(shard, Node)
    if not isinstance(group, str):
        raise Refused("the process group is no constant of the graph")
    check_value(shard)
    waits = [user for user in start.users if user.target is c10d.wait_tensor.default]
    if len(waits) != 1 or any(user.op != "output" for user in start.users if user is not waits[0]):
        raise Refused("what is gathered is used before it is waited for")
    whole, dim, between = _whole(waits[0], world_size)
    if dim == value(whole).dim() - 1:
        raise Refused(f"dimension {dim} of {value(whole).dim()} is gathered, the last: weft overlaps a gather of rows")
    products, cast = _products(start, whole)
    if len(start.users) > 1 and (cast or whole is not waits[0]):
        raise Refused(f"what is gathered is saved before it is {'cast' if cast else 'laid anew'}")
    return Gather(start, shard, world_size, group, whole, dim, (start, waits[0], *between), tuple(products), cast)


def _whole(wait: Node, world_size: int) -> tuple[Node, int, list[Node]]:
    """(what was gathered, along which dimension, the nodes between): torch gathers the first one, and lays out parts anew."""
    ends = dict.fromkeys(end for part in wait.users for piece in (part, *part.users) for end in (piece, *piece.users))
    for end in ends:
        laid = laid_anew(end)
        if laid is None or (laid.source, laid.dim, laid.count) != (wait, 0, world_size) or not laid.into:
            continue
        if all(user in laid.nodes or user is end for node in (wait, *laid.nodes) for user in node.users):
            return end, laid.into, [*laid.nodes, end]
    return wait, 0, []


def _products(start: Node, whole: Node) -> tuple[list[GatheredMatmul], Node | None]:
    found, reason = _products_of(start, whole, same_elements(whole))
    if found:
        return found, None
    casts = [user for one in same_elements(whole) for user in one.users if cast_to(user)]
    if len(casts) != 1:
        raise Refused(reason)
    cast = casts[0]
    found, reason = _products_of(start, whole, same_elements(cast))
    if not found:
        raise Refused(reason)
    _check_cast(whole, cast)
    return found, cast


def _check_cast(whole: Node, cast: Node) -> None:
    gathered, wanted = value(whole).dtype, value(cast).dtype
    if wanted not in DTYPES:
        raise Refused(f"{wanted} is multiplied; weft takes {', '.join(DTYPES.values())}")
    if wanted.itemsize > gathered.itemsize:
        raise Refused(f"{gathered} is gathered and multiplied as {wanted}: cast first, more bytes would travel")
    if any(user is not cast and user.target not in RESHAPES for one in same_elements(whole) for user in one.users):
        raise Refused(f"what is gathered is needed as {gathered}, too, and multiplied as {wanted}")


def _products_of(start: Node, whole: Node, alike: Sequence[Node]) -> tuple[list[GatheredMatmul], str]:
    """(the matmuls that take one of `alike` as their first factor, why there is none)."""
    columns, after = shape(whole)[-1], descendants(start)
    found: list[GatheredMatmul] = []
    reasons = [f"no matmul takes what is gathered {shape(whole)} as its first factor"]
    if all(user.op == "output" for one in alike for user in one.users if user not in alike):
        reasons = [f"what is gathered {shape(whole)} goes to {OTHER_GRAPH}"]
    for one in alike:
        for user in one.users:
            if user.target in _OTHER_USES:
                reasons.append(_OTHER_USES[user.target])
            product = _product(user, one, columns)
            if product and _has_factor(user):
                reasons.append("the matmul has a factor")
            elif product and (product.b in after or product.bias in after):
                reasons.append(f"the other factor of {user.name} is computed from what is gathered")
            elif product:
                found.append(product)
    return found, reasons[-1]


def _product(user: Node, a: Node, columns: int) -> GatheredMatmul | None:
    if user.target not in (aten.mm.default, aten.addmm.default):
        return None
    place = 1 if user.target is aten.addmm.default else 0
    if user.args[place] is not a or shape(a)[-1] != columns:
        return None
    bias = user.args[0] if place else None
    b = user.args[place + 1]
    assert isinstance(b, Node)
    value(b)  # Refused where its extents are not known
    return GatheredMatmul(user, b, bias if isinstance(bias, Node) else None)


def _has_factor(product: Node) -> bool:
    if product.target is not aten.addmm.default:
        return False
    return (argument(product, 3, "beta", 1), argument(product, 4, "alpha", 1)) != (1, 1)


def rewrite(graph: Graph, site: Gather, schedule: str) -> None:
    """Make it one all_gather_matmul."""
    nodes = [product.node for product in site.products]
    old = [*site.between, *(one for source in (site.whole, site.cast) if source for one in same_elements(source)), *nodes]
    with graph.inserting_before(site.start):
        write = Writer(graph, nodes[0])
        shard = _cast(write, site.shard, site.cast)
        rows, extents = write.to_front(shard, site.dim), shape(site.whole)
        bs = [product.b for product in site.products]
        total = shape(rows)[0] * site.world_size
        keep = _needed(site, set(nodes))
        fused = write(torch.ops.weft.all_gather_matmul.default, rows, bs, site.group, total, 1, schedule, keep, False)
        outs = write.items(fused)
        if keep:
            kept = write.from_front(outs.pop(), site.dim, extents)
            used = site.cast or site.whole  # which may be cast behind views
            used.replace_all_uses_with(write.reshape(kept, shape(used)))
            site.start.replace_all_uses_with(kept, lambda user: user.op == "output")
    raise_above(fused, bs)
    for product, out in zip(site.products, outs, strict=True):
        _put(graph, product, out, site.dim, extents)
    erase_unused(old)


def _cast(write: Writer, shard: Node, cast: Node | None) -> Node:
    return shard if cast is None else write(torch.ops.prims.convert_element_type.default, shard, value(cast).dtype)


def _needed(site: Gather, products: set[Node]) -> bool:
    """Whether anything but the products uses what was gathered, or saves it before its wait."""
    users = {user for one in same_elements(site.cast or site.whole) for user in one.users}
    return len(site.start.users) > 1 or any(user not in products and user.target not in RESHAPES for user in users)


def _put(graph: Graph, product: GatheredMatmul, out: Node, dim: int, extents: Sequence[int]) -> None:
    with graph.inserting_before(product.node):
        write = Writer(graph, product.node)
        found = write.reshape(write.from_front(out, dim, extents), shape(product.node))
        if product.bias is not None:
            found = write(aten.add.Tensor, found, product.bias)
    product.node.replace_all_uses_with(found)
