"""This kernel runs matmul_all_reduce and matmul_reduce_scatter of few rows: its blocks multiply, exchange and sum tiles.

    _all_reduce_kernel   persistent blocks; one launch is a whole call
    all_reduce()         its launcher; AllReducePlan, Mailbox  its layout and its memory

    block i, rank r                               block i, rank p
    1  multiply its tiles, send pieces    ~~~~~~~>  (no wait before all are sent)
       clear its part of what the previous call used
    2  wait for all ranks' partial pieces <~~~~~~~  of the tiles that r sums: whole tiles (one hop), or its piece of each tile
       sum, add bias and residual, round; one hop: store in out; two hops: send the sum to all, itself among them
    3  two hops: wait for all pieces' sums, store the tile in out
   norm: wait for the squares of all columns, store the norm of the tile

Tile t belongs to block t mod the number of blocks on every rank. So, without a norm, block i waits for blocks i of its peers
alone, and only for their earlier phases. The call ends if all blocks are resident, or if blocks start in the order of their
numbers. With two hops a tile has PIECE columns of every owner, so all blocks of all ranks sum equally many elements.

A mailbox is symmetric memory: for each tile a region for each source's piece, and with two hops a region for each piece's sum.
The data is its own flag (weft.kernels.mailbox), which takes one trip and no fence.

Sharing. Programs of a process group whose copies have the same capacity share a mailbox, whatever their tiles, regions and
numbers of blocks (weft.runtime.mailboxes). Its calls are those of all these programs, in one order, which is the same on every
rank. On a rank they come one after the other: call c begins when all blocks of call c - 1 have ended.

Ownership. In one call, each region is written by one block of one rank, and read by one block of the mailbox's rank; words of
squares are read by all blocks with tiles of these rows. A mailbox has three copies, which calls use in turn. Each starts at a
fixed place, and a call uses the first bytes of its copy. Call c uses copy c mod 3. It clears what call c - 1 used of copy (c -
1) mod 3, which call c + 2 fills. Its blocks divide these bytes among them, because the regions of call c - 1 may have been
other blocks'. So each call leaves its number and the words that it used in device memory (`epochs`). A replayed CUDA graph
continues the count. Every block has its own pair of these, because a late block must still read those of call c - 1 when
another one has ended call c. A call may have fewer blocks than the next one. So its blocks write all pairs: block i writes
those of i, i + blocks, i + 2 * blocks, and so on.

Why no word is lost. Rank p clears a copy in call c, which call c + 2 of its peers fills again.

    rank p   call c: clear the copy of c - 1   | call c + 1: send                     | call c + 2
    rank r                                       call c + 1: wait for p's words, end  | call c + 2: write this copy of p

Rank r writes to p in call c + 2 only after all blocks of its call c + 1 have ended. In that call r waited for words of every
rank, in every layout: it sums a piece of each tile, even if it owns no rows or columns. Rank p sent its words in its call
c + 1, when all blocks of its call c had ended and their stores were done. So p's clearing comes before. And when p clears, all
words of call c - 1 have arrived, because the blocks of p's call c - 1 waited for them. Nobody writes behind what that call
used, and this was empty before. So the whole copy is empty then, whatever layout call c + 2 has. A bad interleaving with two
copies: in call c + 1, r writes words that p then clears in its call c, and p waits for them forever.

Sums are in float32 in the order of ranks; the own partial tile is rounded like the others. So results have the same bits in
each call and on each rank. A wait gives up after `tries` looks, or once `abort` is set. status then names the late region, and
its sum is NaN, here and at every receiver, because an incomplete sum would look valid.

FP8 factors are multiplied by their scales in float32 before their product is rounded to words. The product of few rows is bound
by reading b from memory, and FP8 halves its bytes.

Norm. A block has some columns of its rows, and the norm needs the squares of all of them. Each tile writes one word for each
row to the own mailbox, its sum of squares. A block waits for the words of all tiles of its rows, adds them in a fixed order,
and normalises its tile. So blocks of a rank wait for each other, and all must be resident: there is one for each SM. These
words follow the regions in the copy, and are cleared with them. The interpreter runs blocks one after the other, so there a
norm has one block.

Legend: M N K of the local product; a tile is BLOCK_M x BLOCK_N; a row of a tile has WIDTH words, a row of a piece PART words,
and a piece HEIGHT rows; a share is an owner's columns, or rows (SCATTER).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
import triton.language as tl

from weft.compat.device import capabilities
from weft.core.hardware import Capabilities
from weft.core.problem import SCALE_BLOCK, Problem, Span1D
from weft.kernels.launch import Launcher
from weft.kernels.mailbox import clear, pack_words, place, received
from weft.kernels.scaled import RowScales, block_scales, operand, scaled, scales_of, specialised
from weft.perf.shapes import EXCHANGED_BYTES, promotes, streamed_tile, streams_wide
from weft.triton.flags import table

_LEAST_COPY = 64 << 10
"""The least capacity of a copy in bytes is nine eighths of this, so that small calls share one mailbox. All capacities are
multiples of what a block clears at once."""
_CLEARED = 1024
"""The least number of words that a block clears at once."""
_SHARED_BYTES = 180 << 10
"""Shared memory for tiles in flight, if the GPU allows a block that much."""
_EXCHANGING = 4
"""Blocks on an SM when the kernel only exchanges. On 4 x H200, 128 x 8192 takes 12.0 us with 4 blocks, and 12.8 with one."""
_SQUARES = 4096
"""The words of squares that a block looks at together. More would not fit the registers of its threads."""
_ELEMENTS = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32}


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """A Tiling is a tile shape, with a block's warps and pipeline stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def tiling(
    problem: Problem, width: int, pieces: int, multiply: bool, device: torch.device, sms: int, *, height: int | None = None
) -> Tiling:
    """Return the tile shape that weft.perf.shapes chooses.

    Steps over K have 128 elements if they fit: 8192 x 8192 at 64 rows takes 37.4 us with them, and 40.5 us with 64 (torch.mm:
    37.8 us). FP8 steps have as many bytes. Without a product, tiles are small, so that several blocks on an SM hide each
    other's latency.

    width: the columns of each piece of a tile.
    height: the rows of all tiles, by default M.
    """
    height = problem.m if height is None else height
    if device.type != "cuda":
        return Tiling(m=16, n=16, k=16 if problem.scaling is None else SCALE_BLOCK, warps=4, stages=1)
    if not multiply:
        least = pieces * EXCHANGED_BYTES // problem.itemsize
        return Tiling(m=16 if height <= 16 else 32, n=max(64, least), k=1, warps=4, stages=1)
    rows, cols = streamed_tile(problem, width, pieces, height, sms)
    itemsize = problem.operand_itemsize
    inner = (128 if rows * cols <= 4096 else 64) * 2 // itemsize
    wide = cols == 128 and streams_wide(problem, rows)
    room = min(_SHARED_BYTES, capabilities(device).shared_bytes) // ((rows + cols) * inner * itemsize)
    return Tiling(m=rows, n=cols, k=inner, warps=8 if wide or rows == 128 else 4, stages=min(4 if wide else 6, room))


