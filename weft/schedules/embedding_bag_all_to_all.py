"""Builders for embedding_bag_all_to_all: out_mN = all_to_all(embedding_bag(tables of this rank, bags of M samples)).

Buffers of rank r, which has C_r columns of tables, and m_r of the M samples
    bags      input      M x C_r     the result of looking up the rank's bags; it stands for indices, offsets and tables
    pooled    local      M x C_r     the looked-up bags (sequential, track_and_trigger)
    landing   symmetric  m_r x N     the columns of r's samples that peers send, side by side in the order of ranks
    out       output     m_r x N     all columns of r's samples
    from<s>   local      m_r x C_s   the columns of r's samples that rank s of another node sends (node_slices)

Flags of rank r (who signals ~> who waits)
    made[i]@r      r's lookup ~> r's copy lane: piece i is in `pooled`
    arrived[i]@r   a peer's lookup, or its copy lane ~> r's copies to `out`: the peer's piece i is in `landing`
    sliced[i]@r    r's lookup ~> r's network lane: a piece for another node is in `pooled` (node_slices)
    landed[i]@r    r's network lane ~> r's copy lane: piece i of all ranks of other nodes is in r's `from` buffers
    free[p]@r      p ~> r's steps that write for p: p has copied r's pieces to `out`, for the last time in this call

    rank r, compute                    rank p, copy
    wait free[p] >= 0 of all peers
    lookup bags of r+1 -> landing@r+1
           bags of p   -> landing@p ~> wait arrived[r]
           ...                         copy landing[:, columns of r] -> out
           own bags    -> out          signal free[p]@r ~> (next call)

Remote bags come first, beginning with the successor's, so that no two ranks store to the same peer at once. The owner copies
arrived pieces to `out` while it still looks up its own bags.

Bad interleaving: r is a call ahead, and stores into the landing buffer of p while p still copies the old rows out. `free`
prevents this. The caller gets a separate buffer. Returning `landing` itself would save the copy, but a peer's next call would
write into it while the caller still reads it.
"""

from __future__ import annotations

from weft.core.problem import LookupProblem, Span1D
from weft.core.schedule import Bags, Collective, Copy, Flag, Lookup, Receive, Region, Schedule, Send, Signal, Wait
from weft.schedules.builder import Builder, Piece, Request


class _Exchange(Builder):
    """The buffers and flags of this operator, and steps that several schedules share."""

    def __init__(self, request: Request, *, pooled: bool = True, landing: bool = True) -> None:
        assert isinstance(request.problem, LookupProblem), f"{request.problem} is no lookup"
        super().__init__(request)
        self.columns = [self.problem.columns(r) for r in self.ranks]
        self.add_buffer("bags", "input", self.problem.m, self.columns)
        if pooled:
            self.add_buffer("pooled", "local", self.problem.m, self.columns)
        if landing:
            self.add_buffer("landing", "symmetric", self.shard_rows, self.problem.n)
        self.add_buffer("out", "output", self.shard_rows, self.problem.n)

    def place(self, name: str, owner: int, src: int, rows: Span1D) -> Region:
        """Return the region, in a buffer of `owner`, of these rows of the whole batch and the columns of rank `src`."""
        low = self.problem.shards[owner][0]
        return self.region(name, owner, (rows[0] - low, rows[1] - low), self.problem.b_shards[src])

    def make_bags(self, rank: int, rows: Span1D, out: Region, count: Flag | None = None) -> Bags:
        return Bags(self.region("bags", rank, rows), out, count)

    def own_bags(self, rank: int, rows: Span1D | None = None) -> list[Bags]:
        """Return the bags of the rank's own samples, or of these rows of them. They are written to the result."""
        rows = rows or self.problem.shards[rank]
        return [self.make_bags(rank, rows, self.place("out", rank, rank, rows))] if self.sends_data(rank, rank) else []

    def pieces_to_send(self, rank: int) -> list[Piece]:
        """Return the pieces that `rank` sends to its peers, in order."""
        return [piece for peer in self.peers(rank) if self.sends_data(rank, peer) for piece in self.pieces[peer]]

    def bags_stored_at_peer(self, rank: int, piece: Piece) -> Bags:
        """Return the bags of a piece that the lookup stores at a peer."""
        there = self.place("landing", piece.shard, rank, piece.rows)
        return self.make_bags(rank, piece.rows, there, self.arrived(rank, piece))

    def wait_for_receivers(self, rank: int) -> None:
        self.wait_for_free(rank, dict.fromkeys(piece.shard for piece in self.pieces_to_send(rank)), "compute")

    def arrived(self, src: int, piece: Piece) -> Flag:
        return self.flag("arrived", piece.shard, src, piece.index)

    def copy_to_result(self, rank: int, lane: str) -> None:
        """Add copies of peers' pieces to the caller's buffer, in the order in which they arrive."""
        for src in (src for src in self.peers(rank, step=-1) if self.sends_data(src, rank)):
            for piece in self.pieces[rank]:
                copy = Copy(*(self.place(name, rank, src, piece.rows) for name in ("landing", "out")))
                self.add_steps(rank, lane, Wait(self.arrived(src, piece)), copy)
            self.signal_free(rank, [src], lane)

    def add_lookup(self, rank: int, parts: list[Bags]) -> None:
        if parts:
            self.add_steps(rank, "compute", Lookup(tuple(parts)))

    def pieces_to_receive(self, rank: int, index: int) -> list[tuple[int, Piece]]:
        """Return (sender, piece) for slice `index` of the pieces that `rank` receives from ranks of other nodes."""
        return [
            (src, piece)
            for src in self.ranks_on_other_nodes(rank)
            if self.sends_data(src, rank)
            for piece in self.select_chunk(index, [rank])
        ]

    def send_slice(self, rank: int, index: int) -> None:
        """Add the lookup of slice `index` for other nodes, and the messages that exchange it with theirs."""
        pieces = self.select_chunk(index, [peer for peer in self.ranks_on_other_nodes(rank) if self.sends_data(rank, peer)])
        made = [self.flag("sliced", rank, piece.shard, index) for piece in pieces]
        pooled = [self.region("pooled", rank, piece.rows) for piece in pieces]
        parts = zip(pieces, pooled, made, strict=True)
        self.add_lookup(rank, [self.make_bags(rank, piece.rows, out, count) for piece, out, count in parts])
        sends = [Send(region, piece.shard) for region, piece in zip(pooled, pieces, strict=True)]
        receives = [Receive(self.landed_from(src, piece), src) for src, piece in self.pieces_to_receive(rank, index)]
        self.add_send_receive(rank, sends, receives, after=made, then=Flag("landed", rank, index))

    def landed_from(self, src: int, piece: Piece) -> Region:
        low = self.problem.shards[piece.shard][0]
        return self.region(f"from{src}", piece.shard, (piece.rows[0] - low, piece.rows[1] - low))

    def add_buffers_of_other_nodes(self) -> None:
        """Add a buffer for the columns of each rank of other nodes, because messages are whole rows."""
        for src in self.ranks:
            rows = [0 if r in self.ranks_on_node(src) else self.shard_rows[r] for r in self.ranks]
            self.add_buffer(f"from{src}", "local", rows, self.columns[src])

    def sends_data(self, src: int, owner: int) -> bool:
        return self.shard_rows[owner] > 0 and self.columns[src] > 0


