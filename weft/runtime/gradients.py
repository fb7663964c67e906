"""The backward of embedding_bag_all_to_all on one rank.

An all-to-all sends each column of the gradient to the rank that has its table. That rank sums the gradients of each
table row, and returns the sums or applies them to the table.

    caller's stream                       NCCL's stream
    pack the gradient by rank ----------> all-to-all of the gradient's columns
    sort the indices                          |
    wait  <-----------------------------------+
    sum, and apply: one kernel

On GPUs, and under Triton's interpreter, weft.kernels.update does the sums. On CPUs torch does them, table by table.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from weft.compat.device import capabilities
from weft.core.problem import LookupProblem
from weft.kernels.tables import Places, SortedIndices, locate_indices, sort_indices
from weft.runtime.host_resources import AllToAll


@dataclass(frozen=True, kw_only=True)
class LookupBackward:
    """A LookupBackward is one backward call on one rank.

    problem: the problem of the forward.
    rank: this rank.
    all_to_all: starts the exchange of the gradient.
    indices, offsets, weights: those of the forward, for this rank's tables.
    """

    problem: LookupProblem
    rank: int
    all_to_all: AllToAll
    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None

    def compute_gradients(
        self, grad: torch.Tensor, tables: Sequence[torch.Tensor], *, sparse: bool, of_tables: bool, of_weights: bool
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return the gradients of the tables, and the gradient of the weights. Collective.

        grad [m_r, N]: the gradient of the forward's result.
        sparse: whether the gradients of the tables are sparse tensors.
        of_tables: whether to compute the gradients of the tables. The list is empty if not.
        of_weights: whether to compute the gradient of the weights. It is None if not.
        """
        own_grad, places, sorted_indices = self._exchange(grad, tables)
        table_grads: list[torch.Tensor] = []
        if places is None:
            no_rows, make = self.indices[:0].long(), _make_sparse if sparse else _make_dense
            table_grads = [make(table, no_rows, table[:0]) for table in tables] if of_tables else []
            return table_grads, torch.zeros_like(self.weights) if of_weights and self.weights is not None else None
        if of_tables and sparse:
            table_grads = [_make_sparse(*summed) for summed in self._sum_by_row(own_grad, places, tables)]
        elif of_tables and sorted_indices:
            base, table_grads = _make_zeros(tables)
            _import_kernels().update("gradient", own_grad, sorted_indices, table_grads, base=base, sms=_count_sms(own_grad))
        elif of_tables:
            table_grads = [_make_dense(*summed) for summed in self._sum_by_row(own_grad, places, tables)]
        return table_grads, self._weight_gradient(own_grad, places, tables) if of_weights else None

    def apply(
        self,
        grad: torch.Tensor,
        tables: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
        *,
        kind: str,
        lr: float,
        eps: float,
        of_weights: bool,
    ) -> torch.Tensor | None:
        """Update the tables in place, and return the gradient of the weights for the tables before the update.

        Collective. Ranks may differ in `of_weights`, because each call makes the same exchange.

        states: the optimizer state of each table. It is empty for sgd.
        kind: "sgd" or "rowwise_adagrad", of weft.kernels.update.KINDS.
        eps: the number that rowwise_adagrad adds to the divisor.
        of_weights: whether to compute the gradient of the weights. The result is None if not, or if there are no weights.
        """
        own_grad, places, sorted_indices = self._exchange(grad, tables)
        of_weights = of_weights and self.weights is not None
        weight_gradient = self._weight_gradient(own_grad, places, tables) if of_weights and places else None
        if sorted_indices:
            sms = _count_sms(own_grad)
            _import_kernels().update(kind, own_grad, sorted_indices, tables, states, lr=lr, eps=eps, sms=sms)
        elif places:
            for position, (table, rows, sums) in enumerate(self._sum_by_row(own_grad, places, tables)):
                rate: float | torch.Tensor = lr
                if kind == "rowwise_adagrad":
                    state = states[position]
                    state[rows] += sums.square().mean(1)
                    rate = (lr / (state[rows].sqrt() + eps))[:, None]
                table[rows] = (table[rows].float() - rate * sums).to(table.dtype)
        return torch.zeros_like(self.weights) if of_weights and weight_gradient is None else weight_gradient  # type: ignore[arg-type]

    def _exchange(
        self, grad: torch.Tensor, tables: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Places | None, SortedIndices | None]:
        """Exchange the gradient's columns, and locate and sort the indices meanwhile.

        Return the gradient of this rank's columns for the whole batch; the bag and factor of each index, or None if this rank
        has no tables or the batch is empty; and the indices sorted by row if kernels compute the gradients, or None.
        """
        problem = self.problem
        own = problem.columns(self.rank)
        packed = torch.cat([grad[:, low:high].reshape(-1) for low, high in problem.b_shards])
        sent_sizes = [grad.shape[0] * problem.columns(rank) for rank in range(problem.world_size)]
        received_sizes = [(high - low) * own for low, high in problem.shards]
        received = grad.new_empty(sum(received_sizes))
        wait = self.all_to_all(received, packed, received_sizes, sent_sizes)
        places, sorted_indices, counts = None, None, [table.shape[0] for table in tables]
        if tables and problem.m:
            places = locate_indices(self.indices, self.offsets, self.weights, counts, mean=problem.mode == "mean")
            sorted_indices = sort_indices(self.indices, places, counts, problem.m) if self._runs_kernels(tables) else None
        wait()  # `packed` lives until here, because the exchange reads its memory
        return received.view(problem.m, own), places, sorted_indices

    def _runs_kernels(self, tables: Sequence[torch.Tensor]) -> bool:
        """Return whether Triton kernels compute the gradients. The interpreter does not run them in bfloat16."""
        interpreted = os.environ.get("TRITON_INTERPRET") == "1" and all(t.dtype != torch.bfloat16 for t in tables)
        return self.indices.device.type == "cuda" or interpreted

    def _sum_by_row(
        self, own_grad: torch.Tensor, places: Places, tables: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield each table, with its rows that were looked up and the sum of the gradients of each such row, in float32."""
        for position, (table, (low, high)) in enumerate(zip(tables, self.problem.table_columns(self.rank), strict=True)):
            own = (places.counts & (places.bag // self.problem.m == position)).nonzero().squeeze(1)
            rows, segment = self.indices[own].long().unique(return_inverse=True)  # type: ignore[no-untyped-call]
            gradients = own_grad[:, low:high].float()[places.bag[own] % self.problem.m] * places.factor[own, None]
            yield table, rows, gradients.new_zeros(rows.numel(), high - low).index_add_(0, segment, gradients)

    def _weight_gradient(self, own_grad: torch.Tensor, places: Places, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the gradient of the weights: for each index, the product of its row with the gradient of its bag."""
        assert self.weights is not None
        if self._runs_kernels(tables):
            sms = _count_sms(own_grad)
            found: torch.Tensor = _import_kernels().weight_gradients(own_grad, self.indices, places, tables, sms=sms)
            return found.to(self.weights.dtype)
        out = torch.zeros(self.indices.numel(), dtype=torch.float32)
        for position, (table, (low, high)) in enumerate(zip(tables, self.problem.table_columns(self.rank), strict=True)):
            own = (places.counts & (places.bag // self.problem.m == position)).nonzero().squeeze(1)
            gradients = own_grad[places.bag[own] % self.problem.m, low:high].float()
            out[own] = (gradients * table[self.indices[own].long()].float()).sum(1)
        return out.to(self.weights.dtype)


def _import_kernels() -> ModuleType:
    # Imported here because a process that runs no kernel needs no Triton.
    from weft.kernels import update

    return update


def _count_sms(tensor: torch.Tensor) -> int:
    return capabilities(tensor.device).sms


def _make_zeros(tables: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return one buffer of zeros, and its views in the shapes of the tables. Each view starts at a multiple of 16 bytes."""
    unit = 16 // tables[0].element_size()
    sizes = [-(-table.numel() // unit) * unit for table in tables]
    base = tables[0].new_zeros(sum(sizes))
    parts = zip(torch.split(base, sizes), tables, strict=True)
    return base, [part[: table.numel()].view(table.shape) for part, table in parts]


def _make_dense(table: torch.Tensor, rows: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(table, memory_format=torch.contiguous_format)
    out[rows] = sums.to(table.dtype)
    return out


def _make_sparse(table: torch.Tensor, rows: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(rows[None], sums.to(table.dtype), table.shape, is_coalesced=True, check_invariants=False)
