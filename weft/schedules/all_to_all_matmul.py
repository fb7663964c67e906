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
    """The flags of this operator, and steps that several schedules share."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.add_buffer("recv", "symmetric", self.arriving, self.problem.k, operand="a")
        if self.quantises:
            self.add_buffer("quantised", "local", self.problem.m, self.problem.k, operand="a")
        if self.problem.return_gathered:
            self.add_buffer("gathered", "output", self.arriving, self.problem.k, operand="a")

    def arrived(self, src_rank: int, piece: Piece) -> Flag:
        return self.flag("arrived", piece.shard, src_rank, piece.index)

    def remote(self, rank: int) -> list[tuple[int, Piece]]:
        """Return (sender, piece) for each piece that peers send to a rank, in order of arrival."""
        return [(peer, piece) for piece in self.pieces[rank] for peer in self.peers(rank)]

    def part(self, src_rank: int, piece: Piece, gates: tuple[Wait, ...] = ()) -> Part:
        return Part(self.arrival("recv", src_rank, piece), self.arrival("out", src_rank, piece), gates)

    def add_gated_gemm(self, rank: int) -> None:
        """Add one GEMM of own rows and of peers' rows. The tiles of peers' rows wait until these have arrived.

        Own rows that are quantised also arrive in recv.
        """
        own = [(rank, piece) for piece in self.pieces[rank]] if self.quantises else []
        awaited = [self.part(src, p, (Wait(self.arrived(src, p)),)) for src, p in (*own, *self.remote(rank))]
        self.add_gemm(rank, awaited if own else self.own_shard(rank) + awaited)

    def push(self, rank: int, *, lane: str | None = None, stage_own: bool = False) -> None:
        """Add copies of all pieces to their destinations, chunk by chunk. At any time, no two ranks send to the same peer.

        lane: as for `copy_to_peers`.
        stage_own: the rank also copies its own rows to its recv.
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
        mine = Copy(self.region("a", rank, self.problem.shards[rank]), self.region("gathered", rank, own))
        around = ((0, own[0]), (own[1], self.problem.out_rows(rank)))
        found = (Copy(self.region("recv", rank, r), self.region("gathered", rank, r)) for r in around if r[1] > r[0])
        self.add_steps(rank, "compute", mine, *found)

    def finish(self) -> Schedule:
        """Copy the arrived rows to the caller if requested, signal the senders that recv is free, and build the schedule."""
        for rank in (rank for rank in self.ranks if self.pieces[rank]):
            if self.problem.return_gathered:
                self.copy_gathered(rank)
            self.signal_free(rank, self.peers(rank))
        return self.build_schedule()

    def build_with_nccl(self, op: Literal["all_to_all", "all_to_all_columns"]) -> Schedule:
        """Build the schedule of NCCL's collective, then one GEMM of what has arrived."""
        for rank in self.ranks:
            arriving = self.region("gathered" if self.problem.return_gathered else "recv", rank)
            self.add_steps(rank, "compute", Collective(op, self.quantise_rows(rank), arriving))
            self.add_gemm(rank, [Part(arriving, self.region("out", rank))])
        return self.build_schedule()


def sequential(request: Request) -> Schedule:
    """NCCL's all-to-all, then one GEMM."""
    return Dispatch(request).build_with_nccl("all_to_all")


def sequential_stores(request: Request) -> Schedule:
    """All rows are stored at their receivers, the own ones too; then one cuBLAS GEMM."""
    s = Dispatch(request)
    for rank in s.ranks:
        s.push(rank, lane="compute", stage_own=True)
        arriving = [(src_rank, piece) for piece in s.pieces[rank] for src_rank in (*s.peers(rank), rank)]
        s.add_steps(rank, "compute", *(Wait(s.arrived(src_rank, piece)) for src_rank, piece in arriving))
        s.add_gemm(rank, [Part(s.region("recv", rank), s.region("out", rank))] if arriving else [])
    return s.finish()


def unfused(request: Request) -> Schedule:
    """The own rows as one GEMM, then a GEMM for each piece in order of arrival. chunks=1: shard by shard."""
    s = Dispatch(request)
    for rank in s.ranks:
        s.push(rank)
        s.add_gemm(rank, s.own_shard(rank))
        for src_rank, piece in s.remote(rank):
            s.add_steps(rank, "compute", Wait(s.arrived(src_rank, piece)))
            s.add_gemm(rank, [s.part(src_rank, piece)])
    return s.finish()


def gated(request: Request, *, blocks: bool) -> Schedule:
    """One GEMM whose tiles wait for their piece, in order of arrival, own rows first. blocks: communication blocks bring the
    pieces, not copy engines."""
    s = Dispatch(request)
    for rank in s.ranks:
        s.push(rank, lane="blocks" if blocks else None, stage_own=s.quantises)
        s.add_gated_gemm(rank)
    return s.finish()


def sliced(request: Request) -> Schedule:
    """Within a node, as `gated`. One GEMM multiplies each slice that comes from other nodes.

    The tiles of the gated GEMM must not wait for other nodes: waiting tiles would hold the SMs that NCCL needs to receive.
    """
    if not request.problem.nodes:
        return gated(request, blocks=False)
    s = Dispatch(request)
    for rank in s.ranks:
        s.push(rank)
        s.add_gated_gemm(rank)
        for index in range(s.chunks):
            leaving, takes = s.pieces_between_nodes(rank, index)
            sends = [Send(s.region("a", rank, p.rows), p.shard) for p in leaving]
            receives = [Receive(s.arrival("recv", peer, p), peer) for peer, p in takes]
            landed = Flag("landed", rank, index)
            s.add_send_receive(rank, sends, receives, after=[], then=landed)
            if takes:
                s.add_steps(rank, "compute", Wait(landed))
                s.add_gemm(rank, [s.part(peer, p) for peer, p in takes])
    return s.finish()
