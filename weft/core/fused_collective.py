"""Rewrites FusedCollective steps as ordinary steps that do the same.

    spelled_out   returns an equivalent schedule without FusedCollective steps

A tile of the kernel takes these steps in this order, for its own elements. What is proved of the steps holds for the kernel:
tiles share no element, and each tile waits and signals for itself where the steps wait and signal for a whole matrix. A norm is
the last of them: its tiles also wait for squares that other blocks of the same rank sum (weft.kernels.all_reduce). The
buffers and flags of these steps represent the kernel's mailbox. No other step can name them.

    rank r                       rank p, which sums                all_reduce in 2 hops, then
    multiply -> partial
    partial -> recv of p  ~~~~>  tiles land                        rank r                      rank o, the owner of some columns
    signal arrived[r]     ~~~~>  wait arrived of all               wait ready[o]        <~~~~  sum -> summed of r, signal ready
                                 sum, in the order of ranks        summed -> out
                                 signal free[p]@r                  signal read[r]@o

The kernel needs neither `free` nor `read`, which signal that a place may be written again. Its mailbox has several copies, and
calls use them in turn (weft.checker.fused_collective).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from weft.core.parts import joined
from weft.core.problem import Span1D, split
from weft.core.schedule import (
    Buffer,
    Copy,
    Flag,
    FusedCollective,
    Gemm,
    Part,
    Reduce,
    Region,
    Schedule,
    Signal,
    Step,
    Sum,
    Wait,
    steps_of,
)


@dataclass(frozen=True)
class SpelledOut:
    """A schedule without FusedCollective steps.

    origin: the schedule from which it was made.
    kernels: for each rank and lane, the ranges of steps that one kernel of the origin does, each with that kernel's step.
    """

    schedule: Schedule
    origin: Schedule
    kernels: Mapping[tuple[int, str], Mapping[Span1D, FusedCollective]] = field(default_factory=dict)

    def of_lane(self, rank: int, lane: str) -> Mapping[Span1D, FusedCollective]:
        """Return the kernels of a lane, each by its range of steps."""
        return self.kernels.get((rank, lane), {})

    def place(self, rank: int, lane: str, position: int) -> tuple[int, FusedCollective | None]:
        """Return the position in the origin's lane of a step of this schedule, and the FusedCollective that it belongs to."""
        at = position
        for (low, high), step in self.of_lane(rank, lane).items():
            if low <= position < high:
                return at - (position - low), step
            if high <= position:
                at -= high - low - 1
        return at, None


def spelled_out(schedule: Schedule) -> SpelledOut:
    """Return an equivalent schedule without FusedCollective steps and parts. One that has none is returned as it is."""
    schedule = joined(schedule)
    if not any(steps_of(FusedCollective, chain(*schedule.ranks))):
        return SpelledOut(schedule, schedule)
    scratch: dict[str, _Scratch] = {}
    kernels: dict[tuple[int, str], dict[Span1D, FusedCollective]] = {}
    ranks = []
    for rank, lanes in enumerate(schedule.ranks):
        made = []
        for lane in lanes:
            steps: list[Step] = []
            for step in lane.steps:
                if isinstance(step, FusedCollective):
                    if step.mailbox not in scratch:
                        scratch[step.mailbox] = _Scratch(schedule, step, plain=not scratch)
                    low = len(steps)
                    steps += scratch[step.mailbox].steps(rank, step)
                    kernels.setdefault((rank, lane.name), {})[low, len(steps)] = step
                else:
                    steps.append(step)
            made.append(replace(lane, steps=tuple(steps)))
        ranks.append(tuple(made))
    buffers = (*schedule.buffers, *(buffer for one in scratch.values() for buffer in one.buffers))
    return SpelledOut(replace(schedule, buffers=buffers, ranks=tuple(ranks)), schedule, kernels)


