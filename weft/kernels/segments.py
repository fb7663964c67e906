"""Where rows go when only devices know how many: counts of all ranks, exchanged and laid out by one block, with no host.

A segment is the rows that one rank sends to one expert of another: (src_rank, dst_rank, expert). Its rows lie together on both
sides; E experts a rank, W ranks.

                     a, on the sender, is sorted by     rows land on the receiver sorted by
    DISPATCH         dst_rank, expert                   expert, src_rank
    combine          expert, dst_rank                   src_rank, expert

Each is the other's way back. `layout` publishes this rank's counts to all, waits for theirs, and writes two tables of rows
(FIELDS int32 each, a power of two of them, those past W * E empty), in the order in which segments are worked on:

    send   peers from the successor on, the own rank last       recv   the own rank first, then from the predecessor on
    end         units of this segment and all before it         the same
    rows        of the segment                                  the same
    here        its first row in a                              its first row in a, of the own rank's segments
    there       its first row at the receiver                   its first row where rows land
    peer        dst_rank                                        src_rank
    expert      of dst_rank (DISPATCH) or of this rank          the same

A unit is what one block does at once: as many rows of one segment.

Two calls cannot race:

    rank 0, call c                       rank 1, call c
    publish counts, tell all             (still in call c - 1: it reads what landed)
    wait for told[1] >= c  <~~~~~~~~~~~  publish counts, tell all: call c - 1 of this rank is over
    store rows at rank 1

Nobody stores where rows land before the receiver has told it of this call, which it does when all its kernels of the call
before have ended. Counts themselves are written before that: they have two places that calls take in turn, since a peer may
be one call ahead, but not two. Words only grow: `told` by one a call, `arrived` by the units of a segment, of which the
receiver keeps the sum in `goals`. The number of the call is a word on the device, so that graphs may be replayed.

Bounds. What does not fit, in a or at a receiver (max_rows), is cut off on both sides alike, and noted: nothing is written
outside. A wait ends after `tries` looks, and is noted, too. Notes (NOTES int64 words) go to host memory with the next call.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.triton.device import get, peer_pointer, put, signal, wait

FIELDS = 6
NOTES = 8
"""Words: of a late wait, the flag's address, what it waited for, what it saw; then 1 (a) or 2 (max_rows), rows, capacity."""
LATE, CUT = 0, 3
IN_A, AT_RECEIVER = 1, 2


@triton.jit
def _before(rank_1, expert_1, rank_2, expert_2, BY_EXPERT: tl.constexpr):
    """Whether a segment lies before another."""
    if BY_EXPERT:
        return (expert_1 < expert_2) | ((expert_1 == expert_2) & (rank_1 < rank_2))
    else:  # noqa: RET505 - one of the two is compiled
        return (rank_1 < rank_2) | ((rank_1 == rank_2) & (expert_1 < expert_2))


@triton.jit
def _note(notes_ptr, kind, rows, capacity):
    """Keep the first thing that did not fit."""
    first = (rows > capacity) & (tl.load(notes_ptr) == 0)
    tl.store(notes_ptr, kind, mask=first)
    tl.store(notes_ptr + 1, rows, mask=first)
    tl.store(notes_ptr + 2, capacity, mask=first)


@triton.jit
def _publish(
    splits_ptr,
    counts_ptr,
    counts_peers_ptr,
    told_ptr,
    told_peers_ptr,
    notes_ptr,
    call,
    slot,
    a_rows,
    tries,
    rank,
    W: tl.constexpr,
    E: tl.constexpr,
    Q: tl.constexpr,
    DISPATCH: tl.constexpr,
):
    """This rank's counts, as far as a holds them, to all; then those of all are here."""
    place = tl.arange(0, Q)
    peer, expert, known = place // E, place % E, place < W * E
    if DISPATCH:
        asked = tl.load(splits_ptr + place, mask=known, other=0)
    else:
        asked = tl.load(splits_ptr + expert * W + peer, mask=known, other=0)
    asked = tl.maximum(asked.to(tl.int64), 0)
    earlier = _before(peer[None, :], expert[None, :], peer[:, None], expert[:, None], not DISPATCH)
    first = tl.sum(tl.where(earlier, asked[None, :], 0), axis=1)
    held = tl.minimum(asked, tl.maximum(a_rows - first, 0)).to(tl.int32)
    _note(notes_ptr, 1, tl.sum(asked, axis=0), a_rows)
    for other in range(W):
        put(peer_pointer(counts_ptr, counts_peers_ptr, other), slot + rank * W * E + place, held, known)
    for other in range(W):
        signal(peer_pointer(told_ptr, told_peers_ptr, other) + rank)
    for other in range(W):
        wait(told_ptr + other, call, tries, notes_ptr - 3)


