"""Draws a schedule as text. Time runs downward, and each lane has a column.

    -->  a flag from one lane to another of the same rank        ~>  a flag from rank to rank

Rows are topological levels of one call: a step is below everything that it waits for, and a wait is next to its signal if there
is space. Rows do not show durations. Lines of a kernel's parts are indented; the parts run concurrently. The last column lists
signals to and from ranks that have no column. A wait for the previous call (on_previous_call=True) has no signal next to it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any

from weft.core.concurrent import ConcurrentProblem
from weft.core.errors import require
from weft.core.fused_collective import SpelledOut, spelled_out
from weft.core.schedule import (
    Bags,
    Collective,
    Copy,
    Flag,
    Gemm,
    GroupedGemm,
    Lane,
    Lookup,
    Norm,
    Part,
    Push,
    Reduce,
    Region,
    Schedule,
    SegmentCopies,
    SegmentCopy,
    SegmentProduct,
    SendReceive,
    ShareCounts,
    Signal,
    Store,
    Sum,
    UserCall,
    Wait,
    signalled_flags,
)

_GAP = 4


def timeline(schedule: Schedule, *, ranks: Sequence[int] = (0,), width: int = 100) -> str:
    """Draw the schedule for `ranks`, with lines of at most `width` characters.

    A schedule that deadlocks is drawn up to the point where it stops, then the lines that never run. Raises ValueError for a
    rank that the schedule lacks, and for a width below 40 columns, or below what the ranks' lanes need.
    """
    require("schedule", schedule, Schedule, "use a weft.schedule.Schedule, as weft.schedule.build makes")
    require("ranks", ranks, Sequence, "use a row of ranks, such as (0, 1)")
    require("width", width, int, "use a whole number of columns, at least 40")
    wrong = [r for r in ranks if not (isinstance(r, int) and 0 <= r < len(schedule.ranks))]
    if wrong or not ranks:
        raise ValueError(f"ranks is {tuple(ranks)}; use some of 0 to {len(schedule.ranks) - 1}")
    if width < 40:
        raise ValueError(f"width is {width}; a timeline needs at least 40")
    spelled = spelled_out(schedule)
    schedule = spelled.schedule
    order = ("compute", "copy", "blocks", "network")
    listed = isinstance(schedule.problem, ConcurrentProblem)  # its lanes are listed in the order in which they are enqueued
    columns = [
        (rank, lane.name)
        for rank in ranks
        for lane in sorted(schedule.ranks[rank], key=lambda lane: 0 if listed else order.index(lane.kind))
    ]
    lines, never = Placer(spelled, frozenset(ranks)).run()
    shown = [line for line in lines if line.column in columns]
    drawn = _Drawing(schedule, columns, shown).text(width)
    late = [f"never: rank {n.column[0]}, {n.column[1]}: {n.text.strip()}"[:width] for n in never if n.column in columns]
    title = f"{schedule.name}, chunks={schedule.chunks}: {schedule.problem}"[:width]
    return "\n".join([title, "", *drawn, *late])


class _Drawing:
    """Placed lines as a grid of cells, with arrows in the gaps."""

    def __init__(self, schedule: Schedule, columns: list[Column], lines: list[Line]) -> None:
        self.columns, self.owners = columns, owners(schedule)
        self.says = {(rank, lane.name): _says(lane) for rank, lanes in enumerate(schedule.ranks) for lane in lanes}
        self.cells: dict[int, list[str]] = defaultdict(lambda: [""] * (len(columns) + 1))
        self.arrows: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        senders = {(flag, line.row): line.column for line in lines for flag in line.signals}
        for line in lines:
            at = columns.index(line.column)
            self.cells[line.row][at] = line.text
            self._note_peers(line, at)
            for wait in line.waits:
                sender = senders.get((wait.flag, line.row))
                if sender is not None and sender != line.column:
                    self.arrows[line.row].append((columns.index(sender), at, "-" if sender[0] == line.column[0] else "~"))

    def _note_peers(self, line: Line, at: int) -> None:
        """Add the last column: the ranks whose signals are awaited, and the ranks that are signalled."""
        shown = {rank for rank, _ in self.columns}
        sources = [(self.owners[w.flag][0], w) for w in line.waits if w.flag in self.owners]
        heard = [f"rank {rank} {words(wait)}" for rank, wait in sources if rank not in shown]
        what = "" if line.text.startswith("signal") else " {0.name}[{0.index}]"
        signalled = [f"~> rank {flag.rank}{what.format(flag)}" for flag in line.signals if flag.rank not in shown]
        self.cells[line.row][-1] += ", ".join([*(["<~ " + ", ".join(heard)] if heard else []), *signalled])
        if bool(heard) != bool(signalled):
            self.arrows[line.row].append((len(self.columns), at, "~") if heard else (at, len(self.columns), "~"))

    def text(self, width: int) -> list[str]:
        """Return all rows, under a heading."""
        heads = [", ".join((f"rank {rank}", name, *self.says[rank, name])) for rank, name in self.columns]
        last = any(cells[-1] for cells in self.cells.values())
        table = [[*heads, "other ranks" if last else ""], *(self.cells[row] for row in sorted(self.cells))]
        widths = _fit([max(len(cells[i]) for cells in table) for i in range(len(table[0]))], width)
        starts = list(accumulate(widths, lambda left, right: left + right + _GAP, initial=0))
        if (needed := starts[-1] - _GAP) > width:
            raise ValueError(f"width is {width}; {len(heads)} lanes need at least {needed}: use that, or fewer ranks")
        rows = [_overlay(table[0], starts, widths, [])]
        rows += [_overlay(self.cells[row], starts, widths, self.arrows[row]) for row in sorted(self.cells)]
        return rows


def _says(lane: Lane) -> list[str]:
    """Return the options of a lane's streams and kernels."""
    return ["priority"] * lane.priority + [f"ctas={lane.ctas}"] * bool(lane.ctas)


