"""matmul_reduce_scatter on GPUs, by kernels that send: graphs replayed with new data, ranks late in turn, odd shapes."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from rank_work import bound, check_scatter

import weft
from weft.execute.ranks import Ranks
from weft.problem import split

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"needs two or more GPUs, this machine has {GPUS}")]
SIZE = 4 if GPUS >= 4 else 2
ONE_KERNEL = ("one_shot", "sequential_stores")


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(SIZE, device="cuda", environment={"WEFT_TIMEOUT_S": "5"}) as ranks:
        yield ranks


def _odd_shapes(dtype: torch.dtype) -> None:
    """Fewer rows than ranks, an average, columns and K that divide by nothing."""
    faulthandler.dump_traceback_later(40, exit=True)
    for m, n, k, op in ((1, 64, 96, "sum"), (130, 260, 96, "avg"), (253, 129, 77, "sum")):
        for name in ONE_KERNEL:
            for call in range(6):
                check_scatter(m, n, k, dtype, name, call, op=op)
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_odd_shapes_as_one_kernel(pool: Ranks, dtype: torch.dtype) -> None:
    pool.run(_odd_shapes, dtype)


def _replayed(m: int, n: int, name: str) -> None:
    """100 replays, each rank late in turn; all arithmetic of the check on the GPU, so that calls follow each other."""
    faulthandler.dump_traceback_later(40, exit=True)
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
    faulthandler.cancel_dump_traceback_later()


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


def _through_one_descriptor() -> tuple[bool, bool]:
    """Whether tiles go to peers by TMA, and whether short ones, too, are right: by threads."""
    from weft.execute.fused import FusedGemm

    faulthandler.dump_traceback_later(40, exit=True)
    seen, launch = [], FusedGemm.launch

    def watched(self: FusedGemm, *arguments: object, **options: object) -> None:
        launch(self, *arguments, **options)  # type: ignore[arg-type]
        assert self._plans._kept is not None
        _, plan = self._plans._kept
        seen.append(plan.at_peers and plan.far is not None)

    FusedGemm.launch = watched  # type: ignore[method-assign]
    try:
        check_scatter(512, 1024, 256, torch.bfloat16, "direct_store:1", 0)
        check_scatter(700, 1024, 256, torch.bfloat16, "direct_store:1", 1)
    finally:
        FusedGemm.launch = launch  # type: ignore[method-assign]
    faulthandler.cancel_dump_traceback_later()
    return bool(seen), all(seen)


def test_tiles_go_to_peers_through_one_descriptor(pool: Ranks) -> None:
    assert set(pool.run(_through_one_descriptor)) == {(True, True)}
