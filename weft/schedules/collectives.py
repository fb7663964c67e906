"""Builders for collectives without other computation: all_gather, all_to_all, reduce_scatter, all_reduce.

Buffers of rank r; all have one column, p = world_size
    a       input                r's input
    recv    symmetric            pieces that each of the p - 1 peers has pushed, by peer, in slots
    staged  symmetric            copy_engine_pull: pieces of a, or of the own part's sum, that peers pull, in slots
    summed  symmetric            all_reduce: pieces of the sum that each of the p - 1 owners has pushed, by owner, in slots
    out     output               the result

Flags of rank r (who signals ~> who waits), one for each peer and piece
    arrived[p, i]@r   p ~> r: p's piece i is in recv         free[p, i]@r   p ~> r: p has read r's piece i out of its recv
    ready[p, i]@r     p ~> r: the same, in summed              read[p, i]@r   likewise
    made[i]@r         r's sums ~> r's copies: piece i of r's own part is summed (all_reduce)
    open[p]@r         p ~> r: p has begun this call, so that r may write p's out (where out is reachable)

    rank r, copy                        rank o, blocks                 rank o, copy                       rank r, compute
    wait free[o]
    a -> recv of o, arrived[r]   ~~>    wait arrived of all
    next piece, to all owners           sum -> out, free[o], made -->  wait made, wait read[r]
                                                                       out -> summed of r, ready[o]  ~~>  wait ready[o]
                                                                       next owner's peer                  summed -> out, read

That is an all_reduce; a reduce_scatter ends with the sum. An all_gather and an all_to_all push into recv, and pieces that
arrived are copied to out. Where peers pull, the sum is stored in staged, and `ready` signals it:

    rank o, blocks                        rank r, copy
    wait arrived of all, read[r] of the slot's previous piece
    sum -> staged, free[r], ready  ~~>    wait ready[o]
    staged -> own part of out             staged of o -> out, read

Pushes of a rank are on one lane, piece by piece, each to all peers in turn.

Where out is in symmetric memory (`reachable`), pieces are pushed straight to it, without a copy at the receiver. Until a rank
has begun a call, its out belongs to its caller; `open` signals that it has begun, or for an all_reduce the parts that it
pushed.

Memory is bounded. A part has `slots` slots of one piece each at its receiver, and piece i is in slot i % slots: it may be sent
once piece i - slots of this call or the previous one has been read. So a collective of any size goes through `staging_bytes`.

Bad interleaving: r pushes piece i + slots while o still sums piece i. `free` prevents it, from call to call, too: the first
piece of a call waits for the last one of the previous call, and receivers read pieces in order. An all_reduce needs no flags
between calls: a rank that begins the next call has received all sums, so its parts have been read; and a rank that pushes a sum
has received parts of the next call from that peer, which has copied all sums of the previous call to its result.

In place, every element of a has been pushed, or is read by the very sum, before out is written there: o sums after r's piece
arrived, and r's copy into out follows that sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from weft.core.problem import CollectiveProblem, Op, Span1D
from weft.core.schedule import Collective, Copy, Flag, Reduce, Region, Schedule, Signal, Sum, Wait
from weft.schedules.builder import Build, Builder, Request

MOST_PUSHES = 4096
"""The most pushes of all ranks together. More would take seconds and gigabytes to prove."""


class Channel(NamedTuple):
    """The slots of every rank for the pieces of its peers, and their flags.

    per_peer: slots for each peer; else for the rank's own pieces, which peers pull. across: a call waits until the last pieces
    of the previous call have been read; False if that follows from the data that the rank has received.
    """

    buffer: str
    arrived: str
    free: str
    per_peer: bool = True
    across: bool = True


LANDING = Channel("recv", "arrived", "free")
STAGED = Channel("staged", "arrived", "free", per_peer=False)
PARTS, SUMS = Channel("recv", "arrived", "free", across=False), Channel("summed", "ready", "read", across=False)
OFFERED = Channel("staged", "ready", "read", per_peer=False, across=False)


class SlotTurns(NamedTuple):
    """The slots of a part, which its pieces use in turn. length: the elements of a piece, and of a slot."""

    length: int
    slots: int

    def pieces(self, extent: int) -> int:
        return -(-extent // self.length)

    def piece(self, span: Span1D, index: int) -> Span1D:
        low = span[0] + index * self.length
        return low, min(low + self.length, span[1])

    def slot(self, index: int) -> int:
        """Return the first element of a piece among the slots."""
        return index % self.slots * self.length


def turns(problem: CollectiveProblem, chunks: int, parts: int) -> SlotTurns:
    """Return `chunks` pieces a part, each with its own slot, if `parts` parts fit into staging_bytes; else the largest pieces
    that leave two slots for each part. parts: 0 if nothing is staged. Raises ValueError for more than MOST_PUSHES in all.

    >>> problem = CollectiveProblem(op="all_gather", m=1 << 20, world_size=4, dtype="float32", staging_bytes=1 << 20)
    >>> turns(problem, 1, 3), turns(problem, 8, 1)
    (SlotTurns(length=43688, slots=2), SlotTurns(length=32768, slots=8))
    """
    unit = problem.ALIGN_BYTES // problem.itemsize
    longest = max(high - low for low, high in problem.shards)
    room = problem.staging_bytes // problem.itemsize // parts if parts else longest + unit
    length = max(1, -(-longest // (chunks * unit))) * unit
    if length * -(-longest // length) > room:
        length = max(unit, min(length, room // 2 // unit * unit))
    count, most = -(-longest // length), _most_pieces(problem)
    if count > most:
        least = 2 * parts * problem.itemsize * unit * -(-longest // (most * unit))
        raise ValueError(
            f"staging_bytes is {problem.staging_bytes}, and chunks {chunks}: {count} pieces of each part of {problem}; "
            f"use at least {least} bytes, and at most {most} chunks"
        )
    return SlotTurns(length, max(1, min(count, room // length)))


def _most_pieces(problem: CollectiveProblem) -> int:
    """Return the most pieces of a part. A part goes to each peer, and in an all_reduce also comes back.

    It is at least the largest number that `candidates` uses.
    """
    pairs = problem.world_size * (problem.world_size - 1) * (2 if problem.op == "all_reduce" else 1)
    return max(2 * problem.world_size, MOST_PUSHES // max(1, pairs))


def _collective(request: Request) -> CollectiveProblem:
    assert isinstance(request.problem, CollectiveProblem), f"{request.problem} is no collective"
    return request.problem


class _Collective(Builder):
    """The caller's buffers, and steps that several schedules share. parts: the number of parts with slots on a rank."""

    def __init__(self, request: Request, *, parts: int | None = None) -> None:
        super().__init__(request)
        self.collective = _collective(request)
        self.add_buffer("a", "input", [self.collective.a_rows(r) for r in self.ranks], 1)
        self.add_buffer("out", "output", [self.collective.out_rows(r) for r in self.ranks], 1)
        self.turns = SlotTurns(1, 1) if parts is None else turns(self.collective, self.chunks, parts)
        self.count = self.turns.pieces(max(self.shard_rows))

    def add_slots(self, channel: Channel) -> None:
        rows = (self.world_size - 1 if channel.per_peer else 1) * self.turns.slots * self.turns.length
        self.add_buffer(channel.buffer, "symmetric", rows, 1)

    def pieces_of(self, part: int) -> range:
        return range(self.turns.pieces(self.shard_rows[part]))

    def region_of_part(self, buffer: str, rank: int, part: int, piece: int) -> Region:
        """Return a piece of part `part` of a buffer that has all parts."""
        return self.region(buffer, rank, self.turns.piece(self.problem.shards[part], piece))

    def region_of_own_part(self, buffer: str, rank: int, part: int, piece: int) -> Region:
        """Return a piece of a buffer that has only part `part`."""
        return self.region(buffer, rank, self.turns.piece((0, self.shard_rows[part]), piece))

    def region_to_send(self, rank: int, peer: int, piece: int) -> Region:
        """Return the elements of a that go to a peer."""
        gathers = self.problem.op == "all_gather"
        return self.region_of_own_part("a", rank, rank, piece) if gathers else self.region_of_part("a", rank, peer, piece)

    def result_region(self, src: int, rank: int, piece: int) -> Region:
        """Return the region of out on `rank` that gets a piece of `src`."""
        if self.problem.op != "all_to_all":
            return self.region_of_part("out", rank, src, piece)
        return self.region("out", rank, self.turns.piece(self.problem.arrivals(src, rank), piece))

    def slot(self, channel: Channel, src: int, rank: int, like: Region, piece: int) -> Region:
        """Return the region of a piece of rank `src` in the slots of `rank`, as long as `like`."""
        offset = (src - (src > rank)) * self.turns.slots * self.turns.length if channel.per_peer else 0
        low = offset + self.turns.slot(piece)
        return self.region(channel.buffer, rank, (low, low + like.shape[0]))

    def flag(self, name: str, rank: int, src: int, index: int = 0) -> Flag:
        """Return the flag of a rank that a peer signals."""
        return Flag(name, rank, src * self.count + index)

    def make_slot_waits(self, channel: Channel, rank: int, peer: int, piece: int, last: int) -> tuple[Wait, ...]:
        """Return the wait until the peer has read the previous piece in the slot of this piece, or () if none is needed.

        last: the index of the last piece.
        """
        if piece >= self.turns.slots:
            return (Wait(self.flag(channel.free, rank, peer, piece - self.turns.slots)),)
        first = piece == 0 and channel.across
        return (Wait(self.flag(channel.free, rank, peer, last), on_previous_call=True),) if first else ()

    def make_read_signals(self, channel: Channel, rank: int, peer: int, piece: int, last: int) -> tuple[Signal, ...]:
        """Return the signal to a peer that `rank` has read its piece, or () if the peer does not wait for that."""
        awaited = piece + self.turns.slots <= last or (piece == last and channel.across)
        return (Signal(self.flag(channel.free, peer, rank, piece)),) if awaited else ()

    def push(self, channel: Channel, rank: int, peer: int, src: Region, piece: int, last: int) -> None:
        there = self.slot(channel, rank, peer, src, piece)
        lane, signal = self.copy_lane(peer), Signal(self.flag(channel.arrived, peer, rank, piece))
        self.add_steps(rank, lane, *self.make_slot_waits(channel, rank, peer, piece, last), Copy(src, there), signal)

    def copy_to_result(self, channel: Channel, rank: int, src: int, piece: int, last: int) -> None:
        """Add the copy of a piece that a peer has pushed to the result."""
        out = self.result_region(src, rank, piece)
        here = Copy(self.slot(channel, src, rank, out, piece), out)
        came = Wait(self.flag(channel.arrived, rank, src, piece))
        self.add_steps(rank, "compute", came, here, *self.make_read_signals(channel, rank, src, piece, last))

    def pull(self, channel: Channel, rank: int, src: int, piece: int, last: int) -> None:
        """Add the copy of a piece from a peer's slots to the result."""
        out = self.result_region(src, rank, piece)
        here = Copy(self.slot(channel, rank, src, out, piece), out)
        came = Wait(self.flag(channel.arrived, rank, src, piece))
        self.add_steps(rank, self.copy_lane(src), came, here, *self.make_read_signals(channel, rank, src, piece, last))

    def receive_sum(self, rank: int, owner: int, piece: int) -> None:
        """Add the steps that receive a piece of the sum from its owner.

        They copy it from `summed`. If the owner writes to the result itself, they wait for the last piece only.
        """
        last = self.pieces_of(owner).stop - 1
        if not self.collective.reachable:
            self.copy_to_result(SUMS, rank, owner, piece, last)
        elif piece == last:
            self.add_steps(rank, "compute", Wait(self.flag(SUMS.arrived, rank, owner, piece)))

    def publish_sum(self, rank: int, piece: int) -> None:
        """Add the sum of a piece of the own part into the slots from which peers pull it, and its copy to the own result."""
        last, out = self.pieces_of(rank).stop - 1, self.region_of_part("out", rank, rank, piece)
        here = self.slot(OFFERED, rank, rank, out, piece)
        for peer in self.peers(rank):
            self.add_steps(rank, "blocks", *self.make_slot_waits(OFFERED, rank, peer, piece, last))
        self.add_sum(PARTS, rank, piece, here)
        self.add_steps(rank, "blocks", *(Signal(self.flag(OFFERED.arrived, peer, rank, piece)) for peer in self.peers(rank)))
        self.add_steps(rank, "blocks", Copy(here, out))

    def send_sum(self, rank: int, peer: int, piece: int) -> None:
        """Add the copy of a piece of the own sum to a peer."""
        src, last = self.region_of_part("out", rank, rank, piece), self.pieces_of(rank).stop - 1
        if not self.collective.reachable:
            self.push(SUMS, rank, peer, src, piece, last)
            return
        self.add_steps(rank, self.copy_lane(peer), Copy(src, self.region_of_part("out", peer, rank, piece)))
        if piece == last:
            self.add_steps(rank, self.copy_lane(peer), Signal(self.flag(SUMS.arrived, peer, rank, piece)))

    def copy_own_part(self, rank: int) -> None:
        """Add the copy of the part that stays on its rank to the result."""
        low, high = self.problem.shards[rank]
        part = (0, high - low) if self.problem.op == "all_gather" else (low, high)
        out = self.problem.arrivals(rank, rank) if self.problem.op == "all_to_all" else (low, high)
        if high > low:
            self.add_steps(rank, "compute", Copy(self.region("a", rank, part), self.region("out", rank, out)))

    def add_sum(self, channel: Channel, rank: int, piece: int, out: Region) -> None:
        """Add the sum over ranks, in their order, of a piece of the own part."""
        last, mine = self.pieces_of(rank).stop - 1, self.region_of_part("a", rank, rank, piece)
        srcs = [mine if src == rank else self.slot(channel, src, rank, mine, piece) for src in self.ranks]
        self.add_steps(rank, "blocks", *(Wait(self.flag(channel.arrived, rank, peer, piece)) for peer in self.peers(rank)))
        self.add_steps(rank, "blocks", Reduce((Sum(tuple(srcs), out),), self.collective.divide_by))
        for peer in self.peers(rank):
            self.add_steps(rank, "blocks", *self.make_read_signals(channel, rank, peer, piece, last))


