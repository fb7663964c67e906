"""Builders for all_gather_matmul: out_Mn = all_gather(a_mK) @ b_Kn.

Buffers of rank r
    a         input      m_r x K    its shard
    b         input      K x n_r
    a_full    symmetric  M x K      where peers' rows land; peers write it, rank r reads it
    out       output     M x n_r
    gathered  output     M x K      only with return_gathered
    sums      local      M x n_r    float32 partial sums; only for two-dimensional chunks

Flags of rank r (who advances ~> who waits)
    arrived[i]@r   the lane that pushes chunk i ~> r's compute lane: the chunk lies in r's a_full
    free[p]@r      p's compute lane ~> r's pushing lane: p has read its a_full for the last time in this call
    sent[0]@r      r's copy lane ~> r's compute lane (ring only): r has forwarded from its a_full for the last time

    landed[i]@r    r's network lane ~> r's copy and compute lanes: chunk i of the shards of other nodes that r takes for its
                   node lies in r's a_full (node_slices)

`free` is waited for with at_least=0: before the first push of a call, the peer must be past its previous call.

    rank r, compute              rank r, copy                    rank p
    gemm own shard          wait free[p] >= 0
                            copy a -> a_full of p  ~~~~~~~~~~~>  rows land
                            signal arrived         ~~~~~~~~~~~>  wait arrived, gemm those rows
    wait arrived, gemm  <~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~  copy, signal
    signal free[r]@p  ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~> (next call) wait free

Bad interleaving: p, a call ahead, pushes over rows that r still multiplies. `free` prevents it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from weft.core.problem import Problem, Span1D, split
from weft.core.schedule import (
    Collective,
    Copy,
    Flag,
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
from weft.schedules.builder import Builder, Piece, aligned_slices, cut


class _Gather(Builder):
    """Buffers, flags and repeated idioms of this operator. staged: a_full is laid out by step, not by row, with the rank's own
    pieces ("all") or without them ("peers"), so that what a step multiplies lies together."""

    def __init__(
        self,
        problem: Problem,
        name: str,
        chunks: int,
        *,
        staged: Literal["all", "peers"] | None = None,
        fan_out: bool = False,
    ) -> None:
        super().__init__(problem, name, chunks, fan_out=fan_out)
        self.staged = staged
        self.pieces = cut(problem, chunks)
        m, k = problem.m, problem.k
        each = range(self.world_size)
        columns = [problem.columns(r) for r in each]
        self.buffer("a", "input", [high - low for low, high in problem.shards], [k for _ in each])
        self.buffer("b", "input", [k for _ in each], columns)
        self.buffer("a_full", "symmetric", [m for _ in each], [k for _ in each])
        self.buffer("out", "output", [m for _ in each], columns)
        if problem.return_gathered:
            self.buffer("gathered", "output", [m for _ in each], [k for _ in each])

    def arrived(self, rank: int, piece: Piece) -> Flag:
        return Flag("arrived", rank, piece.shard * self.chunks + piece.index)

    def landing(self, rank: int, piece: Piece) -> Region:
        if not self.staged:
            return self.region("a_full", rank, piece.rows)
        before = self._own_before(rank, piece) if self.staged == "peers" else 0
        return self.region("a_full", rank, (piece.staged[0] - before, piece.staged[1] - before))

    def _own_before(self, rank: int, piece: Piece) -> int:
        """How many of the rank's own rows come before a peer's piece, step by step."""
        (low, high), own = self.problem.shards[rank], self.pieces[rank]
        steps = piece.index + (rank < piece.shard)
        return own[steps].rows[0] - low if steps < len(own) else high - low

    def own(self, piece: Piece) -> Region:
        """The piece in its owner's input."""
        base = self.problem.shards[piece.shard][0]
        return self.region("a", piece.shard, (piece.rows[0] - base, piece.rows[1] - base))

    def part(self, rank: int, piece: Piece, gates: tuple[Wait, ...] = ()) -> Part:
        src = self.own(piece) if piece.shard == rank and not self.staged else self.landing(rank, piece)
        return Part(src, self.region("out", rank, piece.rows), gates)

    def own_shard(self, rank: int) -> list[Part]:
        """The whole local shard as one part; nothing if it is empty."""
        rows = self.problem.shards[rank]
        return [Part(self.region("a", rank), self.region("out", rank, rows))] if rows[1] > rows[0] else []

    def gemm(self, rank: int, parts: Iterable[Part]) -> None:
        parts = tuple(parts)
        if parts:
            self.add(rank, "compute", Gemm(self.region("b", rank), parts))

    def gemm_of(self, rank: int, pieces: Sequence[Piece]) -> None:
        """Wait for pieces, given in the order of their arrival; then multiply them in the order of their rows, which so lie in
        as few runs as they can."""
        for piece in pieces:
            self.add(rank, "compute", Wait(self.arrived(rank, piece)))
        self.gemm(rank, [self.part(rank, piece) for piece in sorted(pieces, key=lambda piece: piece.rows)])

    def by_step(self, rank: int) -> list[list[Piece]]:
        """Remote pieces in order of arrival, a list for each chunk index."""
        steps = [[p for peer in self.peers(rank) for p in self.pieces[peer] if p.index == i] for i in range(self.chunks)]
        return [pieces for pieces in steps if pieces]

    def push_all(self, *, lane: str | None = None, stage_own: bool = False) -> None:
        """Every rank sends its pieces to all peers, chunk by chunk; at any time to different peers.

        lane: one that runs on SMs, where copies that follow each other are one kernel; default, copy lanes. stage_own: its
        pieces also go to their places in its own a_full.
        """
        for rank in range(self.world_size):
            peers = self.peers(rank, step=-1)
            self._wait_until_free(rank, peers if self.pieces[rank] else [], lane)
            order = [*peers, rank] if lane and stage_own else [rank] * stage_own + peers
            for piece in self.pieces[rank]:
                own = self.own(piece)
                for peer in order:
                    on = lane or self.copy_lane(peer)
                    self.add(rank, on, Copy(own, self.landing(peer, piece)), Signal(self.arrived(peer, piece)))

    def _wait_until_free(self, rank: int, peers: Sequence[int], lane: str | None) -> None:
        """All of the last call's readers at once: one wait before the first copy is shorter than one before each."""
        for peer in peers:
            self.add(rank, lane or self.copy_lane(peer), Wait(Flag("free", rank, peer), 0))

    def slice_arrived(self, rank: int, shard: int, index: int) -> Flag:
        """Slice `index` of a peer's columns lies in rank's a_full."""
        return Flag("arrived", rank, shard * self.chunks + index)

    def push_columns(self, rank: int, slices: Sequence[Span1D], *, lane: str | None = None) -> None:
        """The rank sends its shard to all peers, slice by slice of its columns. lane: as for push_all."""
        peers = self.peers(rank, step=-1) if self.pieces[rank] else []
        self._wait_until_free(rank, peers, lane)
        for index, cols in enumerate(slices):
            for peer in peers:
                on = lane or self.copy_lane(peer)
                dst = self.region("a_full", peer, self.problem.shards[rank], cols)
                arrived = Signal(self.slice_arrived(peer, rank, index))
                self.add(rank, on, Copy(self.region("a", rank, cols=cols), dst), arrived)

    def finish(self, *, senders: Callable[[int], Iterable[int]] | None = None) -> Schedule:
        """Hand the gathered rows over if asked for, tell the senders that a_full is free, and freeze."""
        for rank in range(self.world_size):
            if self.problem.return_gathered:
                self._copy_gathered(rank)
            for sender in senders(rank) if senders else [p for p in self.peers(rank) if self.pieces[p]]:
                self.add(rank, "compute", Signal(Flag("free", sender, rank)))
        return self.done()

    def _copy_gathered(self, rank: int) -> None:
        for shard, pieces in enumerate(self.pieces):
            if shard == rank and pieces:
                self.add(
                    rank, "compute", Copy(self.region("a", rank), self.region("gathered", rank, self.problem.shards[rank]))
                )
            elif not self.staged and pieces:
                rows = self.problem.shards[shard]
                self.add(rank, "compute", Copy(self.region("a_full", rank, rows), self.region("gathered", rank, rows)))
            else:
                for piece in pieces:
                    self.add(rank, "compute", Copy(self.landing(rank, piece), self.region("gathered", rank, piece.rows)))


