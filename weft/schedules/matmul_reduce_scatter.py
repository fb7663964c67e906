"""Builders for matmul_reduce_scatter: out_mN = reduce_scatter(a_Mk @ b_kN).

Buffers of rank r
    a        input      M x k_r
    b        input      k_r x N
    partial  local      M x N       r's product; symmetric if its owner reads it in place (flag_gated); without r's shard in
                                    track_and_trigger; direct_store has none
    recv     symmetric  p*m_r x N   the products of each of the p other ranks for r's shard (m_r rows), in the order of ranks
    handed   symmetric              node_slices: the products of each peer of the node for the rows that r sends to other nodes
    mine     local                  node_slices: the node's sum of these rows
    theirs   local      q*m_r x N   node_slices: the sums of each of the q other nodes for r's shard
    out      output     m_r x N     the sum over ranks, in the order of ranks, in float32, rounded once
    x        input      M x N       where the gradients of weights are asked for; m_r x N if ranks have shards of it
    x_full   symmetric  M x N       x of all ranks, if they have shards of it
    gradients  output   N x k_r     x^T @ a, stored by columns, as the weights are

Flags of rank r (who signals ~> who waits)
    made[i]@r      r's compute lane ~> r's copy lane: piece i of the product is in `partial`
    arrived[i]@r   a peer's copy lane, or its GEMM ~> r's reduction: the peer's piece i is in recv (or in its partial)
    turn[i]@r      a peer's copy lane ~> r's copy lane: the copy to the owner of piece i that comes before r's has ended
    handed[i]@r, summed[i]@r, landed[i]@r   node_slices: as arrived, as made, and r's network lane ~> r's compute lane
    x_here[p]@r    p's copy lane ~> r's compute lane: the shard of p is in x_full
    x_free[p]@r    p's compute lane ~> r's copy lane: p has multiplied the x_full of the call before
    free[p]@r      p's compute lane ~> r's steps that write for p: p has read its peers' pieces for the last time in this call.
                   Where copies take turns, only r = p - 1 gets it. All other copies to p come after r's first copy

    rank r, compute               rank r, copy                     rank p, the owner
    gemm rows of p
    signal made  --------------->  wait made, then free[p] of the call before (first sender) or turn (others)
    gemm other rows                copy partial -> recv of p  ~~~>  rows land
    ...                            signal turn of the next rank that copies to p
                                   signal arrived  ~~~~~~~~~~~~~~>  reduce waits arrived of all ranks
    reduce own shard                                                signal free[p]@r ~> (next call)

Copies to one owner take turns: the rank before the owner sends first, then the rank before that one, and so on. Without turns,
a copy that is late shares the owner's port with the next rank's copy. Then both are late, and after some steps all ranks send
to the same owner: on 8 x H200, copies of 8 MiB took up to 124 us instead of 24. With turns, only the first sender waits for
`free`. Turns cost two flag operations a copy, and a rank that is late delays the senders after it. With fan_out there are no
turns, because each pair of ranks has a link then.

The gradients of weights need no exchange of their own, and their product needs nothing of this call but x. So it comes after
everything that peers wait for and before everything that waits for peers: the exchange runs during it. In
uniform_fused_1d with one chunk the whole exchange does, so that no other product is cut. A shard of x is sent first, during the
product a @ b.

In track_and_trigger and direct_store the owner's GEMM also reduces: the tiles of its own shard come last, and add the peers'
rows to their product before they round it. They wait for `arrived` after their multiplication (late gates).

Bad interleaving: r is a call ahead, and writes recv of p while p still sums the old rows. `free` prevents this. Within r, the
copies that read `partial` end before it is written again, because a call starts after all lanes of the rank have ended the
previous one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from weft.core.problem import Span1D, split
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
    Store,
    Sum,
    Wait,
)
from weft.schedules.builder import Builder, Piece, Request

ONE_KERNEL_BYTES = 16 << 20
"""If a rank's product has at most this many bytes, sequential_stores exchanges it by one kernel, which needs memory for three
copies of the arrived rows."""


class ScatterBuilder(Builder):
    """The buffers and flags of this operator, and steps that several schedules share.

    For matmul_all_reduce, the result of the reduce-scatter, including the addends of its rows, is in `mine`, and NCCL gathers
    it. Or it is in `out`, and copies gather it.

    copies: `copy_in_turn` writes all that peers receive. If an owner has one port for several peers, these copies take turns.
    gather_by: what gathers x, if ranks have shards of it.
    sums_in: the buffer that has this rank's rows of a matmul_all_reduce.
    """

    def __init__(
        self,
        request: Request,
        *,
        partial: Literal["local", "symmetric"] | None = "local",
        recv: bool = True,
        copies: bool = False,
        gather_by: Literal["copies", "nccl"] = "copies",
        sums_in: Literal["mine", "out"] = "mine",
    ) -> None:
        super().__init__(request)
        self.gather_by = gather_by
        self._with_gradients = set[int]()
        self.take_turns = copies and request.shared_port
        m, n = self.problem.m, self.problem.n
        self.divide_by = self.world_size if self.problem.reduce_op == "avg" else 1
        inner = [self.problem.inner(r) for r in self.ranks]
        self.recv = recv and partial != "symmetric"
        self.gathers = self.problem.op == "matmul_all_reduce"
        self.out_rows = [self.problem.out_rows(r) for r in self.ranks]
        self.add_buffer("a", "input", m, inner, operand="a")
        self.add_buffer("b", "input", inner, n, operand="b")
        if partial:
            self.add_buffer("partial", partial, m, n)
        if self.recv:
            self.add_buffer("recv", "symmetric", [(self.world_size - 1) * rows for rows in self.shard_rows], n)
        self.sums_in = sums_in if self.gathers else "out"
        if self.gathers:
            if sums_in == "mine":
                self.add_buffer("mine", "local", self.shard_rows, n)
            for addend in self.problem.addends:
                self.add_buffer(addend, "input", self.out_rows if addend == "residual" else 1, n)
        self.add_buffer("out", "output", self.out_rows, n)
        if self.problem.weight_gradients:
            sharded = self.problem.weight_gradients == "shard"
            self.add_buffer("x", "input", self.shard_rows if sharded else m, n)
            if sharded:
                self.add_buffer("x_full", "symmetric", m, n)
            self.add_buffer("gradients", "output", n, inner, by_columns=True)
            for rank in self.ranks if sharded else ():
                self._gather_x(rank)

    def _gather_x(self, rank: int) -> None:
        """Add what sends this rank's shard of x to its peers. It comes before all other steps of its lane."""
        own = self.region("x", rank)
        if self.gather_by == "nccl":
            self.add_steps(rank, "compute", Collective("all_gather", own, self.region("x_full", rank)))
            return
        for peer in self.peers(rank) if own.size else ():
            there, free = self.region("x_full", peer, self.problem.shards[rank]), Flag("x_free", rank, peer)
            lane = self.copy_lane(peer)
            self.add_steps(rank, lane, Wait(free, on_previous_call=True), Copy(own, there), Signal(Flag("x_here", peer, rank)))

    def add_weight_gradients(self, rank: int) -> None:
        """Add the product of the weights' gradients to the compute lane, if the problem has them. It comes last by default."""
        problem = self.problem
        if not problem.weight_gradients or rank in self._with_gradients:
            return
        self._with_gradients.add(rank)
        copied = problem.weight_gradients == "shard" and self.gather_by == "copies"
        senders = [peer for peer in self.peers(rank) if self.region("x", peer).size] if copied else []
        if copied and (own := self.region("x", rank)).size:
            self.add_steps(rank, "compute", Copy(own, self.region("x_full", rank, problem.shards[rank])))
        self.add_steps(rank, "compute", *(Wait(Flag("x_here", rank, peer)) for peer in senders))
        x = self.region("x_full" if problem.weight_gradients == "shard" else "x", rank)
        if (out := self.region("gradients", rank)).size:  # x^T @ a: the first factor of this product is x, and a the second
            self.add_steps(rank, "compute", Gemm(self.region("a", rank), (Part(x, out),), transposed=True))
        self.add_steps(rank, "compute", *(Signal(Flag("x_free", peer, rank)) for peer in senders))

    def slot(self, src: int, shard: int, rows: Span1D, cols: Span1D | None = None) -> Region:
        """Return the region of the owner's recv where rank `src` stores global rows of `shard`."""
        low, high = self.problem.shards[shard]
        base = (src - (src > shard)) * (high - low) - low
        return self.region("recv", shard, (base + rows[0], base + rows[1]), cols)

    def own_out(self, rank: int, rows: Span1D, cols: Span1D | None = None) -> Region:
        whole = self.gathers and self.sums_in == "out" and not self.problem.residual_sharded
        return self.region(self.sums_in, rank, rows if whole else self.in_shard(rank, rows), cols)

    def in_shard(self, rank: int, rows: Span1D) -> Span1D:
        """Return global rows of a rank's shard, counted from its first."""
        base = self.problem.shards[rank][0]
        return rows[0] - base, rows[1] - base

    def part(self, rank: int, rows: Span1D, count: Flag | None = None) -> Part:
        return Part(self.region("a", rank, rows), self.region("partial", rank, rows), count=count)

    def own_shard(self, rank: int) -> list[Part]:
        """Return the rows that stay on the rank as one part, or no part if there are none."""
        rows = self.problem.shards[rank]
        return [self.part(rank, rows)] if rows[1] > rows[0] else []

    def by_step(self, rank: int) -> list[Piece]:
        """Return the pieces to send, in order of production: chunk by chunk, with peers rotated by rank."""
        return self.sort_by_chunk(self.peers(rank))

    def arrived(self, owner: int, src: int, index: int) -> Flag:
        return self.flag("arrived", owner, src, index)

    def made(self, rank: int, piece: Piece) -> Flag:
        return self.flag("made", rank, piece.shard, piece.index)

    def make_store(self, rank: int, shard: int, index: int, rows: Span1D, cols: Span1D | None = None) -> Store:
        """Return the store of a finished piece at its owner."""
        there = self.slot(rank, shard, rows, cols)
        return Store(self.region("partial", rank, rows, cols), there, self.arrived(shard, rank, index))

    def part_stored_at_owner(self, rank: int, piece: Piece) -> Part:
        """Return the part of a piece whose tiles are stored at its owner."""
        out, gate = self.slot(rank, piece.shard, piece.rows), self.make_free_wait(rank, piece.shard)
        return Part(self.region("a", rank, piece.rows), out, (gate,), self.arrived(piece.shard, rank, piece.index))

    def copy_in_turn(self, rank: int, store: Store, index: int, chunks: int) -> None:
        """Add the copy of chunk `index` of `chunks` to its owner, after the copy of the sender before.

        The senders to an owner are the rank before it, then the rank before that one, and so on, chunk by chunk. Each but the
        first waits for its flag `turn`, and the first waits for `free`. Without turns, each sender waits for `free`.
        """
        owner, lane = store.dst.rank, self.copy_lane(store.dst.rank)
        senders = self.peers(owner, step=-1)
        turn = index * len(senders) + senders.index(rank)
        take_turns = self.take_turns and len(senders) > 1
        if turn == 0 or (index == 0 and not take_turns):
            self.add_steps(rank, lane, self.make_free_wait(rank, owner))
        elif take_turns:
            self.add_steps(rank, lane, Wait(self.flag("turn", rank, owner, index)))
        self.add_steps(rank, lane, Copy(store.src, store.dst))
        if take_turns and turn + 1 < chunks * len(senders):
            chunk, at = divmod(turn + 1, len(senders))
            self.add_steps(rank, lane, Signal(self.flag("turn", senders[at], owner, chunk)))
        self.add_steps(rank, lane, Signal(store.count))

    def signal_read(self, rank: int) -> None:
        """Add signals that the rank has read the pieces of all peers: to the first sender, or to all if there are no turns."""
        self.signal_free(rank, self.peers(rank, step=-1)[:1] if self.take_turns else self.peers(rank))

    def copy_pieces_to_owners(self, rank: int, *, made: bool) -> None:
        """Add the copies of every piece to its owner, in order of production.

        made: wait for the flag of each piece; otherwise for the flag of its step.
        """
        for index in range(self.chunks):
            self.copy_step_to_owners(rank, index, made=made)

    def copy_step_to_owners(self, rank: int, index: int, *, made: bool) -> None:
        """Add the copies of chunk `index` of each peer's shard to its owner. made: as for copy_pieces_to_owners."""
        for number, piece in enumerate(self.select_chunk(index, self.peers(rank))):
            lane = self.copy_lane(piece.shard)
            if made or number == 0 or self.fan_out:
                self.add_steps(rank, lane, Wait(self.made(rank, piece) if made else Flag("made", rank, index)))
            store = self.make_store(rank, piece.shard, index, piece.rows)
            self.copy_in_turn(rank, store, index, len(self.pieces[piece.shard]))

    def make_sum(self, rank: int, index: int, rows: Span1D, cols: Span1D | None = None) -> Sum:
        """Return the sum over ranks of one piece of the result. It waits until the pieces of all ranks have arrived."""
        here = [src == rank or not self.recv for src in self.ranks]
        srcs = [
            self.region("partial", src, rows, cols) if here[src] else self.slot(src, rank, rows, cols) for src in self.ranks
        ]
        if self.gathers:
            of_residual = self.in_shard(rank, rows) if self.problem.residual_sharded else rows
            addends = ((name, of_residual if name == "residual" else None) for name in self.problem.addends)
            srcs += (self.region(name, rank, some, cols) for name, some in addends)
        return Sum(tuple(srcs), self.own_out(rank, rows, cols), self.make_arrival_waits(rank, index))

    def make_arrival_waits(self, rank: int, index: int) -> tuple[Wait, ...]:
        return tuple(Wait(self.arrived(rank, peer, index)) for peer in self.peers(rank))

    def add_reduce(self, rank: int, sums: Iterable[Sum]) -> None:
        """Add the sums of the pieces that arrived, and signals that they have been read."""
        if sums := tuple(sums):
            self.add_steps(rank, "compute", Reduce(sums, self.divide_by))
            self.signal_read(rank)

    def add_reduce_of_pieces(self, rank: int) -> None:
        self.add_reduce(rank, [self.make_sum(rank, p.index, p.rows) for p in self.pieces[rank]])

    def add_gemm_with_sums(self, rank: int, remote: Iterable[Part]) -> None:
        """Add one GEMM: the parts that peers own, then the own shard, whose tiles add what has arrived from peers.

        The gradients of weights come between the two, which are then two GEMMs.
        """
        own = []
        for piece in self.pieces[rank]:
            adds = tuple(self.slot(src, rank, piece.rows) for src in self.ranks if src != rank)
            a, out = self.region("a", rank, piece.rows), self.own_out(rank, piece.rows)
            own.append(Part(a, out, self.make_arrival_waits(rank, piece.index), adds=adds))
        if self.problem.weight_gradients:
            self.add_gemm(rank, remote)
            self.add_weight_gradients(rank)
            remote = ()
        self.add_gemm(rank, (*remote, *own), divide_by=self.divide_by)
        if own:
            self.signal_read(rank)

    def add_fused_collective(self, rank: int, factors: tuple[Region, ...]) -> None:
        """Add the kernel that sums all ranks' products of the own shard."""
        out = self.region("out", rank)
        self.add_steps(rank, "compute", FusedCollective("reduce_scatter", factors, out, divide_by=self.divide_by))

    def build_schedule(self) -> Schedule:
        for rank in self.ranks:
            self.add_weight_gradients(rank)
        return super().build_schedule()

    def finish(self) -> Schedule:
        """Gather the sums if all ranks need them, and build the schedule."""
        for rank in self.ranks if self.gathers else ():
            self.add_steps(rank, "compute", Collective("all_gather", self.region("mine", rank), self.region("out", rank)))
        return self.build_schedule()


