"""Rotation: if all ranks do the same, each with its peers shifted by its own number, rank 0 represents all of them.

`rotation(schedule, machine)` compares the properties of each rank's lanes that the simulator reads: kinds of steps, shapes,
buffers, distances of peers, and the flags that steps wait for, numbered in the order of their first use. It ignores the offsets
of rows, and the order of unordered things (the parts of a plain matmul, the sources of a sum). If all ranks are equal in this,
they do the same at the same time, and the simulator runs rank 0 only:

    rank 0 signals a flag of rank d      rank -d signals rank 0's flag of the same number
    rank 0 sends over the link to d      rank -d sends over the link that comes to rank 0 from there
    rank 0 sends through its host        all ranks of the node do the same: the transfer counts once for each

Ranks of several nodes of one size are shifted twice: by nodes, and within the node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.core.fused_collective import SpelledOut
from weft.core.machine import Machine
from weft.core.problem import RaggedProblem
from weft.core.schedule import (
    Collective,
    Copy,
    Flag,
    Gemm,
    GroupedGemm,
    Lookup,
    Norm,
    Part,
    Push,
    Reduce,
    Region,
    SegmentCopies,
    SegmentCopy,
    SegmentProduct,
    SendReceive,
    ShareCounts,
    Signal,
    Sum,
    UserCall,
    Wait,
    runs,
    waits,
)
from weft.core.work import is_plain
from weft.perf.fluid import Load, Resource

Seen = tuple[Any, ...]
"""The properties of a rank's steps that the simulator reads. Other ranks are given by their distance."""


