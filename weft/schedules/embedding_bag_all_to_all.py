"""Builders for embedding_bag_all_to_all: out_mN = all_to_all(embedding_bag(tables of this rank, bags of M samples)).

Buffers of rank r, which has C_r columns of tables, and m_r of the M samples
    bags      input      M x C_r     what looking the rank's bags up gives; indices, offsets and tables stand for it
    pooled    local      M x C_r     what has been looked up (sequential, track_and_trigger)
    landing   symmetric  m_r x N     what peers send of r's samples: their columns, side by side in the order of ranks
    out       output     m_r x N     all columns of r's samples
    from<s>   local      m_r x C_s   what rank s of another node sends of r's samples (node_slices)

Flags of rank r (who signals ~> who waits)
    made[i]@r      r's lookup ~> r's copy lane: piece i is in `pooled`
    arrived[i]@r   a peer's lookup, or its copy lane ~> whatever of r hands out: the peer's piece i is in `landing`
    sliced[i]@r    r's lookup ~> r's network lane: a piece for another node is in `pooled` (node_slices)
    landed[i]@r    r's network lane ~> r's copy lane: piece i of all ranks of other nodes is in r's `from` buffers
    free[p]@r      p ~> whatever of r writes for p: p has handed out what r sent, for the last time in this call

    rank r, compute                    rank p, copy
    wait free[p] >= 0 of all peers
    lookup bags of r+1 -> landing@r+1
           bags of p   -> landing@p ~> wait arrived[r]
           ...                         copy landing[:, columns of r] -> out
           own bags    -> out          signal free[p]@r ~> (next call)

Remote bags come first, those of the successor before all others, so that no two ranks store to the same peer at once, and
what arrives is handed out while the owner still looks up its own bags.

Bad interleaving: r, a call ahead, stores into the landing buffer of p while p still copies the old rows out. `free` prevents
it. The caller gets a buffer of its own: handing out `landing` itself would save the copy, but a peer's next call would write
into what the caller still reads.
"""

from __future__ import annotations

from weft.core.problem import LookupProblem, Span1D
from weft.core.schedule import Bags, Collective, Copy, Flag, Lookup, Receive, Region, Schedule, Send, Signal, Wait
from weft.schedules.builder import Builder, Piece, Request


class _Exchange(Builder):
    """Buffers, flags and repeated idioms of this operator."""

    def __init__(self, asked: Request, *, pooled: bool = True, landing: bool = True) -> None:
        assert isinstance(asked.problem, LookupProblem), f"{asked.problem} is no lookup"
        super().__init__(asked)
        self.columns = [self.problem.columns(r) for r in self.each]
        self.buffer("bags", "input", self.problem.m, self.columns)
        if pooled:
            self.buffer("pooled", "local", self.problem.m, self.columns)
        if landing:
            self.buffer("landing", "symmetric", self.owned, self.problem.n)
        self.buffer("out", "output", self.owned, self.problem.n)

    def place(self, name: str, owner: int, src: int, rows: Span1D) -> Region:
        """Columns of rank `src`, these rows of the whole batch, in a buffer of `owner`."""
        low = self.problem.shards[owner][0]
        return self.region(name, owner, (rows[0] - low, rows[1] - low), self.problem.b_shards[src])

    def bags(self, rank: int, rows: Span1D, out: Region, count: Flag | None = None) -> Bags:
        return Bags(self.region("bags", rank, rows), out, count)

    def own(self, rank: int, rows: Span1D | None = None) -> list[Bags]:
        """The rank's own samples, or these of them, straight into the result."""
        rows = rows or self.problem.shards[rank]
        return [self.bags(rank, rows, self.place("out", rank, rank, rows))] if self.gives(rank, rank) else []

    def sent(self, rank: int) -> list[Piece]:
        """What `rank` gives to its peers, in order."""
        return [piece for peer in self.peers(rank) if self.gives(rank, peer) for piece in self.pieces[peer]]

    def stored(self, rank: int, piece: Piece) -> Bags:
        """What the lookup stores at a peer."""
        there = self.place("landing", piece.shard, rank, piece.rows)
        return self.bags(rank, piece.rows, there, self.arrived(rank, piece))

    def wait_for_receivers(self, rank: int) -> None:
        self.wait_free(rank, dict.fromkeys(piece.shard for piece in self.sent(rank)), "compute")

    def arrived(self, src: int, piece: Piece) -> Flag:
        return self.flag("arrived", piece.shard, src, piece.index)

    def hand_out(self, rank: int, lane: str) -> None:
        """What peers have sent becomes the caller's, piece by piece, in the order in which it arrives."""
        for src in (src for src in self.peers(rank, step=-1) if self.gives(src, rank)):
            for piece in self.pieces[rank]:
                copy = Copy(*(self.place(name, rank, src, piece.rows) for name in ("landing", "out")))
                self.add(rank, lane, Wait(self.arrived(src, piece)), copy)
            self.release(rank, [src], lane)

    def look_up(self, rank: int, parts: list[Bags]) -> None:
        if parts:
            self.add(rank, "compute", Lookup(tuple(parts)))

    def takes(self, rank: int, index: int) -> list[tuple[int, Piece]]:
        """(sender, piece) of slice `index` of what `rank` has from ranks of other nodes."""
        return [(src, piece) for src in self.far(rank) if self.gives(src, rank) for piece in self.chunk(index, [rank])]

    def send_slice(self, rank: int, index: int) -> None:
        """Look slice `index` up, and exchange it for those of other nodes."""
        pieces = self.chunk(index, [peer for peer in self.far(rank) if self.gives(rank, peer)])
        made = [self.flag("sliced", rank, piece.shard, index) for piece in pieces]
        pooled = [self.region("pooled", rank, piece.rows) for piece in pieces]
        parts = zip(pieces, pooled, made, strict=True)
        self.look_up(rank, [self.bags(rank, piece.rows, out, count) for piece, out, count in parts])
        sends = [Send(region, piece.shard) for region, piece in zip(pooled, pieces, strict=True)]
        receives = [Receive(self.landed_from(src, piece), src) for src, piece in self.takes(rank, index)]
        self.send_receive(rank, sends, receives, after=made, then=Flag("landed", rank, index))

    def landed_from(self, src: int, piece: Piece) -> Region:
        low = self.problem.shards[piece.shard][0]
        return self.region(f"from{src}", piece.shard, (piece.rows[0] - low, piece.rows[1] - low))

    def far_buffers(self) -> None:
        """A buffer for each rank's columns: messages are whole rows."""
        for src in self.each:
            rows = [0 if r in self.node(src) else self.owned[r] for r in self.each]
            self.buffer(f"from{src}", "local", rows, self.columns[src])

    def gives(self, src: int, owner: int) -> bool:
        return self.owned[owner] > 0 and self.columns[src] > 0


