"""One kernel for matmul_all_reduce: tiles are multiplied, exchanged and summed by blocks that stay.

    _all_reduce_kernel   one launch is a whole call       all_reduce()  its launcher       Plan, Mailbox  what it works with

    block i, rank r                               block i, rank p
    1  multiply its tiles, send each     ~~~~~~~~>  (no wait before all are sent)
    2  wait for all ranks' partial tiles <~~~~~~~~  of the tiles that r sums: every tile (ONE_HOP), or those that r owns
       sum, add bias and residual, round, store in out; two hops: send the sum
    3  two hops: wait for the tiles that others own, store in out

Tile t is block t mod blocks' on every rank. So block i waits for blocks i of its peers alone, and for their phases before its
own alone: whichever blocks are resident, in whatever order they start, the call ends.

A mailbox is symmetric memory: a region for each (tile that is summed here, source), and for two hops one for each tile's sum.

    PACKED       a region is 8-byte words: 4 bytes of values, 4 of the call's number. A word is stored and seen as a whole, so
                 the data is its own flag: one trip, no fence, at twice the bytes
    otherwise    a region is the tile, and a word of the mailbox's head counts its calls: stores, barrier, release of all
                 threads' stores, then acquire and loads; two more trips of latency, half the bytes

Who writes, reads, resets. A region, and its word, is written by one rank's block alone and read by one block alone. Numbers
only grow: block i counts its calls in device memory (`epochs`), reads the number at its start and writes it at its end, so
that a replayed CUDA graph goes on counting; a wait is for at least this call's number, and nothing is reset.

Regions are there twice and taken by the number's parity. Rank r writes a region of p in call c + 2 only after its call c + 1,
in which it waited for what p sent in that call (p's partial tile, or as its owner p's sum): so p had ended call c, and with
it has read what the region held. Bad interleaving with one copy: r, in call c + 1, writes over what p still reads in call c.

Sums are in float32 in the order of ranks, by the same code on every rank, the own partial tile among them as it was rounded:
the same bits each call, and on each rank. Each wait ends after `tries` looks, or once `abort` is set; status then says which
region was late, and the tile goes on with what is there.

Legend: M N K of the local product; a tile is BLOCK_M x BLOCK_N; WIDTH words a row of a packed region.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.kernels.flags import table
from weft.kernels.launch import Launcher
from weft.kernels.mailbox import raise_region, received, send_tile
from weft.problem import Problem, Span1D

PACKED_BYTES = 1 << 19
"""Partial results of up to so many bytes a rank are packed: beyond, twice the bytes cost more than two trips. Reasoned from 300
GB/s and 1 us a trip, not measured."""
_FIELDS = 6
_ALIGN = 256
_SHARED_BYTES = 180 << 10
"""For tiles that are on their way: of 227 KiB that a block may have."""
_ELEMENTS = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32}


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tile shape, and how a block runs."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def tiling(problem: Problem, columns: tuple[Span1D, ...], device: torch.device, sms: int) -> Tiling:
    """The shape whose tiles of `columns` fill the SMs best: the time of a wave is that of streaming its columns of b."""
    if device.type != "cuda":
        return Tiling(m=16, n=16, k=16, warps=4, stages=1)
    rows = next((size for size in (16, 32, 64) if problem.m <= size), 128)
    row_tiles = -(-problem.m // rows)

    def streamed(cols: int) -> int:
        """Columns that a block streams, one wave after the other."""
        tiles = row_tiles * sum(-(-(high - low) // cols) for low, high in columns)
        return -(-tiles // sms) * cols

    cols = min((128, 64, 32), key=streamed)
    inner = (128 if rows < 64 else 64) * 2 // problem.itemsize
    stages = min(6, _SHARED_BYTES // ((rows + cols) * inner * problem.itemsize))
    return Tiling(m=rows, n=cols, k=inner, warps=4 if rows < 128 and rows * cols <= 4096 else 8, stages=stages)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one rank's launches have in common.

    tiles: for each tile: the rank that sums it, its place among that rank's tiles, its number, first row, first and last
    column. slots: tiles that a rank sums, at most. results: tiles whose sums are sent. align: divides all first columns.
    """

    problem: Problem
    rank: int
    one_hop: bool
    packed: bool
    multiply: bool
    tiling: Tiling
    tiles: torch.Tensor
    count: int
    slots: int
    align: int

    @property
    def results(self) -> int:
        return 0 if self.one_hop else self.count

    @property
    def regions(self) -> int:
        """Of one of the two copies."""
        return self.slots * self.problem.world_size + self.results

    @property
    def per_word(self) -> int:
        """Values in a packed word."""
        return 4 // self.problem.itemsize

    @property
    def region_bytes(self) -> int:
        size = self.tiling.m * self.tiling.n
        return 8 * size // self.per_word if self.packed else size * self.problem.itemsize

    @property
    def head_bytes(self) -> int:
        """The words before the regions."""
        return 0 if self.packed else -(-4 * self.regions // _ALIGN) * _ALIGN

    @property
    def mailbox_bytes(self) -> int:
        return self.head_bytes + 2 * self.regions * self.region_bytes

    def blocks(self, sms: int) -> int:
        return min(sms, self.count)


def plan(
    problem: Problem, rank: int, columns: tuple[Span1D, ...], *, one_hop: bool, multiply: bool, device: torch.device, sms: int
) -> Plan:
    """Lay the tiles out: the same on every rank. columns: those that each rank sums, by rank; of all ranks if one_hop.

    multiply: the kernel multiplies; else it finds the partial results ready. sms: of the GPU; blocks, where interpreted.
    """
    spans = ((0, problem.n),) if one_hop else columns
    shape = tiling(problem, spans, device, sms)
    rows: list[tuple[int, ...]] = []
    slots = 0
    for owner, (low, high) in enumerate(spans):
        places = [(row, col) for col in range(low, high, shape.n) for row in range(0, problem.m, shape.m)]
        first = len(rows)
        rows += [(owner, i, first + i, row, col, min(col + shape.n, high)) for i, (row, col) in enumerate(places)]
        slots = max(slots, len(places))
    packed = problem.m * problem.n * problem.itemsize <= PACKED_BYTES
    return Plan(
        problem=problem,
        rank=rank,
        one_hop=one_hop,
        packed=packed,
        multiply=multiply,
        tiling=shape,
        tiles=table(rows, torch.int32, device),
        count=len(rows),
        slots=slots,
        align=math.gcd(16, *(row[4] for row in rows)),
    )


@dataclass(frozen=True, kw_only=True)
class Mailbox:
    """A rank's memory for its launches, zeroed once. addresses: of every rank's mailbox, on the device. epochs: by block, its
    calls so far. abort: set to end all waits. status: of the last wait that ended early: region + 1, and the call."""

    addresses: torch.Tensor
    epochs: torch.Tensor
    abort: torch.Tensor
    status: torch.Tensor


def mailbox(addresses: list[int], blocks: int, device: torch.device) -> Mailbox:
    """For mailboxes of `Plan.mailbox_bytes` zeroed bytes that lie at these addresses, by rank."""
    words = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in (("abort", 1), ("status", 2))}
    epochs = torch.zeros(blocks, dtype=torch.int32, device=device)
    return Mailbox(addresses=table(addresses, torch.int64, device), epochs=epochs, **words)