def sequential(request: Request) -> Schedule:
    """Run one GEMM, then NCCL's reduce-scatter."""
    s = ScatterBuilder(request, partial="symmetric", gather_by="nccl")
    for rank in s.ranks:
        s.add_gemm(rank, [Part(s.region("a", rank), s.region("partial", rank))])
        s.add_steps(
            rank, "compute", Collective("reduce_scatter", s.region("partial", rank), s.region("out", rank), s.divide_by)
        )
    return s.build_schedule()


def one_shot(request: Request) -> Schedule:
    """Run one kernel, in which every rank stores its partial rows at their owners, which sum them."""
    s = ScatterBuilder(request, partial=None, recv=False)
    for rank in s.ranks_with_work:
        s.add_fused_collective(rank, (s.region("a", rank), s.region("b", rank)))
    return s.build_schedule()


def sequential_stores(request: Request) -> Schedule:
    """Run one cuBLAS GEMM. Its rows are then stored at their owners, which sum them. One kernel exchanges few bytes."""
    few = request.problem.m * request.problem.n * request.problem.itemsize <= ONE_KERNEL_BYTES
    s = ScatterBuilder(request, recv=not few)
    for rank in s.ranks_with_work:
        s.add_gemm(rank, [Part(s.region("a", rank), s.region("partial", rank))])
        if few:
            s.add_fused_collective(rank, (s.region("partial", rank),))
            continue
        pieces = s.by_step(rank)
        s.wait_for_free(rank, [piece.shard for piece in pieces], "compute")
        s.copy_to_peers(rank, [s.make_store(rank, piece.shard, 0, piece.rows) for piece in pieces], "compute")
        s.add_weight_gradients(rank)
        s.add_reduce_of_pieces(rank)
    return s.build_schedule()


