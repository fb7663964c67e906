"""Builders for all_gather_matmul: out_Mn = all_gather(a_mK) @ b_Kn.

Buffers of rank r
    a         input      m_r x K    its shard
    b         input      K x n_r
    quantised local      m_r x K    a in FP8, if it is quantised before torch.distributed gathers it
    a_full    symmetric  M x K      peers' rows; peers write it, rank r reads it
    out       output     M x n_r
    gathered  output     M x K      only with return_gathered
    sums      local      M x n_r    float32 partial sums; only for two-dimensional chunks

Flags of rank r (who signals ~> who waits)
    arrived[i]@r   the lane that pushes chunk i ~> r's compute lane: the chunk is in r's a_full
    free[p]@r      p's compute lane ~> r's pushing lane: p has read its a_full for the last time in this call
    sent[0]@r      r's copy lane ~> r's compute lane (ring only): r has forwarded from its a_full for the last time

    landed[i]@r    r's network lane ~> r's copy and compute lanes: chunk i of the shards of other nodes that r takes for its
                   node is in r's a_full (node_slices)

A rank waits for `free` with on_previous_call=True, so that each peer has ended its previous call before the first push.

    rank r, compute              rank r, copy                    rank p
    gemm own shard          wait free[p] >= 0
                            copy a -> a_full of p  ~~~~~~~~~~~>  rows land
                            signal arrived         ~~~~~~~~~~~>  wait arrived, gemm those rows
    wait arrived, gemm  <~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~  copy, signal
    signal free[r]@p  ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~> (next call) wait free

Bad interleaving: p is a call ahead, and pushes over rows that r still multiplies. `free` prevents this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from weft.core.problem import Span1D, split
from weft.core.schedule import Collective, Copy, Flag, Part, Receive, Reduce, Region, Schedule, Send, Signal, Store, Sum, Wait
from weft.schedules.builder import Builder, Piece, Request, aligned_slices


class _Gather(Builder):
    """The buffers and flags of this operator, and steps that several schedules share.

    staged: a_full is laid out by step, not by row, so that the rows that a step multiplies are contiguous. It holds the rank's
        own pieces ("all"), or only those of peers ("peers").
    """

    def __init__(self, request: Request, *, staged: Literal["all", "peers"] | None = None) -> None:
        super().__init__(request)
        self.staged = staged
        m, k = self.problem.m, self.problem.k
        self.columns = [self.problem.columns(r) for r in self.ranks]
        self.add_buffer("a", "input", self.shard_rows, k, operand="a")
        self.add_buffer("b", "input", k, self.columns, operand="b")
        self.add_buffer("a_full", "symmetric", m, k, operand="a")
        self.add_buffer("out", "output", m, self.columns)
        if self.quantises:
            self.add_buffer("quantised", "local", self.shard_rows, k, operand="a")
        if self.problem.return_gathered:
            self.add_buffer("gathered", "output", m, k, operand="a")

    def arrived(self, rank: int, piece: Piece) -> Flag:
        return self.flag("arrived", rank, piece.shard, piece.index)

    def landing_region(self, rank: int, piece: Piece) -> Region:
        if not self.staged:
            return self.region("a_full", rank, piece.rows)
        before = self._count_own_rows_before(rank, piece) if self.staged == "peers" else 0
        return self.region("a_full", rank, (piece.staged[0] - before, piece.staged[1] - before))

    def _count_own_rows_before(self, rank: int, piece: Piece) -> int:
        """Return the number of the rank's own rows that precede a peer's piece in the order of steps."""
        (low, high), own = self.problem.shards[rank], self.pieces[rank]
        steps = piece.index + (rank < piece.shard)
        return own[steps].rows[0] - low if steps < len(own) else high - low

    def input_region(self, piece: Piece) -> Region:
        """Return the region of a piece in its owner's input."""
        base = self.problem.shards[piece.shard][0]
        return self.region("a", piece.shard, (piece.rows[0] - base, piece.rows[1] - base))

    def part(self, rank: int, piece: Piece, gates: tuple[Wait, ...] = ()) -> Part:
        reads_input = piece.shard == rank and not (self.staged or self.quantises)
        src = self.input_region(piece) if reads_input else self.landing_region(rank, piece)
        return Part(src, self.region("out", rank, piece.rows), gates)

    def own_shard(self, rank: int) -> list[Part]:
        """Return the whole local shard as one part, or no part if it is empty."""
        rows = self.problem.shards[rank]
        return [Part(self.region("a", rank), self.region("out", rank, rows))] if rows[1] > rows[0] else []

    def add_gated_gemm(self, rank: int, pieces: Iterable[Piece]) -> None:
        """Add one GEMM of the own shard and of these pieces. The tiles of a piece wait until it has arrived.

        Own rows that are quantised also arrive in a_full.
        """
        awaited, own = [*pieces], self.own_shard(rank)
        if self.quantises:
            awaited, own = [*self.pieces[rank], *awaited], []
        self.add_gemm(rank, own + [self.part(rank, p, (Wait(self.arrived(rank, p)),)) for p in awaited])

    def wait_and_add_gemm(self, rank: int, pieces: Sequence[Piece]) -> None:
        """Add waits for pieces in the order of their arrival, then one GEMM of them.

        The GEMM has them in the order of their rows, so that torch multiplies as few contiguous blocks as possible.
        """
        for piece in pieces:
            self.add_steps(rank, "compute", Wait(self.arrived(rank, piece)))
        self.add_gemm(rank, [self.part(rank, piece) for piece in sorted(pieces, key=lambda piece: piece.rows)])

    def push_all(self, *, lane: str | None = None, stage_own: bool = False) -> None:
        """Add copies of every rank's pieces to all peers, chunk by chunk. At any time, ranks send to different peers.

        lane: as for `copy_to_peers`.
        stage_own: a rank also copies its pieces to their places in its own a_full.
        """
        for rank in self.ranks:
            peers = self.peers(rank, step=-1)
            order = [*peers, rank] if lane and stage_own else [rank] * stage_own + peers
            self.wait_for_free(rank, peers if self.pieces[rank] else [], lane)
            pushed = ((self.input_region(piece), peer, piece) for piece in self.pieces[rank] for peer in order)
            self.copy_to_peers(
                rank, (Store(own, self.landing_region(to, one), self.arrived(to, one)) for own, to, one in pushed), lane
            )

    def make_slice_wait(self, rank: int, shard: int, index: int) -> Wait:
        """Return the wait until slice `index` of a peer's columns is in rank's a_full."""
        return Wait(self.flag("arrived", rank, shard, index))

    def push_columns(self, rank: int, slices: Sequence[Span1D], *, lane: str | None = None) -> None:
        """Add copies of the rank's shard to all peers, slice by slice of its columns. lane: as for `copy_to_peers`."""
        peers, rows = self.peers(rank, step=-1) if self.pieces[rank] else [], self.problem.shards[rank]
        self.wait_for_free(rank, peers, lane)
        pushed = ((index, cols, peer) for index, cols in enumerate(slices) for peer in peers)
        stores = (
            Store(
                self.region("a", rank, cols=cols), self.region("a_full", to, rows, cols), self.flag("arrived", to, rank, index)
            )
            for index, cols, to in pushed
        )
        self.copy_to_peers(rank, stores, lane)

    def finish(self, *, senders: Callable[[int], Iterable[int]] | None = None) -> Schedule:
        """Copy the gathered rows to the caller if requested, signal the senders that a_full is free, and build the schedule."""
        for rank in self.ranks:
            if self.problem.return_gathered:
                self._copy_gathered(rank)
            self.signal_free(rank, senders(rank) if senders else [p for p in self.peers(rank) if self.pieces[p]])
        return self.build_schedule()

    def _copy_gathered(self, rank: int) -> None:
        for shard, pieces in enumerate(self.pieces):
            rows = self.problem.shards[shard]
            reads_input = shard == rank and not self.quantises
            src = self.region("a", rank) if reads_input else self.region("a_full", rank, rows)
            found = [(src, rows)] if pieces else []
            if self.staged and not reads_input:
                found = [(self.landing_region(rank, piece), piece.rows) for piece in pieces]
            for src, rows in found:
                self.add_steps(rank, "compute", Copy(src, self.region("gathered", rank, rows)))


