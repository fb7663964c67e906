"""The operators on GPUs: every schedule, dtype and odd shape; streams; graphs. Failures are in test_failures_cuda.py."""

from __future__ import annotations

import faulthandler

import pytest
import torch
import torch.distributed as dist
from families import TP_NAMES
from on_gpus import NEEDS_TWO, SHARED, SIZES, alarm
from rank_pools import ranks_on_gpus
from rank_work import both_have, check_both, check_gather, check_scatter, here, whole
from silenced_rank import on_the_slow_path

import weft
from weft.core.problem import split
from weft.runtime.ranks import Ranks

pytestmark = NEEDS_TWO
SHAPES = [(512, 256, 384), (128, 64, 64), (253, 129, 77), (5, 7, 3)]
BOUND_S = 5.0
pool = ranks_on_gpus(SIZES, BOUND_S)


@alarm(90)
def _every_schedule(dtype: torch.dtype) -> None:
    for turn, (m, n, k) in enumerate(SHAPES):
        for name in TP_NAMES:
            for repeat in range(6):
                check_both(m, n, k, dtype, name, 100 * turn + repeat)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_schedule_is_right(pool: Ranks, dtype: torch.dtype) -> None:
    pool.run(_every_schedule, dtype)


@alarm(90)
def _slow(what: str) -> None:
    """One rank's kernels, or its copies, come late in every call; data is new each time."""
    from weft.runtime.cuda_resources import CudaResources
    from weft.runtime.launches import KernelLaunch
    from weft.runtime.products import Products

    multiply, stream, issue = Products.multiply, CudaResources.stream, KernelLaunch.issue
    if dist.get_rank() == 1 and what == "compute":

        def late(*arguments: object, **options: object) -> None:
            torch.cuda._sleep(2_000_000)
            multiply(*arguments, **options)  # type: ignore[arg-type]

        def late_kernel(*arguments: object, **options: object) -> None:
            torch.cuda._sleep(2_000_000)
            issue(*arguments, **options)  # type: ignore[arg-type]

        Products.multiply, KernelLaunch.issue = late, late_kernel  # type: ignore[method-assign, assignment]
    if dist.get_rank() == 1 and what == "transport":

        def sleepy(self: CudaResources, name: str) -> torch.cuda.Stream:
            found = stream(self, name)
            with torch.cuda.stream(found):
                torch.cuda._sleep(2_000_000)
            return found

        CudaResources.stream = sleepy  # type: ignore[method-assign]
    try:
        with on_the_slow_path():
            for call in range(6):
                for name in TP_NAMES:
                    check_both(253, 129, 77, torch.bfloat16, name, call)
    finally:
        Products.multiply, CudaResources.stream, KernelLaunch.issue = multiply, stream, issue  # type: ignore[method-assign]


@pytest.mark.parametrize("what", ["compute", "transport"])
def test_a_slow_rank(pool: Ranks, what: str) -> None:
    pool.run(_slow, what)


@alarm(60)
def _on_a_side_stream() -> None:
    side = torch.cuda.Stream()
    a, b, expected = whole(256, 128, 64, torch.bfloat16, 1)
    rank, size = dist.get_rank(), dist.get_world_size()
    (low, high), (left, right) = split(256, size)[rank], split(128, size)[rank]
    for name in TP_NAMES:
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            fresh = a[low:high] * 1.0
            out = weft.all_gather_matmul(fresh, b[:, left:right], schedule=name)
        torch.cuda.current_stream().wait_stream(side)
        torch.testing.assert_close(out.double(), expected[:, left:right], rtol=2e-2, atol=2e-2)


def test_any_stream_of_the_user(pool: Ranks) -> None:
    pool.run(_on_a_side_stream)


