"""Builders for matmul_all_reduce: out_MN = all_reduce(a_Mk @ b_kN) + bias + residual.

Buffers of rank r
    a         input      M x k_r
    b         input      k_r x N
    bias      input      1 x N       where the problem adds one; added to every row
    residual  input      M x N       likewise; both are alike on every rank, and added once
    partial   local      M x N       r's product
    recv      symmetric              one_shot: p*M x N, what each of the p other ranks computed, in the order of ranks;
                                     two_shot: p*M x n_r of the columns that r owns
    summed    symmetric  M x N       two_shot: the columns that others own, as their owners summed them
    mine      local      M x n_r     node_slices: the sum over the node of the columns that r owns within it
    theirs    local      q*M x n_r   node_slices: what each of the q other nodes has summed of these columns
    out       output     M x N       the sum over ranks, in the order of ranks, and the addends, in float32, rounded once

Flags of rank r (who advances ~> who waits)
    arrived[p]@r   p ~> r: p's partial result lies in recv        free[p]@r   p ~> r: p has read what r put into p's recv
    ready[p]@r     p ~> r: p's columns lie in summed              read[p]@r   p ~> r: p has read what r put into p's summed

    made[i]@r      r ~> r's network lane: rows i lie in `mine`    landed[i]@r r's network lane ~> r: and in `theirs`

    one_shot: one hop                                   two_shot: two hops, 2/p of the bytes
    rank r                      rank p                  rank r                     rank o, the owner of some columns
    gemm -> partial                                     gemm -> partial
    partial -> recv of p   ~~>  rows land               its columns -> recv of o ~~>  rows land
    signal arrived[r]      ~~>  wait arrived            signal arrived[r]        ~~>  wait arrived of all
                                reduce all -> out       wait ready[o]                 reduce -> out
                                signal free[p]@r        summed -> out            <~~  out -> summed of r, signal ready[o]

Every rank of one_shot adds in the same order, so that all have the same bits; in two_shot one rank adds.

Bad interleaving: r, a call ahead, writes recv of p while p still sums the old rows. `free` prevents it, and `read` for summed.

All of it, or all but a vendor's GEMM, is one persistent kernel where the device has it (Lane.fused; weft.kernels.all_reduce).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.core.problem import Problem, Span1D, split
from weft.core.schedule import (
    Buffer,
    Collective,
    Copy,
    Flag,
    FusedCollective,
    Gemm,
    Lane,
    Part,
    Receive,
    Reduce,
    Region,
    Schedule,
    Send,
    Signal,
    Step,
    Sum,
    Wait,
)
from weft.schedules.builder import Builder

ONE_HOP_BYTES = 3 << 20
"""sequential_stores sends partial results to everyone if that is up to so many bytes a rank, else to their owners. On 4 x
H200 one hop is 0.3 us faster at 3 MiB, and both are alike at 6."""


class _Everywhere(Builder):
    """Buffers and repeated idioms of this operator."""

    def __init__(self, problem: Problem, name: str) -> None:
        super().__init__(problem, name)
        each = range(self.world_size)
        inner = [problem.inner(r) for r in each]
        self.rows, self.cols = [problem.m for _ in each], [problem.n for _ in each]
        self.buffer("a", "input", self.rows, inner)
        self.buffer("b", "input", inner, self.cols)
        for addend in problem.addends:
            self.buffer(addend, "input", self.rows if addend == "residual" else [1 for _ in each], self.cols)
        self.buffer("out", "output", self.rows, self.cols)

    def multiply(self, rank: int, into: str) -> None:
        if self.problem.m and self.problem.n:
            part = Part(self.region("a", rank), self.region(into, rank))
            self.add(rank, "compute", Gemm(self.region("b", rank), (part,)))

    def addends(self, rank: int, cols: Span1D) -> tuple[Region, ...]:
        return tuple(self.region(name, rank, cols=cols) for name in self.problem.addends)

    def exchange(self, rank: int, *, hops: int, multiply: bool) -> None:
        """The kernel that sums what all ranks have. multiply: it makes the product as well; else it finds that in `partial`."""
        factors = (self.region("a", rank), self.region("b", rank)) if multiply else (self.region("partial", rank),)
        addends = self.addends(rank, (0, self.problem.n))
        self.add(rank, "compute", FusedCollective("all_reduce", factors, self.region("out", rank), hops, addends))


def sequential(problem: Problem) -> Schedule:
    """One GEMM, then the vendor's all-reduce, in place; addends come after it, by a sum that rounds once more."""
    s = _Everywhere(problem, "sequential")
    into = "partial" if problem.addends else "out"
    if problem.addends:
        s.buffer("partial", "local", s.rows, s.cols)
    for rank in range(s.world_size):
        s.multiply(rank, into)
        s.add(rank, "compute", Collective("all_reduce", s.region(into, rank), s.region(into, rank)))
        if problem.addends and problem.m and problem.n:
            whole = (0, problem.n)
            srcs = (s.region("partial", rank), *s.addends(rank, whole))
            s.add(rank, "compute", Reduce((Sum(srcs, s.region("out", rank)),)))
    return s.done()


