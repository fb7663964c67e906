"""`weft run` uses this module for embedding layers: it draws one rank's tables and bags, makes calls, and measures errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

from weft.core.problem import LookupProblem
from weft.core.span import Span
from weft.runtime.calls import LookupCall

ROWS = 10_000
"""The number of rows of a table. A CPU's caches hold only a small part of such a table."""


@dataclass(frozen=True, kw_only=True)
class LookupInputs:
    """LookupInputs has one rank's tables and bags. A bag has from 0 to twice the problem's K indices."""

    problem: LookupProblem
    tables: list[torch.Tensor]
    indices: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def draw(cls, problem: LookupProblem, rank: int, seed: int, on: torch.device) -> LookupInputs:
        generator = torch.Generator(device=on).manual_seed((seed * 1009 + rank) % 2**62)
        dtype = getattr(torch, problem.dtype)
        tables = [torch.randn(ROWS, dim, generator=generator, device=on).to(dtype) for dim in problem.dims[rank]]
        bags = len(tables) * problem.m
        lengths = torch.randint(0, 2 * problem.k + 1, (bags,), generator=generator, device=on)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        indices = torch.randint(0, ROWS, (int(offsets[-1]),), generator=generator, device=on)
        return cls(problem=problem, tables=tables, indices=indices, offsets=offsets)

    @property
    def device(self) -> torch.device:
        return self.indices.device

    def call(self, spec: str, spans: list[Span] | None) -> LookupCall:
        problem = self.problem
        return LookupCall(
            op="embedding_bag_all_to_all",
            schedule=spec,
            spans=spans,
            tables=self.tables,
            indices=self.indices,
            offsets=self.offsets,
            weights=None,
            batch=problem.m,
            dims=problem.dims,
            mode=problem.mode,
            dtype=getattr(torch, problem.dtype),
            pooling=problem.k,
        )

    def error(self, out: torch.Tensor, rank: int) -> float:
        """Return the largest difference from torch's lookups in float32, relative to their largest element. Collective."""
        low, high = self.problem.shards[rank]
        worst, largest = 0.0, 0.0
        for owner, (left, right) in enumerate(self.problem.b_shards):
            columns = torch.empty(self.problem.m, right - left, device=self.device)
            if owner == rank:
                columns.copy_(self._pooled())
            dist.broadcast(columns, src=owner)
            wanted, got = columns[low:high], out[:, left:right].float()
            if wanted.numel():
                difference = torch.nan_to_num((got - wanted).abs().max(), nan=float("inf"))
                worst, largest = max(worst, float(difference)), max(largest, float(wanted.abs().max()))
        return worst / largest if largest > 0 else worst

    def _pooled(self) -> torch.Tensor:
        """Return the pooled rows of the whole batch, with the columns of all tables side by side."""
        found = [torch.empty(self.problem.m, 0, device=self.device)]
        for at, table in enumerate(self.tables):
            offsets = self.offsets[at * self.problem.m : (at + 1) * self.problem.m + 1]
            indices = self.indices[int(offsets[0]) : int(offsets[-1])]
            starts, mode = offsets - offsets[0], self.problem.mode
            found.append(embedding_bag(indices, table.float(), starts, mode=mode, include_last_offset=True))
        return torch.cat(found, 1)
