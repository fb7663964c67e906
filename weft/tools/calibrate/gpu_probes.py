"""The probes of `weft calibrate` that need Triton: launches, flags, copy engines, stores, and weft's own kernels on GPUs.

All ranks run a probe at the same time. In a probe of copies, all ranks copy at once around the ring, from rank r to r + 1.
Flags and memory that peers access are in symmetric memory, which each probe allocates. Probes of weft's kernels use the same
launchers and tables as schedules, with whole waves of blocks. `sms` is the number of SMs and of blocks. Under Triton's
interpreter these also run on a CPU, with few blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.symmetric_heap import Allocation
from weft.compat.device import capabilities
from weft.compat.streams import Driver, Word, comm_stream, give_back
from weft.core.problem import Problem
from weft.core.schedule import Bags, Flag, Gemm, Lookup, Part, Region
from weft.kernels.gemm import gemm, tables
from weft.kernels.launch import Launcher
from weft.kernels.lookup import OutputPlace, lookup, lookup_tables
from weft.kernels.push import push, push_tables
from weft.kernels.sums import run_table, sum_runs
from weft.perf.shapes import TileShape, shapes_for, streamed_tile
from weft.tools.calibrate.common import Clock, ProbeSample, shared

COPY_BYTES = tuple(1 << power for power in (16, 18, 20, 22, 24, 26))
_MANY, _HOPS = 16, 16
_STORE_BYTES = 1 << 24
_CONCURRENT_BYTES = 1 << 25
_CONCURRENT_GEMM = 4096
_LONG = 40
"""The number of matmuls of size 4096 that run one after the other, which takes about 7 ms on an H200."""
_ROUNDS = 4
COLUMNS = 1024
"""The columns of a product. With one row tile of 128 per SM, each of the four tile shapes fills whole waves."""
SUMMING_SMS = 8
PULLED = 6
"""The number of sources at a peer in a sum. 16 KiB of each are in flight, 96 KiB in total."""
_BAG = 32


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
    steps: list[Word] = []
    with shared(clock, 4 * _HOPS) as (_, words):
        for index in range(_HOPS):
            here, there = (words.addresses[rank] + 4 * index for rank in (mine, following))
            steps += [Word("signal", there, 1), Word("wait", here, 1), Word("lower", here, 0)]
        enqueue = Driver().words(steps)
        return [clock.sample("hop", (_HOPS,), lambda: enqueue(stream()), per=_HOPS)]


def copies(device: str, direction: str) -> list[ProbeSample]:
    """Measure copy engines, to or from the next rank, on one stream. key: bytes, copies. The time is that of all copies."""
    clock = Clock(device)
    keys = [(nbytes, count) for nbytes in COPY_BYTES for count in ((1, 8) if nbytes <= 1 << 20 else (1,))]
    with shared(clock, 2 * COPY_BYTES[-1]) as (_, area):
        works = [(key, _copy_round_the_ring(area, direction, *key)) for key in keys]
        return [clock.sample(f"copy {direction}", key, work, repeat=2) for key, work in works]


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
    found = []
    with shared(clock, size * nbytes) as (_, area):
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
    options = _operands(clock)
    a, b = (torch.randn(_CONCURRENT_GEMM, _CONCURRENT_GEMM, **options) for _ in range(2))
    out = torch.empty_like(a)
    return [clock.sample("power", (count,), lambda: torch.mm(a, b, out=out), repeat=count) for count in (1, _LONG)]


def stores(device: str) -> list[ProbeSample]:
    """Measure stores to every peer by different numbers of SMs. key: bytes to each peer, SMs."""
    clock = Clock(device)
    sms = _sms(clock, None)
    counts = [count for count in (4, 8, 16, 32, 64) if count < sms] + [sms]
    with shared(clock, dist.get_world_size() * _STORE_BYTES) as (_, area):
        plan = _stored(area, clock.device)
        return [clock.sample("stores", (_STORE_BYTES, count), lambda: push(plan, sms=count)) for count in counts]  # noqa: B023


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
    options = _operands(clock)
    a, b = (torch.randn(_CONCURRENT_GEMM, _CONCURRENT_GEMM, **options) for _ in range(2))
    out = torch.empty_like(a)
    shard = torch.zeros(_CONCURRENT_BYTES // 2 // dist.get_world_size(), **options)
    whole = torch.zeros(shard.numel() * dist.get_world_size(), **options)
    with shared(clock, 2 * COPY_BYTES[-1]) as (_, area):
        works: dict[str, Callable[[], object]] = {
            "gemm": lambda: torch.mm(a, b, out=out),
            "copy": _copy_round_the_ring(area, "push", _CONCURRENT_BYTES, 1),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, shard),
        }
        found = [clock.sample(f"{name} alone", (), work, repeat=4) for name, work in works.items()]
        for name, other in (("gemm", "copy"), ("copy", "gemm"), ("gemm", "all_gather"), ("all_gather", "gemm")):
            found.append(clock.sample_concurrent(f"{name} during {other}", works[name], works[other], others=24, repeat=4))
    return found


def _operands(clock: Clock) -> dict[str, Any]:
    """Return the dtype and device of operands. Triton's interpreter does not support bfloat16."""
    return {"device": clock.device, "dtype": torch.bfloat16 if clock.device.type == "cuda" else torch.float16}


