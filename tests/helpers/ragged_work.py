"""What ranks do in tests of splits: draw counts and rows alike on every rank, call, compare with a plain loop."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from rank_work import bound, here

import weft
from weft.core.schedule import Schedule

PATTERNS = ("random", "one_to_all", "all_to_one", "empty_experts", "nothing", "even")


def counts_of(pattern: str, experts: int, seed: int, most: int = 9) -> torch.Tensor:
    """[src_rank, dst_rank, expert], the same on every rank."""
    size = dist.get_world_size()
    drawn = torch.randint(0, most, (size, size, experts), generator=torch.Generator().manual_seed(seed))
    if pattern == "one_to_all":
        drawn[1:] = 0
    elif pattern == "all_to_one":
        drawn[:, 1:] = 0
        drawn[:, 0] += 40
    elif pattern == "empty_experts":
        drawn[:, :, seed % experts] = 0
    elif pattern == "nothing":
        drawn.zero_()
    elif pattern == "even":
        drawn.fill_(most)
    return drawn


class Case:
    """Every rank's rows, weights and counts for one round trip, and what should come of them in float64."""

    def __init__(self, counts: torch.Tensor, k: int, n: int, dtype: torch.dtype, seed: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.counts, self.experts = counts, counts.shape[2]
        generator = torch.Generator().manual_seed(seed)
        self.rows = [torch.randn(int(c.sum()) + 3, k, generator=generator).to(dtype) for c in counts]
        self.b = [(torch.randn(self.experts, k, n, generator=generator) * k**-0.5).to(dtype) for _ in range(self.size)]

    def pieces(self, src_rank: int) -> dict[tuple[int, int], torch.Tensor]:
        """Rows of a rank by (dst_rank, expert)."""
        parts = self.rows[src_rank].split([*self.counts[src_rank].flatten().tolist(), 3])
        return {divmod(i, self.experts): part for i, part in enumerate(parts[:-1])}

    def dispatched(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What `rank` receives, by expert and src_rank, and its product."""
        found = [(e, self.pieces(s)[rank, e].double()) for e in range(self.experts) for s in range(self.size)]
        received = torch.cat([rows for _, rows in found])
        return received, torch.cat([rows @ self.b[rank][e].double() for e, rows in found])


def padded(rows: torch.Tensor, height: int, out: torch.Tensor) -> torch.Tensor:
    """As `out` should be: with zeros below."""
    assert rows.shape[0] <= height
    return torch.cat([rows, rows.new_zeros(height - rows.shape[0], rows.shape[1])]).to(out.device)


def round_trip(
    pattern: str,
    experts: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    seed: int,
    late_s: float = 0.0,
    most: int = 9,
    schedules: tuple[str | Schedule, str | Schedule] = ("auto", "auto"),
) -> None:
    """Dispatch, then combine by the same weights transposed: every row comes home, in its place. schedules: of the two."""
    case = Case(counts_of(pattern, experts, seed, most), k, n, dtype, seed)
    rank, size = case.rank, case.size
    max_rows = room_for(size, experts, most)
    a, b = case.rows[rank].to(here()), case.b[rank].to(here())
    splits = case.counts[rank].to(here(), torch.int32 if seed % 2 else torch.int64)
    time.sleep(late_s)
    there, home_by = schedules
    out, counts, received = weft.all_to_all_matmul(a, b, splits=splits, max_rows=max_rows, return_received=True, schedule=there)
    rows, product = case.dispatched(rank)
    assert torch.equal(counts.cpu().long(), case.counts[:, rank].t())
    assert torch.equal(received, padded(rows.to(dtype), max_rows, received))
    close(out, padded(product, max_rows, out), dtype, k)
    back, home = weft.matmul_all_to_all(out, b.transpose(1, 2), splits=counts, max_rows=max_rows, schedule=home_by)
    assert torch.equal(home.cpu().long(), case.counts[rank])
    wanted = torch.cat(
        [part.double() @ case.b[d][e].double() @ case.b[d][e].double().t() for (d, e), part in case.pieces(rank).items()]
    )
    close(back, padded(wanted, max_rows, back), dtype, n)


def room_for(size: int, experts: int, most: int = 9) -> int:
    """The max_rows of a round trip."""
    return size * experts * (most + 40)


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, k: int) -> None:
    assert got.shape == wanted.shape
    assert got.dtype == dtype
    error = (got.double() - wanted).abs().max().item() if got.numel() else 0.0
    assert error <= bound(dtype, k, 4, wanted) + 1e-12, error
