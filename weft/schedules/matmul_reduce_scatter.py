"""Builders for matmul_reduce_scatter: out_mN = reduce_scatter(a_Mk @ b_kN).

Buffers of rank r
    a        input      M x k_r
    b        input      k_r x N
    partial  local      M x N       r's product; symmetric where its owner reads it in place (flag_gated); of track_and_trigger,
                                    all but r's shard; direct_store has none
    recv     symmetric  p*m_r x N   what each of the p other ranks computed of r's shard (m_r rows), in the order of ranks
    out      output     m_r x N     the sum over ranks, in the order of ranks, in float32, rounded once

Flags of rank r (who advances ~> who waits)
    made[i]@r      r's compute lane ~> r's copy lane: piece i of the product is in `partial`
    arrived[i]@r   a peer's copy lane, or its GEMM ~> r's reduction: the peer's piece i lies in recv (or in its partial)
    free[p]@r      p's compute lane ~> whatever of r writes for p: p has read r's piece for the last time in this call

    rank r, compute               rank r, copy                     rank p, the owner
    gemm rows of p
    signal made  --------------->  wait made, wait free[p] >= 0
    gemm other rows                copy partial -> recv of p  ~~~>  rows land
    ...                            signal arrived  ~~~~~~~~~~~~~~>  reduce waits arrived of all ranks
    reduce own shard                                                signal free[p]@r ~> (next call)

In track_and_trigger and direct_store the reduction is the end of the owner's GEMM: the tiles of its own shard come last, and
add the peers' rows to their product before they round it. They wait for `arrived` late, behind their multiplication.

Bad interleaving: r, a call ahead, writes recv of p while p still sums the old rows. `free` prevents it. Within r, `partial`
is not rewritten before the copies that read it end: a call starts when all lanes of the rank have ended the one before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from weft.problem import Problem, Span1D, split
from weft.schedule import Collective, Copy, Flag, Gemm, Part, Reduce, Region, Schedule, Signal, Sum, Wait
from weft.schedules.builder import Builder, Piece, cut


class _Scatter(Builder):
    """Buffers, flags and repeated idioms of this operator. columns: slices of N that 2D pieces are cut by."""

    def __init__(
        self,
        problem: Problem,
        name: str,
        chunks: int,
        *,
        partial: Literal["local", "symmetric"] | None = "local",
        fan_out: bool = False,
    ) -> None:
        super().__init__(problem, name, chunks, fan_out=fan_out)
        self.pieces = cut(problem, chunks)
        self.divide_by = self.world_size if problem.reduce_op == "avg" else 1
        each = range(self.world_size)
        peers = self.world_size - 1
        inner = [problem.inner(r) for r in each]
        owned = [high - low for low, high in problem.shards]
        self.buffer("a", "input", [problem.m for _ in each], inner)
        self.buffer("b", "input", inner, [problem.n for _ in each])
        if partial:
            self.buffer("partial", partial, [problem.m for _ in each], [problem.n for _ in each])
        if partial != "symmetric":
            self.buffer("recv", "symmetric", [peers * rows for rows in owned], [problem.n for _ in each])
        self.buffer("out", "output", owned, [problem.n for _ in each])

    def index(self, src: int, piece: int) -> int:
        return src * self.chunks + piece

    def slot(self, src: int, shard: int, rows: Span1D, cols: Span1D | None = None) -> Region:
        """Where rank `src` puts global rows of `shard`, on the owner."""
        low, high = self.problem.shards[shard]
        base = (src - (src > shard)) * (high - low) - low
        return self.region("recv", shard, (base + rows[0], base + rows[1]), cols)

    def own_out(self, rank: int, rows: Span1D, cols: Span1D | None = None) -> Region:
        base = self.problem.shards[rank][0]
        return self.region("out", rank, (rows[0] - base, rows[1] - base), cols)

    def part(self, rank: int, piece: Piece) -> Part:
        return Part(self.region("a", rank, piece.rows), self.region("partial", rank, piece.rows))

    def own_shard(self, rank: int) -> tuple[Part, ...]:
        """The rows that stay, as one part; nothing if there are none."""
        rows = self.problem.shards[rank]
        return (Part(self.region("a", rank, rows), self.region("partial", rank, rows)),) if rows[1] > rows[0] else ()

    def gemm(self, rank: int, parts: Iterable[Part], cols: Span1D | None = None, *, divide_by: int = 1) -> None:
        parts = tuple(parts)
        if parts:
            self.add(rank, "compute", Gemm(self.region("b", rank, cols=cols), parts, divide_by=divide_by))

    def by_step(self, rank: int) -> list[list[Piece]]:
        """Pieces to send, in order of production: a list for each chunk index, peers rotated by rank."""
        steps = [[p for peer in self.peers(rank) for p in self.pieces[peer] if p.index == i] for i in range(self.chunks)]
        return [pieces for pieces in steps if pieces]

    def wait_free(self, rank: int, peer: int) -> Wait:
        return Wait(Flag("free", rank, peer), 0)

    def send(
        self, rank: int, shard: int, index: int, rows: Span1D, cols: Span1D | None = None, *, lane: str | None = None
    ) -> None:
        """Copy a finished piece to its owner. lane: instead of the copy lane for it."""
        copy = Copy(self.region("partial", rank, rows, cols), self.slot(rank, shard, rows, cols))
        self.add(rank, lane or self.copy_lane(shard), copy, Signal(Flag("arrived", shard, self.index(rank, index))))

    def send_steps(self, rank: int, *, made: bool) -> None:
        """The copy lane: every piece in order of production. made: wait for each piece's flag (else for its step's)."""
        for step in self.by_step(rank):
            for piece in step:
                lane = self.copy_lane(piece.shard)
                index = self.index(piece.shard, piece.index) if made else piece.index
                if made or piece is step[0] or self.fan_out:
                    self.add(rank, lane, Wait(Flag("made", rank, index)))
                if piece is self.pieces[piece.shard][0]:
                    self.add(rank, lane, self.wait_free(rank, piece.shard))
                self.send(rank, piece.shard, piece.index, piece.rows)

    def source(self, rank: int, src: int, rows: Span1D, cols: Span1D | None = None) -> Region:
        """Where rank's reduction reads what `src` computed."""
        if src == rank or "recv" not in self._buffers:
            return self.region("partial", src, rows, cols)
        return self.slot(src, rank, rows, cols)

    def total(self, rank: int, index: int, rows: Span1D, cols: Span1D | None = None) -> Sum:
        """One piece of the result: the sum over ranks, once all have arrived."""
        srcs = tuple(self.source(rank, src, rows, cols) for src in range(self.world_size))
        return Sum(srcs, self.own_out(rank, rows, cols), self.all_arrived(rank, index))

    def all_arrived(self, rank: int, index: int) -> tuple[Wait, ...]:
        return tuple(Wait(Flag("arrived", rank, self.index(peer, index))) for peer in self.peers(rank))

    def reduce(self, rank: int, sums: Iterable[Sum]) -> None:
        """Sum what has arrived, chunk by chunk, then tell every peer that its pieces have been read."""
        sums = tuple(sums)
        if sums:
            self.add(rank, "compute", Reduce(sums, self.divide_by))
            self.release(rank)

    def release(self, rank: int) -> None:
        """Tell every peer that its pieces have been read."""
        for peer in self.peers(rank):
            self.add(rank, "compute", Signal(Flag("free", peer, rank)))

    def gemm_and_sum(self, rank: int, remote: Iterable[Part]) -> None:
        """One GEMM: what peers own, then the own shard, piece by piece with what has arrived of it."""
        own = [self.summed(rank, piece) for piece in self.pieces[rank]]
        self.gemm(rank, (*remote, *own), divide_by=self.divide_by)
        if own:
            self.release(rank)

    def summed(self, rank: int, piece: Piece) -> Part:
        """One piece of the own shard: its product and what the peers computed of it, once that has arrived."""
        adds = tuple(self.slot(src, rank, piece.rows) for src in range(self.world_size) if src != rank)
        out = self.own_out(rank, piece.rows)
        return Part(self.region("a", rank, piece.rows), out, self.all_arrived(rank, piece.index), adds=adds)

    def reduce_pieces(self, rank: int) -> None:
        self.reduce(rank, [self.total(rank, p.index, p.rows) for p in self.pieces[rank]])


