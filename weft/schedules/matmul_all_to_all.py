"""Builders for matmul_all_to_all: out = all_to_all(a_MK @ b_KN), every rank with a and b of its own.

Those for matmul_all_to_all_columns are the same: what goes to a rank is a kernel of its own there, with that rank's columns of
b, and `product` has p*M rows of N/p columns (weft.core.problem.ColumnProblem), of which m_r = M are r's.

Buffers of rank r (m_r rows of each rank's product are r's)
    a        input      M x K
    b        input      K x N
    product  symmetric  M x N       what r has computed, until its owners have pulled it; direct_store has none
    recv     symmetric  p*m_r x N   where peers' tiles are stored (direct_store only), in the order of ranks
    out      output     p*m_r x N   rows from every rank, in the order of ranks

Flags of rank r (who advances ~> who waits)
    made[i]@r      a peer's compute lane, or its GEMM ~> r's pulling lane: the peer's piece i for r is in its `product`
    arrived[i]@r   a peer's GEMM ~> r's copy lane: the peer's piece i lies in r's recv
    free[p]@r      p's pulling lane ~> r's compute lane: p has read what r wrote for it for the last time in this call

The owner pulls: its copy engine reads a peer's product and writes the caller's output, which no peer may touch. Pushed rows
would land beside it and be copied once more: 15 us for 32 MiB on H200.

    rank s, compute                             rank r, copy
    wait free[r] >= 0  <~~~~~~~~~~~~~~~~~~~~~~  (call before) signal free[r]@s
    gemm rows of r
    signal made ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~>  wait made
    gemm other rows, its own last               copy product@s -> out
                                                signal free[r]@s ~> (next call)

Between nodes (node_slices) the rows of a slice, chunk i of all peers there, are sent once all of their tiles are done, and
received in the output:

    sliced[i]@r    r's GEMM ~> r's network lane: a piece for another node lies in `product`

Bad interleaving: s, a call ahead, overwrites product while r still pulls the old rows. `free` prevents it.
"""

from __future__ import annotations

from itertools import product
from typing import Literal

from weft.core.problem import Problem
from weft.core.schedule import Collective, Copy, Flag, Part, Receive, Reduce, Schedule, Send, Signal, Sum, Wait
from weft.schedules.builder import Piece
from weft.schedules.exchange import AllToAllBuilder

Staging = Literal["product", "recv"]


class _Combine(AllToAllBuilder):
    """Flags and repeated idioms of this operator. staging: the symmetric buffer that rows pass through."""

    def __init__(
        self, problem: Problem, name: str, chunks: int, *, staging: Staging = "product", fan_out: bool = False
    ) -> None:
        super().__init__(problem, name, chunks, fan_out=fan_out)
        self.pulled = staging == "product"
        rows = self.each(problem.shards[-1][1]) if self.pulled else self.arriving
        self.buffer(staging, "symmetric", rows, self.each(problem.columns(0)))

    def ready(self, src_rank: int, piece: Piece) -> Flag:
        """The owner's flag for a peer's piece."""
        return Flag("made" if self.pulled else "arrived", piece.shard, self.index(src_rank, piece))

    def free(self, rank: int, peer: int) -> Wait:
        return Wait(Flag("free", rank, peer), 0)

    def by_step(self, rank: int) -> list[Piece]:
        """Peers' pieces in order of production: chunk by chunk, peers rotated by rank; peer by peer if each has a kernel."""
        if self.sends_columns:
            return [p for peer in self.peers(rank) for p in self.pieces[peer]]
        return [p for index in range(self.chunks) for peer in self.peers(rank) for p in self.pieces[peer] if p.index == index]

    def bring(self, rank: int) -> None:
        """The owner's copy lanes: every piece in order of production, into its result; then the peers may write anew, in their
        next call: they are told at the end, so that no copy waits for that."""
        pieces, peers = self.pieces[rank], self.peers(rank, step=-1)
        by_peer, by_chunk = product(peers, pieces), ((peer, piece) for piece in pieces for peer in peers)
        for peer, piece in by_peer if self.sends_columns else by_chunk:
            self.add(rank, self.copy_lane(peer), Wait(self.ready(peer, piece)), self._copy(peer, piece))
        for peer in peers if pieces else []:
            self.add(rank, self.copy_lane(peer), Signal(Flag("free", peer, rank)))

    def whole(self, rank: int) -> list[tuple[int, Part]]:
        """All of the product, by destination where each has a kernel."""
        if not self.sends_columns:
            return [(rank, Part(self.region("a", rank), self.region("product", rank)))]
        shards = [(dst, rows) for dst, rows in enumerate(self.problem.shards) if rows[1] > rows[0]]
        return [(dst, Part(self.source(rank, dst, rows), self.region("product", rank, rows))) for dst, rows in shards]

    def own(self, rank: int) -> list[tuple[int, Part]]:
        return [(rank, part) for part in self.own_shard(rank)]

    def _copy(self, peer: int, piece: Piece) -> Copy:
        src = self.region("product", peer, piece.rows) if self.pulled else self.arrival("recv", peer, piece)
        return Copy(src, self.arrival("out", peer, piece))