def launcher() -> Launcher:
    """For `all_reduce`, call after call."""
    return Launcher(_all_reduce_kernel)


def all_reduce(
    layout: Plan,
    memory: Mailbox,
    out: torch.Tensor,
    *,
    factors: tuple[torch.Tensor, torch.Tensor] | None,
    partial: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    live: bool,
    tries: int,
    launched_by: Launcher | None = None,
    stream: int | None = None,
) -> None:
    """One call: out [M, N] = the sum over ranks of a @ b, or of `partial`, and the addends.

    factors: a [M, k] whose rows' elements are adjacent, b [k, N] of any strides. partial [M, N], bias [1, N], residual [M, N]
    are without gaps. live: exchange and count; else nothing is sent or waited for (a rehearsal), and out means nothing.
    launched_by, stream: as for weft.kernels.gemm.gemm.
    """
    assert (factors is not None) == layout.multiply, "factors, or a partial result"
    problem, shape = layout.problem, layout.tiling
    a, b = factors if factors is not None else (out, out)
    pointers = [a, b, *(t if t is not None else out for t in (partial, bias, residual)), out]
    sizes = (problem.m, problem.n, a.shape[1], a.stride(0), b.stride(0), b.stride(1))
    constants = _constants(layout, bias is not None, residual is not None)
    key = (sizes, tuple(t.data_ptr() % 16 for t in pointers))
    (launched_by or launcher())(
        memory.epochs.numel(),
        (
            *pointers,
            layout.tiles,
            memory.addresses,
            memory.epochs,
            memory.abort,
            memory.status,
            *sizes,
            layout.count,
            layout.slots,
            layout.regions,
            layout.head_bytes,
            layout.rank,
            tries if live else 0,
            int(live),
        ),
        constants,
        key=key,
        stream=stream,
        num_warps=shape.warps,
    )