def sequential(request: Request) -> Schedule:
    """NCCL's collective."""
    s = _Collective(request)
    for rank in s.ranks:
        a, out = s.region("a", rank), s.region("out", rank)
        s.add_steps(rank, "compute", Collective(s.problem.op, a, out, s.collective.divide_by))  # type: ignore[arg-type]
    return s.build_schedule()


def pushed(request: Request) -> Schedule:
    """all_gather, all_to_all: copy engines push pieces into the peers' slots; copies there bring them to the result."""
    if _collective(request).reachable:
        return _straight(request)
    s = _Collective(request, parts=request.problem.world_size - 1)
    s.add_slots(LANDING)
    for rank in s.ranks:
        s.copy_own_part(rank)
        for piece in s.pieces_of(rank):
            for peer in s.peers(rank):
                s.push(LANDING, rank, peer, s.region_to_send(rank, peer, piece), piece, s.count - 1)
            for src in s.peers(rank, step=-1):
                s.copy_to_result(LANDING, rank, src, piece, s.count - 1)
    return s.build_schedule()


def _straight(request: Request) -> Schedule:
    """`pushed` where peers can write the result: one copy for each peer."""
    s = _Collective(replace(request, chunks=1), parts=0)
    for rank in s.ranks_with_work:
        s.add_steps(rank, "compute", *(Signal(Flag("open", peer, rank)) for peer in s.peers(rank)))
        s.copy_own_part(rank)
        for peer in s.peers(rank):
            there = Copy(s.region_to_send(rank, peer, 0), s.result_region(rank, peer, 0))
            s.add_steps(rank, s.copy_lane(peer), Wait(Flag("open", rank, peer)), there, Signal(Flag("arrived", peer, rank)))
        s.add_steps(rank, "compute", *(Wait(Flag("arrived", rank, src)) for src in s.peers(rank, step=-1)))
    return s.build_schedule()


