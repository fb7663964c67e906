"""Matmuls, then reduce_scatter or all_reduce of their product: found in a graph, and made one operator.

    mm(a, b) -> reshape [-> split, cat] -> reduce_scatter -> wait         weft::matmul_reduce_scatter(a, b)
    mm(a, b) -> reshape -> all_reduce -> wait                             weft::matmul_all_reduce(a, b)

A sum of products is one product: mm(a0, b0) + mm(a1, b1) = mm([a0 | a1], [b0 / b1]). So are reduced products that are added,
which torch's tensor parallelism leaves in a backward: one reduction is then left of two.

    wait(reduce(x)) + wait(reduce(y)) = wait(reduce(x + y))

A bias, mm(a, b) + bias / world_size, is how DTensor writes one that all ranks share: it is added once, after the reduction.
Nothing in a graph says that they do, so that what is added is the mean of all ranks': one row more is reduced.

A single product may be an aten._scaled_mm, of FP8 factors.
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
    argument,
    aten,
    before_reshapes,
    c10d,
    cast_to,
    check_value,
    erase_unused,
    laid_anew,
    place_in,
    same_elements,
    shape,
    value,
    valued_alike,
)
from weft.models.inductor.scaled import SCALED, bias_of, scales_of, write_reduction

_MATMULS = (aten.mm.default, aten.addmm.default, SCALED)
OPERATORS: dict[object, Op] = {
    c10d.reduce_scatter_tensor.default: "matmul_reduce_scatter",
    c10d.all_reduce.default: "matmul_all_reduce",
}


@dataclass(frozen=True)
class Term:
    """A product of the sum. Its factors are read when they are asked for: where another place was rewritten before, they may be
    what was put in there. bias: what all ranks share and is added once."""

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
    """One place. starts: the collectives, of which the results are summed if there are several; end: the last one's wait. dim,
    extents: what is scattered, of a tensor of these extents; dim is None where all of it is reduced. nodes: all that becomes
    needless."""

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
    """One collective and what it reduces: `source`, a tensor whose dimension `dim` is scattered."""

    start: Node
    wait: Node
    reduce: str
    group: str
    source: Node
    dim: int | None
    nodes: tuple[Node, ...]


def read(start: Node) -> Scatter:
    """What ends in this collective. Raises Refused if no operator of weft replaces it."""
    found = _reduction(start)
    if found.dim is not None and found.dim == value(found.source).dim() - 1:
        raise Refused(f"dimension {found.dim} of {value(found.source).dim()} is scattered, the last: weft overlaps rows")
    terms, nodes = _terms(found.source, shape(found.source), {found.start, *found.nodes})
    check_value(terms[0].node)
    if any(term.bias and term.bias.args[1] != place_in(found.group)[1] for term in terms):
        raise Refused("the matmul adds a bias of each rank's own")
    if found.reduce != "sum" and any(term.bias for term in terms):
        raise Refused(f"a bias is within a reduction by {found.reduce}")
    return Scatter(
        op=OPERATORS[start.target],
        starts=(start,),
        end=found.wait,
        group=found.group,
        reduce=found.reduce,
        dim=found.dim,
        extents=shape(found.source),
        terms=terms,
        nodes=(*nodes, *found.nodes, start, found.wait, *(term.bias for term in terms if term.bias)),
    )


def added(sites: Sequence[Scatter]) -> list[Scatter]:
    """The same sites, in the graph's order; those whose results are only summed are one, where the last of them was. What adds
    them in the graph then adds that one alone."""
    left: list[Scatter] = []
    for site in sites:
        for earlier in list(left):
            way = _way_to_sum(earlier, site)
            if way is not None:
                left.remove(earlier)
                site = _joined(earlier, site, way)
        left.append(site)
    return left


def _way_to_sum(one: Scatter, two: Scatter) -> tuple[Node, Node] | None:
    """(the sum that has the result of `one`, as which argument), if one reduction could bring both: their results, reshaped
    alike, meet in a chain of sums that nothing else looks into, each of which takes the one before once. Nothing else takes
    them before their wait either, as a graph does that saves them."""
    alike = (one.op, one.group, one.reduce, one.dim, one.extents) == (two.op, two.group, two.reduce, two.dim, two.extents)
    alike = alike and value(one.end).dtype == value(two.end).dtype
    if not alike or any(term.bias or term.node.target is SCALED for site in (one, two) for term in site.terms):
        return None
    mine, others = _only_use(one.end), same_elements(two.end)
    if mine is None or _only_use(two.end) is None or not _plain_sum(mine[0]):
        return None
    if any(len(start.users) != 1 for site in (one, two) for start in site.starts):
        return None
    total, node = mine
    while not any(part in others for part in total.args):
        users = list(total.users)
        if len(users) != 1 or users[0].args[:2].count(total) != 1 or not _plain_sum(users[0]):
            return None
        total = users[0]
    return mine[0], node


def _only_use(end: Node) -> tuple[Node, Node] | None:
    """(the only user of a node, or of a reshape of it, and what it uses)."""
    alike = same_elements(end)
    found = [(user, one) for one in alike for user in one.users if user not in alike]
    return found[0] if len(found) == 1 and found[0][0].args.count(found[0][1]) == 1 else None


def _plain_sum(node: Node) -> bool:
    parts = node.args[:2]
    if node.target is not aten.add.Tensor or argument(node, 2, "alpha", 1) != 1 or len(parts) < 2:
        return False
    return all(isinstance(part, Node) and valued_alike(part, node) for part in parts)


def _joined(one: Scatter, two: Scatter, way: tuple[Node, Node]) -> Scatter:
    total, mine = way
    (other,) = (part for part in total.args[:2] if part is not mine)
    assert isinstance(other, Node)
    nodes = (*one.nodes, *two.nodes, *same_elements(one.end))
    total.replace_all_uses_with(other)
    total.graph.erase_node(total)
    return replace(two, starts=(*one.starts, *two.starts), terms=(*one.terms, *two.terms), nodes=nodes)


def _reduction(start: Node) -> _Reduction:
    source, reduce = start.args[0], argument(start, 1, "reduce_op")
    scattering = start.target is c10d.reduce_scatter_tensor.default
    group = argument(start, 3 if scattering else 2, "group_name")
    assert isinstance(source, Node)
    if not isinstance(group, str):
        raise Refused("the process group is no constant of the graph")
    if reduce not in (("sum", "avg") if scattering else ("sum",)):
        raise Refused(f"the reduction is {reduce!r}; weft sums" + (", and takes means" if scattering else ""))
    waits = [user for user in start.users if user.target is c10d.wait_tensor.default]
    if len(waits) != 1 or any(user.op != "output" for user in start.users if user is not waits[0]):
        raise Refused("what is reduced is used before it is waited for")
    check_value(source)
    laid = laid_anew(source) if scattering else None
    if laid is None or laid.into or not laid.dim or laid.count != place_in(group)[1]:
        return _Reduction(start, waits[0], reduce, group, source, 0 if scattering else None, ())
    nodes = (*laid.nodes, source)
    if any(user not in nodes and user is not start for node in nodes for user in node.users):
        raise Refused("the product is needed before it is reduced, too")
    return _Reduction(start, waits[0], reduce, group, laid.source, laid.dim, nodes)


def _terms(source: Node, extents: Sequence[int], users: set[Node]) -> tuple[tuple[Term, ...], list[Node]]:
    """(the products that `source` is the sum of, the nodes from them to `source`). users: the only ones that `source` may
    have."""
    chain = before_reshapes(source)
    for node, after in zip(chain, (users, *({node} for node in chain)), strict=False):
        if not set(node.users) <= after:
            raise Refused("the product is needed before it is reduced, too")
    root = chain[-1]
    if root.target is aten.add.Tensor:
        return _sum(root, extents, chain)
    if cast_to(root):
        raise Refused(f"the product is cast to {value(root).dtype} before it is reduced; weft reduces what it multiplies")
    return (_term(root, extents),), chain


def _sum(root: Node, extents: Sequence[int], chain: list[Node]) -> tuple[tuple[Term, ...], list[Node]]:
    found: list[Term] = []
    nodes = list(chain)
    if argument(root, 2, "alpha", 1) != 1 or len(root.args) < 2:
        raise Refused("a sum with a factor is reduced")
    for part in root.args[:2]:
        if not isinstance(part, Node) or shape(part) != shape(root):
            raise Refused("what is reduced is a sum of a product and something else")
        terms, more = _terms(part, extents, {root})
        found += terms
        nodes += more
    if any(term.bias for term in found):
        raise Refused("a sum of products with a bias is reduced")
    if any(term.node.target is SCALED for term in found):
        raise Refused("a sum of FP8 products is reduced, which have scales of their own")
    return tuple(found), nodes


def _term(root: Node, extents: Sequence[int]) -> Term:
    if root.target not in _MATMULS:
        if root.op == "placeholder":
            raise Refused(f"what is reduced was made in {OTHER_GRAPH}")
        raise Refused(_REASONS.get(root.target, f"no matmul makes what is reduced: {root.target} does"))
    if scales_of(root) and bias_of(root):
        raise Refused("the matmul adds a bias of each rank's own")
    term = Term(root)
    value(term.a)  # Refused where its extents are not known, those that are summed over
    if shape(root)[-1] != extents[-1]:
        raise Refused(f"the product {shape(root)} is reduced as {list(extents)}, with other columns")
    if term.bias is not None:
        if (argument(root, 3, "beta", 1), argument(root, 4, "alpha", 1)) != (1, 1):
            raise Refused("the matmul has a factor")
        _check_shared(term.bias, shape(root)[-1])
    return term


_REASONS: dict[object, str] = {
    aten.bmm.default: "bmm multiplies a batch of matrices, each with a b of its own",
}


def _check_shared(bias: Node, columns: int) -> None:
    """Raises Refused for what is no bias that is divided by the number of ranks, with a number for each column."""
    if bias.target is not aten.div.Tensor or not isinstance(bias.args[0], Node) or len(shape(bias)) != 1:
        raise Refused("the matmul adds a bias of each rank's own")
    if shape(bias) != [columns]:
        raise Refused(f"the matmul adds a bias of {shape(bias)[0]} to {columns} columns")


def rewrite(graph: Graph, site: Scatter, schedule: str) -> None:
    """Make it one operator."""
    rank, size = place_in(site.group)
    divided = site.terms[0].bias
    bias = None if divided is None else cast(Node, divided.args[0])
    with graph.inserting_before(site.starts[-1]):
        write = Writer(graph, site.terms[0].node)
        if bias is not None:
            bias = _mean(write, bias, site.group, size)
        a, b = _factors(write, site.terms)
        scales = scales_of(site.terms[0].node)
        if site.dim is not None:
            a = _rows(write, a, site)
        if scales is not None:
            by_row = site.dim is not None and scales.recipe == "rowwise"
            scale_a = _rows(write, scales.a, site) if by_row else scales.a
            out = write_reduction(write, site.op, a, b, scale_a, scales, site.group, schedule, site.reduce)
        elif site.dim is None:
            out = write(torch.ops.weft.matmul_all_reduce.default, a, b, bias, None, site.group, schedule)
        else:
            arguments = (a, b, site.group, rank, size, 1, schedule, site.reduce)
            out = write(torch.ops.weft.matmul_reduce_scatter.default, *arguments)
        if site.dim is not None:
            own = [extent // size if d == site.dim else extent for d, extent in enumerate(site.extents)]
            out = write.from_front(out, site.dim, own)
            out = out if bias is None else write(aten.add.Tensor, out, bias)
        if value(out).dtype != value(site.end).dtype:
            out = write(torch.ops.prims.convert_element_type.default, out, value(site.end).dtype)
        out = write.reshape(out, shape(site.end))
    site.end.replace_all_uses_with(out)
    site.starts[-1].replace_all_uses_with(out, lambda user: user is not site.end)
    erase_unused(site.nodes)


def _rows(write: Writer, matrix: Node, site: Scatter) -> Node:
    """A matrix [M, columns], with the rows of what is scattered in the order of ranks."""
    return write.to_front(write.reshape(matrix, [*site.extents[:-1], shape(matrix)[1]]), site.dim or 0)


def _mean(write: Writer, bias: Node, group: str, size: int) -> Node:
    """That of all ranks, made in float32: of biases that are the same, the bias."""
    dtype, convert = value(bias).dtype, torch.ops.prims.convert_element_type.default
    wide = bias if dtype == torch.float32 else write(convert, bias, torch.float32)
    total = write(c10d.wait_tensor.default, write(c10d.all_reduce.default, wide, "sum", group))
    mean = write(aten.div.Tensor, total, size)
    return mean if dtype == torch.float32 else write(convert, mean, dtype)


def _factors(write: Writer, terms: Sequence[Term]) -> tuple[Node, Node]:
    """One product for the sum of several."""
    if len(terms) == 1:
        return terms[0].a, terms[0].b
    return write(aten.cat.default, [term.a for term in terms], 1), write(aten.cat.default, [term.b for term in terms], 0)