def one_shot(problem: Problem, name: str) -> Schedule:
    """Every rank stores its partial result at every peer, and sums all."""
    return _one_kernel(problem, name, hops=1)


def two_shot(problem: Problem, name: str) -> Schedule:
    """Columns have owners: each sums the partial results of its own, and stores the sums at every peer."""
    return _one_kernel(problem, name, hops=2)


def _one_kernel(problem: Problem, name: str, *, hops: int) -> Schedule:
    """One kernel multiplies, exchanges and sums."""
    s = _Everywhere(problem, name)
    for rank in range(s.world_size if problem.m and problem.n else 0):
        s.exchange(rank, hops=hops, multiply=True)
    return s.done()


def sequential_stores(problem: Problem, name: str) -> Schedule:
    """One vendor GEMM; then the exchange as one kernel: in one hop where that is few bytes, else in two."""
    few = problem.m * problem.n * problem.itemsize * (problem.world_size - 1) <= ONE_HOP_BYTES
    s = _Everywhere(problem, name)
    s.buffer("partial", "local", s.rows, s.cols)
    for rank in range(s.world_size if problem.m and problem.n else 0):
        s.multiply(rank, "partial")
        s.exchange(rank, hops=1 if few else 2, multiply=False)
    return s.done()


def gathered(scatter: Callable[[Problem], Schedule]) -> Callable[[Problem], Schedule]:
    """A matmul_reduce_scatter whose sums are steps of their own, and then the vendor's all-gather of its result."""

    def build(problem: Problem) -> Schedule:
        inner = scatter(problem)
        buffers = [replace(buffer, name="mine", kind="local") if buffer.name == "out" else buffer for buffer in inner.buffers]
        s = _Everywhere(problem, inner.name)
        known = {buffer.name for buffer in buffers}
        added = [buffer for buffer in s.done().buffers if buffer.name not in known]
        ranks = tuple(_then_gathered(problem, rank, lanes, buffers) for rank, lanes in enumerate(inner.ranks))
        return replace(inner, buffers=(*buffers, *added), ranks=ranks)

    return build


def _then_gathered(problem: Problem, rank: int, lanes: tuple[Lane, ...], buffers: list[Buffer]) -> tuple[Lane, ...]:
    """One rank's lanes, its result in `mine`, and the gather."""
    mine = next(buffer for buffer in buffers if buffer.name == "mine").whole(rank)
    gather = Collective("all_gather", mine, Region("out", rank, (0, problem.m), (0, problem.n)))
    found = [replace(lane, steps=tuple(_into_mine(problem, rank, step) for step in lane.steps)) for lane in lanes]
    names = [lane.name for lane in found]
    if "compute" not in names:
        return (*found, Lane("compute", "compute", (gather,)))
    return tuple(replace(lane, steps=(*lane.steps, gather)) if lane.name == "compute" else lane for lane in found)


def _into_mine(problem: Problem, rank: int, step: Step) -> Step:
    """A sum with the addends of its rows."""
    if not isinstance(step, Reduce):
        return step
    first = problem.shards[rank][0]
    parts = []
    for part in step.parts:
        rows = (first + part.out.rows[0], first + part.out.rows[1])
        spans: dict[str, Span1D] = {"bias": (0, 1), "residual": rows}
        more = tuple(Region(name, rank, spans[name], part.out.cols) for name in problem.addends)
        parts.append(replace(part, srcs=(*part.srcs, *more), out=replace(part.out, buffer="mine")))
    return replace(step, parts=tuple(parts))


