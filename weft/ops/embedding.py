"""embedding_bag_all_to_all: tables that lie whole on one rank each, batch parallel out.

    embedding_bag_all_to_all(indices, offsets, tables)   replaces   pooled = embedding_bag(...) of each table, side by side
                                                                    dist.all_to_all_single(out, pooled); out, columns in order

Legend: M the global batch, m a rank's part of it, T the tables of this rank, N the columns of all ranks' tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from operator import index
from typing import Literal

import torch
import torch.distributed as dist

from weft.core.errors import require
from weft.core.schedule import Schedule
from weft.ops.common import DTYPES, check_own, group_of, list_of, shape_of, spec_of
from weft.ops.library.embedding import run_lookup
from weft.ops.optimizers import Optimizer

_INDEX_TYPES = (torch.int32, torch.int64)
with torch.inference_mode(False):  # this module may first be loaded in there
    _ANCHOR = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
"""Of compiled lookups: their graphs have gradients for inputs alone, and one that is made within is none."""


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
    """Look up the whole batch in this rank's tables, and get all ranks' columns for this rank's samples.

    Replaces

        pooled = torch.cat([embedding_bag(indices of t, tables[t], offsets of t, mode) for t], 1)
        dist.all_to_all_single(recv, pooled); out = torch.cat(recv by rank, 1)

    Args:
        indices: [L], int32 or int64: rows of tables, those of table 0 first, as a KeyedJaggedTensor's values of the features
            that this rank has, over the global batch.
        offsets: [T * M + 1], int32 or int64: the bag of (table t, sample i) is
            indices[offsets[t * M + i] : offsets[t * M + i + 1]]; indices may be longer than the last offset. None with lengths.
        tables: matrices of one dtype (bfloat16, float16, float32), [rows, dim], rows and dims as they are.
        group: any process group; on several hosts see docs/nodes.md. Default: the whole world.
        lengths: [T * M], the bags' numbers of indices, in place of offsets.
        mode: "sum" or "mean" of a bag, in float32, rounded once; an empty bag is zero.
        per_sample_weights: [L], a factor for each index, with "sum" alone.
        dims: by rank, the dims of its tables, where ranks differ. Default: all ranks' are this one's.
        batch: M; a rank that has no tables needs to say it.
        dtype: the tables'; likewise.
        schedule: as for all_gather_matmul.
        pooling: indices in a bag that predictions reckon with; results do not depend on it.
        checked: an index that its table does not have, or offsets that do not rise, raise IndexError or ValueError on this
            rank after the call, which then waits for the device. Default: on CPUs. Checked or not, nothing outside the tables
            is read and nothing outside the results written: such an index adds nothing.
        sparse: gradients of tables are sparse, as torch's embedding_bag has them; not in torch.compile or a CUDA graph.
        optimizer: weft.SGD or weft.RowwiseAdagrad: backward updates the tables in place and gives them no gradient. Tables
            share no memory then, and where per_sample_weights need a gradient, have not changed since their lookup.

    Backward is collective: all ranks run it, or none; the gradient's way home is overlapped with sorting the indices. A rank
    without tables takes part wherever gradients are enabled: if all tables are frozen, look up under torch.no_grad().

    Returns out [m, N]: this rank's samples as torch.chunk cuts the batch; columns in the order of ranks, then tables: the
    layout of a table-wise sharded EmbeddingBagCollection. Raises ValueError for wrong shapes, dtypes or names; RankMismatch if
    ranks call different things; PeerLost and WaitTimeout if a rank is lost.
    Source: fused computation-collectives (arXiv 2305.06942).
    """
    group_name, rank, world_size = group_of(group)
    tables = list_of("tables", tables, "pass this rank's tables, matrices [rows, dim], in a list")
    _check_indices(indices, per_sample_weights, mode)
    kind = _check_tables(tables, indices.device, dtype)
    by_rank = _dims(tables, dims, rank, world_size)
    offsets = _offsets(offsets, lengths, indices)
    samples = _batch(offsets.shape[0] - 1, len(tables), batch)
    if not isinstance(pooling, int) or pooling < 1:
        raise ValueError(f"pooling is {pooling!r}; it must be a whole number of at least 1")
    return run_lookup(
        tables,
        indices.contiguous(),
        offsets.contiguous(),
        None if per_sample_weights is None else per_sample_weights.contiguous(),
        _anchor(tables, indices) if any(by_rank) else None,
        _states(optimizer, tables, sparse),
        group_name,
        rank,
        [len(own) for own in by_rank],
        [dim for own in by_rank for dim in own],
        samples,
        mode,
        kind,
        spec_of(schedule, "embedding_bag_all_to_all"),
        pooling,
        _checked(checked, indices),
        sparse,
        optimizer.KIND if optimizer else "",
        optimizer.lr if optimizer else 0.0,
        optimizer.eps if optimizer else 0.0,
    )


def _check_indices(indices: torch.Tensor, weights: torch.Tensor | None, mode: str) -> None:
    if not isinstance(indices, torch.Tensor) or indices.dim() != 1 or indices.dtype not in _INDEX_TYPES:
        raise ValueError(f"indices is {_kind_of(indices)}; it must be a vector of int32 or int64")
    if indices.device.type not in ("cpu", "cuda"):
        raise ValueError(f"indices is on {indices.device}; weft runs on cpu and cuda")
    if mode not in ("sum", "mean"):
        raise ValueError(f"mode is {mode!r}; use 'sum' or 'mean'")
    if weights is None:
        return
    if mode != "sum":
        raise ValueError("per_sample_weights goes with mode='sum' alone; divide the weights for a weighted mean")
    if not isinstance(weights, torch.Tensor):
        raise ValueError(f"per_sample_weights is a {type(weights).__name__}; it must be a tensor")
    if weights.shape != indices.shape or weights.dtype not in DTYPES or weights.device != indices.device:
        wanted = f"a float vector of {indices.shape[0]} on {indices.device}, one for each index"
        raise ValueError(f"per_sample_weights is {_kind_of(weights)} on {weights.device}; it must be {wanted}")


def _check_tables(tables: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype | None) -> torch.dtype:
    """The tables' dtype."""
    if not tables and dtype not in DTYPES:
        raise ValueError(
            f"dtype is {dtype}; a rank without tables must say what the others have, of {', '.join(DTYPES.values())}"
        )
    for at, table in enumerate(tables):
        require(f"tables[{at}]", table, torch.Tensor, "it must be a matrix [rows, dim]")
        check_own(f"tables[{at}]", table)
    kind = tables[0].dtype if tables else dtype
    if kind not in DTYPES or dtype not in (None, kind):
        raise ValueError(f"tables[0] is {kind}, dtype {dtype}; weft takes {', '.join(DTYPES.values())}, the same for both")
    for at, table in enumerate(tables):
        if table.dim() != 2 or table.shape[1] < 1 or table.stride(1) != 1 or table.stride(0) < table.shape[1]:
            raise ValueError(f"tables[{at}] is {shape_of(table)}; it must be a matrix [rows, dim] of contiguous rows")
        if table.dtype != kind or table.device != device:
            have, need = f"{table.dtype} on {table.device}", f"{kind} on {device}"
            raise ValueError(f"tables[{at}] is {have}; tables and indices must agree: {need}")
    assert kind is not None
    return kind


