"""A Builder collects the buffers and steps of a schedule. `cut` divides the rows of shards into pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from weft.core.problem import Operand, Problem, Span1D, split
from weft.core.schedule import (
    Buffer,
    Copy,
    Flag,
    Gemm,
    Lane,
    LaneKind,
    Norm,
    Part,
    Push,
    Receive,
    Region,
    Schedule,
    Send,
    SendReceive,
    Signal,
    Step,
    Store,
    Wait,
)

KINDS: dict[str, LaneKind] = {"compute": "compute", "copy": "copy", "blocks": "blocks", "network": "network"}
"""The kind of a lane by the first part of its name: "copy.3" is a copy lane."""
FUSED_NORM_BYTES = 512 << 10
"""A kernel that sums in one hop also normalises sums of at most this many bytes. Its blocks then wait for each other, and there
is one for each SM. On 2 x H200 the norm in the kernel takes 1 to 3 us for 128 to 256 KiB, and a second kernel 2 to 5 us. For
1 to 2 MiB the former takes 6 to 15 us, and the latter 2 to 6 us. Sizes between were not measured."""
SLICE_UNIT = 64
"""The largest step of a GEMM's loop over K. Slices that tiles wait for begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class Request:
    """The request to a builder: a schedule of this name for a problem, with this many pieces of a shard.

    fan_out: whether each peer has its own copy lane, so that all links of a mesh carry chunks at once. One lane for all peers
        is faster behind a switch, where one copy already fills the port.
    shared_port: whether everything that a rank receives passes one port, as behind a switch. `weft.schedule.build` takes that
        for granted unless it gets fan_out.
    """

    problem: Problem
    name: str
    chunks: int = 1
    fan_out: bool = False
    shared_port: bool = True


Build = Callable[[Request], Schedule]


def fuses_norm(problem: Problem, hops: int) -> bool:
    """Return whether the kernel that sums in these hops also normalises. It does not quantise."""
    return hops == 1 and not problem.norm_recipe and problem.m * problem.n * problem.itemsize <= FUSED_NORM_BYTES


@dataclass(frozen=True, slots=True)
class Piece:
    """A Piece is chunk `index` of the shard of rank `shard`.

    rows: its rows [low, high) of the global matrix.
    staged: its rows in a buffer that is laid out by step, as `cut` describes.
    """

    shard: int
    index: int
    rows: Span1D
    staged: Span1D


def cut(problem: Problem, chunks: int) -> list[list[Piece]]:
    """Return the pieces of every shard, by shard and index, without empty ones.

    Staged rows are laid out by step: all shards' chunk 0, then all shards' chunk 1, so that rows that arrive in a step are
    contiguous.

    >>> p = Problem(op="all_gather_matmul", m=5, n=1, k=1, world_size=2)
    >>> [[(q.index, q.rows, q.staged) for q in shard] for shard in cut(p, 2)]
    [[(0, (0, 2), (0, 2)), (1, (2, 3), (3, 4))], [(0, (3, 4), (2, 3)), (1, (4, 5), (4, 5))]]
    """
    shards: list[list[Piece]] = [[] for _ in problem.shards]
    at = 0
    for index in range(chunks):
        for shard, (low, high) in enumerate(problem.shards):
            first, last = split(high - low, chunks)[index]
            if last > first:
                shards[shard].append(Piece(shard, index, (low + first, low + last), (at, at + last - first)))
                at += last - first
    return shards


