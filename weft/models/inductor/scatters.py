"""Find matmuls whose product is reduced by a reduce_scatter or all_reduce, and replace both by one operator.

    mm(a, b) -> reshape [-> split, cat] -> reduce_scatter -> wait         weft::matmul_reduce_scatter(a, b)
    mm(a, b) -> reshape -> all_reduce -> wait                             weft::matmul_all_reduce(a, b)

A sum of products becomes one product: mm(a0, b0) + mm(a1, b1) = mm([a0 | a1], [b0 / b1]). Two reductions whose results are
added become one reduction. torch's tensor parallelism leaves such pairs in backward graphs.

    wait(reduce(x)) + wait(reduce(y)) = wait(reduce(x + y))

DTensor writes a bias that all ranks share as mm(a, b) + bias / world_size. weft adds the bias once, after the reduction. The
graph does not say that the bias is the same on all ranks, so weft adds the mean of all ranks' biases, which costs the reduction
of one more row.

A single product may be an aten._scaled_mm of FP8 factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch.fx import Graph, Node

from weft.core.problem import Op
from weft.models.inductor.graph import (
    OTHER_GRAPH,
    Refused,
    Writer,
    aten,
    c10d,
    check_value,
    erase_unused,
    get_argument,
    get_cast_dtype,
    get_rank_and_size,
    get_shape,
    get_value,
    have_same_shape_and_dtype,
    list_reshapes,
    match_relayout,
    trace_reshapes_back,
)
from weft.models.inductor.scaled import SCALED, bias_of, scales_of, write_reduction_scales

_MATMULS = (aten.mm.default, aten.addmm.default, SCALED)
_UNSUPPORTED_MATMULS: dict[object, str] = {
    aten.bmm.default: "bmm multiplies a batch of matrices, each with its own b",
}
"""Why weft cannot fuse these matmuls."""
_OWN_BIAS = "each rank's matmul adds its own bias"
OPERATORS: dict[object, Op] = {
    c10d.reduce_scatter_tensor.default: "matmul_reduce_scatter",
    c10d.all_reduce.default: "matmul_all_reduce",
}
"""The operator of weft that replaces a matmul with this collective."""


@dataclass(frozen=True)
class Term:
    """A Term is one product of the sum that is reduced.

    node: the matmul. The factors are properties because an earlier rewrite of the graph may replace them.
    """

    node: Node

    @property
    def a(self) -> Node:
        return cast(Node, self.node.args[0 if self.node.target is SCALED else -2])

    @property
    def b(self) -> Node:
        return cast(Node, self.node.args[1 if self.node.target is SCALED else -1])

    @property
    def bias(self) -> Node | None:
        return cast(Node, self.node.args[0]) if self.node.target is aten.addmm.default else None


@dataclass(frozen=True)
class Scatter:
    """A Scatter is a reduction that can be fused with the matmuls that make its input.

    op: weft's operator.
    starts: the collectives. If there are several, their results are added.
    end: the wait of the last collective.
    group: the name of the process group.
    reduce: "sum" or "avg".
    dim: the scattered dimension, or None for an all_reduce.
    extents: the shape of the tensor that is reduced.
    terms: the products whose sum is reduced.
    nodes: the nodes that the rewrite makes unused.
    """

    op: Op
    starts: tuple[Node, ...]
    end: Node
    group: str
    reduce: str
    dim: int | None
    extents: list[int]
    terms: tuple[Term, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class _Reduction:
    """A _Reduction is one reduce_scatter or all_reduce in the graph.

    start: the collective.
    wait: the wait for its result.
    reduce: "sum" or "avg".
    group: the name of the process group.
    source: the tensor that is reduced.
    dim: the dimension of `source` that is scattered, or None for an all_reduce.
    nodes: the nodes between `source` and the collective.
    """

    start: Node
    wait: Node
    reduce: str
    group: str
    source: Node
    dim: int | None
    nodes: tuple[Node, ...]


def read(start: Node) -> Scatter:
    """Match the matmuls whose product this collective reduces. Raises Refused if no weft operator can replace them."""
    found = _read_reduction(start)
    if found.dim is not None and found.dim == get_value(found.source).dim() - 1:
        raise Refused(
            f"dimension {found.dim} of {get_value(found.source).dim()} is scattered, the last: weft scatters rows only"
        )
    terms, nodes = _read_terms(found.source, get_shape(found.source), {found.start, *found.nodes})
    check_value(terms[0].node)
    if any(term.bias and term.bias.args[1] != get_rank_and_size(found.group)[1] for term in terms):
        raise Refused(_OWN_BIAS)
    if found.reduce != "sum" and any(term.bias for term in terms):
        raise Refused(f"a product with a bias is reduced by {found.reduce}; with a bias weft supports sum only")
    return Scatter(
        op=OPERATORS[start.target],
        starts=(start,),
        end=found.wait,
        group=found.group,
        reduce=found.reduce,
        dim=found.dim,
        extents=get_shape(found.source),
        terms=terms,
        nodes=(*nodes, *found.nodes, start, found.wait, *(term.bias for term in terms if term.bias)),
    )


def merge_added(scatters: Sequence[Scatter]) -> list[Scatter]:
    """Merge reductions whose results are only added to each other, and return all reductions in the order of the graph.

    A merged reduction stands where the last of its parts stood. The addition is removed from the graph.
    """
    left: list[Scatter] = []
    for scatter in scatters:
        for earlier in list(left):
            shared_sum = _find_shared_sum(earlier, scatter)
            if shared_sum is not None:
                left.remove(earlier)
                scatter = _merge(earlier, scatter, shared_sum)
        left.append(scatter)
    return left


def _find_shared_sum(one: Scatter, two: Scatter) -> tuple[Node, Node] | None:
    """Return the addition that uses the result of `one`, and the node that it reads. Return None if the two cannot be merged.

    Both reductions must be of the same kind, and a chain of plain additions must lead from the result of `one` to that of
    `two`. Nothing else may use the two results, whether before or after their waits, or a sum inside the chain.
    """
    same_kind = (one.op, one.group, one.reduce, one.dim, one.extents) == (two.op, two.group, two.reduce, two.dim, two.extents)
    same_kind = same_kind and get_value(one.end).dtype == get_value(two.end).dtype
    if not same_kind or any(term.bias or term.node.target is SCALED for scatter in (one, two) for term in scatter.terms):
        return None
    use, other_results = _find_only_use(one.end), list_reshapes(two.end)
    if use is None or _find_only_use(two.end) is None or not _is_plain_sum(use[0]):
        return None
    if any(len(start.users) != 1 for scatter in (one, two) for start in scatter.starts):
        return None
    total, read_node = use
    while not any(part in other_results for part in total.args):
        users = list(total.users)
        if len(users) != 1 or users[0].args[:2].count(total) != 1 or not _is_plain_sum(users[0]):
            return None
        total = users[0]
    return use[0], read_node


def _find_only_use(end: Node) -> tuple[Node, Node] | None:
    """Return the only user of a node or its reshapes, and the node that it uses. Return None if there are other users."""
    reshaped = list_reshapes(end)
    found = [(user, one) for one in reshaped for user in one.users if user not in reshaped]
    return found[0] if len(found) == 1 and found[0][0].args.count(found[0][1]) == 1 else None


def _is_plain_sum(node: Node) -> bool:
    """Return whether a node adds two tensors of its own shape and dtype, without a factor."""
    parts = node.args[:2]
    if node.target is not aten.add.Tensor or get_argument(node, 2, "alpha", 1) != 1 or len(parts) < 2:
        return False
    return all(isinstance(part, Node) and have_same_shape_and_dtype(part, node) for part in parts)


def _merge(one: Scatter, two: Scatter, shared_sum: tuple[Node, Node]) -> Scatter:
    """Remove the addition from the graph, and return one reduction of the terms of both. It stands where `two` stood."""
    total, result = shared_sum
    (other,) = (part for part in total.args[:2] if part is not result)
    assert isinstance(other, Node)
    nodes = (*one.nodes, *two.nodes, *list_reshapes(one.end))
    total.replace_all_uses_with(other)
    total.graph.erase_node(total)
    return replace(two, starts=(*one.starts, *two.starts), terms=(*one.terms, *two.terms), nodes=nodes)


def _read_reduction(start: Node) -> _Reduction:
    """Match the collective, its wait, and the relayout that moves the scattered dimension to the front."""
    source, reduce = start.args[0], get_argument(start, 1, "reduce_op")
    scattering = start.target is c10d.reduce_scatter_tensor.default
    group = get_argument(start, 3 if scattering else 2, "group_name")
    assert isinstance(source, Node)
    if not isinstance(group, str):
        raise Refused("the process group is not a constant of the graph")
    if reduce not in (("sum", "avg") if scattering else ("sum",)):
        raise Refused(f"the reduction is {reduce!r}; weft supports sum" + (" and avg" if scattering else ""))
    waits = [user for user in start.users if user.target is c10d.wait_tensor.default]
    if len(waits) != 1 or any(user.op != "output" for user in start.users if user is not waits[0]):
        raise Refused("the result of the reduction is used before it is waited for")
    check_value(source)
    layout = match_relayout(source) if scattering else None
    if layout is None or layout.new_dim or not layout.dim or layout.count != get_rank_and_size(group)[1]:
        return _Reduction(start, waits[0], reduce, group, source, 0 if scattering else None, ())
    nodes = (*layout.nodes, source)
    if any(user not in nodes and user is not start for node in nodes for user in node.users):
        raise Refused("the product is also used before it is reduced")
    return _Reduction(start, waits[0], reduce, group, layout.source, layout.dim, nodes)


def _read_terms(source: Node, extents: Sequence[int], users: set[Node]) -> tuple[tuple[Term, ...], list[Node]]:
    """Return the products whose sum is `source`, and the nodes between them and `source`.

    Raises Refused if `source` has users that are not in `users`.
    """
    chain = trace_reshapes_back(source)
    for node, after in zip(chain, (users, *({node} for node in chain)), strict=False):
        if not set(node.users) <= after:
            raise Refused("the product is also used before it is reduced")
    root = chain[-1]
    if root.target is aten.add.Tensor:
        return _read_sum(root, extents, chain)
    if get_cast_dtype(root):
        raise Refused(
            f"the product is cast to {get_value(root).dtype} before it is reduced; weft reduces in the dtype of the product"
        )
    return (_read_term(root, extents),), chain


def _read_sum(root: Node, extents: Sequence[int], chain: list[Node]) -> tuple[tuple[Term, ...], list[Node]]:
    """Return the products of both operands of an addition, and the nodes on the way to them."""
    found: list[Term] = []
    nodes = list(chain)
    if get_argument(root, 2, "alpha", 1) != 1 or len(root.args) < 2:
        raise Refused("the input of the reduction is a sum with a factor")
    for part in root.args[:2]:
        if not isinstance(part, Node) or get_shape(part) != get_shape(root):
            raise Refused("the input of the reduction is a sum of a product and another value")
        terms, more = _read_terms(part, extents, {root})
        found += terms
        nodes += more
    if any(term.bias for term in found):
        raise Refused("the input of the reduction is a sum of products with a bias")
    if any(term.node.target is SCALED for term in found):
        raise Refused("the input of the reduction is a sum of FP8 products, each with its own scales")
    return tuple(found), nodes


def _read_term(root: Node, extents: Sequence[int]) -> Term:
    """Return a matmul as a Term. Raises Refused if the node is another one, or a matmul that weft cannot fuse."""
    if root.target not in _MATMULS:
        if root.op == "placeholder":
            raise Refused(f"the input of the reduction was made in {OTHER_GRAPH}")
        reason = f"the input of the reduction is made by {root.target} instead of a matmul"
        raise Refused(_UNSUPPORTED_MATMULS.get(root.target, reason))
    if scales_of(root) and bias_of(root):
        raise Refused(_OWN_BIAS)
    term = Term(root)
    get_value(term.a)  # raises Refused if its shape is not known: K does not appear in the shape of the product
    if get_shape(root)[-1] != extents[-1]:
        raise Refused(f"the product {get_shape(root)} is reduced as {list(extents)}, which has other columns")
    if term.bias is not None:
        if (get_argument(root, 3, "beta", 1), get_argument(root, 4, "alpha", 1)) != (1, 1):
            raise Refused("the matmul has a factor, alpha or beta")
        _check_shared_bias(term.bias, get_shape(root)[-1])
    return term


def _check_shared_bias(bias: Node, columns: int) -> None:
    """Raise Refused unless the bias is a quotient, as DTensor divides a shared bias, with one element for each column."""
    if bias.target is not aten.div.Tensor or not isinstance(bias.args[0], Node) or len(get_shape(bias)) != 1:
        raise Refused(_OWN_BIAS)
    if get_shape(bias) != [columns]:
        raise Refused(f"the matmul adds a bias of shape {get_shape(bias)} to {columns} columns")


def rewrite(graph: Graph, scatter: Scatter, schedule: str) -> None:
    """Replace the matched nodes by one weft operator."""
    rank, size = get_rank_and_size(scatter.group)
    divided = scatter.terms[0].bias
    bias = None if divided is None else cast(Node, divided.args[0])
    with graph.inserting_before(scatter.starts[-1]):
        write = Writer(graph, scatter.terms[0].node)
        if bias is not None:
            bias = _write_mean(write, bias, scatter.group, size)
        scales, factors, bs = (
            scales_of(scatter.terms[0].node),
            [term.a for term in scatter.terms],
            [term.b for term in scatter.terms],
        )
        if scatter.dim is not None:
            factors = [_write_rows(write, factor, scatter) for factor in factors]
        scale_arguments: tuple[object, ...] = ()
        if scales is not None:
            by_row = scatter.dim is not None and scales.recipe == "rowwise"
            scale_a = _write_rows(write, scales.a, scatter) if by_row else scales.a
            scale_arguments = write_reduction_scales(write, scale_a, scales)
        if scatter.dim is None:
            arguments = (factors, bs, bias, None, scatter.group, schedule, *scale_arguments)
            out = write(torch.ops.weft.matmul_all_reduce_forward.default, *arguments)
        else:
            arguments = (factors, bs, scatter.group, rank, size, 1, schedule, scatter.reduce, *scale_arguments)
            out = write(torch.ops.weft.matmul_reduce_scatter_forward.default, *arguments)
        if scatter.dim is not None:
            own = [extent // size if d == scatter.dim else extent for d, extent in enumerate(scatter.extents)]
            out = write.unflatten_rows(out, scatter.dim, own)
            out = out if bias is None else write(aten.add.Tensor, out, bias)
        if get_value(out).dtype != get_value(scatter.end).dtype:
            out = write(torch.ops.prims.convert_element_type.default, out, get_value(scatter.end).dtype)
        out = write.reshape(out, get_shape(scatter.end))
    scatter.end.replace_all_uses_with(out)
    scatter.starts[-1].replace_all_uses_with(out, lambda user: user is not scatter.end)
    erase_unused(scatter.nodes)


def _write_rows(write: Writer, matrix: Node, scatter: Scatter) -> Node:
    """Reorder the rows of a matrix [M, columns] so that the rows of each rank's part are contiguous, in rank order."""
    return write.flatten_rows(write.reshape(matrix, [*scatter.extents[:-1], get_shape(matrix)[1]]), scatter.dim or 0)


def _write_mean(write: Writer, bias: Node, group: str, size: int) -> Node:
    """Write the mean of all ranks' biases, in float32. It is the bias itself if all ranks have the same."""
    dtype, convert = get_value(bias).dtype, torch.ops.prims.convert_element_type.default
    wide = bias if dtype == torch.float32 else write(convert, bias, torch.float32)
    total = write(c10d.wait_tensor.default, write(c10d.all_reduce.default, wide, "sum", group))
    mean = write(aten.div.Tensor, total, size)
    return mean if dtype == torch.float32 else write(convert, mean, dtype)