@alarm(90)
def _graphs() -> None:
    """Each schedule captured, and replayed with new data, between eager calls of the same and of the other operator."""
    rank, size = dist.get_rank(), dist.get_world_size()
    m, n, k = 512, 256, 384
    rows, cols, inner = slice(*split(m, size)[rank]), slice(*split(n, size)[rank]), slice(*split(k, size)[rank])
    for name in TP_NAMES:
        check_both(m, n, k, torch.bfloat16, name, 0)
        a, b, _ = whole(m, n, k, torch.bfloat16, 0)
        shard, right, left, below = a[rows].clone(), b[:, cols].clone(), a[:, inner].clone(), b[inner].clone()
        weft.all_gather_matmul(shard, right, schedule=name)
        if both_have(name):
            weft.matmul_reduce_scatter(left, below, schedule=name)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            gathered = weft.all_gather_matmul(shard, right, schedule=name)
            scattered = weft.matmul_reduce_scatter(left, below, schedule=name) if both_have(name) else None
        for replay in range(6):
            a, b, expected = whole(m, n, k, torch.bfloat16, 10 + replay)
            for old, new in ((shard, a[rows]), (right, b[:, cols]), (left, a[:, inner]), (below, b[inner])):
                old.copy_(new)
            graph.replay()
            torch.testing.assert_close(gathered.double(), expected[:, cols], rtol=2e-2, atol=2e-2)
            if scattered is not None:
                torch.testing.assert_close(scattered.double(), expected[rows], rtol=2e-2, atol=3e-2)
            if replay % 2:
                check_both(m, n, k, torch.bfloat16, name, replay)


def test_graphs_replayed_between_eager_calls(pool: Ranks) -> None:
    pool.run(_graphs)


@alarm(60)
def _two_streams() -> None:
    """Two operators in flight at once, without a wait of the host between calls."""
    rank, size = dist.get_rank(), dist.get_world_size()
    m, n, k = 512, 256, 384
    a, b, expected = whole(m, n, k, torch.bfloat16, 3)
    rows, cols, inner = slice(*split(m, size)[rank]), slice(*split(n, size)[rank]), slice(*split(k, size)[rank])
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for name in TP_NAMES[1:]:
        outs = []
        for call in range(8):
            with torch.cuda.stream(streams[call % 2]):
                outs.append((weft.all_gather_matmul(a[rows], b[:, cols], schedule=name), expected[:, cols]))
                if both_have(name):
                    outs.append((weft.matmul_reduce_scatter(a[:, inner], b[inner], schedule=name), expected[rows]))
        torch.cuda.synchronize()
        for out, wanted in outs:
            torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=3e-2)


def test_two_operators_in_flight(pool: Ranks) -> None:
    pool.run(_two_streams)


def _capture_unseen() -> None:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    a, b = torch.ones(64, 64, device="cuda").bfloat16(), torch.ones(64, 48, device="cuda").bfloat16()
    with pytest.raises(ValueError, match="call it once with these sizes before capturing a graph"):  # noqa: SIM117
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            weft.all_gather_matmul(a, b, schedule="flag_gated")


def test_a_capture_without_a_call_before_is_refused(pool: Ranks) -> None:
    pool.run(_capture_unseen)


