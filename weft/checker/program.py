"""The checker's form of a schedule, in which numbers replace names. `weft.checker.structure` builds it.

Flags are numbered, and so are memories, one for each (buffer, rank). Copies and kernels are both an `Op` with actions: a copy
has one action, a kernel one for each part. An action that writes no element accesses no memory, but still waits and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from enum import IntEnum
from typing import NamedTuple

from weft.core.fused_collective import SpelledOut
from weft.core.schedule import Flag, Schedule

Rect = tuple[int, int, int, int]
"""A rectangle of rows [0] to [1] and columns [2] to [3]."""

Access = tuple[int, Rect]
"""A memory and a rectangle of it."""

Place = tuple[int, int, int]
"""A rank, a lane, and the position of a step."""

CALLER = (-1, -1)
"""The lane and position of the caller's accesses between two calls."""


class ScheduleError(ValueError):
    """Raised for a schedule that would fail, hang, race, or compute something else than its problem."""


class Do(IntEnum):
    """The kind of an op or an action."""

    WAIT = 0
    SIGNAL = 1
    WORK = 2
    COLLECTIVE = 3
    COPY = 4
    GEMM = 5
    ADD = 6
    EXCHANGE = 7
    MESSAGES = 8
    ADD_ALL = 9
    EXCHANGE_COLUMNS = 10
    GEMM_OF_TRANSPOSE = 11
    NORM = 12


class Action(NamedTuple):
    """One part of a kernel, or a copy: the gates that it waits for, its accesses, and the flag that it counts (-1: none).

    adds: what it reads after its gates open, if it reads everything else before (late gates).
    inner: gates that it waits for in order after those.
    slices: for each inner gate, what it reads after that gate.
    late: it has late gates, in any call.
    """

    do: Do
    gates: tuple[tuple[int, bool], ...]
    counts: int
    reads: tuple[Access, ...]
    write: Access | None
    accumulate: bool
    divide_by: int
    adds: tuple[Access, ...] = ()
    inner: tuple[tuple[int, bool], ...] = ()
    slices: tuple[Access, ...] = ()
    late: bool = False

    @property
    def waits(self) -> tuple[tuple[int, bool], ...]:
        """Return every gate, including the inner ones."""
        return self.gates + self.inner

    def within(self, memories: Container[int]) -> Action:
        """Return the action with only its accesses to `memories`."""
        reads = tuple([read for read in self.reads if read[0] in memories])
        write = self.write if self.write and self.write[0] in memories else None
        if not self.late and not self.inner:
            if write is self.write and len(reads) == len(self.reads):
                return self
            return Action(self.do, self.gates, self.counts, reads, write, self.accumulate, self.divide_by)
        adds, slices = [tuple([access for access in old if access[0] in memories]) for old in (self.adds, self.slices)]
        return self._replace(reads=reads, write=write, adds=adds, slices=slices)


class Op(NamedTuple):
    """An Op is one step.

    flag: the flag of a wait or signal.
    on_previous_call: whether a wait is for the signal of the previous call.
    fills: whether the step's waiting blocks may fill the rank's SMs.
    messages: for each action of an exchange, whether it is sent, and the rank at the other end.
    previous: the flags whose signal of the previous call a kernel waits for at its start.
    """

    do: Do
    flag: int = -1
    on_previous_call: bool = False
    actions: tuple[Action, ...] = ()
    needs_sms: bool = False
    fills: bool = False
    messages: tuple[tuple[bool, int], ...] = ()
    previous: tuple[int, ...] = ()


class CompiledSchedule(NamedTuple):
    """A CompiledSchedule is a schedule with numbers in place of names, which the walk runs.

    ops: the steps by rank, lane and position.
    owners: for each flag, the lane that signals it.
    waiters: for each flag, the steps that wait for it, and whether each waits for the previous call.
    memories: the number of each (buffer, rank).
    shared: the memories that peers may touch.
    describe: returns the text of an access as a schedule prints it.
    """

    spelled_out: SpelledOut
    ops: tuple[tuple[tuple[Op, ...], ...], ...]
    flags: tuple[Flag, ...]
    owners: tuple[tuple[int, int] | None, ...]
    waiters: tuple[dict[Place, int], ...]
    memories: tuple[tuple[str, int], ...]
    shared: set[int]
    describe: Callable[[Access], str]

    @property
    def schedule(self) -> Schedule:
        """Return the schedule without FusedCollective steps."""
        return self.spelled_out.schedule

    def where(self, rank: int, lane: int, position: int, part: int | None = None) -> str:
        """Return the text of a step, or of its part, for messages. At CALLER it is the text of the rank's caller."""
        if (lane, position) == CALLER:
            return f"the caller of rank {rank}"
        name, step = self.schedule.ranks[rank][lane].name, self.schedule.ranks[rank][lane].steps[position]
        parts = getattr(step, "parts", ())
        detail = f", part {part}: {parts[part]}" if part is not None and len(parts) > 1 else ""
        return describe_step(self.spelled_out, rank, name, position, f"{step}{detail}")


def describe_step(spelled_out: SpelledOut, rank: int, lane: str, position: int, step: str) -> str:
    """Return the text of a step, named by its place in the schedule that the caller passed."""
    at, kernel = spelled_out.place(rank, lane, position)
    return f"rank {rank}, lane {lane}, step {at} ({f'{kernel}: {step}' if kernel else step})"


def overlap(one: Rect, two: Rect) -> Rect | None:
    """Return the intersection of two rectangles, or None."""
    low_row, high_row = max(one[0], two[0]), min(one[1], two[1])
    low_col, high_col = max(one[2], two[2]), min(one[3], two[3])
    return (low_row, high_row, low_col, high_col) if low_row < high_row and low_col < high_col else None


def area(rect: Rect) -> int:
    return (rect[1] - rect[0]) * (rect[3] - rect[2])
