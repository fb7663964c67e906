"""A deliberately naive interpreter of schedules, to hold the checker against. It shares no code with weft.check.

`verdict(schedule)` is "" if a small schedule is right, else what went wrong. It runs three calls, with new random inputs
in each, in many directed interleavings:

    - lanes and parts of kernels are coroutines; a flag is a word, to which a signal writes call * D + its ordinal;
    - every buffer element is a number modulo a prime, or poison until it is first written;
    - once in the order given, once backwards, once with each rank held back, and once for every copy, part and
      collective with that one held back for as long as anything else can run. If two accesses are not ordered by the
      schedule, then each of them comes first in the run that holds back the other. So a pair of conflicting accesses
      that has been seen in both orders is a race, and a pair that has not is none: no run at random could find more;
    - then, where a kernel with gates shares a rank with other lanes that need SMs, again with such kernels holding all
      SMs from start to end, holding back every start and every pair of starts, and in random orders.

Wrong is: a deadlock, a race (of equal values too), a read of poison, a result that is not the sequential program's, and
whatever no machine could run: shapes that do not fit, regions outside their buffer, a peer's private memory, an input
that is overwritten, a flag with two writers.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from brute_values import Access, Values, Wrong

from weft.problem import Problem
from weft.schedule import Collective, Copy, Flag, Gemm, Lane, Reduce, Region, Schedule, Signal, Step, Wait

CALLS = 3
Policy = Callable[["Task"], float]
"""What runs first among all that can: the lowest."""


@dataclass(eq=False)
class Task:
    """A coroutine: `wants` is the event that it does next, `ready` whether it may."""

    run: Iterator[tuple[object, Callable[[], bool]]]
    rank: int
    wants: object = None
    ready: Callable[[], bool] = field(default=lambda: True)


def verdict(schedule: Schedule) -> str:
    """What is wrong with the schedule; nothing if it is right."""
    try:
        _Brute(schedule).judge()
    except Wrong as wrong:
        return str(wrong)
    return ""


class _Brute:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.size = schedule.problem.world_size
        self.per_call = schedule.signals_per_call
        self.accesses: dict[tuple[int, int], Access] = {}
        self._check_flags()
        for rank, _, _, step in schedule:
            self._list_accesses(rank, step)
        for number, access in enumerate(self.accesses.values()):
            access.number = number
            self._check_access(access)

    def _list_accesses(self, rank: int, step: Step) -> None:
        if isinstance(step, (Copy, Collective)):
            self._add(rank, step, 0, [step.src], step.dst)
        elif isinstance(step, Gemm):
            for i, part in enumerate(step.parts):
                old = [part.out] if step.accumulate else []
                self._add(rank, step, i, [part.a, step.b, *old] if part.out.size else [], part.out)
        elif isinstance(step, Reduce):
            for i, total in enumerate(step.parts):
                self._add(rank, step, i, list(total.srcs), total.out)

    def _add(self, rank: int, step: Step, part: int, reads: list[Region], write: Region) -> None:
        self.accesses[id(step), part] = Access(rank, step, part, reads, write)

    def judge(self) -> None:
        """Raises Wrong."""
        conflicts = self._conflicts()
        before = np.ones((CALLS * len(self.accesses), CALLS * len(self.accesses)), bool)
        for number, policy in enumerate(self._policies()):
            run = _Run(self, CALLS, values=number < 3)
            run.go(policy)
            ends, starts = run.ends.ravel(), run.starts.ravel()
            before &= ends[:, None] < starts[None, :]
            both = conflicts & ~(before | before.T)
            if both.any():
                one, two = np.argwhere(both)[0] % len(self.accesses)
                raise Wrong(f"race: {self._words(one)} and {self._words(two)} in both orders")
        if self._crowded():
            for policy in self._start_policies():
                _Run(self, 1, values=False, full=True).go(policy)

    def _words(self, number: int) -> str:
        access = list(self.accesses.values())[number]
        return f"{access.step} on rank {access.rank}"

    def _policies(self) -> Iterator[Policy]:
        tasks = {id(step): i for i, (_, _, _, step) in enumerate(self.schedule)}
        yield lambda task: 0
        yield lambda task: -tasks.get(id(getattr(task.wants, "step", task.wants)), 0)
        for rank in range(self.size):
            yield lambda task, rank=rank: task.rank == rank
        for access in self.accesses.values():
            yield lambda task, access=access: task.wants is access or task.wants == ("end", access)

    def _start_policies(self) -> Iterator[Policy]:
        starts = [step for _, _, _, step in self.schedule if isinstance(step, (Copy, Gemm, Reduce, Collective))]
        for count in (1, 2):
            for held in itertools.combinations(map(id, starts), count):
                yield lambda task, held=held: task.wants in {("start", h) for h in held}
        rng = random.Random(len(starts))
        for _ in range(60):
            order = {("start", id(step)): rng.random() for step in starts}
            yield lambda task, order=order: order.get(task.wants, -1.0)

    def _crowded(self) -> bool:
        for rank, lanes in enumerate(self.schedule.ranks):
            users = [lane for lane in lanes if any(needs_sms(rank, lane, s) for s in lane.steps)]
            if len(users) > 1 and any(fills(lane, s) for lane in lanes for s in lane.steps):
                return True
        return False

    def _check_flags(self) -> None:
        writers: dict[Flag, set[tuple[int, str]]] = {}
        for rank, lane, _, step in self.schedule:
            flags = [step.flag] if isinstance(step, Signal) else [p.count for p in getattr(step, "parts", ()) if p.count]
            if len(flags) > len(set(flags)):
                raise Wrong(f"{step} has a flag with two writers")
            for flag in flags:
                writers.setdefault(flag, set()).add((rank, lane.name))
            for wait in [step] if isinstance(step, Wait) else [g for p in getattr(step, "parts", ()) for g in p.gates]:
                if wait.flag.rank != rank:
                    raise Wrong(f"{step} waits for a flag of another rank")
        for flag, found in writers.items():
            if len(found) > 1:
                raise Wrong(f"{flag} has two writers")

    def _check_access(self, access: Access) -> None:
        named = [access.step.parts[access.part].a, access.step.b] if isinstance(access.step, Gemm) else []
        for region in [*named, *access.reads, access.write]:
            buffer = self.schedule.buffer[region.buffer]
            ends = (region.rows[1] <= buffer.rows[region.rank], region.cols[1] <= buffer.cols[region.rank])
            if not all(ends) or min(*region.rows, *region.cols) < 0 or min(region.shape) < 0:
                raise Wrong(f"{access.step} goes outside {region.buffer}")
            if region.rank != access.rank and buffer.kind != "symmetric":
                raise Wrong(f"{access.step} touches private memory of a peer")
        if self.schedule.buffer[access.write.buffer].kind == "input":
            raise Wrong(f"{access.step} overwrites an input")
        if isinstance(access.step, Gemm):
            part = access.step.parts[access.part]
            fits = part.a.shape[1] == access.step.b.shape[0] and part.out.shape == (part.a.shape[0], access.step.b.shape[1])
        elif isinstance(access.step, Collective):
            fits = _collective_fits(access.step, self.schedule.problem, access.rank)
        else:
            fits = all(src.shape == access.write.shape for src in access.reads)
        if not fits:
            raise Wrong(f"{access.step} does not fit")
        self._check_self(access)

    def _check_self(self, access: Access) -> None:
        """Within one access, elements are read and written in no order, but a sum may be in place."""
        step = access.step
        reads = access.reads[:2] if isinstance(step, Gemm) else access.reads
        for region in reads:
            in_place = isinstance(step, Reduce) and region == access.write
            if not in_place and _elements(region) & _elements(access.write):
                raise Wrong(f"{step} overwrites what it reads")

    def _conflicts(self) -> np.ndarray:
        """Which pairs of accesses, of any calls, share an element that one of them writes."""
        places: dict[tuple[object, ...], int] = {}
        reads, writes = [], []
        for access in self.accesses.values():
            reads.append({places.setdefault(e, len(places)) for r in access.reads for e in _elements(r)})
            writes.append({places.setdefault(e, len(places)) for e in _elements(access.write)})
        touched = np.zeros((2, len(reads), len(places)), np.float32)
        for kind, sets in enumerate((reads, writes)):
            for i, found in enumerate(sets):
                touched[kind, i, list(found)] = 1
        pairs = touched[1] @ (touched[0] + touched[1]).T
        pairs = (pairs + pairs.T) > 0
        np.fill_diagonal(pairs, False)
        return np.tile(pairs, (CALLS, CALLS))


def _elements(region: Region) -> set[tuple[object, ...]]:
    return {(region.buffer, region.rank, i, j) for i in range(*region.rows) for j in range(*region.cols)}


def _collective_fits(step: Collective, problem: Problem, rank: int) -> bool:
    own = problem.shards[rank][1] - problem.shards[rank][0]
    rows = (own, problem.m) if step.op == "all_gather" else (problem.m, own)
    return (step.src.shape[0], step.dst.shape[0]) == rows and step.src.shape[1] == step.dst.shape[1]


def needs_sms(rank: int, lane: Lane, step: Step) -> bool:
    """Kernels, and copies within the rank, except on communication blocks."""
    if lane.kind == "blocks":
        return False
    return step.src.rank == step.dst.rank if isinstance(step, Copy) else isinstance(step, (Gemm, Reduce, Collective))


def fills(lane: Lane, step: Step) -> bool:
    """A kernel whose waiting blocks may take every SM."""
    return lane.kind == "compute" and isinstance(step, (Gemm, Reduce)) and any(p.gates for p in step.parts)


class _Run:
    """One interleaving. full: kernels with gates hold all SMs of their rank."""

    def __init__(self, brute: _Brute, calls: int, *, values: bool, full: bool = False) -> None:
        self.brute, self.schedule, self.calls, self.full = brute, brute.schedule, calls, full
        self.flags: dict[Flag, int] = {}
        self.left = [[len(lanes) for lanes in self.schedule.ranks] for _ in range(calls)]
        self.met: dict[tuple[int, int], int] = {}
        self.holder: dict[int, object] = {}
        self.starts = np.zeros((calls, len(brute.accesses)), np.int64)
        self.ends = np.zeros((calls, len(brute.accesses)), np.int64)
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
            for step in lane.steps:
                if isinstance(step, Wait):
                    yield step, self._reached(call, step)
                elif isinstance(step, Signal):
                    yield step, lambda: True
                    self._advance(call, step.flag, ordinals)
                elif isinstance(step, Collective):
                    yield from self._collective(rank, lane, step, call, meetings)
                    meetings += 1
                else:
                    yield from self._work(rank, lane, step, call, ordinals)
            self.left[call][rank] -= 1
            if self.left[call][rank] == 0 and self.values:
                self.values.end(rank, call)

    def _reached(self, call: int, wait: Wait) -> Callable[[], bool]:
        number = call * self.brute.per_call[wait.flag] + wait.at_least
        return lambda: self.flags.get(wait.flag, 0) >= number

    def _advance(self, call: int, flag: Flag, ordinals: dict[Flag, int]) -> None:
        ordinals[flag] = ordinals.get(flag, 0) + 1
        self.flags[flag] = call * self.brute.per_call[flag] + ordinals[flag]

    def _begin(self, rank: int, lane: Lane, step: Step) -> Iterator[tuple[object, Callable[[], bool]]]:
        if self.full and needs_sms(rank, lane, step):
            yield ("start", id(step)), lambda: rank not in self.holder
            if fills(lane, step):
                self.holder[rank] = step

    def _work(
        self, rank: int, lane: Lane, step: Step, call: int, ordinals: dict[Flag, int]
    ) -> Iterator[tuple[object, Callable[[], bool]]]:
        yield from self._begin(rank, lane, step)
        parts = getattr(step, "parts", (step,))
        open_parts = [len(parts)]
        for i, part in enumerate(parts):
            self._spawn(rank, self._part(self.brute.accesses[id(step), i], part, call, ordinals, open_parts))
        yield ("finish", id(step)), lambda: open_parts[0] == 0
        if self.holder.get(rank) is step:
            del self.holder[rank]

    def _part(
        self, access: Access, part: object, call: int, ordinals: dict[Flag, int], open_parts: list[int]
    ) -> Iterator[tuple[object, Callable[[], bool]]]:
        gates = [self._reached(call, gate) for gate in getattr(part, "gates", ())]
        yield access, (lambda: all(gate() for gate in gates)) if gates else (lambda: True)
        self.starts[call, access.number] = self.ends[call, access.number] = self.clock
        if self.values:
            self.values.work(access)
        if getattr(part, "count", None):
            self._advance(call, part.count, ordinals)  # type: ignore[attr-defined]
        open_parts[0] -= 1

    def _collective(
        self, rank: int, lane: Lane, step: Collective, call: int, ordinal: int
    ) -> Iterator[tuple[object, Callable[[], bool]]]:
        access = self.brute.accesses[id(step), 0]
        yield from self._begin(rank, lane, step)
        yield access, lambda: True
        self.starts[call, access.number] = self.clock
        self.met[call, ordinal] = self.met.get((call, ordinal), 0) + 1
        if self.values:
            self.values.meet(access, (call, ordinal))
        yield ("end", access), lambda: self.met[call, ordinal] == self.brute.size
        self.ends[call, access.number] = self.clock
        if self.values:
            self.values.part(access, (call, ordinal))
