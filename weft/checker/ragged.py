"""The proof of schedules whose row counts only devices know, for every assignment of counts at once.

Steps name whole segments (src, dst, expert). In one buffer of one rank segments lie one after the other, in an order that
does not depend on the counts, so two of them never share a row, and one that is cut at the capacity ends there: whatever the
counts are, two accesses conflict only if they name the same segment of the same buffer. So the proof follows segments, not
rows, and holds for all counts. An empty segment does nothing, and its flags are advanced all the same.

What is proved, as elsewhere (`weft.checker`): every step names what exists; no deadlock; no race over several calls; each
segment of the outputs is written once, with the rows of that segment, of this call. Besides: no step places or moves rows
before the counts of all ranks are known to its rank, and the counts are not overwritten while they may be read.

The walk goes through CALLS calls: the two places of the counts take turns, so the fourth call repeats a place of the second.
Flags count calls here: a wait in call c is for the signal of call c.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from weft.checker.program import ScheduleError
from weft.core.problem import RaggedProblem
from weft.core.schedule import (
    Flag,
    GroupedGemm,
    Schedule,
    Segment,
    SegmentCopies,
    SegmentCopy,
    SegmentProduct,
    ShareCounts,
    Signal,
    Step,
    Wait,
    advances,
    waits,
)

CALLS = 4
Part = SegmentCopy | SegmentProduct
Cell = tuple[object, ...]
"""What an access names: a segment of a buffer of a rank, or the counts of one rank in one of a rank's two places."""


@dataclass
class _Lane:
    """Where a lane is. mask: the nodes that happen before its next step. part, joined: as its kernel's parts go on."""

    rank: int
    name: str
    steps: tuple[Step, ...]
    call: int = 0
    position: int = 0
    mask: int = 0
    part: int = 0
    joined: int = 0


def check_ragged(schedule: Schedule) -> None:
    """Prove a schedule of a RaggedProblem right. Raises ScheduleError."""
    problem = schedule.problem
    assert isinstance(problem, RaggedProblem), f"{problem} has no segments"
    _check_structure(schedule, problem)
    _Walk(schedule, problem).run()


def _check_structure(schedule: Schedule, problem: RaggedProblem) -> None:
    if len(schedule.ranks) != problem.world_size:
        raise ScheduleError(f"it has {len(schedule.ranks)} ranks; the problem has {problem.world_size}")
    _check_buffers(schedule, problem)
    for rank, lanes in enumerate(schedule.ranks):
        kinds = [lane.kind for lane in lanes]
        if not lanes:
            raise ScheduleError(f"rank {rank} has no lane, so that nothing writes its result; give it one of kind compute")
        if set(kinds) - {"compute", "blocks"} or kinds.count("compute") > 1 or len({lane.name for lane in lanes}) < len(lanes):
            raise ScheduleError(f"rank {rank} has lanes of kinds {kinds}; use one of kind compute, others of kind blocks")
    owners: dict[Flag, str] = {}
    waited: list[tuple[Flag, int, str]] = []
    for rank, lane, position, step in schedule:
        where = f"rank {rank}, lane {lane.name}, step {position} ({step})"
        if not isinstance(step, (Wait, Signal, ShareCounts, SegmentCopies, GroupedGemm)):
            raise ScheduleError(f"{where}: {problem.op} has no such step")
        if isinstance(step, (SegmentCopies, GroupedGemm)) and not any(isinstance(one, ShareCounts) for one in lane.steps):
            raise ScheduleError(f"{where}: it needs the counts of its call; put it on the lane that shares them")
        for flag in advances(step):
            if flag.rank not in range(problem.world_size):
                raise ScheduleError(f"{where}: {flag} lies on no rank; ranks are 0 to {problem.world_size - 1}")
            if flag in owners:
                raise ScheduleError(f"{where}: {flag} is advanced by {owners[flag]}, too; give each a flag of its own")
            owners[flag] = where
        waited += [(wait.flag, wait.at_least, where) for wait in waits(step)]
        if any(wait.flag.rank != rank for wait in waits(step)):
            raise ScheduleError(f"{where}: it waits for a flag of another rank")
        for part in step.parts if isinstance(step, (SegmentCopies, GroupedGemm)) else ():
            _check_part(schedule, problem, rank, part, where)
    for flag, at_least, where in waited:
        if at_least != 1:
            raise ScheduleError(f"{where}: it waits for {flag} of another call; with row counts on devices, use at_least=1")
        if flag not in owners:
            raise ScheduleError(f"{where}: it waits for {flag}, which nothing advances")


