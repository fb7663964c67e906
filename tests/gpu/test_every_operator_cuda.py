"""Every public operator on GPUs, from the list that the contract suite on CPU ranks takes: results, and replays of a graph."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_gpus import NEEDS_TWO, alarm
from operators import BY_ID, check_forward, close
from rank_pools import ranks_on_gpus

import weft
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
