"""One block lays out a ragged all-to-all on the device: it exchanges the row counts of all ranks and computes where rows go.

A segment is the rows that one rank sends to one expert of another: (src_rank, dst_rank, expert). Its rows are contiguous on
both sides. Each of W ranks has E experts.

                     a, on the sender, is sorted by     rows land on the receiver sorted by
    DISPATCH         dst_rank, expert                   expert, src_rank
    combine          expert, dst_rank                   src_rank, expert

A combine is the inverse of a dispatch. The rows that an expert multiplies are contiguous in both, and tiles are cut from them
regardless of segments.

The schedule defines what a step does, in which order, and which flags it waits for and signals. weft.runtime.ragged_kernels
makes constant tables of it, once. A counter is a flag that counts; it is named by its number.

    shares    by place: the peer that gets this rank's counts
    arriving  by segment that arrives: its counter, or -1
    orders    by copying step, then by multiplying step, and by place: expert (E: none), other rank, counter of that rank to
              signal (-1: none)
    places    by multiplying step and segment: its place; Q: the step does not multiply it
    gates     by step and segment: counters to wait for (-1: none)

In each call `layout_kernel` publishes this rank's counts, waits for those of all, and writes tables of int32 from them:

    parts   by expert and other rank: first row of the segment that is multiplied, rows, and of this rank's own its row in a
            (DISPATCH) or in out
    moved   by expert and other rank: rows of the segment that is copied, here (first row where it is read), there (where it
            lands)
    moves   by copying step and place: end (units of this segment and all before it), rows, here, there, other rank, expert,
            counter
    tiles   by multiplying step and place: end (row tiles of this place and all before it), its first tile, first row of the
            expert, rows of the expert, expert
    groups  by expert: first row, rows

A unit is the rows of one segment that one block moves together. A tile may have rows of several segments. In a DISPATCH, tiles
wait for rows that arrive, so a tile belongs to the last of its segments in the step's order. In a combine, tiles are signalled,
so a tile belongs to the first. The tiles of one place are multiplied downwards in a DISPATCH, and upwards in a combine.

Two calls cannot race:

    rank 0, call c                       rank 1, call c
    publish counts, notify all           (still in call c - 1: it reads rows that landed, or pulls from rank 0)
    wait for notified[1] >= c  <~~~~~~~  publish counts, notify all: call c - 1 of this rank is over
    store rows at rank 1, or products here

A rank overwrites memory that a peer may still read only after that peer's notification of this call, which the peer sends when
all its kernels of the previous call have ended. Counts are written before that, so they have two slots, used by alternate
calls: a peer may be one call ahead, but not two.

The schedule's flags are counters here. `notified` grows by one in each call. `arrived` grows by one for each unit of a segment
that has been pushed, or for each tile that has rows of the segment. A flag is raised when its counter has reached the value in
the receiver's `calls` or `goals`. The next call's layout_kernel increases these, which lowers all flags of this rank. This is
safe because all its kernels of the previous call have ended, and no peer signals before it has been notified. The number of the
call is in device memory, so that graphs may be replayed.

Bounds. Sender and receiver cut off rows that do not fit in a or at a receiver (max_rows), and note it. Nothing is written out
of bounds. A negative number of rows counts as zero, and is noted. A rank publishes the faults of its splits with its counts,
and all ranks have all counts, so every rank notes the same fault of the same rank. A wait that gives up after `tries` looks is
noted, too. Notes (NOTES int64 values) are copied to host memory in the next call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.triton.functions import get, peer_pointer, put, signal, wait

MOVE_FIELDS, TILE_FIELDS, PART_FIELDS, GROUP_FIELDS, ORDER_FIELDS = map(tl.constexpr, (7, 5, 3, 2, 3))
"""The number of columns of the tables. Kernels use the constexprs, and the host their `.value`."""
NOTES = tl.constexpr(8)
"""The number of notes. Three describe a wait that gave up: the flag's address, the expected and the seen value. Four describe a
fault: its kind (1 for a, 2 for max_rows, 3 for a negative number of rows), rows, capacity (0 for kind 3), and its rank."""
LATE, CUT = 0, 3
"""The positions of the first note of a wait, and of a fault."""
FAULT_FIELDS = tl.constexpr(4)
"""The number of fields that a rank publishes with its counts: the kind of fault of its splits as in notes, or 0; the upper and
the lower half of rows; capacity."""
IN_A, AT_RECEIVER, NEGATIVE = 1, 2, 3


class LayoutTables(NamedTuple):
    """LayoutTables holds the constant tables of a rank, and the tables that layout_kernel writes."""

    shares: Any
    arriving: Any
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
    """LayoutSizes holds the sizes that layout_kernel is compiled for: its constexpr argument S.

    W: the number of ranks.
    E: the number of experts of a rank.
    Q: the places of a table, at least W * E. Q, EQ, RANKS and TURNS are powers of two.
    EQ, RANKS: at least E, and at least W.
    COPYING, MULTIPLYING: the number of steps that copy, and of those that multiply.
    TURNS: the entries of turns.
    MOVE_ROWS, TILE_ROWS: the rows of a unit, and of a tile.
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
    """Return whether a segment is stored before another."""
    if BY_EXPERT:
        return (expert_1 < expert_2) | ((expert_1 == expert_2) & (rank_1 < rank_2))
    else:  # noqa: RET505 - one of the two is compiled
        return (rank_1 < rank_2) | ((rank_1 == rank_2) & (expert_1 < expert_2))


