"""Builders for matmul_all_to_all: out = all_to_all(a_MK @ b_KN). Every rank has its own a and b.

matmul_all_to_all_columns has the same builders. There, the product for each destination is a separate kernel, with that rank's
columns of b, and `product` has p*M rows of N/p columns (weft.core.problem.ColumnProblem), of which m_r = M are r's.

Buffers of rank r (m_r rows of each rank's product are r's)
    a        input      M x K
    b        input      K x N
    product  symmetric  M x N       r's product, until its owners have pulled it; direct_store has none
    recv     symmetric  p*m_r x N   peers' tiles (direct_store only), in the order of ranks
    out      output     p*m_r x N   rows from every rank, in the order of ranks

Flags of rank r (who signals ~> who waits)
    made[i]@r      a peer's compute lane, or its GEMM ~> r's pulling lane: the peer's piece i for r is in its `product`
    arrived[i]@r   a peer's GEMM ~> r's copy lane: the peer's piece i is in r's recv
    free[p]@r      p's pulling lane ~> r's compute lane: p has read r's rows for it for the last time in this call

The owner pulls: its copy engine reads a peer's product and writes the caller's output, which no peer may touch. Pushed rows
would land in another buffer and be copied again: 15 us for 32 MiB on H200.

    rank s, compute                             rank r, copy
    wait free[r] >= 0  <~~~~~~~~~~~~~~~~~~~~~~  (call before) signal free[r]@s
    gemm rows of r
    signal made ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~>  wait made
    gemm other rows, its own last               copy product@s -> out
                                                signal free[r]@s ~> (next call)

Between nodes (node_slices) a slice is chunk i of all peers there. It is sent once all of its tiles are done, and received in
the output:

    sliced[i]@r    r's GEMM ~> r's network lane: a piece for another node is in `product`

Bad interleaving: s is a call ahead, and overwrites product while r still pulls the old rows. `free` prevents this.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Literal

from weft.core.problem import Span1D
from weft.core.schedule import Collective, Copy, Flag, Part, Receive, Reduce, Schedule, Send, Signal, Sum, Wait
from weft.schedules.all_to_all_matmul import AllToAllBuilder
from weft.schedules.builder import Piece, Request


class _Combine(AllToAllBuilder):
    """The flags of this operator, and steps that several schedules share.

    staging: the symmetric buffer for rows.
    """

    def __init__(self, request: Request, *, staging: Literal["product", "recv"] = "product") -> None:
        super().__init__(request)
        self.pulled = staging == "product"
        self.add_buffer(staging, "symmetric", sum(self.shard_rows) if self.pulled else self.arriving, self.problem.columns(0))

    def ready(self, src_rank: int, piece: Piece) -> Flag:
        """Return the owner's flag for a peer's piece."""
        return self.flag("made" if self.pulled else "arrived", piece.shard, src_rank, piece.index)

    def by_step(self, rank: int) -> list[Piece]:
        """Return the peers' pieces in order of production: chunk by chunk, with peers rotated by rank.

        If each peer has its own kernel, the order is peer by peer.
        """
        peers = self.peers(rank)
        return [p for peer in peers for p in self.pieces[peer]] if self.sends_columns else self.sort_by_chunk(peers)

    def part_of_product(self, rank: int, dst_rank: int, rows: Span1D) -> Part:
        """Return the part that writes these rows for a rank into `product`."""
        return Part(self.source(rank, dst_rank, rows), self.region("product", rank, rows))

    def part_counted_by_owner(self, rank: int, piece: Piece) -> tuple[int, Part]:
        """Return (owner, part) of a piece whose finished tiles are counted in the owner's flag.

        The tiles wait until the owner has read the piece of the previous call.
        """
        out = self.region("product", rank, piece.rows) if self.pulled else self.arrival("recv", rank, piece)
        gates, a = (self.make_free_wait(rank, piece.shard),), self.source(rank, piece.shard, piece.rows)
        return piece.shard, Part(a, out, gates, self.ready(rank, piece))

    def pull_pieces(self, rank: int) -> None:
        """Add the owner's copies of every piece into its result, in order of production.

        The signals that let the peers write again, in their next call, come last, so that no copy is delayed by them.
        """
        pieces, peers = self.pieces[rank], self.peers(rank, step=-1)
        by_peer, by_chunk = product(peers, pieces), ((peer, piece) for piece in pieces for peer in peers)
        for peer, piece in by_peer if self.sends_columns else by_chunk:
            src = self.region("product", peer, piece.rows) if self.pulled else self.arrival("recv", peer, piece)
            copy = Copy(src, self.arrival("out", peer, piece))
            self.add_steps(rank, self.copy_lane(peer), Wait(self.ready(peer, piece)), copy)
        for peer in peers if pieces else []:
            self.signal_free(rank, [peer], self.copy_lane(peer))

    def parts_of_product(self, rank: int) -> list[tuple[int, Part]]:
        """Return (destination, part) for the whole product: one part, or one for each destination that has its own kernel."""
        if not self.sends_columns:
            return [(rank, Part(self.region("a", rank), self.region("product", rank)))]
        shards = ((dst, rows) for dst, rows in enumerate(self.problem.shards) if rows[1] > rows[0])
        return [(dst, self.part_of_product(rank, dst, rows)) for dst, rows in shards]

    def parts_of_own_shard(self, rank: int) -> list[tuple[int, Part]]:
        return [(rank, part) for part in self.own_shard(rank)]

    def make_load(self, rank: int, src_rank: int) -> Sum:
        """Return the load of a rank's rows from another rank, after they are made: a sum of one addend."""
        (piece,) = self.pieces[rank]
        gates = (Wait(self.ready(src_rank, piece)),) if src_rank != rank else ()
        return Sum((self.region("product", src_rank, piece.rows),), self.arrival("out", src_rank, piece), gates)


