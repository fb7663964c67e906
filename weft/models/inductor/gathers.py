"""all_gather, then matmuls of what was gathered: found in a graph, and made one all_gather_matmul.

    shard -> all_gather -> wait [-> split, cat]    -> reshape -> mm(., b0)          weft::all_gather_matmul(shard, [b0, b1])
                                 \\ or -> cast                 -> addmm(bias, ., b1)   +-> out0, out1 + bias, gathered
                                                              -> anything else

The gathered tensor itself is asked for where something else needs it: a backward, say. A cast between goes before the gather
if that does not make more bytes travel. FP8 elements may be gathered as bytes, and viewed as FP8 afterwards. The products are
then aten._scaled_mm, of tensorwise scales, or of a scale for each row that is gathered as the rows are.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from weft.models.inductor.graph import (
    OTHER_GRAPH,
    RESHAPES,
    SPLITS,
    Refused,
    Writer,
    argument,
    aten,
    before_reshapes,
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
from weft.models.inductor.scaled import SCALED, ProductScales, bias_of, scales_of, write_gather
from weft.ops.common import DTYPES, FLOAT8

START = c10d.all_gather_into_tensor.default
_OTHER_USES: dict[object, str] = {
    aten.bmm.default: "bmm multiplies a batch of matrices, each with a b of its own",
    aten.baddbmm.default: "bmm multiplies a batch of matrices, each with a b of its own",
    aten._grouped_mm.default: "a grouped matmul multiplies rows with several b",
}


@dataclass(frozen=True)
class GatheredMatmul:
    """A matmul whose first factor is what was gathered, as [rows, K]. bias: addmm's, or scaled_mm's. scales: scaled_mm's."""

    node: Node
    b: Node
    bias: Node | None
    scales: ProductScales | None

    @property
    def factors(self) -> list[Node]:
        """What it needs besides the gathered rows and their scales."""
        of_scales = [] if self.scales is None else [self.scales.b]
        if self.scales is not None and self.scales.recipe == "tensorwise":
            of_scales.append(self.scales.a)
        return [self.b, *of_scales]


@dataclass(frozen=True)
class Gather:
    """One place. whole: the node with what was gathered along `dim`; between: the nodes from all_gather on up to it. cast: the
    node that casts `whole` before the products, or views its bytes as FP8, if one does. scale: this rank's scale for each row,
    if these are gathered, too; scale_nodes: the nodes that gather it."""

    start: Node
    shard: Node
    world_size: int
    group: str
    whole: Node
    dim: int
    between: tuple[Node, ...]
    products: tuple[GatheredMatmul, ...]
    cast: Node | None
    scale: Node | None = None
    scale_nodes: tuple[Node, ...] = ()

    @property
    def columns(self) -> int:
        return sum(shape(product.b)[1] for product in self.products)


def read(start: Node) -> Gather:
    """The gather that begins at an all_gather_into_tensor. Raises Refused if it is not one that all_gather_matmul replaces."""
    shard, world_size, group = start.args[0], argument(start, 1, "group_size"), argument(start, 2, "group_name")
    assert isinstance(shard, Node)
    if not isinstance(group, str):
        raise Refused("the process group is no constant of the graph")
    check_value(shard, scaled=True)
    waits = [user for user in start.users if user.target is c10d.wait_tensor.default]
    if len(waits) != 1 or any(user.op != "output" for user in start.users if user is not waits[0]):
        raise Refused("what is gathered is used before it is waited for")
    whole, dim, between = _whole(waits[0], world_size)
    if dim == value(whole).dim() - 1:
        raise Refused(f"dimension {dim} of {value(whole).dim()} is gathered, the last: weft overlaps a gather of rows")
    products, cast = _products(start, whole)
    if len(start.users) > 1 and (cast or whole is not waits[0]):
        raise Refused(f"what is gathered is saved before it is {'cast' if cast else 'laid anew'}")
    site = Gather(start, shard, world_size, group, whole, dim, (start, waits[0], *between), tuple(products), cast)
    scales = [product.scales for product in products if product.scales]
    if any(not one.like(scales[0]) for one in scales):
        raise Refused("the matmuls of what is gathered differ in recipe, output dtype or use_fast_accum")
    if not scales or scales[0].recipe == "tensorwise":
        return site
    found = [_gathered_scale(one.a, site) for one in scales]
    if any(scale is not found[0][0] for scale, _ in found):
        raise Refused("the matmuls of what is gathered have different scales for its rows")
    return replace(site, scale=found[0][0], scale_nodes=tuple(node for _, nodes in found for node in nodes))


def carries_scales(start: Node) -> bool:
    """Whether an all_gather_into_tensor gathers scales of FP8 rows."""
    follow = {c10d.wait_tensor.default, aten.cat.default, operator.getitem, *RESHAPES, *SPLITS}
    found = [start]
    for node in found:
        if any(user.target is SCALED and user.args[2] is node for user in node.users):
            return True
        found += [user for user in node.users if user.target in follow and user not in found]
    return False