def _constants(layout: Plan, bias: bool, residual: bool) -> dict[str, object]:
    shape = layout.tiling
    return {
        "ELEMENT": _ELEMENTS[layout.problem.dtype],
        "WORLD": layout.problem.world_size,
        "LANES": triton.next_power_of_2(layout.problem.world_size),
        "ONE_HOP": layout.one_hop,
        "PACKED": layout.packed,
        "MULTIPLY": layout.multiply,
        "BIAS": bias,
        "RESIDUAL": residual,
        "REGION_BYTES": layout.region_bytes,
        "PER_WORD": layout.per_word,
        "BLOCK_M": shape.m,
        "BLOCK_N": shape.n,
        "BLOCK_K": shape.k,
        "STAGES": shape.stages,
        "ALIGN": layout.align,
        "FIELDS": _FIELDS,
    }


@triton.jit
def _product(
    a_ptr, b_ptr, rows, cols, m, n, k, stride_am, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of a @ b in float32; zero where it lies beyond the matrices."""
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None].to(tl.int64) * stride_am + inner[None, :]
    b_ptrs = b_ptr + inner[:, None].to(tl.int64) * stride_bk + cols[None, :].to(tl.int64) * stride_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        left = inner < k - first
        a = tl.load(a_ptrs, mask=(rows < m)[:, None] & left[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=left[:, None] & (cols < n)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_bk
    return total


@triton.jit(do_not_specialize=["m", "tiles", "slots", "regions", "head_bytes", "rank", "tries", "live"])
def _all_reduce_kernel(
    a_ptr, b_ptr, partial_ptr, bias_ptr, residual_ptr, out_ptr,
    tiles_ptr, boxes_ptr, epochs_ptr, abort_ptr, status_ptr,
    m, n, k, stride_am, stride_bk, stride_bn, tiles, slots, regions, head_bytes, rank, tries, live,
    ELEMENT: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr, ONE_HOP: tl.constexpr, PACKED: tl.constexpr,
    MULTIPLY: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, REGION_BYTES: tl.constexpr,
    PER_WORD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    ALIGN: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    block, blocks = tl.program_id(0), tl.num_programs(0)
    call = tl.load(epochs_ptr + block) + 1
    first = call % 2 * regions
    peers = tl.arange(0, LANES)
    for tile in range(block, tiles, blocks):
        fields = tiles_ptr + FIELDS * tile
        owner, slot = tl.load(fields), tl.load(fields + 1)
        rows = tl.load(fields + 3) + tl.arange(0, BLOCK_M)
        cols = tl.multiple_of(tl.load(fields + 4), ALIGN) + tl.arange(0, BLOCK_N)
        if MULTIPLY:
            total = _product(
                a_ptr, b_ptr, rows, cols, m, n, k, stride_am, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K, STAGES
            )
        else:
            places = rows[:, None].to(tl.int64) * n + cols[None, :]
            total = tl.load(partial_ptr + places, mask=(rows < m)[:, None] & (cols < n)[None, :], other=0.0).to(tl.float32)
        value = total.to(ELEMENT)
        region = slot * WORLD + rank
        if live != 0:
            if ONE_HOP:
                for step in tl.static_range(1, WORLD + 1):
                    send_tile(
                        value, boxes_ptr, (rank + step) % WORLD, region, head_bytes, first, call, rows, m,
                        PACKED, PER_WORD, REGION_BYTES, BLOCK_M, BLOCK_N,
                    )  # fmt: skip
            else:
                send_tile(
                    value, boxes_ptr, owner, region, head_bytes, first, call, rows, m,
                    PACKED, PER_WORD, REGION_BYTES, BLOCK_M, BLOCK_N,
                )  # fmt: skip
            if not PACKED:
                raise_region(boxes_ptr, region, call, peers, (peers < WORLD) & ((peers == owner) | ONE_HOP))
    for tile in range(block, tiles, blocks):
        fields = tiles_ptr + FIELDS * tile
        if ONE_HOP or tl.load(fields) == rank:
            rows = tl.load(fields + 3) + tl.arange(0, BLOCK_M)
            cols = tl.multiple_of(tl.load(fields + 4), ALIGN) + tl.arange(0, BLOCK_N)
            mask = (rows < m)[:, None] & (cols < tl.load(fields + 5))[None, :]
            total = received(
                boxes_ptr, rank, tl.load(fields + 1) * WORLD, head_bytes, first, call, rows, m, tries, abort_ptr, status_ptr,
                WORLD, LANES, ELEMENT, PACKED, PER_WORD, REGION_BYTES, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            places = rows[:, None].to(tl.int64) * n + cols[None, :]
            if BIAS:
                total += tl.load(bias_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
            if RESIDUAL:
                total += tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
            value = total.to(ELEMENT)
            if not ONE_HOP:
                region = slots * WORLD + tl.load(fields + 2)
                if live != 0:
                    for step in tl.static_range(1, WORLD):
                        send_tile(
                            value, boxes_ptr, (rank + step) % WORLD, region, head_bytes, first, call, rows, m,
                            PACKED, PER_WORD, REGION_BYTES, BLOCK_M, BLOCK_N,
                        )  # fmt: skip
                    if not PACKED:
                        raise_region(boxes_ptr, region, call, peers, (peers < WORLD) & (peers != rank))
            tl.store(out_ptr + places, value, mask=mask)
    if not ONE_HOP:
        for tile in range(block, tiles, blocks):
            fields = tiles_ptr + FIELDS * tile
            if tl.load(fields) != rank:
                rows = tl.load(fields + 3) + tl.arange(0, BLOCK_M)
                cols = tl.multiple_of(tl.load(fields + 4), ALIGN) + tl.arange(0, BLOCK_N)
                mask = (rows < m)[:, None] & (cols < tl.load(fields + 5))[None, :]
                total = received(
                    boxes_ptr, rank, slots * WORLD + tl.load(fields + 2), head_bytes, first, call, rows, m,
                    tries, abort_ptr, status_ptr, 1, 1, ELEMENT, PACKED, PER_WORD, REGION_BYTES, BLOCK_M, BLOCK_N,
                )  # fmt: skip
                places = rows[:, None].to(tl.int64) * n + cols[None, :]
                tl.store(out_ptr + places, total.to(ELEMENT), mask=mask)
    if live != 0:
        tl.store(epochs_ptr + block, call)
