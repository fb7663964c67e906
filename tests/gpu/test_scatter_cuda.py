"""matmul_reduce_scatter on GPUs, by kernels that send: graphs replayed with new data, ranks late in turn, odd shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpus import GPUS, NEEDS_TWO, alarm
from rank_pools import ranks_on_gpus
from rank_work import bound, check_scatter

import weft
from weft.core.problem import split
from weft.runtime.bindings import Bindings
from weft.runtime.ranks import Ranks

pytestmark = NEEDS_TWO
SIZE = 4 if GPUS >= 4 else 2
ONE_KERNEL = ("one_shot", "sequential_stores")
pool = ranks_on_gpus(SIZE, 5)


@alarm(40)
def _odd_shapes(dtype: torch.dtype) -> None:
    """Fewer rows than ranks, an average, columns and K that divide by nothing."""
    for m, n, k, op in ((1, 64, 96, "sum"), (130, 260, 96, "avg"), (253, 129, 77, "sum")):
        for name in ONE_KERNEL:
            for call in range(6):
                check_scatter(m, n, k, dtype, name, call, op=op)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_odd_shapes_as_one_kernel(pool: Ranks, dtype: torch.dtype) -> None:
    pool.run(_odd_shapes, dtype)


@alarm(40)
def _replayed(m: int, n: int, name: str) -> None:
    """100 replays, each rank late in turn; all arithmetic of the check on the GPU, so that calls follow each other."""
    rank, size, k = dist.get_rank(), dist.get_world_size(), 2048
    (low, high), (left, right) = split(m, size)[rank], split(k, size)[rank]
    whole_a, whole_b = (torch.empty(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    a, b = (torch.empty(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, right - left), (right - left, n)))
    random = torch.Generator("cuda").manual_seed(5)

    def refill() -> None:
        whole_a.normal_(generator=random)
        whole_b.normal_(std=k**-0.5, generator=random)
        a.copy_(whole_a[:, left:right])
        b.copy_(whole_b[left:right])

    def error(out: torch.Tensor) -> torch.Tensor:
        expected = whole_a[low:high].float() @ whole_b.float()
        allowed = bound(torch.bfloat16, k, 2 * size, torch.ones(1)) * expected.abs().max()
        return torch.nan_to_num((out.float() - expected).abs().max() / allowed, nan=float("inf"))

    refill()
    worst = error(weft.matmul_reduce_scatter(a, b, schedule=name))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = weft.matmul_reduce_scatter(a, b, schedule=name)
    for replay in range(100):
        refill()
        if replay % 10 == 3 and rank == replay // 10 % size:
            torch.cuda._sleep(5_000_000)
        graph.replay()
        worst = torch.maximum(worst, error(out))
    assert float(worst) <= 1, (name, m, n, float(worst))


@pytest.mark.parametrize(
    ("m", "n", "name"),
    [
        (128, 2048, "one_shot"),
        (512, 2048, "sequential_stores"),
        (512, 8192, "direct_store:1"),
        (2048, 4096, "direct_store:2"),
        (2048, 4256, "direct_store:1"),
        (2048, 4096, "track_and_trigger:1"),
        (2048, 4256, "track_and_trigger:2"),
    ],
)
def test_replayed_graphs(pool: Ranks, m: int, n: int, name: str) -> None:
    """Waves of tiles and of half tiles; rows of 8512 bytes are none that one descriptor has at several peers."""
    pool.run(_replayed, m, n, name)


@alarm(40)
def _through_one_descriptor() -> tuple[bool, bool]:
    """Whether tiles go to peers by TMA, and whether short ones, too, are right: by threads."""
    from weft.runtime.fused import FusedGemm

    seen, launch = [], FusedGemm.launch

    def watched(self: FusedGemm, bindings: Bindings, **options: Any) -> None:
        launch(self, bindings, **options)
        plan = self.tables.of(bindings)
        seen.append(plan.at_peers and plan.scattered is not None)

    FusedGemm.launch = watched  # type: ignore[method-assign]
    try:
        check_scatter(512, 1024, 256, torch.bfloat16, "direct_store:1", 0)
        check_scatter(700, 1024, 256, torch.bfloat16, "direct_store:1", 1)
    finally:
        FusedGemm.launch = launch  # type: ignore[method-assign]
    return bool(seen), all(seen)


def test_tiles_go_to_peers_through_one_descriptor(pool: Ranks) -> None:
    assert set(pool.run(_through_one_descriptor)) == {(True, True)}
