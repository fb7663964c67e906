"""The order in which lanes are given to streams that take few launches: hosts that wait for room must not wait for good."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest
from families import PAIRS
from test_collective_plans import FAMILIES, problem
from test_launch_plan import FakeProgram, _can, _do

from weft.core.problem import Op, Problem
from weft.core.schedule import Lane, Schedule
from weft.runtime import launch_plan
from weft.runtime.launch_plan import LaunchPlan, order, turns
from weft.runtime.launches import FlagOperations, Launch
from weft.schedules import build

CALLS = 3


class Rank:
    """A host, and the streams that it fills: of each lane, items that were given and have not ended. room: of a stream."""

    def __init__(self, schedule: Schedule, rank: int, room: int, *, unmerged: bool) -> None:
        plan = LaunchPlan(FakeProgram(schedule, rank), frozenset())  # type: ignore[arg-type]
        self.given = list[tuple[str, Launch, tuple[str, int]]]()
        self.lengths: Counter[str] = Counter()
        for lane, items, _ in plan.unmerged_batches if unmerged else plan.batches:
            for item in items:
                aside = isinstance(item, FlagOperations) and item.aside
                # Signals aside come after what their lane has been given before.
                self.given.append(("aside" if aside else lane.name, item, (lane.name, self.lengths[lane.name])))
                self.lengths["aside" if aside else lane.name] += 1
        self.room, self.next = room, 0
        self.streams: dict[str, deque[tuple[int, Launch, tuple[str, int]]]] = {name: deque() for name in self.lengths}
        self.ended = dict.fromkeys(self.lengths, 0)
        self.inside = dict.fromkeys(self.lengths, 0)

    def give(self) -> bool:
        """Hand the next item over, unless its stream is full."""
        call, at = divmod(self.next, len(self.given))
        if call == CALLS:
            return False
        name, item, after = self.given[at]
        if len(self.streams[name]) == self.room:
            return False
        self.streams[name].append((call, item, after))
        self.next += 1
        return True

    def run(self, name: str, memory: dict[int, int]) -> bool:
        """One operation of a stream: whether there was one that could run. Calls wait for all lanes of the one before."""
        if not self.streams[name]:
            return False
        call, item, (lane, items) = self.streams[name][0]
        if any(self.ended[other] < call * length for other, length in self.lengths.items()):
            return False
        if name == "aside" and self.ended[lane] < call * self.lengths[lane] + items:
            return False
        words = list(item.words) if isinstance(item, FlagOperations) else []
        if words:
            if not _can(words, self.inside[name], memory):
                return False
            _do(words[self.inside[name]], memory)
            self.inside[name] += 1
        if self.inside[name] == len(words):
            self.streams[name].popleft()
            self.ended[name], self.inside[name] = self.ended[name] + 1, 0
        return True


def ends(schedule: Schedule, *, room: int, seed: int, unmerged: bool = False) -> bool:
    """Whether all calls of all ranks end, in some order of hosts and streams."""
    chance = random.Random(seed)
    ranks = [Rank(schedule, rank, room, unmerged=unmerged) for rank in range(len(schedule.ranks))]
    memory = dict(word for rank in range(len(ranks)) for word in FakeProgram(schedule, rank).left_over())
    actions: list[Any] = [rank.give for rank in ranks]
    actions += [lambda r=rank, n=name: r.run(n, memory) for rank in ranks for name in rank.streams]
    while True:
        chance.shuffle(actions)
        moved = [action() for action in actions]
        if not any(moved):
            return all(rank.ended[name] == CALLS * length for rank in ranks for name, length in rank.lengths.items())


@pytest.mark.parametrize(("op", "name"), PAIRS)
def test_streams_of_one_launch_are_room_enough(op: Op, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_plan, "MOST_IN_SEQUENCE", 0)
    for m, n, k, world_size, chunks in ((64, 48, 32, 4, 2), (5, 7, 3, 3, 2), (24, 8, 8, 2, 4)):
        schedule = build(Problem(op=op, m=m, n=n, k=k, world_size=world_size), name, chunks)
        for seed, unmerged in ((0, False), (1, True)):
            assert ends(schedule, room=1, seed=seed, unmerged=unmerged), (op, name, world_size)


@pytest.mark.parametrize(("op", "name"), FAMILIES)
def test_collectives_in_many_pieces(op: Op, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_plan, "MOST_IN_SEQUENCE", 0)
    for world_size, chunks in ((2, 3), (3, 1), (4, 2)):
        assert ends(build(problem(op, world_size), name, chunks), room=1, seed=world_size), (op, name, world_size)


def test_lane_after_lane_such_streams_are_not() -> None:
    """Without turns, as an all_reduce in 97 pieces among 4 ranks had it: hosts wait for a lane that they have yet to give."""
    schedule = build(problem("all_reduce", 3), "copy_engine", 1)
    longest = max(len(items) for rank in range(3) for _, items in LaunchPlan(FakeProgram(schedule, rank), frozenset()).merged)  # type: ignore[arg-type]
    assert longest <= launch_plan.MOST_IN_SEQUENCE
    assert not any(ends(schedule, room=longest // 3, seed=seed) for seed in range(3))
    assert ends(schedule, room=longest, seed=0)


def test_long_lanes_are_given_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item once, a lane's own in order, before what waits for them; short ones lane after lane, the caller's last."""
    schedule = build(problem("all_reduce", 3), "copy_engine", 1)

    def runs() -> tuple[LaunchPlan, list[tuple[Lane, list[Launch]]]]:
        plan = LaunchPlan(FakeProgram(schedule, 1), frozenset())  # type: ignore[arg-type]
        return plan, [(lane, some) for lane, some, _ in plan.batches]

    plan, short = runs()
    assert [lane.name for lane, _ in short] == ["copy", "blocks", "compute"]
    monkeypatch.setattr(launch_plan, "MOST_IN_SEQUENCE", 8)
    plan, long = runs()
    assert len(long) > 8
    for lane, items in plan.merged:
        assert [item for other, some in long if other is lane for item in some] == items


def test_every_moment_of_every_step_has_its_place() -> None:
    for op, name in PAIRS:
        schedule = build(Problem(op=op, m=64, n=48, k=32, world_size=4), name, 2)
        for rank, lanes in enumerate(schedule.ranks):
            steps = [(lane.name, at, step) for lane in lanes for at, step in enumerate(lane.steps)]
            wanted = {(name_, at, stage) for name_, at, step in steps for stage in range(2 * len(turns(step)))}
            assert set(order(schedule, rank)) == wanted, (op, name)
