"""Builders for matmul_all_reduce: out_MN = all_reduce(a_Mk @ b_kN) + bias + residual.

Buffers of rank r
    a         input      M x k_r
    b         input      k_r x N
    bias      input      1 x N       if the problem adds one; added to every row
    residual  input      M x N       if the problem adds one; both are the same on every rank, and added once
    partial   local      M x N       r's product
    recv      symmetric              one_shot: p*M x N, the products of each of the p other ranks, in the order of ranks;
                                     two_shot: p*M x n_r of the columns that r owns; token_split: p*m_r x N of its rows
    summed    symmetric  M x N       two_shot: the columns that others own, as their owners summed them
    landing   symmetric  M x N       token_split: the rows that others own, as their owners summed them
    mine      local      M x n_r     node_slices: the sum over the node of the columns that r owns within it
    theirs    local      q*M x n_r   node_slices: what each of the q other nodes has summed of these columns
    norm_weight  input   1 x N       if the problem has a norm
    normed    output     M x N       then: rms_norm(out) * norm_weight
    own_normed  local    m_r x N     sequential with a sharded residual: the norm of r's rows; `mine` is then their sum, m_r x N
    out       output     M x N       the sum over ranks, in the order of ranks, and the addends, in float32, rounded once

With a sharded residual, residual and out have the m_r rows of r alone.

Flags of rank r (who signals ~> who waits)
    arrived[p]@r   p ~> r: p's partial result is in recv        free[p]@r   p ~> r: p has read r's data in p's recv
    ready[p]@r     p ~> r: p's columns are in summed              read[p]@r   p ~> r: p has read r's data in p's summed

    made[i]@r      r ~> r's network lane: rows i are in `mine`    landed[i]@r r's network lane ~> r: and in `theirs`

    token_split, besides those of matmul_reduce_scatter
    summed[i]@r    r ~> r's copy lane: chunk i of r's own rows is summed; with a sharded residual, normalised, too
    landed[i]@r    a peer's copy lane ~> r's lane copy.out: a piece of the peer's rows is in landing
    here[i]@r      r's lane copy.out ~> r: and in `out`, where there is a norm of it

    one_shot: one hop                                   two_shot: two hops, fewer bytes
    rank r                      rank p                  rank r                     rank o, the owner of some columns
    gemm -> partial                                     gemm -> partial
    partial -> recv of p   ~~>  rows land               its columns -> recv of o ~~>  rows land
    signal arrived[r]      ~~>  wait arrived            signal arrived[r]        ~~>  wait arrived of all
                                reduce all -> out       wait ready[o]                 reduce -> out
                                signal free[p]@r        summed -> out            <~~  out -> summed of r, signal ready[o]

Results have the same bits on all ranks. In one_shot every rank adds in the same order; in two_shot one rank adds.

Bad interleaving: r is a call ahead, and writes recv of p while p still sums the old rows. `free` prevents this; for summed,
`read` does. In token_split, nothing needs to signal that p has read its landing: r writes there once p's products of this call
have arrived, so p has ended the call before.

    token_split, on rank r: what is sent of a chunk travels while other rows are multiplied

    compute    peers' rows of 0 | own rows of 0  | sum 0 | peers' rows of 1         | own rows of 1  | sum 1 | norm 0 | ...
    copy                          products of 0          own sum of 0 to all ranks   products of 1
                                  to their owners                                    to their owners
    copy.out                                                       the peers' sums of 0, from landing to out

If the device has the kernel, one persistent kernel runs all of it, or all but a cuBLAS GEMM (Lane.fused;
weft.kernels.all_reduce).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from weft.core.problem import Span1D, split
from weft.core.schedule import (
    Collective,
    Copy,
    Flag,
    FusedCollective,
    Norm,
    Part,
    Push,
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
from weft.schedules.matmul_reduce_scatter import ScatterBuilder

ONE_HOP_BYTES = 3 << 20
"""Partial results of at most this many bytes per rank are sent to all ranks by sequential_stores, larger ones to their owners.
On 4 x H200 one hop is 0.3 us faster at 3 MiB, and both take the same time at 6 MiB."""


class _Everywhere(Builder):
    """The buffers of this operator, and steps that several schedules share."""

    def __init__(self, request: Request, *, partial: bool = False) -> None:
        super().__init__(request)
        m, n = self.problem.m, self.problem.n
        inner = [self.problem.inner(r) for r in self.ranks]
        self.add_buffer("a", "input", m, inner, operand="a")
        self.add_buffer("b", "input", inner, n, operand="b")
        for addend in self.problem.addends:
            self.add_buffer(addend, "input", m if addend == "residual" else 1, n)
        self.add_buffer("out", "output", m, n)
        if partial:
            self.add_buffer("partial", "local", m, n)

    def multiply(self, rank: int, into: str, rows: Span1D | None = None) -> None:
        self.add_gemm(rank, [Part(self.region("a", rank, rows), self.region(into, rank, rows))])

    def addends(self, rank: int, rows: Span1D | None = None, cols: Span1D | None = None) -> tuple[Region, ...]:
        names = self.problem.addends
        return tuple(self.region(name, rank, rows if name == "residual" else None, cols) for name in names)

    def add_fused_collective(self, rank: int, factors: tuple[str, ...], *, hops: int) -> None:
        """Add the kernel that sums over ranks. factors: the two factors of the product, or a buffer that has the product."""
        found = tuple(self.region(factor, rank) for factor in factors)
        norm, out = self.take_fused_norm(rank, hops), self.region("out", rank)
        self.add_steps(rank, "compute", FusedCollective("all_reduce", found, out, hops, self.addends(rank), norm=norm))


def sequential(request: Request) -> Schedule:
    """Run one GEMM, then NCCL's all-reduce, in place. A separate sum adds the addends after it, and rounds once more."""
    if request.problem.residual_sharded:
        return _sequential_shards(request)
    s = _Everywhere(request, partial=bool(request.problem.addends))
    into = "partial" if s.problem.addends else "out"
    for rank in s.ranks:
        if rank in s.ranks_with_work:
            s.multiply(rank, into)
        s.add_steps(rank, "compute", Collective("all_reduce", s.region(into, rank), s.region(into, rank)))
        if s.problem.addends and rank in s.ranks_with_work:
            srcs = (s.region("partial", rank), *s.addends(rank))
            s.add_steps(rank, "compute", Reduce((Sum(srcs, s.region("out", rank)),)))
    return s.build_schedule()