def sequential(problem: Problem) -> Schedule:
    """Vendor all-gather, then one GEMM."""
    s = _Gather(problem, "sequential", 1)
    for rank in range(s.world_size):
        s.add(rank, "compute", Collective("all_gather", s.region("a", rank), s.region("a_full", rank)))
        if problem.return_gathered:
            s.add(rank, "compute", Copy(s.region("a_full", rank), s.region("gathered", rank)))
        s.gemm(rank, [Part(s.region("a_full", rank), s.region("out", rank))])
    return s.done()


def sequential_stores(problem: Problem, name: str) -> Schedule:
    """All shards are stored at every rank, the own one too; then one vendor GEMM."""
    s = _Gather(problem, name, 1, staged="all")
    s.push_all(lane="compute", stage_own=True)
    for rank in range(s.world_size):
        s.gemm_of(rank, [piece for shard in (*s.peers(rank), rank) for piece in s.pieces[shard]])
    return s.finish()


def unfused(problem: Problem, name: str, chunks: int, *, fan_out: bool = False) -> Schedule:
    """The local shard as one GEMM, then a GEMM for each piece in order of arrival. chunks=1: shard by shard."""
    s = _Gather(problem, name, chunks, fan_out=fan_out)
    s.push_all()
    for rank in range(s.world_size):
        s.gemm(rank, s.own_shard(rank))
        for pieces in s.by_step(rank):
            for piece in pieces:
                s.add(rank, "compute", Wait(s.arrived(rank, piece)))
                s.gemm(rank, [s.part(rank, piece)])
    return s.finish()


