"""Builders for embedding_bag_all_to_all: out_mN = all_to_all(embedding_bag(tables of this rank, bags of M samples)).

Buffers of rank r, which has C_r columns of tables, and m_r of the M samples
    bags      input      M x C_r     what looking the rank's bags up gives; indices, offsets and tables stand for it
    pooled    local      M x C_r     what has been looked up (sequential, track_and_trigger)
    landing   symmetric  m_r x N     what peers send of r's samples: their columns, side by side in the order of ranks
    out       output     m_r x N     all columns of r's samples
    from<s>   local      m_r x C_s   what rank s of another node sends of r's samples (node_slices)

Flags of rank r (who advances ~> who waits)
    made[i]@r      r's lookup ~> r's copy lane: piece i lies in `pooled`
    arrived[i]@r   a peer's lookup, or its copy lane ~> whatever of r hands out: the peer's piece i lies in `landing`
    sliced[i]@r    r's lookup ~> r's network lane: a piece for another node lies in `pooled` (node_slices)
    landed[i]@r    r's network lane ~> r's copy lane: piece i of all ranks of other nodes lies in r's `from` buffers
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

from collections.abc import Iterator

from weft.core.problem import LookupProblem, Problem, Span1D
from weft.core.schedule import Bags, Collective, Copy, Flag, Lookup, Receive, Region, Schedule, Send, Signal, Wait
from weft.schedules.builder import Builder, Piece, cut


class _Exchange(Builder):
    """Buffers, flags and repeated idioms of this operator."""

    def __init__(self, problem: Problem, name: str, chunks: int = 1, *, pooled: bool, landing: bool) -> None:
        assert isinstance(problem, LookupProblem), f"{problem} is no lookup"
        super().__init__(problem, name, chunks)
        self.pieces = cut(problem, chunks)
        each = range(self.world_size)
        whole, columns = [problem.m for _ in each], [problem.columns(r) for r in each]
        owned, total = [high - low for low, high in problem.shards], [problem.n for _ in each]
        self.buffer("bags", "input", whole, columns)
        if pooled:
            self.buffer("pooled", "local", whole, columns)
        if landing:
            self.buffer("landing", "symmetric", owned, total)
        self.buffer("out", "output", owned, total)

    def place(self, name: str, owner: int, src: int, rows: Span1D) -> Region:
        """Columns of rank `src`, these rows of the whole batch, in a buffer of `owner`."""
        low = self.problem.shards[owner][0]
        return self.region(name, owner, (rows[0] - low, rows[1] - low), self.problem.b_shards[src])

    def own(self, rank: int) -> list[Bags]:
        """The rank's own samples, straight into the result."""
        rows = self.problem.shards[rank]
        if not self._gives(rank, rank):
            return []
        return [Bags(self.region("bags", rank, rows), self.place("out", rank, rank, rows))]

    def sent(self, rank: int, *, step: int = 1) -> Iterator[tuple[int, Piece]]:
        """(peer, piece) that `rank` gives to its peers, in order."""
        for peer in self.peers(rank, step=step):
            if self._gives(rank, peer):
                yield from ((peer, piece) for piece in self.pieces[peer])

    def stores(self, rank: int) -> list[Bags]:
        """What the lookup stores at peers."""
        return [
            Bags(
                self.region("bags", rank, piece.rows),
                self.place("landing", peer, rank, piece.rows),
                self.arrived(rank, peer, piece),
            )
            for peer, piece in self.sent(rank)
        ]

    def receivers(self, rank: int) -> list[int]:
        return list(dict.fromkeys(peer for peer, _ in self.sent(rank)))

    def arrived(self, src: int, owner: int, piece: Piece) -> Flag:
        return Flag("arrived", owner, src * self.chunks + piece.index)

    def hand_out(self, rank: int, lane: str) -> None:
        """What peers have sent becomes the caller's, piece by piece, in the order in which it arrives."""
        for src in self.peers(rank, step=-1):
            if not self._gives(src, rank):
                continue
            for piece in self.pieces[rank]:
                wait = Wait(self.arrived(src, rank, piece))
                self.add(rank, lane, wait, Copy(*(self.place(b, rank, src, piece.rows) for b in ("landing", "out"))))
            self.add(rank, lane, Signal(Flag("free", src, rank)))

    def exchanged(self, rank: int, index: int) -> tuple[list[tuple[int, Piece]], list[tuple[int, Piece]]]:
        """Of slice `index`, what `rank` gives to ranks of other nodes, and what it has from them: (other rank, piece)."""
        gives = [(p, piece) for p in self.far(rank) for piece in self.pieces[p] if piece.index == index]
        takes = [(p, piece) for p in self.far(rank) for piece in self.pieces[rank] if piece.index == index]
        return [(p, piece) for p, piece in gives if self._gives(rank, p)], [t for t in takes if self._gives(t[0], rank)]

    def send_slice(self, rank: int, index: int) -> None:
        """Look slice `index` up, and exchange it for those of other nodes."""
        gives, takes = self.exchanged(rank, index)
        made = [Flag("sliced", rank, peer * self.chunks + index) for peer, _ in gives]
        pooled = [self.region("pooled", rank, piece.rows) for _, piece in gives]
        bags = (self.region("bags", rank, piece.rows) for _, piece in gives)
        self.look_up(rank, [Bags(*part) for part in zip(bags, pooled, made, strict=True)])
        sends = [Send(region, peer) for region, (peer, _) in zip(pooled, gives, strict=True)]
        receives = [Receive(self.landed_from(src, rank, piece), src) for src, piece in takes]
        self.send_receive(rank, sends, receives, after=made, then=Flag("landed", rank, index))

    def look_up(self, rank: int, parts: list[Bags]) -> None:
        if parts:
            self.add(rank, "compute", Lookup(tuple(parts)))

    def near(self, rank: int) -> list[tuple[Bags, int]]:
        """What stays within the node, with the index of its piece: what peers own, then the rank's own."""
        stored = zip(self.stores(rank), (piece.index for _, piece in self.sent(rank)), strict=True)
        own = [piece for piece in self.pieces[rank] if self._gives(rank, rank)]
        mine = (Bags(self.region("bags", rank, p.rows), self.place("out", rank, rank, p.rows)) for p in own)
        return [*stored, *zip(mine, (piece.index for piece in own), strict=True)]

    def landed_from(self, src: int, owner: int, piece: Piece) -> Region:
        low = self.problem.shards[owner][0]
        return self.region(f"from{src}", owner, (piece.rows[0] - low, piece.rows[1] - low))

    def far_buffers(self) -> None:
        """A buffer for each rank's columns: messages are whole rows."""
        for src in range(self.world_size):
            apart = [self.problem.node_of[r] != self.problem.node_of[src] for r in range(self.world_size)]
            rows = [(high - low) * far for (low, high), far in zip(self.problem.shards, apart, strict=True)]
            self.buffer(f"from{src}", "local", rows, [self.problem.columns(src)] * self.world_size)

    def _gives(self, src: int, owner: int) -> bool:
        low, high = self.problem.shards[owner]
        return high > low and self.problem.columns(src) > 0


