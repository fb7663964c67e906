"""The probes of `weft calibrate` that run on GPUs and CPUs, those of the host executor, and the clock that all probes use.

A Clock measures work on all ranks; the result is the slowest rank's time in each round. On a GPU the calls are captured in a
CUDA graph, which is replayed between two events, so the time does not include Python or launches by the host. On a CPU they are
called between two readings of the clock. A barrier precedes each round. On GPUs a replay that is not timed follows the barrier.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.rank_group import RankGroup
from weft.comm.symmetric_heap import heap_of
from weft.compat.streams import comm_stream, give_back
from weft.core.problem import Op, Problem
from weft.core.schedule import Collective, steps_of
from weft.runtime.network import NcclCollective
from weft.runtime.replay import Captures
from weft.schedules import build

ROUNDS = 7
Work = Callable[[], object]
COLLECTIVES: dict[str, Op] = {
    "all_gather": "all_gather_matmul",
    "reduce_scatter": "matmul_reduce_scatter",
    "all_reduce": "matmul_all_reduce",
    "all_to_all": "matmul_all_to_all",
}
"""For each NCCL collective, an operator whose sequential program contains it."""
_COLS = 4096
_MANY = 64
_BAG = 32
_CONCURRENT = 384
HOST_COPY_BYTES = tuple(1 << power for power in (14, 16, 18, 20, 22))
_SHORT_US = 2000.0
_FLOPS_PER_US = {"cuda": 4e8, "cpu": 5e4}


@dataclass(frozen=True, kw_only=True)
class ProbeSample:
    """ProbeSample has the times of one operation.

    what: the name of the samples. key: the sizes, as the probe's docstring lists them.
    us: for each round, the time of a call on the slowest rank."""

    what: str
    key: tuple[int, ...]
    us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.us)

    @property
    def spread(self) -> float:
        """Return half of the interquartile range as a share of the median. 0 for fewer than three rounds.

        >>> ProbeSample(what="", key=(), us=(9.0, 10.0, 11.0)).spread
        0.1
        """
        if len(self.us) < 3 or not self.median_us:
            return 0.0
        low, _, high = statistics.quantiles(self.us, n=4)
        return (high - low) / 2 / self.median_us

    def __str__(self) -> str:
        return f"{self.what} {' x '.join(map(str, self.key))}: {self.median_us:.1f} us (+-{self.spread:.1%})"


def of(samples: Iterable[ProbeSample], what: str) -> list[ProbeSample]:
    """Return the samples with this name.

    Raises ValueError if there is none.
    """
    found = [sample for sample in samples if sample.what == what]
    if not found:
        raise ValueError(f"samples have none of {what!r}; a profile needs every probe")
    return found


def typical_spread(samples: Iterable[ProbeSample]) -> float:
    """Return the median of the samples' spreads."""
    return round(statistics.median([sample.spread for sample in samples]), 4)


