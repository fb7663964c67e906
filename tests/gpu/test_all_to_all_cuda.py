"""The all-to-all operators on GPUs: every schedule and splits; a late rank; graphs with new data; gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpus import NEEDS_TWO, SIZES, alarm, late
from ragged_work import PATTERNS, counts_of, round_trip
from rank_pools import ranks_on_gpus
from rank_work import bound, here
from test_all_to_all import COMBINE, DISPATCH, check_both
from test_columns import GATHER_SPECS, SPLIT_SPECS
from test_columns import check_both as check_columns

import weft
from weft.runtime.ranks import Ranks

pytestmark = NEEDS_TWO
CALLS = 1000
pool = ranks_on_gpus(SIZES, 10)


@alarm(90)
def _every_schedule(dtype: torch.dtype) -> None:
    for m, n, k in ((512, 256, 384), (253, 129, 77), (5, 7, 3), (288, 0, 64)):
        for name in dict.fromkeys((*COMBINE, *DISPATCH)):
            combine, dispatch = (name if name in names else "sequential" for names in (COMBINE, DISPATCH))
            for call in range(6):
                late(call)
                check_both(m, n, k, dtype, combine, dispatch, call)
    check_both(512, 256, 384, dtype, "auto", "auto", 1)
    weft.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_schedule_is_right_and_skew_does_not_matter(pool: Ranks, dtype: torch.dtype) -> None:
    pool.run(_every_schedule, dtype)


@alarm(90)
def _columns(dtype: torch.dtype) -> None:
    for m, n, k in ((512, 256, 128), (253, 40, 72), (5, 3, 7), (40, 0, 64)):
        for name in dict.fromkeys((*SPLIT_SPECS, *GATHER_SPECS)):
            split_spec, gather_spec = (name if name in names else "sequential" for names in (SPLIT_SPECS, GATHER_SPECS))
            for call in range(6):
                late(call)
                check_columns(m, n, k, dtype, split_spec, gather_spec, call)
    weft.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_columns_are_right_and_skew_does_not_matter(pool: Ranks, dtype: torch.dtype) -> None:
    pool.run(_columns, dtype)


@alarm(90)
def _splits(dtype: torch.dtype) -> None:
    for experts in (1, 4):
        for seed in range(2 * len(PATTERNS)):
            late(seed)
            round_trip(PATTERNS[seed % len(PATTERNS)], experts, 192, 136, dtype, seed, most=300)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_splits_are_right_and_skew_does_not_matter(pool: Ranks, dtype: torch.dtype) -> None:
    pool.run(_splits, dtype)


@alarm(90)
def _graph() -> None:
    """New rows and new counts each replay: there and back by the identity, every row comes home as it was."""
    rank, size = dist.get_rank(), dist.get_world_size()
    experts, width, height = 2, 64, 64 * size
    a = torch.zeros(height, width, device=here(), dtype=torch.bfloat16)
    eye = torch.eye(width, device=here(), dtype=torch.bfloat16).expand(experts, -1, -1).contiguous()
    splits = torch.zeros(size, experts, device=here(), dtype=torch.int32)

    def trip() -> torch.Tensor:
        there, counts = weft.all_to_all_matmul(a, eye, splits=splits, max_rows=height * size)
        return weft.matmul_all_to_all(there, eye, splits=counts, max_rows=height)[0]

    trip()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        home = trip()
    wrong = torch.zeros((), device=here(), dtype=torch.int64)
    for call in range(CALLS):
        pattern = ("random", "one_to_all", "empty_experts", "nothing", "even")[call % 5]
        counts = counts_of(pattern, experts, call, most=30)[rank]
        splits.copy_(counts, non_blocking=True)
        a.normal_()
        if call % 50 == 0:
            late(call // 50)
        graph.replay()
        rows = int(counts.sum())
        wrong += (home[:rows] != a[:rows]).sum() + home[rows:].count_nonzero()
    assert int(wrong) == 0
    weft.close()


def test_a_thousand_replays_with_new_counts(pool: Ranks) -> None:
    pool.run(_graph)


class _Even:
    """A rank's a and b of an even exchange, filled anew with data of which every rank can compute what it should receive."""

    def __init__(self, op: str) -> None:
        self.rank, size = dist.get_rank(), dist.get_world_size()
        options: dict[str, Any] = {"device": here(), "dtype": torch.bfloat16}
        self.op, self.k, self.share = op, 128, slice(64 * self.rank, 64 * (self.rank + 1))
        self.all_a, self.all_b = torch.empty(size, 64 * size, self.k, **options), torch.empty(size, self.k, 256, **options)
        self.a, self.b = torch.empty_like(self.all_a[0]), torch.empty_like(self.all_b[0])
        self.random = torch.Generator(here()).manual_seed(5)

    def refill(self) -> None:
        self.all_a.normal_(generator=self.random)
        self.all_b.normal_(std=self.k**-0.5, generator=self.random)
        self.a.copy_(self.all_a[self.rank])
        self.b.copy_(self.all_b[self.rank])

    def call(self, spec: str) -> torch.Tensor:
        return getattr(weft, self.op)(self.a, self.b, schedule=spec)  # type: ignore[no-any-return]

    def error(self, out: torch.Tensor) -> torch.Tensor:
        """The largest error over what rounding explains, on the GPU: no call waits for the host."""
        rows = self.all_a[:, self.share].float()
        expected = rows @ (self.all_b if self.op == "matmul_all_to_all" else self.all_b[self.rank]).float()
        allowed = bound(torch.bfloat16, self.k, 0, torch.ones(1))
        worst = (out.float() - expected.flatten(0, 1)).abs().max() / (allowed * expected.abs().max())
        return torch.nan_to_num(worst, nan=float("inf"))


