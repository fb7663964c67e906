"""A deliberately naive interpreter of schedules, to hold the checker against. It shares no code with weft.checker.

`verdict(schedule)` is "" if a small schedule is right, else what went wrong. It runs three calls, with new random inputs
in each, in many directed interleavings:

    - lanes and parts of kernels are coroutines; a flag is raised by a signal, and lowered by each step that waits for it: by a
      Wait, by a kernel where it starts, for its gates on the call before, and at its end, for its gates on this call;
    - every buffer element is a number modulo a prime, or poison until it is first written;
    - once in the order given, once backwards, once with each rank held back, and once for every copy, part and
      collective, Wait and end of a kernel that waits, with that one held back for as long as anything else can run. If two
      accesses are not ordered by the schedule, then each of them comes first in the run that holds back the other. So a pair
      of conflicting accesses that has been seen in both orders is a race, and a pair that has not is none: no run at random
      could find more;
    - once with the parts of each kernel one after the other, which changes nothing but who may wait for whom;
    - a message is there for its receiver once it has been read, and the sender's step may end; once more in the order given, it
      may not before the receiver's step has begun, as with all that follows;
    - then, where a kernel with gates shares a rank with other lanes that need SMs, again with such kernels holding all
      SMs from start to end, holding back every start and every pair of starts, and in random orders.

Wrong is: a deadlock, a race (of equal values too), a read of poison, a result that is not the sequential program's, and
whatever no machine could run: shapes that do not fit, regions outside their buffer, a peer's private memory, memory or flags
of another node, an input that is overwritten, a flag with two writers, or raised twice a call, or again before it is lowered,
or counted by a kernel for two steps, messages without another end.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import numpy as np
from brute_run import Policy, Run, fills, needs_sms
from brute_values import Access, Wrong

from weft.core.concurrent import ConcurrentProblem
from weft.core.fused_collective import spelled_out
from weft.core.parts import named
from weft.core.problem import CollectiveProblem, Problem
from weft.core.schedule import (
    Collective,
    Copy,
    Flag,
    Gemm,
    Lookup,
    Norm,
    Push,
    Reduce,
    Region,
    Schedule,
    SendReceive,
    Signal,
    Step,
    UserCall,
    Wait,
    signalled_flags,
    waits,
)

CALLS = 3


def verdict(schedule: Schedule) -> str:
    """What is wrong with the schedule, of a FusedCollective with the steps that it stands for; nothing if it is right."""
    try:
        Brute(spelled_out(schedule).schedule).judge()
    except Wrong as wrong:
        return str(wrong)
    return ""


class Brute:
    """A schedule's accesses, listed and looked at one by one."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.size = schedule.problem.world_size
        self.parts: dict[tuple[int, int], list[Access]] = {}
        self._check_flags()
        self._check_messages()
        for rank, _, _, step in schedule:
            self._list_accesses(rank, step)
        self.accesses = [access for part in self.parts.values() for access in part]
        for number, access in enumerate(self.accesses):
            access.number = number
            self._check_access(access)

    def _list_accesses(self, rank: int, step: Step) -> None:
        if isinstance(step, (Copy, Collective)):
            self._add(rank, step, 0, [step.src], step.dst)
        elif isinstance(step, Gemm):
            for i, part in enumerate(step.parts):
                old = [part.out] if step.accumulate else []
                factors = [part.a, step.b] if part.out.size else []
                if part.inner:
                    self._list_slices(rank, step, i)
                elif part.adds:
                    self._add(rank, step, i, factors, None)
                    self._add(rank, step, i, list(part.adds) if part.out.size else [], part.out, part.gates)
                else:
                    self._add(rank, step, i, [*factors, *old] if part.out.size else [], part.out, part.gates)
        elif isinstance(step, Push):
            for i, store in enumerate(step.parts):
                self._add(rank, step, i, [store.src], store.dst)
        elif isinstance(step, Reduce):
            for i, total in enumerate(step.parts):
                self._add(rank, step, i, list(total.srcs), total.out, total.gates)
        elif isinstance(step, Norm):
            self._add(rank, step, 0, [step.src, step.weight], step.out)
        elif isinstance(step, Lookup):
            for i, bags in enumerate(step.parts):
                self._add(rank, step, i, [bags.bags], bags.out)
        elif isinstance(step, SendReceive):
            for i, send in enumerate(step.sends):
                self._add(rank, step, i, [send.src], None)
            for i, receive in enumerate(step.receives, len(step.sends)):
                self._add(rank, step, i, [], receive.dst)

    def _list_slices(self, rank: int, step: Gemm, number: int) -> None:
        """A part with inner gates: each slice of its a is an access; all of b is read with the first."""
        part = step.parts[number]
        low, high = part.a.cols
        edges = [low, *(low + column for column, _ in part.inner), high]
        if edges != sorted(set(edges)) or step.accumulate or part.adds:
            raise Wrong(f"{step} has slices that make no sense")
        gates = [part.gates, *((gate,) for _, gate in part.inner)]
        for cols, needed in zip(itertools.pairwise(edges), gates, strict=True):
            reads = [dataclasses.replace(part.a, cols=cols)] + [step.b] * (cols[0] == low)
            self._add(rank, step, number, reads if part.out.size else [], part.out if cols[1] == high else None, needed)

    def _add(
        self, rank: int, step: Step, part: int, reads: list[Region], write: Region | None, gates: tuple[Wait, ...] = ()
    ) -> None:
        self.parts.setdefault((id(step), part), []).append(Access(rank, step, part, reads, write, gates))

    def judge(self) -> None:
        """Raises Wrong."""
        conflicts = self._conflicts()
        before = np.ones((CALLS * len(self.accesses), CALLS * len(self.accesses)), bool)
        for number, policy in enumerate(self._policies()):
            run = Run(self.schedule, self.parts, CALLS, values=number < 3)
            run.go(policy)
            ends, starts = run.ends.ravel(), run.starts.ravel()
            before &= ends[:, None] < starts[None, :]
            both = conflicts & ~(before | before.T)
            if both.any():
                one, two = np.argwhere(both)[0] % len(self.accesses)
                raise Wrong(f"race: {self._words(one)} and {self._words(two)} in both orders")
        Run(self.schedule, self.parts, CALLS, values=False, in_order=True, met=True).go(lambda task: 0)
        if self._crowded():
            for policy in self._start_policies():
                Run(self.schedule, self.parts, 1, values=False, full=True, in_order=True, met=True).go(policy)

    def _words(self, number: int) -> str:
        access = self.accesses[number]
        return f"{access.step} on rank {access.rank}"

    def _policies(self) -> Iterator[Policy]:
        tasks = {id(step): i for i, (_, _, _, step) in enumerate(self.schedule)}
        yield lambda task: 0
        yield lambda task: -tasks.get(id(getattr(task.wants, "step", task.wants)), 0)
        for rank in range(self.size):
            yield lambda task, rank=rank: task.rank == rank
        for access in self.accesses:
            yield lambda task, access=access: task.wants is access or task.wants == ("end", access)
        for *_, step in self.schedule:
            if waits(step):
                yield lambda task, step=step: task.wants in (step, ("gates", id(step)), ("finish", id(step)))

    def _start_policies(self) -> Iterator[Policy]:
        starts = [
            step for _, _, _, step in self.schedule if isinstance(step, (Copy, Push, Gemm, Reduce, Collective, SendReceive))
        ]
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
                if self._node(flag.rank) != self._node(rank):
                    raise Wrong(f"{step} raises a flag of another node")
                writers.setdefault(flag, set()).add((rank, lane.name))
            if isinstance(step, Push):
                self._check_push(rank, step)
            for wait in (
                [step] if isinstance(step, Wait) else [g for p in getattr(step, "parts", ()) for g in getattr(p, "waits", ())]
            ):
                if wait.flag.rank != rank:
                    raise Wrong(f"{step} waits for a flag of another rank")
        for flag, found in writers.items():
            if len(found) > 1 or self.schedule.signals_per_call[flag] > 1:
                raise Wrong(f"{flag} has two writers, or is raised twice a call")
        self._check_waiters()

    def _check_waiters(self) -> None:
        """A step waits for a flag of this call or of the one before; for what a kernel counts, exactly one step waits."""
        counted = {flag for *_, step in self.schedule if not isinstance(step, Signal) for flag in signalled_flags(step)}
        waiting: dict[Flag, set[object]] = {}
        for rank, lane, position, step in self.schedule:
            for wait in waits(step):
                both = {other.on_previous_call for other in waits(step) if other.flag == wait.flag}
                if len(both) > 1:
                    raise Wrong(f"{step} waits for {both} of {wait.flag}")
                waiting.setdefault(wait.flag, set()).add((rank, lane.name, position))
        wrong = next((flag for flag in counted if len(waiting.get(flag, ())) != 1), None)
        if wrong:
            raise Wrong(f"{wrong} is counted, and has {len(waiting.get(wrong, ()))} waiters")

    def _check_push(self, rank: int, step: Push) -> None:
        """It reads one buffer of its rank, writes none of it, and each of its flags is one part's alone."""
        if not step.parts or any((part.src.buffer, part.src.rank) != (step.source[0], rank) for part in step.parts):
            raise Wrong(f"{step} has not one source of its own")
        for part in step.parts:
            alone = self.schedule.signals_per_call[part.count] == 1 and part.count.rank == part.dst.rank
            if not part.src.size or not alone or (part.dst.buffer, part.dst.rank) == step.source:
                raise Wrong(f"{step} has a part that it may not have: {part}")

    def _node(self, rank: int) -> int:
        """Which node a rank is on."""
        nodes = self.schedule.problem.nodes or (self.size,)
        return next(n for n in range(len(nodes)) if rank < sum(nodes[: n + 1]))

    def _check_messages(self) -> None:
        """Every message has two ends of one shape, and is whole rows; they have a lane to themselves."""
        ends: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
        for rank, lanes in enumerate(self.schedule.ranks):
            users = [lane for lane in lanes if any(isinstance(s, SendReceive) for s in lane.steps)]
            able: tuple[type, ...] = (Wait, Signal, SendReceive)
            if isinstance(self.schedule.problem, ConcurrentProblem):
                able = (*able, Collective, UserCall)
            others = [s for lane in lanes if lane.kind == "network" for s in lane.steps if not isinstance(s, able)]
            if len(users) > 1 or others or any(lane.kind != "network" for lane in users):
                raise Wrong(f"messages of rank {rank} on the wrong lanes, or others on theirs")
            for step in (s for lane in users for s in lane.steps if isinstance(s, SendReceive)):
                for send in step.sends:
                    ends.setdefault((rank, send.to, True), []).append(self._message(rank, send.to, send.src))
                for receive in step.receives:
                    shape = self._message(rank, receive.source, receive.dst)
                    ends.setdefault((receive.source, rank, False), []).append(shape)
        for src, dst, _ in ends:
            if ends.get((src, dst, True)) != ends.get((src, dst, False)):
                raise Wrong(f"messages from {src} to {dst} have not both ends")
        if ends and any(isinstance(step, Collective) for *_, step in self.schedule):
            raise Wrong("messages beside a collective")

    def _message(self, rank: int, peer: int, region: Region) -> tuple[int, int]:
        whole = region.cols == (0, self.schedule.buffer[region.buffer].cols[region.rank])
        if not whole or not region.size or region.rank != rank or peer == rank:
            raise Wrong(f"{region} is no message of rank {rank}")
        return region.shape

    def _check_access(self, access: Access) -> None:
        part = access.step.parts[access.part] if isinstance(access.step, Gemm) else None
        named = [part.a, access.step.b, *part.adds] if part else []
        for region in [*named, *access.reads, *access.writes]:
            buffer = self.schedule.buffer[region.buffer]
            ends = (region.rows[1] <= buffer.rows[region.rank], region.cols[1] <= buffer.cols[region.rank])
            if not all(ends) or min(*region.rows, *region.cols) < 0 or min(region.shape) < 0:
                raise Wrong(f"{access.step} goes outside {region.buffer}")
            if self._node(region.rank) != self._node(access.rank):
                raise Wrong(f"{access.step} touches memory of another node")
            if region.rank != access.rank and buffer.kind != "symmetric" and not reachable(self.schedule, region.buffer):
                raise Wrong(f"{access.step} touches private memory of a peer")
        if any(self.schedule.buffer[region.buffer].kind == "input" for region in access.writes):
            raise Wrong(f"{access.step} overwrites an input")
        if isinstance(access.step, Gemm):
            assert part
            fits = part.a.shape[1] == access.step.b.shape[0] and part.out.shape == (part.a.shape[0], access.step.b.shape[1])
            fits = fits and all(add.shape == part.out.shape for add in part.adds)
        elif isinstance(access.step, Collective):
            fits = _collective_fits(access.step, problem_of(self.schedule, access.step.src.buffer), access.rank)
        elif isinstance(access.step, SendReceive):
            fits = True  # both ends have been compared
        else:
            fits = all(_fits(access, src, i) for i, src in enumerate(access.reads))
        if not fits:
            raise Wrong(f"{access.step} does not fit")
        self._check_self(access)

    def _check_self(self, access: Access) -> None:
        """Within one access, elements are read and written in no order, but a sum may be in place."""
        step, reads, writes = access.step, access.reads, access.writes
        if isinstance(step, Gemm):
            part = step.parts[access.part]
            reads, writes = [part.a, step.b, *part.adds] if part.out.size else [], [part.out]
        for region, write in itertools.product(reads, writes):
            sums = isinstance(step, Reduce) or (isinstance(step, Collective) and step.op == "all_reduce")
            in_place = sums and region == write
            if not in_place and _elements(region) & _elements(write):
                raise Wrong(f"{step} overwrites what it reads")

    def _conflicts(self) -> np.ndarray:
        """Which pairs of accesses, of any calls, share an element that one of them writes."""
        places: dict[tuple[object, ...], int] = {}
        reads, writes = [], []
        for access in self.accesses:
            reads.append({places.setdefault(e, len(places)) for r in access.reads for e in _elements(r)})
            writes.append({places.setdefault(e, len(places)) for r in access.writes for e in _elements(r)})
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