def _check_buffers(schedule: Schedule, problem: RaggedProblem) -> None:
    """The buffers that the problem may have, as large as its capacities, and all outputs."""
    known = {
        "a": ("input", problem.capacity, problem.k),
        "landing": ("symmetric", problem.m, problem.k),
        "product": ("symmetric", problem.capacity, problem.n),
        "out": ("output", problem.m, problem.n),
    }
    outputs = ["out"] + ["received"] * problem.return_received
    if problem.return_received:
        known["received"] = ("output", problem.m, problem.k)
    missing = [name for name in ("a", *outputs) if name not in schedule.buffer]
    if missing or len(schedule.buffer) < len(schedule.buffers):
        raise ScheduleError(
            f"buffers must each have a name of their own, and these are missing: {', '.join(missing) or 'none'}"
        )
    for buffer in schedule.buffers:
        if buffer.name not in known or buffer.float32:
            raise ScheduleError(f"buffer {buffer.name} is not one of {', '.join(known)}, in the problem's dtype")
        kind, rows, cols = known[buffer.name]
        each = problem.world_size
        if (buffer.kind, buffer.rows, buffer.cols) != (kind, (rows,) * each, (cols,) * each):
            raise ScheduleError(f"buffer {buffer.name} must be {kind}, with {rows} rows and {cols} columns on every rank")


def _check_part(schedule: Schedule, problem: RaggedProblem, rank: int, part: Part, where: str) -> None:
    source, target = (part.src, part.dst) if isinstance(part, SegmentCopy) else (part.a, part.out)
    if source.name != target.name:
        raise ScheduleError(f"{where}: {source} is not the segment of {target}")
    for side in (source, target):
        buffer = schedule.buffer.get(side.buffer)
        if buffer is None:
            raise ScheduleError(f"{where}: {side} lies in no buffer of segments")
        holder = side.src if side.buffer in ("a", "product") else side.dst
        ranks = range(problem.world_size)
        if side.rank != holder or side.src not in ranks or side.dst not in ranks or side.expert not in range(problem.experts):
            raise ScheduleError(f"{where}: {side.buffer} of rank {side.rank} does not hold {side}")
        if side.rank != rank and buffer.kind != "symmetric":
            raise ScheduleError(f"{where}: {side} is another rank's, and not symmetric")
    have, wide = (schedule.buffer[side.buffer].cols[side.rank] for side in (source, target))
    wanted = (have, have) if isinstance(part, SegmentCopy) else (problem.k, problem.n)
    if (have, wide) != wanted:
        raise ScheduleError(
            f"{where}: {source} has {have} columns and {target} has {wide}; it needs {wanted[0]} and {wanted[1]}"
        )
    if rank not in (source.rank, target.rank):
        raise ScheduleError(f"{where}: neither side is on the rank that runs it")
    if isinstance(part, SegmentProduct) and (source.rank != rank or rank != (part.a.dst if problem.dispatches else part.a.src)):
        raise ScheduleError(f"{where}: the expert of {source} is not on rank {rank}")
    if schedule.buffer[target.buffer].kind == "input":
        raise ScheduleError(f"{where}: it writes {target}, an input")


