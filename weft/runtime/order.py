"""In which order a rank may hand its lanes to the GPU, however few launches a stream takes before it makes the host wait.

A stream takes some 1000 entries (Hopper, CUDA 13); the next launch waits in the driver until one has ended. A host that gives
one lane after the other then waits in a long lane for a flag which a lane that it has not given yet would raise: for good.

So long lanes are given in turns: all ranks by one order of what happens, in which everything comes after what it waits for.
Why no host waits for good: take the first thing in that order that has not happened. All that it waits for has. If it has been
given, it can run. If not, its host waits in another lane, to give what comes before it in the order; the lane is full of
what comes before that, all of which has happened: so the lane is not full.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import Any

from weft.core.schedule import Collective, Flag, Gemm, Lane, Schedule, SendReceive, Step, Wait, advances, waits

Key = tuple[object, ...]
Place = tuple[str, int, int]
"""Lane, position, and moment of the step: see `before` and `behind`."""


def before(turn: int) -> int:
    """The moment at which a step comes to the waits of a turn."""
    return 2 * turn


def behind(turn: int) -> int:
    """The moment at which it has passed them."""
    return 2 * turn + 1


def turns(step: Step) -> list[tuple[list[Wait], list[Flag]]]:
    """What a step does one after the other: waits, and flags that are raised behind them.

    A GEMM goes part by part, or slice by slice where a part has inner gates; a sum, which may be one kernel behind all of its
    gates, in one turn.
    """
    if isinstance(step, Gemm):
        found: list[tuple[list[Wait], list[Flag]]] = []
        for part in step.parts:
            slices = [list(part.gates), *([wait] for _, wait in part.inner)]
            found += [(waits, []) for waits in slices[:-1]] + [(slices[-1], [] if part.count is None else [part.count])]
        return found
    return [(list(waits(step)), list(advances(step)))]


class _Run:
    """One call of all ranks, every lane as far as its waits let it. passed: the places that one rank came to, in this order.

    Waits for previous calls are over: those have been given whole.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._rank, self.passed = rank, list[Place]()
        self._done: Counter[Key] = Counter()
        self._waiting: defaultdict[Key, list[Iterator[Key]]] = defaultdict(list)
        self._size = len(schedule.ranks)
        self._meeting: dict[type, Any] = {Collective: self._collective, SendReceive: self._messages}
        self._ready = deque(self._lane(rank, lane) for rank, lanes in enumerate(schedule.ranks) for lane in lanes)
        while self._ready:
            lane = self._ready.popleft()
            key = next(lane, None)
            if key is not None:
                self._waiting[key].append(lane)
        assert not any(self._waiting.values()), f"schedule {schedule.name} is not a checked one: {dict(self._waiting)}"

    def _lane(self, rank: int, lane: Lane) -> Iterator[Key]:
        """Runs a lane; yields what it waits for, once for each time that it has to."""
        for position, step in enumerate(lane.steps):
            for turn, (gates, raised) in enumerate(turns(step)):
                self._come_to(rank, (lane.name, position, before(turn)))
                needs: list[tuple[Key, int]] = [(("flag", wait.flag), wait.at_least) for wait in gates]
                for key, least in needs + self._meets(rank, step):
                    while self._done[key] < least:
                        yield key
                self._come_to(rank, (lane.name, position, behind(turn)))
                for flag in raised:
                    self._count("flag", flag)

    def _come_to(self, rank: int, place: Place) -> None:
        if rank == self._rank:
            self.passed.append(place)

    def _meets(self, rank: int, step: Step) -> list[tuple[Key, int]]:
        """Begins a step that others take part in; how often they must have begun theirs."""
        return self._meeting[type(step)](rank, step) if type(step) in self._meeting else []

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
    """The moments of all steps of a rank, numbered in one order of all that happens on all ranks."""
    return {place: number for number, place in enumerate(_Run(schedule, rank).passed)}