Hops = Literal["one", "two", "scatter"]
"""The form of the exchange. With "one", every rank sums everything. With "two", owners of columns sum them and send the sums to
all ranks. With "scatter", owners of rows sum them."""


@dataclass(frozen=True, kw_only=True)
class AllReducePlan:
    """An AllReducePlan is the layout of one rank's launches.

    multiply: whether the kernel multiplies. Otherwise it reads partial results.
    sms: the SMs of the GPU, or the number of blocks under the interpreter.
    pieces: the pieces of a tile, each with its own owner. 1 if every rank sums everything.
    share: the most columns, or rows, of an owner.
    norm: whether the kernel also normalises the rows of its result.
    """

    problem: Problem
    rank: int
    hops: Hops
    multiply: bool
    sms: int
    tiling: Tiling
    pieces: int
    share: int
    norm: bool = False

    @property
    def region_rows(self) -> int:
        """The rows of a tile in one region."""
        return self.tiling.m // (self.pieces if self.hops == "scatter" else 1)

    @property
    def row_tiles(self) -> int:
        return -(-(self.share if self.hops == "scatter" else self.problem.m) // self.region_rows)

    @property
    def count(self) -> int:
        """The number of tiles."""
        if self.hops == "scatter":
            return self.row_tiles * -(-self.problem.n // self.tiling.n)
        return self.row_tiles * -(-self.share // (self.tiling.n // self.pieces))

    @property
    def regions(self) -> int:
        """The regions of a tile in one copy: one for each source's piece, then one for each owner's sum."""
        return self.problem.world_size + (self.pieces if self.hops == "two" else 0)

    @property
    def received_rows(self) -> int:
        """The number of rows whose pieces this rank receives. They are cut into row tiles from the first row on."""
        return self.row_tiles * self.region_rows if self.hops == "scatter" else self.problem.m

    @property
    def region_bytes(self) -> int:
        return self.tiling.m * self.tiling.n // self.pieces * self.problem.itemsize

    @property
    def column_slots(self) -> int:
        """The words for a row's squares: one for each tile of its columns, up to a power of two."""
        return int(triton.next_power_of_2(self.count // self.row_tiles))

    @property
    def tile_bytes(self) -> int:
        """The bytes of the regions of tiles in a copy. The words of squares follow them."""
        return self.count * self.regions * self.region_bytes

    @property
    def copy_bytes(self) -> int:
        """The capacity of a copy: a power of two and an eighth of it, which is less than twice what a call uses.

        Most sizes are powers of two, so the regions of tiles fill the power of two, and the eighth has room for the squares of
        a norm.
        """
        used = self.tile_bytes + (4 * self.row_tiles * self.column_slots * self.tiling.m if self.norm else 0)
        return int(triton.next_power_of_2(max(-(-used * 8 // 9), _LEAST_COPY))) // 8 * 9

    @property
    def blocks(self) -> int:
        """The number of blocks: one on each SM, or several if they only exchange, and need not all be resident."""
        return min(self.sms if self.multiply or self.norm else most_blocks(self.sms), self.count)


def most_blocks(sms: int) -> int:
    """Return the largest number of blocks of any plan for a device."""
    return _EXCHANGING * sms


def plan(
    problem: Problem,
    rank: int,
    owned: tuple[Span1D, ...],
    *,
    hops: Hops,
    multiply: bool,
    device: torch.device,
    sms: int,
    norm: bool = False,
) -> AllReducePlan:
    """Plan the tiles, the same on every rank.

    owned: the columns, or rows ("scatter"), that each rank sums. They are equal shares, of which the last may be shorter or
        empty. One hop does not use them.
    sms: the SMs of the GPU, or the number of blocks under the interpreter.
    """
    scatter = hops == "scatter"
    cut, extent = owned[0][1], problem.m if scatter else problem.n
    assert all(span == (min(r * cut, extent), min(r * cut + cut, extent)) for r, span in enumerate(owned)), "equal shares"
    pieces = 1 if hops == "one" else triton.next_power_of_2(problem.world_size)
    share = problem.n if hops == "one" else cut
    if scatter:
        shape = tiling(problem, problem.n, 1, multiply, device, sms, height=pieces * share)
        if not multiply and device.type == "cuda":
            # A piece has few rows. It is as wide as all pieces together, so that each thread loads 16 bytes.
            shape = replace(shape, n=shape.n * pieces)
    else:
        shape = tiling(problem, share, pieces, multiply, device, sms)
    assert not norm or hops == "one", "a norm needs whole rows, which one hop sums"
    return AllReducePlan(
        problem=problem, rank=rank, hops=hops, multiply=multiply, sms=sms, tiling=shape, pieces=pieces, share=share, norm=norm
    )


@dataclass(frozen=True, kw_only=True)
class Mailbox:
    """A Mailbox is a rank's memory for its launches, which is zeroed once.

    addresses: the addresses of all ranks' mailboxes, on the device.
    copy_bytes: the capacity of each copy.
    epochs: by block, the number of calls so far, and the words that the last of them used of its copy: [blocks, 2].
    begun: the number of the last call that a program has begun. Each program that shares a mailbox has a word of its own.
    abort: set to end all waits.
    status: region + 1 and the call of the last wait that gave up.
    """

    addresses: torch.Tensor
    copy_bytes: int
    epochs: torch.Tensor
    begun: torch.Tensor
    abort: torch.Tensor
    status: torch.Tensor


def mailbox(addresses: list[int], copy_bytes: int, blocks: int, device: torch.device) -> Mailbox:
    """Return a Mailbox.

    addresses: the address of each rank's zeroed bytes, MAILBOX_COPIES * copy_bytes of them.
    copy_bytes: as AllReducePlan has it.
    blocks: the largest number of blocks of a launch.
    """
    return Mailbox(
        addresses=table(addresses, torch.int64, device),
        copy_bytes=copy_bytes,
        epochs=torch.zeros(blocks, 2, dtype=torch.int64, device=device),
        begun=torch.zeros(1, dtype=torch.int64, device=device),
        abort=torch.zeros(1, dtype=torch.int32, device=device),
        status=torch.zeros(2, dtype=torch.int64, device=device),
    )


def all_reduce(
    layout: AllReducePlan,
    memory: Mailbox,
    out: torch.Tensor,
    *,
    factors: tuple[torch.Tensor, torch.Tensor] | None,
    partial: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    live: bool,
    tries: int,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    norm: tuple[torch.Tensor, torch.Tensor] | None = None,
    launched_by: Launcher | None = None,
    stream: int | None = None,
) -> None:
    """Run one call: store the sum over ranks of a @ b, or of `partial`, plus the addends, in out.

    out: [M, N], or this rank's rows of it, contiguous.
    factors: a [M, k] with contiguous rows, and b [k, N] of any strides.
    partial: [M, N] with contiguous rows.
    bias, residual: [1, N] and [M, N], contiguous.
    live: exchange and count. Otherwise it is a rehearsal, which neither sends nor waits, and leaves out as it is, because a
        call may work in place.
    tries: a wait gives up after this many looks.
    scales: the float32 scales of FP8 factors a and b, of the shapes that weft.core.problem.Scaling names, with any strides.
    norm: the weight [1, N] of the norm, and where its result [M, N] goes, contiguous, if the layout has one.
    launched_by, stream: as for weft.kernels.gemm.gemm.
    """
    assert (norm is not None) == layout.norm, "a norm's weight and result, or none"
    assert layout.copy_bytes <= memory.copy_bytes, "the call fits its copy"
    assert layout.blocks <= memory.epochs.shape[0], "each block has its epoch"
    assert (factors is not None) == layout.multiply, "factors, or a partial result"
    problem, shape = layout.problem, layout.tiling
    # The kernel reads a partial result where it would read `a`: by the same address and the same stride.
    a, b = factors if factors is not None else (partial, out)
    assert a is not None, "factors, or a partial result"
    assert a.stride(1) == 1 or a.shape[1] < 2, "the elements of a row are adjacent"
    scales_argument = None
    if layout.multiply and problem.scaling is not None:
        assert scales is not None, "FP8 factors have scales"
        scales_argument = scales_of(scales[:1], scales[1], problem.scaling.recipe)
    pointers = [a, b, *(t if t is not None else out for t in (bias, residual)), *(norm or (out, out)), out]
    sizes = (problem.m, problem.n, a.shape[1], a.stride(0), b.stride(0), b.stride(1))
    constants = _constants(layout, bias is not None, residual is not None, capabilities(out.device))
    key = (sizes, *(t.data_ptr() % 16 for t in pointers), *specialised(scales_argument))
    (launched_by or Launcher())(
        _all_reduce_kernel,
        layout.blocks,
        (
            *pointers,
            memory.addresses,
            memory.epochs,
            memory.begun,
            memory.abort,
            memory.status,
            scales_argument,
            *sizes,
            layout.share,
            layout.count,
            memory.copy_bytes // 4,
            memory.epochs.shape[0],
            layout.rank,
            tries if live else 0,
            int(live),
        ),
        constants,
        key=key,
        stream=stream,
        num_warps=shape.warps,
    )


def _constants(layout: AllReducePlan, bias: bool, residual: bool, gpu: Capabilities) -> dict[str, object]:
    shape, problem, scatter = layout.tiling, layout.problem, layout.hops == "scatter"
    scaling = problem.scaling if layout.multiply else None
    assert not (scatter and (bias or residual)), "a reduce-scatter adds nothing"
    return {
        "ELEMENT": _ELEMENTS[layout.problem.dtype],
        "PER_WORD": 4 // layout.problem.itemsize,
        "WORLD": layout.problem.world_size,
        "PIECES": layout.pieces,
        "REGIONS": layout.regions,
        "TWO_HOPS": layout.hops == "two",
        "SCATTER": scatter,
        "DIVIDE_BY": problem.world_size if problem.reduce_op == "avg" else 1,
        "MULTIPLY": layout.multiply,
        "RECIPE": "" if scaling is None else scaling.recipe,
        "PROMOTED": scaling is not None and promotes(gpu, scaling),
        "PARTS": 1 if scaling is None else -(-shape.k // SCALE_BLOCK),
        "BIAS": bias,
        "RESIDUAL": residual,
        "NORM": layout.norm,
        "EPS": problem.norm_eps if layout.norm else 0.0,
        "SLOTS": layout.column_slots if layout.norm else 1,
        "CHUNK": min(layout.column_slots, max(16, _SQUARES // shape.m)) if layout.norm else 1,
        "BLOCK_M": shape.m,
        "BLOCK_N": shape.n,
        "BLOCK_K": shape.k,
        "STAGES": shape.stages,
        "THREADS": gpu.warp * shape.warps,
        "CLEARED": max(_CLEARED, 4 * gpu.warp * shape.warps),
        "ALIGN": math.gcd(16, problem.n, *([shape.n] if scatter else [layout.share, shape.n // layout.pieces])),
    }


@triton.jit
def _spread(tile, owner, share, extent, COUNT: tl.constexpr, PIECE: tl.constexpr, ALIGN: tl.constexpr):
    """Return COUNT columns, or rows, of a tile, from the piece of `owner` on, and which of them exist."""
    index = tl.arange(0, COUNT)
    inner = tile * PIECE + index % PIECE
    places = tl.multiple_of((owner + index // PIECE) * share + inner, ALIGN)
    # ALIGN divides share and extent, so that no access of ALIGN columns crosses a boundary.
    return places, tl.max_constancy((inner < share) & (places < extent), ALIGN)


@triton.jit
def _slots(row_tiles, tile, BLOCK_M: tl.constexpr, SLOTS: tl.constexpr):
    """Return the first of the words for the squares of a tile's rows."""
    return (tile % row_tiles * SLOTS + tile // row_tiles) * BLOCK_M


@triton.jit
def _product(
    a_ptr, b_ptr, scales, rows, cols, there, m, k, stride_am, stride_bk, stride_bn,
    RECIPE: tl.constexpr, PROMOTED: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return a tile of a @ b in float32. It is zero outside the matrices.

    there: which columns exist.
    RECIPE: the recipe of the scales of FP8 factors, or empty for other factors.
    PARTS: the parts of a step over K. With blockwise scales, each part is within one block of K.
    PROMOTED: each part is a separate product, which is added in float32, as in weft.kernels.gemm_kernel.
    """
    INNER: tl.constexpr = BLOCK_K // PARTS
    inner = tl.arange(0, INNER)
    a_ptrs = a_ptr + rows[:, None].to(tl.int64) * stride_am + inner[None, :]
    b_ptrs = b_ptr + inner[:, None].to(tl.int64) * stride_bk + cols[None, :].to(tl.int64) * stride_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    row_scales = None
    if RECIPE != "":
        row_scales = RowScales(scales.a0 + rows.to(tl.int64) * scales.a0_row, rows < m, scales.a0_block)
    for first in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        for part in tl.static_range(PARTS):
            left = inner < k - first - part * INNER
            a = tl.load(a_ptrs, mask=(rows < m)[:, None] & left[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=left[:, None] & there[None, :], other=0.0)
            if PROMOTED:
                product = tl.dot(operand(a), operand(b), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
                if RECIPE == "blockwise":
                    product *= block_scales(scales, row_scales, first + part * INNER, k, cols, there)
                total += product
            else:
                total = tl.dot(operand(a), operand(b), total, input_precision="ieee")
            a_ptrs += INNER
            b_ptrs += tl.cast(stride_bk, tl.int64) * INNER
    if (RECIPE == "tensorwise") or (RECIPE == "rowwise"):
        total = scaled(total, scales, row_scales, cols, there)
    return total


@triton.jit(do_not_specialize=["m", "share", "tiles", "copy_words", "epochs", "rank", "tries", "live"])
def _all_reduce_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, weight_ptr, normed_ptr, out_ptr, boxes_ptr, epochs_ptr, begun_ptr, abort_ptr,
    status_ptr, scales,
    m, n, k, stride_am, stride_bk, stride_bn, share, tiles, copy_words, epochs, rank, tries, live,
    ELEMENT: tl.constexpr, PER_WORD: tl.constexpr, WORLD: tl.constexpr, PIECES: tl.constexpr, REGIONS: tl.constexpr,
    TWO_HOPS: tl.constexpr, SCATTER: tl.constexpr, DIVIDE_BY: tl.constexpr,
    MULTIPLY: tl.constexpr, RECIPE: tl.constexpr, PROMOTED: tl.constexpr, PARTS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr,
    THREADS: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = BLOCK_N // PER_WORD
    PIECE: tl.constexpr = BLOCK_N if SCATTER else BLOCK_N // PIECES
    PART: tl.constexpr = WIDTH if SCATTER else WIDTH // PIECES
    HEIGHT: tl.constexpr = BLOCK_M // PIECES if SCATTER else BLOCK_M
    REGION: tl.constexpr = HEIGHT * PART
    block, blocks = tl.program_id(0), tl.num_programs(0)
    copy_bytes, tile_words = tl.cast(copy_words, tl.int64) * 4, tl.cast(tiles, tl.int64) * (REGIONS * REGION)
    row_tiles = tl.cdiv(share if SCATTER else m, HEIGHT)
    row, word = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, WIDTH)[None, :]
    for tile in range(block, tiles, blocks):
        at = tl.cast(tile, tl.int64) * (4 * REGIONS * REGION)
        # Loaded here and used after the product, which hides the latency of a cache miss. `tile % blocks` equals `block`;
        # written so, the compiler keeps the load in the loop. All boxes' addresses share a few cache lines.
        calls = tl.load(epochs_ptr + tile % blocks * 2)
        rows, valid = _spread(tile % row_tiles, 0, share if SCATTER else m, m, BLOCK_M, HEIGHT, 1)
        cols, there = _spread(tile // row_tiles, 0, n if SCATTER else share, n, BLOCK_N, PIECE, ALIGN)
        mask = valid[:, None] & there[None, :]
        if MULTIPLY:
            total = _product(
                a_ptr, b_ptr, scales, rows, cols, there, m, k, stride_am, stride_bk, stride_bn, RECIPE, PROMOTED, PARTS,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        else:
            total = tl.load(a_ptr + rows[:, None].to(tl.int64) * stride_am + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        # Before the branch: for sm_100, Triton 3.6 cannot compile a tensor-core product that is used only within a branch.
        words = pack_words(total.to(ELEMENT), BLOCK_M, WIDTH)
        if live != 0:
            here = (calls + 1) % 3 * copy_bytes
            for step in tl.static_range(1, WORLD + 1):
                peer = (rank + step) % WORLD
                its = (valid[:, None] | SCATTER) & (
                    (row // HEIGHT == peer if SCATTER else word // PART == peer) | (PIECES == 1)
                )
                box = place(boxes_ptr, peer, here + at + 4 * REGION * rank)
                tl.store(box + (row % HEIGHT * PART + word % PART), words, mask=its)
    calls, used = tl.load(epochs_ptr + block * 2), tl.load(epochs_ptr + block * 2 + 1)
    if live != 0:
        clear(place(boxes_ptr, rank, calls % 3 * copy_bytes), used, block, blocks, CLEARED)
        if block == 0:
            # Before all waits. The call has ended once all blocks have written this number to `epochs` (weft.runtime.watchdog).
            tl.store(begun_ptr, calls + 1)
    call = calls + 1
    here = call % 3 * copy_bytes
    for tile in range(block, tiles, blocks):
        at = tl.cast(tile, tl.int64) * (4 * REGIONS * REGION)
        rows, valid = _spread(tile % row_tiles, rank if SCATTER else 0, share if SCATTER else m, m, HEIGHT, HEIGHT, 1)
        cols, there = _spread(tile // row_tiles, rank if TWO_HOPS else 0, n if SCATTER else share, n, PIECE, PIECE, ALIGN)
        mask = valid[:, None] & there[None, :]
        offsets = tl.arange(0, HEIGHT)[:, None] * PART + tl.arange(0, PART)[None, :]
        sent = (valid[:, None] | SCATTER) & (offsets >= 0)
        total = received(
            place(boxes_ptr, rank, here + at), offsets, sent, tries, abort_ptr, status_ptr, tile * REGIONS, call,
            WORLD, REGION, ELEMENT, HEIGHT, PART, THREADS,
        )  # fmt: skip
        first = rank * share if SCATTER else 0
        places = (rows - first)[:, None].to(tl.int64) * n + cols[None, :]
        if BIAS:
            total += tl.load(bias_ptr + cols, mask=there, other=0.0).to(tl.float32)[None, :]
        if RESIDUAL:
            total += tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
        if DIVIDE_BY != 1:
            total = total / DIVIDE_BY
        if not TWO_HOPS:
            result = total.to(ELEMENT)
            tl.store(out_ptr + places, result, mask=mask & (live != 0))
            if NORM:  # noqa: SIM102 - the compiler leaves a branch out only if the whole condition is a constant
                if live != 0:
                    squares = tl.sum(tl.where(mask, result.to(tl.float32) * result.to(tl.float32), 0.0), axis=1)
                    slot = _slots(row_tiles, tile, BLOCK_M, SLOTS)
                    words = squares.to(tl.int32, bitcast=True)
                    box = place(boxes_ptr, rank, here + 4 * tile_words)
                    tl.store(box + slot + tl.arange(0, BLOCK_M), tl.where(words == 0, -2147483648, words))
        elif live != 0:
            words = pack_words(total.to(ELEMENT), BLOCK_M, PART)
            for step in tl.static_range(1, WORLD + 1):
                box = place(boxes_ptr, (rank + step) % WORLD, here + at + 4 * REGION * (WORLD + rank))
                tl.store(box + offsets, words, mask=sent)
    if TWO_HOPS:
        for tile in range(block, tiles, blocks):
            at = tl.cast(tile, tl.int64) * (4 * REGIONS * REGION)
            rows = tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
            cols, there = _spread(tile // row_tiles, 0, share, n, BLOCK_N, PIECE, ALIGN)
            mask = (rows < m)[:, None] & there[None, :]
            total = received(
                place(boxes_ptr, rank, here + at + 4 * REGION * WORLD), word // PART * REGION + row * PART + word % PART,
                (rows < m)[:, None] & (word // PART < WORLD), tries, abort_ptr, status_ptr, tile * REGIONS + WORLD, call,
                1, 0, ELEMENT, BLOCK_M, WIDTH, THREADS,
            )  # fmt: skip
            tl.store(out_ptr + rows[:, None].to(tl.int64) * n + cols[None, :], total.to(ELEMENT), mask=mask & (live != 0))
    if NORM:
        # Behind it, every thread sees what any thread of the block has stored in out.
        tl.debug_barrier()
        for tile in range(block, tiles, blocks):
            box = place(boxes_ptr, rank, here + 4 * tile_words)
            box += _slots(row_tiles, tile % row_tiles, BLOCK_M, SLOTS)
            squares = tl.zeros((BLOCK_M,), tl.float32)
            for first in tl.static_range(0, SLOTS, CHUNK):
                column = first + tl.arange(0, CHUNK)[None, :]
                sums = received(
                    box, column * BLOCK_M + row, (column < tl.cdiv(n, BLOCK_N)) & (row >= 0), tries, abort_ptr, status_ptr,
                    tiles * REGIONS + tile % row_tiles, call, 1, 0, tl.float32, BLOCK_M, CHUNK, THREADS,
                )  # fmt: skip
                squares += tl.sum(sums, axis=1)
            rows = tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
            cols = tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = (rows < m)[:, None] & (cols < n)[None, :]
            places = rows[:, None].to(tl.int64) * n + cols[None, :]
            value = tl.load(out_ptr + places, mask=mask, other=0.0).to(tl.float32)
            value *= (1.0 / tl.sqrt(squares / n + EPS))[:, None]
            value *= tl.load(weight_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
            tl.store(normed_ptr + places, value.to(ELEMENT), mask=mask)
    if live != 0:
        uses = tile_words
        if NORM:
            uses += row_tiles * (SLOTS * BLOCK_M)
        for first in range(block, epochs, blocks * THREADS):
            at = first + tl.arange(0, THREADS) * blocks
            tl.store(epochs_ptr + at * 2, call, mask=at < epochs)
            tl.store(epochs_ptr + at * 2 + 1, uses, mask=at < epochs)
