"""embedding_bag_all_to_all on GPUs: every schedule and option, graphs with new data, a late rank, and the backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from embedding_backward import check_gradients, check_optimizer, flow, ready
from embedding_work import SPECS, Case, cases, check, draw, expected
from on_gpus import NEEDS_TWO, SIZES, alarm
from rank_pools import ranks_on_gpus

import weft
from weft.runtime.ranks import Ranks

pytestmark = NEEDS_TWO
BOUND_S = 10.0
pool = ranks_on_gpus(SIZES, BOUND_S)


@alarm(90)
def _every_schedule() -> None:
    wide = Case(dims=((64, 92, 128, 1500),) * dist.get_world_size(), batch=301, rows=(1000, 2000), lengths=40)
    long = Case(dims=((128,),) * dist.get_world_size(), batch=9, rows=(5000,), lengths=(0, 10_000, 1), exact=True)
    for turn, case in enumerate((*cases(dist.get_world_size()), wide, long)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16)[: 1 if case.exact else 3]:
            for spec in SPECS:
                for repeat in range(2):
                    check(replace(case, dtype=dtype), spec, 10 * turn + repeat)


def test_every_schedule_is_right(pool: Ranks) -> None:
    pool.run(_every_schedule)


@alarm(60)
def _late() -> None:
    """A rank's kernels start 5 ms late in every call; data is new each time."""
    case = Case(dims=((64, 32),) * dist.get_world_size(), batch=1024, rows=(5000,), lengths=30)
    for spec in SPECS:
        for call in range(6):
            if dist.get_rank() == call % 2:
                torch.cuda._sleep(10_000_000)
            check(case, spec, call)


def test_a_rank_that_is_late(pool: Ranks) -> None:
    pool.run(_late)


@alarm(90)
def _graph(spec: str) -> None:
    """1,000 calls of one graph, new bags each: other lengths, other indices, in the same memory."""
    rank, calls, capacity = dist.get_rank(), 1000, 4096
    case = Case(dims=((64, 32),) * dist.get_world_size(), batch=64, rows=(1000,), lengths=20)
    first = draw(case, 0, rank)
    indices = torch.zeros(capacity, dtype=torch.int64, device="cuda")
    offsets = first.offsets.clone()
    drawn = [draw(case, seed, rank) for seed in range(10)]
    wanted = [expected(case, seed, rank) for seed in range(10)]

    def call() -> torch.Tensor:
        return weft.embedding_bag_all_to_all(indices, offsets, first.tables, schedule=spec)

    def fill(seed: int) -> None:
        indices[: drawn[seed].indices.numel()].copy_(drawn[seed].indices)
        offsets.copy_(drawn[seed].offsets)
        for table, other in zip(first.tables, drawn[seed].tables, strict=True):
            table.copy_(other)

    call()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()
    worst = torch.zeros((), device="cuda", dtype=torch.float64)
    for turn in range(calls):
        fill(turn % 10)
        graph.replay()
        worst = torch.maximum(worst, (out.double() - wanted[turn % 10]).abs().max())
    assert float(worst) < 1e-3


@pytest.mark.parametrize("spec", ["sequential", "track_and_trigger:1", "direct_store:1"])
def test_a_graph_with_new_data_each_time(pool: Ranks, spec: str) -> None:
    pool.run(_graph, spec)


def _index_types() -> None:
    """One program serves all types of indices, and vectors that begin anywhere."""
    case = Case(dims=((64, 32),) * dist.get_world_size(), batch=100, rows=(1000,), lengths=20)
    for spec in SPECS:
        for index in (torch.int64, torch.int32):
            check(replace(case, index=index), spec, 1)
            check(replace(case, index=index, weighted=True), spec, 2)
        drawn = draw(case, 3, dist.get_rank())
        shifted = torch.cat([drawn.indices[:1], drawn.indices])[1:]
        out = weft.embedding_bag_all_to_all(shifted, drawn.offsets, drawn.tables, schedule=spec)
        torch.testing.assert_close(out.double(), expected(case, 3, dist.get_rank()), atol=1e-4, rtol=0)


