"""Builders for all_to_all_matmul: out = all_to_all(a_MK) @ b_KN, every rank with a and b of its own.

Buffers of rank r (m_r rows of each rank's a are r's)
    a     input      M x K       rows by destination
    b     input      K x N
    quantised local  M x K       a as FP8, of an a that is quantised before torch.distributed exchanges it
    recv  symmetric  p*m_r x K   where peers' rows land, in the order of ranks; peers write it, rank r reads it
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

Between nodes (node_slices) the rows of a slice, chunk i for all ranks there, are sent and received in one step:

    landed[i]@r    r's network lane ~> r's compute lane: chunk i of all ranks of other nodes is in r's recv

Bad interleaving: p, a call ahead, pushes over rows that r still multiplies. `free` prevents it.
"""

from __future__ import annotations

from typing import Literal

from weft.core.schedule import Collective, Copy, Flag, Part, Receive, Schedule, Send, Store, Wait
from weft.schedules.builder import Piece, Request
from weft.schedules.exchange import AllToAllBuilder


class Dispatch(AllToAllBuilder):
    """Flags and repeated idioms of this operator."""

    def __init__(self, asked: Request) -> None:
        super().__init__(asked)
        self.buffer("recv", "symmetric", self.arriving, self.problem.k, operand="a")
        if self.quantises:
            self.buffer("quantised", "local", self.problem.m, self.problem.k, operand="a")
        if self.problem.return_gathered:
            self.buffer("gathered", "output", self.arriving, self.problem.k, operand="a")

    def arrived(self, src_rank: int, piece: Piece) -> Flag:
        return self.flag("arrived", piece.shard, src_rank, piece.index)

    def remote(self, rank: int) -> list[tuple[int, Piece]]:
        """(sender, piece) of what peers send to a rank, in order of arrival."""
        return [(peer, piece) for piece in self.pieces[rank] for peer in self.peers(rank)]

    def part(self, src_rank: int, piece: Piece, gates: tuple[Wait, ...] = ()) -> Part:
        return Part(self.arrival("recv", src_rank, piece), self.arrival("out", src_rank, piece), gates)

    def gated(self, rank: int) -> None:
        """Add one GEMM of own rows and of peers' rows, which wait until they have arrived. Own rows that are quantised also
        arrive in recv."""
        own = [(rank, piece) for piece in self.pieces[rank]] if self.quantises else []
        awaited = [self.part(src, p, (Wait(self.arrived(src, p)),)) for src, p in (*own, *self.remote(rank))]
        self.gemm(rank, awaited if own else self.own_shard(rank) + awaited)

    def push(self, rank: int, *, lane: str | None = None, stage_own: bool = False) -> None:
        """Send all pieces, chunk by chunk; at any time no two ranks send to the same one. lane: as for `send`. stage_own: the
        own rows go to the own recv."""
        peers = [peer for peer in self.peers(rank, step=-1) if self.pieces[peer]]
        self.wait_free(rank, peers, lane)
        pieces = self.by_chunk([*peers, *([rank] if stage_own else [])])
        stores = (Store(self.region("a", rank, p.rows), self.arrival("recv", rank, p), self.arrived(rank, p)) for p in pieces)
        self.send(rank, stores, lane)

    def copy_gathered(self, rank: int) -> None:
        """Hand over what arrived. The own rows from a: not every schedule has them in recv."""
        if self.quantises:
            self.add(rank, "compute", Copy(self.region("recv", rank), self.region("gathered", rank)))
            return
        own = self.problem.arrivals(rank, rank)
        mine = Copy(self.region("a", rank, self.problem.shards[rank]), self.region("gathered", rank, own))
        around = ((0, own[0]), (own[1], self.problem.out_rows(rank)))
        found = (Copy(self.region("recv", rank, r), self.region("gathered", rank, r)) for r in around if r[1] > r[0])
        self.add(rank, "compute", mine, *found)

    def finish(self) -> Schedule:
        """Hand over what arrived if asked for, signal the senders that recv is free, and freeze."""
        for rank in (rank for rank in self.each if self.pieces[rank]):
            if self.problem.return_gathered:
                self.copy_gathered(rank)
            self.release(rank, self.peers(rank))
        return self.done()

    def by_nccl(self, op: Literal["all_to_all", "all_to_all_columns"]) -> Schedule:
        """NCCL's collective, then one GEMM of what has arrived."""
        for rank in self.each:
            arriving = self.region("gathered" if self.problem.return_gathered else "recv", rank)
            self.add(rank, "compute", Collective(op, self.quantised(rank), arriving))
            self.gemm(rank, [Part(arriving, self.region("out", rank))])
        return self.done()


def sequential(asked: Request) -> Schedule:
    """NCCL's all-to-all, then one GEMM."""
    return Dispatch(asked).by_nccl("all_to_all")


def sequential_stores(asked: Request) -> Schedule:
    """All rows are stored at their receivers, the own ones too; then one cuBLAS GEMM."""
    s = Dispatch(asked)
    for rank in s.each:
        s.push(rank, lane="compute", stage_own=True)
        arriving = [(src_rank, piece) for piece in s.pieces[rank] for src_rank in (*s.peers(rank), rank)]
        s.add(rank, "compute", *(Wait(s.arrived(src_rank, piece)) for src_rank, piece in arriving))
        s.gemm(rank, [Part(s.region("recv", rank), s.region("out", rank))] if arriving else [])
    return s.finish()


def unfused(asked: Request) -> Schedule:
    """The own rows as one GEMM, then a GEMM for each piece in order of arrival. chunks=1: shard by shard."""
    s = Dispatch(asked)
    for rank in s.each:
        s.push(rank)
        s.gemm(rank, s.own_shard(rank))
        for src_rank, piece in s.remote(rank):
            s.add(rank, "compute", Wait(s.arrived(src_rank, piece)))
            s.gemm(rank, [s.part(src_rank, piece)])
    return s.finish()


def gated(asked: Request, *, blocks: bool) -> Schedule:
    """One GEMM whose tiles wait for their piece, in order of arrival, own rows first. blocks: communication blocks bring the
    pieces, not copy engines."""
    s = Dispatch(asked)
    for rank in s.each:
        s.push(rank, lane="blocks" if blocks else None, stage_own=s.quantises)
        s.gated(rank)
    return s.finish()


def sliced(asked: Request) -> Schedule:
    """As `gated` within a node; a GEMM for each slice that comes from other nodes.

    Those are no gates of the one GEMM: its waiting tiles would hold the SMs that NCCL's receiving needs.
    """
    if not asked.problem.nodes:
        return gated(asked, blocks=False)
    s = Dispatch(asked)
    for rank in s.each:
        s.push(rank)
        s.gated(rank)
        for index in range(s.chunks):
            leaving, takes = s.with_far(rank, index)
            sends = [Send(s.region("a", rank, p.rows), p.shard) for p in leaving]
            receives = [Receive(s.arrival("recv", peer, p), peer) for peer, p in takes]
            landed = Flag("landed", rank, index)
            s.send_receive(rank, sends, receives, after=[], then=landed)
            if takes:
                s.add(rank, "compute", Wait(landed))
                s.gemm(rank, [s.part(peer, p) for peer, p in takes])
    return s.finish()