def sequential(asked: Request) -> Schedule:
    """One lookup of all bags, then NCCL's all-to-all."""
    s = _Exchange(asked, landing=False)
    for rank in s.each:
        pooled = s.region("pooled", rank)
        exchange = Collective("all_to_all_columns", pooled, s.region("out", rank))
        s.add(rank, "compute", Lookup((Bags(s.region("bags", rank), pooled),)), exchange)
    return s.done()


def stored(asked: Request) -> Schedule:
    """One kernel that stores what it looks up where it belongs, remote bags first; the owner hands out what has arrived."""
    s = _Exchange(asked, pooled=False)
    for rank in s.each:
        s.wait_for_receivers(rank)
        s.add(rank, "compute", Lookup((*(s.stored(rank, piece) for piece in s.sent(rank)), *s.own(rank))))
        s.hand_out(rank, "copy")
    return s.done()


def counted(asked: Request) -> Schedule:
    """One lookup that counts; each full count triggers the copy that sends the piece."""
    s = _Exchange(asked)
    for rank in s.each:
        parts = []
        for piece in s.sent(rank):
            made, here = s.flag("made", rank, piece.shard, piece.index), s.region("pooled", rank, piece.rows)
            parts.append(s.bags(rank, piece.rows, here, made))
            first = piece is s.pieces[piece.shard][0]
            s.add(rank, "copy", Wait(made), *([s.free(rank, piece.shard)] if first else []))
            there = s.place("landing", piece.shard, rank, piece.rows)
            s.add(rank, "copy", Copy(here, there), Signal(s.arrived(rank, piece)))
        s.add(rank, "compute", Lookup((*parts, *s.own(rank))))
        s.hand_out(rank, "compute")
    return s.done()


def sliced(asked: Request) -> Schedule:
    """As `stored` within a node. The bags for other nodes come first, and leave slice by slice.

    A slice is a kernel of its own, and so is each piece of what stays: blocks of a lookup fill every SM to its end, and the
    NCCL's sending gets SMs between two.
    """
    if not asked.problem.nodes:
        return stored(asked)
    s = _Exchange(asked)
    s.far_buffers()
    for rank in s.each:
        for index in range(s.chunks):
            s.send_slice(rank, index)
        s.wait_for_receivers(rank)
        for index in range(s.chunks):
            near = [s.stored(rank, piece) for piece in s.sent(rank) if piece.index == index]
            s.look_up(rank, near + [bags for piece in s.chunk(index, [rank]) for bags in s.own(rank, piece.rows)])
        s.hand_out(rank, "copy")
        for index in range(s.chunks):
            takes = s.takes(rank, index)
            if takes:
                s.add(rank, "copy", Wait(Flag("landed", rank, index)))
            for src, piece in takes:
                s.add(rank, "copy", Copy(s.landed_from(src, piece), s.place("out", rank, src, piece.rows)))
    return s.done()
