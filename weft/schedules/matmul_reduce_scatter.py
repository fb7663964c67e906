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

Flags of rank r (who signals ~> who waits)
    made[i]@r      r's compute lane ~> r's copy lane: piece i of the product is in `partial`
    arrived[i]@r   a peer's copy lane, or its GEMM ~> r's reduction: the peer's piece i is in recv (or in its partial)
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

from weft.core.problem import Span1D, split
from weft.core.schedule import (
    Collective,
    Flag,
    FusedCollective,
    Part,
    Receive,
    Reduce,
    Region,
    Schedule,
    Send,
    Signal,
    Store,
    Sum,
    Wait,
)
from weft.schedules.builder import Builder, Piece, Request

ONE_KERNEL_BYTES = 16 << 20
"""Of a rank's product: up to here sequential_stores exchanges by one kernel, which keeps three copies of what arrives."""


class _Scatter(Builder):
    """Buffers, flags and repeated idioms of this operator. Of matmul_all_reduce, what a reduce-scatter gives is in `mine`, with
    the addends of its rows, and is gathered by NCCL."""

    def __init__(self, asked: Request, *, partial: Literal["local", "symmetric"] | None = "local", recv: bool = True) -> None:
        super().__init__(asked)
        m, n = self.problem.m, self.problem.n
        self.divide_by = self.world_size if self.problem.reduce_op == "avg" else 1
        inner = [self.problem.inner(r) for r in self.each]
        self.recv = recv and partial != "symmetric"
        self.gathers = self.problem.op == "matmul_all_reduce"
        self.buffer("a", "input", m, inner, operand="a")
        self.buffer("b", "input", inner, n, operand="b")
        if partial:
            self.buffer("partial", partial, m, n)
        if self.recv:
            self.buffer("recv", "symmetric", [(self.world_size - 1) * rows for rows in self.owned], n)
        if self.gathers:
            self.buffer("mine", "local", self.owned, n)
            for addend in self.problem.addends:
                self.buffer(addend, "input", m if addend == "residual" else 1, n)
        self.buffer("out", "output", m if self.gathers else self.owned, n)

    def slot(self, src: int, shard: int, rows: Span1D, cols: Span1D | None = None) -> Region:
        """Where rank `src` puts global rows of `shard`, on the owner."""
        low, high = self.problem.shards[shard]
        base = (src - (src > shard)) * (high - low) - low
        return self.region("recv", shard, (base + rows[0], base + rows[1]), cols)

    def own_out(self, rank: int, rows: Span1D, cols: Span1D | None = None) -> Region:
        base = self.problem.shards[rank][0]
        return self.region("mine" if self.gathers else "out", rank, (rows[0] - base, rows[1] - base), cols)

    def part(self, rank: int, rows: Span1D, count: Flag | None = None) -> Part:
        return Part(self.region("a", rank, rows), self.region("partial", rank, rows), count=count)

    def own_shard(self, rank: int) -> list[Part]:
        """The rows that stay, as one part; nothing if there are none."""
        rows = self.problem.shards[rank]
        return [self.part(rank, rows)] if rows[1] > rows[0] else []

    def by_step(self, rank: int) -> list[Piece]:
        """Pieces to send, in order of production: chunk by chunk, peers rotated by rank."""
        return self.by_chunk(self.peers(rank))

    def arrived(self, owner: int, src: int, index: int) -> Flag:
        return self.flag("arrived", owner, src, index)

    def made(self, rank: int, piece: Piece) -> Flag:
        return self.flag("made", rank, piece.shard, piece.index)

    def store(self, rank: int, shard: int, index: int, rows: Span1D, cols: Span1D | None = None) -> Store:
        """A finished piece to its owner."""
        there = self.slot(rank, shard, rows, cols)
        return Store(self.region("partial", rank, rows, cols), there, self.arrived(shard, rank, index))

    def stored(self, rank: int, piece: Piece) -> Part:
        """A piece that the kernel's tiles store at its owner."""
        out, gate = self.slot(rank, piece.shard, piece.rows), self.free(rank, piece.shard)
        return Part(self.region("a", rank, piece.rows), out, (gate,), self.arrived(piece.shard, rank, piece.index))

    def send_steps(self, rank: int, *, made: bool) -> None:
        """The copy lane: every piece in order of production. made: wait for each piece's flag (else for its step's)."""
        step = -1
        for piece in self.by_step(rank):
            lane = self.copy_lane(piece.shard)
            if made or piece.index != step or self.fan_out:
                self.add(rank, lane, Wait(self.made(rank, piece) if made else Flag("made", rank, piece.index)))
            if piece is self.pieces[piece.shard][0]:
                self.wait_free(rank, [piece.shard])
            self.send(rank, [self.store(rank, piece.shard, piece.index, piece.rows)])
            step = piece.index

    def total(self, rank: int, index: int, rows: Span1D, cols: Span1D | None = None) -> Sum:
        """One piece of the result: the sum over ranks, once all have arrived."""
        here = [src == rank or not self.recv for src in self.each]
        srcs = [self.region("partial", src, rows, cols) if here[src] else self.slot(src, rank, rows, cols) for src in self.each]
        if self.gathers:
            addends = ((name, rows if name == "residual" else None) for name in self.problem.addends)
            srcs += (self.region(name, rank, some, cols) for name, some in addends)
        return Sum(tuple(srcs), self.own_out(rank, rows, cols), self.all_arrived(rank, index))

    def all_arrived(self, rank: int, index: int) -> tuple[Wait, ...]:
        return tuple(Wait(self.arrived(rank, peer, index)) for peer in self.peers(rank))

    def reduce(self, rank: int, sums: Iterable[Sum]) -> None:
        """Sum the pieces that arrived, chunk by chunk, then signal every peer that its pieces have been read."""
        if sums := tuple(sums):
            self.add(rank, "compute", Reduce(sums, self.divide_by))
            self.release(rank, self.peers(rank))

    def reduce_pieces(self, rank: int) -> None:
        self.reduce(rank, [self.total(rank, p.index, p.rows) for p in self.pieces[rank]])

    def gemm_and_sum(self, rank: int, remote: Iterable[Part]) -> None:
        """One GEMM: what peers own, then the own shard, piece by piece with what has arrived of it."""
        own = []
        for piece in self.pieces[rank]:
            adds = tuple(self.slot(src, rank, piece.rows) for src in self.each if src != rank)
            a, out = self.region("a", rank, piece.rows), self.own_out(rank, piece.rows)
            own.append(Part(a, out, self.all_arrived(rank, piece.index), adds=adds))
        self.gemm(rank, (*remote, *own), divide_by=self.divide_by)
        self.release(rank, self.peers(rank) if own else [])

    def exchange(self, rank: int, factors: tuple[Region, ...]) -> None:
        """The kernel that sums what all ranks have of the own shard."""
        out = self.region("out", rank)
        self.add(rank, "compute", FusedCollective("reduce_scatter", factors, out, divide_by=self.divide_by))

    def finish(self) -> Schedule:
        """Gather the sums if all ranks need them, and freeze."""
        for rank in self.each if self.gathers else ():
            self.add(rank, "compute", Collective("all_gather", self.region("mine", rank), self.region("out", rank)))
        return self.done()