def _fit(widths: list[int], width: int) -> list[int]:
    """Return column widths that fit, after narrowing the widest columns."""
    widths = list(widths)
    while sum(widths) + _GAP * (len(widths) - 1) > width and max(widths) > 4:
        widths[widths.index(max(widths))] -= 1
    return widths


def _overlay(cells: list[str], starts: list[int], widths: list[int], arrows: list[tuple[int, int, str]]) -> str:
    """Return one row of text. Cells are cut to their widths, and an arrow is drawn if no cell is between its ends."""
    line = [" "] * (starts[len(cells) - 1] + widths[-1])
    for text, start, wide in zip(cells, starts, widths, strict=False):
        short = text if len(text) <= wide else text[: wide - 2] + ".."
        line[start : start + len(short)] = short
    for source, target, dash in arrows:
        left, right = min(source, target), max(source, target)
        if any(cells[left + 1 : right]):
            continue
        low, high = starts[left] + min(len(cells[left]), widths[left]) + 1, starts[right] - 1
        high += 3 * (right == len(cells) - 1)
        line[low:high] = dash * (high - low)
        line[high - 1 if target > source else low] = ">" if target > source else "<"
    return "".join(line).rstrip()


Column = tuple[int, str]
"""A rank and a lane."""
End = tuple[int, int, bool, int]
"""One end of a message: the sending rank, the receiving rank, whether it is the sender's end, and the message's number in the
call."""


@dataclass(slots=True)
class Line:
    """One line of a column.

    collective: the number of the line's collective, or -1.
    ends: the ends of messages.
    part: the line is a part of a kernel, and runs concurrently with its other parts.
    row: the row, once the line is placed.
    """

    column: Column
    text: str
    waits: tuple[Wait, ...] = ()
    signals: tuple[Flag, ...] = ()
    collective: int = -1
    ends: tuple[End, ...] = ()
    part: bool = False
    row: int = -1


