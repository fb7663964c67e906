"""Every public operator on GPUs, from the list that the contract suite on CPU ranks takes: results, and replays of a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from call_frames import MOST_FRAMES, MOST_IN_PLACE, MOST_STRAIGHT, frames_of
from on_gpus import NEEDS_TWO, alarm
from operators import BY_ID, check_forward, close
from rank_pools import ranks_on_gpus

import weft
from weft.runtime.programs import Programs
from weft.runtime.ranks import Ranks

pytestmark = NEEDS_TWO
pool = ranks_on_gpus(2, 10)
every_operator = pytest.mark.parametrize("name", BY_ID)


@alarm(90)
def _results(name: str) -> None:
    operator = BY_ID[name]
    for rows in (11, 2):
        for dtype in (torch.bfloat16, torch.float16):
            check_forward(operator, operator.drawn(rows, dist.get_world_size(), dtype, rows), (name, rows, dtype))
    weft.close()


@every_operator
def test_results(pool: Ranks, name: str) -> None:
    pool.run(_results, name)


@alarm(90)
def _graph(name: str) -> None:
    """New data in each replay."""
    operator, rank, size = BY_ID[name], dist.get_rank(), dist.get_world_size()
    given = operator.drawn(16, size, torch.bfloat16, 0)
    options = operator.options(given)
    operator.call(*given[rank], **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = operator.call(*given[rank], **options)
    for seed in range(1, 20):
        drawn = operator.drawn(16, size, torch.bfloat16, seed)
        for own, new in zip(given[rank], drawn[rank], strict=True):
            own.copy_(new)
        graph.replay()
        close(out, operator.expected([[x.double() for x in each] for each in drawn], rank), (name, seed))
    weft.close()


@every_operator
def test_a_graph_is_replayed_with_new_data(pool: Ranks, name: str) -> None:
    pool.run(_graph, name)


@alarm(90)
def _warm(name: str) -> None:
    """Calls with the same tensors, and calls whose inputs are elsewhere each time: none takes the slow path."""
    operator = BY_ID[name]
    own = operator.drawn(16, dist.get_world_size(), torch.bfloat16, 0)[dist.get_rank()]
    options = operator.options([own] * dist.get_world_size())
    slow: list[str] = []
    make_call = Programs.make_call

    def noted(self: Programs, call: Any) -> Any:
        slow.append(call.op)
        return make_call(self, call)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(Programs, "make_call", noted)
        for _ in range(8):
            operator.call(*own, **options)
        slow.clear()
        frames = frames_of(lambda: operator.call(*own, **options))
        assert not slow, f"{name}: a warm call took the slow path"
        straight = any(function == "Straight.issue" for _, function in frames)
        most = MOST_IN_PLACE if any(function == "Groups.reach" for _, function in frames) else MOST_FRAMES
        assert len(frames) <= (MOST_STRAIGHT if straight else most), (name, frames)
        moved = [[each.clone() for each in own] for _ in range(40)]
        for each in moved:
            operator.call(*each, **options)
        print(name, len(frames), "frames,", len(slow), "of 40 calls at new addresses on the slow path", flush=True)
    weft.close()


@every_operator
def test_a_warm_call_takes_few_frames(pool: Ranks, name: str) -> None:
    pool.run(_warm, name)
