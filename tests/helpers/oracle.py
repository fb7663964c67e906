"""What is wrong with a schedule of any problem, by happens-before between single elements and exact values, over three calls.

It shares no code with weft.checker. `fault(schedule)` is "" or what goes wrong, in one run of three calls, in which every lane
goes on as far as it can. A lane carries the set of all that must have happened before its next step, a bit for each event; a
signal leaves the set with its flag, and a wait adds it. Each element of each buffer knows who wrote it last and who has read it
since: an access that is not behind those is a race. Values are integers modulo a prime, drawn anew for each call; results of
the call before are forgotten when a call begins, and what the caller has between two calls, nobody may touch meanwhile.

Row counts that devices know are drawn anew for each call, too, and segments are rows then. Not looked at are inputs that may be
the memory of a result, mailboxes, and kernels that keep others off the SMs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from brute import Brute, reachable
from brute_values import PRIME, Access, Values, Wrong, matmul, normalised

from weft.core.concurrent import ConcurrentProblem
from weft.core.fused_collective import spelled_out
from weft.core.parts import named
from weft.core.problem import COLLECTIVE_OPS, LOOKUP_OPS, Problem, RaggedProblem
from weft.core.schedule import (
    Buffer,
    Collective,
    Flag,
    GroupedGemm,
    Lane,
    Region,
    Schedule,
    Segment,
    SegmentCopies,
    SegmentCopy,
    SendReceive,
    ShareCounts,
    Signal,
    UserCall,
    Wait,
    waits,
)

CALLS = 3
Arrays = dict[tuple[str, int], np.ndarray]
"""By buffer and rank."""
Place = tuple[int, int, int]
"""Rank, lane, position."""
RAGGED = (ShareCounts, SegmentCopies, GroupedGemm)


def fault(schedule: Schedule) -> str:
    """What is wrong with the schedule; nothing if it is right."""
    try:
        _Oracle(spelled_out(schedule).schedule).run()
    except Wrong as wrong:
        return str(wrong)
    return ""


class _Work(Values):
    """Inputs and results of any problem."""

    def __init__(self, schedule: Schedule, calls: int) -> None:
        self.plain = type(schedule.problem) is Problem
        if self.plain:
            super().__init__(schedule, calls)
        else:
            self.schedule, self.problem = schedule, schedule.problem
            self.products, self.factors, self.sent, self.numbers, self.known = {}, {}, {}, {}, {}
            for buffer in schedule.buffers:
                for rank in range(self.problem.world_size):
                    self.numbers[buffer.name, rank] = np.zeros((buffer.rows[rank], buffer.cols[rank]), np.int64)
                    self.known[buffer.name, rank] = np.zeros((buffer.rows[rank], buffer.cols[rank]), bool)
            rng = np.random.default_rng(7)
            self.works = [self._drawn(rng) for _ in range(calls)]

    def _drawn(self, rng: np.random.Generator) -> tuple[Arrays, Arrays]:
        """The inputs and results of a call."""
        problem = self.problem
        if not isinstance(problem, ConcurrentProblem):
            return _sequential(problem, rng)
        inputs, wanted = Arrays(), Arrays()
        for number, one in problem.known:
            for found, into in zip(_sequential(one, rng), (inputs, wanted), strict=True):
                into.update({(named(name, number), rank): value for (name, rank), value in found.items()})
        return inputs, wanted

    def begin(self, rank: int, call: int) -> None:
        for buffer in self.schedule.buffers:
            if buffer.kind == "output":
                self.known[buffer.name, rank][:] = False
        if self.plain:
            super().begin(rank, call)
            return
        for place, value in self.works[call][0].items():
            if place[1] == rank:
                self.numbers[place][:], self.known[place][:] = value, True

    def end(self, rank: int, call: int) -> None:
        if self.plain:
            super().end(rank, call)
            return
        for place, value in self.works[call][1].items():
            if place[1] == rank and not (self.known[place].all() and np.array_equal(self.numbers[place], value)):
                raise Wrong(f"rank {rank}, call {call}: {place[0]} is wrong")

    def part(self, access: Access, meeting: tuple[int, int]) -> None:
        step, own = access.step, self.problem
        assert isinstance(step, Collective)
        if isinstance(own, ConcurrentProblem):
            self.problem = dict(own.known)[self.schedule.buffer[step.src.buffer].collective]
        if step.op == "all_to_all_columns":
            sent = [self.sent[meeting][rank] for rank in range(own.world_size)]
            self.write(step.dst, np.concatenate([rows[slice(*own.shards[access.rank])] for rows in sent], axis=1))
        else:
            super().part(access, meeting)
        self.problem = own


def _sequential(problem: Problem, rng: np.random.Generator) -> tuple[Arrays, Arrays]:
    """Inputs, and what a program without ranks makes of them."""
    ranks = range(problem.world_size)
    rows = [slice(*shard) for shard in problem.shards]

    def drawn(height: int, width: int) -> np.ndarray:
        return rng.integers(1, PRIME, (height, width))

    if problem.op in LOOKUP_OPS:
        bags = [drawn(problem.m, problem.columns(rank)) for rank in ranks]
        found = [np.concatenate([one[rows[rank]] for one in bags], axis=1) for rank in ranks]
        return _named("bags", bags), _named("out", found)
    if problem.op == "all_reduce" and (problem.n > 1 or problem.addends or problem.norm_eps is not None):
        return _sum_of_rows(problem, drawn)
    if problem.op in COLLECTIVE_OPS:
        a = [drawn(problem.a_rows(rank), 1) for rank in ranks]
        total = (
            sum(a) % PRIME * pow(getattr(problem, "divide_by", 1), -1, PRIME) % PRIME
            if problem.op.endswith(("ter", "uce"))
            else 0
        )
        out = {
            "all_gather": lambda rank: np.concatenate(a),
            "all_to_all": lambda rank: np.concatenate([one[rows[rank]] for one in a]),
            "reduce_scatter": lambda rank: total[rows[rank]],
            "all_reduce": lambda rank: total,
        }[problem.op]
        return _named("a", a), _named("out", [out(rank) for rank in ranks])
    a = [drawn(problem.m, problem.a_columns(rank)) for rank in ranks]
    b = [drawn(problem.k, problem.n) for _ in ranks]
    if problem.op == "matmul_all_to_all_columns":
        cols = [slice(*block) for block in problem.blocks]
        products = [matmul(one, two) for one, two in zip(a, b, strict=True)]
        return _named("a", a) | _named("b", b), _named(
            "out", [np.concatenate([p[:, cols[r]] for p in products]) for r in ranks]
        )
    gathered = [np.concatenate([one[rows[rank]] for one in a], axis=1) for rank in ranks]
    wanted = _named("out", [matmul(one, two) for one, two in zip(gathered, b, strict=True)])
    return _named("a", a) | _named("b", b), wanted | (_named("gathered", gathered) if problem.return_gathered else {})


def _sum_of_rows(problem: Problem, drawn: Callable[[int, int], np.ndarray]) -> tuple[Arrays, Arrays]:
    """Inputs and results of an all_reduce of matrices, with what is added to it, and its norm."""
    ranks, a = range(problem.world_size), [drawn(problem.m, problem.n) for _ in range(problem.world_size)]
    added = {name: drawn(problem.m if name == "residual" else 1, problem.n) for name in problem.addends}
    total = (sum(a) + sum(added.values())) % PRIME
    inputs, wanted = _named("a", a), _named("out", [total for _ in ranks])
    if problem.norm_eps is not None:
        added["norm_weight"] = drawn(1, problem.n)
        wanted |= _named("normed", [normalised(total, added["norm_weight"]) for _ in ranks])
    for name, value in added.items():
        inputs |= _named(name, [value for _ in ranks])
    return inputs, wanted


def _named(name: str, arrays: list[np.ndarray]) -> Arrays:
    return {(name, rank): array for rank, array in enumerate(arrays)}


class _Rows(_Work):
    """Inputs and results where counts are drawn: segments are rows. A part reads the counts, then its segment."""

    def _drawn(self, rng: np.random.Generator) -> tuple[Arrays, Arrays]:
        p = self.problem
        assert isinstance(p, RaggedProblem)
        chance = random.Random(int(rng.integers(1 << 30)))
        ranks = range(p.world_size)
        names = [name for rank in ranks for name in p.sent_order(rank)]
        self.places = getattr(self, "places", [])
        places = p.places({name: chance.choice((0, 1, 1, 2, 3)) for name in names})
        self.places.append(places)
        self.experts = getattr(self, "experts", [])
        self.experts.append(rng.integers(1, PRIME, (p.world_size, p.experts, p.k, p.n)))
        a = [rng.integers(1, PRIME, (p.capacity, p.k)) for _ in ranks]
        self.results = getattr(self, "results", [])
        found = []
        for name in names:
            (src, dst, expert), (begin, at, count) = name, places[name]
            sent = a[src][begin : begin + count]
            owner = dst if p.dispatches else src
            found.append((dst, slice(at, at + count), sent, matmul(sent, self.experts[-1][owner, expert])))
        self.results.append(found)
        return _named("a", a), {}

    def region(self, segment: Segment, call: int) -> Region:
        begin, at, count = self.places[call][segment.name]
        low = begin if segment.buffer in ("a", "product") else at
        return Region(
            segment.buffer, segment.rank, (low, low + count), (0, self.schedule.buffer[segment.buffer].cols[segment.rank])
        )

    def end(self, rank: int, call: int) -> None:
        for dst, rows, sent, product in self.results[call]:
            for name, value in (("out", product), ("received", sent)):
                if dst == rank and (name, rank) in self.numbers:
                    known, numbers = self.known[name, rank][rows], self.numbers[name, rank][rows]
                    if not known.all() or not np.array_equal(numbers, value):
                        raise Wrong(f"rank {rank}, call {call}: rows {rows} of {name} are wrong")

    def act(self, rank: int, part: Any, call: int) -> None:
        src, dst = (part.src, part.dst) if isinstance(part, SegmentCopy) else (part.a, part.out)
        found = self.read(self.region(src, call)).copy()
        b = self.experts[call][rank, src.expert]
        self.write(self.region(dst, call), found if isinstance(part, SegmentCopy) else matmul(found, b))


class _Memory:
    """Who wrote each element of a buffer last, and who has read it since, as sets of events."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.writers, self.readers = np.zeros(shape, object), np.zeros(shape, object)

    def read(self, region: Region, event: int, before: int) -> None:
        place = slice(*region.rows), slice(*region.cols)
        if np.bitwise_or.reduce(self.writers[place], axis=None, initial=0) & ~before:
            raise Wrong(f"{region} is read while it may still be written")
        self.readers[place] |= event

    def write(self, region: Region, event: int, before: int) -> None:
        place = slice(*region.rows), slice(*region.cols)
        others = np.bitwise_or.reduce(self.writers[place] | self.readers[place], axis=None, initial=0)
        if others & ~(before | event):
            raise Wrong(f"{region} is written while it may still be touched")
        self.writers[place], self.readers[place] = event, 0


