"""matmul_reduce_scatter as one kernel: interpreted on ranks, its proof, and what GPUs run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compiled import all_reduce_for_a_gpu
from launch_counts import counting
from rank_pools import Pool, interpreting
from rank_work import check_scatter

import weft
from weft.checker import check
from weft.comm.symmetric_heap import heap_of
from weft.core.problem import Problem
from weft.core.schedule import MAILBOX_COPIES, FusedCollective, Gemm
from weft.runtime.ranks import Ranks
from weft.schedules import build
from weft.schedules.matmul_reduce_scatter import ONE_KERNEL_BYTES


@pytest.fixture
def interpreted() -> Callable[[int], Pool]:
    return interpreting


def _as_kernel(name: str) -> int:
    """New data each call, one rank late to half of them; how often the kernel ran.

    M: more rows than a tile; a batch, whose rows come apart at its multiples, so that no rank has as many as another; and fewer
    rows than ranks, some of which wait for nothing of their own."""
    from weft.runtime.fused_collective import FusedCollectiveKernel

    with counting(FusedCollectiveKernel) as launches:
        for m, n, k, op, batch in ((37, 20, 19, "sum", 1), (5, 17, 8, "avg", 3), (1, 16, 8, "sum", 1)):
            for call in range(3):
                if call % 2 and dist.get_rank() == 1:
                    time.sleep(0.02)
                check_scatter(m, n, k, torch.float16, name, call, op=op, batch=batch)
    weft.close()
    return launches.count


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "name"), [(2, "one_shot"), (3, "sequential_stores"), pytest.param(4, "one_shot", marks=pytest.mark.slow)]
)
def test_the_kernel(interpreted: Callable[[int], Ranks], world_size: int, name: str) -> None:
    assert set(interpreted(world_size).run(_as_kernel, name)) == {9}


def _ahead() -> None:
    """Calls of the bare kernel, one row on four ranks, one block each: only the kernel holds a rank back, and rank 0, which
    alone has a row, is late."""
    from weft.comm.rank_group import RankGroup
    from weft.kernels import all_reduce as kernel

    rank, size = dist.get_rank(), dist.get_world_size()
    problem = Problem(op="matmul_reduce_scatter", m=1, n=8, k=8 * size, world_size=size, dtype="float16")
    layout = kernel.plan(problem, rank, problem.shards, hops="scatter", multiply=True, device=torch.device("cpu"), sms=1)
    rank_group = RankGroup(dist.group.WORLD)  # type: ignore[arg-type]
    device = torch.device("cpu")
    piece = heap_of(rank_group, device).allocate(MAILBOX_COPIES * layout.copy_bytes)
    memory = kernel.mailbox(piece.addresses, layout.copy_bytes, 1, device)
    received = kernel.received

    def late(*arguments: Any) -> Any:
        time.sleep(0.02 * (rank == 0))
        return received(*arguments)

    kernel.received = late  # type: ignore[assignment]
    try:
        for call in range(6):
            a, b = torch.full((1, 8), float(call + rank)).half(), torch.ones(8, 8).half()
            out = torch.empty(int(rank == 0), 8, dtype=torch.float16)
            options: dict[str, Any] = {"partial": None, "bias": None, "residual": None, "live": True, "tries": 20_000}
            kernel.all_reduce(layout, memory, out, factors=(a, b), **options)
            assert memory.status.tolist() == [0, 0]
            assert bool((out == 8 * (size * call + size * (size - 1) // 2)).all()), (call, out)
    finally:
        kernel.received = received
        dist.barrier()
        rank_group.close()


@pytest.mark.ranks
def test_a_rank_without_rows_does_not_run_ahead(interpreted: Callable[[int], Ranks]) -> None:
    interpreted(4).run(_ahead)


def test_a_library_gemm_is_followed_by_one_kernel_where_it_is_few_bytes() -> None:
    few = Problem(op="matmul_reduce_scatter", m=512, n=8192, k=64, world_size=4)
    many = dataclasses.replace(few, m=4096)
    assert few.m * few.n * few.itemsize <= ONE_KERNEL_BYTES < many.m * many.n * many.itemsize
    for problem, one_kernel in ((few, True), (many, False)):
        schedule = build(problem, "sequential_stores")
        check(schedule)
        for (lane,) in schedule.ranks:
            assert isinstance(lane.steps[0], Gemm)
            assert any(isinstance(step, FusedCollective) for step in lane.steps) == one_kernel
    assert all(isinstance(lane.steps[0], FusedCollective) for (lane,) in build(few, "one_shot").ranks)


@pytest.mark.usefixtures("on_an_h200")
@pytest.mark.parametrize(("rows", "multiply"), [(128, True), (512, False)])
def test_what_gpus_run(rows: int, multiply: bool) -> None:
    """Everything that travels, is looked at or stored does so 16 bytes at a time, without fences."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from weft.kernels import all_reduce as kernel

    problem = Problem(op="matmul_reduce_scatter", m=rows, n=8192, k=28672, world_size=4)
    options: dict[str, Any] = {"hops": "scatter", "multiply": multiply, "device": torch.device("cuda"), "sms": 132}
    layout = kernel.plan(problem, 1, problem.shards, **options)
    assert layout.count * layout.tiling.m * layout.tiling.n == rows * 8192
    made = all_reduce_for_a_gpu(kernel, layout)
    text = str(made.asm["ptx"])
    assert made.metadata.shared <= 227 << 10
    for access, least in (("ld.volatile.global.v4", 1), ("st.global.v4", 2)):
        assert text.count(access) >= least
    assert "st.global.b16" not in text
    assert "membar" not in text
    assert ".sys" not in text
