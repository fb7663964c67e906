"""Builders for collectives without other computation: all_gather, all_to_all, reduce_scatter, all_reduce.

Each rank owns one part of the data. A part is cut into pieces, and each piece travels through a slot of symmetric memory.

Buffers of rank r; all have one column, p = world_size
    a       input                r's input
    recv    symmetric            slots for the pieces that each of the p - 1 peers pushes
    staged  symmetric            copy_engine_pull: slots for pieces that peers pull: pieces of a, or of the sum of r's part
    summed  symmetric            all_reduce: slots for the pieces of the sum that each of the p - 1 owners pushes
    out     output               the result

Flags of rank r (who signals ~> who waits), one for each peer and piece
    arrived[p, i]@r   p ~> r: p's piece i is in recv         free[p, i]@r   p ~> r: p has read r's piece i from p's recv
    ready[p, i]@r     p ~> r: p's piece i is in summed       read[p, i]@r   p ~> r: p has read r's piece i from p's summed
    made[i]@r         r's sums ~> r's copies: piece i of the sum of r's part is ready (all_reduce)
    open[p]@r         p ~> r: p has begun this call, so r may write p's out (if out is reachable)

An all_reduce:

    rank r, copy                        rank o, blocks                 rank o, copy                       rank r, compute
    wait free[o]
    a -> recv of o, arrived[r]   ~~>    wait arrived of all
    next piece, to all owners           sum -> out, free[o], made -->  wait made, wait read[r]
                                                                       out -> summed of r, ready[o]  ~~>  wait ready[o]
                                                                       next owner's peer                  summed -> out, read

A reduce_scatter ends with the sum. An all_gather and an all_to_all push into recv, and the receiver copies pieces that have
arrived to out. Where peers pull, the sum is stored in staged, and `ready` signals it:

    rank o, blocks                        rank r, copy
    wait arrived of all, read[r] of the slot's previous piece
    sum -> staged, free[r], ready  ~~>    wait ready[o]
    staged -> o's part of out             staged of o -> out, read

All pushes of a rank are on one lane. The rank pushes a piece to each peer before it pushes the next piece.

Where out is in symmetric memory (`reachable`), pieces are pushed directly to it, without a copy at the receiver. Until a rank
has begun a call, its out belongs to its caller. The flag `open` signals that the rank has begun. In an all_reduce, the parts
that the rank pushes to be summed signal the same.

Memory is bounded. The receiver of a part has `slots` slots of one piece each, and piece i goes into slot i % slots. It may be
sent when piece i - slots of this call or of the previous one has been read. So a collective of any size fits into
`staging_bytes`.

Bad interleaving: r pushes piece i + slots while o still sums piece i. `free` prevents this, also between calls: the first piece
of a call waits until the last piece of the previous call has been read, and receivers read pieces in order. An all_reduce needs
no flags between calls. A rank that begins the next call has received all sums, so its parts have been read. A rank that pushes
a sum to a peer has received that peer's parts of this call, so the peer has copied all sums of the previous call to its result.

The result may overwrite the input. Rank o writes a piece of its sum after r's piece has arrived, and r copies that sum to its
out after that. So every element of `a` has been pushed, or is an operand of the sum that overwrites it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from weft.core.problem import CollectiveProblem, Op, Problem, Span1D
from weft.core.schedule import (
    MAILBOX_COPIES,
    Collective,
    Copy,
    Flag,
    FusedCollective,
    Reduce,
    Region,
    Schedule,
    Signal,
    Sum,
    Wait,
)
from weft.schedules.builder import Build, Builder, Request

MAX_PUSHES = 4096
"""The largest number of pushes of all ranks together. The checker takes seconds and gigabytes for more."""


class Channel(NamedTuple):
    """A buffer of slots on every rank through which pieces travel, and the names of its flags."""

    buffer: str
    arrived: str
    """The flag that signals that a piece is in its slot."""
    free: str
    """The flag that signals that a piece has been read from its slot."""
    per_peer: bool = True
    """True if each peer has its own slots, into which it pushes. False if the slots hold pieces that peers pull."""
    across_calls: bool = True
    """True if a call waits until the last pieces of the previous call have been read; False if the data that the rank has
    received imply that."""


PUSHED_PARTS = Channel("recv", "arrived", "free")
"""Parts that an all_gather, an all_to_all or a reduce_scatter pushes."""
PULLED_PARTS = Channel("staged", "arrived", "free", per_peer=False)
"""Parts that peers pull in an all_gather."""
PARTS_TO_SUM = Channel("recv", "arrived", "free", across_calls=False)
"""Parts that an all_reduce pushes to their owners, which sum them."""
PUSHED_SUMS = Channel("summed", "ready", "read", across_calls=False)
"""Sums that their owners push in an all_reduce."""
PULLED_SUMS = Channel("staged", "ready", "read", per_peer=False, across_calls=False)
"""Sums that peers pull in an all_reduce."""


class PieceLayout(NamedTuple):
    """How a part is cut into pieces, and how the pieces share the part's slots: piece i uses slot i % slots."""

    length: int
    """The number of elements of a piece, and of a slot."""
    slots: int

    def count_pieces(self, extent: int) -> int:
        """Return the number of pieces of a part with `extent` elements."""
        return -(-extent // self.length)

    def span(self, part: Span1D, index: int) -> Span1D:
        """Return the first element of a piece of `part`, and the end."""
        low = part[0] + index * self.length
        return low, min(low + self.length, part[1])

    def slot_start(self, index: int) -> int:
        """Return the first element of the slot of a piece, counted from the part's first slot."""
        return index % self.slots * self.length


def cut_into_pieces(problem: CollectiveProblem, chunks: int, parts: int) -> PieceLayout:
    """Return how each part is cut into pieces, so that the slots of `parts` parts fit into staging_bytes.

    A part gets `chunks` pieces with a slot each if these fit. Otherwise it gets the largest pieces that leave two slots for
    each part. `parts` is 0 if nothing is staged. Raises ValueError if all ranks together would make more than MAX_PUSHES
    pushes.

    >>> problem = CollectiveProblem(op="all_gather", m=1 << 20, world_size=4, dtype="float32", staging_bytes=1 << 20)
    >>> cut_into_pieces(problem, 1, 3), cut_into_pieces(problem, 8, 1)
    (PieceLayout(length=43688, slots=2), PieceLayout(length=32768, slots=8))
    """
    unit = problem.ALIGN_BYTES // problem.itemsize
    longest = max(high - low for low, high in problem.shards)
    available = problem.staging_bytes // problem.itemsize // parts if parts else longest + unit
    length = max(1, -(-longest // (chunks * unit))) * unit
    if length * -(-longest // length) > available:
        length = max(unit, min(length, available // 2 // unit * unit))
    count, max_count = -(-longest // length), _max_pieces_per_part(problem)
    if count > max_count:
        min_bytes = 2 * parts * problem.itemsize * unit * -(-longest // (max_count * unit))
        raise ValueError(
            f"staging_bytes is {problem.staging_bytes} and chunks is {chunks}, which cuts each part of {problem} into {count} "
            f"pieces; use at least {min_bytes} bytes, and at most {max_count} chunks"
        )
    return PieceLayout(length, max(1, min(count, available // length)))


def _max_pieces_per_part(problem: CollectiveProblem) -> int:
    """Return the largest number of pieces of a part. A part goes to each peer, and in an all_reduce also comes back.

    It is at least the largest number of chunks that `candidates` uses.
    """
    pairs = problem.world_size * (problem.world_size - 1) * (2 if problem.op == "all_reduce" else 1)
    return max(2 * problem.world_size, MAX_PUSHES // max(1, pairs))


def _get_problem(request: Request) -> CollectiveProblem:
    assert isinstance(request.problem, CollectiveProblem), f"{request.problem} is no collective"
    return request.problem


class _CollectiveBuilder(Builder):
    """Adds the caller's buffers, and the steps that several schedules share."""

    def __init__(self, request: Request, *, parts: int | None = None) -> None:
        """`parts` is the number of parts with slots on a rank; None if the schedule cuts no pieces."""
        super().__init__(request)
        self.collective = _get_problem(request)
        n = self.problem.n
        self.add_buffer("a", "input", [self.collective.a_rows(r) for r in self.ranks], n)
        self.add_buffer("out", "output", [self.collective.out_rows(r) for r in self.ranks], n)
        for addend in self.problem.addends:
            self.add_buffer(addend, "input", self.problem.m if addend == "residual" else 1, n)
        self.layout = PieceLayout(1, 1) if parts is None else cut_into_pieces(self.collective, self.chunks, parts)
        self.max_pieces = self.layout.count_pieces(max(self.shard_rows))
        """The number of pieces of the longest part."""

    def addends(self, rank: int) -> tuple[Region, ...]:
        return tuple(self.region(name, rank) for name in self.problem.addends)

    def add_slots(self, channel: Channel) -> None:
        rows = (self.world_size - 1 if channel.per_peer else 1) * self.layout.slots * self.layout.length
        self.add_buffer(channel.buffer, "symmetric", rows, 1)

    def pieces_of(self, part: int) -> range:
        return range(self.layout.count_pieces(self.shard_rows[part]))

    def region_of_part(self, buffer: str, rank: int, part: int, piece: int) -> Region:
        """Return a piece of part `part` of a buffer that has all parts."""
        return self.region(buffer, rank, self.layout.span(self.problem.shards[part], piece))

    def region_of_own_part(self, buffer: str, rank: int, part: int, piece: int) -> Region:
        """Return a piece of a buffer that has only part `part`."""
        return self.region(buffer, rank, self.layout.span((0, self.shard_rows[part]), piece))

    def region_to_send(self, rank: int, peer: int, piece: int) -> Region:
        """Return the elements of a that go to a peer."""
        gathers = self.problem.op == "all_gather"
        return self.region_of_own_part("a", rank, rank, piece) if gathers else self.region_of_part("a", rank, peer, piece)

    def result_region(self, src: int, rank: int, piece: int) -> Region:
        """Return the region of out on `rank` that gets a piece of `src`."""
        if self.problem.op != "all_to_all":
            return self.region_of_part("out", rank, src, piece)
        return self.region("out", rank, self.layout.span(self.problem.arrivals(src, rank), piece))

    def slot(self, channel: Channel, src: int, rank: int, like: Region, piece: int) -> Region:
        """Return the slot on `rank` for a piece of rank `src`, cut to the length of `like`."""
        offset = (src - (src > rank)) * self.layout.slots * self.layout.length if channel.per_peer else 0
        low = offset + self.layout.slot_start(piece)
        return self.region(channel.buffer, rank, (low, low + like.shape[0]))

    def flag(self, name: str, rank: int, src: int, index: int = 0) -> Flag:
        """Return the flag of a rank that a peer signals."""
        return Flag(name, rank, src * self.max_pieces + index)

    def make_slot_waits(self, channel: Channel, rank: int, peer: int, piece: int, last: int) -> tuple[Wait, ...]:
        """Return the wait until the peer has read the previous piece in the slot of this piece, or () if none is needed.

        last: the index of the last piece.
        """
        if piece >= self.layout.slots:
            return (Wait(self.flag(channel.free, rank, peer, piece - self.layout.slots)),)
        first = piece == 0 and channel.across_calls
        return (Wait(self.flag(channel.free, rank, peer, last), on_previous_call=True),) if first else ()

    def make_read_signals(self, channel: Channel, rank: int, peer: int, piece: int, last: int) -> tuple[Signal, ...]:
        """Return the signal to a peer that `rank` has read its piece, or () if the peer does not wait for that."""
        is_awaited = piece + self.layout.slots <= last or (piece == last and channel.across_calls)
        return (Signal(self.flag(channel.free, peer, rank, piece)),) if is_awaited else ()

    def push(self, channel: Channel, rank: int, peer: int, src: Region, piece: int, last: int) -> None:
        """Add the copy of a piece into the peer's slots, and the signal that it has arrived."""
        slot = self.slot(channel, rank, peer, src, piece)
        lane, signal = self.copy_lane(peer), Signal(self.flag(channel.arrived, peer, rank, piece))
        self.add_steps(rank, lane, *self.make_slot_waits(channel, rank, peer, piece, last), Copy(src, slot), signal)

    def copy_to_result(self, channel: Channel, rank: int, src: int, piece: int, last: int) -> None:
        """Add the copy of a piece from the rank's own slots, into which a peer has pushed it, to the result."""
        out = self.result_region(src, rank, piece)
        copy = Copy(self.slot(channel, src, rank, out, piece), out)
        arrival = Wait(self.flag(channel.arrived, rank, src, piece))
        self.add_steps(rank, "compute", arrival, copy, *self.make_read_signals(channel, rank, src, piece, last))

    def pull(self, channel: Channel, rank: int, src: int, piece: int, last: int) -> None:
        """Add the copy of a piece from a peer's slots to the result."""
        out = self.result_region(src, rank, piece)
        copy = Copy(self.slot(channel, rank, src, out, piece), out)
        arrival = Wait(self.flag(channel.arrived, rank, src, piece))
        self.add_steps(rank, self.copy_lane(src), arrival, copy, *self.make_read_signals(channel, rank, src, piece, last))

    def receive_sum(self, rank: int, owner: int, piece: int) -> None:
        """Add the steps that receive a piece of the sum from its owner.

        They copy it from `summed`. If the owner writes to the result itself, they wait for the last piece only.
        """
        last = self.pieces_of(owner).stop - 1
        if not self.collective.reachable:
            self.copy_to_result(PUSHED_SUMS, rank, owner, piece, last)
        elif piece == last:
            self.add_steps(rank, "compute", Wait(self.flag(PUSHED_SUMS.arrived, rank, owner, piece)))

    def publish_sum(self, rank: int, piece: int) -> None:
        """Add the sum of a piece of the rank's part, which peers pull from its slots, and its copy to the rank's result."""
        last, out = self.pieces_of(rank).stop - 1, self.region_of_part("out", rank, rank, piece)
        slot = self.slot(PULLED_SUMS, rank, rank, out, piece)
        for peer in self.peers(rank):
            self.add_steps(rank, "blocks", *self.make_slot_waits(PULLED_SUMS, rank, peer, piece, last))
        self.add_sum(PARTS_TO_SUM, rank, piece, slot)
        self.add_steps(
            rank, "blocks", *(Signal(self.flag(PULLED_SUMS.arrived, peer, rank, piece)) for peer in self.peers(rank))
        )
        self.add_steps(rank, "blocks", Copy(slot, out))

    def send_sum(self, rank: int, peer: int, piece: int) -> None:
        """Add the copy of a piece of the rank's sum to a peer."""
        src, last = self.region_of_part("out", rank, rank, piece), self.pieces_of(rank).stop - 1
        if not self.collective.reachable:
            self.push(PUSHED_SUMS, rank, peer, src, piece, last)
            return
        self.add_steps(rank, self.copy_lane(peer), Copy(src, self.region_of_part("out", peer, rank, piece)))
        if piece == last:
            self.add_steps(rank, self.copy_lane(peer), Signal(self.flag(PUSHED_SUMS.arrived, peer, rank, piece)))

    def copy_own_part(self, rank: int) -> None:
        """Add the copy of the part that stays on its rank to the result."""
        low, high = self.problem.shards[rank]
        part = (0, high - low) if self.problem.op == "all_gather" else (low, high)
        out = self.problem.arrivals(rank, rank) if self.problem.op == "all_to_all" else (low, high)
        if high > low:
            self.add_steps(rank, "compute", Copy(self.region("a", rank, part), self.region("out", rank, out)))

    def add_sum(self, channel: Channel, rank: int, piece: int, out: Region) -> None:
        """Add the sum over all ranks, in the order of the ranks, of a piece of the rank's part."""
        last, own = self.pieces_of(rank).stop - 1, self.region_of_part("a", rank, rank, piece)
        srcs = [own if src == rank else self.slot(channel, src, rank, own, piece) for src in self.ranks]
        self.add_steps(rank, "blocks", *(Wait(self.flag(channel.arrived, rank, peer, piece)) for peer in self.peers(rank)))
        self.add_steps(rank, "blocks", Reduce((Sum(tuple(srcs), out),), self.collective.divide_by))
        for peer in self.peers(rank):
            self.add_steps(rank, "blocks", *self.make_read_signals(channel, rank, peer, piece, last))


def build_sequential(request: Request) -> Schedule:
    """Run NCCL's collective. A separate sum adds the addends after it, and rounds once more."""
    s = _CollectiveBuilder(request)
    into = "partial" if s.problem.addends else "out"
    if s.problem.addends:
        s.add_buffer("partial", "local", s.problem.m, s.problem.n)
    for rank in s.ranks:
        a, dst = s.region("a", rank), s.region(into, rank)
        s.add_steps(rank, "compute", Collective(s.problem.op, a, dst, s.collective.divide_by))  # type: ignore[arg-type]
        if s.problem.addends and rank in s.ranks_with_work:
            s.add_steps(rank, "compute", Reduce((Sum((dst, *s.addends(rank)), s.region("out", rank)),)))
    return s.build_schedule()


def build_one_kernel(request: Request, *, hops: int) -> Schedule:
    """Build an all_reduce that one kernel runs (weft.kernels.all_reduce). In one hop, every rank stores its elements at every
    peer, and sums all ranks'. In two, each rank owns some columns, and stores their sums at every peer."""
    s = _CollectiveBuilder(request)
    for rank in s.ranks_with_work:
        norm, out = s.take_fused_norm(rank, hops), s.region("out", rank)
        step = FusedCollective(
            "all_reduce", (s.region("a", rank),), out, hops, s.addends(rank), s.collective.divide_by, norm=norm
        )
        s.add_steps(rank, "compute", step)
    return s.build_schedule()


def why_not_one_kernel(problem: Problem, *, hops: int) -> str:
    """Return why one kernel cannot run an all_reduce, or "" if it can."""
    if not isinstance(problem, CollectiveProblem):
        return ""
    mailbox = MAILBOX_COPIES * problem.world_size * problem.m * problem.n * problem.itemsize
    if mailbox > problem.staging_bytes:
        return f"its mailbox needs about {mailbox} bytes on each rank, and staging_bytes is {problem.staging_bytes}"
    if hops == 2 and not problem.rows_matter:
        return "each rank sums some columns, and the elements of this all_reduce have none; use one_shot"
    return ""


def why_not_pieces(problem: Problem) -> str:
    """Return why pieces of elements cannot be summed alone, or "" if they can."""
    if isinstance(problem, CollectiveProblem) and problem.rows_matter:
        return "it sums elements in any order of rows; with addends, a norm or columns use one_shot, two_shot or sequential"
    return ""


def build_pushed(request: Request) -> Schedule:
    """Build an all_gather or all_to_all: copy engines push pieces into the peers' slots, and peers copy them to the result."""
    if _get_problem(request).reachable:
        return _build_direct_push(request)
    s = _CollectiveBuilder(request, parts=request.problem.world_size - 1)
    s.add_slots(PUSHED_PARTS)
    for rank in s.ranks:
        s.copy_own_part(rank)
        for piece in s.pieces_of(rank):
            for peer in s.peers(rank):
                s.push(PUSHED_PARTS, rank, peer, s.region_to_send(rank, peer, piece), piece, s.max_pieces - 1)
            for src in s.peers(rank, step=-1):
                s.copy_to_result(PUSHED_PARTS, rank, src, piece, s.max_pieces - 1)
    return s.build_schedule()


def _build_direct_push(request: Request) -> Schedule:
    """Build an all_gather or all_to_all whose results peers can write: a rank makes one copy for each peer."""
    s = _CollectiveBuilder(replace(request, chunks=1), parts=0)
    for rank in s.ranks_with_work:
        s.add_steps(rank, "compute", *(Signal(Flag("open", peer, rank)) for peer in s.peers(rank)))
        s.copy_own_part(rank)
        for peer in s.peers(rank):
            copy = Copy(s.region_to_send(rank, peer, 0), s.result_region(rank, peer, 0))
            s.add_steps(rank, s.copy_lane(peer), Wait(Flag("open", rank, peer)), copy, Signal(Flag("arrived", peer, rank)))
        s.add_steps(rank, "compute", *(Wait(Flag("arrived", rank, src)) for src in s.peers(rank, step=-1)))
    return s.build_schedule()


def build_pulled(request: Request) -> Schedule:
    """Build an all_gather: a rank copies its pieces into its own slots, and the peers' copy engines pull them to the result."""
    s = _CollectiveBuilder(request, parts=1)
    s.add_slots(PULLED_PARTS)
    for rank in s.ranks if s.world_size > 1 else ():
        for piece in s.pieces_of(rank):
            src = s.region_of_own_part("a", rank, rank, piece)
            for peer in s.peers(rank):
                s.add_steps(rank, "compute", *s.make_slot_waits(PULLED_PARTS, rank, peer, piece, s.max_pieces - 1))
            s.add_steps(rank, "compute", Copy(src, s.slot(PULLED_PARTS, rank, rank, src, piece)))
            s.add_steps(rank, "compute", *(Signal(s.flag(PULLED_PARTS.arrived, peer, rank, piece)) for peer in s.peers(rank)))
            for owner in s.peers(rank, step=-1):
                s.pull(PULLED_PARTS, rank, owner, piece, s.max_pieces - 1)
    for rank in s.ranks:
        s.copy_own_part(rank)
    return s.build_schedule()


def build_reduce_scatter(request: Request) -> Schedule:
    """Build a reduce_scatter: copy engines push pieces into their owners' slots, and some SMs of each owner sum them as they
    arrive."""
    s = _CollectiveBuilder(request, parts=request.problem.world_size - 1)
    s.add_slots(PUSHED_PARTS)
    for rank in s.ranks:
        for piece in s.pieces_of(rank):
            for peer in s.peers(rank):
                s.push(PUSHED_PARTS, rank, peer, s.region_to_send(rank, peer, piece), piece, s.max_pieces - 1)
            s.add_sum(PUSHED_PARTS, rank, piece, s.region_of_own_part("out", rank, rank, piece))
    return s.build_schedule()


def build_all_reduce(request: Request) -> Schedule:
    """Build an all_reduce: pieces are summed as in a reduce_scatter, and each owner pushes the sum to all peers.

    The sum of a piece is pushed after the next piece of the parts.
    """
    reachable = _get_problem(request).reachable
    s = _CollectiveBuilder(request, parts=(1 if reachable else 2) * (request.problem.world_size - 1))
    s.add_slots(PARTS_TO_SUM)
    if not reachable:
        s.add_slots(PUSHED_SUMS)
    for rank in s.ranks:
        for piece in range(s.max_pieces + 1):
            _push_parts(s, rank, piece)
            if piece in s.pieces_of(rank):
                s.add_sum(PARTS_TO_SUM, rank, piece, s.region_of_part("out", rank, rank, piece))
                s.add_steps(rank, "blocks", Signal(Flag("made", rank, piece)))
            _send_sum_to_peers(s, rank, piece - 1)
            for owner in s.peers(rank, step=-1):
                if piece in s.pieces_of(owner):
                    s.receive_sum(rank, owner, piece)
    return s.build_schedule()


def build_pulled_all_reduce(request: Request) -> Schedule:
    """Build an all_reduce: pieces are summed as in a reduce_scatter, and the peers' copy engines pull each sum.

    The sum of a piece is pulled after the next piece of the parts is pushed. A rank copies only its own part locally, whereas
    `build_all_reduce` copies the parts of all others.
    """
    s = _CollectiveBuilder(request, parts=request.problem.world_size)
    s.add_slots(PARTS_TO_SUM)
    s.add_slots(PULLED_SUMS)
    for rank in s.ranks:
        for piece in range(s.max_pieces + 1):
            _push_parts(s, rank, piece)
            if piece in s.pieces_of(rank):
                s.publish_sum(rank, piece)
            for owner in s.peers(rank, step=-1):
                if piece - 1 in s.pieces_of(owner):
                    s.pull(PULLED_SUMS, rank, owner, piece - 1, s.pieces_of(owner).stop - 1)
    return s.build_schedule()


def _push_parts(s: _CollectiveBuilder, rank: int, piece: int) -> None:
    """Add the pushes of one piece of each peer's part to that peer, which sums it."""
    for owner in s.peers(rank):
        if piece in s.pieces_of(owner):
            last = s.pieces_of(owner).stop - 1
            s.push(PARTS_TO_SUM, rank, owner, s.region_of_part("a", rank, owner, piece), piece, last)


def _send_sum_to_peers(s: _CollectiveBuilder, rank: int, piece: int) -> None:
    """Add the copies of a piece of the rank's sum to all peers, and the wait for this sum."""
    if piece < 0 or piece not in s.pieces_of(rank):
        return
    for lane in dict.fromkeys(s.copy_lane(peer) for peer in s.peers(rank)):
        s.add_steps(rank, lane, Wait(Flag("made", rank, piece)))
    for peer in s.peers(rank):
        s.send_sum(rank, peer, piece)


PUSH_BUILDERS: dict[Op, Build] = {
    "all_gather": build_pushed,
    "reduce_scatter": build_reduce_scatter,
    "all_reduce": build_all_reduce,
    "all_to_all": build_pushed,
}
"""The builders of the family copy_engine, by operator."""
PULL_BUILDERS: dict[Op, Build] = {"all_gather": build_pulled, "all_reduce": build_pulled_all_reduce}
"""The builders of the family copy_engine_pull, by operator."""
