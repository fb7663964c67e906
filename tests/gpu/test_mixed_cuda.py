"""weft's programs of two groups and NCCL's collectives, in flight together on several streams: none holds another up for good.

Each round draws an order of calls, the same on all ranks, and for each call a stream. Delays are drawn by each rank for itself,
so that one rank's kernels are resident when another's have not started. What ends a wait at its bound fails the test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from on_gpus import NEEDS_TWO, SHARED, alarm, fewer
from rank_pools import ranks_on_gpus

import weft

pytestmark = NEEDS_TWO
BOUND_S = 20.0
STREAMS, CALLS = 3, 6
M, N, K = 512, 1024, 512
pool = ranks_on_gpus(2, BOUND_S)


@dataclass(frozen=True)
class Job:
    """A call, and what it must give."""

    name: str
    call: Callable[[], torch.Tensor]
    wanted: torch.Tensor


def _jobs(group: dist.ProcessGroup, other: dist.ProcessGroup, nccl: dist.ProcessGroup) -> list[Job]:
    """Calls whose kernels wait on SMs for peers, whose copies take SMs, and NCCL's beside them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    a = torch.randn(M, K, device="cuda").bfloat16()
    b = (torch.randn(K, N, device="cuda") * K**-0.5).bfloat16()
    rows = slice(rank * M // size, (rank + 1) * M // size)
    inner = slice(rank * K // size, (rank + 1) * K // size)
    few, x = a[:4], torch.full((1 << 18,), float(rank), device="cuda")
    left, right = a[:, inner].contiguous(), b[inner].contiguous()
    product = a.float() @ b.float()

    def gather(of: dist.ProcessGroup, schedule: str) -> Callable[[], torch.Tensor]:
        return lambda: weft.all_gather_matmul(a[rows], b, of, schedule=schedule)

    def scatter(of: dist.ProcessGroup, schedule: str) -> Callable[[], torch.Tensor]:
        return lambda: weft.matmul_reduce_scatter(left, right, of, schedule=schedule)

    def few_rows(of: dist.ProcessGroup, schedule: str) -> Callable[[], torch.Tensor]:
        return lambda: weft.matmul_all_reduce(few[:, inner], right, of, schedule=schedule)

    def reduced() -> torch.Tensor:
        out = x.clone()
        dist.all_reduce(out, group=nccl)
        return out

    def gathered() -> torch.Tensor:
        out = x.new_empty(size * x.numel())
        dist.all_gather_into_tensor(out, x, group=nccl)
        return out

    total, ends = torch.full_like(x, size * (size - 1) / 2), torch.arange(size, device="cuda", dtype=x.dtype)
    return [
        Job("gather, copy engines", gather(group, "flag_gated:2"), product),
        Job("gather, stores from SMs", gather(group, "direct_store:2"), product),
        Job("gather, the other group", gather(other, "direct_store:2"), product),
        Job("scatter, stores from SMs", scatter(group, "direct_store:2"), product[rows]),
        Job("scatter, the other group", scatter(other, "track_and_trigger:2"), product[rows]),
        Job("few rows", few_rows(group, "one_shot"), product[:4]),
        Job(
            "few rows, two hops", lambda: weft.matmul_all_reduce(few[:, inner], right, other, schedule="two_shot"), product[:4]
        ),
        Job("NCCL all_reduce", reduced, total),
        Job("NCCL all_gather", gathered, ends.repeat_interleave(x.numel())),
    ]


@alarm(270)
def _mixed(rounds: int, seed: int) -> int:
    everyone = list(range(dist.get_world_size()))
    groups = [dist.new_group(everyone, backend="cpu:gloo,cuda:nccl") for _ in range(3)]
    jobs = _jobs(*groups)
    for job in jobs:  # bound one after the other, before any of them waits for another
        torch.testing.assert_close(job.call().float(), job.wanted.float(), rtol=3e-2, atol=3e-2, msg=job.name)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    same, mine = random.Random(seed), random.Random(1000 * seed + dist.get_rank())
    for _ in range(rounds):
        drawn = [(same.choice(jobs), same.choice(streams)) for _ in range(CALLS)]
        found: list[tuple[Job, torch.Tensor]] = []
        for job, stream in drawn:
            with torch.cuda.stream(stream):
                if mine.random() < 0.3:
                    torch.cuda._sleep(mine.randrange(400_000))
                found.append((job, job.call()))
        torch.cuda.synchronize()
        for job, out in found:
            torch.testing.assert_close(out.float(), job.wanted.float(), rtol=3e-2, atol=3e-2, msg=job.name)
    for group in groups[:2]:
        weft.close(group)
    for group in groups:
        dist.destroy_process_group(group)
    return rounds


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.timeout(600)
def test_programs_and_collectives_on_several_streams(pool: object, seed: int) -> None:
    rounds = fewer(2000)
    assert pool.run(_mixed, rounds, seed, timeout_s=280 * (3 if SHARED else 1)) == [rounds] * 2  # type: ignore[attr-defined]