def sequential(request: Request) -> Schedule:
    """Look up all bags in one kernel, then run NCCL's all-to-all."""
    s = _Exchange(request, landing=False)
    for rank in s.ranks:
        pooled = s.region("pooled", rank)
        exchange = Collective("all_to_all_columns", pooled, s.region("out", rank))
        s.add_steps(rank, "compute", Lookup((Bags(s.region("bags", rank), pooled),)), exchange)
    return s.build_schedule()


def stored(request: Request) -> Schedule:
    """Look up bags in one kernel that stores them at their owners, remote bags first. Owners copy arrived pieces to the
    result."""
    s = _Exchange(request, pooled=False)
    for rank in s.ranks:
        s.wait_for_receivers(rank)
        s.add_steps(
            rank,
            "compute",
            Lookup((*(s.bags_stored_at_peer(rank, piece) for piece in s.pieces_to_send(rank)), *s.own_bags(rank))),
        )
        s.copy_to_result(rank, "copy")
    return s.build_schedule()


def counted(request: Request) -> Schedule:
    """Look up bags in one kernel that counts finished pieces. Each full count triggers the copy that sends the piece."""
    s = _Exchange(request)
    for rank in s.ranks:
        parts = []
        for piece in s.pieces_to_send(rank):
            made, here = s.flag("made", rank, piece.shard, piece.index), s.region("pooled", rank, piece.rows)
            parts.append(s.make_bags(rank, piece.rows, here, made))
            first = piece is s.pieces[piece.shard][0]
            s.add_steps(rank, "copy", Wait(made), *([s.make_free_wait(rank, piece.shard)] if first else []))
            there = s.place("landing", piece.shard, rank, piece.rows)
            s.add_steps(rank, "copy", Copy(here, there), Signal(s.arrived(rank, piece)))
        s.add_steps(rank, "compute", Lookup((*parts, *s.own_bags(rank))))
        s.copy_to_result(rank, "compute")
    return s.build_schedule()


def sliced(request: Request) -> Schedule:
    """Look up bags as `stored` does within a node. The bags for other nodes come first, and are sent slice by slice.

    Each slice is a separate kernel, and so is each chunk of the bags that stay in the node. A lookup occupies every SM until it
    ends, so NCCL can only start to send between two kernels.
    """
    if not request.problem.nodes:
        return stored(request)
    s = _Exchange(request)
    s.add_buffers_of_other_nodes()
    for rank in s.ranks:
        for index in range(s.chunks):
            s.send_slice(rank, index)
        s.wait_for_receivers(rank)
        for index in range(s.chunks):
            near = [s.bags_stored_at_peer(rank, piece) for piece in s.pieces_to_send(rank) if piece.index == index]
            s.add_lookup(
                rank, near + [bags for piece in s.select_chunk(index, [rank]) for bags in s.own_bags(rank, piece.rows)]
            )
        s.copy_to_result(rank, "copy")
        for index in range(s.chunks):
            takes = s.pieces_to_receive(rank, index)
            if takes:
                s.add_steps(rank, "copy", Wait(Flag("landed", rank, index)))
            for src, piece in takes:
                s.add_steps(rank, "copy", Copy(s.landed_from(src, piece), s.place("out", rank, src, piece.rows)))
    return s.build_schedule()