class _ByNode(_Everywhere):
    """node_slices: columns have an owner on each node, who sums the node's partial results of them; owners of the same columns
    exchange these sums, slice by slice of rows, and each hands the whole sum to its node. For nodes of one size."""

    def __init__(self, problem: Problem, name: str, chunks: int) -> None:
        super().__init__(problem, name)
        self.chunks = chunks
        self.slices = [rows for rows in split(problem.m, chunks) if rows[1] > rows[0]]
        owned = split(problem.n, problem.nodes[0])
        self.owned = [owned[self.local(rank)] for rank in range(self.world_size)]
        widths = [high - low for low, high in self.owned]
        each, others = [problem.m] * self.world_size, len(problem.nodes) - 1
        self.buffer("partial", "local", self.rows, self.cols)
        self.buffer("recv", "symmetric", [(problem.nodes[0] - 1) * m for m in each], widths)
        self.buffer("mine", "local", each, widths)
        self.buffer("theirs", "local", [others * m for m in each], widths)
        self.buffer("summed", "symmetric", self.rows, self.cols)

    def local(self, rank: int) -> int:
        return rank % self.problem.nodes[0]

    def owners(self, rank: int) -> list[int]:
        """The peers that own columns."""
        return [peer for peer in self.peers(rank) if self.owned[peer][1] > self.owned[peer][0]]

    def twins(self, rank: int) -> list[int]:
        """The owners of the same columns on other nodes."""
        return [other for other in self.far(rank) if self.local(other) == self.local(rank)]

    def slot_of(self, src: int, owner: int, rows: Span1D) -> Region:
        """Rows of a peer's partial result, on the owner of their columns."""
        base = (self.local(src) - (src > owner)) * self.problem.m
        return self.region("recv", owner, (base + rows[0], base + rows[1]))

    def of_node(self, rank: int, src: int, rows: Span1D) -> Region:
        """Rows of what the node of `src` has summed, on `rank`."""
        node, own = self.problem.node_of[src], self.problem.node_of[rank]
        if node == own:
            return self.region("mine", rank, rows)
        base = (node - (node > own)) * self.problem.m
        return self.region("theirs", rank, (base + rows[0], base + rows[1]))

    def flag(self, name: str, owner: int, src: int, index: int) -> Flag:
        return Flag(name, owner, src * self.chunks + index)

    def scatter(self, rank: int) -> None:
        """Multiply, slice by slice of rows, and give each owner its columns."""
        for index, rows in enumerate(self.slices):
            part = Part(self.region("a", rank, rows), self.region("partial", rank, rows))
            self.add(rank, "compute", Gemm(self.region("b", rank), (part,)))
            for owner in self.owners(rank):
                if index == 0:
                    self.add(rank, "compute", Wait(Flag("free", rank, owner), 0))
                copy = Copy(self.region("partial", rank, rows, self.owned[owner]), self.slot_of(rank, owner, rows))
                self.add(rank, "compute", copy, Signal(self.flag("arrived", owner, rank, index)))

    def sum_node(self, rank: int) -> None:
        """Sum the node's partial results of the own columns, and exchange the sums with the other nodes."""
        twins = self.twins(rank)
        for index, rows in enumerate(self.slices):
            self.add(rank, "compute", *(Wait(self.flag("arrived", rank, peer, index)) for peer in self.peers(rank)))
            partial = self.region("partial", rank, rows, self.owned[rank])
            node = sorted([rank, *self.peers(rank)])
            srcs = [partial if src == rank else self.slot_of(src, rank, rows) for src in node]
            made, landed = Flag("made", rank, index), Flag("landed", rank, index)
            self.add(rank, "compute", Reduce((Sum(tuple(srcs), self.region("mine", rank, rows)),)), Signal(made))
            sends = [Send(self.region("mine", rank, rows), twin) for twin in twins]
            receives = [Receive(self.of_node(rank, twin, rows), twin) for twin in twins]
            self.send_receive(rank, sends, receives, after=[made], then=landed)
        self.add(rank, "compute", *(Signal(Flag("free", peer, rank)) for peer in self.peers(rank)))

    def publish_sums(self, rank: int) -> None:
        """Add what the nodes have summed, in the order of nodes, and hand it to the own one."""
        cols = self.owned[rank]
        for index, rows in enumerate(self.slices):
            nodes = (self.of_node(rank, src, rows) for src in sorted([rank, *self.twins(rank)]))
            addends = (replace(one, rows=rows) if one.buffer == "residual" else one for one in self.addends(rank, cols))
            out = self.region("out", rank, rows, cols)
            self.add(rank, "compute", Wait(Flag("landed", rank, index)), Reduce((Sum((*nodes, *addends), out),)))
            for peer in self.peers(rank):
                if index == 0:
                    self.add(rank, "compute", Wait(Flag("read", rank, peer), 0))
                self.add(rank, "compute", Copy(out, self.region("summed", peer, rows, cols)))
                self.add(rank, "compute", Signal(self.flag("ready", peer, rank, index)))

    def collect(self, rank: int) -> None:
        """Take what the node's other owners have published."""
        for index, rows in enumerate(self.slices):
            for owner in self.owners(rank):
                cols = self.owned[owner]
                self.add(rank, "compute", Wait(self.flag("ready", rank, owner, index)))
                self.add(rank, "compute", Copy(*(self.region(b, rank, rows, cols) for b in ("summed", "out"))))
                if index == len(self.slices) - 1:
                    self.add(rank, "compute", Signal(Flag("read", owner, rank)))


def sliced(problem: Problem, name: str, chunks: int) -> Schedule:
    """Each node sums up by columns; nodes exchange their sums slice by slice of rows; each owner publishes within its node."""
    s = _ByNode(problem, name, chunks)
    for rank in range(s.world_size if problem.m and problem.n else 0):
        s.scatter(rank)
        if s.owned[rank][1] > s.owned[rank][0]:
            s.sum_node(rank)
            s.publish_sums(rank)
        s.collect(rank)
    return s.done()
