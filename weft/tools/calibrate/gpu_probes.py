"""These probes measure GPUs: launches, flags, copy engines, stores from SMs, and how they slow each other down.

All ranks run a probe at the same time. In a probe of copies, all ranks copy at once around the ring, from rank r to r + 1.
Flags and memory that peers access are in symmetric memory, which each probe allocates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.rank_group import RankGroup
from weft.comm.symmetric_heap import Allocation
from weft.compat.comm_streams import comm_stream, give_back
from weft.compat.streams import Driver, Word
from weft.core.schedule import Region
from weft.kernels.push import push, push_tables
from weft.tools.calibrate.clock import Clock
from weft.tools.calibrate.samples import ProbeSample

COPY_BYTES = tuple(1 << power for power in (16, 18, 20, 22, 24, 26))
_MANY, _HOPS = 16, 16
_STORE_BYTES = 1 << 24
_CONCURRENT_BYTES = 1 << 25
_CONCURRENT_GEMM = 4096
_LONG = 40
"""The number of matmuls of size 4096 that run one after the other, which takes about 7 ms on an H200."""
_ROUNDS = 4


def peers(clock: Clock, nbytes: int) -> Allocation:
    """Return zeroed symmetric memory of all ranks. Collective."""
    group = dist.group.WORLD
    assert group is not None
    rank_group = RankGroup.acquire(group)
    try:
        return rank_group.get_heap(clock.device).allocate(nbytes)
    finally:
        clock.barrier()
        rank_group.release()


def stream() -> int:
    """Return torch's current stream."""
    return int(torch.cuda.current_stream().cuda_stream)


def launches(device: str) -> list[ProbeSample]:
    """Measure kernels of one element, one after the other. key: their number. The time is that of one."""
    clock = Clock(device)
    one = torch.zeros(1, device=clock.device)
    return [clock.sample("launch", (_MANY,), lambda: [one.add_(1) for _ in range(_MANY)], per=_MANY)]


def flags(device: str) -> list[ProbeSample]:
    """Measure a stream that signals itself, waits, and resets the flag. The time is that of one of the three operations."""
    clock = Clock(device)
    words = torch.zeros(_MANY, dtype=torch.int32, device=clock.device)
    at = [words.data_ptr() + 4 * index for index in range(_MANY)]
    kinds = (("signal", 1), ("wait", 1), ("lower", 0))
    enqueue = Driver().words([Word(kind, address, value) for address in at for kind, value in kinds])  # type: ignore[arg-type]
    return [clock.sample("flag", (_MANY,), lambda: enqueue(stream()), per=3 * _MANY)]


def hops(device: str) -> list[ProbeSample]:
    """Measure rounds of a signal to the next rank and a wait for the previous rank. The time is that of one round.

        rank 0                              rank 1
        signal flag 0 of rank 1 ~~~~~~~~>   wait for flag 0, reset it
        wait for flag 0, reset  <~~~~~~~~   signal flag 0 of the next one ...

    Each round has its own flag. With up to _HOPS ranks, a rank that has ended the last of _HOPS rounds knows that its neighbour
    has reset the first flag, so calls can follow each other.
    """
    clock = Clock(device)
    mine, following = dist.get_rank(), (dist.get_rank() + 1) % dist.get_world_size()
    words = peers(clock, 4 * _HOPS)
    steps: list[Word] = []
    for index in range(_HOPS):
        here = words.addresses[mine] + 4 * index
        steps += [Word("signal", words.addresses[following] + 4 * index, 1), Word("wait", here, 1), Word("lower", here, 0)]
    enqueue = Driver().words(steps)
    return [clock.sample("hop", (_HOPS,), lambda: enqueue(stream()), per=_HOPS)]


def copies(device: str, direction: str) -> list[ProbeSample]:
    """Measure copy engines, to or from the next rank, on one stream. key: bytes, copies. The time is that of all copies."""
    clock = Clock(device)
    area = peers(clock, 2 * COPY_BYTES[-1])
    found = []
    for nbytes in COPY_BYTES:
        for count in (1, 8) if nbytes <= 1 << 20 else (1,):
            work = _copy_round_the_ring(area, direction, nbytes, count)
            found.append(clock.sample(f"copy {direction}", (nbytes, count), work, repeat=2))
    return found


def _copy_round_the_ring(area: Allocation, direction: str, nbytes: int, count: int) -> Callable[[], None]:
    mine = dist.get_rank()
    other = area.addresses[(mine + 1) % dist.get_world_size()]
    copy = Driver().copier(rows=1, row_bytes=nbytes, pitches=(nbytes, nbytes))
    low, high = area.addresses[mine], other + COPY_BYTES[-1]
    dst, src = (high, low) if direction == "push" else (low, high)

    def work() -> None:
        for _ in range(count):
            copy(dst, src, stream())

    return work