def sequential(asked: Request) -> Schedule:
    """One GEMM, then NCCL's reduce-scatter."""
    s = _Scatter(asked, partial="symmetric")
    for rank in s.each:
        s.gemm(rank, [Part(s.region("a", rank), s.region("partial", rank))])
        s.add(rank, "compute", Collective("reduce_scatter", s.region("partial", rank), s.region("out", rank), s.divide_by))
    return s.done()


def one_shot(asked: Request) -> Schedule:
    """One kernel: every rank stores its partial rows at their owners, who sum them up."""
    s = _Scatter(asked, partial=None, recv=False)
    for rank in s.working:
        s.exchange(rank, (s.region("a", rank), s.region("b", rank)))
    return s.done()


def sequential_stores(asked: Request) -> Schedule:
    """One cuBLAS GEMM; then its rows are stored at their owners, who sum them up: as one kernel where that is few bytes."""
    few = asked.problem.m * asked.problem.n * asked.problem.itemsize <= ONE_KERNEL_BYTES
    s = _Scatter(asked, recv=not few)
    for rank in s.working:
        s.gemm(rank, [Part(s.region("a", rank), s.region("partial", rank))])
        if few:
            s.exchange(rank, (s.region("partial", rank),))
            continue
        pieces = s.by_step(rank)
        s.wait_free(rank, [piece.shard for piece in pieces], "compute")
        s.send(rank, [s.store(rank, piece.shard, 0, piece.rows) for piece in pieces], "compute")
        s.reduce_pieces(rank)
    return s.done()