@dataclass(frozen=True)
class Turns:
    """Turns shifts the ranks of `nodes` nodes of `each` ranks: by whole nodes, and within each node."""

    nodes: int
    each: int

    def away(self, src: int, dst: int) -> int:
        """Return the distance between two ranks, as the rank at that distance from rank 0."""
        node = (dst // self.each - src // self.each) % self.nodes
        return node * self.each + (dst - src) % self.each

    def turned(self, rank: int, by: int) -> int:
        """Return the rank at the distance from `by` that `rank` has from rank 0."""
        node = (rank // self.each + by // self.each) % self.nodes
        return node * self.each + (rank + by) % self.each


@dataclass(frozen=True)
class Rotation:
    """Rotation maps the flags and resources of all ranks to those of rank 0.

    own: the flag of rank 0 for each flag of another rank that rank 0 signals; None if no step waits for it."""

    turns: Turns
    own: Mapping[Flag, Flag | None] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.turns.nodes * self.turns.each

    def load(self, load: Load) -> Load:
        """Return the load on rank 0's resources of the transfers by all ranks that correspond to one of rank 0."""
        total: dict[Resource, int] = {}
        for resource, times in load:
            own, each = self.resource(resource), self.turns.each if resource[0] == "host" else 1
            total[own] = total.get(own, 0) + times * each
        return tuple(total.items())

    def resource(self, resource: Resource) -> Resource:
        """Return the resource of rank 0 that corresponds to this one."""
        name, rank, *rest = resource
        if name == "link":
            return name, 0, self.turns.away(rank, *rest)  # type: ignore[arg-type]
        return name, 0, *rest

    def everywhere(self, resource: Resource) -> list[Resource]:
        """Return the resources of all ranks that correspond to one of rank 0."""
        name, _, *rest = resource
        if name == "host":
            return [("host", node) for node in range(self.turns.nodes)]
        if name == "link":
            return [(name, rank, self.turns.turned(rest[0], rank)) for rank in range(self.ranks)]  # type: ignore[arg-type]
        return [(name, rank, *rest) for rank in range(self.ranks)]


def rotation(spelled: SpelledOut, machine: Machine) -> Rotation | None:
    """Return the rotation that maps all ranks of a schedule to rank 0; None if they differ."""
    schedule, problem = spelled.schedule, spelled.schedule.problem
    nodes = problem.nodes or (len(schedule.ranks),)
    if len(schedule.ranks) < 2 or len(set(nodes)) > 1 or (isinstance(problem, RaggedProblem) and _uneven(problem)):
        return None
    outlines = {tuple((lane.kind, lane.priority, lane.ctas, len(lane.steps)) for lane in lanes) for lanes in schedule.ranks}
    if len(outlines) > 1:
        return None
    turns, flags = Turns(len(nodes), nodes[0]), tuple(_flags(lanes) for lanes in schedule.ranks)
    views = [_View(spelled, machine, turns, flags, rank) for rank in range(len(schedule.ranks))]
    first, others = views[0], list(zip(views[1:], schedule.ranks[1:], strict=True))
    for place, lane in enumerate(schedule.ranks[0]):
        kernels = first.kernels(lane.name)
        names = [lanes[place].name for lanes in schedule.ranks]
        if any(view.kernels(name) != kernels for view, name in zip(views, names, strict=True)):
            return None
        for position, step in enumerate(lane.steps):
            kind, read = type(step), _READ[type(step)]
            seen = read(first, step)
            for view, lanes in others:
                other = lanes[place].steps[position]
                if type(other) is not kind or read(view, other) != seen:
                    return None
    numbered = list(flags[0])
    own = {flag: numbered[number] if number is not None else None for flag, number in first.signalled.items()}
    return Rotation(turns, own)


def _uneven(problem: RaggedProblem) -> bool:
    """Return whether some segments of an even routing have one row more than others."""
    return bool(min(problem.capacity, problem.m) % (problem.world_size * problem.experts))


def _flags(lanes: tuple[Any, ...]) -> dict[Flag, int]:
    """Return the flags for which a rank waits, numbered in the order of their first use."""
    found: dict[Flag, int] = {}
    for lane in lanes:
        for step in lane.steps:
            for wait in waits(step):
                found.setdefault(wait.flag, len(found))
    return found


class _View:
    """The steps of one rank as the simulator reads them. signalled: the flags that it has signalled, with numbers."""

    def __init__(
        self, spelled: SpelledOut, machine: Machine, turns: Turns, flags: tuple[Mapping[Flag, int], ...], rank: int
    ) -> None:
        self._spelled, self._rank, self._stages = spelled, rank, machine.stages
        self._flags, self._own = flags, flags[rank]
        self._away = [turns.away(rank, other) for other in range(len(flags))]
        self._cols = {name: buffer.cols for name, buffer in spelled.schedule.buffer.items()}
        self.signalled: dict[Flag, int | None] = {}

    def kernels(self, lane: str) -> Seen:
        """Return the ranges of steps that are one kernel, and the properties of each kernel."""
        found = self._spelled.of_lane(self._rank, lane).items()
        return tuple((steps, kernel.op, kernel.hops, kernel.multiplies) for steps, kernel in found)

    def signal(self, flag: Flag | None) -> Seen:
        if flag is None:
            return ()
        number = self.signalled[flag] = self._flags[flag.rank].get(flag)
        return self._away[flag.rank], number

    def wait(self, wait: Wait) -> Seen:
        return self._away[wait.flag.rank], self._own[wait.flag], wait.on_previous_call

    def region(self, region: Region) -> Seen:
        (top, bottom), (left, right) = region.rows, region.cols
        whole = right - left == self._cols[region.buffer][region.rank]
        return region.buffer, self._away[region.rank], bottom - top, right - left, whole

    def copy(self, step: Copy) -> Seen:
        return self.region(step.src), self.region(step.dst)

    def push(self, step: Push) -> Seen:
        return tuple([(self.region(part.src), self.region(part.dst), self.signal(part.count)) for part in step.parts])

    def gemm(self, step: Gemm) -> Seen:
        parts = [self._part(part) for part in step.parts]
        staged: Seen = ()
        if all(is_plain(part, self._rank) for part in step.parts):
            parts.sort()
            if self._stages:
                staged = len(runs([part.a for part in step.parts])) > 1, len(runs([part.out for part in step.parts]))
        return self.region(step.b), step.accumulate, parts, staged

    def _part(self, part: Part) -> Seen:
        return (
            self.region(part.a),
            self.region(part.out),
            [self.wait(gate) for gate in part.gates],
            self.signal(part.count),
            sorted(map(self.region, part.adds)),
            [(column, self.wait(gate)) for column, gate in part.inner],
        )

    def reduce(self, step: Reduce) -> Seen:
        return tuple([self._sum(part) for part in step.parts])

    def _sum(self, part: Sum) -> Seen:
        gates = [self.wait(gate) for gate in part.gates]
        return self.region(part.out), sorted(map(self.region, part.srcs)), gates, self.signal(part.count)

    def lookup(self, step: Lookup) -> Seen:
        return tuple([(self.region(part.bags), self.region(part.out), self.signal(part.count)) for part in step.parts])

    def collective(self, step: Collective) -> Seen:
        return step.op, self.region(step.src), self.region(step.dst)

    def messages(self, step: SendReceive) -> Seen:
        sends = [(self.region(send.src), self._away[send.to]) for send in step.sends]
        return sends, [(self.region(receive.dst), self._away[receive.source]) for receive in step.receives]

    def share(self, step: ShareCounts) -> Seen:
        return [self.signal(flag) for flag in step.flags], [self.wait(gate) for gate in step.gates]

    def segments(self, step: SegmentCopies | GroupedGemm) -> Seen:
        return tuple([self._segment(part) for part in step.parts])

    def _segment(self, part: SegmentCopy | SegmentProduct) -> Seen:
        """Return the ranks and the gates of a part. The size is left out, because all segments have equally many rows."""
        ends = (part.src, part.dst) if isinstance(part, SegmentCopy) else (part.a, part.out)
        where = [(end.buffer, self._away[end.rank], end.expert) for end in ends]
        return type(part).__name__, where, [self.wait(gate) for gate in part.gates], self.signal(part.count)


_READ: dict[type, Callable[[_View, Any], Seen]] = {
    Wait: _View.wait,
    Signal: lambda view, step: view.signal(step.flag),
    Copy: _View.copy,
    Push: _View.push,
    Gemm: _View.gemm,
    Reduce: _View.reduce,
    Norm: lambda view, step: (view.region(step.src), view.region(step.out)),
    Lookup: _View.lookup,
    Collective: _View.collective,
    SendReceive: _View.messages,
    UserCall: lambda view, step: (step,),
    ShareCounts: _View.share,
    SegmentCopies: _View.segments,
    GroupedGemm: _View.segments,
}
"""For each type of step, the function that returns what the simulator reads of it. FusedCollective steps were replaced."""