def pulled(request: Request) -> Schedule:
    """all_gather: a rank puts its pieces into slots of its own; copy engines of the peers pull them to the result."""
    s = _Collective(request, parts=1)
    s.add_slots(STAGED)
    for rank in s.ranks if s.world_size > 1 else ():
        for piece in s.pieces_of(rank):
            src = s.region_of_own_part("a", rank, rank, piece)
            for peer in s.peers(rank):
                s.add_steps(rank, "compute", *s.make_slot_waits(STAGED, rank, peer, piece, s.count - 1))
            s.add_steps(rank, "compute", Copy(src, s.slot(STAGED, rank, rank, src, piece)))
            s.add_steps(rank, "compute", *(Signal(s.flag(STAGED.arrived, peer, rank, piece)) for peer in s.peers(rank)))
            for owner in s.peers(rank, step=-1):
                s.pull(STAGED, rank, owner, piece, s.count - 1)
    for rank in s.ranks:
        s.copy_own_part(rank)
    return s.build_schedule()


def reduced(request: Request) -> Schedule:
    """reduce_scatter: copy engines push pieces into their owners' slots; some SMs of each owner sum them as they arrive."""
    s = _Collective(request, parts=request.problem.world_size - 1)
    s.add_slots(LANDING)
    for rank in s.ranks:
        for piece in s.pieces_of(rank):
            for peer in s.peers(rank):
                s.push(LANDING, rank, peer, s.region_to_send(rank, peer, piece), piece, s.count - 1)
            s.add_sum(LANDING, rank, piece, s.region_of_own_part("out", rank, rank, piece))
    return s.build_schedule()


