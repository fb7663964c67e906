"""One interleaving of a schedule, step by step: the half of the brute-force interpreter that runs. See brute.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from brute_values import Access, Values, Wrong

from weft.core.schedule import (
    Collective,
    Copy,
    Flag,
    Gemm,
    Lane,
    Push,
    Reduce,
    Schedule,
    SendReceive,
    Signal,
    Step,
    Wait,
    waits,
)

Accesses = dict[tuple[int, int], list[Access]]
"""By the step's identity and the part's number, in their order."""

Policy = Callable[["Task"], float]
"""What runs first among all that can: the lowest."""


@dataclass(eq=False)
class Task:
    """A coroutine: `wants` is the event that it does next, `ready` whether it may."""

    run: Iterator[tuple[object, Callable[[], bool]]]
    rank: int
    wants: object = None
    ready: Callable[[], bool] = field(default=lambda: True)


def needs_sms(rank: int, lane: Lane, step: Step) -> bool:
    """Kernels, and copies within the rank, except on communication blocks."""
    if lane.kind == "blocks":
        return False
    if isinstance(step, Copy):
        return step.src.rank == step.dst.rank
    if isinstance(step, Push):
        return lane.kind == "compute"
    return isinstance(step, (Gemm, Reduce, Collective, SendReceive))


def fills(lane: Lane, step: Step) -> bool:
    """A kernel whose waiting blocks may take every SM."""
    return lane.kind == "compute" and isinstance(step, (Gemm, Reduce)) and any(p.waits for p in step.parts)


class Run:
    """One interleaving. full: kernels with gates hold all SMs of their rank. in_order: parts run one after the other. met:
    messages end once both ends have begun."""

    def __init__(
        self,
        schedule: Schedule,
        accesses: Accesses,
        calls: int,
        *,
        values: bool,
        full: bool = False,
        in_order: bool = False,
        met: bool = False,
    ) -> None:
        self.schedule, self.accesses, self.calls, self.full, self.in_order = schedule, accesses, calls, full, in_order
        self.size, self.per_call = schedule.problem.world_size, schedule.signals_per_call
        self.flags: dict[Flag, int] = {}
        self.waiters: dict[Flag, list[object]] = {}
        for rank, lane, position, step in schedule:
            for wait in waits(step):
                self.waiters.setdefault(wait.flag, []).append((rank, lane.name, position))
        self.lowered: Counter[tuple[Flag, object]] = Counter()
        """How often each step that waits for a flag has lowered it, so that it may be raised again."""
        self.left = [[len(lanes) for lanes in self.schedule.ranks] for _ in range(calls)]
        self.met: dict[tuple[int, int], int] = {}
        self.must_meet = met
        self.begun: dict[tuple[int, int, bool], int] = {}
        self.mail: dict[tuple[int, int, int], np.ndarray | None] = {}
        self.holder: dict[int, object] = {}
        count = sum(map(len, accesses.values()))
        self.starts = np.zeros((calls, count), np.int64)
        self.ends = np.zeros((calls, count), np.int64)
        self.clock = 0
        self.values = Values(self.schedule, calls) if values else None
        self.tasks: list[Task] = []

    def go(self, policy: Policy) -> None:
        """Run to the end. Raises Wrong."""
        for rank, lanes in enumerate(self.schedule.ranks):
            for lane in lanes:
                self._spawn(rank, self._lane(rank, lane))
        while self.tasks:
            task = min((t for t in self.tasks if t.ready()), key=policy, default=None)
            if task is None:
                raise Wrong("deadlock: " + "; ".join(str(getattr(t.wants, "step", t.wants)) for t in self.tasks))
            self.clock += 1
            self._next(task)

    def _spawn(self, rank: int, run: Iterator[tuple[object, Callable[[], bool]]]) -> None:
        task = Task(run, rank)
        self.tasks.append(task)
        self._next(task)

    def _next(self, task: Task) -> None:
        """Do what the task wants, up to its next wish."""
        try:
            task.wants, task.ready = next(task.run)
        except StopIteration:
            self.tasks.remove(task)

    def _lane(self, rank: int, lane: Lane) -> Iterator[tuple[object, Callable[[], bool]]]:
        for call in range(self.calls):
            yield ("call", rank), lambda call=call: call == 0 or self.left[call - 1][rank] == 0
            if self.values:
                self.values.begin(rank, call)
            ordinals: dict[Flag, int] = {}
            meetings = 0
            for position, step in enumerate(lane.steps):
                place = (rank, lane.name, position)
                if isinstance(step, Wait):
                    yield step, self._reached(call, step)
                    self._lower(call, step, place)
                elif isinstance(step, Signal):
                    yield step, lambda: True
                    self._advance(call, step.flag, ordinals)
                elif isinstance(step, Collective):
                    yield from self._collective(rank, lane, step, call, meetings)
                    meetings += 1
                elif isinstance(step, SendReceive):
                    yield from self._messages(rank, lane, step, call)
                else:
                    yield from self._work(rank, lane, step, call, ordinals, place)
            self.left[call][rank] -= 1
            if self.left[call][rank] == 0 and self.values:
                self.values.end(rank, call)

    def _reached(self, call: int, wait: Wait) -> Callable[[], bool]:
        number = call * self.per_call[wait.flag] + (not wait.on_previous_call)
        return lambda: self.flags.get(wait.flag, 0) >= number

    def _advance(self, call: int, flag: Flag, ordinals: dict[Flag, int]) -> None:
        """Raise a flag. What its waiters have not lowered since the last time is lost."""
        for place in self.waiters.get(flag, ()):
            if self.lowered[flag, place] < call:
                raise Wrong(f"{flag} is raised again before {place} has lowered it")
        ordinals[flag] = ordinals.get(flag, 0) + 1
        self.flags[flag] = call * self.per_call[flag] + ordinals[flag]

    def _lower(self, call: int, wait: Wait, place: object) -> None:
        """A step has passed a wait; that for the call before passes nothing in the first call."""
        if call or not wait.on_previous_call:
            self.lowered[wait.flag, place] = call + (not wait.on_previous_call)

    def _begin(self, rank: int, lane: Lane, step: Step) -> Iterator[tuple[object, Callable[[], bool]]]:
        if self.full and needs_sms(rank, lane, step):
            yield ("start", id(step)), lambda: rank not in self.holder
            if fills(lane, step):
                self.holder[rank] = step

    def _work(
        self, rank: int, lane: Lane, step: Step, call: int, ordinals: dict[Flag, int], place: object
    ) -> Iterator[tuple[object, Callable[[], bool]]]:
        previous = [wait for wait in waits(step) if wait.on_previous_call]
        if previous:
            yield ("gates", id(step)), lambda: all(self._reached(call, wait)() for wait in previous)
        for wait in previous:
            self._lower(call, wait, place)
        yield from self._begin(rank, lane, step)
        parts = getattr(step, "parts", (step,))
        done = [0]
        for i, part in enumerate(parts):
            self._spawn(rank, self._part(self.accesses[id(step), i], part, call, ordinals, done))
        yield ("finish", id(step)), lambda: done[0] == len(parts)
        for wait in waits(step):
            if not wait.on_previous_call:
                self._lower(call, wait, place)
        if self.holder.get(rank) is step:
            del self.holder[rank]

    def _messages(self, rank: int, lane: Lane, step: SendReceive, call: int) -> Iterator[tuple[object, Callable[[], bool]]]:
        """All ends at once, each when it can."""
        yield from self._begin(rank, lane, step)
        done, others = [0], []
        ends = [*((rank, s.to, True) for s in step.sends), *((r.source, rank, False) for r in step.receives)]
        for i, (src, dst, sent) in enumerate(ends):
            number = self.begun[src, dst, sent] = self.begun.get((src, dst, sent), 0) + 1
            others.append(((src, dst, not sent), number))
            self._spawn(rank, self._message(self.accesses[id(step), i][0], (src, dst, number), sent, call, done))

        def through() -> bool:
            met = all(self.begun.get(other, 0) >= number for other, number in others)
            return done[0] == len(ends) and (met or not self.must_meet)

        yield ("finish", id(step)), through

    def _message(
        self, access: Access, key: tuple[int, int, int], sent: bool, call: int, done: list[int]
    ) -> Iterator[tuple[object, Callable[[], bool]]]:
        yield access, lambda: sent or key in self.mail
        self.starts[call, access.number] = self.ends[call, access.number] = self.clock
        if sent:
            self.mail[key] = self.values.read(access.reads[0]).copy() if self.values else None
        elif self.values:
            assert access.write is not None
            self.values.write(access.write, self.mail.pop(key))
        done[0] += 1

    def _part(
        self, accesses: list[Access], part: object, call: int, ordinals: dict[Flag, int], done: list[int]
    ) -> Iterator[tuple[object, Callable[[], bool]]]:
        """Its accesses one after the other, each once its gates are open."""
        for access in accesses:
            gates = [self._reached(call, gate) for gate in access.gates]
            if self.in_order and access is accesses[-1]:
                gates.append(lambda: done[0] == accesses[-1].part)
            yield access, lambda gates=gates: all(gate() for gate in gates)  # type: ignore[misc]
            self.starts[call, access.number] = self.ends[call, access.number] = self.clock
            if self.values:
                self.values.work(access)
        if getattr(part, "count", None):
            self._advance(call, part.count, ordinals)  # type: ignore[attr-defined]
        done[0] += 1

    def _collective(
        self, rank: int, lane: Lane, step: Collective, call: int, ordinal: int
    ) -> Iterator[tuple[object, Callable[[], bool]]]:
        (access,) = self.accesses[id(step), 0]
        yield from self._begin(rank, lane, step)
        yield access, lambda: True
        self.starts[call, access.number] = self.clock
        self.met[call, ordinal] = self.met.get((call, ordinal), 0) + 1
        if self.values:
            self.values.meet(access, (call, ordinal))
        yield ("end", access), lambda: self.met[call, ordinal] == self.size
        self.ends[call, access.number] = self.clock
        if self.values:
            self.values.part(access, (call, ordinal))
