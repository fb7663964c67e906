"""weft's programs of two groups and NCCL's collectives, in flight together on several streams: none holds another up for good.

Each round draws an order of calls, the same on all ranks, and for each call a stream. Delays are drawn by each rank for itself,
so that one rank's kernels are resident when another's have not started. The calls are made by one thread; or by several, which
keep to the order that was drawn, with graphs of the caller's among them; or they are behind a receive whose sender comes later.
What ends a wait at its bound fails the test.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from on_gpus import NEEDS_TWO, SHARED, alarm, fewer
from rank_pools import ranks_on_gpus

import weft

pytestmark = NEEDS_TWO
BOUND_S = 20.0
STREAMS, CALLS, THREADS = 3, 6, 3
M, N, K = 512, 1024, 512
pool = ranks_on_gpus(2, BOUND_S)


@dataclass(frozen=True)
class Job:
    """A call, and what it must give."""

    name: str
    call: Callable[[], torch.Tensor]
    wanted: torch.Tensor


def _jobs(group: dist.ProcessGroup, other: dist.ProcessGroup, nccl: dist.ProcessGroup) -> list[Job]:
    """Calls whose kernels wait on SMs for peers, whose copies take SMs, and NCCL's beside them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    a = torch.randn(M, K, device="cuda").bfloat16()
    b = (torch.randn(K, N, device="cuda") * K**-0.5).bfloat16()
    rows = slice(rank * M // size, (rank + 1) * M // size)
    inner = slice(rank * K // size, (rank + 1) * K // size)
    few, x = a[:4], torch.full((1 << 18,), float(rank), device="cuda")
    left, right = a[:, inner].contiguous(), b[inner].contiguous()
    product = a.float() @ b.float()

    def gather(of: dist.ProcessGroup, schedule: str) -> Callable[[], torch.Tensor]:
        return lambda: weft.all_gather_matmul(a[rows], b, of, schedule=schedule)

    def scatter(of: dist.ProcessGroup, schedule: str) -> Callable[[], torch.Tensor]:
        return lambda: weft.matmul_reduce_scatter(left, right, of, schedule=schedule)

    def few_rows(of: dist.ProcessGroup, schedule: str) -> Callable[[], torch.Tensor]:
        return lambda: weft.matmul_all_reduce(few[:, inner], right, of, schedule=schedule)

    def reduced() -> torch.Tensor:
        out = x.clone()
        dist.all_reduce(out, group=nccl)
        return out

    def gathered() -> torch.Tensor:
        out = x.new_empty(size * x.numel())
        dist.all_gather_into_tensor(out, x, group=nccl)
        return out

    total, ends = torch.full_like(x, size * (size - 1) / 2), torch.arange(size, device="cuda", dtype=x.dtype)
    return [
        Job("gather, copy engines", gather(group, "flag_gated:2"), product),
        Job("gather, stores from SMs", gather(group, "direct_store:2"), product),
        Job("gather, the other group", gather(other, "direct_store:2"), product),
        Job("scatter, stores from SMs", scatter(group, "direct_store:2"), product[rows]),
        Job("scatter, the other group", scatter(other, "track_and_trigger:2"), product[rows]),
        Job("few rows", few_rows(group, "one_shot"), product[:4]),
        Job(
            "few rows, two hops", lambda: weft.matmul_all_reduce(few[:, inner], right, other, schedule="two_shot"), product[:4]
        ),
        Job("NCCL all_reduce", reduced, total),
        Job("NCCL all_gather", gathered, ends.repeat_interleave(x.numel())),
    ]


@alarm(270)
def _mixed(rounds: int, seed: int) -> int:
    everyone = list(range(dist.get_world_size()))
    groups = [dist.new_group(everyone, backend="cpu:gloo,cuda:nccl") for _ in range(3)]
    jobs = _jobs(*groups)
    for job in jobs:  # bound one after the other, before any of them waits for another
        torch.testing.assert_close(job.call().float(), job.wanted.float(), rtol=3e-2, atol=3e-2, msg=job.name)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    same, mine = random.Random(seed), random.Random(1000 * seed + dist.get_rank())
    for _ in range(rounds):
        drawn = [(same.choice(jobs), same.choice(streams)) for _ in range(CALLS)]
        found: list[tuple[Job, torch.Tensor]] = []
        for job, stream in drawn:
            with torch.cuda.stream(stream):
                if mine.random() < 0.3:
                    torch.cuda._sleep(mine.randrange(400_000))
                found.append((job, job.call()))
        torch.cuda.synchronize()
        for job, out in found:
            torch.testing.assert_close(out.float(), job.wanted.float(), rtol=3e-2, atol=3e-2, msg=job.name)
    for group in groups[:2]:
        weft.close(group)
    for group in groups:
        dist.destroy_process_group(group)
    return rounds


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.timeout(600)
def test_programs_and_collectives_on_several_streams(pool: object, seed: int) -> None:
    rounds = fewer(2000)
    assert pool.run(_mixed, rounds, seed, timeout_s=280 * (3 if SHARED else 1)) == [rounds] * 2  # type: ignore[attr-defined]


class InOrder:
    """Lets threads make calls in one order, the same on every rank."""

    def __init__(self) -> None:
        self._next = 0
        self._moves = threading.Condition()

    def call(self, number: int, call: Callable[[], None]) -> None:
        with self._moves:
            assert self._moves.wait_for(lambda: self._next == number, BOUND_S)
        call()
        with self._moves:
            self._next += 1
            self._moves.notify_all()


def _graph(jobs: Sequence[Job], stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """One graph of these jobs, each on a branch of its own."""
    graph, out = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for job in jobs:
            branch = torch.cuda.Stream()
            branch.wait_stream(stream)
            with torch.cuda.stream(branch):
                out.append(job.call())
            stream.wait_stream(branch)
    return graph, out


def _round(
    threads: ThreadPoolExecutor,
    streams: Sequence[torch.cuda.Stream],
    drawn: Sequence[Job | None],
    delays: Sequence[int],
    replay: Callable[[torch.cuda.Stream], None],
) -> list[tuple[Job, torch.Tensor]]:
    """What the calls of one round return. Each thread makes every THREADS-th call, on its stream; None is a replay."""
    in_order, found = InOrder(), list[tuple[Job, torch.Tensor]]()
    device = torch.cuda.current_device()

    def call(stream: torch.cuda.Stream, number: int) -> None:
        with torch.cuda.stream(stream):
            if delays[number]:
                torch.cuda._sleep(delays[number])
            if (job := drawn[number]) is None:
                replay(stream)
            else:
                found.append((job, job.call()))

    def run(thread: int) -> None:
        torch.cuda.set_device(device)
        for number in range(thread, len(drawn), THREADS):
            in_order.call(number, partial(call, streams[thread], number))

    for done in [threads.submit(run, thread) for thread in range(THREADS)]:
        done.result()
    return found


@alarm(270)
def _in_threads(rounds: int, seed: int) -> int:
    everyone = list(range(dist.get_world_size()))
    groups = [dist.new_group(everyone, backend="cpu:gloo,cuda:nccl") for _ in range(3)]
    jobs = _jobs(*groups)
    for job in jobs:
        torch.testing.assert_close(job.call().float(), job.wanted.float(), rtol=3e-2, atol=3e-2, msg=job.name)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(THREADS)]
    captured = [jobs[1], jobs[2], jobs[6]]
    graph, from_graph = _graph(captured, streams[0])

    def replay(stream: torch.cuda.Stream) -> None:
        """The caller orders the replays of graphs with the calls beside them."""
        for other in streams:
            stream.wait_stream(other)
        graph.replay()
        for other in streams:
            other.wait_stream(stream)

    same, mine = random.Random(seed), random.Random(1000 * seed + dist.get_rank())
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in range(rounds):
            drawn = [same.choice([*jobs, None]) for _ in range(CALLS)]
            delays = [mine.randrange(400_000) if mine.random() < 0.3 else 0 for _ in drawn]
            found = _round(threads, streams, drawn, delays, replay)
            torch.cuda.synchronize()
            for job, out in (*found, *(zip(captured, from_graph, strict=True) if None in drawn else ())):
                torch.testing.assert_close(out.float(), job.wanted.float(), rtol=3e-2, atol=3e-2, msg=job.name)
    graph.reset()
    for group in groups[:2]:
        weft.close(group)
    for group in groups:
        dist.destroy_process_group(group)
    return rounds


@pytest.mark.timeout(600)
def test_calls_of_several_threads_and_graphs(pool: object) -> None:
    rounds = fewer(1500)
    assert pool.run(_in_threads, rounds, 2, timeout_s=280 * (3 if SHARED else 1)) == [rounds] * 2  # type: ignore[attr-defined]


@alarm(100)
def _behind_a_receive(rounds: int) -> int:
    """As a pipeline's stage: the first rank posts its receive, makes a call, and waits for it; the second one makes the call,
    and sends. Each call was made once before, without a receive: CUDA loads a kernel at its first launch, and the GPU begins
    such a kernel only once those that run have ended, the receive's too. (torch's own kernels wait in the same way.)"""
    everyone = list(range(dist.get_world_size()))
    group, nccl = (dist.new_group(everyone, backend="cpu:gloo,cuda:nccl") for _ in range(2))
    rank = dist.get_rank()
    box = torch.full((1 << 16,), float(rank), device="cuda")
    dist.all_reduce(box.clone(), group=nccl)
    if rank < 2:  # connects the pair
        dist.batch_isend_irecv([dist.P2POp((dist.irecv, dist.isend)[rank], box, 1 - rank, nccl)])[0].wait()
    torch.cuda.synchronize()
    for number in range(rounds):
        m = 64 * (number + 1)
        a, b = torch.full((m, 64), 1.0, device="cuda").bfloat16(), torch.eye(64, device="cuda").bfloat16()
        schedule = ("flag_gated", "direct_store", "shard_p2p", "sequential")[number % 4]
        for repeat in range(3):
            box.fill_(float(number + rank))
            expects = dist.irecv(box, 1, nccl) if rank == 0 and repeat else None
            out = weft.all_gather_matmul(a, b, group, schedule=schedule)
            if rank == 1 and repeat:
                dist.send(box, 0, nccl)
            if expects is not None:
                expects.wait()
                assert box[0].item() == number + 1
            assert bool((out == 1).all())
    weft.close(group)
    for each in (group, nccl):
        dist.destroy_process_group(each)
    return rounds


@pytest.mark.timeout(600)
def test_calls_behind_a_receive_whose_sender_comes_later(pool: object) -> None:
    assert pool.run(_behind_a_receive, 40, timeout_s=110 * (3 if SHARED else 1)) == [40] * 2  # type: ignore[attr-defined]