@alarm(90)
def _even_graph(op: str, spec: str) -> None:
    """A graph replayed with new data, each rank late in turn, between eager calls of the same program."""
    site = _Even(op)
    site.refill()
    site.call(spec)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = site.call(spec)
    worst = torch.zeros((), device=here())
    for call in range(CALLS):
        site.refill()
        if call % 50 == 0:
            late(call // 50)
        graph.replay()
        worst = torch.maximum(worst, site.error(out))
        if call % 100 == 7:
            worst = torch.maximum(worst, site.error(site.call(spec)))
    assert float(worst) <= 1, (op, spec, float(worst))
    weft.close()


@pytest.mark.parametrize("spec", COMBINE)
def test_a_thousand_replays_of_a_combine(pool: Ranks, spec: str) -> None:
    pool.run(_even_graph, "matmul_all_to_all", spec)


@pytest.mark.parametrize("spec", DISPATCH)
def test_a_thousand_replays_of_a_dispatch(pool: Ranks, spec: str) -> None:
    pool.run(_even_graph, "all_to_all_matmul", spec)


@alarm(90)
def _gradients() -> None:
    """A whole round trip against its own rows: y = x W W^T, row by row, whatever way the rows go."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = counts_of("random", 2, 7, most=100)
    height = int(counts.sum((1, 2)).max())
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(2, 64, 128, generator=generator) / 8).to(here(), torch.bfloat16)  # the same on every rank
    x = torch.randn(height, 64, device=here(), dtype=torch.bfloat16, requires_grad=True)
    w = weight.clone().requires_grad_()
    there, landed = weft.all_to_all_matmul(x, w, splits=counts[rank].to(here()), max_rows=200 * size * 2)
    home, _ = weft.matmul_all_to_all(there, w.transpose(1, 2), splits=landed, max_rows=height)
    home.float().square().sum().backward()
    wide, plain = x.detach().double().requires_grad_(), weight.double().requires_grad_()
    parts = wide[: int(counts[rank].sum())].split(counts[rank].flatten().tolist())
    rows = torch.cat([part @ plain[i % 2] @ plain[i % 2].t() for i, part in enumerate(parts)])
    rows.square().sum().backward()
    total = plain.grad.clone()  # type: ignore[union-attr]
    dist.all_reduce(total)
    mine = w.grad.double()  # type: ignore[union-attr]
    dist.all_reduce(mine)
    for got, wanted in ((x.grad.double(), wide.grad), (mine, total)):  # type: ignore[union-attr]
        assert float((got - wanted).abs().max() / wanted.abs().max()) < 0.03
    weft.close()


def test_gradients_of_a_round_trip(pool: Ranks) -> None:
    pool.run(_gradients)
