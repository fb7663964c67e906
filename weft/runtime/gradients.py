"""The backward of embedding_bag_all_to_all on one rank: the gradient comes home, is reduced by row, and is applied.

    caller's stream                       NCCL's stream
    pack the gradient by rank ----------> all-to-all (rows of the gradient go where their tables are)
    sort the indices: needs no gradient       |
    wait  <-----------------------------------+
    reduce and apply: one kernel

On CPUs the reduction is torch's, table by table; on GPUs, and under Triton's interpreter, it is weft.kernels.update.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from weft.compat.device import capabilities
from weft.core.problem import LookupProblem
from weft.kernels.places import Places, locate_indices, sort_indices
from weft.runtime.unscheduled import AllToAll


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What is done with a row's gradient. kind: of weft.kernels.update.KINDS. states: of each table; none for sgd."""

    kind: str
    lr: float
    eps: float
    states: Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Backward:
    """One backward on one rank. indices, offsets, weights: those of the forward, of this rank's tables. all_to_all: begins to
    exchange gradients."""

    problem: LookupProblem
    rank: int
    all_to_all: AllToAll
    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None

    def gradients(
        self, grad: torch.Tensor, tables: Sequence[torch.Tensor], *, sparse: bool, of_tables: bool, of_weights: bool
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """(one for each table, dense or sparse; that of the weights), as asked for. grad [m_r, N]: of the forward's result.
        Collective."""
        arrive = self._start(grad)
        places = self._places(tables)
        kernels = self._kernels(tables)
        found = sort_indices(self.indices, places, _heights(tables), self.problem.m) if places and kernels else None
        home = arrive()
        of_rows: list[torch.Tensor] = []
        if places is None:
            none, make = self.indices[:0].long(), _sparse if sparse else _dense
            of_rows = [make(table, none, table[:0]) for table in tables] if of_tables else []
            return of_rows, torch.zeros_like(self.weights) if of_weights and self.weights is not None else None
        if of_tables and sparse:
            of_rows = [_sparse(table, rows, sums) for table, rows, sums in self._sums(home, places, tables)]
        elif of_tables and found:
            base, of_rows = _zeros(tables)
            _kernels().update("gradient", home, found, of_rows, base=base, sms=_sms(home))
        elif of_tables:
            of_rows = [_dense(table, rows, sums) for table, rows, sums in self._sums(home, places, tables)]
        return of_rows, self._of_weights(home, places, tables) if of_weights else None

    def apply(
        self, grad: torch.Tensor, tables: Sequence[torch.Tensor], optimizer: Optimizer, *, of_weights: bool
    ) -> torch.Tensor | None:
        """Update the tables in place; the gradient of the weights, of the tables before, if asked for. Collective, and one
        exchange whatever is asked for: ranks may differ in it."""
        arrive = self._start(grad)
        places = self._places(tables)
        kernels = self._kernels(tables)
        found = sort_indices(self.indices, places, _heights(tables), self.problem.m) if places and kernels else None
        home = arrive()
        of_weights = of_weights and self.weights is not None
        factors = self._of_weights(home, places, tables) if of_weights and places else None
        if found:
            lr, eps = optimizer.lr, optimizer.eps
            _kernels().update(optimizer.kind, home, found, tables, optimizer.states, lr=lr, eps=eps, sms=_sms(home))
        elif places:
            for at, (table, rows, sums) in enumerate(self._sums(home, places, tables)):
                _apply(table, rows, sums, optimizer, at)
        return torch.zeros_like(self.weights) if of_weights and factors is None else factors  # type: ignore[arg-type]

    def _start(self, grad: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send each rank its columns; a function that waits for what comes: [batch, columns of this rank]."""
        problem = self.problem
        own = problem.columns(self.rank)
        packed = torch.cat([grad[:, low:high].reshape(-1) for low, high in problem.b_shards])
        gives = [grad.shape[0] * problem.columns(rank) for rank in range(problem.world_size)]
        takes = [(high - low) * own for low, high in problem.shards]
        landed = grad.new_empty(sum(takes))
        wait = self.all_to_all(landed, packed, takes, gives)

        def arrive() -> torch.Tensor:
            # Until then what is sent must live.
            _ = packed
            wait()
            return landed.view(problem.m, own)

        return arrive

    def _places(self, tables: Sequence[torch.Tensor]) -> Places | None:
        """None where there is nothing that a gradient could be for."""
        if not tables or not self.problem.m:
            return None
        mean = self.problem.mode == "mean"
        return locate_indices(self.indices, self.offsets, self.weights, _heights(tables), mean=mean)

    def _kernels(self, tables: Sequence[torch.Tensor]) -> bool:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1" and all(t.dtype != torch.bfloat16 for t in tables)
        return self.indices.device.type == "cuda" or interpreted

    def _sums(
        self, home: torch.Tensor, places: Places, tables: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """By table: it, the rows that were looked up, and the sum of each one's gradients, in float32."""
        for at, (table, (low, high)) in enumerate(zip(tables, self.problem.table_columns(self.rank), strict=True)):
            own = (places.counts & (places.bag // self.problem.m == at)).nonzero().squeeze(1)
            rows, segment = self.indices[own].long().unique(return_inverse=True)  # type: ignore[no-untyped-call]
            flow = home[:, low:high].float()[places.bag[own] % self.problem.m] * places.factor[own, None]
            yield table, rows, flow.new_zeros(rows.numel(), high - low).index_add_(0, segment, flow)

    def _of_weights(self, home: torch.Tensor, places: Places, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        assert self.weights is not None
        if self._kernels(tables):
            found: torch.Tensor = _kernels().weight_gradients(home, self.indices, places, tables, sms=_sms(home))
            return found.to(self.weights.dtype)
        out = torch.zeros(self.indices.numel(), dtype=torch.float32)
        for at, (table, (low, high)) in enumerate(zip(tables, self.problem.table_columns(self.rank), strict=True)):
            own = (places.counts & (places.bag // self.problem.m == at)).nonzero().squeeze(1)
            flow = home[places.bag[own] % self.problem.m, low:high].float()
            out[own] = (flow * table[self.indices[own].long()].float()).sum(1)
        return out.to(self.weights.dtype)


def _kernels() -> ModuleType:
    # Where no kernel runs, nothing needs Triton: it is imported here.
    from weft.kernels import update

    return update


def _heights(tables: Sequence[torch.Tensor]) -> list[int]:
    return [table.shape[0] for table in tables]


def _sms(on: torch.Tensor) -> int:
    return capabilities(on.device).sms


def _zeros(tables: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Zeros in the tables' shapes, one after the other, each at a multiple of 16 bytes; and the buffer of all of them."""
    unit = 16 // tables[0].element_size()
    sizes = [-(-table.numel() // unit) * unit for table in tables]
    base = tables[0].new_zeros(sum(sizes))
    parts = zip(torch.split(base, sizes), tables, strict=True)
    return base, [part[: table.numel()].view(table.shape) for part, table in parts]


def _dense(table: torch.Tensor, rows: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(table, memory_format=torch.contiguous_format)
    out[rows] = sums.to(table.dtype)
    return out


def _sparse(table: torch.Tensor, rows: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(rows[None], sums.to(table.dtype), table.shape, is_coalesced=True, check_invariants=False)


def _apply(table: torch.Tensor, rows: torch.Tensor, sums: torch.Tensor, optimizer: Optimizer, at: int) -> None:
    rate: float | torch.Tensor = optimizer.lr
    if optimizer.kind == "rowwise_adagrad":
        state = optimizer.states[at]
        state[rows] += sums.square().mean(1)
        rate = (optimizer.lr / (state[rows].sqrt() + optimizer.eps))[:, None]
    table[rows] = (table[rows].float() - rate * sums).to(table.dtype)