def sequential(request: Request) -> Schedule:
    """Build NCCL's all-gather, then one GEMM."""
    s = _Gather(request)
    for rank in s.ranks:
        s.add_steps(rank, "compute", Collective("all_gather", s.quantise_rows(rank), s.region("a_full", rank)))
        if s.problem.return_gathered:
            s.add_steps(rank, "compute", Copy(s.region("a_full", rank), s.region("gathered", rank)))
        s.add_gemm(rank, [Part(s.region("a_full", rank), s.region("out", rank))])
    return s.build_schedule()


def sequential_stores(request: Request) -> Schedule:
    """Store all shards, including the rank's own, at every rank. Then run one cuBLAS GEMM."""
    s = _Gather(request, staged="all")
    s.push_all(lane="compute", stage_own=True)
    for rank in s.ranks:
        s.wait_and_add_gemm(rank, [piece for shard in (*s.peers(rank), rank) for piece in s.pieces[shard]])
    return s.finish()


def unfused(request: Request) -> Schedule:
    """Multiply the local shard by one GEMM, then each piece by another one in order of arrival. With chunks=1 a piece is a
    shard."""
    s = _Gather(request)
    s.push_all()
    for rank in s.ranks:
        s.add_gemm(rank, s.own_shard(rank))
        for piece in s.sort_by_chunk(s.peers(rank)):
            s.wait_and_add_gemm(rank, [piece])
    return s.finish()