@triton.jit
def _note(notes_ptr, wrong, kind, rows, capacity, rank):
    """Record a fault, unless an earlier one is recorded."""
    first = wrong & (tl.load(notes_ptr) == 0)
    tl.store(notes_ptr, kind, mask=first)
    tl.store(notes_ptr + 1, rows, mask=first)
    tl.store(notes_ptr + 2, capacity, mask=first)
    tl.store(notes_ptr + 3, rank, mask=first)


@triton.jit
def _note_faults(notes_ptr, counts_ptr, faults_ptr, max_rows, S: tl.constexpr):
    """Note a fault of any rank's splits, or a rank at which more rows arrive than max_rows. All counts must have arrived. All
    ranks then have the same counts, look for the first rank with a fault, and so note the same."""
    rank = tl.arange(0, S.RANKS)
    kinds = get(faults_ptr, FAULT_FIELDS * rank, rank < S.W, 0)
    first = tl.min(tl.where(kinds > 0, rank, S.RANKS), axis=0)
    if first < S.RANKS:
        fault = faults_ptr + FAULT_FIELDS * first
        rows = (get(fault, 1).to(tl.int64) << 32) | (get(fault, 2).to(tl.int64) & 0xFFFFFFFF)
        _note(notes_ptr, True, get(fault, 0), rows, get(fault, 3), first)
    place = tl.arange(0, S.Q)[:, None]
    # Place p is expert p % E of sender p // E.
    at = place // S.E * S.W * S.E + rank[None, :] * S.E + place % S.E
    arrive = tl.sum(get(counts_ptr, at, (place < S.W * S.E) & (rank[None, :] < S.W), 0), axis=0)
    first = tl.min(tl.where(arrive > max_rows, rank, S.RANKS), axis=0)
    if first < S.RANKS:
        _note(notes_ptr, True, 2, tl.sum(tl.where(rank == first, arrive, 0), axis=0), max_rows, first)


@triton.jit
def _publish(
    splits_ptr, counts, notified, shares_ptr, notes_ptr, call, slot, faults_at, a_rows, tries, rank, S: tl.constexpr
):  # fmt: skip
    """Publish this rank's counts, as far as a holds them, and the faults of its splits to all ranks; wait for those of all
    ranks and return whether all arrived in time. faults_at: offset of all ranks' faults from counts.local."""
    place = tl.arange(0, S.Q)
    peer, expert, known = place // S.E, place % S.E, place < S.W * S.E
    if S.DISPATCH:
        asked = tl.load(splits_ptr + place, mask=known, other=0)
    else:
        asked = tl.load(splits_ptr + expert * S.W + peer, mask=known, other=0)
    asked = asked.to(tl.int64)
    least = tl.min(asked, axis=0)
    # a_rows + 1 is already too many, and cannot overflow in a sum.
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
        signal(peer_pointer(notified.local, notified.peers, tl.load(shares_ptr + at)) + rank)
    all_notified = 1
    for other in range(S.W):
        all_notified = all_notified & wait(notified.local + other, call, tries, notes_ptr - 3).to(tl.int32)
    return all_notified


@triton.jit
def _rows_before(counts_ptr, rank, peer, expert, SENT: tl.constexpr, BY_EXPERT: tl.constexpr, S: tl.constexpr):
    """Return by segment the number of rows before it among all that `rank` sends to peers (SENT), or receives from them."""
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
    """Write the table of groups. rows: of each segment that is multiplied here."""
    group = tl.arange(0, EQ)
    height = tl.sum(tl.where(group[:, None] == expert[None, :], rows[None, :], 0), axis=1)
    tl.store(groups_ptr + GROUP_FIELDS * group, tl.cumsum(height, 0) - height)
    tl.store(groups_ptr + GROUP_FIELDS * group + 1, height)