def _large() -> None:
    """More than 2^31 elements: of the gathered a, and of the partial products. A few rows of each are compared."""
    rank, size = dist.get_rank(), dist.get_world_size()
    m, k, n = 262_144 + 64 * size, 8200, 64
    torch.manual_seed(rank)
    a = torch.randn(m // size, k, device=here(), dtype=torch.bfloat16)
    torch.manual_seed(99)
    b = (torch.randn(k, n * size, device=here()) * k**-0.5).bfloat16()
    assert m * k > 2**31
    for name in ("flag_gated:1", "direct_store:1", "sequential_stores", "shard_p2p"):
        faulthandler.dump_traceback_later(180 if SHARED else 60, exit=True)
        out = weft.all_gather_matmul(a, b[:, rank * n : (rank + 1) * n], schedule=name)
        for peer in range(size):
            torch.manual_seed(peer)
            rows = torch.randn(m // size, k, device=here(), dtype=torch.bfloat16)[-3:]
            got = out[(peer + 1) * (m // size) - 3 : (peer + 1) * (m // size)]
            wanted = rows.double() @ b[:, rank * n : (rank + 1) * n].double()
            torch.testing.assert_close(got.double(), wanted, rtol=2e-2, atol=2e-2)
        del out
        weft.close()
        torch.cuda.empty_cache()
    for name in ("track_and_trigger:1", "direct_store:1", "sequential_stores", "shard_p2p"):
        faulthandler.dump_traceback_later(180 if SHARED else 60, exit=True)
        torch.manual_seed(99)
        left = torch.randn(m, 64 * size, device=here(), dtype=torch.bfloat16)
        right = (torch.randn(64 * size, k, device=here()) / 8).bfloat16()
        inner = slice(64 * rank, 64 * (rank + 1))
        out = weft.matmul_reduce_scatter(left[:, inner].contiguous(), right[inner], schedule=name)
        high = split(m, size)[rank][1]
        wanted = left[high - 3 : high].double() @ right.double()
        torch.testing.assert_close(out[-3:].double(), wanted, rtol=4e-2, atol=8e-2)
        del out, left, right
        weft.close()
        torch.cuda.empty_cache()
    faulthandler.cancel_dump_traceback_later()


def test_more_than_2_to_the_31_elements(pool: Ranks) -> None:
    pool.run(_large)


@alarm(60)
def _gradients() -> None:
    """Backward of both, bf16, against the sequential program in float32."""
    rank, size = dist.get_rank(), dist.get_world_size()
    m, n, k = 256, 128, 192
    a, b, _ = whole(m, n, k, torch.bfloat16, 5)
    rows, cols, inner = (slice(*split(extent, size)[rank]) for extent in (m, n, k))
    weights = torch.randn(m, n, generator=torch.Generator().manual_seed(6)).to(here())
    left, right = a.float().requires_grad_(), b.float().requires_grad_()
    ((left @ right) * weights).sum().backward()
    assert left.grad is not None
    assert right.grad is not None
    for name in ("auto", "flag_gated:1", "track_and_trigger:1"):
        mine, other = a[rows].clone().requires_grad_(), b[:, cols].clone().requires_grad_()
        (weft.all_gather_matmul(mine, other, schedule=name) * weights[:, cols].bfloat16()).sum().backward()
        torch.testing.assert_close(mine.grad.float(), left.grad[rows], rtol=5e-2, atol=0.3)  # type: ignore[union-attr]
        torch.testing.assert_close(other.grad.float(), right.grad[:, cols], rtol=5e-2, atol=0.5)  # type: ignore[union-attr]
        mine, other = a[:, inner].clone().requires_grad_(), b[inner].clone().requires_grad_()
        (weft.matmul_reduce_scatter(mine, other, schedule=name) * weights[rows].bfloat16()).sum().backward()
        torch.testing.assert_close(mine.grad.float(), left.grad[:, inner], rtol=5e-2, atol=0.3)  # type: ignore[union-attr]
        torch.testing.assert_close(other.grad.float(), right.grad[inner], rtol=5e-2, atol=0.5)  # type: ignore[union-attr]


def test_backward(pool: Ranks) -> None:
    pool.run(_gradients)


@alarm(60)
def _replays_where_addresses_move() -> None:
    """Calls whose tensors lie elsewhere each time, between calls whose tensors come back to where they were."""
    for call in range(24):
        away = [torch.empty(1 << 20, device=here()) for _ in range(call % 3)]
        check_gather(256, 128, 192, torch.bfloat16, "flag_gated:2", call)
        check_scatter(256, 128, 192, torch.bfloat16, "track_and_trigger:2", call)
        del away


def test_tensors_that_move(pool: Ranks) -> None:
    pool.run(_replays_where_addresses_move)


@alarm(90)
def _many_calls() -> tuple[int, int]:
    seen = []
    for call in range(200):
        check_gather(253, 129, 77, torch.bfloat16, TP_NAMES[call % len(TP_NAMES)], call)
        if call in (50, 199):
            torch.cuda.synchronize()
            seen.append(torch.cuda.memory_allocated())
    return seen[0], seen[1]


def test_two_hundred_calls_grow_nothing(pool: Ranks) -> None:
    for early, late in pool.run(_many_calls):
        assert late <= early
