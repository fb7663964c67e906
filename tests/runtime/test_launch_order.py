"""The order in which lanes are given to streams that take few launches: hosts that wait for room must not wait for good."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import pytest
from families import CASES, PAIRS, made
from test_collective_plans import FAMILIES, problem
from test_launch_plan import FakeProgram, _can, _do

from weft.compat.streams import Word
from weft.core.problem import Op, Problem
from weft.core.schedule import Collective, Gemm, Schedule, SendReceive, signalled_flags, waits
from weft.runtime.launch_plan import LaunchPlan, order, turns
from weft.runtime.launches import FlagOperations, KernelLaunch, Launch, TorchLaunch
from weft.schedules import build

CALLS = 3
ROOM = 1000
"""The launches that a stream takes."""


class Kernel:
    """A GEMM whose tiles wait for flags, and count."""

    waits_in_kernel, manages_own_flags = True, False


class Rank:
    """A host, and the streams that it fills: of each lane, items that were given and have not ended.

    room: of a stream.
    one_queue: whether all streams share one hardware queue, which does one item after the other. A kernel leaves the queue when
        it begins, and what its lane does next has to wait for its end.
    lane_by_lane: whether lanes are given one after the other, the caller's last.
    kernels: whether GEMMs with flags are kernels that wait for them, instead of parts.
    begun: (kind, rank, other rank): how many collectives, or messages, with the other one the rank has begun.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        begun: Counter[tuple[type, int, int]],
        *,
        room: int,
        unmerged: bool,
        one_queue: bool,
        lane_by_lane: bool,
        kernels: bool,
    ) -> None:
        self.program, self.rank, self.begun, self.all = FakeProgram(schedule, rank), rank, begun, range(len(schedule.ranks))
        places = {
            (lane.name, at)
            for lane in self.program.schedule.ranks[rank]
            for at, step in enumerate(lane.steps)
            if kernels and isinstance(step, Gemm) and (list(waits(step)) or list(signalled_flags(step)))
        }
        self.program.kernels = dict.fromkeys(places, Kernel())
        plan = LaunchPlan(self.program, frozenset(places))  # type: ignore[arg-type]
        batches = [(lane.name, items) for lane, items, _ in (plan.unmerged_batches if unmerged else plan.batches)]
        if lane_by_lane:
            batches = [(lane.name, items) for lane, items in sorted(plan.by_lane, key=lambda one: one[0].kind == "compute")]
        # Of each item: its stream, its lane, and how many items of the lane come before it.
        self.given = list[tuple[str, Launch, str, int]]()
        self.lengths, self.lane_lengths = Counter[str](), Counter[str]()
        for lane, items in batches:
            for item in items:
                aside = isinstance(item, FlagOperations) and item.aside
                stream = "queue" if one_queue else "aside" if aside else lane
                self.given.append((stream, item, lane, self.lane_lengths[lane]))
                self.lengths[stream] += 1
                self.lane_lengths[lane] += not aside
        self.room, self.next = room, 0
        self.streams: dict[str, deque[tuple[int, Launch, str, int]]] = {name: deque() for name in self.lengths}
        self.ended, self.lane_ended, self.inside = Counter[str](), Counter[str](), Counter[str]()
        self.running = dict[str, list[Word]]()
        """Of each lane whose kernel runs, what is left of its operations."""

    def give(self) -> bool:
        """Hand the next item over, unless its stream is full."""
        call, at = divmod(self.next, len(self.given))
        if call == CALLS:
            return False
        name, *item = self.given[at]
        if len(self.streams[name]) == self.room:
            return False
        self.streams[name].append((call, *item))
        self.next += 1
        return True

    def run(self, name: str, memory: dict[int, int]) -> bool:
        """One operation of a stream: whether there was one that could run. Calls wait for all lanes of the one before."""
        if not self.streams[name]:
            return False
        call, item, lane, before = self.streams[name][0]
        aside = isinstance(item, FlagOperations) and item.aside
        done = self.lane_ended[lane] >= call * self.lane_lengths[lane] + before  # it may be on another stream
        if not done or self.running.get(lane) or any(self.ended[other] < call * n for other, n in self.lengths.items()):
            return False
        words = list(item.words) if isinstance(item, FlagOperations) else []
        if isinstance(item, KernelLaunch):
            self.running[lane] = self._operations(item)
        elif isinstance(item, TorchLaunch) and isinstance(item.where.step, (Collective, SendReceive)):
            if not self._can_end(item.where.step, begins=not self.inside[name]):
                moved, self.inside[name] = not self.inside[name], 1
                return moved
            self.inside[name] = 0
        elif words:
            if not _can(words, self.inside[name], memory):
                return False
            _do(words[self.inside[name]], memory)
            self.inside[name] += 1
        if self.inside[name] == len(words):
            self.streams[name].popleft()
            self.ended[name], self.inside[name] = self.ended[name] + 1, 0
            self.lane_ended[lane] += not aside
        return True

    def run_kernel(self, lane: str, memory: dict[int, int]) -> bool:
        """One operation of the kernel that runs on a lane."""
        words = self.running.get(lane)
        if not words or not _can(words, 0, memory):
            return False
        _do(words.pop(0), memory)
        return True

    def is_over(self) -> bool:
        return not any(self.running.values()) and all(self.ended[name] == CALLS * n for name, n in self.lengths.items())

    def _operations(self, launch: KernelLaunch) -> list[Word]:
        """The waits and signals of a kernel, which lowers nothing itself."""
        program, found = self.program, list[Word]()
        for gates, raised in turns(launch.where.step):
            for gate in gates:
                if not gate.on_previous_call:
                    found.append(Word("wait", program.gate_address(gate.flag, launch.where), program.signal_value(gate.flag)))
            for flag in raised:
                found += [Word("signal", address, program.signal_value(flag)) for address in program.waiters(flag)]
        return found

    def _can_end(self, step: Collective | SendReceive, *, begins: bool) -> bool:
        """Whether all ranks that take part in a step have begun it."""
        others = [other for other in (self.all if isinstance(step, Collective) else step.peers) if other != self.rank]
        kind = type(step)
        if begins:
            self.begun.update((kind, self.rank, other) for other in others)
        return all(self.begun[kind, other, self.rank] >= self.begun[kind, self.rank, other] for other in others)