@dataclass(slots=True)
class OpenLane:
    """A lane's lines that are not placed yet, and the first row that is free."""

    lines: list[Line]
    next_row: int = 0
    open: list[Line] = field(default_factory=list)

    def candidates(self) -> list[Line]:
        """Return the lines that may be placed next: any part of the current kernel, or the next line."""
        if not self.open and self.lines:
            self.open = [self.lines.pop(0)]
            while self.open[0].part and self.lines and self.lines[0].part:
                self.open.append(self.lines.pop(0))
        return self.open


class Placer:
    """Assigns a row to every line of every rank, in an order in which the steps could run. shown: the ranks with columns."""

    def __init__(self, spelled_out: SpelledOut, shown: frozenset[int]) -> None:
        schedule = spelled_out.schedule
        self.shown, self.size = shown, len(schedule.ranks)
        self.owners = owners(schedule)
        self.lanes = [OpenLane(_lines(spelled_out, rank, lane)) for rank, lanes in enumerate(schedule.ranks) for lane in lanes]
        self.signalled: dict[Flag, list[int]] = defaultdict(list)
        self.placed_collectives: dict[int, list[int]] = defaultdict(list)
        self.foreign_rows: set[int] = set()
        self.begun: dict[End, int] = {}

    def run(self) -> tuple[list[Line], list[Line]]:
        """Return the placed lines, and those that wait forever."""
        placed = []
        ready = [list(self._ready(lane)) for lane in self.lanes]
        while found := [(row, i, line) for i, some in enumerate(ready) for line, row in some]:
            row, number, line = min(found, key=lambda f: f[:2])
            self._place(self.lanes[number], line, row)
            placed.append(line)
            for at, lane in enumerate(self.lanes):
                if at == number or self._hears(lane, line):
                    ready[at] = list(self._ready(lane))
        return placed, [line for lane in self.lanes for line in (*lane.open, *lane.lines)]

    def _hears(self, lane: OpenLane, placed: Line) -> bool:
        """Return whether the next lines of a lane may get another row now that a line of another lane is placed."""
        signalled, foreign = set(placed.signals), self._is_foreign(placed)
        return any(
            line.collective >= 0
            or line.ends
            or (foreign and self._is_foreign(line))
            or (signalled and any(wait.flag in signalled for wait in line.waits))
            for line in lane.candidates()
        )

    def _ready(self, lane: OpenLane) -> Iterable[tuple[Line, int]]:
        for line in lane.candidates():
            rows = [lane.next_row]
            for wait in line.waits:
                if not wait.on_previous_call:
                    rows += self.signalled[wait.flag][:1] or [-1]
            if line.collective >= 0:
                rows += self._place_collective(line)
            rows += [self._other_end(end) for end in line.ends]
            if min(rows) >= 0:
                yield line, self._free_row(max(rows), line)

    def _place_collective(self, line: Line) -> list[int]:
        """Return the row of a collective, which is that of the last rank to reach it, or -1 if a rank has not reached it."""
        if line.collective in self.placed_collectives:
            return self.placed_collectives[line.collective]
        here = [lane.next_row for lane in self.lanes if any(c.collective == line.collective for c in lane.candidates())]
        return here if len(here) == self.size else [-1]

    def _other_end(self, end: End) -> int:
        """Return the first row for the other end of a message, or -1 if its lane has not reached it."""
        src, dst, sent, number = end
        other = (src, dst, not sent, number)
        here = [lane.next_row for lane in self.lanes if any(other in line.ends for line in lane.candidates())]
        return self.begun[other] if other in self.begun else here[0] if here else -1

    def _free_row(self, row: int, line: Line) -> int:
        """Return the first row from `row` on in which the last column is free, if the line needs it."""
        while self._is_foreign(line) and row in self.foreign_rows:
            row += 1
        return row

    def _conditions(self, line: Line) -> str:
        """Return the gates and counts of a part between ranks that have columns. The last column has the others."""
        gates = [f"wait {words(wait)}" for wait in line.waits if self.owners.get(wait.flag, (-1,))[0] in self.shown]
        counts = [f"count {flag.name}[{flag.index}]" for flag in line.signals if flag.rank in self.shown]
        return ", ".join([*gates, *counts]) + ": " * bool(gates or counts)

    def _is_foreign(self, line: Line) -> bool:
        if line.column[0] not in self.shown:
            return False
        sources = {self.owners[w.flag][0] for w in line.waits if w.flag in self.owners}
        return not sources | {f.rank for f in line.signals} <= self.shown

    def _place(self, lane: OpenLane, line: Line, row: int) -> None:
        line.row, lane.next_row = row, row + 1
        if line.text.split()[0] not in ("wait", "signal"):
            line.text = f"{'  ' * line.part}{self._conditions(line)}{line.text.strip()}"
        lane.open.remove(line)
        if self._is_foreign(line):
            self.foreign_rows.add(row)
        for flag in line.signals:
            self.signalled[flag].append(row)
        if line.collective >= 0:
            self.placed_collectives[line.collective] = [row]
        self.begun.update(dict.fromkeys(line.ends, row))


