"""This module runs lookup steps by torch, for CPUs without Triton."""

from __future__ import annotations

import torch

from weft.core.problem import LookupProblem
from weft.core.schedule import Region
from weft.runtime.bindings import Bindings


def look_up(bindings: Bindings, part_bags: Region, out: Region, problem: LookupProblem) -> None:
    """Store the pooled rows of these bags in out. An index outside its table adds nothing."""
    (low, high), loose = part_bags.rows, bindings.loose
    view = bindings.view(out)
    for at, (left, right) in enumerate(problem.table_columns(part_bags.rank)):
        if part_bags.cols[0] <= left < part_bags.cols[1]:
            bags = slice(at * problem.m + low, at * problem.m + high + 1)
            columns = view[:, left - part_bags.cols[0] : right - part_bags.cols[0]]
            weights = loose["weights"][0] if "weights" in loose else None
            pooled = pool(loose["tables"][at], loose["indices"][0], loose["offsets"][0][bags], weights, problem.mode == "mean")
            columns.copy_(pooled)


def pool(
    table: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, mean: bool
) -> torch.Tensor:
    """Pool the bags indices[offsets[i] : offsets[i + 1]] of one table in float32."""
    ends = offsets.long().clamp(0, indices.numel())
    lengths = ends.diff().clamp(min=0)
    bag = torch.repeat_interleave(lengths)
    places = torch.arange(bag.numel()) + (ends[:-1] - lengths.cumsum(0) + lengths)[bag]
    rows, there = _rows(table, indices[places].long())
    if weights is not None:
        rows *= torch.where(there, weights[places].float(), 0.0)[:, None]
    out = torch.zeros(lengths.numel(), table.shape[1], dtype=torch.float32).index_add_(0, bag, rows)
    return out / lengths.clamp(min=1)[:, None] if mean else out


def _rows(table: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of a table in float32, and whether the table has them. Rows that it does not have are zeros."""
    there = (indices >= 0) & (indices < table.shape[0])
    if not table.shape[0]:
        return torch.zeros(indices.numel(), table.shape[1], dtype=torch.float32), there
    return torch.where(there[:, None], table[indices.clamp(0, table.shape[0] - 1)].float(), 0.0), there