def fused(request: Request, *, uniform: bool) -> Schedule:
    """Multiply all pieces of a step by one GEMM. uniform: the local shard is cut like the others, and each step has a piece of
    it."""
    s = _Gather(request, staged="all" if uniform else "peers")
    s.push_all(stage_own=uniform)
    for rank in s.ranks:
        if not uniform:
            s.add_gemm(rank, s.own_shard(rank))
        for index in range(s.chunks):
            s.wait_and_add_gemm(rank, s.select_chunk(index, [rank] * uniform + s.peers(rank)))
    return s.finish()


def fused_2d(request: Request) -> Schedule:
    """Cut columns into chunks. Every step multiplies all rows by a slice of K, and adds to float32 sums, which are rounded at
    the end."""
    s = _Gather(request)
    s.add_buffer("sums", "local", s.problem.m, s.columns, float32=True)
    slices = [c for c in split(s.problem.k, s.chunks) if c[1] > c[0]]
    for rank in s.ranks:
        s.push_columns(rank, slices)
        for index, cols in enumerate(slices):
            s.add_steps(rank, "compute", *(s.make_slice_wait(rank, peer, index) for peer in s.peers(rank) if s.pieces[peer]))
            parts = []
            for shard in (shard for shard in s.ranks if s.pieces[shard]):
                rows = s.problem.shards[shard]
                a = s.region("a", rank, cols=cols) if shard == rank else s.region("a_full", rank, rows, cols)
                parts.append(Part(a, s.region("sums", rank, rows)))
            s.add_gemm(rank, parts, (cols, None), accumulate=index > 0)
        s.add_steps(rank, "compute", Reduce((Sum((s.region("sums", rank),), s.region("out", rank)),)))
    return s.finish()


def gated(request: Request, *, blocks: bool) -> Schedule:
    """Build one GEMM whose tiles wait for their chunk, in order of arrival, the own shard first.

    blocks: communication blocks bring the chunks. Otherwise copy engines do.
    """
    s = _Gather(request)
    s.push_all(lane="blocks" if blocks else None, stage_own=s.quantises)
    for rank in s.ranks:
        s.add_gated_gemm(rank, s.sort_by_chunk(s.peers(rank)))
    return s.finish()


def gated_2d(request: Request) -> Schedule:
    """Build one GEMM whose tiles wait for the columns of their rows, one slice of K after the other. The own shard comes first.

    Every tile can start with the first slice. SMs store the slices, because they are rectangles of many short rows, which are
    too small for copy engines.
    """
    s = _Gather(request)
    slices = aligned_slices(s.problem.k, s.chunks)
    for rank in s.ranks:
        s.push_columns(rank, slices, lane="blocks")
        parts = s.own_shard(rank)
        for peer in (p for p in s.peers(rank) if s.pieces[p]):
            first, *later = (s.make_slice_wait(rank, peer, index) for index in range(len(slices)))
            inner = tuple((low, wait) for (low, _), wait in zip(slices[1:], later, strict=True))
            rows = s.problem.shards[peer]
            parts.append(Part(s.region("a_full", rank, rows), s.region("out", rank, rows), (first,), inner=inner))
        s.add_gemm(rank, parts)
    return s.finish()