def test_types_of_indices(pool: Ranks) -> None:
    pool.run(_index_types)


def _bad_index() -> None:
    """Checked, it is named; unchecked, it adds nothing, and nothing around the tables is read."""
    case, rank = Case(dims=((64,),) * dist.get_world_size(), batch=50, rows=(1000,), lengths=(5,)), dist.get_rank()
    drawn = draw(case, 0, rank)
    bad = drawn.indices.clone()
    bad[7::10], bad[2::10] = 10**12, -1
    good = torch.where((bad < 0) | (bad >= 1000), 0, bad)
    weights = (bad == good).float()
    options = {"schedule": "direct_store:1", "dims": case.dims}
    wanted = weft.embedding_bag_all_to_all(good, drawn.offsets, drawn.tables, per_sample_weights=weights, **options)
    for _ in range(3):
        out = weft.embedding_bag_all_to_all(bad, drawn.offsets, drawn.tables, **options)
        torch.testing.assert_close(out, wanted)
    with pytest.raises(IndexError, match=r"indices\[2\], in bag 0 of table 0, is -1"):
        weft.embedding_bag_all_to_all(bad, drawn.offsets, drawn.tables, checked=True, **options)
    offsets = drawn.offsets.clone()
    offsets[10:] += 10**9
    weft.embedding_bag_all_to_all(drawn.indices, offsets, drawn.tables, **options)
    torch.cuda.synchronize()


def test_indices_out_of_range(pool: Ranks) -> None:
    pool.run(_bad_index)


@alarm(90)
def _backward() -> None:
    size = dist.get_world_size()
    uneven = tuple((64, 92, 1500)[: 1 + rank % 3] for rank in range(size - 1))
    for turn, dtype in enumerate((torch.float32, torch.bfloat16)):
        case = Case(dims=(*uneven, ()), batch=131, rows=(300, 5, 2000), lengths=12, dtype=dtype)
        check_gradients(replace(case, weighted=True, spare=7), "direct_store:1", turn)
        check_gradients(replace(case, mode="mean", index=torch.int32), "track_and_trigger:1", turn)
        check_gradients(replace(case, mode="mean"), "sequential", turn, sparse=True)
        for kind in ("sgd", "adagrad"):
            check_optimizer(case, "direct_store:1", turn, kind)


def test_backward(pool: Ranks) -> None:
    pool.run(_backward)


def _captured_step() -> None:
    """Forward, backward and the optimizer in one graph: three replays are three steps."""
    rank = dist.get_rank()
    case = Case(dims=((64, 32),) * dist.get_world_size(), batch=64, rows=(100,), lengths=8)
    drawn, optimizer = ready(case, 0), weft.RowwiseAdagrad(lr=0.1, eps=1e-3)
    grad = flow(case, 0, rank).cuda()

    def step() -> None:
        out = weft.embedding_bag_all_to_all(
            drawn.indices, drawn.offsets, drawn.tables, schedule="direct_store:1", optimizer=optimizer
        )
        out.backward(grad)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    once, again = ready(case, 0), weft.RowwiseAdagrad(lr=0.1, eps=1e-3)
    for _ in range(5):
        out = weft.embedding_bag_all_to_all(once.indices, once.offsets, once.tables, schedule="sequential", optimizer=again)
        out.backward(grad)
    for mine, theirs in zip(drawn.tables, once.tables, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_captured_training_step(pool: Ranks) -> None:
    pool.run(_captured_step)


def _auto_and_compile() -> None:
    case, rank = Case(dims=((64, 92),) * dist.get_world_size(), batch=256, rows=(1000,), lengths=20), dist.get_rank()
    check(case, "auto", 0)
    drawn = draw(case, 1, rank)

    def step(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return weft.embedding_bag_all_to_all(indices, offsets, drawn.tables, schedule="direct_store:1") * 2

    out = torch.compile(step, fullgraph=True)(drawn.indices, drawn.offsets)
    torch.testing.assert_close(out.double(), 2 * expected(case, 1, rank), atol=1e-4, rtol=0)


def test_auto_and_compile(pool: Ranks) -> None:
    pool.run(_auto_and_compile)