class _Walk:
    """Every lane as far as its waits let it, through CALLS calls, in an order that fits happens-before."""

    def __init__(self, schedule: Schedule, problem: RaggedProblem) -> None:
        self.schedule, self.problem = schedule, problem
        self.lanes = [[_Lane(r, lane.name, lane.steps) for lane in lanes] for r, lanes in enumerate(schedule.ranks)]
        self.signals: dict[tuple[Flag, int], int] = {}
        self.ended: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.nodes = 0
        self.writes: dict[Cell, tuple[int, str, object]] = {}
        """By cell: the node of the last write, where it was, and what it wrote."""
        self.reads: dict[Cell, list[tuple[int, str]]] = defaultdict(list)

    def run(self) -> None:
        moving = True
        while moving:
            moving, nodes = False, self.nodes
            for lane in [lane for lanes in self.lanes for lane in lanes]:
                while lane.call < CALLS and self._step(lane):
                    moving = True
            # A step that waits may have signalled before: parts of a kernel, or the counts of a rank that waits for others'.
            moving |= self.nodes > nodes
        stuck = [lane for lanes in self.lanes for lane in lanes if lane.call < CALLS and lane.position < len(lane.steps)]
        if stuck:
            raise ScheduleError("deadlock: " + "; ".join(map(self._missing, stuck)))

    def _missing(self, lane: _Lane) -> str:
        step = lane.steps[lane.position]
        flags = [wait.flag for wait in waits(step) if (wait.flag, lane.call) not in self.signals]
        return f"{self._where(lane)} waits for {', '.join(map(str, flags)) or 'the other lanes of its rank'}"

    def _where(self, lane: _Lane) -> str:
        return f"rank {lane.rank}, lane {lane.name}, step {lane.position} ({lane.steps[lane.position]})"

    def _step(self, lane: _Lane) -> bool:
        """Run the lane's next step, or end its call; False if it must wait."""
        if lane.position == 0 and lane.part == 0 and lane.call and not self._begin(lane):
            return False
        if lane.position == len(lane.steps):
            self._end_call(lane)
            return True
        step = lane.steps[lane.position]
        if isinstance(step, Wait):
            if (step.flag, lane.call) not in self.signals:
                return False
            lane.mask |= self.signals[step.flag, lane.call]
        elif isinstance(step, Signal):
            self._signal(lane, step.flag, lane.mask)
        elif isinstance(step, ShareCounts):
            if not self._share(lane, step):
                return False
        else:
            assert isinstance(step, (SegmentCopies, GroupedGemm))
            if not self._parts(lane, step.parts):
                return False
        lane.position += 1
        return True

    def _begin(self, lane: _Lane) -> bool:
        """A call begins after all lanes of the rank have ended the one before."""
        ends = self.ended[lane.rank, lane.call - 1]
        if len(ends) < len(self.lanes[lane.rank]):
            return False
        for end in ends:
            lane.mask |= end
        return True

    def _signal(self, lane: _Lane, flag: Flag, mask: int) -> None:
        self.signals[flag, lane.call] = mask

    def _node(self) -> int:
        self.nodes += 1
        return self.nodes - 1

    def _share(self, lane: _Lane, step: ShareCounts) -> bool:
        """Write the counts everywhere, then wait for the gates; False if it must wait."""
        while lane.part < len(step.flags):
            flag, node = step.flags[lane.part], self._node()
            cell = ("counts", flag.rank, lane.rank, lane.call % 2)
            self._write(cell, node, lane.mask, self._where(lane), ("counts", lane.rank, lane.call))
            lane.mask |= 1 << node
            self._signal(lane, flag, lane.mask)
            lane.part += 1
        opened = [self.signals.get((gate.flag, lane.call)) for gate in step.gates]
        if None in opened:
            return False
        for mask in opened:
            lane.mask |= mask or 0
        lane.part = 0
        return True

    def _parts(self, lane: _Lane, parts: tuple[Part, ...]) -> bool:
        if lane.part == 0:
            lane.joined = lane.mask
        while lane.part < len(parts):
            part, before = parts[lane.part], lane.mask
            for gate in part.gates:
                if (gate.flag, lane.call) not in self.signals:
                    return False
                before |= self.signals[gate.flag, lane.call]
            mask = self._act(lane, part, before)
            lane.joined |= mask
            if part.count is not None:
                self._signal(lane, part.count, mask)
            lane.part += 1
        lane.mask, lane.part = lane.joined, 0
        return True

    def _act(self, lane: _Lane, part: Part, before: int) -> int:
        """One part: it reads all counts and its source, and writes its target; what is then behind it."""
        where, node = f"{self._where(lane)}, part {lane.part} ({part})", self._node()
        for rank in range(self.problem.world_size):
            known = self._read(("counts", lane.rank, rank, lane.call % 2), node, lane.mask, where, f"the counts of rank {rank}")
            if known != ("counts", rank, lane.call):
                raise ScheduleError(f"{where}: the counts of rank {rank} have not arrived for this call")
        source, target = (part.src, part.dst) if isinstance(part, SegmentCopy) else (part.a, part.out)
        content = self._content(source, node, before, where, lane.call)
        if isinstance(part, SegmentProduct):
            if content[0] != "rows":
                raise ScheduleError(f"{where}: {source} holds a product already")
            content = ("product", *content[1:])
        self._write(_cell(target), node, before, where, content)
        return before | 1 << node

    def _content(self, source: Segment, node: int, before: int, where: str, call: int) -> tuple[object, ...]:
        if self.schedule.buffer[source.buffer].kind == "input":
            return "rows", source.name, call
        found = self._read(_cell(source), node, before, where, str(source))
        assert isinstance(found, tuple)
        return found

    def _read(self, cell: Cell, node: int, before: int, where: str, words: str) -> object:
        if cell not in self.writes:
            raise ScheduleError(f"{where}: it reads {words}, which nothing has written")
        writer, by, content = self.writes[cell]
        if not before >> writer & 1:
            raise ScheduleError(f"{where}: it reads {words} while {by} may still write it")
        self.reads[cell].append((node, where))
        return content

    def _write(self, cell: Cell, node: int, before: int, where: str, content: object) -> None:
        others = self.reads.pop(cell, [])
        if cell in self.writes:
            others.append(self.writes[cell][:2])
        for other, by in others:
            if not before >> other & 1:
                raise ScheduleError(f"{where}: it writes {' '.join(map(str, cell))} while {by} may still use it")
        if cell in self.writes and content == self.writes[cell][2]:
            raise ScheduleError(f"{where}: it writes {' '.join(map(str, cell))} a second time in a call")
        self.writes[cell] = node, where, content

    def _end_call(self, lane: _Lane) -> None:
        self.ended[lane.rank, lane.call].append(lane.mask)
        if len(self.ended[lane.rank, lane.call]) == len(self.lanes[lane.rank]):
            self._check_outputs(lane.rank, lane.call)
        lane.call, lane.position = lane.call + 1, 0

    def _check_outputs(self, rank: int, call: int) -> None:
        for buffer in (buffer for buffer in self.schedule.buffers if buffer.kind == "output"):
            kind = "product" if buffer.name == "out" else "rows"
            for name in self.problem.received_order(rank):
                segment = Segment(buffer.name, rank, *name)
                wanted, found = (kind, name, call), self.writes.get(_cell(segment), (0, "", None))[2]
                if found != wanted:
                    raise ScheduleError(f"{segment} holds {_describe(found, call)} at the end of a call, not its {kind}")


def _cell(segment: Segment) -> Cell:
    return segment.buffer, segment.rank, *segment.name


def _describe(found: object, call: int) -> str:
    if not isinstance(found, tuple):
        return "nothing"
    return f"the {found[0]} of segment {found[1]}" + (" of an earlier call" if found[2] != call else "")
