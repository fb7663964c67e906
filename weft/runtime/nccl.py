"""An NcclCollective runs one step of a schedule as a collective of NCCL on plain buffers.

NCCL has kernels of lower latency for buffers that all ranks have registered with its communicator ("symmetric windows"). weft
does not use them, because they do not check whether their communicator has been aborted (2.28.9). If a peer does not come, they
never end. When they are faster than plain ones, so is `sequential_stores`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
import torch.distributed as dist

from weft.compat.c10d import FlatCollectives
from weft.core.problem import Problem
from weft.core.schedule import Collective


class NcclCollective:
    """An NcclCollective is one collective step of one program."""

    def __init__(self, group: dist.ProcessGroup, step: Collective, problem: Problem) -> None:
        self._group, self._step, self._problem = group, step, problem
        self._shards = shards = problem.shards
        self._longest = shards[0][1] - shards[0][0]
        self._even = all(high - low == self._longest for low, high in shards)
        self._flat = FlatCollectives(group, dist.ReduceOp.SUM if step.divide_by == 1 else dist.ReduceOp.AVG)

    @cached_property
    def whole(self) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
        """The function (dst, src) that enqueues the collective on contiguous matrices of equal parts, without any check. None
        for exchanges and unequal parts."""
        if self._step.op == "all_reduce":
            return lambda dst, src: self._plain(src, dst)
        return {"all_gather": self._flat.all_gather, "reduce_scatter": self._flat.reduce_scatter}.get(
            self._step.op if self._even else ""
        )

    def run(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Enqueue the collective on torch's current stream."""
        if self._step.op == "all_to_all":
            self._exchange(src, dst)
        elif self._step.op == "all_to_all_columns":
            self._exchange_columns(src, dst)
        else:
            self._plain(src, dst)

    def rehearse(self, device: torch.device) -> None:
        """Run the same collective with one element for each rank. Collective.

        At first use NCCL makes a communicator, and connections for each kind of collective. This takes a second or more if many
        processes do it.
        """
        one, many = torch.zeros(1, device=device), torch.zeros(len(self._shards), device=device)
        if self._step.op == "all_reduce":
            self._flat.all_reduce(one)
        elif self._step.op == "all_gather":
            self._flat.all_gather(many, one)
        elif self._step.op == "reduce_scatter":
            self._flat.reduce_scatter(one, many)
        else:
            dist.all_to_all_single(torch.empty_like(many), many, group=self._group)

    def _plain(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Run a collective of equal parts. Unequal shards are padded to the longest one for the exchange."""
        if self._step.op == "all_reduce":
            if src.data_ptr() != dst.data_ptr():
                dst.copy_(src)
            self._flat.all_reduce(dst)
        elif self._step.op == "all_gather":
            if self._even:
                self._flat.all_gather(dst, src.contiguous())
            else:
                self._gather_uneven(src, dst)
        elif self._even:
            self._flat.reduce_scatter(dst, src.contiguous())
        else:
            self._scatter_uneven(src, dst)

    def _exchange(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        if self._even:
            # Lists of sizes are omitted, because torch would check them and NCCL would split the exchange.
            dist.all_to_all_single(dst, src.contiguous(), group=self._group)
            return
        low, high = self._shards[self._group.rank()]
        sent, received = [last - first for first, last in self._shards], [high - low] * len(self._shards)
        dist.all_to_all_single(dst, src.contiguous(), received, sent, group=self._group)

    def _exchange_columns(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Run an all-to-all in which each rank sends a block of columns. Concatenate the received blocks."""
        columns = [right - left for left, right in self._problem.blocks]
        gives = [(high - low) * src.shape[1] for low, high in self._shards]
        takes = [dst.shape[0] * width for width in columns]
        landed = src.new_empty(sum(takes))
        if self._even and len(set(columns)) == 1:
            dist.all_to_all_single(landed, src.contiguous().view(-1), group=self._group)
        else:
            dist.all_to_all_single(landed, src.contiguous().view(-1), takes, gives, group=self._group)
        blocks = zip(torch.split(landed, takes), columns, strict=True)
        torch.cat([block.view(dst.shape[0], width) for block, width in blocks], 1, out=dst)

    def _gather_uneven(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        longest = self._longest
        padded = src.new_zeros(longest, src.shape[1])
        padded[: src.shape[0]].copy_(src)
        gathered = src.new_empty(len(self._shards) * longest, src.shape[1])
        self._flat.all_gather(gathered, padded)
        for rank, (low, high) in enumerate(self._shards):
            dst[low:high].copy_(gathered[rank * longest : rank * longest + high - low])

    def _scatter_uneven(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        longest = self._longest
        spread = src.new_zeros(len(self._shards) * longest, src.shape[1])
        for rank, (low, high) in enumerate(self._shards):
            spread[rank * longest : rank * longest + high - low].copy_(src[low:high])
        reduced = src.new_empty(longest, src.shape[1])
        self._flat.reduce_scatter(reduced, spread)
        dst.copy_(reduced[: dst.shape[0]])
