"""These probes measure weft's own kernels: tiles of its GEMM, lookups, sums, and the kernel that multiplies and exchanges.

They use the same launchers and tables as schedules, with whole waves of blocks. `sms` is the number of SMs and of blocks. Under
Triton's interpreter the probes also run on a CPU, with few blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.rank_group import RankGroup
from weft.comm.symmetric_heap import Allocation
from weft.compat.device import capabilities
from weft.core.problem import Problem
from weft.core.schedule import Bags, Flag, Gemm, Lookup, Part, Region
from weft.kernels.gemm import gemm, make_launcher, tables
from weft.kernels.lookup import OutputPlace, lookup, lookup_tables
from weft.kernels.lookup import make_launcher as lookup_launcher
from weft.kernels.runs import make_launcher as sum_launcher
from weft.kernels.runs import run_table, sum_runs
from weft.kernels.shapes import TileShape, shapes_for
from weft.perf.shapes import streamed_tile
from weft.tools.calibrate.clock import Clock
from weft.tools.calibrate.gpu_probes import stream
from weft.tools.calibrate.samples import ProbeSample

COLUMNS = 1024
"""The columns of a product. With one row tile of 128 per SM, each of the four tile shapes fills whole waves."""
SUMMING_SMS = 8
PULLED = 6
"""The number of sources at a peer in a sum. 16 KiB of each are in flight, 96 KiB in total."""
_BAG = 32


def _operands(clock: Clock) -> dict[str, Any]:
    """Return the dtype and device of operands. Triton's interpreter does not support bfloat16."""
    return {"device": clock.device, "dtype": torch.bfloat16 if clock.device.type == "cuda" else torch.float16}


def _sms(clock: Clock, sms: int | None) -> int:
    return sms or capabilities(clock.device).sms


@contextmanager
def _shared(clock: Clock, nbytes: int) -> Iterator[Allocation]:
    """Provide symmetric memory of all ranks until all of them have finished with it. Collective."""
    group = dist.group.WORLD
    assert group is not None
    rank_group = RankGroup.acquire(group)
    try:
        yield rank_group.get_heap(clock.device).allocate(nbytes)
        clock.barrier()
    finally:
        rank_group.release()


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
    with _shared(clock, rows * COLUMNS * options["dtype"].itemsize) as area:
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
    launched_by = make_launcher()

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
    launched_by, held = lookup_launcher(), (table,)

    def work() -> None:
        assert held
        lookup(plan, indices, offsets, None, mean=False, dtype=out.dtype, out=out, sms=sms, launched_by=launched_by)

    return work, (rows, columns * out.element_size())


def copies_during_lookups(device: str, rows: int, columns: int, others: int = 24) -> list[ProbeSample]:
    """Measure strided copies to the next rank, and lookups, each alone and during the other.

    key of copies: their bytes. The probe runs on GPUs only, because it needs a stream that waits."""
    from weft.compat.streams import Driver

    clock = Clock(device)
    looked_up, _ = _lookup(clock, rows, columns, _sms(clock, None))
    height, width = 1 << 14, 1 << 10
    mine, other = dist.get_rank(), (dist.get_rank() + 1) % dist.get_world_size()
    copy = Driver().copier(rows=height, row_bytes=width, pitches=(2 * width, 2 * width))
    with _shared(clock, 4 * height * width) as area:
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
        plan, run = run_table(sources, own=0, dtype=dtype, divide_by=1, device=clock.device), sum_launcher()
        elements = nbytes // dtype.itemsize
        return lambda: sum_runs(plan, own=sources[0], out=out, elements=elements, sms=SUMMING_SMS, launched_by=run, stream=None)

    with _shared(clock, (PULLED + 1) * nbytes) as area:
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