def unfused(request: Request) -> Schedule:
    """Run a GEMM for each piece, which is then sent. The own shard comes last, as one GEMM. With chunks=1 a piece is a
    shard."""
    s = ScatterBuilder(request, copies=True)
    for rank in s.ranks:
        for piece in s.by_step(rank):
            s.add_gemm(rank, [s.part(rank, piece.rows)])
            s.add_steps(rank, "compute", Signal(s.made(rank, piece)))
        s.copy_pieces_to_owners(rank, made=True)
        s.add_gemm(rank, s.own_shard(rank))
        s.add_weight_gradients(rank)
        s.add_reduce_of_pieces(rank)
    return s.finish()


def fused(request: Request, *, uniform: bool) -> Schedule:
    """Compute all pieces of a step by one GEMM. uniform: the own shard is cut like the others, and each step has a piece of
    it."""
    s = ScatterBuilder(request, copies=True)
    for rank in s.ranks:
        for index in range(s.chunks):
            step = s.select_chunk(index, [shard for shard in s.ranks if uniform or shard != rank])
            s.add_gemm(rank, [s.part(rank, piece.rows) for piece in step])
            if any(p.shard != rank for p in step):
                s.add_steps(rank, "compute", Signal(Flag("made", rank, index)))
        s.copy_pieces_to_owners(rank, made=False)
        if not uniform:
            s.add_gemm(rank, s.own_shard(rank))
        s.add_weight_gradients(rank)
        s.add_reduce_of_pieces(rank)
    return s.build_schedule()