def ends(
    schedule: Schedule,
    *,
    room: int,
    seed: int,
    unmerged: bool = False,
    one_queue: bool = False,
    lane_by_lane: bool = False,
    kernels: bool = False,
) -> bool:
    """Whether all calls of all ranks end, in some order of hosts and streams."""
    chance, begun = random.Random(seed), Counter[tuple[type, int, int]]()
    how = {"room": room, "unmerged": unmerged, "one_queue": one_queue, "lane_by_lane": lane_by_lane, "kernels": kernels}
    ranks = [Rank(schedule, rank, begun, **how) for rank in range(len(schedule.ranks))]
    memory = dict(word for rank in range(len(ranks)) for word in FakeProgram(schedule, rank).left_over())
    actions: list[Any] = [rank.give for rank in ranks]
    actions += [lambda r=rank, n=name: r.run(n, memory) for rank in ranks for name in rank.streams]
    actions += [lambda r=rank, n=name: r.run_kernel(n, memory) for rank in ranks for name in rank.lane_lengths]
    while True:
        chance.shuffle(actions)
        moved = [action() for action in actions]
        if not any(moved):
            return all(rank.is_over() for rank in ranks)


@pytest.mark.parametrize(("op", "name"), PAIRS)
def test_streams_of_one_launch_are_room_enough(op: Op, name: str) -> None:
    for m, n, k, world_size, chunks in ((64, 48, 32, 4, 2), (5, 7, 3, 3, 2), (24, 8, 8, 2, 4)):
        schedule = build(Problem(op=op, m=m, n=n, k=k, world_size=world_size), name, chunks)
        for seed, unmerged in ((0, False), (1, True)):
            assert ends(schedule, room=1, seed=seed, unmerged=unmerged), (op, name, world_size)