def _sequential_shards(request: Request) -> Schedule:
    """Run one GEMM, NCCL's reduce-scatter, a sum and a norm of the own rows, and NCCL's all-gather of the norm."""
    s = ScatterBuilder(request, sums_in="out", recv=False)
    own, n = s.shard_rows, s.problem.n
    s.add_buffer("mine", "local", own, n)
    s.add_buffer("own_normed", "local", own, n, operand="norm")
    for rank in s.ranks_with_work:
        partial, mine, out, normed = (s.region(name, rank) for name in ("partial", "mine", "out", "own_normed"))
        s.add_gemm(rank, [s.part(rank, (0, s.problem.m))])
        into = mine if s.problem.addends else out
        s.add_steps(rank, "compute", Collective("reduce_scatter", partial, into))
        if s.problem.addends and own[rank]:
            s.add_steps(rank, "compute", Reduce((Sum((mine, *(s.region(name, rank) for name in s.problem.addends)), out),)))
        norm = s.take_norm(rank)
        assert norm is not None, "only a problem with a norm has a sharded residual"
        if own[rank]:
            s.add_steps(rank, "compute", replace(norm, out=normed))
        s.add_steps(rank, "compute", Collective("all_gather", normed, s.region("normed", rank)))
    return s.build_schedule()


def one_shot(request: Request) -> Schedule:
    """Let every rank store its partial result at every peer, and sum all partial results."""
    return _one_kernel(request, hops=1)


def two_shot(request: Request) -> Schedule:
    """Let each rank own some columns, sum their partial results, and store the sums at every peer."""
    return _one_kernel(request, hops=2)


def _one_kernel(request: Request, *, hops: int) -> Schedule:
    """Multiply, exchange and sum in one kernel."""
    s = _Everywhere(request)
    for rank in s.ranks_with_work:
        s.add_fused_collective(rank, ("a", "b"), hops=hops)
    return s.build_schedule()


def sequential_stores(request: Request) -> Schedule:
    """Run one cuBLAS GEMM. Then one kernel exchanges the products, in one hop if these are few bytes, otherwise in two."""
    few = request.problem.m * request.problem.n * request.problem.itemsize * (request.problem.world_size - 1) <= ONE_HOP_BYTES
    s = _Everywhere(request, partial=True)
    for rank in s.ranks_with_work:
        s.multiply(rank, "partial")
        s.add_fused_collective(rank, ("partial",), hops=1 if few else 2)
    return s.build_schedule()


