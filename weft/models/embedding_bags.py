"""ShardedEmbeddingBags: embedding tables, each whole on one rank, with lookups for the whole batch.

    indices of this rank's tables, of the whole batch [M] --> lookup ~all-to-all~> [m, tables * dim], this rank's samples

Legend: M the global batch, m a rank's part of it. Source: DLRM (arXiv 1906.00091); examples/dlrm.py trains one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from weft.models.communicating import CommunicatingLayer, LayerCalls, record_layer
from weft.ops import RowwiseAdagrad, embedding_bag_all_to_all
from weft.ops.common import resolve_group
from weft.ops.embedding_arguments import Optimizer

_OPERATORS = ("embedding_bag_all_to_all",)


def even_ranges(loads: Sequence[float], ranks: int) -> list[range]:
    """Split the tables into consecutive ranges, one for each rank, so that the largest sum of loads is as small as possible.

    >>> even_ranges([3, 1, 1, 4, 2], 3)
    [range(0, 3), range(3, 4), range(4, 5)]
    """
    ends = [0.0]
    for load in loads:
        ends.append(ends[-1] + load)
    sums = sorted({high - low for at, high in enumerate(ends) for low in ends[:at]})
    low, high = 0, len(sums) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(loads, sums[middle])) <= ranks else (middle + 1, high)
    found = _filled(loads, sums[low] if sums else 0.0)
    return found + [range(len(loads), len(loads))] * (ranks - len(found))


def _filled(loads: Sequence[float], most: float) -> list[range]:
    """Return ranges whose loads add up to at most `most`, or that have one table."""
    cuts, total = [0], 0.0
    for at, load in enumerate(loads):
        if total + load > most and at > cuts[-1]:
            cuts.append(at)
            total = 0.0
        total += load
    return [range(*cut) for cut in pairwise([*cuts, len(loads)])]


class _Divided(torch.autograd.Function):
    """Returns x, and divides its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: int) -> torch.Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] / ctx.by, None


class ShardedEmbeddingBags(nn.Module):
    """Embedding bags of T tables, each whole on one rank. Every rank gets all tables' columns for its samples.

    sizes: rows and dim of each table.
    pooling: the indices per bag of each table. Tables are divided evenly by them, into one range per rank, so columns keep the
    tables' order.
    group: default: the whole world.
    optimizer: weft.SGD or weft.RowwiseAdagrad, applied in the backward pass, in which tables get no gradient. Its states are
    this module's buffers. With None tables get dense gradients.
    mean: divide gradients by the number of ranks, as DistributedDataParallel does, so that losses are means over a rank's
    samples.
    schedule: as for embedding_bag_all_to_all.

    A rank's state_dict has only its own tables, as `tables.7`, numbered among all tables, and `states.7`. Loading ignores other
    ranks' entries, so a state of all tables can be loaded on any rank, and torch.distributed.checkpoint saves each table once.
    DistributedDataParallel of this module ignores tables and states. Around a larger module, list them in its
    `_ddp_params_and_buffers_to_ignore`.

    Raises ValueError for sizes and pooling that differ in number, or a table without rows.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        group: dist.ProcessGroup | None = None,
        *,
        pooling: Sequence[float] | None = None,
        mode: Literal["sum", "mean"] = "sum",
        optimizer: Optimizer | None = None,
        mean: bool = True,
        schedule: str = "auto",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        pooling = [1.0] * len(sizes) if pooling is None else list(pooling)
        if len(pooling) != len(sizes) or any(rows < 1 or dim < 1 for rows, dim in sizes):
            raise ValueError(
                f"sizes has {len(sizes)} tables, pooling {len(pooling)}; each table needs rows, a dim, and a pooling"
            )
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.ranges = even_ranges([dim * pool for (_, dim), pool in zip(sizes, pooling, strict=True)], self.size)
        self.dims = [[sizes[at][1] for at in own] for own in self.ranges]
        self.mode, self.optimizer, self.mean, self.schedule, self.dtype = mode, optimizer, mean, schedule, dtype
        self.pooling = max(1, round(sum(pooling) / max(1, len(pooling))))
        self.count, self.own = len(sizes), self.ranges[self.rank]
        self.tables, self.states = nn.ParameterDict(), nn.Module()
        for at in self.own:
            rows, dim = sizes[at]
            table = torch.empty(rows, dim, dtype=dtype, device=device).uniform_(-(rows**-0.5), rows**-0.5)
            self.tables[str(at)] = nn.Parameter(table)
            if isinstance(optimizer, RowwiseAdagrad):
                self.states.register_buffer(str(at), torch.zeros(rows, dtype=torch.float32, device=device))
        self._ddp_params_and_buffers_to_ignore = [*dict(self.named_parameters()), *dict(self.named_buffers())]
        self.register_load_state_dict_pre_hook(_without_others)  # type: ignore[no-untyped-call]
        self.ran = LayerCalls()
        record_layer(self, self._describe())

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedEmbeddingBags:
        """Copy the module for the same ranks. A process group cannot be copied."""
        made = type(self).__new__(type(self))
        memo |= {id(self): made, id(self.group): self.group}
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def _describe(self) -> CommunicatingLayer:
        return CommunicatingLayer(
            operators=_OPERATORS,
            reason=f"tables {[len(own) for own in self.ranges]} by rank",
            n=sum(map(sum, self.dims)),
            k=self.pooling,
            group=resolve_group(self.group)[0],
            schedule=self.schedule if isinstance(self.schedule, str) else "",
            ran=self.ran,
        )

    def own_bags(self, indices: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's (indices, lengths) from those of all tables. Waits for the device.

        lengths: [T * M], by table, then sample.
        """
        by_table = lengths.view(self.count, -1)
        ends = [0, *by_table.sum(1).cumsum(0).tolist()]
        low, high = ends[self.own.start], ends[self.own.stop]
        return indices[low:high], by_table[self.own.start : self.own.stop].reshape(-1)

    def forward(self, indices: torch.Tensor, lengths: torch.Tensor, *, batch: int | None = None) -> torch.Tensor:
        """Return [m, sum of all dims] for this rank's samples, as torch.chunk cuts the batch.

        indices, lengths: [tables of this rank * M], of this rank's tables, over the whole batch.
        batch: M. A rank without tables must pass it.
        """
        rows = batch if batch is not None or not self.own else lengths.numel() // len(self.own)
        self.ran.record(_OPERATORS, rows, eager=not torch.compiler.is_compiling())
        out = embedding_bag_all_to_all(
            indices,
            None,
            [self.tables[str(at)] for at in self.own],
            self.group,
            lengths=lengths,
            mode=self.mode,
            dims=self.dims,
            batch=batch,
            dtype=self.dtype,
            schedule=self.schedule,
            pooling=self.pooling,
            optimizer=self._optimizer(),
        )
        return _Divided.apply(out, self.size) if self.mean else out  # type: ignore[no-untyped-call]

    def _optimizer(self) -> Optimizer | None:
        if not isinstance(self.optimizer, RowwiseAdagrad):
            return self.optimizer
        return replace(self.optimizer, states=[self.states.get_buffer(str(at)) for at in self.own])


def _without_others(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Remove other ranks' tables from a state that is loaded."""
    assert isinstance(module, ShardedEmbeddingBags)
    for at in range(module.count):
        for kind in ("tables", "states"):
            if at not in module.own:
                state.pop(f"{prefix}{kind}.{at}", None)