def fused(problem: Problem, name: str, chunks: int, *, uniform: bool, fan_out: bool = False) -> Schedule:
    """All pieces of a step as one GEMM. uniform: the local shard is cut like the others and joins each step."""
    s = _Gather(problem, name, chunks, staged="all" if uniform else "peers", fan_out=fan_out)
    s.push_all(stage_own=uniform)
    for rank in range(s.world_size):
        if not uniform:
            s.gemm(rank, s.own_shard(rank))
        for index in range(chunks):
            s.gemm_of(rank, [p for shard in [rank] * uniform + s.peers(rank) for p in s.pieces[shard] if p.index == index])
    return s.finish()


def fused_2d(problem: Problem, name: str, chunks: int, *, fan_out: bool = False) -> Schedule:
    """Chunks of columns: every step multiplies all rows by a slice of K and adds to float32 sums, rounded at the end."""
    s = _Gather(problem, name, chunks, fan_out=fan_out)
    each = range(s.world_size)
    s.buffer("sums", "local", [problem.m for _ in each], [problem.columns(r) for r in each], float32=True)
    slices = [c for c in split(problem.k, chunks) if c[1] > c[0]]
    for rank in each:
        s.push_columns(rank, slices)
        for index, cols in enumerate(slices):
            s.add(rank, "compute", *(Wait(s.slice_arrived(rank, peer, index)) for peer in s.peers(rank) if s.pieces[peer]))
            parts = []
            for shard in (shard for shard in each if s.pieces[shard]):
                rows = problem.shards[shard]
                a = s.region("a", rank, cols=cols) if shard == rank else s.region("a_full", rank, rows, cols)
                parts.append(Part(a, s.region("sums", rank, rows)))
            if parts:
                s.add(rank, "compute", Gemm(s.region("b", rank, cols), tuple(parts), accumulate=index > 0))
        s.add(rank, "compute", Reduce((Sum((s.region("sums", rank),), s.region("out", rank)),)))
    return s.finish()


def gated(problem: Problem, name: str, chunks: int, *, blocks: bool, fan_out: bool = False) -> Schedule:
    """One GEMM whose tiles wait for their chunk, in order of arrival, own shard first.

    blocks: communication blocks bring the chunks, not copy engines.
    """
    s = _Gather(problem, name, chunks, fan_out=fan_out)
    s.push_all(lane="blocks" if blocks else None)
    for rank in range(s.world_size):
        remote = [s.part(rank, p, (Wait(s.arrived(rank, p)),)) for pieces in s.by_step(rank) for p in pieces]
        s.gemm(rank, s.own_shard(rank) + remote)
    return s.finish()


def gated_2d(problem: Problem, name: str, chunks: int) -> Schedule:
    """One GEMM whose tiles wait for the columns of their rows, slice by slice of K, own shard first and without waiting.

    Every tile can start with the first slice. Slices are stored from SMs: rectangles of many short rows, too small for copy
    engines.
    """
    s = _Gather(problem, name, chunks)
    slices = aligned_slices(problem.k, chunks)
    for rank in range(s.world_size):
        s.push_columns(rank, slices, lane="blocks")
        parts = s.own_shard(rank)
        for peer in (p for p in s.peers(rank) if s.pieces[p]):
            first, *later = (Wait(s.slice_arrived(rank, peer, index)) for index in range(len(slices)))
            inner = tuple((low, wait) for (low, _), wait in zip(slices[1:], later, strict=True))
            rows = problem.shards[peer]
            parts.append(Part(s.region("a_full", rank, rows), s.region("out", rank, rows), (first,), inner=inner))
        s.gemm(rank, parts)
    return s.finish()


