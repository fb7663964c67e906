"""weft::embedding_bag_all_to_all, and its backward.

    weft::embedding_bag_all_to_all(tables, indices, offsets, weights, ...)       -> out [m, N]
    weft::embedding_bag_gradients(grad [m, N], tables, indices, ...)             -> gradients of tables and of weights, or a 0
    weft::embedding_bag_update(grad [m, N], tables(a!), states(b!), ...)         -> [of weights]: an optimizer's step in place

Backward: the gradient goes back by an all-to-all, beside which the indices are sorted (weft.runtime.gradients). Tables with
an optimizer are no saved tensors: several lookups of one table may be under way, and each one's backward changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal, cast

import torch

from weft.core.problem import DType, LookupProblem, split
from weft.ops.library import register, unseen
from weft.runtime.calls import LookupCall
from weft.runtime.gradients import Backward, Optimizer
from weft.runtime.groups import GROUPS

# Not `mode`: a name that torch keeps for itself where an operator changes its arguments.
SITE = "str group, int rank, int[] counts, int[] dims, SymInt batch, str how"
Tables = Sequence[torch.Tensor]
_WAY_HOME = "all-to-all of the gradient of embedding_bag_all_to_all"


@dataclass(frozen=True, kw_only=True)
class Site:
    """What forward and backward share. counts, dims: tables by rank, and the columns of all of them, in the order of ranks."""

    group: str
    rank: int
    counts: list[int]
    dims: list[int]
    batch: int
    mode: str

    @property
    def by_rank(self) -> tuple[tuple[int, ...], ...]:
        ends = tuple(accumulate(self.counts))
        return tuple(tuple(self.dims[end - count : end]) for count, end in zip(self.counts, ends, strict=True))

    def out_shape(self) -> tuple[int, int]:
        low, high = split(self.batch, len(self.counts))[self.rank]
        return high - low, sum(self.dims)

    def alike(self) -> str:
        """What ranks have in common, a line each."""
        return f"batch: {self.batch}\ndims: {self.by_rank}\nmode: {self.mode}"

    def backward(self, dtype: torch.dtype, indices: torch.Tensor, offsets: torch.Tensor, weights: Any) -> Backward:
        kind = cast(DType, str(dtype).removeprefix("torch."))
        mode = cast(Literal["sum", "mean"], self.mode)
        return Backward(
            problem=LookupProblem.of(batch=self.batch, dims=self.by_rank, mode=mode, dtype=kind),
            rank=self.rank,
            all_to_all=GROUPS.all_to_all(self.group, _WAY_HOME, indices.device),
            indices=indices,
            offsets=offsets,
            weights=weights,
        )


def _site(group: str, rank: int, counts: list[int], dims: list[int], batch: int, mode: str) -> Site:
    return Site(group=group, rank=rank, counts=counts, dims=dims, batch=batch, mode=mode)


def _forward(
    tables: Tables,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    anchor: torch.Tensor | None,
    states: Tables,
    group: str,
    rank: int,
    counts: list[int],
    dims: list[int],
    batch: int,
    mode: str,
    dtype: torch.dtype,
    schedule: str,
    pooling: int,
    checked: bool,
    sparse: bool,
    optimizer: str,
    lr: float,
    eps: float,
) -> torch.Tensor:
    call = LookupCall(
        op="embedding_bag_all_to_all",
        schedule=schedule,
        tables=tables,
        indices=indices,
        offsets=offsets,
        weights=weights,
        batch=batch,
        dims=_site(group, rank, counts, dims, batch, mode).by_rank,
        mode=cast(Literal["sum", "mean"], mode),
        dtype=dtype,
        pooling=pooling,
    )
    out = GROUPS.run(group, call)["out"][0]
    if checked:
        raise_if_wrong(tables, indices, offsets, batch)
    return out


def run_lookup(
    tables: Tables, indices: torch.Tensor, offsets: torch.Tensor, weights: Any, anchor: Any, *rest: Any
) -> torch.Tensor:
    """weft::embedding_bag_all_to_all."""
    seen = [t for t in (*tables, indices, offsets, weights, anchor) if t is not None]
    way = _forward if unseen(*seen) else torch.ops.weft.embedding_bag_all_to_all
    return cast(torch.Tensor, way(tables, indices, offsets, weights, anchor, *rest))


def raise_if_wrong(tables: Tables, indices: torch.Tensor, offsets: torch.Tensor, batch: int) -> None:
    """Raise IndexError that names the first index that its table does not have, or ValueError for offsets that are none. Waits
    for the device."""
    ends = offsets.long()
    bad = (ends < 0) | (ends > indices.numel())
    bad[1:] |= ends[1:] < ends[:-1]
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        rule = f"offsets must rise from 0 or more to at most the number of indices, {indices.numel()}"
        raise ValueError(f"offsets[{at}] is {int(ends[at])}{f' after {int(ends[at - 1])}' if at else ''}; {rule}")
    for number, table in enumerate(tables):
        own = indices[int(ends[number * batch]) : int(ends[(number + 1) * batch])]
        wrong = ((own < 0) | (own >= table.shape[0])).nonzero()
        if wrong.numel():
            at = int(ends[number * batch]) + int(wrong[0])
            bag = int(torch.searchsorted(ends, at, right=True)) - 1 - number * batch
            where = f"indices[{at}], in bag {bag} of table {number},"
            raise IndexError(f"{where} is {int(indices[at])}; the table has rows 0 to {table.shape[0] - 1}")


def _forward_fake(tables: Tables, indices: torch.Tensor, *rest: Any) -> torch.Tensor:
    group, rank, counts, dims, batch, mode, dtype = rest[4:11]
    return indices.new_empty(_site(group, rank, counts, dims, batch, mode).out_shape(), dtype=dtype)


def _context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    tables, indices, offsets, weights, anchor, states, *site, dtype, _, _, _, sparse, optimizer, lr, eps = inputs
    ctx.anchored = anchor is not None and anchor.device.type == "cpu"
    ctx.site, ctx.dtype, ctx.sparse, ctx.tables_given = site, dtype, sparse, len(tables)
    ctx.optimizer, ctx.weighted = (optimizer, lr, eps), weights is not None
    ctx.updated = (tables, states) if optimizer and tables else None
    ctx.versions = [table._version for table in tables]
    saved = () if optimizer else tables
    ctx.save_for_backward(indices, offsets, *((weights,) if ctx.weighted else ()), *saved)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    with GROUPS.failing(ctx.site[0]):  # a table may have changed meanwhile, and the others wait for this rank's part
        return _way_home(ctx, grad)


def _way_home(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    indices, offsets, *rest = ctx.saved_tensors
    weights = rest.pop(0) if ctx.weighted else None
    needs_tables, needs_weights = any(ctx.needs_input_grad[0]), bool(ctx.needs_input_grad[3])
    grad, site = grad.contiguous(), ctx.site
    if ctx.updated is None:
        flags = (ctx.sparse, needs_tables, needs_weights)
        found = _ways(ctx.sparse).embedding_bag_gradients(grad, rest, indices, offsets, weights, *site, *flags)
        here = ctx.tables_given if needs_tables else 0
        of_tables, of_weights = found[:here], found[here:]
        grads = [g if needed else None for g, needed in zip(of_tables, ctx.needs_input_grad[0], strict=False)]
        grads = grads or [None] * ctx.tables_given
        return _returned(grads, of_weights[0] if needs_weights else None, _of_anchor(ctx, found[-1]))
    tables, states = ctx.updated
    for at, (table, version) in enumerate(zip(tables, ctx.versions, strict=True)):
        if needs_weights and table._version != version:
            raise ValueError(
                f"tables[{at}] has changed since its lookup, and the gradient of per_sample_weights is of what it was; with an "
                "optimizer, look such a table up once in a graph, and run its backward once"
            )
    own = [table.detach() for table in tables]
    given = (grad, own, states, indices, offsets, weights, *site, *ctx.optimizer, needs_weights)
    of_weights = torch.ops.weft.embedding_bag_update(*given)
    return _returned([None] * ctx.tables_given, of_weights if needs_weights else None, states=len(states))


def _of_anchor(ctx: Any, found: torch.Tensor) -> torch.Tensor | None:
    """A gradient that comes of a rank's part in the exchange: else a compiled backward, of which nothing is asked, leaves it
    out, and the other ranks wait for it. On the CPU, and an anchor on a GPU, which no graph has as an input, goes without."""
    return found if ctx.anchored and not ctx.needs_input_grad[3] else None


def _nothing() -> torch.Tensor:
    """What an exchange finds that has no gradient for this rank."""
    return torch.zeros((), dtype=torch.float32, device="cpu")


class _Plain:
    """Sparse gradients have no fake, so they go around torch's dispatch."""

    @staticmethod
    def embedding_bag_gradients(*arguments: Any) -> list[torch.Tensor]:
        return _gradients(*arguments)