def fused_2d(request: Request) -> Schedule:
    """Cut columns into chunks. Every step computes all rows of a slice of columns, and sends strided rectangles."""
    s = ScatterBuilder(request, copies=True)
    slices = [c for c in split(s.problem.n, s.chunks) if c[1] > c[0]]
    for rank in s.ranks:
        peers = [p for p in s.peers(rank) if s.pieces[p]]
        for index, cols in enumerate(slices):
            whole = [Part(s.region("a", rank), s.region("partial", rank, cols=cols))]
            s.add_gemm(rank, whole if s.problem.m else [], (None, cols))
            made = Flag("made", rank, index)
            if peers:
                s.add_steps(rank, "compute", Signal(made))
            for peer in peers:
                if peer == peers[0] or s.fan_out:
                    s.add_steps(rank, s.copy_lane(peer), Wait(made))
                store = s.make_store(rank, peer, index, s.problem.shards[peer], cols)
                s.copy_in_turn(rank, store, index, len(slices))
        rows = s.problem.shards[rank]
        s.add_weight_gradients(rank)
        s.add_reduce(rank, [s.make_sum(rank, i, rows, cols) for i, cols in enumerate(slices)] if s.pieces[rank] else [])
    return s.build_schedule()


def counted(request: Request) -> Schedule:
    """Track and trigger: one GEMM counts finished tiles by piece, in an order rotated by rank. A full count starts the copy.

    Its last tiles, those of the own shard, add the arrived rows.
    """
    s = ScatterBuilder(request, copies=True)
    for rank in s.ranks:
        s.add_gemm_with_sums(rank, [s.part(rank, piece.rows, s.made(rank, piece)) for piece in s.by_step(rank)])
        s.copy_pieces_to_owners(rank, made=True)
    return s.build_schedule()


