"""Builders for embedding_bag_all_to_all: out_mN = all_to_all(embedding_bag(tables of this rank, bags of M samples)).

Buffers of rank r, which has C_r columns of tables, and m_r of the M samples
    bags      input      M x C_r     what looking the rank's bags up gives; indices, offsets and tables stand for it
    pooled    local      M x C_r     what has been looked up (sequential, track_and_trigger)
    landing   symmetric  m_r x N     what peers send of r's samples: their columns, side by side in the order of ranks
    out       output     m_r x N     all columns of r's samples

Flags of rank r (who advances ~> who waits)
    made[i]@r      r's lookup ~> r's copy lane: piece i lies in `pooled`
    arrived[i]@r   a peer's lookup, or its copy lane ~> whatever of r hands out: the peer's piece i lies in `landing`
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

from weft.problem import LookupProblem, Problem, Span1D
from weft.schedule import Bags, Collective, Copy, Flag, Lookup, Region, Schedule, Signal, Wait
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
        remote = [
            Bags(
                make.region("bags", rank, piece.rows),
                make.place("landing", peer, rank, piece.rows),
                make.arrived(rank, peer, piece),
            )
            for peer, piece in make.sent(rank)
        ]
        make.add(rank, "compute", Lookup((*remote, *make.own(rank))))
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
