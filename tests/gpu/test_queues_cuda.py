"""Streams that share hardware queues: calls whose lanes wait for each other end, with as few queues as there can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import operators
import pytest
import torch
import torch.distributed as dist
from families import PAIRS
from on_gpus import NEEDS_TWO, alarm, fewer
from operators import BY_ID, close
from rank_pools import Pool, gpus

import weft
from weft import schedules
from weft.comm import symmetric_heap
from weft.core.problem import Op
from weft.runtime import cuda_resources

pytestmark = NEEDS_TWO
SIDE_STREAMS = 24
"""Streams with work of their own, more than the 8 queues that CUDA has by default."""
OPERATORS = list(dict.fromkeys(op for op, _ in PAIRS))


def pool_with(environment: dict[str, str]) -> Iterator[Pool]:
    ranks = Pool(2, device=gpus(), environment={"WEFT_TIMEOUT_S": "10", **environment})
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def one_queue() -> Iterator[Pool]:
    yield from pool_with({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    yield from pool_with({})


def side_work(busy: int) -> Callable[[], None]:
    """A function that gives work to so many streams."""
    streams = [torch.cuda.Stream() for _ in range(busy)]
    x = torch.zeros(512, 512, device="cuda", dtype=torch.bfloat16)
    torch.mm(x, x)  # loads the kernel

    def occupy() -> None:
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.mm(x, x)

    return occupy


@alarm(60)
def _calls(op: Op, name: str, calls: int, busy: int) -> None:
    """Calls whose results stay, so that none has the addresses of an earlier one, and none is replayed from a graph."""
    operator, rank, size = BY_ID[op], dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "N", 128)  # kernels need whole tiles
        patch.setattr(operators, "K", 128)
        # Few queues are refused, because the release after a failure would need one.
        for module in (symmetric_heap, cuda_resources):
            patch.setattr(module, "hardware_queues", lambda: 32)
        given = operator.drawn(256, size, torch.bfloat16, 0)
        expected = operator.expected([[x.double() for x in each] for each in given], rank)
        options = operator.options(given) | {"schedule": name}
        found, occupy = [], side_work(busy)
        for _ in range(calls):
            occupy()
            found.append(operator.call(*[one.clone() for one in given[rank]], **options))
        torch.cuda.synchronize()
        for out in found:
            close(out, expected, (op, name))
        weft.close()


@alarm(60)
def _replays(op: Op, name: str, replays: int, busy: int) -> None:
    """Replays of a graph of two calls, while other streams work. A graph has no order between its branches."""
    operator, rank, size = BY_ID[op], dist.get_rank(), dist.get_world_size()
    given = operator.drawn(64, size, torch.bfloat16, 0)
    expected = operator.expected([[x.double() for x in each] for each in given], rank)
    options = operator.options(given) | {"schedule": name}
    occupy = side_work(busy)
    operator.call(*given[rank], **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = [operator.call(*given[rank], **options) for _ in range(2)]
    for _ in range(replays):
        occupy()
        graph.replay()
    torch.cuda.synchronize()
    for out in found:
        close(out, expected, (op, name))
    weft.close()


@pytest.mark.parametrize("op", OPERATORS)
def test_replays_while_more_streams_are_busy_than_there_are_queues(pool: Pool, op: Op) -> None:
    for name in schedules.names(op):
        if name != "sequential":  # NCCL bounds how many of its collectives are in flight in graphs
            pool.run(_replays, op, name, fewer(200), SIDE_STREAMS)


@pytest.mark.parametrize(("op", "name"), PAIRS)
def test_one_hardware_queue(one_queue: Pool, op: Op, name: str) -> None:
    one_queue.run(_calls, op, name, 6, 0)


@pytest.mark.parametrize("op", OPERATORS)
def test_more_busy_streams_than_hardware_queues(pool: Pool, op: Op) -> None:
    for name in schedules.names(op):
        pool.run(_calls, op, name, fewer(200), SIDE_STREAMS)


@alarm(60)
def _refused() -> None:
    """The group stays usable."""
    operator, rank, size = BY_ID["all_gather_matmul"], dist.get_rank(), dist.get_world_size()
    given = operator.drawn(16, size, torch.bfloat16, 0)
    expected = operator.expected([[x.double() for x in each] for each in given], rank)
    for _ in range(2):
        with pytest.raises(ValueError, match="schedule is shard_p2p, but CUDA_DEVICE_MAX_CONNECTIONS is below 8"):
            operator.call(*given[rank], **operator.options(given), schedule="shard_p2p")
        close(operator.call(*given[rank], **operator.options(given)), expected, "auto")
    assert [choice.spec for choice in weft.choices()] == ["sequential"]
    weft.close()


def test_few_queues_overlap_nothing(one_queue: Pool) -> None:
    one_queue.run(_refused)