def sequential(problem: Problem, chunks: int = 1) -> Schedule:
    """One GEMM, then the vendor's reduce-scatter."""
    s = _Scatter(problem, "sequential", 1, partial="symmetric")
    for rank in range(s.world_size):
        s.gemm(rank, [Part(s.region("a", rank), s.region("partial", rank))])
        s.add(rank, "compute", Collective("reduce_scatter", s.region("partial", rank), s.region("out", rank), s.divide_by))
    return s.done()


def sequential_stores(problem: Problem, name: str) -> Schedule:
    """One vendor GEMM; then its rows are stored at their owners, who sum them up."""
    s = _Scatter(problem, name, 1)
    for rank in range(s.world_size):
        pieces = [piece for step in s.by_step(rank) for piece in step]
        s.gemm(rank, [Part(s.region("a", rank), s.region("partial", rank))] if problem.m else [])
        s.add(rank, "compute", *(s.wait_free(rank, piece.shard) for piece in pieces))
        for piece in pieces:
            s.send(rank, piece.shard, 0, piece.rows, lane="compute")
        s.reduce_pieces(rank)
    return s.done()


def unfused(problem: Problem, name: str, chunks: int, *, fan_out: bool = False) -> Schedule:
    """A GEMM for each piece, sent when done; the own shard last, as one GEMM. chunks=1: shard by shard."""
    s = _Scatter(problem, name, chunks, fan_out=fan_out)
    for rank in range(s.world_size):
        for step in s.by_step(rank):
            for piece in step:
                s.gemm(rank, [s.part(rank, piece)])
                s.add(rank, "compute", Signal(Flag("made", rank, s.index(piece.shard, piece.index))))
        s.send_steps(rank, made=True)
        s.gemm(rank, s.own_shard(rank))
        s.reduce_pieces(rank)
    return s.done()