def unfused(asked: Request) -> Schedule:
    """A GEMM for each piece, sent when done; the own shard last, as one GEMM. chunks=1: shard by shard."""
    s = _Scatter(asked)
    for rank in s.each:
        for piece in s.by_step(rank):
            s.gemm(rank, [s.part(rank, piece.rows)])
            s.add(rank, "compute", Signal(s.made(rank, piece)))
        s.send_steps(rank, made=True)
        s.gemm(rank, s.own_shard(rank))
        s.reduce_pieces(rank)
    return s.finish()


def fused(asked: Request, *, uniform: bool) -> Schedule:
    """One GEMM for all pieces of a step. uniform: the own shard is cut like the others and joins each step."""
    s = _Scatter(asked)
    for rank in s.each:
        for index in range(s.chunks):
            step = s.chunk(index, [shard for shard in s.each if uniform or shard != rank])
            s.gemm(rank, [s.part(rank, piece.rows) for piece in step])
            if any(p.shard != rank for p in step):
                s.add(rank, "compute", Signal(Flag("made", rank, index)))
        s.send_steps(rank, made=False)
        if not uniform:
            s.gemm(rank, s.own_shard(rank))
        s.reduce_pieces(rank)
    return s.done()


def fused_2d(asked: Request) -> Schedule:
    """The mirror of chunks of K: every step computes all rows of a slice of columns, and sends strided rectangles."""
    s = _Scatter(asked)
    slices = [c for c in split(s.problem.n, s.chunks) if c[1] > c[0]]
    for rank in s.each:
        peers = [p for p in s.peers(rank) if s.pieces[p]]
        for index, cols in enumerate(slices):
            whole = [Part(s.region("a", rank), s.region("partial", rank, cols=cols))]
            s.gemm(rank, whole if s.problem.m else [], (None, cols))
            made = Flag("made", rank, index)
            if peers:
                s.add(rank, "compute", Signal(made))
            for peer in peers:
                if peer == peers[0] or s.fan_out:
                    s.add(rank, s.copy_lane(peer), Wait(made))
                s.wait_free(rank, [peer] if index == 0 else [])
                s.send(rank, [s.store(rank, peer, index, s.problem.shards[peer], cols)])
        rows = s.problem.shards[rank]
        s.reduce(rank, [s.total(rank, i, rows, cols) for i, cols in enumerate(slices)] if s.pieces[rank] else [])
    return s.done()


def counted(asked: Request) -> Schedule:
    """Track and trigger: one GEMM counts finished tiles by piece, in an order rotated by rank; a full count starts the copy.

    Its last tiles, those of the own shard, add what has arrived.
    """
    s = _Scatter(asked)
    for rank in s.each:
        s.gemm_and_sum(rank, [s.part(rank, piece.rows, s.made(rank, piece)) for piece in s.by_step(rank)])
        s.send_steps(rank, made=True)
    return s.done()


def stored(asked: Request) -> Schedule:
    """One GEMM that raises flags on the owners, remote pieces first. Its tiles are stored straight to the owner's recv, whose
    last tiles, those of its own shard, add them."""
    s = _Scatter(asked, partial=None)
    for rank in s.each:
        s.gemm_and_sum(rank, [s.stored(rank, piece) for piece in s.by_step(rank)])
    return s.done()


def pulled(asked: Request) -> Schedule:
    """As `stored`, but tiles stay in `partial`, and the owner's reduction, whose tiles wait for the flags, loads them from
    there."""
    s = _Scatter(asked, partial="symmetric")
    for rank in s.each:
        parts = []
        for piece in s.by_step(rank):
            here = s.region("partial", rank, piece.rows)
            gates, arrived = (s.free(rank, piece.shard),), s.arrived(piece.shard, rank, piece.index)
            parts.append(Part(s.region("a", rank, piece.rows), here, gates, arrived))
        s.gemm(rank, parts + s.own_shard(rank))
        s.reduce_pieces(rank)
    return s.done()