class _Oracle:
    def __init__(self, schedule: Schedule) -> None:
        self.ragged, self.size = isinstance(schedule.problem, RaggedProblem), schedule.problem.world_size
        if self.ragged:
            counts = Buffer("counts", "symmetric", (2 * self.size,) * self.size, (1,) * self.size)
            schedule = replace(schedule, buffers=(*schedule.buffers, counts))
        self.schedule = schedule
        self.accesses = {} if self.ragged else Brute(schedule).parts
        self.values = (_Rows if self.ragged else _Work)(schedule, CALLS)
        self.memory = {
            (buffer.name, rank): _Memory((buffer.rows[rank], buffer.cols[rank]))
            for buffer in schedule.buffers
            for rank in range(self.size)
        }
        self.events = 0
        self.signals: dict[tuple[Flag, int], int] = {}
        """By flag and call, what is behind the signal."""
        self.lowered: dict[tuple[Flag, Place, int], int] = {}
        """By flag, waiting step and the signal's call, the event in which the step has lowered it."""
        self.waiters: dict[Flag, set[Place]] = {}
        for rank, lanes in enumerate(schedule.ranks):
            for index, lane in enumerate(lanes):
                for position, step in enumerate(lane.steps):
                    for wait in waits(step):
                        self.waiters.setdefault(wait.flag, set()).add((rank, index, position))
        self.open = [[len(lanes) for lanes in schedule.ranks] for _ in range(CALLS)]
        self.behind = [0] * self.size
        """By rank, what is behind the end of its last call."""
        self.met: dict[tuple[int, int], dict[int, int]] = {}
        self.mail: dict[tuple[int, int, int], tuple[int, np.ndarray]] = {}
        self.asked: set[tuple[int, int, int]] = set()
        self.posted: dict[tuple[int, int, bool], int] = {}

    def run(self) -> None:
        """Raises Wrong."""
        alive = {
            (rank, index): self._lane(rank, index, lane)
            for rank, lanes in enumerate(self.schedule.ranks)
            for index, lane in enumerate(lanes)
        }
        for rank, lanes in enumerate(self.schedule.ranks):
            self.values.begin(rank, 0)
            if not lanes:
                self.values.end(rank, 0)
        moved = True
        while moved:
            moved = False
            for place, lane in list(alive.items()):
                events = self.events
                done = next(lane, "done") == "done"
                moved |= done or self.events > events
                if done:
                    del alive[place]
        if alive:
            raise Wrong(f"deadlock: lanes {sorted(alive)}")

    def _event(self) -> int:
        self.events += 1
        return 1 << self.events

    def _lane(self, rank: int, index: int, lane: Lane) -> Iterator[None]:
        mask = 0
        for call in range(CALLS):
            while call and self.open[call - 1][rank]:
                yield
            mask |= self.behind[rank] | self._event()
            meetings = 0
            for position, step in enumerate(lane.steps):
                place = rank, index, position
                if isinstance(step, Wait):
                    while (found := self._seen(step, call)) is None:
                        yield
                    mask |= found | self._lower(step, place, call)
                elif isinstance(step, Signal):
                    self._signal(step.flag, call, mask)
                elif isinstance(step, UserCall):
                    continue
                elif isinstance(step, Collective):
                    mask = yield from self._collective(
                        rank, step, call, (call, meetings + 1000 * self.schedule.buffer[step.src.buffer].collective), mask
                    )
                    meetings += 1
                elif isinstance(step, SendReceive):
                    mask = yield from self._messages(rank, step, mask)
                else:
                    mask = yield from self._kernel(place, step, call, mask)
            self.behind[rank] |= mask
            self.open[call][rank] -= 1
            if not self.open[call][rank]:
                self._end(rank, call)

    def _end(self, rank: int, call: int) -> None:
        self.values.end(rank, call)
        for buffer in self.schedule.buffers:
            if reachable(self.schedule, buffer.name) and buffer.whole(rank).size:
                event = self._event()
                self.memory[buffer.name, rank].write(buffer.whole(rank), event, self.behind[rank])
                self.behind[rank] |= event
        if call + 1 < CALLS:
            self.values.begin(rank, call + 1)

    def _seen(self, wait: Wait, call: int) -> int | None:
        number = call - wait.on_previous_call
        if number < 0 or (wait.on_previous_call and not self.schedule.signals_per_call[wait.flag]):
            return 0
        return self.signals.get((wait.flag, number))

    def _lower(self, wait: Wait, place: Place, call: int) -> int:
        event = self._event()
        self.lowered[wait.flag, place, call - wait.on_previous_call] = event
        return event

    def _signal(self, flag: Flag, call: int, mask: int) -> None:
        for place in self.waiters.get(flag, ()) if call else ():
            if not mask & self.lowered.get((flag, place, call - 1), 0):
                raise Wrong(f"{flag} may be raised again before {place} has lowered it")
        self.signals[flag, call] = mask
        self.events += 1

    def _touch(self, access: Access, before: int, event: int) -> None:
        for region in access.reads:
            self.memory[region.buffer, region.rank].read(region, event, before)
        for region in access.writes:
            self.memory[region.buffer, region.rank].write(region, event, before)

    def _kernel(self, place: Place, step: Any, call: int, mask: int) -> Iterator[None]:
        """Parts are begun in their order; nothing else orders them. What is behind its end."""
        for wait in (wait for wait in waits(step) if wait.on_previous_call):
            while (found := self._seen(wait, call)) is None:
                yield
            mask |= found
        for wait in dict.fromkeys(wait for wait in waits(step) if wait.on_previous_call):
            mask |= self._lower(wait, place, call)
        end = mask
        if isinstance(step, ShareCounts):
            for flag in step.flags:
                cell = self._cell(flag.rank, place[0], call)
                event = self._event()
                self.memory["counts", flag.rank].write(cell, event, mask)
                self.values.write(cell, np.full((1, 1), call))
                self._signal(flag, call, mask | event)
                end |= event
        for number, part in enumerate(getattr(step, "parts", (step,))):
            own = mask
            for access in self._accesses(place[0], step, part, number, call):
                for wait in access.gates:
                    while (found := self._seen(wait, call)) is None:
                        yield
                    own |= found
                event = self._event()
                self._touch(access, own, event)
                own |= event
                if not isinstance(step, RAGGED):
                    self.values.work(access)
            if isinstance(step, (SegmentCopies, GroupedGemm)):
                assert isinstance(self.values, _Rows)
                self.values.act(place[0], part, call)
            end |= own
            if getattr(part, "count", None):
                self._signal(part.count, call, own)
        for wait in dict.fromkeys(wait for wait in waits(step) if not wait.on_previous_call):
            end |= self._lower(wait, place, call)
        return end

    def _cell(self, rank: int, source: int, call: int) -> Region:
        row = source + self.size * (call % 2)
        return Region("counts", rank, (row, row + 1), (0, 1))

    def _accesses(self, rank: int, step: Any, part: Any, number: int, call: int) -> list[Access]:
        if isinstance(step, ShareCounts):
            return [Access(rank, step, number, [], None, step.gates)]
        if not isinstance(step, (SegmentCopies, GroupedGemm)):
            return self.accesses[id(step), number]
        assert isinstance(self.values, _Rows)
        counts = [self._cell(rank, source, call) for source in range(self.size)]
        if any(not self.values.known["counts", rank][cell.rows[0]] or self.values.read(cell) != call for cell in counts):
            raise Wrong(f"{part} is begun before all counts of its call are there")
        src, dst = (part.src, part.dst) if isinstance(part, SegmentCopy) else (part.a, part.out)
        regions = [self.values.region(segment, call) for segment in (src, dst)]
        return [Access(rank, step, number, counts, None), Access(rank, step, number, regions[:1], regions[1], part.gates)]

    def _collective(self, rank: int, step: Collective, call: int, meeting: tuple[int, int], mask: int) -> Iterator[None]:
        (access,) = self.accesses[id(step), 0]
        event = self._event()
        self._touch(access, mask, event)
        self.values.meet(access, meeting)
        met = self.met.setdefault(meeting, {})
        met[rank] = mask | event
        while len(met) < self.size:
            yield
        self.events += 1
        self.values.part(access, meeting)
        for other in met.values():
            mask |= other
        return mask | event

    def _messages(self, rank: int, step: SendReceive, mask: int) -> Iterator[None]:
        ends = [*((rank, send.to, True) for send in step.sends), *((one.source, rank, False) for one in step.receives)]
        legs = []
        for number, end in enumerate(ends):
            (access,) = self.accesses[id(step), number]
            nth = self.posted[end] = self.posted.get(end, 0) + 1
            key = (*end[:2], nth)
            legs.append((access, key, end[2]))
            if end[2]:
                event = self._event()
                self._touch(access, mask, event)
                self.mail[key] = mask | event, self.values.read(access.reads[0]).copy()
            else:
                self.events += 1
                self.asked.add(key)
        while not all(key in (self.asked if sent else self.mail) for _, key, sent in legs):
            yield
        behind = mask
        for access, key, sent in legs:
            left, value = self.mail[key]
            if not sent:
                event = self._event()
                self._touch(access, mask | left, event)
                assert access.write is not None
                self.values.write(access.write, value)
                left |= event
            behind |= left
        return behind
