"""Every public operator as one value: how its arguments are drawn, how it is called, and what it computes, in torch alone.

The contract suites and the tests on GPUs take their cases from OPERATORS. Each rank draws the arguments of all ranks alike, so
what a rank should get needs no communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from families import DIMS
from rank_work import here
from torch.nn.functional import embedding_bag

import weft
from weft import collectives
from weft.core.problem import Op, split

Arguments = list[torch.Tensor]
"""The tensors of one rank that are drawn: those that may need gradients."""
N, K, BATCH, EXPERTS, MAX_ROWS = 6, 9, 11, 2, 40
EXPERTS_N, EXPERTS_K = 8, 16
"""GPUs' kernels for experts need multiples of 8."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """name: of the public function. op: what the registries of schedules call it. shapes: (rows, world_size, rank) to shapes of
    the tensors. call: with schedule=. expected: (the tensors of every rank, rank) to the result of that rank.

    replicated: every rank has the same result, and one loss counts it once. shared: positions of tensors that are the same on
    every rank. even: rows are a multiple of world_size. differentiable: it has a backward, and torch.compile traces it.
    scheduled: it takes schedule=. families: those that it takes, where its op has others. inner: how many products or rows an
    element of the result sums up. needs: of "rows" (of all ranks), "dtype" and "splits", the options that a call cannot do
    without. layouts: names of the strides that it takes, all by default.
    """

    name: str
    op: Op
    shapes: Callable[[int, int, int], Sequence[tuple[int, ...]]]
    call: Callable[..., torch.Tensor]
    expected: Callable[[list[Arguments], int], torch.Tensor]
    public: Callable[..., Any]
    replicated: bool = False
    shared: tuple[int, ...] = ()
    even: bool = False
    differentiable: bool = True
    scheduled: bool = True
    families: tuple[str, ...] = ()
    inner: int = K
    needs: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ("transposed", "sliced", "every other row", "expanded")

    def __str__(self) -> str:
        return self.name if self.name == self.op else f"{self.name}-{self.op}"

    def takes(self, spec: str) -> bool:
        """Whether calls can have this schedule."""
        return not self.families or spec.partition(":")[0] in self.families

    def rows(self, wanted: int, size: int) -> int:
        """The nearest number of rows, not below `wanted`, that the operator takes on this many ranks."""
        return -(-wanted // size) * size if self.even else wanted

    def options(self, given: list[Arguments]) -> dict[str, Any]:
        """What a call needs beside its tensors."""
        known = {
            "rows": sum(each[0].shape[0] for each in given if each),
            "dtype": given[0][0].dtype,
            "splits": self._splits(len(given), dist.get_rank()) if "splits" in self.needs else None,
        }
        return {name: known[name] for name in self.needs}

    def _splits(self, size: int, rank: int) -> torch.Tensor:
        """Rows to each rank and expert; of a combine, the rows that each expert has of each rank."""
        if self.op == "ragged_all_to_all_matmul":
            return counts(size, rank).to(here())
        return torch.stack([counts(size, src)[rank] for src in range(size)], 1).to(here())

    def drawn(self, rows: int, size: int, dtype: torch.dtype, seed: int) -> list[Arguments]:
        """The tensors of every rank. Those of shared positions are one tensor."""
        generator = torch.Generator().manual_seed(seed)
        found: list[Arguments] = []
        for rank in range(size):
            drawn = [torch.randn(shape, generator=generator) for shape in self.shapes(self.rows(rows, size), size, rank)]
            made = [(x * self.inner**-0.5).to(here(), dtype) for x in drawn]
            found.append([found[0][at] if at in self.shared and rank else x for at, x in enumerate(made)])
        return found


def _shard(extent: int, size: int, rank: int) -> int:
    low, high = split(extent, size)[rank]
    return high - low


def _part(x: torch.Tensor, rank: int, size: int, dim: int = 0) -> torch.Tensor:
    low, high = split(x.shape[dim], size)[rank]
    return x.narrow(dim, low, high - low)


def _product_sum(given: list[Arguments]) -> torch.Tensor:
    return torch.stack([each[0] @ each[1] for each in given]).sum(0)


def _normalised(given: list[Arguments], rank: int) -> torch.Tensor:
    """The norm, and below it the sum of which it is."""
    total = _product_sum(given) + given[rank][2] + given[rank][3]
    return torch.cat([torch.nn.functional.rms_norm(total, (N,), given[rank][4], 1e-6), total])


def _normalised_sum(given: list[Arguments], rank: int) -> torch.Tensor:
    _, bias, residual, weight = given[rank]
    total = torch.stack([each[0] for each in given]).sum(0) + bias + residual
    return torch.cat([torch.nn.functional.rms_norm(total, (N,), weight, 1e-6), total])


def _combined(given: list[Arguments], rank: int) -> torch.Tensor:
    return torch.cat([_part(each[0], rank, len(given)) @ each[1] for each in given])


def _dispatched(given: list[Arguments], rank: int) -> torch.Tensor:
    return torch.cat([_part(each[0], rank, len(given)) for each in given]) @ given[rank][1]


def _combined_columns(given: list[Arguments], rank: int) -> torch.Tensor:
    return torch.cat([_part(each[0] @ each[1], rank, len(given), 1) for each in given])


def _dispatched_columns(given: list[Arguments], rank: int) -> torch.Tensor:
    return torch.cat([_part(each[0], rank, len(given)) for each in given], 1) @ given[rank][1]


def counts(size: int, rank: int) -> torch.Tensor:
    """Rows that a rank sends to each rank and expert: uneven, some none."""
    return torch.tensor([[(rank + 2 * dst + expert) % 4 for expert in range(EXPERTS)] for dst in range(size)])


def _segments(a: torch.Tensor, size: int, rank: int) -> dict[tuple[int, int], torch.Tensor]:
    lengths = counts(size, rank).flatten().tolist()
    return {divmod(at, EXPERTS): part for at, part in enumerate(a[: sum(lengths)].split(lengths))}


def _padded(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(MAX_ROWS - rows.shape[0], rows.shape[1])])


def _ragged_dispatched(given: list[Arguments], rank: int) -> torch.Tensor:
    size = len(given)
    parts = [_segments(given[src][0], size, src)[rank, e] @ given[rank][1][e] for e in range(EXPERTS) for src in range(size)]
    return _padded(torch.cat(parts))


def _ragged_combined(given: list[Arguments], rank: int) -> torch.Tensor:
    """Rank dst has rows by expert, then by source; every source gets its rows in the order of destinations and experts."""
    size, found = len(given), []
    for dst in range(size):
        lengths = [int(counts(size, src)[dst, e]) for e in range(EXPERTS) for src in range(size)]
        parts = given[dst][0][: sum(lengths)].split(lengths)
        found += [parts[e * size + rank] @ given[dst][1][e] for e in range(EXPERTS)]
    return _padded(torch.cat(found))


def bags(tables: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and offsets of BATCH bags for each table: bags of none to three rows."""
    lengths = torch.arange(tables * BATCH + rank) % 4
    lengths = lengths[rank:]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.arange(int(lengths.sum())) % 5, offsets