def _sms(clock: Clock, sms: int | None) -> int:
    return sms or capabilities(clock.device).sms


def counted_tiles(device: str, inner: int, sms: int | None = None) -> list[ProbeSample]:
    """Measure weft's GEMM with tiles that count. key: rows and columns of a tile, M, N, K.

    The largest tile shape is also measured with a last wave of half tiles."""
    clock = Clock(device)
    sms, shapes = _sms(clock, sms), shapes_for(capabilities(clock.device))
    found = [_tiles(clock, "counted tiles", blocks, 128 * sms, inner, sms) for blocks in shapes]
    halved = [blocks for blocks in shapes if blocks.halves]
    found += [_tiles(clock, "cut tiles", blocks, 128 * (sms + sms // 8), inner, sms) for blocks in halved]
    return found


def stored_tiles(device: str, inner: int, sms: int | None = None) -> list[ProbeSample]:
    """Measure weft's GEMM without counts, in which hardware stores the tiles."""
    clock = Clock(device)
    sms = _sms(clock, sms)
    shapes = shapes_for(capabilities(clock.device))
    return [_tiles(clock, "stored tiles", blocks, 128 * sms, inner, sms, count=False) for blocks in shapes]


def far_tiles(device: str, inners: Sequence[int], sms: int | None = None) -> list[ProbeSample]:
    """Measure weft's GEMM with counts and with its result in local memory or at the next rank. key: as in counted_tiles."""
    clock = Clock(device)
    sms = _sms(clock, sms)
    rows, peer = 128 * sms, (dist.get_rank() + 1) % dist.get_world_size()
    options = _operands(clock)
    largest, found = shapes_for(capabilities(clock.device))[0], []
    with shared(clock, rows * COLUMNS * options["dtype"].itemsize) as (_, area):
        far = area.view(peer, 0, rows, COLUMNS, options["dtype"])
        for inner in inners:
            found.append(_tiles(clock, "near tiles", largest, rows, inner, sms))
            found.append(_tiles(clock, "far tiles", largest, rows, inner, sms, far=far))
        del far
    return found


def _tiles(
    clock: Clock,
    what: str,
    blocks: TileShape,
    rows: int,
    inner: int,
    sms: int,
    *,
    count: bool = True,
    far: torch.Tensor | None = None,
) -> ProbeSample:
    options = _operands(clock)
    a, b = torch.randn(rows, inner, **options), torch.randn(inner, COLUMNS, **options)
    out = torch.empty(rows, COLUMNS, **options)
    words, status = (torch.zeros(2, dtype=torch.int32, device=clock.device) for _ in range(2))
    out_rank = 0 if far is None else 1
    part = Part(
        Region("a", 0, (0, rows), (0, inner)),
        Region("out", out_rank, (0, rows), (0, COLUMNS)),
        (),
        Flag("made", 0, 0) if count else None,
    )
    plan = tables(
        Gemm(Region("b", 0, (0, inner), (0, COLUMNS)), (part,)),
        device=clock.device,
        source=lambda _: 0,
        gate_address=lambda _: 0,
        count_address=lambda _: words.data_ptr(),
        stored_at=None if far is None else lambda _, row: far[row:],
        need=lambda _: 1,
        blocks=blocks,
    )
    launched_by = Launcher()

    def work() -> None:
        gemm((a,), b, out, plan, status, sms=sms, launched_by=launched_by)

    sample = clock.sample(what, (blocks.m, blocks.n, rows, COLUMNS, inner), work, repeat=2)
    clock.barrier()  # a peer's stores have landed
    assert not int(words[1]), "counts go to the first word, which lives until here"
    return sample


def lookups(device: str, rows: int, columns: int, sms: int | None = None) -> list[ProbeSample]:
    """Measure weft's lookup of bags of 32 rows. key: rows that are read, bytes of a row."""
    clock = Clock(device)
    work, key = _lookup(clock, rows, columns, _sms(clock, sms))
    return [clock.sample("lookup", key, work, repeat=4)]


def _lookup(clock: Clock, rows: int, columns: int, sms: int) -> tuple[Callable[[], None], tuple[int, int]]:
    options = _operands(clock)
    table = torch.ones(4 * rows, columns, **options)
    batch = rows // _BAG
    indices = torch.randint(4 * rows, (rows,), device=clock.device)
    offsets = torch.arange(0, rows + 1, _BAG, device=clock.device)
    out = torch.empty(batch, columns, **options)
    whole = Region("bags", 0, (0, batch), (0, columns))
    plan = lookup_tables(
        Lookup((Bags(whole, whole),)),
        [table],
        columns=[(0, columns)],
        batch=batch,
        device=clock.device,
        target=lambda _: OutputPlace(0, out.stride(0) * out.element_size(), True),
        count_address=lambda _: 0,
    )
    launched_by, held = Launcher(), (table,)

    def work() -> None:
        assert held
        lookup(plan, indices, offsets, None, mean=False, dtype=out.dtype, out=out, sms=sms, launched_by=launched_by)

    return work, (rows, columns * out.element_size())


def copies_during_lookups(device: str, rows: int, columns: int, others: int = 24) -> list[ProbeSample]:
    """Measure strided copies to the next rank, and lookups, each alone and during the other.

    key of copies: their bytes. The probe runs on GPUs only, because it needs a stream that waits."""
    clock = Clock(device)
    looked_up, _ = _lookup(clock, rows, columns, _sms(clock, None))
    height, width = 1 << 14, 1 << 10
    mine, other = dist.get_rank(), (dist.get_rank() + 1) % dist.get_world_size()
    copy = Driver().copier(rows=height, row_bytes=width, pitches=(2 * width, 2 * width))
    with shared(clock, 4 * height * width) as (_, area):
        src, dst = area.addresses[mine], area.addresses[other] + 2 * height * width

        def copied() -> None:
            copy(dst, src, stream())

        return [
            clock.sample("strided copy alone", (height * width,), copied, repeat=4),
            clock.sample("lookup alone", (), looked_up, repeat=4),
            clock.sample_concurrent("strided copy during lookup", copied, looked_up, others=others, repeat=4),
            clock.sample_concurrent("lookup during strided copy", looked_up, copied, others=4 * others, repeat=4),
        ]


def sums(device: str, nbytes: int) -> list[ProbeSample]:
    """Measure weft's sum on few SMs, of two sources in local memory and of PULLED sources at the next rank.

    key: the bytes that are read and written, or that come from the peer, and the SMs."""
    clock = Clock(device)
    dtype = _operands(clock)["dtype"]
    mine, peer = dist.get_rank(), (dist.get_rank() + 1) % dist.get_world_size()

    def summed(sources: list[int], out: int) -> Callable[[], None]:
        plan, run = run_table(sources, own=0, dtype=dtype, divide_by=1, device=clock.device), Launcher()
        elements = nbytes // dtype.itemsize
        return lambda: sum_runs(plan, own=sources[0], out=out, elements=elements, sms=SUMMING_SMS, launched_by=run, stream=None)

    with shared(clock, (PULLED + 1) * nbytes) as (_, area):
        here, there = ([area.addresses[rank] + i * nbytes for i in range(PULLED + 1)] for rank in (mine, peer))
        return [
            clock.sample("sums", (3 * nbytes, SUMMING_SMS), summed(here[:2], here[-1])),
            clock.sample("pulled sums", (PULLED * nbytes, SUMMING_SMS), summed(there[:PULLED], here[-1])),
        ]


def exchanges(device: str, inners: Sequence[int], sms: int | None = None) -> list[ProbeSample]:
    """Measure weft.matmul_all_reduce with one_shot, a single kernel, for 16 and 512 rows, each with two sizes of K per rank.

    key: the global M, N and K, and the rows and columns of a tile. All tiles fit into one wave."""
    from weft.ops import close, matmul_all_reduce

    clock = Clock(device)
    options, size, found = _operands(clock), dist.get_world_size(), []
    sms = _sms(clock, sms)
    for rows, columns in ((16, 2048), (512, 128 * max(1, sms // 4))):
        for inner in inners:
            dtype = str(options["dtype"]).removeprefix("torch.")
            problem = Problem(op="matmul_all_reduce", m=rows, n=columns, k=inner * size, world_size=size, dtype=dtype)  # type: ignore[arg-type]
            tile = streamed_tile(problem, columns, 1, rows, sms)
            a, b = torch.randn(rows, inner, **options), torch.randn(inner, columns, **options)
            key = (rows, columns, inner * size, *tile)
            found.append(clock.sample("one_shot", key, lambda: matmul_all_reduce(a, b, schedule="one_shot"), repeat=4))  # noqa: B023
    clock.barrier()
    close()
    return found


def staged(device: str, rows: int) -> list[ProbeSample]:
    """Measure torch's matmul of rows in one piece, and of rows in two pieces that are copied together first.

    key: rows, bytes of a row."""
    clock = Clock(device)
    options = _operands(clock)
    a, b = (torch.randn(rows, rows, **options) for _ in range(2))
    out, halves = torch.empty_like(a), (a[: rows // 2], a[rows // 2 :].clone())
    key = (rows, rows * a.element_size())
    return [
        clock.sample("one run", key, lambda: torch.mm(a, b, out=out), repeat=4),
        clock.sample("two runs", key, lambda: torch.mm(torch.cat(halves), b, out=out), repeat=4),
    ]


def cached(device: str, inner: int, columns: int) -> list[ProbeSample]:
    """Measure repeated products of few rows with a matrix that stays in the last-level cache. key: bytes of the matrix."""
    clock = Clock(device)
    options = _operands(clock)
    a, b = torch.randn(16, inner, **options), torch.randn(inner, columns, **options)
    out = torch.empty(16, columns, **options)
    return [clock.sample("cached", (b.numel() * b.element_size(),), lambda: torch.mm(a, b, out=out), repeat=20)]
