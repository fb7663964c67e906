"""What "auto" measures on GPUs: its result is right, ranks choose alike, sequential is not lost to, losers are given back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_gpus import GPUS, NEEDS_TWO, alarm
from rank_pools import ranks_on_gpus
from rank_work import check_gather, check_scatter, whole

import weft
from weft.core.problem import split
from weft.core.schedule import Schedule
from weft.runtime.choose import MEASURED
from weft.runtime.cuda import CudaProgram
from weft.runtime.groups import GROUPS
from weft.runtime.programs import Programs
from weft.runtime.ranks import Ranks
from weft.schedules import spec

pytestmark = NEEDS_TWO
SIZES = [n for n in (2, 4) if n <= max(GPUS, 2)]
SHAPES = [(512, 2048, 1024), (4096, 4096, 4096), (253, 129, 77)]
BOUND_S = 20.0
pool = ranks_on_gpus(SIZES, BOUND_S)


def _schedules() -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    return [spec(s.name, s.chunks) for s in GROUPS.state(group.group_name).schedules()]


@alarm(300)
def _auto() -> tuple[list[tuple[str, dict[str, float]]], list[str], int, int]:
    """What was chosen and measured, what stays, how many programs were bound, how many of them closed."""
    bind, close = Programs._bind, CudaProgram.close
    bound, closed = [], []

    def binding(self: Programs, schedule: Schedule, device: torch.device) -> object:
        bound.append(bind(self, schedule, device))
        return bound[-1]

    def closing(self: CudaProgram) -> None:
        closed.append(self)
        close(self)

    Programs._bind, CudaProgram.close = binding, closing  # type: ignore[method-assign, assignment]
    try:
        for m, n, k in SHAPES:
            for call in range(6):
                check_gather(m, n, k, torch.bfloat16, "auto", call)
                check_scatter(m, n, k, torch.bfloat16, "auto", call)
    finally:
        Programs._bind, CudaProgram.close = bind, close  # type: ignore[method-assign]
    found = [(choice.spec, choice.us) for choice in weft.choices()], _schedules(), len(bound), len(closed)
    weft.close()
    return found


def test_auto_is_measured(pool: Ranks) -> None:
    answers = pool.run(_auto)
    assert all(answer == answers[0] for answer in answers)
    choices, specs, bound, closed = answers[0]
    assert len(choices) == 2 * len(SHAPES)
    assert sorted(specs) == sorted(text for text, _ in choices)
    assert bound - closed == len(specs)
    assert bound >= sum(len(us) for _, us in choices)
    assert any(us for _, us in choices)
    for text, us in choices:
        if not us:  # nothing else is predicted to come near
            assert text == "sequential"
            continue
        assert next(iter(us)) == "sequential"
        assert 1 < len(us) <= 1 + MEASURED
        assert text in us
        assert all(time > 0 for time in us.values())
        assert us[text] <= us["sequential"]


@alarm(90)
def _captured() -> None:
    """A graph of auto's call after one call that measured, replayed with new data."""
    rank, size = dist.get_rank(), dist.get_world_size()
    m, n, k = 512, 512, 384
    rows, cols = slice(*split(m, size)[rank]), slice(*split(n, size)[rank])
    a, b, _ = whole(m, n, k, torch.bfloat16, 0)
    shard, right = a[rows].clone(), b[:, cols].clone()
    refused = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="call it once with these sizes before capturing a graph"):  # noqa: SIM117
        with torch.cuda.graph(refused, capture_error_mode="thread_local"):
            weft.all_gather_matmul(shard, right)
    weft.all_gather_matmul(shard, right)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = weft.all_gather_matmul(shard, right)
    for replay in range(6):
        a, b, expected = whole(m, n, k, torch.bfloat16, 10 + replay)
        shard.copy_(a[rows])
        right.copy_(b[:, cols])
        graph.replay()
        torch.testing.assert_close(out.double(), expected[:, cols], rtol=2e-2, atol=2e-2)
    torch.cuda.synchronize()
    dist.barrier()


def test_a_graph_of_what_was_measured(pool: Ranks) -> None:
    pool.run(_captured)


def _planned() -> list[str]:
    check_gather(512, 256, 384, torch.bfloat16, "planned", 0)
    (choice,) = weft.choices()
    assert (choice.us, bool(choice.predicted_for)) == ({}, True)
    specs = _schedules()
    weft.close()
    return specs


def test_planned_measures_nothing(pool: Ranks) -> None:
    pool.run(weft.close)
    for specs in pool.run(_planned):
        assert len(specs) == 1


@alarm(300)
def _memory() -> list[int]:
    """Return the free bytes of the GPU after each of six autotuning runs, each of another problem, whose programs are
    released."""
    free = []
    for turn in range(6):
        check_gather(4096 + 8 * turn, 2048, 2048, torch.bfloat16, "auto", turn)
        weft.close()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
        dist.barrier()
    return free


def test_trials_leave_no_memory_behind(pool: Ranks) -> None:
    """After the first ones have loaded kernels and libraries, room for a gathered a (16 MiB a program) does not go away."""
    for free in pool.run(_memory):
        assert free[2] - free[-1] < 3 * 16 * 2**20, free