def dims(size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(DIMS[rank % len(DIMS)] for rank in range(size))


@functools.cache
def _bags_here(tables: int, rank: int) -> tuple[torch.Tensor, ...]:
    """On this rank's device, where they stay: a graph may be recorded."""
    return tuple(x.to(here()) for x in bags(tables, rank))


def _lookup(*tables: torch.Tensor, **options: Any) -> torch.Tensor:
    rank = dist.get_rank()
    indices, offsets = _bags_here(len(tables), rank)
    given = {"dims": dims(dist.get_world_size()), "batch": BATCH, **options}
    return weft.embedding_bag_all_to_all(indices, offsets, list(tables), **given)


def _pooled(given: list[Arguments], rank: int) -> torch.Tensor:
    columns = []
    for src, tables in enumerate(given):
        indices, offsets = (x.to(here()) for x in bags(len(tables), src))
        for at, table in enumerate(tables):
            own = offsets[at * BATCH : (at + 1) * BATCH + 1]
            part = indices[int(own[0]) : int(own[-1])]
            pooled = embedding_bag(part, table, own - own[0], mode="sum", include_last_offset=True)
            columns.append(_part(pooled, rank, len(given)))
    return torch.cat(columns, 1)


def _gathered(given: list[Arguments], rank: int) -> torch.Tensor:
    return torch.cat([each[0] for each in given])


def _summed(given: list[Arguments], rank: int) -> torch.Tensor:
    return torch.stack([each[0] for each in given]).sum(0)


def _scattered(given: list[Arguments], rank: int) -> torch.Tensor:
    return _part(_summed(given, rank), rank, len(given))


def _exchanged(given: list[Arguments], rank: int) -> torch.Tensor:
    return torch.cat([_part(each[0], rank, len(given)) for each in given])


def _into(function: Callable[..., Any], rows: Callable[[int, int], int]) -> Callable[..., torch.Tensor]:
    """A collective into a tensor that is given, as a function."""

    def call(x: torch.Tensor, **options: Any) -> torch.Tensor:
        out = x.new_empty(rows(x.shape[0], dist.get_world_size()), *x.shape[1:])
        function(out, x.contiguous(), **options)
        return out

    return call


_OF_ELEMENTS = ("sequential", "one_shot", "copy_engine", "copy_engine_pull")


def _all_reduce_in_place(x: torch.Tensor, **options: Any) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce(out, **options)
    return out


OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="all_gather_matmul",
        op="all_gather_matmul",
        public=weft.all_gather_matmul,
        shapes=lambda rows, size, rank: ((_shard(rows, size, rank), K), (K, _shard(7, size, rank))),
        call=weft.all_gather_matmul,
        needs=("rows",),
        expected=lambda given, rank: _gathered(given, rank) @ given[rank][1],
    ),
    Operator(
        name="matmul_reduce_scatter",
        op="matmul_reduce_scatter",
        public=weft.matmul_reduce_scatter,
        shapes=lambda rows, size, rank: ((rows, _shard(K + 1, size, rank)), (_shard(K + 1, size, rank), N)),
        call=weft.matmul_reduce_scatter,
        expected=lambda given, rank: _part(_product_sum(given), rank, len(given)),
    ),
    Operator(
        name="matmul_all_reduce",
        op="matmul_all_reduce",
        public=weft.matmul_all_reduce,
        shapes=lambda rows, size, rank: ((rows, _shard(K + 1, size, rank)), (_shard(K + 1, size, rank), N), (N,), (rows, N)),
        call=lambda a, b, bias, residual, **options: weft.matmul_all_reduce(a, b, bias=bias, residual=residual, **options),
        expected=lambda given, rank: _product_sum(given) + given[rank][2] + given[rank][3],
        replicated=True,
        shared=(2, 3),
    ),
    Operator(
        name="matmul_all_reduce_norm",
        op="matmul_all_reduce",
        public=weft.matmul_all_reduce_norm,
        shapes=lambda rows, size, rank: (
            *((rows, _shard(K + 1, size, rank)), (_shard(K + 1, size, rank), N)),
            *((N,), (rows, N), (N,)),
        ),
        call=lambda a, b, bias, residual, weight, **options: torch.cat(
            weft.matmul_all_reduce_norm(a, b, residual, weight, bias=bias, **options)
        ),
        expected=_normalised,
        replicated=True,
        shared=(2, 3, 4),
        differentiable=False,
    ),
    Operator(
        name="matmul_all_to_all",
        op="matmul_all_to_all",
        public=weft.matmul_all_to_all,
        shapes=lambda rows, size, rank: ((rows, K), (K, N)),
        call=weft.matmul_all_to_all,
        expected=_combined,
    ),
    Operator(
        name="all_to_all_matmul",
        op="all_to_all_matmul",
        public=weft.all_to_all_matmul,
        shapes=lambda rows, size, rank: ((rows, K), (K, N)),
        call=weft.all_to_all_matmul,
        expected=_dispatched,
    ),
    Operator(
        name="matmul_all_to_all",
        op="matmul_all_to_all_columns",
        public=weft.matmul_all_to_all,
        shapes=lambda rows, size, rank: ((rows, K), (K, 2 * size)),
        call=lambda a, b, **options: weft.matmul_all_to_all(a, b, split_dim=-1, **options),
        expected=_combined_columns,
    ),
    Operator(
        name="all_to_all_matmul",
        op="all_to_all_columns_matmul",
        public=weft.all_to_all_matmul,
        shapes=lambda rows, size, rank: ((rows, 3), (3 * size, N)),
        call=lambda a, b, **options: weft.all_to_all_matmul(a, b, gather_dim=-1, **options),
        expected=_dispatched_columns,
        even=True,
    ),
    Operator(
        name="all_to_all_matmul",
        op="ragged_all_to_all_matmul",
        public=weft.all_to_all_matmul,
        shapes=lambda rows, size, rank: ((int(counts(size, rank).sum()) + 2, EXPERTS_K), (EXPERTS, EXPERTS_K, EXPERTS_N)),
        inner=EXPERTS_K,
        call=lambda a, b, **options: weft.all_to_all_matmul(a, b, max_rows=MAX_ROWS, **options)[0],
        needs=("splits",),
        expected=_ragged_dispatched,
        scheduled=False,
    ),
    Operator(
        name="matmul_all_to_all",
        op="ragged_matmul_all_to_all",
        public=weft.matmul_all_to_all,
        shapes=lambda rows, size, rank: (
            (sum(int(counts(size, src)[rank].sum()) for src in range(size)) + 1, EXPERTS_K),
            (EXPERTS, EXPERTS_K, EXPERTS_N),
        ),
        inner=EXPERTS_K,
        call=lambda a, b, **options: weft.matmul_all_to_all(a, b, max_rows=MAX_ROWS, **options)[0],
        needs=("splits",),
        expected=_ragged_combined,
        scheduled=False,
    ),
    Operator(
        name="embedding_bag_all_to_all",
        op="embedding_bag_all_to_all",
        public=weft.embedding_bag_all_to_all,
        shapes=lambda rows, size, rank: tuple((5, dim) for dim in dims(size)[rank]),
        call=_lookup,
        expected=_pooled,
        needs=("dtype",),
        layouts=("sliced", "every other row"),
        inner=3,
    ),
    Operator(
        name="all_gather",
        op="all_gather",
        public=collectives.all_gather,
        shapes=lambda rows, size, rank: ((rows, 3),),
        call=collectives.all_gather,
        expected=_gathered,
    ),
    Operator(
        name="reduce_scatter",
        op="reduce_scatter",
        public=collectives.reduce_scatter,
        shapes=lambda rows, size, rank: ((rows, 3),),
        call=collectives.reduce_scatter,
        expected=_scattered,
        even=True,
    ),
    Operator(
        name="all_reduced",
        op="all_reduce",
        families=_OF_ELEMENTS,
        public=collectives.all_reduced,
        shapes=lambda rows, size, rank: ((rows, 3),),
        call=collectives.all_reduced,
        expected=_summed,
    ),
    Operator(
        name="all_to_all",
        op="all_to_all",
        public=collectives.all_to_all,
        shapes=lambda rows, size, rank: ((rows, 3),),
        call=collectives.all_to_all,
        expected=_exchanged,
        even=True,
    ),
    Operator(
        name="all_gather_into_tensor",
        op="all_gather",
        public=collectives.all_gather_into_tensor,
        shapes=lambda rows, size, rank: ((rows, 3),),
        call=_into(collectives.all_gather_into_tensor, lambda rows, size: rows * size),
        expected=_gathered,
        differentiable=False,
    ),
    Operator(
        name="reduce_scatter_tensor",
        op="reduce_scatter",
        public=collectives.reduce_scatter_tensor,
        shapes=lambda rows, size, rank: ((rows, 3),),
        call=_into(collectives.reduce_scatter_tensor, lambda rows, size: rows // size),
        expected=_scattered,
        even=True,
        differentiable=False,
    ),
    Operator(
        name="all_reduce",
        op="all_reduce",
        families=_OF_ELEMENTS,
        public=collectives.all_reduce,
        shapes=lambda rows, size, rank: ((rows, 3),),
        call=_all_reduce_in_place,
        expected=_summed,
        differentiable=False,
    ),
    Operator(
        name="all_reduce_norm",
        op="all_reduce",
        public=weft.all_reduce_norm,
        shapes=lambda rows, size, rank: ((rows, N), (N,), (rows, N), (N,)),
        call=lambda x, bias, residual, weight, **options: torch.cat(
            weft.all_reduce_norm(x, residual, weight, bias=bias, **options)
        ),
        expected=_normalised_sum,
        replicated=True,
        shared=(1, 2, 3),
        differentiable=False,
        families=("sequential", "one_shot", "two_shot"),
    ),
    Operator(
        name="all_to_all_single",
        op="all_to_all",
        public=collectives.all_to_all_single,
        shapes=lambda rows, size, rank: ((rows, 3),),
        call=_into(collectives.all_to_all_single, lambda rows, size: rows),
        expected=_exchanged,
        even=True,
        differentiable=False,
    ),
)
BY_ID = {str(one): one for one in OPERATORS}


def wide(given: list[Arguments]) -> list[Arguments]:
    """In float64, as leaves that need gradients. One tensor stays one."""
    made = {id(x): x.detach().double().requires_grad_() for each in given for x in each}
    return [[made[id(x)] for x in each] for each in given]


def close(got: torch.Tensor, wanted: torch.Tensor, what: object, partials: int = 2) -> None:
    """Within what rounding to the dtype of `got` explains: of the result, and of `partials` sums of its size by each rank."""
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    unit = torch.finfo(got.dtype).eps / 2 * (1 + partials * dist.get_world_size()) + 64 * torch.finfo(torch.float32).eps
    error = float((got.double() - wanted).abs().max()) if wanted.numel() else 0.0
    assert error <= max(scale, 1.0) * unit, (what, error, scale * unit)


def check_forward(operator: Operator, given: list[Arguments], what: object, **options: Any) -> torch.Tensor:
    """A call with this rank's tensors, compared with torch in float64."""
    rank = dist.get_rank()
    out = operator.call(*given[rank], **operator.options(given), **options)
    assert out.dtype == given[0][0].dtype, what
    close(out, operator.expected([[x.double() for x in each] for each in given], rank), what)
    return out
