"""This module finds an order in which a rank can enqueue long lanes without a deadlock.

A stream takes about 1000 entries (Hopper, CUDA 13). The next launch blocks the host in the driver until an entry has ended. A
host that enqueues one lane after the other could then block in a long lane that waits for a flag, while the lane that raises
the flag is not enqueued yet. That is a deadlock.

So the launches of long lanes are interleaved. All ranks use one order of all events, in which every event comes after the
events that it waits for. There is no deadlock: take the first event in that order that has not happened. All events that it
waits for have happened. If it is enqueued, it can run. If it is not enqueued, its host is blocked in another lane while it
enqueues an earlier event. But that lane contains only events that are earlier still, which have all happened, so the lane is
not full.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import Any

from weft.core.schedule import Collective, Flag, Gemm, Lane, Schedule, SendReceive, Step, Wait, signalled_flags, waits

Key = tuple[object, ...]
Place = tuple[str, int, int]
"""A lane, a position in it, and a stage of that step: `stage_before_waits` or `stage_after_waits` of one of its turns."""


def stage_before_waits(turn: int) -> int:
    """Return the stage in which a step has reached the waits of a turn."""
    return 2 * turn


def stage_after_waits(turn: int) -> int:
    """Return the stage in which a step has passed the waits of a turn."""
    return 2 * turn + 1


def turns(step: Step) -> list[tuple[list[Wait], list[Flag]]]:
    """Return the turns of a step. Each is a list of waits, and the flags that the step raises after them.

    A GEMM has a turn for each part, or for each slice of a part with inner gates. A sum has one turn, because it may be one
    kernel after all of its gates.
    """
    if isinstance(step, Gemm):
        found: list[tuple[list[Wait], list[Flag]]] = []
        for part in step.parts:
            slices = [list(part.gates), *([wait] for _, wait in part.inner)]
            found += [(waits, []) for waits in slices[:-1]] + [(slices[-1], [] if part.count is None else [part.count])]
        return found
    return [(list(waits(step)), list(signalled_flags(step)))]


class _Run:
    """A _Run executes one call of all ranks on paper, every lane as far as its waits permit.

    Waits for previous calls are over, because those calls are completely enqueued.

    passed: the places that one rank reached, in this order.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._rank, self.passed = rank, list[Place]()
        self._done: Counter[Key] = Counter()
        self._waiting: defaultdict[Key, list[Iterator[Key]]] = defaultdict(list)
        self._size = len(schedule.ranks)
        self._take_part: dict[type, Any] = {Collective: self._collective, SendReceive: self._messages}
        self._ready = deque(self._lane(rank, lane) for rank, lanes in enumerate(schedule.ranks) for lane in lanes)
        while self._ready:
            lane = self._ready.popleft()
            key = next(lane, None)
            if key is not None:
                self._waiting[key].append(lane)
        assert not any(self._waiting.values()), f"schedule {schedule.name} was not checked: {dict(self._waiting)}"

    def _lane(self, rank: int, lane: Lane) -> Iterator[Key]:
        """Run a lane. Yield the key that it waits for, each time that it must wait."""
        for position, step in enumerate(lane.steps):
            for turn, (gates, raised) in enumerate(turns(step)):
                self._reach(rank, (lane.name, position, stage_before_waits(turn)))
                needs: list[tuple[Key, int]] = [(("flag", wait.flag), 1) for wait in gates if not wait.on_previous_call]
                for key, least in needs + self._begin(rank, step):
                    while self._done[key] < least:
                        yield key
                self._reach(rank, (lane.name, position, stage_after_waits(turn)))
                for flag in raised:
                    self._count("flag", flag)

    def _reach(self, rank: int, place: Place) -> None:
        if rank == self._rank:
            self.passed.append(place)

    def _begin(self, rank: int, step: Step) -> list[tuple[Key, int]]:
        """Begin a step in which other ranks take part. Return how many such steps each of them must have begun."""
        return self._take_part[type(step)](rank, step) if type(step) in self._take_part else []

    def _collective(self, rank: int, step: Collective) -> list[tuple[Key, int]]:
        number = self._count("collectives of", rank)
        return [(("collectives of", other), number) for other in range(self._size)]

    def _messages(self, rank: int, step: SendReceive) -> list[tuple[Key, int]]:
        sent = [(("received", rank, send.to), self._count("sent", rank, send.to)) for send in step.sends]
        got = [(("sent", one.source, rank), self._count("received", one.source, rank)) for one in step.receives]
        return [*sent, *got]

    def _count(self, *key: object) -> int:
        self._done[key] += 1
        self._ready.extend(self._waiting.pop(key, ()))
        return self._done[key]


def order(schedule: Schedule, rank: int) -> dict[Place, int]:
    """Return the stages of all steps of a rank, numbered in one order of all events of all ranks."""
    return {place: number for number, place in enumerate(_Run(schedule, rank).passed)}
