"""These device functions send tiles as 32-bit words. They pack a tile, sum the tiles that arrived, and clear their slots.

A word is 4 bytes of values: one float32, or two 16-bit values. A zero word means that the slot is empty, so the data is its own
flag. The hardware stores and loads a word as a whole, so a reader that sees a nonzero word has its values. This takes one trip,
and needs no fence and no extra byte. A word of zero values is sent as a negative zero, which leaves every sum unchanged.
weft.kernels.all_reduce says who may write a slot and when it is empty again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.triton.flags import pause


@triton.jit
def pack_words(value, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """Return a tile as BLOCK_M x WIDTH nonzero words."""
    if value.dtype.primitive_bitwidth == 16:
        low, high = tl.split(tl.reshape(value, (BLOCK_M, WIDTH, 2)))
        words = low.to(tl.uint16, bitcast=True).to(tl.int32) | (high.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    else:
        words = value.to(tl.int32, bitcast=True)
    return tl.where(words == 0, -2147483648, words)


@triton.jit
def place(boxes_ptr, peer, offset):
    """Return a pointer to the words at an offset of a peer's mailbox. offset: a multiple of 16 bytes."""
    return tl.multiple_of((tl.load(boxes_ptr + peer) + offset).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def clear(words_ptr, words, block, blocks, SIZE: tl.constexpr):
    """Set this block's part of contiguous words to empty. All blocks together also clear up to SIZE - 1 words behind them."""
    for first in range(block * SIZE, words, blocks * SIZE):
        tl.store(words_ptr + first + tl.arange(0, SIZE), tl.zeros((SIZE,), tl.int32))


@triton.jit
def _look(
    words_ptr, offsets, mask,
    SOURCES: tl.constexpr, STRIDE: tl.constexpr, ELEMENT: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the sums of the low and the high halves of words, and for each word zero if any source has not arrived."""
    low = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    high = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    least = tl.full((BLOCK_M, WIDTH), 1, tl.uint32)
    for source in tl.static_range(SOURCES):
        word = tl.load(words_ptr + source * STRIDE + offsets, mask=mask, other=1, volatile=True)
        least = tl.minimum(least, word.to(tl.uint32, bitcast=True))
        if ELEMENT.primitive_bitwidth == 16:
            low += word.to(tl.int16).to(ELEMENT, bitcast=True).to(tl.float32)
            high += (word >> 16).to(tl.int16).to(ELEMENT, bitcast=True).to(tl.float32)
        else:
            low += word.to(tl.float32, bitcast=True)
    return low, high, least


@triton.jit
def received(
    words_ptr, offsets, mask, tries, abort_ptr, status_ptr, region, call,
    SOURCES: tl.constexpr, STRIDE: tl.constexpr, ELEMENT: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Wait until all words of SOURCES tiles, STRIDE words from one to the next, have arrived. Return their float32 sum.

    The wait gives up after `tries` looks, or once abort is set. It then writes region and call to status, and the sum is NaN.
    With tries = 0 it does not wait, and the sum is invalid.

    offsets, mask: those of BLOCK_M x WIDTH words.
    THREADS: the number of threads of the block.

    Where a block has more threads than words, Triton lets several threads load the same word at different times. A late thread
    may see a value that the thread whose result is used has not seen, and end the wait for both. So all threads load once more
    after a barrier, behind which every thread sees what any thread has seen.
    """
    low = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    high = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    late = 1
    looks = 0
    while (late == 1) & (looks < tries):
        # Loaded concurrently with the words.
        aborted = tl.load(abort_ptr, volatile=True)
        low, high, least = _look(words_ptr, offsets, mask, SOURCES, STRIDE, ELEMENT, BLOCK_M, WIDTH)
        # Each thread loads `abort` by itself: what the block agrees on ends the loop, 0 all there, 1 not yet, 2 or 3 aborted.
        state = tl.where(least == 0, 1, 0) + tl.where(aborted != 0, 2, 0)
        late = tl.max(tl.max(state, axis=1), axis=0)
        looks += 1
        pause()
    gave_up = (late > 0) & (tries > 0)
    if gave_up:
        tl.store(status_ptr, region + 1)
        tl.store(status_ptr + 1, call)
    if BLOCK_M * WIDTH < THREADS:
        tl.debug_barrier()
        low, high, _ = _look(words_ptr, offsets, mask, SOURCES, STRIDE, ELEMENT, BLOCK_M, WIDTH)
    total = low
    if ELEMENT.primitive_bitwidth == 16:
        total = tl.reshape(tl.join(low, high), (BLOCK_M, 2 * WIDTH))
    # A sum without one rank's part would look valid, and nobody reads status after a replayed graph. So the result is NaN.
    return total + tl.where(gave_up, float("nan"), 0.0)
