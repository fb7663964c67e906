"""Where rows go when only devices know how many: counts of all ranks, exchanged and laid out by one block, with no host.

A segment is the rows that one rank sends to one expert of another: (src_rank, dst_rank, expert). Its rows lie together on both
sides; E experts a rank, W ranks.

                     a, on the sender, is sorted by     rows land on the receiver sorted by
    DISPATCH         dst_rank, expert                   expert, src_rank
    combine          expert, dst_rank                   src_rank, expert

Each is the other's way back. The rows that an expert multiplies lie together in both: tiles are cut from those, whatever
segments they hold.

What a step does, in which order, what it waits for and what it signals is the schedule's: weft.runtime.ragged_kernels makes
constant tables of it, once.

    shares  by place: the peer that is told of this rank's counts
    words   by segment that arrives: the word that counts it, or -1
    orders  by copying step, then by multiplying step, and by place: expert (E: none), other rank, word of that rank to signal
            (-1: none)
    places  by multiplying step and segment: its place; Q: it is not multiplied there
    gates   by step and segment: words to wait for (-1: none)

In each call `layout_kernel` publishes this rank's counts, waits for those of all, and writes tables of int32 from them:

    parts   by expert and other rank: first row of the segment that is multiplied, rows, and of this rank's own its row in a
            (DISPATCH) or in out
    moved   by expert and other rank: rows of the segment that is copied, here (first row where it is read), there (where it
            lands)
    moves   by copying step and place: end (units of this segment and all before it), rows, here, there, other rank, expert,
            word
    tiles   by multiplying step and place: end (row tiles of this place and all before it), its first tile, first row of the
            expert, rows of the expert, expert
    groups  by expert: first row, rows

A unit is what one block moves at once: as many rows of one segment. A tile may have rows of several segments. It belongs to
that which comes last in the order of a DISPATCH, whose tiles wait for what arrives, and first in that of a combine, whose tiles
are told of. The tiles of one place are multiplied downwards in a DISPATCH, and upwards in a combine.

Two calls cannot race:

    rank 0, call c                       rank 1, call c
    publish counts, tell all             (still in call c - 1: it reads what landed, or pulls from rank 0)
    wait for told[1] >= c  <~~~~~~~~~~~  publish counts, tell all: call c - 1 of this rank is over
    store rows at rank 1, or products here

Nobody overwrites what a peer may still read before that peer has told of this call, which it does when all its kernels of the
call before have ended. Counts themselves are written before that: they have two places that calls take in turn, since a peer
may be one call ahead, but not two.

A word is a flag of the schedule. It counts: `told` one a call, `arrived` one for each unit of a segment that has been pushed,
or for each tile that has rows of it. The flag is raised when its word has reached what the receiver keeps in `calls` and
`goals`. The next call's layout_kernel raises these, which lowers all flags of this rank: all its kernels of the call before
have ended, and no peer signals before it has been told. The number of the call is a word on the device, so that graphs may be
replayed.

Bounds. What does not fit, in a or at a receiver (max_rows), is cut off on both sides alike, and noted: nothing is written
outside. A number of rows below zero is none, and noted. A rank publishes what is wrong with its splits along with its counts,
and all ranks have all counts: so every rank notes the same, of the same rank. A wait ends after `tries` looks, and is noted,
too. Notes (NOTES int64 words) go to host memory with the next call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.triton.functions import get, peer_pointer, put, signal, wait

MOVE_FIELDS, TILE_FIELDS, PART_FIELDS, GROUP_FIELDS, ORDER_FIELDS = map(tl.constexpr, (7, 5, 3, 2, 3))
"""Columns of the tables. Kernels read them as they are, the host their `value`."""
NOTES = tl.constexpr(8)
"""Words: of a late wait, the flag's address, what it waited for, what it saw; then 1 (a) or 2 (max_rows), rows, capacity, or 3,
a number of rows that is less than none, 0; and the rank of which that is so."""
LATE, CUT = 0, 3
FAULT_FIELDS = tl.constexpr(4)
"""Words that a rank publishes with its counts: as in notes, what is wrong with its splits, 0 if nothing is; the upper and the
lower half of rows; capacity."""
IN_A, AT_RECEIVER, NEGATIVE = 1, 2, 3


class LayoutTables(NamedTuple):
    """The constant tables of a rank, and those that layout_kernel writes."""

    shares: Any
    words: Any
    orders: Any
    places: Any
    calls: Any
    goals: Any
    groups: Any
    parts: Any
    moved: Any
    moves: Any
    tiles: Any
    turns: Any


class LayoutSizes(NamedTuple):
    """What layout_kernel is compiled for: its constexpr argument S.

    Q: places of a table, at least W * E. EQ, RANKS: at least E, and W. TURNS: words of turns. These four are powers of two.
    COPYING, MULTIPLYING: how many steps copy, and multiply. MOVE_ROWS, TILE_ROWS: of a unit, and of a tile.
    """

    W: int
    E: int
    Q: int
    EQ: int
    RANKS: int
    COPYING: int
    MULTIPLYING: int
    TURNS: int
    DISPATCH: int
    MOVE_ROWS: int
    TILE_ROWS: int


@triton.jit
def _before(rank_1, expert_1, rank_2, expert_2, BY_EXPERT: tl.constexpr):
    """Whether a segment lies before another."""
    if BY_EXPERT:
        return (expert_1 < expert_2) | ((expert_1 == expert_2) & (rank_1 < rank_2))
    else:  # noqa: RET505 - one of the two is compiled
        return (rank_1 < rank_2) | ((rank_1 == rank_2) & (expert_1 < expert_2))


@triton.jit
def _note(notes_ptr, wrong, kind, rows, capacity, rank):
    """Keep the first thing that is wrong."""
    first = wrong & (tl.load(notes_ptr) == 0)
    tl.store(notes_ptr, kind, mask=first)
    tl.store(notes_ptr + 1, rows, mask=first)
    tl.store(notes_ptr + 2, capacity, mask=first)
    tl.store(notes_ptr + 3, rank, mask=first)


@triton.jit
def _note_faults(notes_ptr, counts_ptr, faults_ptr, max_rows, S: tl.constexpr):
    """Note what is wrong with any rank's splits, or a rank at which more rows arrive than max_rows. All ranks have the same
    counts here, look for the first rank, and so note the same. Call it once all counts are there."""
    rank = tl.arange(0, S.RANKS)
    kinds = get(faults_ptr, FAULT_FIELDS * rank, rank < S.W, 0)
    first = tl.min(tl.where(kinds > 0, rank, S.RANKS), axis=0)
    if first < S.RANKS:
        fault = faults_ptr + FAULT_FIELDS * first
        rows = (get(fault, 1).to(tl.int64) << 32) | (get(fault, 2).to(tl.int64) & 0xFFFFFFFF)
        _note(notes_ptr, True, get(fault, 0), rows, get(fault, 3), first)
    place = tl.arange(0, S.Q)[:, None]
    # Of sender place // E its expert place % E.
    at = place // S.E * S.W * S.E + rank[None, :] * S.E + place % S.E
    arrive = tl.sum(get(counts_ptr, at, (place < S.W * S.E) & (rank[None, :] < S.W), 0), axis=0)
    first = tl.min(tl.where(arrive > max_rows, rank, S.RANKS), axis=0)
    if first < S.RANKS:
        _note(notes_ptr, True, 2, tl.sum(tl.where(rank == first, arrive, 0), axis=0), max_rows, first)


@triton.jit
def _publish(
    splits_ptr, counts, told, shares_ptr, notes_ptr, call, slot, faults_at, a_rows, tries, rank, S: tl.constexpr
):  # fmt: skip
    """This rank's counts, as far as a holds them, to all, with what is wrong with its splits; whether those of all are here
    then. faults_at: where the faults of all ranks begin, counted from counts.local."""
    place = tl.arange(0, S.Q)
    peer, expert, known = place // S.E, place % S.E, place < S.W * S.E
    if S.DISPATCH:
        asked = tl.load(splits_ptr + place, mask=known, other=0)
    else:
        asked = tl.load(splits_ptr + expert * S.W + peer, mask=known, other=0)
    asked = asked.to(tl.int64)
    least = tl.min(asked, axis=0)
    # One more than there are is too many already, and cannot wrap around in a sum.
    asked = tl.minimum(tl.maximum(asked, 0), a_rows + 1)
    earlier = _before(peer[None, :], expert[None, :], peer[:, None], expert[:, None], not S.DISPATCH)
    first = tl.sum(tl.where(earlier, asked[None, :], 0), axis=1)
    held = tl.minimum(asked, tl.maximum(a_rows - first, 0)).to(tl.int32)
    in_all = tl.sum(asked, axis=0)
    kind = tl.where(least < 0, 3, tl.where(in_all > a_rows, 1, 0))
    wrong = tl.where(least < 0, least, in_all)
    fault = faults_at + FAULT_FIELDS * rank
    for at in range(S.W):
        other = tl.load(shares_ptr + at)
        theirs = peer_pointer(counts.local, counts.peers, other)
        put(theirs, slot + rank * S.W * S.E + place, held, known)
        put(theirs, fault, kind)
        put(theirs, fault + 1, (wrong >> 32).to(tl.int32))
        put(theirs, fault + 2, wrong.to(tl.int32))
        put(theirs, fault + 3, tl.where(least < 0, 0, a_rows).to(tl.int32))
    for at in range(S.W):
        signal(peer_pointer(told.local, told.peers, tl.load(shares_ptr + at)) + rank)
    all_told = 1
    for other in range(S.W):
        all_told = all_told & wait(told.local + other, call, tries, notes_ptr - 3).to(tl.int32)
    return all_told


@triton.jit
def _rows_before(counts_ptr, rank, peer, expert, SENT: tl.constexpr, BY_EXPERT: tl.constexpr, S: tl.constexpr):
    """By segment, the rows before it: of all that `rank` sends to peers (SENT), or receives from them."""
    place = tl.arange(0, S.Q)[None, :]
    other, its = place // S.E, place % S.E
    if SENT:  # noqa: SIM108 - one of the two is compiled
        at = rank[:, None] * S.W * S.E + place
    else:
        at = other * S.W * S.E + rank[:, None] * S.E + its
    rows = get(counts_ptr, at, (place < S.W * S.E) & (peer[:, None] < S.W))
    return tl.sum(tl.where(_before(other, its, peer[:, None], expert[:, None], BY_EXPERT), rows, 0), axis=1)


@triton.jit
def _write_groups(groups_ptr, rows, expert, EQ: tl.constexpr):
    """rows: of each segment that is multiplied here, by its expert."""
    group = tl.arange(0, EQ)
    height = tl.sum(tl.where(group[:, None] == expert[None, :], rows[None, :], 0), axis=1)
    tl.store(groups_ptr + GROUP_FIELDS * group, tl.cumsum(height, 0) - height)
    tl.store(groups_ptr + GROUP_FIELDS * group + 1, height)


@triton.jit
def _write_moves(step: tl.constexpr, tables, S: tl.constexpr):
    """Of a copying step: what it copies, in its order."""
    place = tl.arange(0, S.Q)
    order = tables.orders + step * S.Q * ORDER_FIELDS + ORDER_FIELDS * place
    expert, peer = tl.load(order), tl.load(order + 1)
    segment, known = tables.moved + PART_FIELDS * (expert * S.W + peer), expert < S.E
    rows = tl.load(segment, mask=known, other=0)
    fields = tables.moves + step * S.Q * MOVE_FIELDS + MOVE_FIELDS * place
    tl.store(fields, tl.cumsum((rows + S.MOVE_ROWS - 1) // S.MOVE_ROWS, 0))
    tl.store(fields + 1, rows)
    tl.store(fields + 2, tl.load(segment + 1, mask=known, other=0))
    tl.store(fields + 3, tl.load(segment + 2, mask=known, other=0))
    tl.store(fields + 4, peer)
    tl.store(fields + 5, expert)
    tl.store(fields + 6, tl.load(order + 2))


@triton.jit
def _write_tiles(step: tl.constexpr, tables, S: tl.constexpr):
    """Of a multiplying step: what it multiplies, in its order."""
    place = tl.arange(0, S.Q)
    order = tables.orders + (S.COPYING + step) * S.Q * ORDER_FIELDS + ORDER_FIELDS * place
    expert, other = tl.load(order), tl.load(order + 1)
    segment, known = expert * S.W + other, expert < S.E
    top = tl.load(tables.groups + GROUP_FIELDS * expert, mask=known, other=0)
    height = tl.load(tables.groups + GROUP_FIELDS * expert + 1, mask=known, other=0)
    rows = tl.load(tables.parts + PART_FIELDS * segment + 1, mask=known, other=0)
    begin = tl.load(tables.parts + PART_FIELDS * segment, mask=known, other=0) - top
    first, last = begin // S.TILE_ROWS, (begin + rows - 1) // S.TILE_ROWS
    # Its first and its last tile may belong to another segment of the expert.
    first_is_its, last_is_its = known, known
    for rank in range(S.W):
        rival = expert * S.W + rank
        its_place = tl.load(tables.places + step * S.W * S.E + rival, mask=known, other=0)
        its_rows = tl.load(tables.parts + PART_FIELDS * rival + 1, mask=known, other=0)
        its_begin = tl.load(tables.parts + PART_FIELDS * rival, mask=known, other=0) - top
        its_first, its_last = its_begin // S.TILE_ROWS, (its_begin + its_rows - 1) // S.TILE_ROWS
        if S.DISPATCH:  # noqa: SIM108 - one of the two is compiled
            before = (its_rows > 0) & (its_place > place)
        else:
            before = (its_rows > 0) & (its_place < place)
        first_is_its = first_is_its & ~(before & (its_first <= first) & (its_last >= first))
        last_is_its = last_is_its & ~(before & (its_first <= last) & (its_last >= last))
    low = first + 1 - first_is_its.to(tl.int32)
    high = last + last_is_its.to(tl.int32)
    count = tl.where(rows > 0, tl.maximum(high - low, 0), 0)
    fields = tables.tiles + step * S.Q * TILE_FIELDS + TILE_FIELDS * place
    tl.store(fields, tl.cumsum(count, 0))
    tl.store(fields + 1, low)
    tl.store(fields + 2, top)
    tl.store(fields + 3, height)
    tl.store(fields + 4, expert)


@triton.jit(do_not_specialize=["a_rows", "max_rows", "tries", "rank", "col_tiles"])
def layout_kernel(
    splits_ptr, counts, told, tables, received_ptr, notes_ptr, host_address,
    a_rows, max_rows, tries, rank, col_tiles, S: tl.constexpr,
):  # fmt: skip
    """One block. Writes the tables, goals, and received, the counts in the order of landing. Of turns, the first word is how
    many rows arrive in all, and the others are 0."""
    W: tl.constexpr = S.W
    E: tl.constexpr = S.E
    noted_at = tl.arange(0, NOTES)
    call = tl.load(tables.calls) + 1
    slot = call % 2 * W * W * E
    faults_at = 2 * W * W * E + call % 2 * W * FAULT_FIELDS
    all_told = _publish(
        splits_ptr, counts, told, tables.shares, notes_ptr + 3, call, slot, faults_at, a_rows, tries, rank, S
    )  # fmt: skip
    counts_ptr = counts.local + slot
    place = tl.arange(0, S.Q)
    # By counts that are not all there, or after a wait that has ended early (note LATE), rows would go where a late peer still
    # reads: then none go at all. Read after the wait: whoever releases it after a failure notes that first.
    late = tl.load(notes_ptr)
    # No mask of a block with a scalar: Triton 3.9's interpreter makes 32-bit words of it.
    expert, other, known = place // W, place % W, place < tl.where((all_told > 0) & (late == 0), W * E, 0)
    me, there_is = tl.full((S.Q,), 0, tl.int32) + rank, place < W * E
    if (all_told > 0) & (late == 0):
        _note_faults(notes_ptr + 3, counts_ptr, counts.local + faults_at, max_rows, S)

    # What this rank sends to another. Beyond the last segment, no rows.
    part, moved = tables.parts + PART_FIELDS * place, tables.moved + PART_FIELDS * place
    rows = get(counts_ptr, rank * W * E + other * E + expert, known)
    here = _rows_before(counts_ptr, me, other, expert, True, not S.DISPATCH, S)
    there = _rows_before(counts_ptr, other, me, expert, False, S.DISPATCH, S)
    if S.DISPATCH:
        tl.store(part + 2, here, mask=there_is)
        tl.store(moved, tl.minimum(rows, tl.maximum(max_rows - there, 0)), mask=there_is)
        tl.store(moved + 1, here, mask=there_is)
        tl.store(moved + 2, there, mask=there_is)
    else:
        _write_groups(tables.groups, rows, expert, S.EQ)
        tl.store(part, here, mask=there_is)
        tl.store(part + 1, rows, mask=there_is)
        tl.store(part + 2, there, mask=there_is)

    # What it receives from another.
    sent = get(counts_ptr, other * W * E + rank * E + expert, known)
    there = _rows_before(counts_ptr, me, other, expert, False, S.DISPATCH, S)
    rows = tl.minimum(sent, tl.maximum(max_rows - there, 0))
    if S.DISPATCH:
        _write_groups(tables.groups, rows, expert, S.EQ)
        tl.store(part, there, mask=there_is)
        tl.store(part + 1, rows, mask=there_is)
        tl.store(received_ptr + place, rows, mask=known)
        signals = (rows + S.MOVE_ROWS - 1) // S.MOVE_ROWS
    else:
        here = _rows_before(counts_ptr, other, me, expert, True, True, S)
        tl.store(moved, rows, mask=there_is)
        tl.store(moved + 1, here, mask=there_is)
        tl.store(moved + 2, there, mask=there_is)
        tl.store(received_ptr + other * E + expert, rows, mask=known)
        within = here - _rows_before(counts_ptr, other, tl.full((S.Q,), 0, tl.int32), expert, True, True, S)
        tiles = (within + sent - 1) // S.TILE_ROWS - within // S.TILE_ROWS + 1
        signals = tl.where(sent > 0, tiles * col_tiles, 0)
    word = tl.load(tables.words + place, mask=there_is, other=-1)
    tl.store(tables.goals + word, tl.load(tables.goals + word, mask=word >= 0, other=0) + signals, mask=word >= 0)
    turn = tl.arange(0, S.TURNS)
    tl.store(tables.turns + turn, tl.where(turn == 0, tl.sum(rows, axis=0), 0))
    tl.store(tables.calls, call)

    # Each step's parts, in its order, from what lies by segment until here.
    tl.debug_barrier()
    COPYING: tl.constexpr = S.COPYING
    MULTIPLYING: tl.constexpr = S.MULTIPLYING
    for step in tl.static_range(COPYING):
        _write_moves(step, tables, S)
    for step in tl.static_range(MULTIPLYING):
        _write_tiles(step, tables, S)

    # The host sees what this call has noted so far, and what earlier ones have noted anywhere.
    tl.debug_barrier()
    noted = tl.load(notes_ptr + noted_at)
    if tl.max(tl.abs(noted), axis=0) != 0:
        tl.store(host_address.to(tl.pointer_type(tl.int64)) + noted_at, noted)


@triton.jit
def move_of(moves_ptr, unit, Q: tl.constexpr):
    """(the segment's fields, units of it before this one) of a unit."""
    ends = tl.load(moves_ptr + MOVE_FIELDS * tl.arange(0, Q))
    segment = tl.sum((ends <= unit).to(tl.int32), axis=0)
    first = tl.load(moves_ptr + MOVE_FIELDS * (segment - 1), mask=segment > 0, other=0)
    return moves_ptr + MOVE_FIELDS * segment, unit - first


@triton.jit
def tile_of(tiles_ptr, row_tile, Q: tl.constexpr, ROWS: tl.constexpr, DOWNWARDS: tl.constexpr):
    """(expert, first row, rows) of a row tile."""
    ends = tl.load(tiles_ptr + TILE_FIELDS * tl.arange(0, Q))
    place = tl.sum((ends <= row_tile).to(tl.int32), axis=0)
    fields = tiles_ptr + TILE_FIELDS * place
    if DOWNWARDS:
        at = tl.load(fields + 1) + tl.load(fields) - 1 - row_tile
    else:
        at = tl.load(fields + 1) + row_tile - tl.load(fields - TILE_FIELDS, mask=place > 0, other=0)
    at *= ROWS
    return tl.load(fields + 4), tl.load(fields + 2) + at, tl.minimum(tl.load(fields + 3) - at, ROWS)
