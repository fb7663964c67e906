"""Where rows go when only devices know how many: counts of all ranks, exchanged and laid out by one block, with no host.

A segment is the rows that one rank sends to one expert of another: (src_rank, dst_rank, expert). Its rows lie together on both
sides; E experts a rank, W ranks.

                     a, on the sender, is sorted by     rows land on the receiver sorted by
    DISPATCH         dst_rank, expert                   expert, src_rank
    combine          expert, dst_rank                   src_rank, expert

Each is the other's way back. The rows that an expert multiplies lie together in both: tiles are cut from those, whatever
segments they hold. `layout` publishes this rank's counts to all, waits for theirs, and writes three tables of int32:

    groups  by expert: end (row tiles of this expert and all before it), first row, rows, start (where its tiles begin)
    parts   by expert and other rank: first row of the segment, rows, and of this rank's own its row in a (DISPATCH) or in out
    moves   by segment, in the order in which they are moved, a power of two of them; then how many rows arrive in all
            end (units of this segment and all before it), rows, here (first row where it is read), there (where it lands),
            peer (other rank), expert

A unit is what one block moves at once: as many rows of one segment. Segments are moved expert by expert, and tiles are
multiplied in that order; within an expert

                    moves, on the rank that moves           tiles of an expert, from `start` on, as if in a ring
    DISPATCH        pushed: successor's first, own last     downwards: own rows, predecessor's, ...: as they arrive
    combine         pulled: from the predecessor, ...       upwards: successor's rows first, own rows last

Two calls cannot race:

    rank 0, call c                       rank 1, call c
    publish counts, tell all             (still in call c - 1: it reads what landed, or pulls from rank 0)
    wait for told[1] >= c  <~~~~~~~~~~~  publish counts, tell all: call c - 1 of this rank is over
    store rows at rank 1, or products here

Nobody overwrites what a peer may still read before that peer has told of this call, which it does when all its kernels of the
call before have ended. Counts themselves are written before that: they have two places that calls take in turn, since a peer
may be one call ahead, but not two. Words only grow: `told` by one a call, `arrived` by one for each unit of a segment that has
been pushed, or for each tile that has rows of it; the receiver keeps the sum of those in `goals`. The number of the call is a
word on the device, so that graphs may be replayed.

Bounds. What does not fit, in a or at a receiver (max_rows), is cut off on both sides alike, and noted: nothing is written
outside. A number of rows below zero is none, and noted. A wait ends after `tries` looks, and is noted, too. Notes (NOTES int64
words) go to host memory with the next call.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.triton.functions import get, peer_pointer, put, signal, wait

MOVE_FIELDS, GROUP_FIELDS, PART_FIELDS = 6, 4, 3
NOTES = 8
"""Words: of a late wait, the flag's address, what it waited for, what it saw; then 1 (a) or 2 (max_rows), rows, capacity; or 3,
and a number of rows that is less than none."""
LATE, CUT = 0, 3
IN_A, AT_RECEIVER, NEGATIVE = 1, 2, 3


@triton.jit
def _before(rank_1, expert_1, rank_2, expert_2, BY_EXPERT: tl.constexpr):
    """Whether a segment lies before another."""
    if BY_EXPERT:
        return (expert_1 < expert_2) | ((expert_1 == expert_2) & (rank_1 < rank_2))
    else:  # noqa: RET505 - one of the two is compiled
        return (rank_1 < rank_2) | ((rank_1 == rank_2) & (expert_1 < expert_2))


@triton.jit
def _note(notes_ptr, wrong, kind, rows, capacity):
    """Keep the first thing that is wrong."""
    first = wrong & (tl.load(notes_ptr) == 0)
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
    """This rank's counts, as far as a holds them, to all; whether those of all are here then."""
    place = tl.arange(0, Q)
    peer, expert, known = place // E, place % E, place < W * E
    if DISPATCH:
        asked = tl.load(splits_ptr + place, mask=known, other=0)
    else:
        asked = tl.load(splits_ptr + expert * W + peer, mask=known, other=0)
    asked = asked.to(tl.int64)
    least = tl.min(asked, axis=0)
    _note(notes_ptr, least < 0, 3, least, 0)
    # One more than there are is too many already, and cannot wrap around in a sum.
    asked = tl.minimum(tl.maximum(asked, 0), a_rows + 1)
    earlier = _before(peer[None, :], expert[None, :], peer[:, None], expert[:, None], not DISPATCH)
    first = tl.sum(tl.where(earlier, asked[None, :], 0), axis=1)
    held = tl.minimum(asked, tl.maximum(a_rows - first, 0)).to(tl.int32)
    in_all = tl.sum(asked, axis=0)
    _note(notes_ptr, in_all > a_rows, 1, in_all, a_rows)
    for other in range(W):
        put(peer_pointer(counts_ptr, counts_peers_ptr, other), slot + rank * W * E + place, held, known)
    for other in range(W):
        signal(peer_pointer(told_ptr, told_peers_ptr, other) + rank)
    told = 1
    for other in range(W):
        told = told & wait(told_ptr + other, call, tries, notes_ptr - 3).to(tl.int32)
    return told


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
def _write_moves(moves_ptr, units, rows, here, there, peer, expert, Q: tl.constexpr, FIELDS: tl.constexpr):
    fields = moves_ptr + FIELDS * tl.arange(0, Q)
    tl.store(fields, tl.cumsum(units, 0))
    tl.store(fields + 1, rows)
    tl.store(fields + 2, here)
    tl.store(fields + 3, there)
    tl.store(fields + 4, peer)
    tl.store(fields + 5, expert)