def all_reduced(request: Request) -> Schedule:
    """all_reduce: as `reduced`, and each sum goes to all peers, one piece behind the pieces that are sent to be summed."""
    straight = _collective(request).reachable
    s = _Collective(request, parts=(1 if straight else 2) * (request.problem.world_size - 1))
    s.add_slots(PARTS)
    if not straight:
        s.add_slots(SUMS)
    for rank in s.ranks:
        for piece in range(s.count + 1):
            _push_parts(s, rank, piece)
            if piece in s.pieces_of(rank):
                s.add_sum(PARTS, rank, piece, s.region_of_part("out", rank, rank, piece))
                s.add_steps(rank, "blocks", Signal(Flag("made", rank, piece)))
            _send_sum_to_peers(s, rank, piece - 1)
            for owner in s.peers(rank, step=-1):
                if piece in s.pieces_of(owner):
                    s.receive_sum(rank, owner, piece)
    return s.build_schedule()


def all_reduced_pulled(request: Request) -> Schedule:
    """all_reduce: as `reduced`, and copy engines of the peers pull each sum to their results, one piece behind the pieces that
    are sent to be summed. On this GPU only the own part is copied, where `all_reduced` copies all others'."""
    s = _Collective(request, parts=request.problem.world_size)
    s.add_slots(PARTS)
    s.add_slots(OFFERED)
    for rank in s.ranks:
        for piece in range(s.count + 1):
            _push_parts(s, rank, piece)
            if piece in s.pieces_of(rank):
                s.publish_sum(rank, piece)
            for owner in s.peers(rank, step=-1):
                if piece - 1 in s.pieces_of(owner):
                    s.pull(OFFERED, rank, owner, piece - 1, s.pieces_of(owner).stop - 1)
    return s.build_schedule()


def _push_parts(s: _Collective, rank: int, piece: int) -> None:
    """A piece of each peer's part to that peer, to be summed."""
    for owner in s.peers(rank):
        if piece in s.pieces_of(owner):
            last = s.pieces_of(owner).stop - 1
            s.push(PARTS, rank, owner, s.region_of_part("a", rank, owner, piece), piece, last)


def _send_sum_to_peers(s: _Collective, rank: int, piece: int) -> None:
    """Add the copies of a piece of the own part to all peers, after it is summed."""
    if piece < 0 or piece not in s.pieces_of(rank):
        return
    for lane in dict.fromkeys(s.copy_lane(peer) for peer in s.peers(rank)):
        s.add_steps(rank, lane, Wait(Flag("made", rank, piece)))
    for peer in s.peers(rank):
        s.send_sum(rank, peer, piece)


PUSHED: dict[Op, Build] = {"all_gather": pushed, "reduce_scatter": reduced, "all_reduce": all_reduced, "all_to_all": pushed}
PULLED: dict[Op, Build] = {"all_gather": pulled, "all_reduce": all_reduced_pulled}
"""By operator, the builders of the families copy_engine and copy_engine_pull."""