def sequential(problem: Problem) -> Schedule:
    """One lookup of all bags, then the vendor's all-to-all."""
    make = _Exchange(problem, "sequential", pooled=True, landing=False)
    for rank in range(problem.world_size):
        bags = Bags(make.region("bags", rank), make.region("pooled", rank))
        exchange = Collective("all_to_all_columns", make.region("pooled", rank), make.region("out", rank))
        make.add(rank, "compute", Lookup((bags,)), exchange)
    return make.done()


def stored(problem: Problem, name: str, chunks: int) -> Schedule:
    """One kernel that stores what it looks up where it belongs, remote bags first; the owner hands out what has arrived."""
    make = _Exchange(problem, name, chunks, pooled=False, landing=True)
    for rank in range(problem.world_size):
        for peer in make.receivers(rank):
            make.add(rank, "compute", Wait(Flag("free", rank, peer), 0))
        make.add(rank, "compute", Lookup((*make.stores(rank), *make.own(rank))))
        make.hand_out(rank, "copy")
    return make.done()


def counted(problem: Problem, name: str, chunks: int) -> Schedule:
    """One lookup that counts; each full count triggers the copy that sends the piece."""
    make = _Exchange(problem, name, chunks, pooled=True, landing=True)
    for rank in range(problem.world_size):
        parts = []
        waited: set[int] = set()
        for peer, piece in make.sent(rank):
            made = Flag("made", rank, peer * chunks + piece.index)
            here = make.region("pooled", rank, piece.rows)
            parts.append(Bags(make.region("bags", rank, piece.rows), here, made))
            make.add(rank, "copy", Wait(made))
            if peer not in waited:
                make.add(rank, "copy", Wait(Flag("free", rank, peer), 0))
                waited.add(peer)
            there = make.place("landing", peer, rank, piece.rows)
            make.add(rank, "copy", Copy(here, there), Signal(make.arrived(rank, peer, piece)))
        make.add(rank, "compute", Lookup((*parts, *make.own(rank))))
        make.hand_out(rank, "compute")
    return make.done()


def sliced(problem: Problem, name: str, chunks: int) -> Schedule:
    """As `stored` within a node. The bags for other nodes come first, and leave slice by slice.

    A slice is a kernel of its own, and so is each piece of what stays: blocks of a lookup fill every SM to its end, and the
    vendor's sending gets SMs between two.
    """
    make = _Exchange(problem, name, chunks, pooled=True, landing=True)
    make.far_buffers()
    for rank in range(problem.world_size):
        for index in range(chunks):
            make.send_slice(rank, index)
        for peer in make.receivers(rank):
            make.add(rank, "compute", Wait(Flag("free", rank, peer), 0))
        for index in range(chunks):
            make.look_up(rank, [bags for bags, at in make.near(rank) if at == index])
        make.hand_out(rank, "copy")
        for index in range(chunks):
            _, takes = make.exchanged(rank, index)
            if takes:
                make.add(rank, "copy", Wait(Flag("landed", rank, index)))
            for src, piece in takes:
                make.add(rank, "copy", Copy(make.landed_from(src, rank, piece), make.place("out", rank, src, piece.rows)))
    return make.done()
