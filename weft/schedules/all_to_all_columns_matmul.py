"""Builders for all_to_all_columns_matmul: out_mN = (all_to_all(a_Mk), side by side) @ b_KN. Every rank has its own a and b.

Buffers of rank r (m = M/p rows of each rank's a are r's; k = K/p)
    a     input      M x k       rows by destination
    b     input      K x N
    recv  symmetric  m x K       the received columns of all ranks, in the order of b's rows; r also writes its own here
    out   output     m x N
    gathered  output m x K       only with return_gathered

The flags are those of all_to_all_matmul. A product needs the columns of all ranks. So rows are cut into chunks, and a chunk is
multiplied once all ranks' columns of it have arrived:

    rank r, compute              rank r, copy                    rank p
    copy a -> own columns   wait free[p] >= 0
                            copy chunk 0 -> recv of p  ~~~~~~~>  columns of r land
                            signal arrived  ~~~~~~~~~~~~~~~~~>  wait arrived of all, gemm chunk 0
    wait arrived of all, gemm chunk 0  <~~~~~~~~~~~~~~~~~~~~~~~  copy, signal
    gemm chunk 1 ...
    signal free[r]@p  ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~> (next call) wait free

Bad interleaving: p is a call ahead, and pushes over rows that r still multiplies. `free` prevents this.
"""

from __future__ import annotations

from weft.core.schedule import Copy, Part, Region, Schedule, Wait
from weft.schedules.all_to_all_matmul import DispatchBuilder
from weft.schedules.builder import Piece, Request


class _Builder(DispatchBuilder):
    """Builds as all_to_all_matmul's builder does, but places the ranks' columns side by side."""

    def arrival(self, buffer: str, src_rank: int, piece: Piece) -> Region:
        return self.region(buffer, piece.shard, super().arrival(buffer, src_rank, piece).rows, self.problem.blocks[src_rank])

    def part_of_chunk(self, rank: int, piece: Piece, gates: tuple[Wait, ...] = ()) -> Part:
        """Return the part that multiplies a chunk of rows with the columns of all ranks."""
        low = self.problem.shards[rank][0]
        rows = piece.rows[0] - low, piece.rows[1] - low
        return Part(self.region("recv", rank, rows), self.region("out", rank, rows), gates)

    def make_arrival_waits(self, piece: Piece) -> tuple[Wait, ...]:
        """Return the waits until all peers' columns of a chunk have arrived."""
        return tuple(Wait(self.arrived(peer, piece)) for peer in self.peers(piece.shard))

    def push_and_place_own(self, rank: int, lane: str | None = None) -> None:
        self.push(rank, lane=lane)
        if self.pieces[rank]:
            own = self.region("recv", rank, cols=self.problem.blocks[rank])
            self.add_steps(rank, "compute", Copy(self.region("a", rank, self.problem.shards[rank]), own))

    def copy_gathered(self, rank: int) -> None:
        self.add_steps(rank, "compute", Copy(self.region("recv", rank), self.region("gathered", rank)))


def sequential(request: Request) -> Schedule:
    """Build NCCL's all-to-all, place its columns side by side, then run one GEMM."""
    return _Builder(request).build_with_nccl("all_to_all_columns")


def fused(request: Request) -> Schedule:
    """Run a GEMM for each chunk of rows, once all ranks' columns of the chunk have arrived."""
    s = _Builder(request)
    for rank in s.ranks:
        s.push_and_place_own(rank)
        for piece in s.pieces[rank]:
            s.add_steps(rank, "compute", *s.make_arrival_waits(piece))
            s.add_gemm(rank, [s.part_of_chunk(rank, piece)])
    return s.finish()


def gated(request: Request, *, blocks: bool) -> Schedule:
    """Build one GEMM whose tiles wait for all ranks' columns of their chunk.

    blocks: communication blocks bring the columns. Otherwise copy engines do.
    """
    s = _Builder(request)
    for rank in s.ranks:
        s.push_and_place_own(rank, "blocks" if blocks else None)
        s.add_gemm(rank, [s.part_of_chunk(rank, piece, s.make_arrival_waits(piece)) for piece in s.pieces[rank]])
    return s.finish()