class _Scratch:
    """The buffers and flags that represent one mailbox, and the steps that use them.

    plain: use names without the mailbox's name as prefix, if the schedule has none of these names.
    """

    def __init__(self, schedule: Schedule, step: FusedCollective, *, plain: bool) -> None:
        self.problem, self.size = schedule.problem, schedule.problem.world_size
        names = {buffer.name for buffer in schedule.buffers} | {flag.name for flag in schedule.flags}
        own = {"recv", "summed", "arrived", "free", "ready", "read", *(["partial"] if step.multiplies else [])}
        self._prefix = "" if plain and not own & names else f"{step.mailbox}."
        m, n = self.problem.m, self.problem.n
        scatters = step.op == "reduce_scatter"
        self.columns = split(n, self.size) if step.hops == 2 else ((0, n),) * self.size
        self.rows = self.problem.shards if scatters else ((0, m),) * self.size
        """The rows and columns that each rank sums."""
        each, others = range(self.size), self.size - 1
        self.buffers: list[Buffer] = []
        if step.multiplies:
            self._buffer("partial", "local", [m for _ in each], [n for _ in each])
        heights, widths = ([high - low for low, high in spans] for spans in (self.rows, self.columns))
        self._buffer("recv", "symmetric", [others * height for height in heights], widths)
        if step.hops == 2:
            self._buffer("summed", "symmetric", [m for _ in each], [n for _ in each])

    def _buffer(self, name: str, kind: str, rows: list[int], cols: list[int]) -> None:
        self.buffers.append(Buffer(self._prefix + name, kind, tuple(rows), tuple(cols)))  # type: ignore[arg-type]

    def _region(self, name: str, rank: int, rows: Span1D | None = None, cols: Span1D | None = None) -> Region:
        buffer = next(buffer for buffer in self.buffers if buffer.name == self._prefix + name)
        return Region(buffer.name, rank, rows or (0, buffer.rows[rank]), cols or (0, buffer.cols[rank]))

    def _flag(self, name: str, rank: int, index: int) -> Flag:
        return Flag(self._prefix + name, rank, index)

    def steps(self, rank: int, step: FusedCollective) -> Iterator[Step]:
        """Yield the steps that the kernel takes on a rank."""
        partial = self._region("partial", rank) if step.multiplies else step.factors[0]
        if step.multiplies:
            a, b = step.factors
            yield Gemm(b, (Part(a, partial),))
        peers = [(rank + i) % self.size for i in range(1, self.size)]
        summing = [peer for peer in peers if self._sums(peer)]
        if step.op == "reduce_scatter":
            yield from (Wait(self._flag("free", rank, peer), on_previous_call=True) for peer in summing)
        for peer in summing:
            if step.op == "all_reduce":
                yield Wait(self._flag("free", rank, peer), on_previous_call=True)
            yield Copy(_within(partial, self.rows[peer], self.columns[peer]), self._slot(rank, peer))
            yield Signal(self._flag("arrived", peer, rank))
        if self._sums(rank):
            yield from self._sum(rank, step, partial, peers)
        if step.hops == 2:
            yield from self._pass_on(rank, step, peers, summing)
        if step.norm is not None:
            yield step.norm

    def _sums(self, rank: int) -> bool:
        """Return whether a rank has elements to sum."""
        return all(low < high for low, high in (self.rows[rank], self.columns[rank]))

    def _slot(self, src: int, owner: int) -> Region:
        """Return the region on an owner to which rank `src` writes its part of the owner's elements."""
        low, high = self.rows[owner]
        at = (src - (src > owner)) * (high - low)
        return self._region("recv", owner, (at, at + high - low))

    def _sum(self, rank: int, step: FusedCollective, partial: Region, peers: list[int]) -> Iterator[Step]:
        """Sum the tiles that arrived, and signal every peer that they were read."""
        mine = _within(partial, self.rows[rank], self.columns[rank])
        srcs = [mine if src == rank else self._slot(src, rank) for src in range(self.size)]
        out = step.out if step.hops == 1 else _within(step.out, (0, step.out.shape[0]), self.columns[rank])
        more = tuple(_within(region, (0, region.shape[0]), self.columns[rank]) for region in step.addends)
        arrived = tuple(Wait(self._flag("arrived", rank, peer)) for peer in peers)
        if step.op == "all_reduce":
            yield from arrived
            yield Reduce((Sum((*srcs, *more), out),), step.divide_by)
        else:
            yield Reduce((Sum((*srcs, *more), out, arrived),), step.divide_by)
        yield from (Signal(self._flag("free", peer, rank)) for peer in peers)

    def _pass_on(self, rank: int, step: FusedCollective, peers: list[int], owners: Iterable[int]) -> Iterator[Step]:
        """Take the second hop: send the sums of this rank's columns to all ranks, and receive the others from their owners."""
        if self._sums(rank):
            mine = self.columns[rank]
            for peer in peers:
                yield Wait(self._flag("read", rank, peer), on_previous_call=True)
                yield Copy(_within(step.out, (0, step.out.shape[0]), mine), self._region("summed", peer, cols=mine))
                yield Signal(self._flag("ready", peer, rank))
        for owner in owners:
            cols = self.columns[owner]
            yield Wait(self._flag("ready", rank, owner))
            yield Copy(self._region("summed", rank, cols=cols), _within(step.out, (0, step.out.shape[0]), cols))
            yield Signal(self._flag("read", owner, rank))


def _within(region: Region, rows: Span1D, cols: Span1D) -> Region:
    """Return rows and columns of a region, counted from its first. A region of a single row keeps this row."""
    low, left = region.rows[0], region.cols[0]
    return Region(region.buffer, region.rank, (low + rows[0], low + rows[1]), (left + cols[0], left + cols[1]))
