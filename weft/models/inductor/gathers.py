"""Find an all_gather and the matmuls of its result in a graph, and replace them by one all_gather_matmul.

    shard -> all_gather -> wait [-> split, cat]    -> reshape -> mm(., b0)          weft::all_gather_matmul(shard, [b0, b1])
                                 \\ or -> cast                 -> addmm(bias, ., b1)   +-> out0, out1 + bias, gathered
                                                              -> anything else

The operator returns the gathered tensor only if something else uses it, such as the backward pass. A cast between the gather
and the matmuls moves before the gather. A cast to a larger dtype is refused, because more bytes would then travel. FP8
elements may be gathered as bytes and viewed as FP8 afterwards. The matmuls are then aten._scaled_mm, with tensorwise scales or
with one scale for each row. Scales of rows are gathered like the rows.
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
    aten,
    c10d,
    check_value,
    erase_unused,
    find_descendants,
    get_argument,
    get_cast_dtype,
    get_shape,
    get_value,
    list_reshapes,
    match_relayout,
    move_above,
    trace_reshapes_back,
)
from weft.models.inductor.scaled import SCALED, ProductScales, bias_of, scales_of, write_gather_scales
from weft.ops.common import DTYPES, FLOAT8

START = c10d.all_gather_into_tensor.default
_OTHER_USES: dict[object, str] = {
    aten.bmm.default: "bmm multiplies a batch of matrices, each with its own b",
    aten.baddbmm.default: "bmm multiplies a batch of matrices, each with its own b",
    aten._grouped_mm.default: "a grouped matmul multiplies rows with several b",
}


@dataclass(frozen=True)
class GatheredMatmul:
    """A GatheredMatmul is a matmul whose first factor is the gathered tensor, as [rows, K].

    node: the matmul.
    b: its second factor.
    bias: the bias of an addmm or a _scaled_mm, or None.
    scales: the scales of a _scaled_mm, or None.
    """

    node: Node
    b: Node
    bias: Node | None
    scales: ProductScales | None

    @property
    def factors(self) -> list[Node]:
        """Return the nodes that the matmul needs besides the gathered rows and their scales."""
        of_scales = [] if self.scales is None else [self.scales.b]
        if self.scales is not None and self.scales.recipe == "tensorwise":
            of_scales.append(self.scales.a)
        return [self.b, *of_scales]


@dataclass(frozen=True)
class Gather:
    """A Gather is an all_gather that can be fused with the matmuls of its result.

    start: the all_gather.
    shard: its input.
    world_size: the size of the process group.
    group: the name of the process group.
    whole: the node whose value is the tensor gathered along `dim`.
    dim: the gathered dimension.
    between: the nodes from the all_gather up to `whole`.
    products: the matmuls.
    cast: the node that casts `whole` before the matmuls, or views its bytes as FP8, or None.
    scale: this rank's scales of its rows, if they are gathered as well, or None.
    scale_nodes: the nodes that gather those scales.
    """

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
        return sum(get_shape(product.b)[1] for product in self.products)


def read(start: Node) -> Gather:
    """Match the pattern from its all_gather_into_tensor on. Raises Refused if all_gather_matmul cannot replace it."""
    shard, world_size, group = start.args[0], get_argument(start, 1, "group_size"), get_argument(start, 2, "group_name")
    assert isinstance(shard, Node)
    if not isinstance(group, str):
        raise Refused("the process group is not a constant of the graph")
    check_value(shard, scaled=True)
    waits = [user for user in start.users if user.target is c10d.wait_tensor.default]
    if len(waits) != 1 or any(user.op != "output" for user in start.users if user is not waits[0]):
        raise Refused("what is gathered is used before it is waited for")
    whole, dim, between = _find_whole(waits[0], world_size)
    if dim == get_value(whole).dim() - 1:
        raise Refused(f"dimension {dim} of {get_value(whole).dim()} is gathered, the last: weft overlaps a gather of rows")
    products, cast = _find_products(start, whole)
    if len(start.users) > 1 and (cast or whole is not waits[0]):
        raise Refused(f"what is gathered is saved before it is {'cast' if cast else 'laid anew'}")
    gather = Gather(start, shard, world_size, group, whole, dim, (start, waits[0], *between), tuple(products), cast)
    scales = [product.scales for product in products if product.scales]
    if any(not one.like(scales[0]) for one in scales):
        raise Refused("the matmuls of what is gathered differ in recipe, output dtype or use_fast_accum")
    if not scales or scales[0].recipe == "tensorwise":
        return gather
    found = [_find_gathered_scale(one.a, gather) for one in scales]
    if any(scale is not found[0][0] for scale, _ in found):
        raise Refused("the matmuls of what is gathered have different scales for its rows")
    return replace(gather, scale=found[0][0], scale_nodes=tuple(node for _, nodes in found for node in nodes))


def carries_scales(start: Node) -> bool:
    """Return whether this all_gather_into_tensor gathers the scales of FP8 rows."""
    follow = {c10d.wait_tensor.default, aten.cat.default, operator.getitem, *RESHAPES, *SPLITS}
    found = [start]
    for node in found:
        if any(user.target is SCALED and user.args[2] is node for user in node.users):
            return True
        found += [user for user in node.users if user.target in follow and user not in found]
    return False


def _find_gathered_scale(scale: Node, gather: Gather) -> tuple[Node, list[Node]]:
    """Return this rank's part of the scales of all gathered rows, and the nodes that gather them."""
    chain = trace_reshapes_back(scale)
    layout = match_relayout(chain[-1])
    wait = chain[-1] if layout is None else layout.source
    start = wait.args[0] if wait.target is c10d.wait_tensor.default else None
    if isinstance(start, Node) and start.target is START and get_argument(start, 2, "group_name") == gather.group:
        whole, dim, between = _find_whole(wait, gather.world_size)
        same_rows = dim == gather.dim and (not dim or get_shape(whole)[:-1] == get_shape(gather.whole)[:-1])
        if whole is chain[-1] and same_rows and isinstance(start.args[0], Node):
            return start.args[0], [start, wait, *between, *chain]
    raise Refused("the scales of rows are not gathered as the rows are")