def ring(problem: Problem, name: str, chunks: int) -> Schedule:
    """Arrivals trigger copies: a chunk that lands is forwarded to the next rank, and gates the one GEMM's tiles.

    T3's all-gather mapping (T3, tracker threshold 1): each rank sends only to its successor.
    """
    s = _Gather(problem, name, chunks)
    size = s.world_size
    for rank in range(size):
        order = [p for hop in range(size) for p in s.pieces[(rank - hop) % size]]
        sent = [p for p in order if p.shard != (rank + 1) % size]
        for piece in sent if size > 1 else []:
            _forward(s, rank, piece, first=piece is sent[0])
        parts = [s.part(rank, p, (Wait(s.arrived(rank, p)),)) for p in order if p.shard != rank]
        s.gemm(rank, s.own_shard(rank) + parts)
        if any(p.shard != rank for p in sent):
            s.add(rank, "copy", Signal(Flag("sent", rank)))
            s.add(rank, "compute", Wait(Flag("sent", rank)))
    return s.finish(senders=lambda rank: _ring_sender(s, rank))


def _forward(s: _Gather, rank: int, piece: Piece, *, first: bool) -> None:
    """Send a piece, its own or one that has landed, to the successor."""
    successor = (rank + 1) % s.world_size
    if piece.shard != rank:
        s.add(rank, "copy", Wait(s.arrived(rank, piece)))
    if first:
        s.add(rank, "copy", Wait(Flag("free", rank, successor), 0))
    src = s.own(piece) if piece.shard == rank else s.landing(rank, piece)
    s.add(rank, "copy", Copy(src, s.landing(successor, piece)), Signal(s.arrived(successor, piece)))


def _ring_sender(s: _Gather, rank: int) -> list[int]:
    """The predecessor, if it has anything to send: then it waits for `free`."""
    sender = (rank - 1) % s.world_size
    sends = any(s.pieces[shard] for shard in range(s.world_size) if shard != rank)
    return [sender] if sender != rank and sends else []


def sliced(problem: Problem, name: str, chunks: int, *, fan_out: bool = False) -> Schedule:
    """As `gated` within a node. Each chunk goes to one rank of every other node, which forwards it within its own; a GEMM for
    all chunks that come so in one step.

    Those are no gates of the one GEMM: its waiting tiles would hold the SMs that the vendor's receiving needs.
    """
    s = _Gather(problem, name, chunks, fan_out=fan_out)
    carried = [_carried(s, rank) for rank in range(s.world_size)]
    s.push_all()
    for rank in range(s.world_size):
        near = [s.part(rank, p, (Wait(s.arrived(rank, p)),)) for pieces in s.by_step(rank) for p in pieces]
        s.gemm(rank, s.own_shard(rank) + near)
        for index in range(chunks):
            _cross(s, rank, index, carried[rank])
            pieces = [p for other in s.far(rank) for p in s.pieces[other] if p.index == index]
            if any(p.index == index for p in carried[rank]):
                s.add(rank, "compute", Wait(Flag("landed", rank, index)))
            s.add(rank, "compute", *(Wait(s.arrived(rank, p)) for p in pieces if p not in carried[rank]))
            s.gemm(rank, [s.part(rank, p) for p in pieces])
    return s.finish(senders=lambda rank: [peer for peer in s.peers(rank) if s.pieces[peer] or carried[peer]])


def _carried(s: _Gather, rank: int) -> list[Piece]:
    """The pieces of other nodes that `rank` takes for its own."""
    node = s.problem.node_of[rank]
    return [piece for other in s.far(rank) if s.carrier(node, other) == rank for piece in s.pieces[other]]


def _cross(s: _Gather, rank: int, index: int, carried: Sequence[Piece]) -> None:
    """Chunk `index` of the own shard to the other nodes; what comes from there is forwarded."""
    nodes = [node for node in range(len(s.problem.nodes)) if node != s.problem.node_of[rank]]
    own = [piece for piece in s.pieces[rank] if piece.index == index]
    sends = [Send(s.own(piece), s.carrier(node, rank)) for piece in own for node in nodes]
    taken = [piece for piece in carried if piece.index == index]
    receives = [Receive(s.landing(rank, piece), piece.shard) for piece in taken]
    landed = Flag("landed", rank, index)
    s.send_receive(rank, sends, receives, after=[], then=landed)
    for lane in dict.fromkeys(s.copy_lane(peer) for peer in s.peers(rank) if taken):
        s.add(rank, lane, Wait(landed))
    for piece in taken:
        for peer in s.peers(rank, step=-1):
            if not s.pieces[rank] and piece == carried[0]:
                s.add(rank, s.copy_lane(peer), Wait(Flag("free", rank, peer), 0))
            copy = Copy(s.landing(rank, piece), s.landing(peer, piece))
            s.add(rank, s.copy_lane(peer), copy, Signal(s.arrived(peer, piece)))