@triton.jit
def _write_moves(step: tl.constexpr, tables, S: tl.constexpr):
    """Write the table of moves of a copying step, in its order."""
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
    """Write the table of tiles of a multiplying step, in its order."""
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
    splits_ptr, counts, notified, tables, received_ptr, notes_ptr, host_address,
    a_rows, max_rows, tries, rank, col_tiles, S: tl.constexpr,
):  # fmt: skip
    """Write all tables, goals and received, the counts in the order of landing. It runs as one block. The first entry of turns
    becomes the total number of rows that arrive, the others 0."""
    W: tl.constexpr = S.W
    E: tl.constexpr = S.E
    noted_at = tl.arange(0, NOTES)
    call = tl.load(tables.calls) + 1
    slot = call % 2 * W * W * E
    faults_at = 2 * W * W * E + call % 2 * W * FAULT_FIELDS
    all_notified = _publish(
        splits_ptr, counts, notified, tables.shares, notes_ptr + 3, call, slot, faults_at, a_rows, tries, rank, S
    )  # fmt: skip
    counts_ptr = counts.local + slot
    place = tl.arange(0, S.Q)
    # If counts are missing, or a wait has given up (note LATE), rows could overwrite memory that a late peer still reads, so no
    # rows are moved. `late` is read after the wait, because the rank that releases the wait after a failure writes the note
    # first.
    late = tl.load(notes_ptr)
    # A block is not combined with a scalar mask, since Triton 3.9's interpreter turns that into 32-bit integers.
    expert, other, known = place // W, place % W, place < tl.where((all_notified > 0) & (late == 0), W * E, 0)
    me, there_is = tl.full((S.Q,), 0, tl.int32) + rank, place < W * E
    if (all_notified > 0) & (late == 0):
        _note_faults(notes_ptr + 3, counts_ptr, counts.local + faults_at, max_rows, S)

    # What this rank sends to each other rank. Beyond the last segment there are no rows.
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

    # What this rank receives from each other rank.
    sent = get(counts_ptr, other * W * E + rank * E + expert, known)
    there = _rows_before(counts_ptr, me, other, expert, False, S.DISPATCH, S)
    rows = tl.minimum(sent, tl.maximum(max_rows - there, 0))
    if S.DISPATCH:
        _write_groups(tables.groups, rows, expert, S.EQ)
        tl.store(part, there, mask=there_is)
        tl.store(part + 1, rows, mask=there_is)
        tl.store(received_ptr + place, rows, mask=there_is)
        signals = (rows + S.MOVE_ROWS - 1) // S.MOVE_ROWS
    else:
        here = _rows_before(counts_ptr, other, me, expert, True, True, S)
        tl.store(moved, rows, mask=there_is)
        tl.store(moved + 1, here, mask=there_is)
        tl.store(moved + 2, there, mask=there_is)
        tl.store(received_ptr + other * E + expert, rows, mask=there_is)
        within = here - _rows_before(counts_ptr, other, tl.full((S.Q,), 0, tl.int32), expert, True, True, S)
        tiles = (within + sent - 1) // S.TILE_ROWS - within // S.TILE_ROWS + 1
        signals = tl.where(sent > 0, tiles * col_tiles, 0)
    counter = tl.load(tables.arriving + place, mask=there_is, other=-1)
    expected = tl.load(tables.goals + counter, mask=counter >= 0, other=0) + signals
    tl.store(tables.goals + counter, expected, mask=counter >= 0)
    turn = tl.arange(0, S.TURNS)
    tl.store(tables.turns + turn, tl.where(turn == 0, tl.sum(rows, axis=0), 0))
    tl.store(tables.calls, call)

    # Each step's tables are in its order; everything so far is stored by segment.
    tl.debug_barrier()
    COPYING: tl.constexpr = S.COPYING
    MULTIPLYING: tl.constexpr = S.MULTIPLYING
    for step in tl.static_range(COPYING):
        _write_moves(step, tables, S)
    for step in tl.static_range(MULTIPLYING):
        _write_tiles(step, tables, S)

    # Copy the notes of this call so far, and of earlier calls, to the host.
    tl.debug_barrier()
    noted = tl.load(notes_ptr + noted_at)
    if tl.max(tl.abs(noted), axis=0) != 0:
        tl.store(host_address.to(tl.pointer_type(tl.int64)) + noted_at, noted)


@triton.jit
def move_of(moves_ptr, unit, Q: tl.constexpr):
    """Return (the segment's fields, the unit's number within the segment) of a unit."""
    ends = tl.load(moves_ptr + MOVE_FIELDS * tl.arange(0, Q))
    segment = tl.sum((ends <= unit).to(tl.int32), axis=0)
    first = tl.load(moves_ptr + MOVE_FIELDS * (segment - 1), mask=segment > 0, other=0)
    return moves_ptr + MOVE_FIELDS * segment, unit - first


@triton.jit
def tile_of(tiles_ptr, row_tile, Q: tl.constexpr, ROWS: tl.constexpr, DOWNWARDS: tl.constexpr):
    """Return (expert, first row, rows) of a row tile."""
    ends = tl.load(tiles_ptr + TILE_FIELDS * tl.arange(0, Q))
    place = tl.sum((ends <= row_tile).to(tl.int32), axis=0)
    fields = tiles_ptr + TILE_FIELDS * place
    if DOWNWARDS:
        at = tl.load(fields + 1) + tl.load(fields) - 1 - row_tile
    else:
        at = tl.load(fields + 1) + row_tile - tl.load(fields - TILE_FIELDS, mask=place > 0, other=0)
    at *= ROWS
    return tl.load(fields + 4), tl.load(fields + 2) + at, tl.minimum(tl.load(fields + 3) - at, ROWS)
