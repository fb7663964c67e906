"""GPUs of one host as two nodes: every operator by NCCL's messages; a late rank; graphs; a lost rank."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from collective_work import Case, in_place, moves, sums
from nodes_work import SPECS, check_every_operator
from on_gpus import GPUS, NEEDS_TWO, alarm, late
from rank_pools import gpus
from rank_work import here, whole

import weft
from weft import collectives
from weft.comm.symmetric_heap import heap_of
from weft.core.errors import WeftError
from weft.core.problem import split
from weft.overlap.concurrent.cuda import CudaExecutor
from weft.runtime.groups import GROUPS
from weft.runtime.ranks import RankFailed, Ranks

pytestmark = NEEDS_TWO
PER_NODE = 2 if GPUS >= 4 else 1
REPLAYS = 200


def _nodes(timeout_s: str) -> Ranks:
    environment = {"WEFT_TIMEOUT_S": timeout_s, "WEFT_RANKS_PER_NODE": str(PER_NODE)}
    return Ranks(2 * PER_NODE, device=gpus(), environment=environment)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Ranks]:
    with _nodes("20") as pool:
        yield pool


def _every_operator(dtype: torch.dtype) -> None:
    for (m, n, k), specs in (((512, 256, 384), SPECS), ((253, 129, 77), SPECS[1:]), ((5, 7, 3), SPECS[2:])):
        for spec in specs:
            faulthandler.dump_traceback_later(60, exit=True)
            for call in range(6):
                late(call)
                check_every_operator(m, n, k, dtype, spec, call)
    weft.close()
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_operator_on_two_nodes(two_nodes: Ranks, dtype: torch.dtype) -> None:
    two_nodes.run(_every_operator, dtype)


@alarm(60)
def _auto() -> list[str]:
    """What is measured to be fastest is one of the two that go across nodes."""
    check_every_operator(512, 256, 384, torch.bfloat16, "auto", 0)
    found = [choice.spec.partition(":")[0] for choice in weft.choices()]
    weft.close()
    return found


def test_auto_measures_what_goes_across_nodes(two_nodes: Ranks) -> None:
    for names in two_nodes.run(_auto):
        assert names
        assert set(names) <= {"sequential", "node_slices"}


@alarm(60)
def _collectives_alone() -> None:
    """NCCL's collectives, also in place, where rehearsals must not change the input; auto does not try copy engines."""
    for call in range(3):
        late(call)
        case = Case(elements=1003, dtype=torch.float32, seed=call)
        for spec in ("sequential", "auto"):
            moves(case, spec)
            sums(case, spec)
            in_place(case, spec)
    assert {choice.spec for choice in weft.choices()} == {"sequential"}
    tensor = torch.ones(8, device=here())
    assert not CudaExecutor(here()).abilities((weft.AllReduce(tensor),)).copy_engine
    with pytest.raises(ValueError, match=rf"on nodes of \({PER_NODE}, {PER_NODE}\) ranks, use sequential"):
        collectives.all_reduce(tensor, schedule="copy_engine")
    with pytest.raises(ValueError, match=rf"group is on nodes of \({PER_NODE}, {PER_NODE}\) ranks"):
        collectives.empty(8, device=here())
    weft.close()


def test_collectives_alone_are_by_nccl(two_nodes: Ranks) -> None:
    two_nodes.run(_collectives_alone)


@alarm(40)
def _reach() -> int:
    """How many ranks share a piece of the memory from which programs take theirs."""
    check_every_operator(512, 256, 384, torch.bfloat16, "node_slices:1", 0)
    group = dist.group.WORLD
    assert group is not None
    heap = heap_of(GROUPS.state(group.group_name).rank_group, here())
    piece = heap.allocate(256)
    ranks = len(piece.addresses)
    heap.free(piece)
    return ranks


def test_symmetric_memory_ends_with_the_node(two_nodes: Ranks) -> None:
    assert set(two_nodes.run(_reach)) == {PER_NODE}


@alarm(60)
def _graph() -> None:
    """New data each replay, in a graph of two operators; a rank is late now and then."""
    rank, size = dist.get_rank(), dist.get_world_size()
    m, n, k = 512, 256, 128
    rows = slice(*split(m, size)[rank])
    a, b = torch.zeros(m, k, device=here(), dtype=torch.bfloat16), torch.zeros(k, n, device=here(), dtype=torch.bfloat16)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        there = weft.matmul_all_to_all(a, b, schedule="node_slices:2")
        return there, weft.all_to_all_matmul(a, b, schedule="node_slices:2")

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        combined, dispatched = call()
    worst = torch.zeros(2, device=here())
    for replay in range(REPLAYS):
        if replay % 20 == 0:
            late(replay // 20)
        left, right, _ = whole(m, n, k, torch.bfloat16, replay)
        a.copy_(left)
        b.copy_(right)
        graph.replay()
        wanted = (left @ right)[rows].repeat(size, 1).float()
        worst = torch.maximum(worst, torch.stack([(out.float() - wanted).abs().max() for out in (combined, dispatched)]))
    torch.cuda.synchronize()
    assert worst.max().item() < 0.1, worst.tolist()


def test_a_graph_replays_messages(two_nodes: Ranks) -> None:
    two_nodes.run(_graph)


def _until_lost(victim: int) -> tuple[str, float]:
    faulthandler.dump_traceback_later(40, exit=True)
    check_every_operator(512, 256, 384, torch.bfloat16, "node_slices:2", 0)
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    struck = time.monotonic()
    a, b, _ = whole(512, 256, 384, torch.bfloat16, 1)
    try:
        while time.monotonic() - struck < 30:
            weft.matmul_all_to_all(a, b, schedule="node_slices:2")
            weft.synchronize()
    except WeftError as error:
        faulthandler.cancel_dump_traceback_later()
        return f"{type(error).__name__}: {error}", time.monotonic() - struck
    raise AssertionError("a rank died and nobody noticed")


def test_a_lost_rank_of_another_node_is_named() -> None:
    victim = 2 * PER_NODE - 1
    with _nodes("10") as pool:
        pool.start(_until_lost, victim)
        with pytest.raises(RankFailed) as caught:
            pool.finish(timeout_s=45)
        # Its neighbour has mapped memory of a process that is gone; what CUDA then says is not ours to choose.
        for message, seconds in caught.value.results[:PER_NODE]:
            assert f"rank {victim}" in message, message
            assert seconds < 15
