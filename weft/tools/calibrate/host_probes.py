"""These probes measure the host executor: the cost of steps, flags and copies through shared memory on this CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from weft.comm.rank_group import RankGroup
from weft.comm.symmetric_heap import HostAllocation
from weft.tools.calibrate.clock import Clock
from weft.tools.calibrate.samples import ProbeSample

COPY_BYTES = tuple(1 << power for power in (14, 16, 18, 20, 22))
_MANY = 64
_BAG = 32
_CONCURRENT = 384


def launches(device: str) -> list[ProbeSample]:
    """Measure a matmul of one element, which gives the fixed cost of a step."""
    clock = Clock(device)
    one, out = torch.ones(1, 1), torch.empty(1, 1)
    return [clock.sample("launch", (_MANY,), lambda: [torch.mm(one, one, out=out) for _ in range(_MANY)], per=_MANY)]


def gathers(device: str, rows: int, columns: int) -> list[ProbeSample]:
    """Measure torch's sums of a table's rows in bags of 32. key: rows that are read, bytes of a row."""
    clock = Clock(device)
    table = torch.ones(4 * rows, columns)
    indices = torch.randint(4 * rows, (rows // _BAG, _BAG))
    key = (rows, columns * table.element_size())
    return [clock.sample("gather", key, lambda: torch.nn.functional.embedding_bag(indices, table, mode="sum"), repeat=4)]


def _with_rank_group(probe: Callable[[Clock, RankGroup], list[ProbeSample]], device: str) -> list[ProbeSample]:
    group = dist.group.WORLD
    assert group is not None
    rank_group = RankGroup.acquire(group)
    try:
        return probe(Clock(device), rank_group)
    finally:
        dist.barrier()
        rank_group.release()


def _allocated(rank_group: RankGroup, nbytes: int) -> HostAllocation:
    piece = rank_group.get_heap(torch.device("cpu")).allocate(nbytes)
    assert isinstance(piece, HostAllocation)
    return piece


def flags(device: str) -> list[ProbeSample]:
    """Measure stores and loads of a flag. The time is that of one operation."""

    def probe(clock: Clock, rank_group: RankGroup) -> list[ProbeSample]:
        words = _allocated(rank_group, 8 * _MANY).words(rank_group.rank)

        def work() -> None:
            for index in range(_MANY):
                words.store(index, 1)
                words.load(index)

        return [clock.sample("flag", (_MANY,), work, per=2 * _MANY)]

    return _with_rank_group(probe, device)


def hops(device: str) -> list[ProbeSample]:
    """Measure rounds of a signal to the next rank and a wait for the previous rank. The time is that of one round."""

    def probe(clock: Clock, rank_group: RankGroup) -> list[ProbeSample]:
        piece = _allocated(rank_group, 8)
        theirs, mine = piece.words((rank_group.rank + 1) % rank_group.world_size), piece.words(rank_group.rank)
        rounds = [0]

        def work() -> None:
            for _ in range(_MANY):
                rounds[0] += 1
                theirs.store(0, rounds[0])
                rank_group.wait_until(lambda: mine.load(0) >= rounds[0], lambda: f"round {rounds[0]} of the probe hop")

        return [clock.sample("hop", (_MANY,), work, per=_MANY)]

    return _with_rank_group(probe, device)


def copies(device: str) -> list[ProbeSample]:
    """Measure copies into the next rank's memory by all ranks at once. key: bytes, copies."""

    def probe(clock: Clock, rank_group: RankGroup) -> list[ProbeSample]:
        piece, peer = _allocated(rank_group, COPY_BYTES[-1]), (rank_group.rank + 1) % rank_group.world_size
        found = []
        for nbytes in COPY_BYTES:
            src, dst = torch.ones(1, nbytes // 4), piece.view(peer, 0, 1, nbytes // 4, torch.float32)
            work: Callable[[], object] = lambda dst=dst, src=src: dst.copy_(src)  # type: ignore[misc]  # noqa: E731
            found.append(clock.sample("copy push", (nbytes, 1), work, repeat=4))
        return found

    return _with_rank_group(probe, device)


def concurrent(device: str) -> list[ProbeSample]:
    """Measure a matmul while a thread copies, and copies while a thread multiplies, and each alone."""
    clock = Clock(device)
    a = torch.randn(_CONCURRENT, _CONCURRENT)
    src, product = torch.ones(1 << 20), torch.empty(_CONCURRENT, _CONCURRENT)
    dst = torch.empty_like(src)
    works: dict[str, Callable[[], object]] = {
        "gemm": lambda: torch.mm(a, a, out=product),
        "copy": lambda: dst.copy_(src),
    }
    found = [clock.sample(f"{name} alone", (), work, repeat=4) for name, work in works.items()]
    for name, other in (("gemm", "copy"), ("copy", "gemm")):
        stop = threading.Event()
        thread = threading.Thread(target=_until_stopped, args=(works[other], stop), daemon=True)
        thread.start()
        found.append(clock.sample(f"{name} during {other}", (), works[name], repeat=4))
        stop.set()
        thread.join()
    return found


def _until_stopped(work: Callable[[], object], stop: threading.Event) -> None:
    while not stop.is_set():
        work()