class _TokenSplit(ScatterBuilder):
    """Builds token_split. Each rank owns a shard of the rows, which it sums and sends to all. With a sharded residual it sends
    the norm of these rows instead."""

    def __init__(self, request: Request) -> None:
        super().__init__(request, copies=True, sums_in="out")
        self._normed.update(self.ranks)  # row by row, not as the last step
        self.sent = "normed" if self.problem.residual_sharded else "out"
        """What a rank sends of its rows, once they are summed."""
        operand: Literal["", "norm"] = "norm" if self.problem.residual_sharded else ""
        self.add_buffer("landing", "symmetric", self.problem.m, self.problem.n, operand=operand)

    def multiply(self, rank: int, index: int) -> None:
        """Add the products of chunk `index` of every shard, and their copies to the owners. The own shard's comes last."""
        for piece in self.select_chunk(index, self.peers(rank)):
            self.add_gemm(rank, [self.part(rank, piece.rows)])
            self.add_steps(rank, "compute", Signal(self.made(rank, piece)))
        self.copy_step_to_owners(rank, index, made=True)
        self.add_gemm(rank, [self.part(rank, piece.rows) for piece in self.select_chunk(index, [rank])])

    def sum_up(self, rank: int, index: int) -> None:
        """Add the sum of the own piece of chunk `index`, and its copies to all peers."""
        for piece in self.select_chunk(index, [rank]):
            self.add_steps(rank, "compute", Reduce((self.make_sum(rank, index, piece.rows),)))
            if piece == self.pieces[rank][-1]:
                self.signal_read(rank)
            if self.problem.residual_sharded:
                self.normalise(rank, piece)
            if self.peers(rank):
                self.add_steps(rank, "compute", Signal(Flag("summed", rank, index)))
            if not self.problem.residual_sharded:
                self.normalise(rank, piece)
            for number, peer in enumerate(self.peers(rank)):
                lane, there = self.copy_lane(peer), self.region("landing", peer, piece.rows)
                if number == 0 or self.fan_out:
                    self.add_steps(rank, lane, Wait(Flag("summed", rank, index)))
                copy = Copy(self.region(self.sent, rank, piece.rows), there)
                self.add_steps(rank, lane, copy, Signal(self.flag("landed", peer, rank, index)))

    def collect(self, rank: int, index: int) -> None:
        """Add the copies of the peers' sums of chunk `index` to the result, and their norm."""
        for piece in self.select_chunk(index, self.peers(rank, step=-1)):
            owner, landed = piece.shard, self.region("landing", rank, piece.rows)
            here = self.flag("here", rank, owner, index)
            self.add_steps(rank, "copy.out", Wait(self.flag("landed", rank, owner, index)))
            self.add_steps(rank, "copy.out", Copy(landed, self.region(self.sent, rank, piece.rows)))
            if self.problem.norm_eps is not None and self.sent == "out":
                self.add_steps(rank, "copy.out", Signal(here))
                self.add_steps(rank, "compute", Wait(here))
                self.normalise(rank, piece)

    def normalise(self, rank: int, piece: Piece) -> None:
        """Add the norm of a piece of the result, if the problem has one."""
        if self.problem.norm_eps is not None:
            out = self.own_out(rank, piece.rows) if piece.shard == rank else self.region("out", rank, piece.rows)
            normed = self.region("normed", rank, piece.rows)
            self.add_steps(rank, "compute", Norm(out, self.region("norm_weight", rank), normed, self.problem.norm_eps))


def token_split(request: Request) -> Schedule:
    """Cut the rows of every shard into chunks. The products of a chunk are sent to their owners while a rank multiplies its own
    rows of the chunk, and the sums are sent to all ranks while the next chunk is multiplied."""
    s = _TokenSplit(request)
    for rank in s.ranks_with_work:
        for index in range(s.chunks + 1):
            if index < s.chunks:
                s.multiply(rank, index)
                s.sum_up(rank, index)
            if index >= 1:
                s.collect(rank, index - 1)
    return s.build_schedule()