def fused(problem: Problem, name: str, chunks: int, *, uniform: bool, fan_out: bool = False) -> Schedule:
    """One GEMM for all pieces of a step. uniform: the own shard is cut like the others and joins each step."""
    s = _Scatter(problem, name, chunks, fan_out=fan_out)
    for rank in range(s.world_size):
        for index in range(chunks):
            step = [p for shard in s.pieces for p in shard if p.index == index and (uniform or p.shard != rank)]
            s.gemm(rank, [s.part(rank, piece) for piece in step])
            if any(p.shard != rank for p in step):
                s.add(rank, "compute", Signal(Flag("made", rank, index)))
        s.send_steps(rank, made=False)
        if not uniform:
            s.gemm(rank, s.own_shard(rank))
        s.reduce_pieces(rank)
    return s.done()


def fused_2d(problem: Problem, name: str, chunks: int, *, fan_out: bool = False) -> Schedule:
    """The mirror of chunks of K: every step computes all rows of a slice of columns, and sends strided rectangles."""
    s = _Scatter(problem, name, chunks, fan_out=fan_out)
    slices = [c for c in split(problem.n, chunks) if c[1] > c[0]]
    for rank in range(s.world_size):
        peers = [p for p in s.peers(rank) if s.pieces[p]]
        for index, cols in enumerate(slices):
            s.gemm(rank, [Part(s.region("a", rank), s.region("partial", rank, cols=cols))] if s.problem.m else [], cols)
            if peers:
                s.add(rank, "compute", Signal(Flag("made", rank, index)))
            for peer in peers:
                if peer == peers[0] or s.fan_out:
                    s.add(rank, s.copy_lane(peer), Wait(Flag("made", rank, index)))
                if index == 0:
                    s.add(rank, s.copy_lane(peer), s.wait_free(rank, peer))
                s.send(rank, peer, index, s.problem.shards[peer], cols)
        rows = s.problem.shards[rank]
        s.reduce(rank, [s.total(rank, i, rows, cols) for i, cols in enumerate(slices)] if s.pieces[rank] else [])
    return s.done()


def counted(problem: Problem, name: str, chunks: int, *, fan_out: bool = False) -> Schedule:
    """Track and trigger: one GEMM counts finished tiles by piece, in an order rotated by rank; a full count starts the copy.

    Its last tiles, those of the own shard, add what has arrived.
    """
    s = _Scatter(problem, name, chunks, fan_out=fan_out)
    for rank in range(s.world_size):
        parts = []
        for piece in (p for step in s.by_step(rank) for p in step):
            made = Flag("made", rank, s.index(piece.shard, piece.index))
            parts.append(Part(s.region("a", rank, piece.rows), s.region("partial", rank, piece.rows), count=made))
        s.gemm_and_sum(rank, parts)
        s.send_steps(rank, made=True)
    return s.done()


def stored(problem: Problem, name: str, chunks: int, *, pull: bool) -> Schedule:
    """One GEMM that raises flags on the owners, remote pieces first.

    pull=False: its tiles are stored straight to the owner's recv, whose last tiles, those of its own shard, add them.
    pull=True: they stay in `partial`, and the owner's reduction, whose tiles wait for the flags, loads them from there.
    """
    s = _Scatter(problem, name, chunks, partial="symmetric" if pull else None)
    for rank in range(s.world_size):
        parts = []
        for piece in (p for step in s.by_step(rank) for p in step):
            out = s.region("partial", rank, piece.rows) if pull else s.slot(rank, piece.shard, piece.rows)
            arrived = Flag("arrived", piece.shard, s.index(rank, piece.index))
            parts.append(Part(s.region("a", rank, piece.rows), out, (s.wait_free(rank, piece.shard),), arrived))
        if pull:
            s.gemm(rank, (*parts, *s.own_shard(rank)))
            s.reduce_pieces(rank)
        else:
            s.gemm_and_sum(rank, parts)
    return s.done()