def sequential(request: Request) -> Schedule:
    """Run one GEMM, then NCCL's all-to-all."""
    s = _Combine(request)
    for rank in s.ranks:
        s.multiply(rank, s.parts_of_product(rank))
        s.add_steps(rank, "compute", Collective("all_to_all", s.region("product", rank), s.region("out", rank)))
    return s.build_schedule()


def sequential_stores(request: Request) -> Schedule:
    """Run one cuBLAS GEMM. Then one kernel on each rank loads its rows from all ranks into the result."""
    s = _Combine(request)
    for rank in s.ranks:
        peers = [peer for peer in s.peers(rank) if s.pieces[peer]]
        s.add_steps(rank, "compute", *(s.make_free_wait(rank, peer) for peer in peers))
        s.multiply(rank, s.parts_of_product(rank) if s.problem.m else [])
        s.add_steps(rank, "compute", *(Signal(s.ready(rank, s.pieces[peer][0])) for peer in peers))
        if s.pieces[rank]:
            s.add_steps(rank, "compute", Reduce(tuple(s.make_load(rank, src_rank) for src_rank in (rank, *s.peers(rank)))))
            s.signal_free(rank, s.peers(rank))
    return s.build_schedule()


def unfused(request: Request) -> Schedule:
    """Run a GEMM for each piece, which its owner then pulls. The own shard comes last, as one GEMM. With chunks=1 a piece is a
    shard."""
    s = _Combine(request)
    for rank in s.ranks:
        s.add_steps(rank, "compute", *(s.make_free_wait(rank, peer) for peer in s.peers(rank) if s.pieces[peer]))
        for piece in s.by_step(rank):
            s.multiply(rank, [(piece.shard, s.part_of_product(rank, piece.shard, piece.rows))])
            s.add_steps(rank, "compute", Signal(s.ready(rank, piece)))
        s.multiply(rank, s.parts_of_own_shard(rank))
        s.pull_pieces(rank)
    return s.build_schedule()


def counted(request: Request, *, stored: bool = False) -> Schedule:
    """Run one GEMM that counts finished tiles by piece on the owner, remote pieces first. A full count starts the owner's copy.

    stored: tiles are stored directly at the owner, which only copies them to its result.
    """
    s = _Combine(request, staging="recv" if stored else "product")
    for rank in s.ranks:
        s.multiply(rank, [s.part_counted_by_owner(rank, piece) for piece in s.by_step(rank)] + s.parts_of_own_shard(rank))
        s.pull_pieces(rank)
    return s.build_schedule()


def sliced(request: Request) -> Schedule:
    """Exchange as `counted` does within a node. The rows for other nodes come first, and are sent slice by slice.

    No flag `free` is needed between nodes, because a message arrives only when the receiver has posted its receive.
    """
    if not request.problem.nodes:
        return counted(request)
    s = _Combine(request)
    for rank in s.ranks:
        parts = []
        for index in range(s.chunks):
            leaving, takes = s.pieces_between_nodes(rank, index)
            made = [s.flag("sliced", rank, p.shard, p.index) for p in leaving]
            found = [
                replace(s.part_of_product(rank, p.shard, p.rows), count=flag) for p, flag in zip(leaving, made, strict=True)
            ]
            receives = [Receive(s.arrival("out", peer, p), peer) for peer, p in takes]
            sends = [Send(part.out, p.shard) for part, p in zip(found, leaving, strict=True)]
            s.add_send_receive(rank, sends, receives, after=made, then=None)
            parts += found
        near = [part for _, part in (s.part_counted_by_owner(rank, piece) for piece in s.by_step(rank))]
        s.add_gemm(rank, parts + near + s.own_shard(rank))
        s.pull_pieces(rank)
    return s.build_schedule()