def _find_whole(wait: Node, world_size: int) -> tuple[Node, int, list[Node]]:
    """Return the gathered tensor, the dimension along which it was gathered, and the nodes between the wait and it.

    torch always gathers along dimension 0. For another dimension it splits the result and concatenates the parts along that.
    """
    ends = [wait]
    for _ in range(4):  # split, getitem, a view of bytes, cat
        ends += [user for end in ends for user in end.users if user not in ends]
    for end in dict.fromkeys(ends):
        layout = match_relayout(end)
        if layout is None or (layout.source, layout.dim, layout.count) != (wait, 0, world_size) or not layout.new_dim:
            continue
        if all(user in layout.nodes or user is end for node in (wait, *layout.nodes) for user in node.users):
            return end, layout.new_dim, [*layout.nodes, end]
    return wait, 0, []


def _find_products(start: Node, whole: Node) -> tuple[list[GatheredMatmul], Node | None]:
    found, reason = _match_products(start, whole, list_reshapes(whole))
    if found:
        return found, None
    casts = [
        user for one in list_reshapes(whole) for user in one.users if get_cast_dtype(user) or user.target is aten.view.dtype
    ]
    if len(casts) != 1:
        raise Refused(reason)
    cast = casts[0]
    found, reason = _match_products(start, whole, list_reshapes(cast))
    if not found:
        raise Refused(reason)
    _check_cast(whole, cast)
    return found, cast


def _check_cast(whole: Node, cast: Node) -> None:
    gathered, wanted = get_value(whole).dtype, get_value(cast).dtype
    if wanted not in DTYPES and not (cast.target is aten.view.dtype and wanted in FLOAT8):
        raise Refused(f"{wanted} is multiplied; weft takes {', '.join(DTYPES.values())}")
    if wanted.itemsize > gathered.itemsize:
        raise Refused(f"{gathered} is gathered and multiplied as {wanted}: cast first, more bytes would travel")
    if any(user is not cast and user.target not in RESHAPES for one in list_reshapes(whole) for user in one.users):
        raise Refused(f"what is gathered is needed as {gathered}, too, and multiplied as {wanted}")


def _match_products(start: Node, whole: Node, reshaped: Sequence[Node]) -> tuple[list[GatheredMatmul], str]:
    """Return the matmuls whose first factor is one of `reshaped`, and the reason if there is none."""
    columns, after = get_shape(whole)[-1], find_descendants(start)
    found: list[GatheredMatmul] = []
    reasons = [f"no matmul takes what is gathered {get_shape(whole)} as its first factor"]
    if all(user.op == "output" for one in reshaped for user in one.users if user not in reshaped):
        reasons = [f"what is gathered {get_shape(whole)} goes to {OTHER_GRAPH}"]
    for one in reshaped:
        for user in one.users:
            if user.target in _OTHER_USES:
                reasons.append(_OTHER_USES[user.target])
            product = _match_product(user, one, columns)
            if product and _has_factor(user):
                reasons.append("the matmul has a factor")
            elif product and (product.bias in after or any(factor in after for factor in product.factors)):
                reasons.append(f"the other factor of {user.name} is computed from what is gathered")
            elif product:
                found.append(product)
    return found, reasons[-1]