def _fits(access: Access, src: Region, number: int) -> bool:
    """Of the result's shape; what a sum adds to its first source may be one row for all rows."""
    (out,) = access.writes
    row = isinstance(access.step, (Reduce, Norm)) and number > 0 and src.shape == (1, out.shape[1])
    return row or src.shape == out.shape


def problem_of(schedule: Schedule, buffer: str) -> Problem:
    """Of several collectives, the one that a buffer belongs to; else the schedule's."""
    problem = schedule.problem
    if isinstance(problem, ConcurrentProblem):
        return problem.collectives[schedule.buffer[buffer].collective]  # type: ignore[return-value]
    return problem


def reachable(schedule: Schedule, buffer: str) -> bool:
    """Whether it is a result that peers may touch."""
    problem = problem_of(schedule, buffer)
    return (
        buffer == named("out", schedule.buffer[buffer].collective)
        and isinstance(problem, CollectiveProblem)
        and problem.reachable
    )


def _collective_fits(step: Collective, problem: Problem, rank: int) -> bool:
    own = problem.shards[rank][1] - problem.shards[rank][0]
    if step.op == "all_to_all_columns":
        left, right = problem.blocks[rank]
        return (step.src.shape, step.dst.shape) == ((problem.m, right - left), (own, problem.blocks[-1][1]))
    rows = {
        "all_gather": (own, problem.shards[-1][1]),
        "reduce_scatter": (problem.shards[-1][1], own),
        "all_reduce": (problem.shards[-1][1], problem.shards[-1][1]),
        "all_to_all": (problem.shards[-1][1], problem.world_size * own),
    }[step.op]
    return (step.src.shape[0], step.dst.shape[0]) == rows and step.src.shape[1] == step.dst.shape[1]