def _gathered_scale(scale: Node, site: Gather) -> tuple[Node, list[Node]]:
    """(this rank's part of a scale of all gathered rows, the nodes that gather it)."""
    chain = before_reshapes(scale)
    laid = laid_anew(chain[-1])
    wait = chain[-1] if laid is None else laid.source
    start = wait.args[0] if wait.target is c10d.wait_tensor.default else None
    if isinstance(start, Node) and start.target is START and argument(start, 2, "group_name") == site.group:
        whole, dim, between = _whole(wait, site.world_size)
        same_rows = dim == site.dim and (not dim or shape(whole)[:-1] == shape(site.whole)[:-1])
        if whole is chain[-1] and same_rows and isinstance(start.args[0], Node):
            return start.args[0], [start, wait, *between, *chain]
    raise Refused("the scales of rows are not gathered as the rows are")


def _whole(wait: Node, world_size: int) -> tuple[Node, int, list[Node]]:
    """(what was gathered, along which dimension, the nodes between): torch gathers the first one, and lays out parts anew."""
    ends = [wait]
    for _ in range(4):  # split, getitem, a view of bytes, cat
        ends += [user for end in ends for user in end.users if user not in ends]
    for end in dict.fromkeys(ends):
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
    casts = [user for one in same_elements(whole) for user in one.users if cast_to(user) or user.target is aten.view.dtype]
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
    if wanted not in DTYPES and not (cast.target is aten.view.dtype and wanted in FLOAT8):
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
            elif product and (product.bias in after or any(factor in after for factor in product.factors)):
                reasons.append(f"the other factor of {user.name} is computed from what is gathered")
            elif product:
                found.append(product)
    return found, reasons[-1]


def _product(user: Node, a: Node, columns: int) -> GatheredMatmul | None:
    if user.target not in (aten.mm.default, aten.addmm.default, SCALED):
        return None
    place = 1 if user.target is aten.addmm.default else 0
    if user.args[place] is not a or shape(a)[-1] != columns:
        return None
    bias = user.args[0] if place else bias_of(user)
    b = user.args[place + 1]
    assert isinstance(b, Node)
    value(b)  # Refused where its extents are not known
    return GatheredMatmul(user, b, bias if isinstance(bias, Node) else None, scales_of(user))


def _has_factor(product: Node) -> bool:
    if product.target is not aten.addmm.default:
        return False
    return (argument(product, 3, "beta", 1), argument(product, 4, "alpha", 1)) != (1, 1)


def rewrite(graph: Graph, site: Gather, schedule: str) -> None:
    """Make it one all_gather_matmul."""
    nodes = [product.node for product in site.products]
    raise_above(site.start, [factor for product in site.products for factor in product.factors])
    if site.scale is not None:
        raise_above(site.start, [site.scale])
    old = [
        *site.scale_nodes,
        *site.between,
        *(one for source in (site.whole, site.cast) if source for one in same_elements(source)),
        *nodes,
    ]
    with graph.inserting_before(site.start):
        write = Writer(graph, nodes[0])
        shard = _cast(write, site.shard, site.cast)
        rows, extents = write.to_front(shard, site.dim), shape(site.whole)
        bs = [product.b for product in site.products]
        total = shape(rows)[0] * site.world_size
        keep = _needed(site, set(nodes))
        scales = [product.scales for product in site.products if product.scales]
        if scales:
            scale_rows = None
            if site.scale is not None:
                scale_rows = write.to_front(write.reshape(site.scale, [*shape(shard)[:-1], 1]), site.dim)
            fused = write_gather(write, rows, bs, scale_rows, scales, site.group, schedule, keep=keep)
        else:
            fused = write(torch.ops.weft.all_gather_matmul.default, rows, bs, site.group, total, 1, schedule, keep, False)
        outs = write.items(fused)
        if keep and scales:
            old.append(outs.pop())  # the gathered scales
        if keep:
            kept = write.from_front(outs.pop(), site.dim, extents)
            used = site.cast or site.whole  # which may be cast behind views
            used.replace_all_uses_with(write.reshape(kept, shape(used)))
            site.start.replace_all_uses_with(kept, lambda user: user.op == "output")
    for product, out in zip(site.products, outs, strict=True):
        _put(graph, product, out, site.dim, extents)
    erase_unused(old)


def _cast(write: Writer, shard: Node, cast: Node | None) -> Node:
    if cast is None or value(shard).dtype == value(cast).dtype:
        return shard
    how = aten.view.dtype if cast.target is aten.view.dtype else torch.ops.prims.convert_element_type.default
    return write(how, shard, value(cast).dtype)


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