def stored(request: Request) -> Schedule:
    """Run one GEMM that raises flags on the owners, remote pieces first. It stores tiles directly in the owner's recv.

    The last tiles of the owner's GEMM, those of its own shard, add them.
    """
    s = ScatterBuilder(request, partial=None)
    for rank in s.ranks:
        s.add_gemm_with_sums(rank, [s.part_stored_at_owner(rank, piece) for piece in s.by_step(rank)])
    return s.build_schedule()


def pulled(request: Request) -> Schedule:
    """Run as `stored` does, but keep tiles in `partial`. The owner's reduction, whose tiles wait for the flags, loads them from
    there."""
    s = ScatterBuilder(request, partial="symmetric")
    for rank in s.ranks:
        parts = []
        for piece in s.by_step(rank):
            here = s.region("partial", rank, piece.rows)
            gates, arrived = (s.make_free_wait(rank, piece.shard),), s.arrived(piece.shard, rank, piece.index)
            parts.append(Part(s.region("a", rank, piece.rows), here, gates, arrived))
        s.add_gemm(rank, parts + s.own_shard(rank))
        s.add_weight_gradients(rank)
        s.add_reduce_of_pieces(rank)
    return s.build_schedule()


class _Slices(ScatterBuilder):
    """Builds node_slices: of the rows that another node owns, one rank of each node sums the node's products, and sends the
    sum."""

    def __init__(self, request: Request) -> None:
        super().__init__(request, gather_by="nccl")
        heights = [sum(self.shard_rows[q] for q in self.carried(r)) for r in self.ranks]
        self.add_buffer("handed", "symmetric", [len(self.peers(r)) * heights[r] for r in self.ranks], self.problem.n)
        self.add_buffer("mine", "local", heights, self.problem.n)
        self.add_buffer("theirs", "local", [len(self.other_nodes(r)) * self.shard_rows[r] for r in self.ranks], self.problem.n)

    def mine(self, rank: int, piece: Piece, name: str = "mine", times: int = 0) -> Region:
        """Return the region of the node's sum of a piece that `rank` carries."""
        carried = self.carried(rank)
        above = sum(self.shard_rows[q] for q in carried[: carried.index(piece.shard)])
        base = times * self._buffers["mine"].rows[rank] + above - self.problem.shards[piece.shard][0]
        return self.region(name, rank, (base + piece.rows[0], base + piece.rows[1]))

    def handed(self, src: int, carrier: int, piece: Piece) -> Region:
        """Return the region where `src` stores its product of the piece on the rank that carries it."""
        return self.mine(carrier, piece, "handed", sorted(self.peers(carrier)).index(src))

    def theirs(self, rank: int, node: int, piece: Piece) -> Region:
        """Return the region of the sum that another node has computed of an own piece."""
        base = self.other_nodes(rank).index(node) * self.shard_rows[rank] - self.problem.shards[rank][0]
        return self.region("theirs", rank, (base + piece.rows[0], base + piece.rows[1]))

    def handed_flag(self, src: int, carrier: int, piece: Piece) -> Flag:
        return self.flag("handed", carrier, src * self.world_size + piece.shard, piece.index)

    def part_for_other_node(self, rank: int, piece: Piece) -> Part:
        """Return the part of a piece for another node. It is stored at the rank of this node that carries the piece."""
        carrier = self.carrier(self.problem.node_of[rank], piece.shard)
        if carrier == rank:
            return self.part(rank, piece.rows)
        a, handed = self.region("a", rank, piece.rows), self.handed(rank, carrier, piece)
        return Part(a, handed, (self.make_free_wait(rank, carrier),), self.handed_flag(rank, carrier, piece))

    def regions_of_node(self, rank: int, piece: Piece) -> tuple[Region, ...]:
        """Return the products of a piece by all ranks of the node, in their order. `rank` owns or carries the piece."""
        found = {src: self.handed(src, rank, piece) for src in self.peers(rank) if piece.shard != rank}
        found |= {src: self.slot(src, rank, piece.rows) for src in self.peers(rank) if piece.shard == rank}
        found[rank] = self.region("partial", rank, piece.rows)
        return tuple(found[src] for src in self.ranks_on_node(rank))

    def exchange_between_nodes(self, rank: int, index: int) -> None:
        """Add the sums of chunk `index` of the rows that the rank sends to other nodes, and the messages that exchange them."""
        taken, summed = self.select_chunk(index, self.carried(rank)), Flag("summed", rank, index)
        for piece in taken:
            self.add_steps(rank, "compute", *(Wait(self.handed_flag(src, rank, piece)) for src in self.peers(rank)))
            self.add_steps(rank, "compute", Reduce((Sum(self.regions_of_node(rank, piece), self.mine(rank, piece)),)))
        if taken:
            self.add_steps(rank, "compute", Signal(summed))
        sends = [Send(self.mine(rank, piece), piece.shard) for piece in taken]
        own = [(piece, node) for piece in self.select_chunk(index, [rank]) for node in self.other_nodes(rank)]
        receives = [Receive(self.theirs(rank, node, piece), self.carrier(node, rank)) for piece, node in own]
        self.add_send_receive(rank, sends, receives, after=[summed] if taken else [], then=Flag("landed", rank, index))


