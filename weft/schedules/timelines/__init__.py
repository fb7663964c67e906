"""Draws a schedule as text. Time runs downward, and each lane has a column.

    -->  a flag from one lane to another of the same rank        ~>  a flag from rank to rank

Rows are topological levels of one call: a step is below everything that it waits for, and a wait is next to its signal if there
is space. Rows do not show durations. Lines of a kernel's parts are indented; the parts run concurrently. The last column lists
signals to and from ranks that have no column. A wait for the previous call (on_previous_call=True) has no signal next to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from weft.core.concurrent import ConcurrentProblem
from weft.core.errors import require
from weft.core.fused_collective import spelled_out
from weft.core.schedule import Lane, Schedule
from weft.schedules.timelines.lines import Column, Line, Placer, owners, words

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
    return "\n".join([*_title(schedule, width), *drawn, *late])


def _title(schedule: Schedule, width: int) -> list[str]:
    return [f"{schedule.name}, chunks={schedule.chunks}: {schedule.problem}"[:width], ""]


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