def owners(schedule: Schedule) -> dict[Flag, Column]:
    """Return the lane that signals each flag."""
    found: dict[Flag, Column] = {}
    for rank, lane, _, step in schedule:
        found.update(dict.fromkeys(signalled_flags(step), (rank, lane.name)))
    return found


@dataclass(slots=True)
class _At:
    """The state of a lane: the number of its collectives so far, and for each pair of ranks the number of its earlier
    messages."""

    schedule: Schedule
    column: Column
    collectives: Iterator[int] = field(default_factory=count)
    sent: Counter[tuple[int, int]] = field(default_factory=Counter)

    def line(self, text: str, waits: tuple[Wait, ...] = (), signals: tuple[Flag, ...] = (), *, part: bool = False) -> Line:
        return Line(self.column, text, waits, signals, part=part)


def _lines(spelled_out: SpelledOut, rank: int, lane: Lane) -> list[Line]:
    """Return a line for each step, or part of one, and a heading above the steps of each FusedCollective."""
    at, found = _At(spelled_out.schedule, (rank, lane.name)), list[Line]()
    kernels = {low: (high, kernel) for (low, high), kernel in spelled_out.of_lane(rank, lane.name).items()}
    for position, step in enumerate(lane.steps):
        if position in kernels:
            high, kernel = kernels[position]
            found.append(
                at.line(f"one kernel, {kernel.op}, {kernel.hops} hop{'s' * (kernel.hops > 1)}: {high - position} steps")
            )
        found += LINES[type(step)](at, step)
    return found


def _collective(at: _At, step: Collective) -> list[Line]:
    return [Line(at.column, f"{step.op} {_move(at, step.src, step.dst)}", collective=next(at.collectives))]


def _share(at: _At, step: ShareCounts) -> list[Line]:
    return [at.line("share counts", signals=step.flags), at.line("  counts of all ranks", step.gates, part=True)]


def _segments(at: _At, step: SegmentCopies | GroupedGemm) -> list[Line]:
    def line(part: SegmentCopy | SegmentProduct) -> Line:
        source, target = part.ends
        return at.line(f"  {source} -> {target}", part.gates, (part.count,) if part.count else (), part=True)

    return [at.line(str(step)), *map(line, step.parts)]


def _ends(at: _At, step: SendReceive) -> tuple[End, ...]:
    rank, found = at.column[0], list[End]()
    for src, dst, sent in [*((rank, s.to, True) for s in step.sends), *((r.source, rank, False) for r in step.receives)]:
        found.append((src, dst, sent, at.sent[src, dst]))
        at.sent[src, dst] += 1
    return tuple(found)