class _Slices(_Scatter):
    """node_slices: of the rows that another node owns, one rank of each node sums the node's products, and sends the sum."""

    def __init__(self, asked: Request) -> None:
        super().__init__(asked)
        heights = [sum(self.owned[q] for q in self.carried(r)) for r in self.each]
        self.buffer("handed", "symmetric", [len(self.peers(r)) * heights[r] for r in self.each], self.problem.n)
        self.buffer("mine", "local", heights, self.problem.n)
        self.buffer("theirs", "local", [len(self.other_nodes(r)) * self.owned[r] for r in self.each], self.problem.n)

    def mine(self, rank: int, piece: Piece, name: str = "mine", times: int = 0) -> Region:
        """The node's sum of a piece that `rank` carries."""
        carried = self.carried(rank)
        above = sum(self.owned[q] for q in carried[: carried.index(piece.shard)])
        base = times * self._buffers["mine"].rows[rank] + above - self.problem.shards[piece.shard][0]
        return self.region(name, rank, (base + piece.rows[0], base + piece.rows[1]))

    def handed(self, src: int, carrier: int, piece: Piece) -> Region:
        """What `src` computed of it."""
        return self.mine(carrier, piece, "handed", sorted(self.peers(carrier)).index(src))

    def theirs(self, rank: int, node: int, piece: Piece) -> Region:
        """What another node has summed of an own piece."""
        base = self.other_nodes(rank).index(node) * self.owned[rank] - self.problem.shards[rank][0]
        return self.region("theirs", rank, (base + piece.rows[0], base + piece.rows[1]))

    def handing(self, src: int, carrier: int, piece: Piece) -> Flag:
        return self.flag("handed", carrier, src * self.world_size + piece.shard, piece.index)

    def far_part(self, rank: int, piece: Piece) -> Part:
        """A piece of another node, to the rank that carries it."""
        carrier = self.carrier(self.problem.node_of[rank], piece.shard)
        if carrier == rank:
            return self.part(rank, piece.rows)
        a, handed = self.region("a", rank, piece.rows), self.handed(rank, carrier, piece)
        return Part(a, handed, (self.free(rank, carrier),), self.handing(rank, carrier, piece))

    def of_node(self, rank: int, piece: Piece) -> tuple[Region, ...]:
        """All that the node's ranks computed of a piece, in their order; `rank` owns or carries it."""
        found = {src: self.handed(src, rank, piece) for src in self.peers(rank) if piece.shard != rank}
        found |= {src: self.slot(src, rank, piece.rows) for src in self.peers(rank) if piece.shard == rank}
        found[rank] = self.region("partial", rank, piece.rows)
        return tuple(found[src] for src in self.node(rank))

    def cross(self, rank: int, index: int) -> None:
        """Sum chunk `index` of what the rank carries, and exchange it for what other nodes have of its own shard."""
        taken, summed = self.chunk(index, self.carried(rank)), Flag("summed", rank, index)
        for piece in taken:
            self.add(rank, "compute", *(Wait(self.handing(src, rank, piece)) for src in self.peers(rank)))
            self.add(rank, "compute", Reduce((Sum(self.of_node(rank, piece), self.mine(rank, piece)),)))
        if taken:
            self.add(rank, "compute", Signal(summed))
        sends = [Send(self.mine(rank, piece), piece.shard) for piece in taken]
        own = [(piece, node) for piece in self.chunk(index, [rank]) for node in self.other_nodes(rank)]
        receives = [Receive(self.theirs(rank, node, piece), self.carrier(node, rank)) for piece, node in own]
        self.send_receive(rank, sends, receives, after=[summed] if taken else [], then=Flag("landed", rank, index))


def sliced(asked: Request) -> Schedule:
    """The rows of other nodes first, summed within the node and sent slice by slice; behind that the node's own, as in
    `stored`."""
    if not asked.problem.nodes:
        return stored(asked)
    s = _Slices(asked)
    for rank in s.each:
        for index in range(s.chunks):
            s.gemm(rank, [s.far_part(rank, piece) for piece in s.chunk(index, s.far(rank))])
        for index in range(s.chunks):
            s.cross(rank, index)
        s.gemm(rank, [s.stored(rank, piece) for piece in s.by_step(rank)] + s.own_shard(rank))
        for piece in s.pieces[rank]:
            srcs = (*s.of_node(rank, piece), *(s.theirs(rank, node, piece) for node in s.other_nodes(rank)))
            s.add(rank, "compute", Wait(Flag("landed", rank, piece.index)), *s.all_arrived(rank, piece.index))
            s.add(rank, "compute", Reduce((Sum(srcs, s.own_out(rank, piece.rows)),), s.divide_by))
        s.release(rank, s.peers(rank))
    return s.done()
