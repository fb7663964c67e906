"""embedding_bag_all_to_all looks up tables that are sharded by table, and returns a result that is sharded by samples.

    embedding_bag_all_to_all(indices, offsets, tables)   replaces   pooled = embedding_bag(...) of each table, concatenated
                                                                    dist.all_to_all_single(out, pooled); out, columns in order

M is the global batch, m a rank's part of it, T the number of tables of this rank, and N the columns of all ranks' tables. The
operators of torch.library are:

    weft::embedding_bag_all_to_all(tables, indices, offsets, weights, ...)   -> out [m, N]
    weft::embedding_bag_gradients(grad [m, N], tables, indices, ...)         -> gradients of tables and of weights
    weft::embedding_bag_update(grad [m, N], tables(a!), states(b!), ...)     -> gradient of weights; an optimizer's step in
    place

In the backward an all-to-all returns the gradient while the indices are sorted (weft.runtime.gradients). autograd does not save
tables that have an optimizer, because several lookups of one table may wait for their backward, and each backward changes the
table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist

from weft.compat.dispatch import writes_to
from weft.core.problem import DType, LookupProblem, split
from weft.core.schedule import Schedule
from weft.ops.common import resolve_group, schedule_to_spec, to_list
from weft.ops.embedding_arguments import (
    Optimizer,
    batch_of,
    check_disjoint,
    check_indices,
    check_values_of,
    dims_by_rank,
    dtype_of_tables,
    offsets_of,
)
from weft.ops.front import OperatorRequest, public
from weft.ops.operator import define
from weft.ops.schema import SymInt
from weft.runtime import gradients
from weft.runtime.calls import LookupCall
from weft.runtime.groups import GROUPS

Tables = Sequence[torch.Tensor]
_BACKWARD = "all-to-all of the gradient of embedding_bag_all_to_all"
"""The name of the backward's exchange in errors."""
with torch.inference_mode(False):  # this module may first be loaded in there
    _ANCHOR = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
"""The `anchor` of compiled lookups on a rank without tables. It is made here because a graph has gradients only for its inputs,
and a tensor that is made within the graph is not an input."""