def _messages(at: _At, step: SendReceive) -> list[Line]:
    sent = [(_region(at, send.src), f"to {send.to}") for send in step.sends]
    received = [(_region(at, receive.dst), f"from {receive.source}") for receive in step.receives]
    directions = (("send", sent), ("receive", received))
    text = "; ".join(f"{verb} {', '.join(f'{what} {whom}' for what, whom in ends)}" for verb, ends in directions if ends)
    return [Line(at.column, text, ends=_ends(at, step))]


def _kernel(at: _At, step: Push | Gemm | Reduce | Lookup, dash: str = "-") -> list[Line]:
    """Return a line for a kernel of one part, else a heading and a line for each part."""
    parts = [_part(at, part, dash) for part in step.parts]
    if len(parts) == 1:
        text, waits, signals = parts[0]
        return [at.line(f"{type(step).__name__.lower()} {text}", waits, signals)]
    return [at.line(str(step)), *(at.line(f"  {text}", waits, signals, part=True) for text, waits, signals in parts)]


def _part(at: _At, part: Store | Part | Sum | Bags, dash: str) -> tuple[str, tuple[Wait, ...], tuple[Flag, ...]]:
    counts = (part.count,) if part.count else ()
    if isinstance(part, Store):
        return _move(at, part.src, part.dst), (), counts
    if isinstance(part, Bags):
        return f"{_region(at, part.bags)} {dash}> {_region(at, part.out)}", (), counts
    alone = (part.a,) if isinstance(part, Part) else part.srcs if len(part.srcs) == 1 else ()
    summed = part.adds if isinstance(part, Part) else () if alone else part.srcs
    names = dict.fromkeys(f"{s.buffer}{'' if s.rank == at.column[0] else f'@{s.rank}'}" for s in summed)
    inner = tuple(column for column, _ in part.inner) if isinstance(part, Part) else ()
    src = " + ".join([*(_region(at, region, inner) for region in alone), *names])
    text = f"{src} {dash}> {_region(at, part.out)}"
    return text, part.waits, counts


def words(wait: Wait) -> str:
    """Return a wait's flag, with `prev` for the signal of the previous call."""
    return f"{'prev ' if wait.on_previous_call else ''}{wait.flag.name}[{wait.flag.index}]"


def _move(at: _At, src: Region, dst: Region) -> str:
    return f"{_region(at, src)} -> {_region(at, dst)}"


def _region(at: _At, region: Region, inner: tuple[int, ...] = ()) -> str:
    """Return a short text: the rank if it is another one, and the columns if they are not all, or are cut at inner gates."""
    name = region.buffer if region.rank == at.column[0] else f"{region.buffer}@{region.rank}"
    low, high = region.cols
    whole = not inner and region.cols == (0, at.schedule.buffer[region.buffer].cols[region.rank])
    cols = ":".join(map(str, (low, *(low + column for column in inner), high)))
    return f"{name}[{region.rows[0]}:{region.rows[1]}{'' if whole else f', {cols}'}]"


LINES: dict[type, Callable[[_At, Any], list[Line]]] = {
    Wait: lambda at, step: [at.line(f"wait {words(step)}", (step,))],
    Signal: lambda at, step: [at.line(f"signal {step.flag.name}[{step.flag.index}]", signals=(step.flag,))],
    Copy: lambda at, step: [at.line(f"copy {_move(at, step.src, step.dst)}")],
    Push: _kernel,
    Gemm: lambda at, step: _kernel(at, step, "=" if step.accumulate else "-"),
    Reduce: _kernel,
    Norm: lambda at, step: [at.line(f"norm {_move(at, step.src, step.out)}")],
    Lookup: _kernel,
    Collective: _collective,
    SendReceive: _messages,
    UserCall: lambda at, step: [at.line(str(step))],
    ShareCounts: _share,
    SegmentCopies: _segments,
    GroupedGemm: _segments,
}
"""The function that returns the lines of each type of step. A FusedCollective has been replaced by its steps."""