@triton.jit
def _write_groups(
    groups_ptr,
    rows,
    own_end,
    expert,
    EQ: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    DISPATCH: tl.constexpr,
):
    """rows: of each segment that is multiplied here. own_end: of them, those that lie up to this rank's own, by expert."""
    group = tl.arange(0, EQ)
    mine = group[:, None] == expert[None, :]
    height = tl.sum(tl.where(mine, rows[None, :], 0), axis=1)
    start = tl.sum(tl.where(mine, own_end[None, :], 0), axis=1) // TILE_ROWS
    if DISPATCH:
        start -= 1
    fields = groups_ptr + FIELDS * group
    tl.store(fields, tl.cumsum((height + TILE_ROWS - 1) // TILE_ROWS, 0))
    tl.store(fields + 1, tl.cumsum(height, 0) - height)
    tl.store(fields + 2, height)
    tl.store(fields + 3, start)


@triton.jit(do_not_specialize=["a_rows", "max_rows", "tries", "rank", "col_tiles"])
def layout_kernel(
    splits_ptr,
    counts_ptr,
    counts_peers_ptr,
    told_ptr,
    told_peers_ptr,
    calls_ptr,
    goals_ptr,
    groups_ptr,
    parts_ptr,
    moves_ptr,
    turn_ptr,
    received_ptr,
    notes_ptr,
    host_address,
    a_rows,
    max_rows,
    tries,
    rank,
    col_tiles,
    W: tl.constexpr,
    E: tl.constexpr,
    Q: tl.constexpr,
    EQ: tl.constexpr,
    GROUP_FIELDS: tl.constexpr,
    PART_FIELDS: tl.constexpr,
    MOVE_FIELDS: tl.constexpr,
    NOTES: tl.constexpr,
    DISPATCH: tl.constexpr,
    MOVE_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """One block. Writes the tables, goals, and received, the counts in the order of landing; sets both words of turn to 0."""
    words = tl.arange(0, NOTES)
    call = tl.load(calls_ptr) + 1
    slot = call % 2 * W * W * E
    told = _publish(
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
    # By counts that are not all there, or after a wait that has ended early (note LATE), rows would go where a late peer still
    # reads: then none go at all. Read after the wait: whoever releases it after a failure notes that first.
    late = tl.load(notes_ptr)
    # No mask of a block with a scalar: Triton 3.9's interpreter makes 32-bit words of it.
    expert, turn, known = place // W, place % W, place < tl.where((told > 0) & (late == 0), W * E, 0)
    me = tl.zeros((Q,), tl.int32) + rank

    # What this rank sends to dst. Beyond the last segment, no rows.
    dst = (rank + turn + 1) % W
    rows = get(counts_ptr, rank * W * E + dst * E + expert, known)
    here = _rows_before(counts_ptr, me, dst, expert, Q, W, E, True, not DISPATCH)
    there = _rows_before(counts_ptr, dst, me, expert, Q, W, E, False, DISPATCH)
    parts = parts_ptr + PART_FIELDS * (expert * W + dst)
    if DISPATCH:
        tl.store(parts + 2, here, mask=known)
        rows = tl.minimum(rows, tl.maximum(max_rows - there, 0))
        _write_moves(moves_ptr, (rows + MOVE_ROWS - 1) // MOVE_ROWS, rows, here, there, dst, expert, Q, MOVE_FIELDS)
    else:
        _write_groups(groups_ptr, rows, tl.where(dst <= rank, rows, 0), expert, EQ, GROUP_FIELDS, TILE_ROWS, DISPATCH)
        tl.store(parts, here, mask=known)
        tl.store(parts + 1, rows, mask=known)
        tl.store(parts + 2, there, mask=known)

    # What it receives from src.
    src = (rank + 2 * W - turn - 1) % W
    sent = get(counts_ptr, src * W * E + rank * E + expert, known)
    in_all = tl.sum(sent, axis=0)
    _note(notes_ptr + 3, in_all > max_rows, 2, in_all, max_rows)
    there = _rows_before(counts_ptr, me, src, expert, Q, W, E, False, DISPATCH)
    rows = tl.minimum(sent, tl.maximum(max_rows - there, 0))
    if DISPATCH:
        _write_groups(groups_ptr, rows, tl.where(src <= rank, rows, 0), expert, EQ, GROUP_FIELDS, TILE_ROWS, DISPATCH)
        parts = parts_ptr + PART_FIELDS * (expert * W + src)
        tl.store(parts, there, mask=known)
        tl.store(parts + 1, rows, mask=known)
        tl.store(received_ptr + expert * W + src, rows, mask=known)
        signals = (rows + MOVE_ROWS - 1) // MOVE_ROWS
    else:
        here = _rows_before(counts_ptr, src, me, expert, Q, W, E, True, True)
        units = tl.where(src == rank, 0, (rows + MOVE_ROWS - 1) // MOVE_ROWS)
        _write_moves(moves_ptr, units, rows, here, there, src, expert, Q, MOVE_FIELDS)
        tl.store(received_ptr + src * E + expert, rows, mask=known)
        within = here - _rows_before(counts_ptr, src, tl.zeros((Q,), tl.int32), expert, Q, W, E, True, True)
        tiles = (within + sent - 1) // TILE_ROWS - within // TILE_ROWS + 1
        signals = tl.where((sent > 0) & (src != rank), tiles * col_tiles, 0)
    tl.store(moves_ptr + MOVE_FIELDS * Q, tl.sum(rows, axis=0))
    goals = goals_ptr + src * E + expert
    tl.store(goals, tl.load(goals, mask=known, other=0) + signals, mask=known)
    tl.store(turn_ptr, 0)
    tl.store(turn_ptr + 1, 0)
    tl.store(calls_ptr, call)

    # The host sees what this call has noted so far, and what earlier ones have noted anywhere.
    tl.debug_barrier()
    noted = tl.load(notes_ptr + words)
    if tl.max(tl.abs(noted), axis=0) != 0:
        tl.store(host_address.to(tl.pointer_type(tl.int64)) + words, noted)


@triton.jit
def move_of(moves_ptr, unit, Q: tl.constexpr, FIELDS: tl.constexpr):
    """(the segment's fields, units of it before this one) of a unit."""
    ends = tl.load(moves_ptr + FIELDS * tl.arange(0, Q))
    segment = tl.sum((ends <= unit).to(tl.int32), axis=0)
    first = tl.load(moves_ptr + FIELDS * (segment - 1), mask=segment > 0, other=0)
    return moves_ptr + FIELDS * segment, unit - first


@triton.jit
def tile_of(groups_ptr, row_tile, EQ: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, DOWNWARDS: tl.constexpr):
    """(expert, first row, rows) of a row tile."""
    ends = tl.load(groups_ptr + FIELDS * tl.arange(0, EQ))
    expert = tl.sum((ends <= row_tile).to(tl.int32), axis=0)
    fields = groups_ptr + FIELDS * expert
    before = tl.load(fields - FIELDS, mask=expert > 0, other=0)
    tiles, start = tl.load(fields) - before, tl.load(fields + 3)
    turn = row_tile - before
    if DOWNWARDS:  # noqa: SIM108 - one of the two is compiled
        at = (start + tiles - turn) % tiles * ROWS
    else:
        at = (start + turn) % tiles * ROWS
    return expert, tl.load(fields + 1) + at, tl.minimum(tl.load(fields + 2) - at, ROWS)