def _match_product(user: Node, a: Node, columns: int) -> GatheredMatmul | None:
    if user.target not in (aten.mm.default, aten.addmm.default, SCALED):
        return None
    place = 1 if user.target is aten.addmm.default else 0
    if user.args[place] is not a or get_shape(a)[-1] != columns:
        return None
    bias = user.args[0] if place else bias_of(user)
    b = user.args[place + 1]
    assert isinstance(b, Node)
    get_value(b)  # raises Refused if its shape is not known
    return GatheredMatmul(user, b, bias if isinstance(bias, Node) else None, scales_of(user))


def _has_factor(product: Node) -> bool:
    if product.target is not aten.addmm.default:
        return False
    return (get_argument(product, 3, "beta", 1), get_argument(product, 4, "alpha", 1)) != (1, 1)


def rewrite(graph: Graph, gather: Gather, schedule: str) -> None:
    """Replace the matched nodes by one all_gather_matmul."""
    nodes = [product.node for product in gather.products]
    move_above(gather.start, [factor for product in gather.products for factor in product.factors])
    if gather.scale is not None:
        move_above(gather.start, [gather.scale])
    old = [
        *gather.scale_nodes,
        *gather.between,
        *(one for source in (gather.whole, gather.cast) if source for one in list_reshapes(source)),
        *nodes,
    ]
    with graph.inserting_before(gather.start):
        write = Writer(graph, nodes[0])
        shard = _write_cast(write, gather.shard, gather.cast)
        rows, extents = write.flatten_rows(shard, gather.dim), get_shape(gather.whole)
        bs = [product.b for product in gather.products]
        total = get_shape(rows)[0] * gather.world_size
        keep = _needs_gathered(gather, set(nodes))
        scales = [product.scales for product in gather.products if product.scales]
        scale_arguments: tuple[object, ...] = ()
        if scales:
            scale_rows = None
            if gather.scale is not None:
                scale_rows = write.flatten_rows(write.reshape(gather.scale, [*get_shape(shard)[:-1], 1]), gather.dim)
            scale_arguments = write_gather_scales(write, rows, bs, scale_rows, scales)
        arguments = (rows, bs, gather.group, total, 1, schedule, keep, False, *scale_arguments)
        fused = write(torch.ops.weft.all_gather_matmul_forward.default, *arguments)
        outs = write.split_outputs(fused)
        if keep and scales:
            old.append(outs.pop())  # the gathered scales
        if keep:
            gathered = write.unflatten_rows(outs.pop(), gather.dim, extents)
            used = gather.cast or gather.whole  # a cast may follow reshapes of `whole`
            used.replace_all_uses_with(write.reshape(gathered, get_shape(used)))
            gather.start.replace_all_uses_with(gathered, lambda user: user.op == "output")
    for product, out in zip(gather.products, outs, strict=True):
        _replace_product(graph, product, out, gather.dim, extents)
    erase_unused(old)


def _write_cast(write: Writer, shard: Node, cast: Node | None) -> Node:
    if cast is None or get_value(shard).dtype == get_value(cast).dtype:
        return shard
    conversion = aten.view.dtype if cast.target is aten.view.dtype else torch.ops.prims.convert_element_type.default
    return write(conversion, shard, get_value(cast).dtype)


def _needs_gathered(gather: Gather, products: set[Node]) -> bool:
    """Return whether anything but the matmuls uses the gathered tensor, or the graph returns it before its wait."""
    users = {user for one in list_reshapes(gather.cast or gather.whole) for user in one.users}
    return len(gather.start.users) > 1 or any(user not in products and user.target not in RESHAPES for user in users)


def _replace_product(graph: Graph, product: GatheredMatmul, out: Node, dim: int, extents: Sequence[int]) -> None:
    with graph.inserting_before(product.node):
        write = Writer(graph, product.node)
        found = write.reshape(write.unflatten_rows(out, dim, extents), get_shape(product.node))
        if product.bias is not None:
            found = write(aten.add.Tensor, found, product.bias)
    product.node.replace_all_uses_with(found)
