"""Collectives alone on GPUs: every schedule, bounded room, in place, graphs, streams, matmuls beside; a flag that stays out."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from collective_work import GATHERS, Case, agree, in_place, moves, straight, sums
from on_gpus import GPUS, NEEDS_TWO, alarm
from rank_pools import ranks_on_gpus
from silenced_rank import on_the_slow_path, told_without

import weft
from weft import collectives
from weft.runtime.groups import GROUPS
from weft.runtime.ranks import Ranks

pytestmark = NEEDS_TWO
SIZES = [max(n for n in (2, 4, 8) if n <= max(GPUS, 2))]
BOUND_S = 5.0
MIB = 1 << 20
pool = ranks_on_gpus(SIZES, BOUND_S)


@alarm(80)
def _every_schedule(dtype: torch.dtype) -> None:
    """Several calls each, so that some are replayed; parts of one element, of some that divide by nothing, of a MiB."""
    for elements in (1, 1003, MIB // dtype.itemsize):
        for call in range(3):
            case = Case(elements=elements, dtype=dtype, seed=call)
            for spec in GATHERS:
                moves(case, spec)
                in_place(case, spec)
            for spec in GATHERS:
                sums(case, spec, ("sum", "avg")[call % 2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_schedule_is_right(pool: Ranks, dtype: torch.dtype) -> None:
    pool.run(_every_schedule, dtype)


@alarm(80)
def _in_turns(late: str) -> None:
    """Parts of 8 MiB through room of 1 MiB, new data each call; rank 1 late with its copies, or with its kernels."""
    from weft.runtime.cuda_resources import CudaResources

    stream = CudaResources.stream

    def sleepy(self: CudaResources, name: str) -> torch.cuda.Stream:
        found = stream(self, name)
        if name == late:
            with torch.cuda.stream(found):
                torch.cuda._sleep(2_000_000)
        return found

    if dist.get_rank() == 1:
        CudaResources.stream = sleepy  # type: ignore[method-assign]
    try:
        with on_the_slow_path():
            for seed in range(6):
                case = Case(elements=4 * MIB + 5, dtype=torch.bfloat16, seed=seed, staging_bytes=MIB)
                for spec in ("copy_engine:1", "copy_engine_pull:1"):
                    moves(case, spec)
                for spec in ("copy_engine:1", "copy_engine_pull:1"):
                    sums(case, spec)
    finally:
        CudaResources.stream = stream  # type: ignore[method-assign]
    used = [p.layout.staging for p in GROUPS.state(dist.group.WORLD.group_name).bound()]  # type: ignore[union-attr]
    assert max(used[-5:]) <= MIB + 512, used


@pytest.mark.parametrize("late", ["nothing", "copy", "blocks"])
def test_more_bytes_than_room(pool: Ranks, late: str) -> None:
    pool.run(_in_turns, late)


@alarm(80)
def _graphs(spec: str) -> None:
    """Captured once, replayed with new data, in place, one rank late now and then; eager calls in between."""
    rank, elements = dist.get_rank(), 70_000

    def drawn(seed: int) -> Case:
        return Case(elements=elements, dtype=torch.bfloat16, seed=seed)

    given = drawn(0).drawn(rank)
    shard, gathered, reduced = drawn(0).part(given).clone(), torch.empty_like(given), given.clone()
    scattered = torch.empty_like(shard)
    exchanged = torch.empty_like(given)

    def call() -> None:
        collectives.all_gather_into_tensor(gathered, shard, schedule=spec)
        collectives.all_to_all_single(exchanged, given, schedule=spec)
        collectives.reduce_scatter_tensor(scattered, given, schedule=spec)
        collectives.all_reduce(reduced, schedule=spec)

    call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    for replay in range(1, 30):
        case = drawn(replay)
        given.copy_(case.drawn(rank))
        reduced.copy_(given)
        shard.copy_(case.part(given))
        if replay % 7 == 3 and rank == 1:
            torch.cuda._sleep(5_000_000)
        graph.replay()
        everyone, total, by_library = case.everyone, case.summed(), spec == "sequential"
        assert torch.equal(gathered, torch.cat([one[r * elements : (r + 1) * elements] for r, one in enumerate(everyone)]))
        assert torch.equal(exchanged, torch.cat([case.part(one) for one in everyone]))
        agree(scattered, case.part(total), by_library, (spec, replay))
        agree(reduced, total, by_library, (spec, replay))
        if replay % 5 == 0:
            sums(case, spec)


@pytest.mark.parametrize("spec", ["sequential", "copy_engine:1", "copy_engine:4"])
def test_graphs_replayed_between_eager_calls(pool: Ranks, spec: str) -> None:
    pool.run(_graphs, spec)


@alarm(80)
def _straight() -> None:
    for elements in (1, 1003, MIB):
        for spec in ("sequential", "copy_engine:1", "copy_engine:3"):
            straight(elements, spec, 6)
    straight(4096, "auto", 2)
    weft.close()


def test_results_that_peers_can_write(pool: Ranks) -> None:
    pool.run(_straight)


@alarm(80)
def _beside_matmuls() -> None:
    """Asynchronous calls beside matmuls on the caller's stream, of weft's stream and of the caller's own; several in flight."""
    rank, own = dist.get_rank(), torch.cuda.Stream(priority=-2)
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    product = a @ a
    for turn in range(8):
        case = Case(elements=MIB // 2, dtype=torch.bfloat16, seed=turn)
        mine = case.drawn(rank)
        gathered, scattered, reduced = torch.empty_like(mine), torch.empty_like(case.part(mine)), mine.clone()
        stream = own if turn % 2 else None
        works = [
            collectives.all_gather_into_tensor(gathered, case.part(mine), None, True, schedule="copy_engine:2", stream=stream),
            collectives.reduce_scatter_tensor(scattered, mine, "sum", None, True, schedule="copy_engine:2", stream=stream),
            collectives.all_reduce(reduced, "avg", None, True, schedule="copy_engine:2", stream=stream),
        ]
        same = [torch.equal(a @ a, product) for _ in range(4)]
        for work in works:
            assert work is not None
            assert work.wait()
        total = case.summed()
        agree(scattered, case.part(total), False, turn)
        agree(reduced, case.summed("avg"), False, turn)
        expected = [one[r * case.elements : (r + 1) * case.elements] for r, one in enumerate(case.everyone)]
        assert torch.equal(gathered, torch.cat(expected))
        assert all(same)
        assert works[-1] is not None
        assert works[-1].get_future().wait()[0] is reduced


def test_beside_matmuls(pool: Ranks) -> None:
    pool.run(_beside_matmuls)


@alarm(80)
def _auto() -> list[str]:
    """A trial leaves what is summed in place as it was, and chooses alike on every rank."""
    case = Case(elements=MIB, dtype=torch.bfloat16, seed=1)
    for call in range(3):
        mine = case.drawn(dist.get_rank())
        collectives.all_reduce(mine)
        agree(mine, case.summed(), True, call)
        whole = case.drawn(dist.get_rank())
        collectives.all_gather_into_tensor(whole, case.part(whole))
        expected = [one[r * case.elements : (r + 1) * case.elements] for r, one in enumerate(case.everyone)]
        assert torch.equal(whole, torch.cat(expected))
    weft.close()
    return [mine.cpu().view(torch.int16).numpy().tobytes().hex()[:64]]


def test_auto(pool: Ranks) -> None:
    assert len({bits for (bits,) in pool.run(_auto)}) == 1


@alarm(60)
def _never_arrives() -> str:
    """Rank 1 raises no flag of its peers in a call in which they already wait on the GPU; then all go on together."""
    case = Case(elements=5000, dtype=torch.bfloat16, seed=0)
    sums(case, "copy_engine:2")
    message = told_without(1, lambda: sums(case, "copy_engine:2"))
    torch.cuda.synchronize()
    time.sleep(1)
    dist.barrier()
    weft.close()
    sums(case, "copy_engine:2")
    return message


def test_a_flag_that_never_comes(pool: Ranks) -> None:
    messages = pool.run(_never_arrives)
    assert any("arrived[" in m and "rank 1's lane copy raises it" in m for m in messages if m != "right"), messages