@triton.jit
def _rows_before(
    counts_ptr,
    rank,
    peer,
    expert,
    Q: tl.constexpr,
    W: tl.constexpr,
    E: tl.constexpr,
    SENT: tl.constexpr,
    BY_EXPERT: tl.constexpr,
):
    """By segment, the rows before it: of all that `rank` sends to peers (SENT), or receives from them."""
    place = tl.arange(0, Q)[None, :]
    other, its = place // E, place % E
    if SENT:  # noqa: SIM108 - one of the two is compiled
        at = rank[:, None] * W * E + place
    else:
        at = other * W * E + rank[:, None] * E + its
    rows = get(counts_ptr, at, (place < W * E) & (peer[:, None] < W))
    return tl.sum(tl.where(_before(other, its, peer[:, None], expert[:, None], BY_EXPERT), rows, 0), axis=1)


@triton.jit
def _write(table_ptr, units, rows, here, there, peer, expert, Q: tl.constexpr, WIDTH: tl.constexpr):
    fields = table_ptr + WIDTH * tl.arange(0, Q)
    tl.store(fields, tl.cumsum(units, 0))
    tl.store(fields + 1, rows)
    tl.store(fields + 2, here)
    tl.store(fields + 3, there)
    tl.store(fields + 4, peer)
    tl.store(fields + 5, expert)


@triton.jit(do_not_specialize=["a_rows", "max_rows", "tries", "rank", "send_columns"])
def layout_kernel(
    splits_ptr,
    counts_ptr,
    counts_peers_ptr,
    told_ptr,
    told_peers_ptr,
    calls_ptr,
    goals_ptr,
    send_ptr,
    recv_ptr,
    received_ptr,
    notes_ptr,
    host_address,
    a_rows,
    max_rows,
    tries,
    rank,
    send_columns,
    W: tl.constexpr,
    E: tl.constexpr,
    Q: tl.constexpr,
    WIDTH: tl.constexpr,
    NOTES: tl.constexpr,
    DISPATCH: tl.constexpr,
    SEND_ROWS: tl.constexpr,
    RECV_ROWS: tl.constexpr,
):
    """One block. Writes both tables (recv: then the rows in all), goals, and received, the counts in the order of landing."""
    words = tl.arange(0, NOTES)
    noted = tl.load(notes_ptr + words)
    if tl.max(tl.abs(noted), axis=0) != 0:
        tl.store(host_address.to(tl.pointer_type(tl.int64)) + words, noted)
    call = tl.load(calls_ptr) + 1
    slot = call % 2 * W * W * E
    _publish(
        splits_ptr,
        counts_ptr,
        counts_peers_ptr,
        told_ptr,
        told_peers_ptr,
        notes_ptr + 3,
        call,
        slot,
        a_rows,
        tries,
        rank,
        W,
        E,
        Q,
        DISPATCH,
    )
    counts_ptr += slot
    place = tl.arange(0, Q)
    turn, expert, known = place // E, place % E, place < W * E
    me = tl.zeros((Q,), tl.int32) + rank

    dst = (rank + 1 + turn) % W
    rows = get(counts_ptr, rank * W * E + dst * E + expert, known)
    there = _rows_before(counts_ptr, dst, me, expert, Q, W, E, False, DISPATCH)
    here = _rows_before(counts_ptr, me, dst, expert, Q, W, E, True, not DISPATCH)
    rows = tl.minimum(rows, tl.maximum(max_rows - there, 0))
    units = (rows + SEND_ROWS - 1) // SEND_ROWS
    if DISPATCH:
        units = tl.where(dst == rank, 0, units)
    _write(send_ptr, units, rows, here, there, dst, expert, Q, WIDTH)

    src = (rank + W - turn % W) % W
    rows = get(counts_ptr, src * W * E + rank * E + expert, known)
    _note(notes_ptr + 3, 2, tl.sum(rows, axis=0), max_rows)
    there = _rows_before(counts_ptr, me, src, expert, Q, W, E, False, DISPATCH)
    here = _rows_before(counts_ptr, me, me, expert, Q, W, E, True, not DISPATCH)
    rows = tl.minimum(rows, tl.maximum(max_rows - there, 0))
    units = (rows + RECV_ROWS - 1) // RECV_ROWS
    if not DISPATCH:
        units = tl.where(src == rank, 0, units)
    _write(recv_ptr, units, rows, here, there, src, expert, Q, WIDTH)
    tl.store(recv_ptr + WIDTH * Q, tl.sum(rows, axis=0))
    if DISPATCH:
        tl.store(received_ptr + expert * W + src, rows, mask=known)
    else:
        tl.store(received_ptr + src * E + expert, rows, mask=known)

    sent = (rows + SEND_ROWS - 1) // SEND_ROWS * send_columns
    goals = goals_ptr + src * E + expert
    tl.store(goals, tl.load(goals, mask=known, other=0) + sent, mask=known & (src != rank))
    tl.store(calls_ptr, call)


@triton.jit
def segment_of(table_ptr, unit, Q: tl.constexpr, WIDTH: tl.constexpr):
    """(the segment's fields, rows of it before this unit counted in units) of a unit."""
    ends = tl.load(table_ptr + WIDTH * tl.arange(0, Q))
    segment = tl.sum((ends <= unit).to(tl.int32), axis=0)
    first = tl.load(table_ptr + WIDTH * (segment - 1), mask=segment > 0, other=0)
    return table_ptr + WIDTH * segment, unit - first
