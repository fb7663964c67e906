"""Builders for matmul_reduce_scatter: out_mN = reduce_scatter(a_Mk @ b_kN).

Buffers of rank r
    a        input      M x k_r
    b        input      k_r x N
    partial  local      M x N       r's product; symmetric where its owner reads it in place (flag_gated); of track_and_trigger,
                                    all but r's shard; direct_store has none
    recv     symmetric  p*m_r x N   what each of the p other ranks computed of r's shard (m_r rows), in the order of ranks
    handed   symmetric              node_slices: what each peer of the node computed of the rows that r carries to other nodes
    mine     local                  node_slices: the node's sum of these rows
    theirs   local      q*m_r x N   node_slices: what each of the q other nodes has summed of r's shard
    out      output     m_r x N     the sum over ranks, in the order of ranks, in float32, rounded once

Flags of rank r (who advances ~> who waits)
    made[i]@r      r's compute lane ~> r's copy lane: piece i of the product is in `partial`
    arrived[i]@r   a peer's copy lane, or its GEMM ~> r's reduction: the peer's piece i lies in recv (or in its partial)
    handed[i]@r, summed[i]@r, landed[i]@r   node_slices: as arrived, as made, and r's network lane ~> r's compute lane
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

from weft.core.problem import Problem, Span1D, split
from weft.core.schedule import (
    Collective,
    Copy,
    Flag,
    FusedCollective,
    Gemm,
    Part,
    Receive,
    Reduce,
    Region,
    Schedule,
    Send,
    Signal,
    Sum,
    Wait,
)
from weft.schedules.builder import Builder, Piece, cut

ONE_KERNEL_BYTES = 16 << 20
"""Of a rank's product: up to here sequential_stores exchanges by one kernel, which keeps three copies of what arrives."""


