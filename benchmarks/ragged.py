"""All-to-alls in drawn shares, one expert's rows after the other, on one rank: everything that is timed, by name (rows.py).

M rows of each rank for `experts` experts of each rank, in shares drawn anew by rank, one in four twice as large. Sequential is
torch._grouped_mm and NCCL with splits that the host knows: a real program of this kind would wait for the device to learn them.
Traps: rows that land by source are regrouped by expert before a grouped matmul, which is in its time; weft's results have
max_rows = 2 M rows, of which those past the counts are zeroed, in its time.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import weft
from benchmarks.measure import Work
from weft.core.problem import Op


def drawn(*extents: int) -> torch.Tensor:
    return torch.randn(*extents, device="cuda", dtype=torch.bfloat16)


class Ragged:
    """counts[src_rank, dst_rank, expert]: rows, which hosts of the baseline know. m, k, n, experts: of each rank."""

    def __init__(self, op: Op, m: int, k: int, n: int, experts: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.m, self.dispatch = m, op == "all_to_all_matmul"
        self.travelling, self.inner = k if self.dispatch else n, k
        self.counts = shares(m, experts, size)
        mine = self.counts[rank] if self.dispatch else self.counts[rank].t()
        self.splits = mine.to("cuda", torch.int32).contiguous()
        self.a, self.b = drawn(m, k), drawn(experts, k, n) * k**-0.5
        self.sent, self.got = self.counts[rank].sum(1).tolist(), self.counts[:, rank].sum(1).tolist()
        arriving = self.counts[:, rank]
        self.grouped = regrouped(arriving if self.dispatch else mine)
        groups = arriving.sum(0) if self.dispatch else mine.sum(1)
        self.offsets = groups.cumsum(0).to("cuda", torch.int32)

    def exchange(self, rows: torch.Tensor) -> torch.Tensor:
        landed = rows.new_empty(sum(self.got), rows.shape[1])
        dist.all_to_all_single(landed, rows, self.got, self.sent)
        return landed

    def matmul(self, rows: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(rows, self.b, offs=self.offsets)

    def sequential(self) -> torch.Tensor:
        if self.dispatch:
            return self.matmul(self.exchange(self.a)[self.grouped])
        return self.exchange(self.matmul(self.a)[self.grouped])

    def fused(self) -> torch.Tensor:
        """As many rows as sequential has: the host reads no counts."""
        call = weft.all_to_all_matmul if self.dispatch else weft.matmul_all_to_all
        out: torch.Tensor = call(self.a, self.b, splits=self.splits, max_rows=2 * self.m)[0]
        return out[: sum(self.got)]

    def works(self) -> dict[str, Work]:
        travelling = drawn(self.m, self.travelling)
        computed = drawn(sum(self.got) if self.dispatch else self.m, self.inner)
        return {
            "sequential/default": self.sequential,
            "communication/default": lambda: self.exchange(travelling),
            "computation/cublas": lambda: self.matmul(computed),
            "weft/splits": self.fused,
        }


def shares(m: int, experts: int, size: int) -> torch.Tensor:
    """Rows by src_rank, dst_rank, expert; m of each src_rank. The same on every rank."""
    weights = torch.rand(size, size, experts, generator=torch.Generator().manual_seed(m)) + 0.5
    weights[..., ::4] *= 2
    counts = (weights / weights.sum((1, 2), keepdim=True) * m).long()
    counts[:, 0, 0] += m - counts.sum((1, 2))
    return counts


def regrouped(counts: torch.Tensor) -> torch.Tensor:
    """The order that takes rows which lie by counts' (first, second) to (second, first)."""
    first, second = counts.shape
    pieces = torch.arange(int(counts.sum())).split(counts.flatten().tolist())  # type: ignore[no-untyped-call]
    return torch.cat([pieces[i * second + j] for j in range(second) for i in range(first)]).to("cuda")
