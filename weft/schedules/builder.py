"""What the builders share: lanes that grow step by step, and how rows are cut into pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from weft.core.problem import CollectiveProblem, Problem, Span1D, split
from weft.core.schedule import (
    Buffer,
    Copy,
    Flag,
    Lane,
    LaneKind,
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
    advances,
)

KINDS: dict[str, LaneKind] = {"compute": "compute", "copy": "copy", "blocks": "blocks", "network": "network"}
"""Kind of a lane by the first word of its name: "copy.3" is a copy lane."""
SLICE_UNIT = 64
"""Columns of `a` that one step of a GEMM's loop over K takes at most: slices that tiles wait for begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Chunk `index` of the shard of rank `shard`: rows [low, high) of the global matrix, and where they lie when staged."""

    shard: int
    index: int
    rows: Span1D
    staged: Span1D


def cut(problem: Problem, chunks: int) -> list[list[Piece]]:
    """Pieces of every shard, by shard and index, without the empty ones.

    Staged rows are laid out by step: all shards' chunk 0, then all shards' chunk 1, so that what arrives in a step lies
    together.

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
    """Cut [0, extent) as `split` does, but at multiples of SLICE_UNIT if it is longer than that; without the empty ones.

    >>> aligned_slices(200, 2), aligned_slices(10, 3)
    ([(0, 128), (128, 200)], [(0, 4), (4, 8), (8, 10)])
    """
    unit = SLICE_UNIT if extent > SLICE_UNIT else 1
    cuts = ((low * unit, min(high * unit, extent)) for low, high in split(-(-extent // unit), parts))
    return [(low, high) for low, high in cuts if high > low]


class Builder:
    """Collects buffers and steps, then freezes them into a Schedule.

    fan_out: a copy lane for each peer, so that all links of a mesh carry chunks at once; else one lane for all peers, which
    is faster behind a switch, where one copy already fills the port.
    """

    def __init__(self, problem: Problem, name: str, chunks: int = 1, *, fan_out: bool = False) -> None:
        self.problem, self.name, self.chunks, self.fan_out = problem, name, chunks, fan_out
        self.world_size = problem.world_size
        self._buffers: dict[str, Buffer] = {}
        self._lanes: list[dict[str, list[Step]]] = [{} for _ in range(self.world_size)]

    def buffer(self, name: str, kind: str, rows: list[int], cols: list[int], *, float32: bool = False) -> None:
        self._buffers[name] = Buffer(name, kind, tuple(rows), tuple(cols), float32)  # type: ignore[arg-type]

    def region(self, name: str, rank: int, rows: Span1D | None = None, cols: Span1D | None = None) -> Region:
        """The named part of a buffer; all rows or columns where none are given."""
        spec = self._buffers[name]
        return Region(name, rank, rows or (0, spec.rows[rank]), cols or (0, spec.cols[rank]))

    def add(self, rank: int, lane: str, *steps: Step) -> None:
        self._lanes[rank].setdefault(lane, []).extend(steps)

    def copy_lane(self, peer: int) -> str:
        """The lane that sends to `peer`."""
        return f"copy.{peer}" if self.fan_out else "copy"

    def peers(self, rank: int, *, step: int = 1) -> list[int]:
        """The other ranks of the node, nearest first upwards (step=1) or downwards (-1), so that no two ranks favour the same
        peer."""
        node = self.problem.node_ranks[self.problem.node_of[rank]]
        return [node[(rank - node.start + step * i) % len(node)] for i in range(1, len(node))]

    def far(self, rank: int) -> list[int]:
        """The ranks of other nodes, from the next node upwards and in each from the rank's own place upwards, so that no two
        ranks favour the same."""
        own, nodes = self.problem.node_of[rank], self.problem.node_ranks
        others = (nodes[(own + step) % len(nodes)] for step in range(1, len(nodes)))
        return [ranks[(rank - nodes[own].start + step) % len(ranks)] for ranks in others for step in range(len(ranks))]

    def carrier(self, node: int, rank: int) -> int:
        """The one of a node's ranks that stands for a rank of another node: it takes what that one sends to the node, and sends
        what the node has for it."""
        ranks = self.problem.node_ranks[node]
        own = self.problem.node_ranks[self.problem.node_of[rank]]
        return ranks[(rank - own.start) % len(ranks)]

    def send_receive(
        self, rank: int, sends: list[Send], receives: list[Receive], *, after: list[Flag], then: Flag | None
    ) -> None:
        """A step of the network lane, if there is anything to send or receive, after these flags; what it receives raises
        `then`. Messages without elements are left out, at both ends; flags stay as they are."""
        full = SendReceive(tuple(s for s in sends if s.src.size), tuple(r for r in receives if r.dst.size))
        if sends or receives:
            self.add(rank, "network", *map(Wait, after), *([full] if full.peers else []))
        if receives and then is not None:
            self.add(rank, "network", Signal(then))

    def done(self) -> Schedule:
        return Schedule(
            problem=self.problem,
            name=self.name,
            chunks=self.chunks,
            buffers=tuple(self._buffers.values()),
            ranks=tuple(tuple(self._lane(name, steps) for name, steps in lanes.items()) for lanes in self._lanes),
        )

    def _lane(self, name: str, steps: list[Step]) -> Lane:
        kind = KINDS[name.partition(".")[0]]
        on_sms = kind in ("compute", "blocks") and not isinstance(self.problem, CollectiveProblem)
        return Lane(name, kind, tuple(pushed(steps) if on_sms else steps))


def pushed(steps: list[Step]) -> Iterator[Step]:
    """The steps of a lane that runs on SMs, with neighbouring copies to peers, each followed by a signal to its receiver, as
    one Push. A Push ends where its parts would need an order: at another source, at a place that it has stored to, and at a
    flag that the lane advances more than once."""
    if not any(isinstance(step, Copy) for step in steps):
        yield from steps
        return
    times = Counter(flag for step in steps for flag in advances(step))
    parts: list[Store] = []
    taken = _Taken()
    at = 0
    while at < len(steps):
        part = _store(steps[at], steps[at + 1] if at + 1 < len(steps) else None, times)
        if parts and (part is None or _source(part) != _source(parts[0]) or taken.meets(part.dst)):
            yield Push(tuple(parts))
            parts, taken = [], _Taken()
        if part:
            parts.append(part)
            taken.add(part.dst)
            at += 2
        else:
            yield steps[at]
            at += 1
    if parts:
        yield Push(tuple(parts))


def _store(copy: Step, signal: Step | None, times: Counter[Flag]) -> Store | None:
    """A copy and the signal behind it as a part of a Push, if they can be one."""
    if not (isinstance(copy, Copy) and isinstance(signal, Signal)):
        return None
    alone = times[signal.flag] == 1 and signal.flag.rank == copy.dst.rank
    within = (copy.src.buffer, copy.src.rank) == (copy.dst.buffer, copy.dst.rank)
    return Store(copy.src, copy.dst, signal.flag) if alone and copy.src.size and not within else None


def _source(part: Store) -> tuple[str, int]:
    return part.src.buffer, part.src.rank


class _Taken:
    """Where the parts of a Push store. Pieces come mostly one behind the other, so that few are compared."""

    def __init__(self) -> None:
        self._regions: dict[tuple[str, int], list[Region]] = {}
        self._ends: dict[tuple[str, int], tuple[int, int]] = {}

    def meets(self, region: Region) -> bool:
        """Whether it has an element in common with one of them."""
        (top, bottom), (left, right), key = region.rows, region.cols, (region.buffer, region.rank)
        lowest, rightmost = self._ends.get(key, (0, 0))
        if top >= lowest or left >= rightmost:
            return False
        return any(
            other.rows[0] < bottom and top < other.rows[1] and other.cols[0] < right and left < other.cols[1]
            for other in self._regions[key]
        )

    def add(self, region: Region) -> None:
        key = region.buffer, region.rank
        lowest, rightmost = self._ends.get(key, (0, 0))
        self._regions.setdefault(key, []).append(region)
        self._ends[key] = max(region.rows[1], lowest), max(region.cols[1], rightmost)