class _Scatter(Builder):
    """Buffers, flags and repeated idioms of this operator. columns: slices of N that 2D pieces are cut by."""

    def __init__(
        self,
        problem: Problem,
        name: str,
        chunks: int,
        *,
        partial: Literal["local", "symmetric"] | None = "local",
        recv: bool = True,
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
        if recv and partial != "symmetric":
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

    def exchange(self, rank: int, factors: tuple[Region, ...]) -> None:
        """The kernel that sums what all ranks have of the own shard."""
        out = self.region("out", rank)
        self.add(rank, "compute", FusedCollective("reduce_scatter", factors, out, divide_by=self.divide_by))

    def reduce_pieces(self, rank: int) -> None:
        self.reduce(rank, [self.total(rank, p.index, p.rows) for p in self.pieces[rank]])


def sequential(problem: Problem) -> Schedule:
    """One GEMM, then the vendor's reduce-scatter."""
    s = _Scatter(problem, "sequential", 1, partial="symmetric")
    for rank in range(s.world_size):
        s.gemm(rank, [Part(s.region("a", rank), s.region("partial", rank))])
        s.add(rank, "compute", Collective("reduce_scatter", s.region("partial", rank), s.region("out", rank), s.divide_by))
    return s.done()


def one_shot(problem: Problem, name: str) -> Schedule:
    """One kernel: every rank stores its partial rows at their owners, who sum them up."""
    s = _Scatter(problem, name, 1, partial=None, recv=False)
    for rank in range(s.world_size if problem.m and problem.n else 0):
        s.exchange(rank, (s.region("a", rank), s.region("b", rank)))
    return s.done()


def sequential_stores(problem: Problem, name: str) -> Schedule:
    """One vendor GEMM; then its rows are stored at their owners, who sum them up: as one kernel where that is few bytes."""
    few = problem.m * problem.n * problem.itemsize <= ONE_KERNEL_BYTES
    s = _Scatter(problem, name, 1, recv=not few)
    for rank in range(s.world_size if problem.m and problem.n else 0):
        s.gemm(rank, [Part(s.region("a", rank), s.region("partial", rank))])
        if few:
            s.exchange(rank, (s.region("partial", rank),))
            continue
        pieces = [piece for step in s.by_step(rank) for piece in step]
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


class _ByNode(_Scatter):
    """node_slices: of the rows that another node owns, one rank of each node sums the node's products, and sends the sum."""

    def __init__(self, problem: Problem, name: str, chunks: int) -> None:
        super().__init__(problem, name, chunks)
        each = range(self.world_size)
        self.carried = [[q for q in self.far(r) if self.carrier(problem.node_of[r], q) == r] for r in each]
        owned = [high - low for low, high in problem.shards]
        heights = [sum(owned[q] for q in self.carried[r]) for r in each]
        cols, others = [problem.n for _ in each], len(problem.nodes) - 1
        self.buffer("handed", "symmetric", [len(self.peers(r)) * heights[r] for r in each], cols)
        self.buffer("mine", "local", heights, cols)
        self.buffer("theirs", "local", [others * rows for rows in owned], cols)

    def mine(self, rank: int, piece: Piece) -> Region:
        """The node's sum of a piece that `rank` carries."""
        return self.region("mine", rank, self._placed(rank, piece, 0))

    def handed(self, src: int, carrier: int, piece: Piece) -> Region:
        """What `src` computed of it."""
        peers = sorted(self.peers(carrier))
        return self.region("handed", carrier, self._placed(carrier, piece, peers.index(src)))

    def _placed(self, carrier: int, piece: Piece, times: int) -> Span1D:
        shards = self.problem.shards
        before = [shards[q] for q in self.carried[carrier][: self.carried[carrier].index(piece.shard)]]
        base = times * self._buffers["mine"].rows[carrier] + sum(high - low for low, high in before) - shards[piece.shard][0]
        return base + piece.rows[0], base + piece.rows[1]

    def theirs(self, rank: int, node: int, piece: Piece) -> Region:
        """What another node has summed of an own piece."""
        low, high = self.problem.shards[rank]
        base = (node - (node > self.problem.node_of[rank])) * (high - low) - low
        return self.region("theirs", rank, (base + piece.rows[0], base + piece.rows[1]))

    def leaving(self, rank: int, index: int) -> list[Piece]:
        """Chunk `index` of all shards of other nodes."""
        return [piece for other in self.far(rank) for piece in self.pieces[other] if piece.index == index]

    def handing(self, src: int, carrier: int, piece: Piece) -> Flag:
        return Flag("handed", carrier, (src * self.world_size + piece.shard) * self.chunks + piece.index)

    def far_part(self, rank: int, piece: Piece) -> Part:
        """A piece of another node, to the rank that carries it."""
        carrier, a = self.carrier(self.problem.node_of[rank], piece.shard), self.region("a", rank, piece.rows)
        if carrier == rank:
            return Part(a, self.region("partial", rank, piece.rows))
        return Part(a, self.handed(rank, carrier, piece), (self.wait_free(rank, carrier),), self.handing(rank, carrier, piece))

    def near_part(self, rank: int, piece: Piece) -> Part:
        """A piece of a peer of the node, to its owner."""
        arrived = Flag("arrived", piece.shard, self.index(rank, piece.index))
        gates = (self.wait_free(rank, piece.shard),)
        return Part(self.region("a", rank, piece.rows), self.slot(rank, piece.shard, piece.rows), gates, arrived)

    def of_node(self, rank: int, piece: Piece) -> tuple[Region, ...]:
        """All that the node's ranks computed of a piece, in their order; `rank` owns or carries it."""
        found = []
        for src in sorted([rank, *self.peers(rank)]):
            if src == rank:
                found.append(self.region("partial", rank, piece.rows))
            else:
                owned = piece.shard == rank
                found.append(self.slot(src, rank, piece.rows) if owned else self.handed(src, rank, piece))
        return tuple(found)

    def cross(self, rank: int, index: int) -> None:
        """Sum chunk `index` of what the rank carries, and exchange it for what other nodes have of its own shard."""
        taken = [piece for piece in self.leaving(rank, index) if piece.shard in self.carried[rank]]
        for piece in taken:
            self.add(rank, "compute", *(Wait(self.handing(src, rank, piece)) for src in self.peers(rank)))
            self.add(rank, "compute", Reduce((Sum(self.of_node(rank, piece), self.mine(rank, piece)),)))
        summed = Flag("summed", rank, index)
        if taken:
            self.add(rank, "compute", Signal(summed))
        nodes = [node for node in range(len(self.problem.nodes)) if node != self.problem.node_of[rank]]
        sends = [Send(self.mine(rank, piece), piece.shard) for piece in taken]
        own = [piece for piece in self.pieces[rank] if piece.index == index]
        receives = [Receive(self.theirs(rank, node, p), self.carrier(node, rank)) for p in own for node in nodes]
        self.send_receive(rank, sends, receives, after=[summed] if taken else [], then=Flag("landed", rank, index))

    def finish_piece(self, rank: int, piece: Piece) -> None:
        """An own piece: what the node's ranks and the other nodes have of it."""
        nodes = [node for node in range(len(self.problem.nodes)) if node != self.problem.node_of[rank]]
        srcs = (*self.of_node(rank, piece), *(self.theirs(rank, node, piece) for node in nodes))
        self.add(rank, "compute", Wait(Flag("landed", rank, piece.index)), *self.all_arrived(rank, piece.index))
        self.add(rank, "compute", Reduce((Sum(srcs, self.own_out(rank, piece.rows)),), self.divide_by))


def sliced(problem: Problem, name: str, chunks: int) -> Schedule:
    """The rows of other nodes first, summed within the node and sent slice by slice; behind that the node's own, as in
    `stored`."""
    s = _ByNode(problem, name, chunks)
    for rank in range(s.world_size):
        for index in range(chunks):
            s.gemm(rank, [s.far_part(rank, piece) for piece in s.leaving(rank, index)])
        for index in range(chunks):
            s.cross(rank, index)
        near = [s.near_part(rank, piece) for step in s.by_step(rank) for piece in step]
        s.gemm(rank, (*near, *s.own_shard(rank)))
        for piece in s.pieces[rank]:
            s.finish_piece(rank, piece)
        s.release(rank)
    return s.done()