class _Slices(_Everywhere):
    """Builds node_slices. On each node, every rank owns some columns, and sums the node's partial results of them.

    Owners of the same columns exchange these sums, slice by slice of rows, and each stores the whole sum at its node's ranks.
    All nodes have the same number of ranks.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request, partial=True)
        m, in_node = self.problem.m, self.problem.nodes[0]
        self.slices = [rows for rows in split(m, self.chunks) if rows[1] > rows[0]]
        self.cols = split(self.problem.n, in_node) * len(self.problem.nodes)
        widths = [high - low for low, high in self.cols]
        self.owners = [rank for rank in self.ranks if widths[rank]]
        self.add_buffer("recv", "symmetric", (in_node - 1) * m, widths)
        self.add_buffer("mine", "local", m, widths)
        self.add_buffer("theirs", "local", (len(self.problem.nodes) - 1) * m, widths)
        self.add_buffer("summed", "symmetric", m, self.problem.n)

    def region_in_part(self, name: str, rank: int, place: int, rows: Span1D) -> Region:
        """Return rows of part `place` of a buffer that has several parts of M rows each."""
        return self.region(name, rank, (place * self.problem.m + rows[0], place * self.problem.m + rows[1]))

    def regions_of_nodes(self, rank: int, rows: Span1D) -> list[Region]:
        """Return, for each node, the region of its sum of these rows of the own columns."""
        found = [self.region_in_part("theirs", rank, place, rows) for place in range(len(self.problem.nodes) - 1)]
        found.insert(self.problem.node_of[rank], self.region("mine", rank, rows))
        return found

    def scatter(self, rank: int) -> None:
        """Add the product, slice by slice of rows, and the stores of its columns at their owners."""
        for index, rows in enumerate(self.slices):
            self.multiply(rank, "partial", rows)
            stores = []
            for owner in (peer for peer in self.peers(rank) if peer in self.owners):
                here, place = self.region("partial", rank, rows, self.cols[owner]), sorted(self.peers(owner)).index(rank)
                stores.append(
                    Store(here, self.region_in_part("recv", owner, place, rows), self.flag("arrived", owner, rank, index))
                )
            self.store_at_peers(rank, stores, "free" if index == 0 else "")

    def store_at_peers(self, rank: int, stores: list[Store], before: str) -> None:
        """Add stores at peers.

        before: the flag of each peer to wait for before its store. Without one, a single Push has all stores.
        """
        for store in stores if before else ():
            self.add_steps(rank, "compute", Wait(Flag(before, rank, store.dst.rank), on_previous_call=True), Push((store,)))
        self.copy_to_peers(rank, () if before else stores, "compute")

    def sum_within_node(self, rank: int) -> None:
        """Add the sums of the node's partial results of the own columns, and their exchange with the other nodes."""
        for index, rows in enumerate(self.slices):
            self.add_steps(rank, "compute", *(Wait(self.flag("arrived", rank, peer, index)) for peer in self.peers(rank)))
            srcs = [self.region_in_part("recv", rank, place, rows) for place in range(len(self.peers(rank)))]
            srcs.insert(self.ranks_on_node(rank).index(rank), self.region("partial", rank, rows, self.cols[rank]))
            made, mine = Flag("made", rank, index), self.region("mine", rank, rows)
            self.add_steps(rank, "compute", Reduce((Sum(tuple(srcs), mine),)), Signal(made))
            twins = self.carried(rank)
            sends = [Send(mine, twin) for twin in twins]
            theirs = self.regions_of_nodes(rank, rows)
            receives = [Receive(theirs[self.problem.node_of[twin]], twin) for twin in twins]
            self.add_send_receive(rank, sends, receives, after=[made], then=Flag("landed", rank, index))
        self.signal_free(rank, self.peers(rank))

    def publish_sums(self, rank: int) -> None:
        """Add the sums over nodes, in the order of nodes, and the stores of the results at the node's other ranks."""
        cols = self.cols[rank]
        for index, rows in enumerate(self.slices):
            out, srcs = (
                self.region("out", rank, rows, cols),
                (*self.regions_of_nodes(rank, rows), *self.addends(rank, rows, cols)),
            )
            self.add_steps(rank, "compute", Wait(Flag("landed", rank, index)), Reduce((Sum(srcs, out),)))
            there = [(self.region("summed", p, rows, cols), self.flag("ready", p, rank, index)) for p in self.peers(rank)]
            self.store_at_peers(rank, [Store(out, dst, ready) for dst, ready in there], "read" if index == 0 else "")

    def collect(self, rank: int) -> None:
        """Add copies of the sums of the node's other owners to the result."""
        for index, rows in enumerate(self.slices):
            for owner in (peer for peer in self.peers(rank) if peer in self.owners):
                self.add_steps(rank, "compute", Wait(self.flag("ready", rank, owner, index)))
                self.add_steps(
                    rank, "compute", Copy(*(self.region(b, rank, rows, self.cols[owner]) for b in ("summed", "out")))
                )
                if index == len(self.slices) - 1:
                    self.add_steps(rank, "compute", Signal(Flag("read", owner, rank)))


def sliced(request: Request) -> Schedule:
    """Sum a node's products by columns on its ranks. Nodes exchange the sums slice by slice of rows, and owners store them at
    all ranks."""
    if not request.problem.nodes:
        return two_shot(replace(request, chunks=1))
    s = _Slices(request)
    for rank in s.ranks_with_work:
        s.scatter(rank)
        if rank in s.owners:
            s.sum_within_node(rank)
            s.publish_sums(rank)
        s.collect(rank)
    return s.build_schedule()
