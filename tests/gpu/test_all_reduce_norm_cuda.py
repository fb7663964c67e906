"""matmul_all_reduce_norm on GPUs: every family, dtypes, odd shapes, and a graph that is replayed with new data."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_gpus import GPUS, NEEDS_TWO, alarm
from rank_pools import ranks_on_gpus
from rank_work import NORM_EPS, check_norm

import weft
from weft.runtime.ranks import Ranks
from weft.schedules import names

pytestmark = NEEDS_TWO
SIZE = 4 if GPUS >= 4 else 2
FAMILIES = names("matmul_all_reduce")
SHAPES = [(1, 4096, 512), (16, 8192, 512), (130, 2048, 256), (5, 129, 80)]
"""M, N, K: decode steps, more rows than a tile, odd columns."""
pool = ranks_on_gpus(SIZE, 5.0)


@alarm(60)
def _every_family(dtype: torch.dtype) -> None:
    for m, n, k in SHAPES:
        for name in FAMILIES:
            for seed in range(4):
                check_norm(m, n, k, dtype, name, seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_family_is_right(pool: Ranks, dtype: torch.dtype) -> None:
    pool.run(_every_family, dtype)


@alarm(60)
def _graph(m: int, name: str) -> None:
    n, k, size = 4096, 1024, dist.get_world_size()
    a, b = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k // size), (k // size, n)))
    residual, weight = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, n), (n,)))

    def refill(seed: int) -> None:
        """residual and weight are the same on every rank."""
        for at, tensor in enumerate((a, b, residual, weight)):
            make = torch.Generator("cuda").manual_seed(10 * seed + at + (100_000 * dist.get_rank() if at < 2 else 0))
            tensor.normal_(generator=make)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return weft.matmul_all_reduce_norm(a, b, residual, weight, eps=NORM_EPS, schedule=name)

    refill(0)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        normed, r = call()
    for seed in range(1, 200):
        refill(seed)
        graph.replay()
        wanted = weft.matmul_all_reduce(a, b, residual=residual, schedule=name)
        torch.testing.assert_close(r, wanted)
        normal = torch.nn.functional.rms_norm(r.float(), (n,), weight.float(), NORM_EPS)
        torch.testing.assert_close(normed.float(), normal, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["one_shot", "two_shot", "sequential_stores"])
@pytest.mark.parametrize("m", [1, 64])
def test_a_replayed_graph(pool: Ranks, m: int, name: str) -> None:
    pool.run(_graph, m, name)
