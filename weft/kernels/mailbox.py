"""Device functions for tiles that travel through mailboxes: send one, say that it is there, sum those that have come.

A mailbox is symmetric memory: head_bytes, and regions of REGION_BYTES, of which a call uses those from `first` on. What a
region holds, who may write it, and when it is free again: weft.kernels.all_reduce.

    PACKED       8-byte words: 4 bytes of values, 4 of the call's number. Stored and seen as a whole: the data is its own flag
    otherwise    the tile; an int32 word of the head says the last call that it is whole of

Legend: a tile is BLOCK_M x BLOCK_N, of which rows of at least m do not travel; WIDTH words a row of a packed region.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _packed(value, call, PER_WORD: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """A tile as words: its values in the low half, the call's number in the high one."""
    if PER_WORD == 2:
        low, high = tl.split(tl.reshape(value, (BLOCK_M, WIDTH, 2)))
        bits = low.to(tl.uint16, bitcast=True).to(tl.int64) | (high.to(tl.uint16, bitcast=True).to(tl.int64) << 16)
    else:
        bits = value.to(tl.uint32, bitcast=True).to(tl.int64)
    return bits | (call.to(tl.int64) << 32)


@triton.jit
def send_tile(
    value, boxes_ptr, peer, region, head_bytes, first, call, rows, m,
    PACKED: tl.constexpr, PER_WORD: tl.constexpr, REGION_BYTES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store a tile in a region of a peer's mailbox."""
    base = tl.load(boxes_ptr + peer) + head_bytes + (first + region).to(tl.int64) * REGION_BYTES
    WIDTH: tl.constexpr = BLOCK_N // PER_WORD if PACKED else BLOCK_N
    row = tl.arange(0, BLOCK_M)
    offsets = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = (rows < m)[:, None] & (offsets >= 0)
    if PACKED:
        words_ptr = tl.multiple_of(base.to(tl.pointer_type(tl.int64)), 16)
        tl.store(words_ptr + offsets, _packed(value, call, PER_WORD, BLOCK_M, WIDTH), mask=mask)
    else:
        tile_ptr = tl.multiple_of(base.to(tl.pointer_type(value.dtype)), 16)
        tl.store(tile_ptr + offsets, value, mask=mask)


@triton.jit
def raise_region(boxes_ptr, region, call, peers, mask):
    """Say at these peers that a region is complete: every thread's stores come before the releases that publish them."""
    tl.debug_barrier()
    words = tl.load(boxes_ptr + peers, mask=mask, other=0) + 4 * region
    tl.atomic_xchg(words.to(tl.pointer_type(tl.int32)), call + peers * 0, mask=mask, sem="release", scope="sys")


@triton.jit
def _given_up(looks, tries, abort_ptr):
    """Looks so far, after one more; all of them once the call is to end."""
    return tl.where(tl.load(abort_ptr, volatile=True) != 0, tries, looks + 1)


@triton.jit
def _sum_words(
    base, call, rows, m, tries, abort_ptr,
    SOURCES: tl.constexpr, ELEMENT: tl.constexpr, PER_WORD: tl.constexpr, REGION_BYTES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sum of packed regions that follow each other, once all of their words are of this call; and whether they were not."""
    WIDTH: tl.constexpr = BLOCK_N // PER_WORD
    words_ptr = tl.multiple_of(base.to(tl.pointer_type(tl.int64)), 16)
    offsets = tl.arange(0, BLOCK_M)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = (rows < m)[:, None] & (offsets >= 0)
    low = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    high = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    late = 1
    looks = 0
    while (late > 0) & (looks < tries):
        low = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        high = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        missing = tl.zeros((BLOCK_M, WIDTH), tl.int32)
        # All sources at once: their loads are under way together.
        for source in tl.static_range(SOURCES):
            word = tl.load(words_ptr + source * (REGION_BYTES // 8) + offsets, mask=mask, other=0, volatile=True)
            missing |= (mask & ((word >> 32).to(tl.int32) < call)).to(tl.int32)
            if PER_WORD == 2:
                low += word.to(tl.int16).to(ELEMENT, bitcast=True).to(tl.float32)
                high += (word >> 16).to(tl.int16).to(ELEMENT, bitcast=True).to(tl.float32)
            else:
                low += word.to(tl.int32).to(tl.float32, bitcast=True)
        late = tl.max(tl.max(missing, axis=1), axis=0)
        looks = _given_up(looks, tries, abort_ptr)
    total = low
    if PER_WORD == 2:
        total = tl.reshape(tl.join(low, high), (BLOCK_M, BLOCK_N))
    return total, late


@triton.jit
def _sum_tiles(
    box, region, base, call, rows, m, tries, abort_ptr,
    SOURCES: tl.constexpr, LANES: tl.constexpr, ELEMENT: tl.constexpr, REGION_BYTES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sum of regions that follow each other, once their words count this call; and whether they did not."""
    sources = tl.arange(0, LANES)
    there = sources < SOURCES
    flags = (box + 4 * (region + sources)).to(tl.pointer_type(tl.int32))
    late = 1
    looks = 0
    while (late > 0) & (looks < tries):
        seen = tl.atomic_add(flags, 0, mask=there, sem="acquire", scope="sys")
        late = tl.max((there & (seen < call)).to(tl.int32), axis=0)
        looks = _given_up(looks, tries, abort_ptr)
    # What one thread has acquired, all threads of the block may read.
    tl.debug_barrier()
    tile_ptr = tl.multiple_of(base.to(tl.pointer_type(ELEMENT)), 16)
    offsets = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < m)[:, None] & (offsets >= 0)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    size = REGION_BYTES // (ELEMENT.primitive_bitwidth // 8)
    for source in tl.static_range(SOURCES):
        # Not through this SM's first-level cache: it may hold what lay here in an earlier call.
        total += tl.load(tile_ptr + source * size + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total, late


@triton.jit
def received(
    boxes_ptr, rank, region, head_bytes, first, call, rows, m, tries, abort_ptr, status_ptr,
    SOURCES: tl.constexpr, LANES: tl.constexpr, ELEMENT: tl.constexpr, PACKED: tl.constexpr, PER_WORD: tl.constexpr,
    REGION_BYTES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sum of SOURCES regions of this rank's mailbox from `region` on, in float32, once they are there."""
    box = tl.load(boxes_ptr + rank)
    base = box + head_bytes + (first + region).to(tl.int64) * REGION_BYTES
    if PACKED:
        total, late = _sum_words(
            base, call, rows, m, tries, abort_ptr, SOURCES, ELEMENT, PER_WORD, REGION_BYTES, BLOCK_M, BLOCK_N
        )
    else:
        total, late = _sum_tiles(
            box, region, base, call, rows, m, tries, abort_ptr, SOURCES, LANES, ELEMENT, REGION_BYTES, BLOCK_M, BLOCK_N
        )
    if (late > 0) & (tries > 0):
        tl.store(status_ptr, region + 1)
        tl.store(status_ptr + 1, call)
    return total