def ring(request: Request) -> Schedule:
    """Build a ring in which arrivals trigger copies: each arrived chunk is forwarded to the next rank, and gates tiles of one
    GEMM.

    This is T3's mapping of all-gather (T3, tracker threshold 1): each rank sends only to its successor.
    """
    s = _Gather(request)
    size = s.world_size
    for rank in s.ranks:
        successor = (rank + 1) % size
        order = [p for hop in range(size) for p in s.pieces[(rank - hop) % size]]
        sent = [p for p in order if p.shard != successor]
        for piece in sent:
            if piece.shard != rank:
                s.add_steps(rank, "copy", Wait(s.arrived(rank, piece)))
            if piece is sent[0]:
                s.add_steps(rank, "copy", s.make_free_wait(rank, successor))
            src = s.input_region(piece) if piece.shard == rank else s.landing_region(rank, piece)
            s.add_steps(rank, "copy", Copy(src, s.landing_region(successor, piece)), Signal(s.arrived(successor, piece)))
        s.add_gated_gemm(rank, [p for p in order if p.shard != rank])
        if any(p.shard != rank for p in sent):
            s.add_steps(rank, "copy", Signal(Flag("sent", rank)))
            s.add_steps(rank, "compute", Wait(Flag("sent", rank)))
    # The predecessor waits for `free` if it has anything to send.
    return s.finish(senders=lambda rank: [(rank - 1) % size] if any(s.pieces[p] for p in s.ranks if p != rank) else [])


def sliced(request: Request) -> Schedule:
    """Gather within a node as `gated` does. Between nodes, each chunk goes to one rank of every other node, which forwards it
    within its node. One GEMM multiplies all chunks of other nodes that arrive in one step.

    The tiles of the gated GEMM must not wait for other nodes: waiting tiles would hold the SMs that NCCL needs to receive.
    """
    if not request.problem.nodes:
        return gated(request, blocks=False)
    s = _Gather(request)
    s.push_all()
    for rank in s.ranks:
        s.add_gated_gemm(rank, s.sort_by_chunk(s.peers(rank)))
        for index in range(s.chunks):
            taken, pieces = s.select_chunk(index, s.carried(rank)), s.select_chunk(index, s.ranks_on_other_nodes(rank))
            _exchange_between_nodes(s, rank, index, taken)
            if taken:
                s.add_steps(rank, "compute", Wait(Flag("landed", rank, index)))
            s.add_steps(rank, "compute", *(Wait(s.arrived(rank, p)) for p in pieces if p not in taken))
            s.add_gemm(rank, [s.part(rank, p) for p in pieces])
    sends = [any(s.pieces[shard] for shard in (rank, *s.carried(rank))) for rank in s.ranks]
    return s.finish(senders=lambda rank: [peer for peer in s.peers(rank) if sends[peer]])


def _exchange_between_nodes(s: _Gather, rank: int, index: int, taken: Sequence[Piece]) -> None:
    """Send chunk `index` of the own shard to the other nodes, and forward within the node what they send."""
    sends = [
        Send(s.input_region(p), s.carrier(node, rank)) for p in s.select_chunk(index, [rank]) for node in s.other_nodes(rank)
    ]
    receives = [Receive(s.landing_region(rank, piece), piece.shard) for piece in taken]
    landed = Flag("landed", rank, index)
    s.add_send_receive(rank, sends, receives, after=[], then=landed)
    for lane in dict.fromkeys(s.copy_lane(peer) for peer in s.peers(rank) if taken):
        s.add_steps(rank, lane, Wait(landed))
    first = next((s.pieces[shard][0] for shard in s.carried(rank) if s.pieces[shard]), None)
    for piece in taken:
        for peer in s.peers(rank, step=-1):
            s.wait_for_free(rank, [peer] if piece == first and not s.pieces[rank] else [])
            here = s.landing_region(rank, piece)
            s.copy_to_peers(rank, [Store(here, s.landing_region(peer, piece), s.arrived(peer, piece))])