@public
def embedding_bag_all_to_all(
    indices: torch.Tensor,
    offsets: torch.Tensor | None,
    tables: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    lengths: torch.Tensor | None = None,
    mode: Literal["sum", "mean"] = "sum",
    per_sample_weights: torch.Tensor | None = None,
    dims: Sequence[Sequence[int]] | None = None,
    batch: int | None = None,
    dtype: torch.dtype | None = None,
    schedule: str | Schedule = "auto",
    pooling: int = 32,
    checked: bool | None = None,
    sparse: bool = False,
    optimizer: Optimizer | None = None,
) -> torch.Tensor:
    """Look up the whole batch in this rank's tables, and return all ranks' columns for this rank's samples.

    Replaces

        pooled = torch.cat([embedding_bag(indices of t, tables[t], offsets of t, mode) for t], 1)
        dist.all_to_all_single(recv, pooled); out = torch.cat(recv by rank, 1)

    Args:
        indices: [L], int32 or int64: rows of tables over the global batch, those of table 0 first. They are in the order of a
            KeyedJaggedTensor's values of this rank's features.
        offsets: [T * M + 1], int32 or int64: the bag of (table t, sample i) is
            indices[offsets[t * M + i] : offsets[t * M + i + 1]]; indices may be longer than the last offset. None with lengths.
        tables: matrices [rows, dim] of one dtype (bfloat16, float16, float32). Rows and dims may differ between tables.
        group: any process group. On several hosts see docs/nodes.md. Default: the whole world.
        lengths: [T * M], the number of indices of each bag, in place of offsets.
        mode: "sum" or "mean" of a bag, in float32, rounded once. An empty bag is zero.
        per_sample_weights: [L], a factor for each index. Only "sum" takes weights.
        dims: the dims of each rank's tables, if ranks differ. Default: all ranks have the dims of this rank.
        batch: M. A rank without tables must pass it.
        dtype: the dtype of the tables. A rank without tables must pass it.
        schedule: as for all_gather_matmul.
        pooling: the indices of a bag that predictions assume. Results do not depend on it.
        checked: an index outside its table, or offsets that decrease, raise IndexError or ValueError on this rank after the
            call, which then waits for the device. Default: on CPUs. Also without checks, the call never reads outside the
            tables or writes outside the results, and such an index adds nothing.
        sparse: gradients of tables are sparse, as in torch's embedding_bag. torch.compile and CUDA graphs do not allow it.
        optimizer: weft.SGD or weft.RowwiseAdagrad. The backward updates the tables in place and gives them no gradient. Tables
            must not share memory. If per_sample_weights need a gradient, tables must not change between lookup and backward.

    Backward is collective: all ranks run it, or none. The exchange of the gradient overlaps with sorting the indices. A rank
    without tables takes part whenever gradients are enabled. If all tables are frozen, look up under torch.no_grad().

    Returns out [m, N]: this rank's samples as torch.chunk cuts the batch. Its columns are in the order of ranks, then tables,
    which is the layout of a table-wise sharded EmbeddingBagCollection. Raises ValueError for wrong shapes, dtypes or names;
    RankMismatch if ranks call different things; PeerLost and WaitTimeout if a rank is lost.
    Source: fused computation-collectives (arXiv 2305.06942).
    """
    name, rank, world_size = resolve_group(group)
    tables = to_list("tables", tables, "pass this rank's tables, matrices [rows, dim], in a list")
    check_indices(indices, per_sample_weights, mode)
    kind = dtype_of_tables(tables, indices.device, dtype)
    by_rank = dims_by_rank(tables, dims, rank, world_size)
    offsets = offsets_of(offsets, lengths, indices)
    samples = batch_of(offsets.shape[0] - 1, len(tables), batch)
    if not isinstance(pooling, int) or pooling < 1:
        raise ValueError(f"pooling is {pooling!r}; it must be a whole number of at least 1")
    states = _states(optimizer, tables, sparse)
    counts, flat_dims = [len(own) for own in by_rank], [dim for own in by_rank for dim in own]
    update = (optimizer.KIND, optimizer.lr, optimizer.eps) if optimizer else ("", 0.0, 0.0)
    spec = schedule_to_spec(schedule, "embedding_bag_all_to_all")
    weights = None if per_sample_weights is None else per_sample_weights.contiguous()
    anchor = _anchor(tables, indices) if any(by_rank) else None
    lookup = (name, rank, counts, flat_dims, samples, mode)
    checks = _checked(checked, indices)
    how = (kind, spec, pooling, checks, sparse, *update)
    given = (tables, indices.contiguous(), offsets.contiguous(), weights, anchor, states)
    request = OperatorRequest(_embedding_bag_all_to_all, given, (*lookup, *how), group)
    # A checked call must run each time, so it is not remembered. Otherwise `public` runs the request.
    return request.run() if checks else cast(torch.Tensor, request)