class Clock:
    """Clock measures work on this rank's device. device: "cpu", or "cuda" for the current CUDA device."""

    def __init__(self, device: str, rounds: int = ROUNDS) -> None:
        self.device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self._rounds = rounds

    def sample(self, what: str, key: tuple[int, ...], work: Work, *, repeat: int = 1, per: int = 1) -> ProbeSample:
        """Measure a work of `per` equal parts, and return the time of one part. Collective. repeat: the calls per round."""
        work()
        run = self._capture(work, repeat) if self.device.type == "cuda" else _repeat(work, repeat)
        run()
        times = [self._time_round(run) for _ in range(self._rounds)]
        return self.slowest(what, key, [us / repeat / per for us in times])

    def sample_concurrent(self, what: str, work: Work, other: Work, *, others: int, repeat: int = 1) -> ProbeSample:
        """Return the time of `work` while `other` runs on another stream, where it is enqueued `others` times. Collective.

        Works on GPUs only. `work` must be enqueued and must end before the calls of `other` end.
        """
        assert self.device.type == "cuda", "on a CPU there is no stream"
        side = comm_stream(priority="normal", device=self.device)
        work()
        other()
        times: list[float] = []
        for _ in range(self._rounds):
            self.barrier()
            with torch.cuda.stream(side):
                for _ in range(others):
                    other()
            times.append(self._events(lambda: [work() for _ in range(repeat)]) / repeat)
            torch.cuda.synchronize(self.device)
        give_back(side)
        return self.slowest(what, (), times)

    def slowest(self, what: str, key: tuple[int, ...], mine_us: list[float]) -> ProbeSample:
        """Return a sample of the slowest rank's times. mine_us: the times of this rank. Collective."""
        times = torch.tensor(mine_us, dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return ProbeSample(what=what, key=key, us=tuple(times.tolist()))

    def barrier(self) -> None:
        """Wait until all ranks have called this and their devices are idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier()

    def _time_round(self, run: Work) -> float:
        self.barrier()
        if self.device.type == "cuda":
            run()  # hosts leave the barrier at different times; if the work is an exchange, this brings the GPUs together
            return self._events(run)
        begun_ns = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - begun_ns) / 1e3

    def _events(self, run: Work) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def _capture(self, work: Work, repeat: int) -> Work:
        torch.cuda.synchronize(self.device)
        return _captures(self.device).record(_repeat(work, repeat)).replay


@cache
def _captures(device: torch.device) -> Captures:
    """Return the captures that all measurements on a device share, because they run one after the other."""
    return Captures(device)


def _repeat(work: Work, repeat: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(repeat):
            work()

    return run


@contextmanager
def shared(clock: Clock, nbytes: int) -> Iterator[tuple[RankGroup, Any]]:
    """Provide zeroed symmetric memory of all ranks until all of them have finished with it. Collective."""
    group = dist.group.WORLD
    assert group is not None
    rank_group = RankGroup.acquire(group)
    try:
        yield rank_group, heap_of(rank_group, clock.device).allocate(nbytes)
        clock.barrier()
    finally:
        rank_group.release()


def gemms(device: str, shapes: Sequence[tuple[int, int, int]], dtype: str) -> list[ProbeSample]:
    """Measure torch's matmul. key: its M, N and K."""
    clock = Clock(device)
    found = []
    for m, n, k in shapes:
        options: dict[str, Any] = {"device": clock.device, "dtype": getattr(torch, dtype)}
        a, b = torch.randn(m, k, **options), torch.randn(k, n, **options)
        out = torch.empty(m, n, **options)
        repeat = max(1, min(20, round(_SHORT_US * _FLOPS_PER_US[device] / (2 * m * n * k))))
        found.append(clock.sample(f"gemm {dtype}", (m, n, k), lambda: torch.mm(a, b, out=out), repeat=repeat))  # noqa: B023
    return found


def memory(device: str, nbytes: int) -> list[ProbeSample]:
    """Measure a copy within the rank's memory. key: its bytes."""
    clock = Clock(device)
    src = torch.ones(nbytes, dtype=torch.uint8, device=clock.device)
    dst = torch.empty_like(src)
    return [clock.sample("memory", (nbytes,), lambda: dst.copy_(src), repeat=4)]


def collectives(device: str, op: str, sizes: Sequence[int]) -> list[ProbeSample]:
    """Measure a collective as `sequential` runs it. key: the bytes of a shard, to one peer, or of an all-reduce's part."""
    clock = Clock(device)
    return [_collective(clock, op, nbytes) for nbytes in sizes]


def _collective(clock: Clock, op: str, nbytes: int) -> ProbeSample:
    """Measure one size. On CPUs the dtype is float32, because their libraries may lack other types."""
    dtype = torch.bfloat16 if clock.device.type == "cuda" else torch.float32
    size, cols = dist.get_world_size(), min(_COLS, nbytes // dtype.itemsize)
    rows = nbytes // dtype.itemsize // cols
    name = str(dtype).removeprefix("torch.")
    problem = Problem(op=COLLECTIVES[op], m=rows * size, n=cols, k=cols, world_size=size, dtype=name)  # type: ignore[arg-type]
    schedule = build(problem, "sequential")
    step = next(steps_of(Collective, schedule.ranks[dist.get_rank()]))
    group = dist.group.WORLD
    assert group is not None
    collective = NcclCollective(group, step, problem)
    src, dst = (torch.zeros(*region.shape, dtype=dtype, device=clock.device) for region in (step.src, step.dst))
    return clock.sample(op, (nbytes,), lambda: collective.run(src, dst), repeat=4 if nbytes < 1 << 22 else 1)


def host_launches(device: str) -> list[ProbeSample]:
    """Measure a matmul of one element, which gives the fixed cost of a step of the host executor."""
    clock = Clock(device)
    one, out = torch.ones(1, 1), torch.empty(1, 1)
    return [clock.sample("launch", (_MANY,), lambda: [torch.mm(one, one, out=out) for _ in range(_MANY)], per=_MANY)]


def host_gathers(device: str, rows: int, columns: int) -> list[ProbeSample]:
    """Measure torch's sums of a table's rows in bags of 32. key: rows that are read, bytes of a row."""
    clock = Clock(device)
    table = torch.ones(4 * rows, columns)
    indices = torch.randint(4 * rows, (rows // _BAG, _BAG))
    key = (rows, columns * table.element_size())
    return [clock.sample("gather", key, lambda: torch.nn.functional.embedding_bag(indices, table, mode="sum"), repeat=4)]


def host_flags(device: str) -> list[ProbeSample]:
    """Measure stores and loads of a flag. The time is that of one operation."""
    clock = Clock(device)
    with shared(clock, 8 * _MANY) as (group, piece):
        words = piece.words(group.rank)

        def work() -> None:
            for index in range(_MANY):
                words.store(index, 1)
                words.load(index)

        return [clock.sample("flag", (_MANY,), work, per=2 * _MANY)]


def host_hops(device: str) -> list[ProbeSample]:
    """Measure rounds of a signal to the next rank and a wait for the previous rank. The time is that of one round."""
    clock = Clock(device)
    with shared(clock, 8) as (group, piece):
        theirs, mine = piece.words((group.rank + 1) % group.world_size), piece.words(group.rank)
        rounds = [0]

        def work() -> None:
            for _ in range(_MANY):
                rounds[0] += 1
                theirs.store(0, rounds[0])
                group.wait_until(lambda: mine.load(0) >= rounds[0], lambda: f"round {rounds[0]} of the probe hop")

        return [clock.sample("hop", (_MANY,), work, per=_MANY)]


def host_copies(device: str) -> list[ProbeSample]:
    """Measure copies into the next rank's memory by all ranks at once. key: bytes, copies."""
    clock, found = Clock(device), []
    with shared(clock, HOST_COPY_BYTES[-1]) as (group, piece):
        for nbytes in HOST_COPY_BYTES:
            src, dst = (
                torch.ones(1, nbytes // 4),
                piece.view((group.rank + 1) % group.world_size, 0, 1, nbytes // 4, torch.float32),
            )
            found.append(clock.sample("copy push", (nbytes, 1), lambda: dst.copy_(src), repeat=4))  # noqa: B023
    return found


def host_concurrent(device: str) -> list[ProbeSample]:
    """Measure a matmul while a thread copies, and copies while a thread multiplies, and each alone."""
    clock = Clock(device)
    a, product = torch.randn(_CONCURRENT, _CONCURRENT), torch.empty(_CONCURRENT, _CONCURRENT)
    src, dst = torch.ones(1 << 20), torch.empty(1 << 20)
    works: dict[str, Work] = {"gemm": lambda: torch.mm(a, a, out=product), "copy": lambda: dst.copy_(src)}
    found = [clock.sample(f"{name} alone", (), work, repeat=4) for name, work in works.items()]
    for name, other in (("gemm", "copy"), ("copy", "gemm")):
        stop = threading.Event()

        def until_stopped(work: Work = works[other], stop: threading.Event = stop) -> None:
            while not stop.is_set():
                work()

        thread = threading.Thread(target=until_stopped, daemon=True)
        thread.start()
        found.append(clock.sample(f"{name} during {other}", (), works[name], repeat=4))
        stop.set()
        thread.join()
    return found
