"""Builders for all_to_all_matmul: out = all_to_all(a_MK) @ b_KN. Each rank has its own a and b.

Shard d of a's rows goes to rank d. AllToAllBuilder is also the base of the builders of matmul_all_to_all.

Buffers of rank r (each rank sends m_r rows of its a to rank r)
    a     input      M x K       the rows to send, sorted by destination
    b     input      K x N
    quantised local  M x K       a in FP8, if it is quantised before a collective exchanges it
    recv  symmetric  p*m_r x K   the rows of all ranks, in the order of ranks; peers write it, rank r reads it
    out   output     p*m_r x N
    gathered  output p*m_r x K   only with return_gathered

Flags of rank r (who signals ~> who waits)
    arrived[i]@r   the lane of a peer that pushes piece i ~> r's compute lane: the piece is in r's recv
    free[p]@r      p's compute lane ~> r's pushing lane: p has read r's rows for the last time in this call

    rank r, compute              rank r, copy                    rank p
    gemm own rows, from a   wait free[p] >= 0
                            copy a -> recv of p  ~~~~~~~~~~~~~>  rows land
                            signal arrived       ~~~~~~~~~~~~~>  wait arrived, gemm those rows
    wait arrived, gemm  <~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~  copy, signal
    signal free[r]@p  ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~> (next call) wait free

Between nodes (schedule node_slices), one step sends and receives slice i, which is chunk i of the rows for each rank of other
nodes:

    landed[i]@r    r's network lane ~> r's compute lane: chunk i of all ranks of other nodes is in r's recv

`free` prevents this race: rank p is one call ahead, and overwrites rows that rank r still multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

from weft.core.problem import ColumnProblem, Span1D
from weft.core.schedule import Collective, Copy, Flag, Part, Receive, Region, Schedule, Send, Store, Wait
from weft.schedules.builder import Builder, Piece, Request


class AllToAllBuilder(Builder):
    """An AllToAllBuilder adds the caller's buffers, and computes where pieces arrive.

    pieces: by destination, the chunks of every rank's rows for it.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        problem = self.problem
        self.arriving = [problem.out_rows(r) for r in self.ranks]
        self.sends_columns = isinstance(problem, ColumnProblem) and problem.sends_columns
        self.add_buffer("a", "input", problem.m, problem.a_columns(0), operand="a")
        self.add_buffer("b", "input", problem.k, problem.n, operand="b")
        self.add_buffer("out", "output", self.arriving, problem.columns(0))

    def arrival(self, buffer: str, src_rank: int, piece: Piece) -> Region:
        """Return the position of a rank's piece among all pieces of its destination."""
        first = self.problem.arrivals(src_rank, piece.shard)[0] - self.problem.shards[piece.shard][0]
        return self.region(buffer, piece.shard, (first + piece.rows[0], first + piece.rows[1]))

    def multiply(self, rank: int, parts: Sequence[tuple[int, Part]]) -> None:
        """Add one GEMM of these (destination, part) pairs.

        If each destination has its own columns of b, add one GEMM for each run of parts with the same destination.
        """
        for cols, run in groupby(parts, key=lambda one: self.problem.blocks[one[0]] if self.sends_columns else None):
            self.add_gemm(rank, (part for _, part in run), (None, cols))

    def source(self, rank: int, dst_rank: int, rows: Span1D) -> Region:
        """Return the rows of a whose products are these rows for `dst_rank`."""
        above = dst_rank * self.problem.m if self.sends_columns else 0
        return self.region("a", rank, (rows[0] - above, rows[1] - above))

    def own_shard(self, rank: int) -> list[Part]:
        """Return the rows that stay on the rank as one part, which writes the result, or no part if there are none."""
        rows = self.problem.shards[rank]
        out = self.region("out", rank, self.problem.arrivals(rank, rank))
        return [Part(self.source(rank, rank, rows), out)] if rows[1] > rows[0] else []

    def pieces_between_nodes(self, rank: int, index: int) -> tuple[list[Piece], list[tuple[int, Piece]]]:
        """Return slice `index` of the pieces for other nodes, and (sender, piece) for each piece that comes from them."""
        return self.select_chunk(index, self.ranks_on_other_nodes(rank)), [
            (peer, p) for peer in self.ranks_on_other_nodes(rank) for p in self.select_chunk(index, [rank])
        ]


