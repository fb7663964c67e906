"""Device functions for tiles that travel as words: send one, sum those that have come, make room again.

A word is 4 bytes of values: one float32, or two values of 16 bits. Zero is no value but an empty place, so that the data is its
own flag: a word is stored and seen as a whole, and who sees other bits than zero has its values. One trip, no fence, no byte
more than the data. A word of zeros travels as a negative zero, which adds nothing to a sum either. Who may write a place, and
when it is empty again: weft.kernels.all_reduce.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.triton.flags import pause


@triton.jit
def as_words(value, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """A tile as BLOCK_M x WIDTH words, none of them empty."""
    if value.dtype.primitive_bitwidth == 16:
        low, high = tl.split(tl.reshape(value, (BLOCK_M, WIDTH, 2)))
        words = low.to(tl.uint16, bitcast=True).to(tl.int32) | (high.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    else:
        words = value.to(tl.int32, bitcast=True)
    return tl.where(words == 0, -2147483648, words)


@triton.jit
def place(boxes_ptr, peer, offset):
    """The words at this offset, a multiple of 16 bytes, of a peer's mailbox."""
    return tl.multiple_of((tl.load(boxes_ptr + peer) + offset).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def clear(words_ptr, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Empty COUNT times SIZE words that follow each other."""
    for part in tl.static_range(COUNT):
        tl.store(words_ptr + part * SIZE + tl.arange(0, SIZE), tl.zeros((SIZE,), tl.int32))


@triton.jit
def _look(
    words_ptr, offsets, mask,
    SOURCES: tl.constexpr, STRIDE: tl.constexpr, ELEMENT: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sums of words, as (all or the low halves, the high halves), and by word, zero if any source's is not there."""
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
    """The sum, in float32, of SOURCES tiles that lie STRIDE words apart, once all of their words are there.

    offsets, mask: of BLOCK_M x WIDTH words. Looks `tries` times, or until abort is set: status then names region and call, and
    the sum is NaN everywhere. tries = 0 neither looks nor complains, and the sum means nothing. THREADS: of the block.

    Where a block has more threads than words, Triton has several threads load the same word, and at times of their own. One
    that comes late may see what the one whose value counts did not, and end the wait for both. So all look again then: what any
    of them has seen, all see behind a barrier.
    """
    low = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    high = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    late = 1
    looks = 0
    while (late == 1) & (looks < tries):
        # On its way together with the words.
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
    # Without a rank's part a sum looks like any other; a graph that replays calls has nobody who reads status.
    return total + tl.where(gave_up, float("nan"), 0.0)