def sequential(problem: Problem) -> Schedule:
    """One GEMM, then the vendor's all-to-all."""
    s = _Combine(problem, "sequential", 1)
    for rank in range(s.world_size):
        s.multiply(rank, s.whole(rank))
        s.add(rank, "compute", Collective("all_to_all", s.region("product", rank), s.region("out", rank)))
    return s.done()


def sequential_stores(problem: Problem, name: str) -> Schedule:
    """One vendor GEMM; then one kernel on each rank loads its rows from all, stores them, and lets the peers go on."""
    s = _Combine(problem, name, 1)
    for rank in range(s.world_size):
        peers = [peer for peer in s.peers(rank) if s.pieces[peer]]
        s.add(rank, "compute", *(s.free(rank, peer) for peer in peers))
        s.multiply(rank, s.whole(rank) if problem.m else [])
        s.add(rank, "compute", *(Signal(s.ready(rank, s.pieces[peer][0])) for peer in peers))
        if s.pieces[rank]:
            s.add(rank, "compute", Reduce(tuple(_loaded(s, rank, src_rank) for src_rank in (rank, *s.peers(rank)))))
            s.add(rank, "compute", *(Signal(Flag("free", peer, rank)) for peer in s.peers(rank)))
    return s.done()


def _loaded(s: _Combine, rank: int, src_rank: int) -> Sum:
    """A rank's rows from another, once they are made: a sum of one."""
    (piece,) = s.pieces[rank]
    gates = (Wait(s.ready(src_rank, piece)),) if src_rank != rank else ()
    return Sum((s.region("product", src_rank, piece.rows),), s.arrival("out", src_rank, piece), gates)


def unfused(problem: Problem, name: str, chunks: int, *, fan_out: bool = False) -> Schedule:
    """A GEMM for each piece, pulled by its owner when done; the own shard last, as one GEMM. chunks=1: shard by shard."""
    s = _Combine(problem, name, chunks, fan_out=fan_out)
    for rank in range(s.world_size):
        s.add(rank, "compute", *(s.free(rank, peer) for peer in s.peers(rank) if s.pieces[peer]))
        for piece in s.by_step(rank):
            rows = piece.rows
            s.multiply(rank, [(piece.shard, Part(s.source(rank, piece.shard, rows), s.region("product", rank, rows)))])
            s.add(rank, "compute", Signal(s.ready(rank, piece)))
        s.multiply(rank, s.own(rank))
        s.bring(rank)
    return s.done()


def counted(problem: Problem, name: str, chunks: int, *, fan_out: bool = False, stored: bool = False) -> Schedule:
    """One GEMM that counts finished tiles by piece on the owner, remote pieces first; a full count starts the owner's copy.

    stored: its tiles are stored straight to the owner, whose copies only bring them to its result.
    """
    s = _Combine(problem, name, chunks, staging="recv" if stored else "product", fan_out=fan_out)
    for rank in range(s.world_size):
        parts = []
        for piece in s.by_step(rank):
            out = s.arrival("recv", rank, piece) if stored else s.region("product", rank, piece.rows)
            gates = (s.free(rank, piece.shard),)
            parts.append((piece.shard, Part(s.source(rank, piece.shard, piece.rows), out, gates, s.ready(rank, piece))))
        s.multiply(rank, parts + s.own(rank))
        s.bring(rank)
    return s.done()


def sliced(problem: Problem, name: str, chunks: int, *, fan_out: bool = False) -> Schedule:
    """As `counted` within a node. The rows for other nodes come first, and leave slice by slice; nothing needs to be free
    there, since nothing arrives before the receiver asks for it."""
    s = _Combine(problem, name, chunks, fan_out=fan_out)
    for rank in range(s.world_size):
        parts = []
        for index in range(chunks):
            leaving = [p for peer in s.far(rank) for p in s.pieces[peer] if p.index == index]
            made = [Flag("sliced", rank, s.index(p.shard, p)) for p in leaving]
            sends = [Send(s.region("product", rank, p.rows), p.shard) for p in leaving]
            takes = [(peer, p) for peer in s.far(rank) for p in s.pieces[rank] if p.index == index]
            receives = [Receive(s.arrival("out", peer, p), peer) for peer, p in takes]
            s.send_receive(rank, sends, receives, after=made, then=None)
            parts += [
                Part(s.region("a", rank, p.rows), s.region("product", rank, p.rows), (), flag)
                for p, flag in zip(leaving, made, strict=True)
            ]
        for piece in s.by_step(rank):
            made_here = s.region("product", rank, piece.rows)
            parts.append(Part(s.region("a", rank, piece.rows), made_here, (s.free(rank, piece.shard),), s.ready(rank, piece)))
        s.gemm(rank, parts + s.own_shard(rank))
        s.bring(rank)
    return s.done()