def sliced(request: Request) -> Schedule:
    """Compute the rows of other nodes first. They are summed within the node, and sent slice by slice.

    The rows of the own node follow, as in `stored`.
    """
    if not request.problem.nodes:
        return stored(request)
    s = _Slices(request)
    for rank in s.ranks:
        for index in range(s.chunks):
            s.add_gemm(
                rank, [s.part_for_other_node(rank, piece) for piece in s.select_chunk(index, s.ranks_on_other_nodes(rank))]
            )
        for index in range(s.chunks):
            s.exchange_between_nodes(rank, index)
        s.add_gemm(rank, [s.part_stored_at_owner(rank, piece) for piece in s.by_step(rank)] + s.own_shard(rank))
        s.add_weight_gradients(rank)
        for piece in s.pieces[rank]:
            srcs = (*s.regions_of_node(rank, piece), *(s.theirs(rank, node, piece) for node in s.other_nodes(rank)))
            s.add_steps(rank, "compute", Wait(Flag("landed", rank, piece.index)), *s.make_arrival_waits(rank, piece.index))
            s.add_steps(rank, "compute", Reduce((Sum(srcs, s.own_out(rank, piece.rows)),), s.divide_by))
        s.signal_free(rank, s.peers(rank))
    return s.build_schedule()