def aligned_slices(extent: int, parts: int) -> list[Span1D]:
    """Cut [0, extent) as `split` does, but at multiples of SLICE_UNIT if it is longer than that; omit empty ranges.

    >>> aligned_slices(200, 2), aligned_slices(10, 3)
    ([(0, 128), (128, 200)], [(0, 4), (4, 8), (8, 10)])
    """
    unit = SLICE_UNIT if extent > SLICE_UNIT else 1
    cuts = ((low * unit, min(high * unit, extent)) for low, high in split(-(-extent // unit), parts))
    return [(low, high) for low, high in cuts if high > low]


class Builder:
    """Collects buffers and steps, then freezes them into a Schedule."""

    def __init__(self, request: Request) -> None:
        self.problem, self.name, self.chunks, self.fan_out = request.problem, request.name, request.chunks, request.fan_out
        self.world_size = self.problem.world_size
        self._buffers: dict[str, Buffer] = {}
        self._lanes: list[dict[str, list[Step]]] = [{} for _ in self.ranks]
        self._normed = set[int]()
        if self.problem.norm_eps is not None:
            self.add_buffer("norm_weight", "input", 1, self.problem.n)
            self.add_buffer("normed", "output", self.problem.m, self.problem.n, operand="norm")

    @property
    def quantises(self) -> bool:
        """Return whether a is quantised to FP8 before it is sent. A rank then also multiplies its own rows from the landing
        buffer."""
        return self.problem.scaling is not None and self.problem.scaling.quantises

    @property
    def ranks(self) -> range:
        """Return all ranks."""
        return range(self.world_size)

    @property
    def ranks_with_work(self) -> range:
        """Return all ranks, or none if the result has no elements."""
        return range(self.world_size if self.problem.m and self.problem.n else 0)

    @cached_property
    def pieces(self) -> list[list[Piece]]:
        """Return the pieces of every shard."""
        return cut(self.problem, self.chunks)

    @cached_property
    def shard_rows(self) -> list[int]:
        """Return the number of rows of each rank's shard."""
        return [high - low for low, high in self.problem.shards]

    def sort_by_chunk(self, shards: Iterable[int]) -> list[Piece]:
        """Return the pieces of these shards, chunk by chunk."""
        return sorted((piece for shard in shards for piece in self.pieces[shard]), key=lambda piece: piece.index)

    def select_chunk(self, index: int, shards: Iterable[int]) -> list[Piece]:
        """Return chunk `index` of each of these shards that has one."""
        return [piece for shard in shards for piece in self.pieces[shard] if piece.index == index]

    def add_buffer(
        self,
        name: str,
        kind: Literal["input", "output", "symmetric", "local"],
        rows: int | Sequence[int],
        cols: int | Sequence[int],
        *,
        float32: bool = False,
        operand: Literal["", Operand] = "",
        by_columns: bool = False,
    ) -> None:
        """Add a buffer.

        rows, cols: by rank, or one number for all ranks.
        operand: the operand whose rows it holds. They are FP8 if the problem has a scaling of it.
        """
        height, width = ([size] * self.world_size if isinstance(size, int) else size for size in (rows, cols))
        scaled = operand if operand in self.problem.scalings and not (name == "a" and self.quantises) else ""
        self._buffers[name] = Buffer(name, kind, tuple(height), tuple(width), float32, scaled, by_columns)

    def region(self, name: str, rank: int, rows: Span1D | None = None, cols: Span1D | None = None) -> Region:
        """Return a region of a buffer; by default all rows and columns."""
        spec = self._buffers[name]
        return Region(name, rank, rows or (0, spec.rows[rank]), cols or (0, spec.cols[rank]))

    def flag(self, name: str, rank: int, src: int, index: int = 0) -> Flag:
        """Return a flag of `rank` for chunk `index` that comes from, or goes to, another rank."""
        return Flag(name, rank, src * self.chunks + index)

    def make_free_wait(self, rank: int, peer: int) -> Wait:
        """Return the wait until the peer has read the data of the previous call."""
        return Wait(Flag("free", rank, peer), on_previous_call=True)

    def add_steps(self, rank: int, lane: str, *steps: Step) -> None:
        """Append steps to a lane."""
        self._lanes[rank].setdefault(lane, []).extend(steps)

    def add_gemm(
        self,
        rank: int,
        parts: Iterable[Part],
        b: tuple[Span1D | None, Span1D | None] = (None, None),
        *,
        accumulate: bool = False,
        divide_by: int = 1,
    ) -> None:
        """Add one Gemm of these parts to the compute lane, if there are any.

        It runs as weft's kernel if a part waits, counts, adds or stores at a peer. Otherwise torch multiplies each part.

        b: the rows and columns of b. By default, all.
        """
        if parts := tuple(parts):
            self.add_steps(rank, "compute", Gemm(self.region("b", rank, *b), parts, accumulate, divide_by))

    def wait_for_free(self, rank: int, peers: Iterable[int], lane: str | None = None) -> None:
        """Add waits for `free` of these peers, before `rank` sends to them. lane: as for `copy_to_peers`."""
        for peer in peers:
            self.add_steps(rank, lane or self.copy_lane(peer), self.make_free_wait(rank, peer))

    def signal_free(self, rank: int, peers: Iterable[int], lane: str = "compute") -> None:
        """Add signals to peers that `rank` has read their data for the last time in this call."""
        for peer in peers:
            self.add_steps(rank, lane, Signal(Flag("free", peer, rank)))

    def copy_to_peers(self, rank: int, stores: Iterable[Store], lane: str | None = None) -> None:
        """Add copies to other ranks, each with the flag that it raises there.

        By default each store is a Copy and a Signal on the copy lane of its destination. Copies on one lane are sequential.
        With `fan_out`, copies to different peers are concurrent.

        lane: a lane that runs on SMs. There the stores are one unordered Push.
        """
        stores = tuple(stores)
        if lane and stores:
            self.add_steps(rank, lane, Push(stores))
        for store in () if lane else stores:
            self.add_steps(rank, self.copy_lane(store.dst.rank), Copy(store.src, store.dst), Signal(store.count))

    def copy_lane(self, peer: int) -> str:
        """Return the name of the lane that sends to `peer`."""
        return f"copy.{peer}" if self.fan_out else "copy"

    def peers(self, rank: int, *, step: int = 1) -> list[int]:
        """Return the other ranks of the node, in ascending (step=1) or descending (-1) order from the rank's neighbour on.

        Each rank begins with another peer. So no two ranks send to the same peer at once while all are in step.
        """
        node = self.problem.node_ranks[self.problem.node_of[rank]]
        return [node[(rank - node.start + step * i) % len(node)] for i in range(1, len(node))]

    def ranks_on_node(self, rank: int) -> list[int]:
        """Return all ranks of the rank's node, in ascending order."""
        return list(self.problem.node_ranks[self.problem.node_of[rank]])

    def other_nodes(self, rank: int) -> list[int]:
        """Return the numbers of all other nodes."""
        return [node for node in range(len(self.problem.node_ranks)) if node != self.problem.node_of[rank]]

    def ranks_on_other_nodes(self, rank: int) -> list[int]:
        """Return the ranks of other nodes, starting with the next node, and in each node with the rank at this rank's position.

        Each rank begins with another one, so that no two ranks send to the same rank at once.
        """
        own, nodes = self.problem.node_of[rank], self.problem.node_ranks
        others = (nodes[(own + step) % len(nodes)] for step in range(1, len(nodes)))
        return [ranks[(rank - nodes[own].start + step) % len(ranks)] for ranks in others for step in range(len(ranks))]

    def carrier(self, node: int, rank: int) -> int:
        """Return the rank of a node that represents a rank of another node: it receives that rank's messages to the node, and
        sends the node's data for that rank."""
        ranks = self.problem.node_ranks[node]
        own = self.problem.node_ranks[self.problem.node_of[rank]]
        return ranks[(rank - own.start) % len(ranks)]

    def carried(self, rank: int) -> list[int]:
        """Return the ranks of other nodes that `rank` represents."""
        return [other for other in self.ranks_on_other_nodes(rank) if self.carrier(self.problem.node_of[rank], other) == rank]

    def quantise_rows(self, rank: int) -> Region:
        """Add the quantisation of all rows of a to the compute lane, and return the region of the result.

        If the problem does not quantise, add nothing, and return the region of a.
        """
        a = self.region("a", rank)
        if not self.quantises:
            return a
        quantised, done = self.region("quantised", rank), Flag("quantised", rank)
        if a.size:
            self.add_steps(rank, "compute", Push((Store(a, quantised, done),)), Wait(done))
        return quantised

    def add_send_receive(
        self, rank: int, sends: list[Send], receives: list[Receive], *, after: list[Flag], then: Flag | None
    ) -> None:
        """Add messages to the network lane, if there are any.

        Messages without elements are omitted at both ends. Their flags are not.

        after: the flags that the lane waits for first.
        then: the flag that it raises when the messages have been received.
        """
        full = SendReceive(tuple(s for s in sends if s.src.size), tuple(r for r in receives if r.dst.size))
        if sends or receives:
            self.add_steps(rank, "network", *map(Wait, after), *([full] if full.peers else []))
        if receives and then is not None:
            self.add_steps(rank, "network", Signal(then))

    def take_fused_norm(self, rank: int, hops: int) -> Norm | None:
        """Return the norm that the kernel which sums also computes, or None."""
        return self.take_norm(rank) if fuses_norm(self.problem, hops) else None

    def take_norm(self, rank: int) -> Norm | None:
        """Return the norm of a rank's result, if the problem has one. A step that computes it takes it from here; otherwise it
        is the last step of the compute lane."""
        if self.problem.norm_eps is None or rank in self._normed:
            return None
        self._normed.add(rank)
        src, weight, out = (self.region(name, rank) for name in ("out", "norm_weight", "normed"))
        return Norm(src, weight, out, self.problem.norm_eps)

    def build_schedule(self) -> Schedule:
        """Return the Schedule of the buffers and steps that were added."""
        for rank in self.ranks_with_work:
            if (norm := self.take_norm(rank)) is not None:
                self.add_steps(rank, "compute", norm)
        return Schedule(
            problem=self.problem,
            name=self.name,
            chunks=self.chunks,
            buffers=tuple(self._buffers.values()),
            ranks=tuple(
                tuple(Lane(name, KINDS[name.partition(".")[0]], tuple(steps)) for name, steps in lanes.items())
                for lanes in self._lanes
            ),
        )