@pytest.mark.parametrize(("op", "name"), PAIRS)
def test_one_hardware_queue_is_enough(op: Op, name: str) -> None:
    """Where a GPU's streams share queues, a wait must not be before the work that it waits for."""
    for m, n, k, world_size, chunks in ((64, 48, 32, 4, 2), (5, 7, 3, 3, 2), (24, 8, 8, 2, 4), (24, 8, 8, 2, 1)):
        plain = Problem(op=op, m=m, n=n, k=k, world_size=world_size)
        for one in (plain, replace(plain, norm_eps=1e-5)) if op == "matmul_all_reduce" else (plain,):
            schedule = build(one, name, chunks)
            for seed, kernels in ((0, False), (1, True)):
                assert ends(schedule, room=ROOM, seed=seed, kernels=kernels, one_queue=True), (op, name, world_size, kernels)


@pytest.mark.parametrize(("op", "spec", "nodes"), [case for case in CASES if case[0] != "concurrent"])
def test_one_hardware_queue_is_enough_for_every_operator(op: Op, spec: str, nodes: tuple[int, ...]) -> None:
    for kernels in (False, True):
        assert ends(made(op, spec, nodes), room=ROOM, seed=kernels, kernels=kernels, one_queue=True)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("nodes", [(1, 1, 1), (3, 3), (2, 2, 2), (2, 3), (3, 1, 2)])
def test_one_hardware_queue_is_enough_for_messages(op: Op, nodes: tuple[int, ...]) -> None:
    schedule = build(Problem(op=op, m=48, n=24, k=24, world_size=sum(nodes), nodes=nodes), "node_slices", 2)
    for seed in range(2):
        assert ends(schedule, room=ROOM, seed=seed, one_queue=True)


@pytest.mark.parametrize(("op", "name"), FAMILIES)
def test_collectives_in_many_pieces(op: Op, name: str) -> None:
    for world_size, chunks in ((2, 3), (3, 1), (4, 2)):
        schedule = build(problem(op, world_size), name, chunks)
        assert ends(schedule, room=1, seed=world_size), (op, name, world_size)
        assert ends(schedule, room=ROOM, seed=world_size, one_queue=True), (op, name, world_size)


def test_one_queue_is_not_enough_lane_after_lane() -> None:
    """The caller's lane last, behind lanes that wait for it: this hung where more streams were busy than there are queues."""
    schedule = build(Problem(op="matmul_all_reduce", m=64, n=48, k=32, world_size=2), "token_split", 2)
    assert not ends(schedule, room=ROOM, seed=0, one_queue=True, lane_by_lane=True)
    assert ends(schedule, room=ROOM, seed=0, lane_by_lane=True)


def test_short_streams_are_not_enough_lane_after_lane() -> None:
    """Without turns, as an all_reduce in 97 pieces among 4 ranks had it: hosts wait for a lane that they have yet to give."""
    schedule = build(problem("all_reduce", 3), "copy_engine", 1)
    longest = max(len(items) for rank in range(3) for _, items in LaunchPlan(FakeProgram(schedule, rank), frozenset()).by_lane)  # type: ignore[arg-type]
    assert not any(ends(schedule, room=longest // 3, seed=seed, lane_by_lane=True) for seed in range(3))
    assert ends(schedule, room=longest, seed=0, lane_by_lane=True)


def test_each_launch_is_given_once_and_a_lanes_own_in_order() -> None:
    plan = LaunchPlan(FakeProgram(build(problem("all_reduce", 3), "copy_engine", 1), 1), frozenset())  # type: ignore[arg-type]
    assert len(plan.unmerged_batches) > len(plan.lanes)
    for lane, items in plan.lanes:
        given = [item.where.position for other, some, _ in plan.unmerged_batches if other is lane for item in some]
        assert given == [item.where.position for item in items]


def test_every_moment_of_every_step_has_its_place() -> None:
    for op, name in PAIRS:
        schedule = build(Problem(op=op, m=64, n=48, k=32, world_size=4), name, 2)
        for rank, lanes in enumerate(schedule.ranks):
            steps = [(lane.name, at, step) for lane in lanes for at, step in enumerate(lane.steps)]
            wanted = {(name_, at, stage) for name_, at, step in steps for stage in range(2 * len(turns(step)))}
            assert set(order(schedule, rank)) == wanted, (op, name)