class DispatchBuilder(AllToAllBuilder):
    """A DispatchBuilder has the flags of this operator, and adds the steps that several of its schedules share."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.add_buffer("recv", "symmetric", self.arriving, self.problem.k, operand="a")
        if self.quantises:
            self.add_buffer("quantised", "local", self.problem.m, self.problem.k, operand="a")
        if self.problem.return_gathered:
            self.add_buffer("gathered", "output", self.arriving, self.problem.k, operand="a")

    def arrived(self, src_rank: int, piece: Piece) -> Flag:
        """Return the flag that says that a piece from `src_rank` has arrived at its destination."""
        return self.flag("arrived", piece.shard, src_rank, piece.index)

    def pieces_from_peers(self, rank: int) -> list[tuple[int, Piece]]:
        """Return (sender, piece) for each piece that peers send to a rank, in order of arrival."""
        return [(peer, piece) for piece in self.pieces[rank] for peer in self.peers(rank)]

    def part(self, src_rank: int, piece: Piece, gates: tuple[Wait, ...] = ()) -> Part:
        """Return the part of a GEMM that multiplies an arrived piece."""
        return Part(self.arrival("recv", src_rank, piece), self.arrival("out", src_rank, piece), gates)

    def add_gated_gemm(self, rank: int) -> None:
        """Add one GEMM of the rank's own rows and of its peers' rows. A tile of a peer's rows waits until they have arrived.

        If the rank quantises its own rows, it reads them from recv too, and their tiles wait as well.
        """
        own = [(rank, piece) for piece in self.pieces[rank]] if self.quantises else []
        awaited = [self.part(src, p, (Wait(self.arrived(src, p)),)) for src, p in (*own, *self.pieces_from_peers(rank))]
        self.add_gemm(rank, awaited if own else self.own_shard(rank) + awaited)

    def push(self, rank: int, *, lane: str | None = None, stage_own: bool = False) -> None:
        """Add copies of all pieces to their destinations, chunk by chunk. At any time, no two ranks send to the same peer.

        lane: the lane that copies, as in `copy_to_peers`.
        stage_own: whether the rank also copies its own rows to its recv.
        """
        peers = [peer for peer in self.peers(rank, step=-1) if self.pieces[peer]]
        self.wait_for_free(rank, peers, lane)
        pieces = self.sort_by_chunk([*peers, *([rank] if stage_own else [])])
        stores = (Store(self.region("a", rank, p.rows), self.arrival("recv", rank, p), self.arrived(rank, p)) for p in pieces)
        self.copy_to_peers(rank, stores, lane)

    def copy_gathered(self, rank: int) -> None:
        """Add copies of the arrived rows to `gathered`. Own rows come from a, because not every schedule has them in recv."""
        if self.quantises:
            self.add_steps(rank, "compute", Copy(self.region("recv", rank), self.region("gathered", rank)))
            return
        own = self.problem.arrivals(rank, rank)
        copy_own = Copy(self.region("a", rank, self.problem.shards[rank]), self.region("gathered", rank, own))
        others = ((0, own[0]), (own[1], self.problem.out_rows(rank)))
        copies = (Copy(self.region("recv", rank, r), self.region("gathered", rank, r)) for r in others if r[1] > r[0])
        self.add_steps(rank, "compute", copy_own, *copies)

    def finish(self) -> Schedule:
        """Copy the arrived rows to the caller if requested, signal the senders that recv is free, and build the schedule."""
        for rank in (rank for rank in self.ranks if self.pieces[rank]):
            if self.problem.return_gathered:
                self.copy_gathered(rank)
            self.signal_free(rank, self.peers(rank))
        return self.build_schedule()

    def build_with_nccl(self, op: Literal["all_to_all", "all_to_all_columns"]) -> Schedule:
        """Build the schedule that runs NCCL's collective, and then multiplies all arrived rows in one GEMM."""
        for rank in self.ranks:
            arriving = self.region("gathered" if self.problem.return_gathered else "recv", rank)
            self.add_steps(rank, "compute", Collective(op, self.quantise_rows(rank), arriving))
            self.add_gemm(rank, [Part(arriving, self.region("out", rank))])
        return self.build_schedule()


def sequential(request: Request) -> Schedule:
    """Build the schedule that runs NCCL's all-to-all, then one GEMM."""
    return DispatchBuilder(request).build_with_nccl("all_to_all")


def sequential_stores(request: Request) -> Schedule:
    """Build the schedule in which a kernel stores all rows, the own ones too, at their receivers. One cuBLAS GEMM follows."""
    s = DispatchBuilder(request)
    for rank in s.ranks:
        s.push(rank, lane="compute", stage_own=True)
        arriving = [(src_rank, piece) for piece in s.pieces[rank] for src_rank in (*s.peers(rank), rank)]
        s.add_steps(rank, "compute", *(Wait(s.arrived(src_rank, piece)) for src_rank, piece in arriving))
        s.add_gemm(rank, [Part(s.region("recv", rank), s.region("out", rank))] if arriving else [])
    return s.finish()


def unfused(request: Request) -> Schedule:
    """Build the schedule that multiplies the own rows in one GEMM, then each piece in a GEMM, in order of arrival.

    With chunks=1, a piece is a whole shard.
    """
    s = DispatchBuilder(request)
    for rank in s.ranks:
        s.push(rank)
        s.add_gemm(rank, s.own_shard(rank))
        for src_rank, piece in s.pieces_from_peers(rank):
            s.add_steps(rank, "compute", Wait(s.arrived(src_rank, piece)))
            s.add_gemm(rank, [s.part(src_rank, piece)])
    return s.finish()


def gated(request: Request, *, blocks: bool) -> Schedule:
    """Build the schedule with one GEMM whose tiles wait for their piece. It starts with the own rows.

    blocks: whether communication blocks send the pieces. Otherwise copy engines send them.
    """
    s = DispatchBuilder(request)
    for rank in s.ranks:
        s.push(rank, lane="blocks" if blocks else None, stage_own=s.quantises)
        s.add_gated_gemm(rank)
    return s.finish()


def sliced(request: Request) -> Schedule:
    """Build the schedule for several nodes: `gated` within a node, and one more GEMM for each slice from other nodes.

    The tiles of the gated GEMM must not wait for other nodes, because waiting tiles would hold the SMs that NCCL needs to
    receive.
    """
    if not request.problem.nodes:
        return gated(request, blocks=False)
    s = DispatchBuilder(request)
    for rank in s.ranks:
        s.push(rank)
        s.add_gated_gemm(rank)
        for index in range(s.chunks):
            outgoing, incoming = s.pieces_between_nodes(rank, index)
            sends = [Send(s.region("a", rank, p.rows), p.shard) for p in outgoing]
            receives = [Receive(s.arrival("recv", peer, p), peer) for peer, p in incoming]
            landed = Flag("landed", rank, index)
            s.add_send_receive(rank, sends, receives, after=[], then=landed)
            if incoming:
                s.add_steps(rank, "compute", Wait(landed))
                s.add_gemm(rank, [s.part(peer, p) for peer, p in incoming])
    return s.finish()