def _ways(sparse: bool) -> Any:
    return _Plain if sparse else torch.ops.weft


def _returned(
    tables: Sequence[torch.Tensor | None], weights: torch.Tensor | None, anchor: torch.Tensor | None = None, states: int = 0
) -> tuple[Any, ...]:
    """A gradient for each argument of the operator; states: how many there are."""
    return (list(tables), None, None, weights, anchor, [None] * states, *([None] * 14))


def _gradients(
    grad: torch.Tensor,
    tables: Tables,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    *rest: Any,
) -> list[torch.Tensor]:
    *site, sparse, of_tables, of_weights = rest
    with torch.no_grad():
        here = _site(*site)
        backward = here.backward(grad.dtype, indices, offsets, weights)
        flags = {"sparse": sparse, "of_tables": of_tables, "of_weights": of_weights}
        work = partial(backward.gradients, grad, tables, **flags)
        rows, factors = GROUPS.watched(here.group, _WAY_HOME, here.alike(), grad.device, work)
    found = rows if factors is None else [*rows, factors]
    return found or [_nothing()]


def _gradients_fake(
    grad: torch.Tensor, tables: Tables, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, *rest: Any
) -> list[torch.Tensor]:
    *_, of_tables, of_weights = rest
    rows = [table.new_empty(table.shape) for table in tables] if of_tables else []
    found = [*rows, weights.new_empty(weights.shape)] if of_weights and weights is not None else rows
    return found or [_nothing()]