def _dims(
    tables: Sequence[torch.Tensor], dims: Sequence[Sequence[int]] | None, rank: int, world_size: int
) -> tuple[tuple[int, ...], ...]:
    own = tuple(int(table.shape[1]) for table in tables)
    if dims is None:
        return (own,) * world_size
    try:
        found = tuple(tuple(index(dim) for dim in one) for one in dims)
    except TypeError:
        found = ()
    if len(found) != world_size or any(dim < 1 for one in found for dim in one):
        raise ValueError(f"dims is {dims}; it must have a list of whole numbers of at least 1 for each of {world_size} ranks")
    if found[rank] != own:
        raise ValueError(f"dims[{rank}] is {found[rank]}, but the tables of rank {rank} have dims {own}")
    return found


def _offsets(offsets: torch.Tensor | None, lengths: torch.Tensor | None, indices: torch.Tensor) -> torch.Tensor:
    given, name = (lengths, "lengths") if offsets is None else (offsets, "offsets")
    if (offsets is None) == (lengths is None):
        raise ValueError("offsets and lengths: pass one of them, and None for the other")
    if not isinstance(given, torch.Tensor) or given.dim() != 1 or given.dtype not in _INDEX_TYPES:
        raise ValueError(f"{name} is {_kind_of(given)}; it must be a vector of int32 or int64")
    if given.device != indices.device:
        raise ValueError(f"{name} is on {given.device}, indices on {indices.device}; they must agree")
    if name == "offsets" and not given.shape[0]:
        raise ValueError("offsets is empty; it has one entry more than there are bags")
    return given if name == "offsets" else torch.nn.functional.pad(given.cumsum(0), (1, 0))


def _batch(bags: int, tables: int, batch: int | None) -> int:
    """M, from the number of bags."""
    if not tables and batch is None:
        raise ValueError("batch is None; a rank without tables must say how many samples all ranks have")
    found = batch if batch is not None else bags // tables
    if bags != tables * found:
        needed = f"{tables} tables of {found} samples need {tables * found}: a bag for each table and sample, table by table"
        raise ValueError(f"offsets or lengths has {bags} bags (offsets has one entry more); {needed}")
    return found


def _anchor(tables: Sequence[torch.Tensor], indices: torch.Tensor) -> torch.Tensor | None:
    """A rank without tables takes part in the backward, too: the others wait for its gradient."""
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
        _check_apart(tuple([(table.data_ptr(), *table.shape, table.stride(0), table.element_size()) for table in tables]))
    return optimizer.states_of(tables)


@lru_cache(maxsize=64)
def _check_apart(tables: tuple[tuple[int, ...], ...]) -> None:
    """Of rows that two tables have, one update would be lost: each is made by a block of its own. tables: of each its address,
    rows, columns, elements from row to row, and bytes of one."""
    placed = sorted((table, at) for at, table in enumerate(tables) if table[1])
    for number, ((first_ptr, rows, cols, stride, item), first) in enumerate(placed):
        end_ptr = first_ptr + item * ((rows - 1) * stride + cols)
        for (second_ptr, others, width, pitch, _), second in islice(placed, number + 1, None):
            if second_ptr >= end_ptr:
                break
            column = (second_ptr - first_ptr) // item % stride
            alike = others == 1 or stride == pitch
            if not (alike and cols <= column <= stride - width):
                raise ValueError(
                    f"tables[{min(first, second)}] and tables[{max(first, second)}] share memory; with an optimizer, give each "
                    "table rows of its own, or look both features up in one table"
                )


def _checked(checked: bool | None, indices: torch.Tensor) -> bool:
    if checked and indices.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("checked is True while a CUDA graph is captured; checking waits for the device: use checked=False")
    return indices.device.type == "cpu" if checked is None else checked


def _kind_of(value: object) -> str:
    return f"{shape_of(value)} of {value.dtype}" if isinstance(value, torch.Tensor) else shape_of(value)