def _anchor(tables: Sequence[torch.Tensor], indices: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor that requires a gradient, for a rank without tables.

    With it autograd runs the backward on that rank, too. Otherwise the other ranks would wait for its gradient.
    """
    if tables or not torch.is_grad_enabled():
        return None
    if torch.compiler.is_compiling():
        return _ANCHOR
    return torch.zeros((), device=indices.device, requires_grad=True)


def _states(optimizer: Optimizer | None, tables: Sequence[torch.Tensor], sparse: bool) -> list[torch.Tensor]:
    if sparse and torch.compiler.is_compiling():
        raise ValueError("sparse is True; torch.compile has no sparse gradients: use dense ones, or an optimizer")
    if optimizer is None:
        return []
    if sparse:
        raise ValueError("sparse is True, and there is an optimizer: it leaves no gradient; use one of them")
    if torch.is_grad_enabled() and not all(table.requires_grad for table in tables):
        raise ValueError("optimizer updates tables in backward; let all of them require a gradient, or use torch.no_grad()")
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        check_disjoint(tuple([(table.data_ptr(), *table.shape, table.stride(0), table.element_size()) for table in tables]))
    return optimizer.states_of(tables)


def _checked(checked: bool | None, indices: torch.Tensor) -> bool:
    if checked and indices.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("checked is True while a CUDA graph is captured; checking waits for the device: use checked=False")
    return indices.device.type == "cpu" if checked is None else checked


# The forward.


class _Lookup(NamedTuple):
    """_Lookup holds the options that forward and backward share.

    counts: the number of tables of each rank.
    dims: the columns of all tables in the order of ranks.
    how: "sum" or "mean". torch does not allow the name `mode` in an operator that changes its arguments.
    """

    group: str
    rank: int
    counts: list[int]
    dims: list[int]
    batch: SymInt
    how: str

    @property
    def by_rank(self) -> tuple[tuple[int, ...], ...]:
        ends = tuple(accumulate(self.counts))
        return tuple(tuple(self.dims[end - count : end]) for count, end in zip(self.counts, ends, strict=True))

    @property
    def mode(self) -> Literal["sum", "mean"]:
        return cast(Literal["sum", "mean"], self.how)

    def describe(self) -> str:
        """Return the values that must be equal on all ranks, one line each."""
        return f"batch: {self.batch}\ndims: {self.by_rank}\nmode: {self.how}"


class _Forward(NamedTuple):
    """_Forward holds the other options of weft::embedding_bag_all_to_all.

    optimizer, lr, eps: the optimizer with which the backward updates tables. "" for none.
    """

    dtype: torch.dtype
    schedule: str
    pooling: int
    checked: bool
    sparse: bool
    optimizer: str
    lr: float
    eps: float


def _forward(
    tables: Tables,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    anchor: torch.Tensor | None,
    states: Tables,
    lookup: _Lookup,
    options: _Forward,
) -> LookupCall:
    return LookupCall(
        op="embedding_bag_all_to_all",
        group=lookup.group,
        schedule=options.schedule,
        tables=tables,
        indices=indices,
        offsets=offsets,
        weights=weights,
        batch=lookup.batch,
        dims=lookup.by_rank,
        mode=lookup.mode,
        dtype=options.dtype,
        pooling=options.pooling,
        check=partial(check_values_of, tables, indices, offsets, lookup.batch) if options.checked else None,
    )


def _forward_fake(tables: Tables, indices: torch.Tensor, *rest: Any) -> torch.Tensor:
    lookup, options = rest[-2:]
    low, high = split(lookup.batch, len(lookup.counts))[lookup.rank]
    return indices.new_empty((high - low, sum(lookup.dims)), dtype=options.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    tables, indices, offsets, weights, anchor, states, ctx.lookup, ctx.options = inputs
    ctx.tables_given, ctx.states_given, ctx.weighted = len(tables), len(states), weights is not None
    ctx.anchored = anchor is not None and anchor.device.type == "cpu"
    ctx.updated = (tables, states) if ctx.options.optimizer and tables else None
    ctx.versions = [writes_to(table) for table in tables]
    saved = () if ctx.options.optimizer else tables
    ctx.save_for_backward(indices, offsets, *((weights,) if ctx.weighted else ()), *saved)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    with GROUPS.fail_group_on_error(
        ctx.lookup.group
    ):  # autograd raises if a saved table has changed, and the other ranks wait for this rank's part
        indices, offsets, *rest = ctx.saved_tensors
        weights = rest.pop(0) if ctx.weighted else None
        found = _gradients_of if ctx.updated is None else _updated
        of_tables, of_weights, of_anchor = found(ctx, grad.contiguous(), rest, indices, offsets, weights)
    return of_tables, None, None, of_weights, of_anchor, [None] * ctx.states_given


def _gradients_of(
    ctx: Any, grad: torch.Tensor, tables: Tables, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
) -> tuple[list[torch.Tensor | None], torch.Tensor | None, torch.Tensor | None]:
    sparse, needs_tables, needs_weights = ctx.options.sparse, any(ctx.needs_input_grad[0]), bool(ctx.needs_input_grad[3])
    # torch has no fakes of sparse tensors, so these do not go through the dispatcher.
    wanted = _Wanted(sparse, needs_tables, needs_weights)
    if sparse:
        found = _gradients(grad, tables, indices, offsets, weights, ctx.lookup, wanted)
    else:
        found = _embedding_bag_gradients(grad, tables, indices, offsets, weights, *ctx.lookup, *wanted)
    here = ctx.tables_given if needs_tables else 0
    of_tables = [one if needed else None for one, needed in zip(found[:here], ctx.needs_input_grad[0], strict=False)]
    # The anchor's gradient depends on this rank's part in the exchange. Otherwise a compiled backward would omit the exchange,
    # because nothing would use its result, and the other ranks would wait. An anchor on a GPU is not an input of a graph.
    of_anchor = found[-1] if ctx.anchored and not needs_weights else None
    return of_tables or [None] * ctx.tables_given, found[here] if needs_weights else None, of_anchor


def _updated(
    ctx: Any, grad: torch.Tensor, _: Tables, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
) -> tuple[list[None], torch.Tensor | None, None]:
    """Update the tables, and return the gradient of weights. The gradients of tables are None."""
    (tables, states), options, needs_weights = ctx.updated, ctx.options, bool(ctx.needs_input_grad[3])
    for at, (table, version) in enumerate(zip(tables, ctx.versions, strict=True)):
        if needs_weights and writes_to(table) != version:
            raise ValueError(
                f"tables[{at}] has changed since its lookup, and the gradient of per_sample_weights is of what it was; with an "
                "optimizer, look such a table up once in a graph, and run its backward once"
            )
    own = [table.detach() for table in tables]
    update = (options.optimizer, options.lr, options.eps, needs_weights)
    of_weights = _embedding_bag_update(grad, own, states, indices, offsets, weights, *ctx.lookup, *update)
    return [None] * ctx.tables_given, of_weights if needs_weights else None, None


_embedding_bag_all_to_all = define(
    "embedding_bag_all_to_all",
    _forward,
    _forward_fake,
    returns=torch.Tensor,
    save=_save,
    backward=_backward,
    double_backward=False,
)


# The operators of its backward.


def _bound_backward(
    lookup: _Lookup, grad: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
) -> gradients.LookupBackward:
    kind = cast(DType, str(grad.dtype).removeprefix("torch."))
    return gradients.LookupBackward(
        problem=LookupProblem.of(batch=lookup.batch, dims=lookup.by_rank, mode=lookup.mode, dtype=kind),
        rank=lookup.rank,
        all_to_all=GROUPS.all_to_all(lookup.group, _BACKWARD, indices.device),
        indices=indices,
        offsets=offsets,
        weights=weights,
    )


class _Wanted(NamedTuple):
    """_Wanted holds the other options of weft::embedding_bag_gradients. sparse: whether the tables' gradients are sparse."""

    sparse: bool
    of_tables: bool
    of_weights: bool


def _gradients(
    grad: torch.Tensor,
    tables: Tables,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    lookup: _Lookup,
    wanted: _Wanted,
) -> list[torch.Tensor]:
    with torch.no_grad():
        backward = _bound_backward(lookup, grad, indices, offsets, weights)
        work = partial(backward.compute_gradients, grad, tables, **wanted._asdict())
        rows, factors = GROUPS.watched(lookup.group, _BACKWARD, lookup.describe(), grad.device, work)
    found = rows if factors is None else [*rows, factors]
    return found or [_nothing()]


def _gradients_fake(
    grad: torch.Tensor,
    tables: Tables,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    lookup: _Lookup,
    wanted: _Wanted,
) -> list[torch.Tensor]:
    rows = [table.new_empty(table.shape) for table in tables] if wanted.of_tables else []
    found = [*rows, weights.new_empty(weights.shape)] if wanted.of_weights and weights is not None else rows
    return found or [_nothing()]


def _nothing() -> torch.Tensor:
    """Return the result of an exchange without a gradient for this rank, because an operator must return a tensor."""
    return torch.zeros((), dtype=torch.float32, device="cpu")


_embedding_bag_gradients = define("embedding_bag_gradients", _gradients, _gradients_fake)


class _Update(NamedTuple):
    """_Update holds the other options of weft::embedding_bag_update: an optimizer, and whether weights need a gradient."""

    kind: str
    lr: float
    eps: float
    of_weights: bool


def _update(
    grad: torch.Tensor,
    tables: Annotated[Tables, "a!"],
    states: Annotated[Tables, "b!"],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    lookup: _Lookup,
    update: _Update,
) -> torch.Tensor:
    with torch.no_grad():
        backward = _bound_backward(lookup, grad, indices, offsets, weights)
        work = partial(backward.apply, grad, tables, states, **update._asdict())
        factors = GROUPS.watched(lookup.group, _BACKWARD, lookup.describe(), grad.device, work)
    return grad.new_empty(0) if factors is None else factors


def _update_fake(grad: torch.Tensor, *rest: Any) -> torch.Tensor:
    weights, _, update = rest[-3:]
    return weights.new_empty(weights.shape) if update.of_weights and weights is not None else grad.new_empty(0)


_embedding_bag_update = define("embedding_bag_update", _update, _update_fake)
