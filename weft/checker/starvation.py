"""Can a kernel whose blocks wait keep out the step that it waits for?

A kernel with gates on a compute lane may fill all SMs of its rank with waiting blocks. From its start to its end, no step
of that rank that needs SMs can start: no kernel, collective or copy within the rank (which is a kernel), whatever lane it
is on. Lanes of kind blocks have SMs of their own, and copies from or to a peer run on copy engines.

    rank r, compute                      rank r, copy
    gemm, its tiles wait for `staged`    copy a -> a_full (a kernel: no SM is free)
      ^                                  signal staged
      |  never                             |
      +------------------------------------+

A step that happens before the kernel's start, or after its end, is safe. The others are `contested`. If the schedule still
ends when each contested step lets every kernel that may keep it out go first, it ends in any order: a state in which all
is stuck would be stuck there too. Else all orders in which contested steps can start are tried, each by a walk of its own in
which everything else runs as soon as it can: that takes nothing from the adversary, for it only ever enables more. One call is
enough, since waits look back: a cycle of waits is within one call, and the first call has the fewest of them.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.checker.effects import Effects
from weft.checker.memory import Memory
from weft.checker.program import CompiledSchedule, Op, Place, ScheduleError
from weft.checker.walk import LaneState, Occupied, Walk

MOST_STATES = 20_000
"""Orders tried before giving up; a schedule that needs more is refused."""


def crowded_ranks(program: CompiledSchedule) -> frozenset[int]:
    """Ranks on which a kernel may fill the SMs while other lanes need some."""
    found = set()
    for rank, lanes in enumerate(program.ops):
        users = sum(any(op.needs_sms for op in ops) for ops in lanes)
        if users > 1 and any(op.fills for ops in lanes for op in ops):
            found.add(rank)
    return frozenset(found)


def check_starvation(program: CompiledSchedule, occupied: dict[Place, Occupied]) -> None:
    """Raises ScheduleError if some order of starts ends in a deadlock. occupied: as a walk has recorded it."""
    contested = _contested(occupied)
    if not contested:
        return
    ops = tuple(tuple(tuple(map(_without_accesses, lane)) for lane in lanes) for lanes in program.ops)
    program = program._replace(ops=ops)
    walk = _Starts(program)
    walk.start_while(lambda place: all(map(walk.ended, contested.get(place, ()))))
    if not walk.done:
        _try_orders(program, contested)


def _contested(occupied: dict[Place, Occupied]) -> dict[Place, list[Place]]:
    """Each contested step, and the kernels that may keep it out."""
    found: dict[Place, list[Place]] = {}
    for place, step in occupied.items():
        for other in occupied.values():
            if other is step or not other.op.fills or other.place[0] != place[0]:
                continue
            if not (other.before >> step.start & 1 or step.before >> other.end & 1):
                found.setdefault(place, []).append(other.place)
    return found


def _try_orders(program: CompiledSchedule, contested: dict[Place, list[Place]]) -> None:
    points = set(contested) | {kernel for kernels in contested.values() for kernel in kernels}
    orders, seen = list[tuple[Place, ...]]([()]), set[object]()
    while orders:
        order, walk = orders.pop(), _Starts(program)
        walk.start_while(lambda place: place not in points)
        for choice in order:
            walk.start_while(lambda place, choice=choice: place == choice or place not in points)  # type: ignore[misc]
        if walk.done or walk.key in seen:
            continue
        seen.add(walk.key)
        choices = walk.startable()
        if not choices:
            raise ScheduleError(walk.why())
        if len(seen) > MOST_STATES:
            raise ScheduleError(f"no proof within {MOST_STATES} states that it cannot deadlock; {walk.why()}")
        orders += [(*order, choice) for choice in choices]


class _Waits(Effects):
    """Of steps that touch no memory: what counts is who waits for whom, in one call."""

    CALLS = 1

    def _memory(self, number: int, name: str, rank: int) -> Memory:
        return Memory(number)

    def check_outputs(self, rank: int) -> None:
        pass


def _without_accesses(op: Op) -> Op:
    return op._replace(actions=tuple([action.within(()) for action in op.actions]))


class _Starts(Walk):
    """A walk in which steps start on SMs as they are let. held: by place, the lanes of those that are not. inside: by rank and
    lane, the step that has started and not ended."""

    def __init__(self, program: CompiledSchedule) -> None:
        super().__init__(program, _Waits(program))
        self.may_start: Callable[[Place], bool] = lambda place: True
        self.held: dict[Place, LaneState] = {}
        self.inside: dict[tuple[int, int], Op] = {}

    def start_while(self, may_start: Callable[[Place], bool]) -> None:
        """Run every lane as far as it gets when only these steps may start on SMs."""
        self.may_start = may_start
        while self.ready or any(map(may_start, self.held)):
            for place in [place for place in self.held if may_start(place)]:
                self.ready.append(self.held.pop(place))
            self.go_on()

    def _enter(self, lane: LaneState, op: Op) -> bool:
        place = (lane.rank, lane.index, lane.position)
        if op.needs_sms and not self.may_start(place):
            self.held[place] = lane
            return False
        self.inside[place[:2]] = op
        return True

    def _leave(self, lane: LaneState) -> None:
        super()._leave(lane)
        del self.inside[lane.rank, lane.index]

    def ended(self, place: Place) -> bool:
        lane = self.lanes[place[0]][place[1]]
        return lane.call > 0 or lane.position > place[2]

    @property
    def key(self) -> object:
        """Where all lanes are."""
        places = [(lane.call, lane.position, lane.part) for lanes in self.lanes for lane in lanes]
        return tuple(places), tuple(sorted(self.inside))

    def _holders(self) -> dict[int, LaneState]:
        """By rank: the lane whose kernel fills it."""
        return {rank: self.lanes[rank][index] for (rank, index), op in self.inside.items() if op.fills}

    def startable(self) -> list[Place]:
        """Steps that are held and could start now; those that fill a rank last, to be tried first."""
        holders = self._holders()
        places = sorted(place for place in self.held if place[0] not in holders)
        return sorted(places, key=lambda p: self.program.ops[p[0]][p[1]][p[2]].fills)

    def why(self) -> str:
        """The kernel that waits, and the step that it keeps out."""
        holders = self._holders()
        waiting = min((place for place in self.held if place[0] in holders), default=None)
        if waiting is None:
            return "kernels with gates and other lanes share the SMs of a rank"
        kernel = holders[waiting[0]]
        step = self.program.where(kernel.rank, kernel.index, kernel.position, kernel.part)
        return (
            f"possible deadlock: {step} may fill all SMs of rank {waiting[0]} with waiting blocks, while "
            f"{self.program.where(*waiting)} has not started and needs some; order one before the other, "
            "or run it on a lane of kind blocks"
        )
