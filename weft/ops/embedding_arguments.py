"""The arguments of embedding_bag_all_to_all: optimizers, and functions that check the others and derive values from them.

The backward of a lookup applies an optimizer to its tables row by row, without storing a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from operator import index
from typing import ClassVar

import torch

from weft.compat.dispatch import graph_break
from weft.core.errors import require
from weft.ops.common import DTYPES, check_device, check_local_strided, describe


@dataclass(kw_only=True)
class SGD:
    """SGD computes row -= lr * gradient. Raises ValueError for a rate below 0."""

    KIND: ClassVar[str] = "sgd"
    lr: float
    eps: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        _check_rate("lr", self.lr)

    def states_of(self, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return an empty list, because SGD has no states."""
        return []


@dataclass(kw_only=True)
class RowwiseAdagrad:
    """RowwiseAdagrad computes state += mean(gradient^2) of the row, then row -= lr * gradient / (sqrt(state) + eps).

    Use a separate RowwiseAdagrad for each set of tables. Call states_of(tables) before a compiled function, whose graph would
    otherwise break to make the states.

    states: float32 [rows] for each table, made as zeros at the first use. You save and load them.
    Raises ValueError for a rate or eps below 0, and if the states do not fit the tables.
    """

    KIND: ClassVar[str] = "rowwise_adagrad"
    lr: float
    eps: float = 1e-8
    states: list[torch.Tensor] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        _check_rate("lr", self.lr)
        _check_rate("eps", self.eps)

    def states_of(self, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the states of these tables. The first call makes them."""
        if tables and not self.states:
            if torch.compiler.is_compiling():
                # torch's partitioner refuses a graph that both makes states and changes them in its backward.
                graph_break(_STATELESS)
                self.states = torch.compiler.disable(_zeros)(tables)  # type: ignore[no-untyped-call]
            else:
                self.states = _zeros(tables)
        for at, (state, table) in enumerate(zip(self.states, tables, strict=False)):
            if state.shape != table.shape[:1] or state.dtype != torch.float32 or state.device != table.device:
                have = f"{list(state.shape)} of {state.dtype} on {state.device}"
                raise ValueError(
                    f"optimizer.states[{at}] is {have}; table {at} needs float32 [{table.shape[0]}] on {table.device}"
                )
        if len(self.states) != len(tables):
            raise ValueError(
                f"optimizer.states has {len(self.states)} entries for {len(tables)} tables; use one optimizer each"
            )
        return self.states


_STATELESS = "the optimizer has no states yet; call optimizer.states_of(tables) once, before the compiled function"


def _zeros(tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.inference_mode(False):  # a backward cannot change tensors of inference mode
        return [torch.zeros(t.shape[0], dtype=torch.float32, device=t.device) for t in tables]


Optimizer = SGD | RowwiseAdagrad


def _check_rate(name: str, value: float) -> None:
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a number of at least 0, and finite")


_INDEX_TYPES = (torch.int32, torch.int64)


def check_indices(indices: torch.Tensor, weights: torch.Tensor | None, mode: str) -> None:
    if not isinstance(indices, torch.Tensor) or indices.dim() != 1 or indices.dtype not in _INDEX_TYPES:
        raise ValueError(f"indices is {_kind_of(indices)}; it must be a vector of int32 or int64")
    check_device("indices", indices)
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


def dtype_of_tables(tables: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype | None) -> torch.dtype:
    """Return the tables' dtype. Raises ValueError for tables that are not matrices of one dtype and device."""
    if not tables and dtype not in DTYPES:
        raise ValueError(
            f"dtype is {dtype}; a rank without tables must say what the others have, of {', '.join(DTYPES.values())}"
        )
    for at, table in enumerate(tables):
        require(f"tables[{at}]", table, torch.Tensor, "it must be a matrix [rows, dim]")
        check_local_strided(f"tables[{at}]", table)
    kind = tables[0].dtype if tables else dtype
    if kind not in DTYPES or dtype not in (None, kind):
        raise ValueError(f"tables[0] is {kind}, dtype {dtype}; weft takes {', '.join(DTYPES.values())}, the same for both")
    for at, table in enumerate(tables):
        if table.dim() != 2 or table.shape[1] < 1 or table.stride(1) != 1 or table.stride(0) < table.shape[1]:
            raise ValueError(f"tables[{at}] is {describe(table)}; it must be a matrix [rows, dim] of contiguous rows")
        if table.dtype != kind or table.device != device:
            have, need = f"{table.dtype} on {table.device}", f"{kind} on {device}"
            raise ValueError(f"tables[{at}] is {have}; tables and indices must agree: {need}")
    assert kind is not None
    return kind


def dims_by_rank(
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


def offsets_of(offsets: torch.Tensor | None, lengths: torch.Tensor | None, indices: torch.Tensor) -> torch.Tensor:
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


def batch_of(bags: int, tables: int, batch: int | None) -> int:
    """Return M, computed from the number of bags. Raises ValueError if the tables do not have equally many bags."""
    if not tables and batch is None:
        raise ValueError("batch is None; a rank without tables must say how many samples all ranks have")
    found = batch if batch is not None else bags // tables
    if bags != tables * found:
        given = "" if batch is None else f"batch is {batch}; "
        needed = f"{tables} tables of {found} samples need {tables * found}: a bag for each table and sample, table by table"
        raise ValueError(f"{given}offsets or lengths has {bags} bags (offsets has one entry more); {needed}")
    return found


@lru_cache(maxsize=64)
def check_disjoint(tables: tuple[tuple[int, ...], ...]) -> None:
    """Raise ValueError if two tables share memory.

    An optimizer needs separate memory, because different blocks would update a shared row, and one update would be lost.

    tables: for each table: address, rows, columns, row stride in elements, and bytes of an element.
    """
    placed = sorted((table, at) for at, table in enumerate(tables) if table[1])
    for number, ((first_ptr, rows, cols, stride, item), first) in enumerate(placed):
        end_ptr = first_ptr + item * ((rows - 1) * stride + cols)
        for (second_ptr, others, width, pitch, _), second in islice(placed, number + 1, None):
            if second_ptr >= end_ptr:
                break
            column = (second_ptr - first_ptr) // item % stride
            same_rows = others == 1 or stride == pitch
            if not (same_rows and cols <= column <= stride - width):
                raise ValueError(
                    f"tables[{min(first, second)}] and tables[{max(first, second)}] share memory; with an optimizer, give each "
                    "table rows of its own, or look both features up in one table"
                )


def check_values_of(tables: Sequence[torch.Tensor], indices: torch.Tensor, offsets: torch.Tensor, batch: int) -> None:
    """Raise IndexError that names the first index outside its table, or ValueError for offsets that decrease.

    The host waits for the device.
    """
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


def _kind_of(value: object) -> str:
    return f"{describe(value)} of {value.dtype}" if isinstance(value, torch.Tensor) else describe(value)