def _update(
    grad: torch.Tensor,
    tables: Tables,
    states: Tables,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    *rest: Any,
) -> torch.Tensor:
    *site, kind, lr, eps, of_weights = rest
    with torch.no_grad():
        here = _site(*site)
        backward = here.backward(grad.dtype, indices, offsets, weights)
        optimizer = Optimizer(kind=kind, lr=lr, eps=eps, states=states)
        work = partial(backward.apply, grad, tables, optimizer, of_weights=of_weights)
        factors = GROUPS.watched(here.group, _WAY_HOME, here.alike(), grad.device, work)
    return grad.new_empty(0) if factors is None else factors


def _update_fake(grad: torch.Tensor, *rest: Any) -> torch.Tensor:
    weights, of_weights = rest[4], rest[-1]
    return weights.new_empty(weights.shape) if of_weights and weights is not None else grad.new_empty(0)


register(
    "embedding_bag_all_to_all(Tensor[] tables, Tensor indices, Tensor offsets, Tensor? weights, Tensor? anchor,"
    f" Tensor[] states, {SITE}, ScalarType dtype, str schedule, int pooling, bool checked, bool sparse,"
    " str optimizer, float lr, float eps) -> Tensor",
    run=_forward,
    fake=_forward_fake,
    context=_context,
    backward=_backward,
    twice=False,
)
register(
    "embedding_bag_gradients(Tensor grad, Tensor[] tables, Tensor indices, Tensor offsets, Tensor? weights,"
    f" {SITE}, bool sparse, bool of_tables, bool of_weights) -> Tensor[]",
    run=_gradients,
    fake=_gradients_fake,
)
register(
    "embedding_bag_update(Tensor grad, Tensor(a!)[] tables, Tensor(b!)[] states, Tensor indices, Tensor offsets,"
    f" Tensor? weights, {SITE}, str kind, float lr, float eps, bool of_weights) -> Tensor",
    run=_update,
    fake=_update_fake,
)