def several(device: str) -> list[ProbeSample]:
    """Measure a push to every peer, on one stream and on one stream per peer. key: bytes to each peer, streams."""
    clock = Clock(device)
    size, nbytes = dist.get_world_size(), COPY_BYTES[-2]
    area = peers(clock, size * nbytes)
    found = []
    for streams in dict.fromkeys((1, size - 1)):
        lanes = [comm_stream(priority="normal", device=clock.device) for _ in range(streams - 1)]
        work = _push_to_all(area, nbytes, lanes)
        found.append(clock.sample("several", (nbytes, streams), work, repeat=2))
        torch.cuda.synchronize(clock.device)
        for lane in lanes:
            give_back(lane)
    if size > 2:
        found.append(clock.sample("turns", (nbytes, _ROUNDS), _push_to_all(area, nbytes, [], rounds=_ROUNDS), repeat=2))
    return found


def _push_to_all(area: Allocation, nbytes: int, lanes: list[torch.cuda.Stream], *, rounds: int = 1) -> Callable[[], None]:
    """Return a work that pushes to every peer in turn, one piece in each of `rounds` rounds."""
    mine, size = dist.get_rank(), dist.get_world_size()
    piece = nbytes // rounds
    copy = Driver().copier(rows=1, row_bytes=piece, pitches=(piece, piece))
    # Each rank writes its own slot at a peer, and no rank writes the memory from which it reads.
    slots = [mine * nbytes + part * piece for part in range(rounds)]
    moves = [(area.addresses[(mine + i) % size] + at, area.addresses[mine] + at) for at in slots for i in range(1, size)]

    def work() -> None:
        caller = torch.cuda.current_stream()
        for lane in lanes:
            lane.wait_stream(caller)
        for index, (dst, src) in enumerate(moves):
            on = [caller, *lanes][index % (1 + len(lanes))]
            copy(dst, src, int(on.cuda_stream))
        for lane in lanes:
            caller.wait_stream(lane)

    return work


def power(device: str) -> list[ProbeSample]:
    """Measure a matmul after a pause, and many in a row. key: their number. The time is that of one."""
    clock = Clock(device)
    options: dict[str, Any] = {"device": clock.device, "dtype": torch.bfloat16}
    a, b = (torch.randn(_CONCURRENT_GEMM, _CONCURRENT_GEMM, **options) for _ in range(2))
    out = torch.empty_like(a)
    return [clock.sample("power", (count,), lambda: torch.mm(a, b, out=out), repeat=count) for count in (1, _LONG)]


def stores(device: str) -> list[ProbeSample]:
    """Measure stores to every peer by different numbers of SMs. key: bytes to each peer, SMs."""
    clock = Clock(device)
    area = peers(clock, dist.get_world_size() * _STORE_BYTES)
    sms = torch.cuda.get_device_properties(clock.device).multi_processor_count
    plan = _stored(area, clock.device)
    counts = [count for count in (4, 8, 16, 32, 64) if count < sms] + [sms]
    found = []
    for count in counts:
        work: Callable[[], None] = lambda count=count: push(plan, sms=count)  # type: ignore[misc]  # noqa: E731
        found.append(clock.sample("stores", (_STORE_BYTES, count), work))
    return found


def _stored(area: Allocation, device: torch.device) -> Any:
    mine, size = dist.get_rank(), dist.get_world_size()
    src = Region("sent", mine, (0, 1), (0, _STORE_BYTES))
    targets = [Region("landing", (mine + i) % size, (0, 1), (0, _STORE_BYTES)) for i in range(1, size)]
    return push_tables(
        [(src, dst, None) for dst in targets],
        device=device,
        itemsize=1,
        address=lambda region: area.addresses[region.rank] + mine * _STORE_BYTES,
        stride=lambda _: _STORE_BYTES,
        count_address=lambda _: 0,
    )


def concurrent(device: str) -> list[ProbeSample]:
    """Measure matmuls with copies, and matmuls with NCCL's all-gather. Each runs alone and during the other."""
    clock = Clock(device)
    area = peers(clock, 2 * COPY_BYTES[-1])
    options: dict[str, Any] = {"device": clock.device, "dtype": torch.bfloat16}
    a, b = (torch.randn(_CONCURRENT_GEMM, _CONCURRENT_GEMM, **options) for _ in range(2))
    out = torch.empty_like(a)
    shard = torch.zeros(_CONCURRENT_BYTES // 2 // dist.get_world_size(), **options)
    whole = torch.zeros(shard.numel() * dist.get_world_size(), **options)
    works: dict[str, Callable[[], object]] = {
        "gemm": lambda: torch.mm(a, b, out=out),
        "copy": _copy_round_the_ring(area, "push", _CONCURRENT_BYTES, 1),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, shard),
    }
    found = [clock.sample(f"{name} alone", (), work, repeat=4) for name, work in works.items()]
    for name, other in (("gemm", "copy"), ("copy", "gemm"), ("gemm", "all_gather"), ("all_gather", "gemm")):
        found.append(clock.sample_concurrent(f"{name} during {other}", works[name], works[other], others=24, repeat=4))
    clock.barrier()
    return found
