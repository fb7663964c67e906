"""Proves that no kernel with waiting blocks keeps out the step that it waits for.

A kernel with gates on a compute lane may fill all SMs of its rank with waiting blocks. From its start to its end, no step
of that rank that needs SMs can start: no kernel, collective or copy within the rank (which is a kernel), whatever lane it
is on. Lanes of kind blocks have SMs of their own, and copies from or to a peer run on copy engines.

    rank r, compute                      rank r, copy
    gemm, its tiles wait for `staged`    copy a -> a_full (a kernel: no SM is free)
      ^                                  signal staged
      |  never                             |
      +------------------------------------+

A step that happens before the kernel's start, or after its end, is safe. The others are `contested`. If the schedule ends even
when each contested step starts after every kernel that may keep it out, it ends in any order: a state in which all lanes are
stuck would be stuck there too. Otherwise all orders in which contested steps can start are tried, each by a separate walk.
Everything else in such a walk runs as soon as it can, which is the general case, because running a step only enables others.
One call is enough: a wait depends only on signals of its own call or of earlier ones, so a cycle of waits is within one call.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.checker.effects import Effects
from weft.checker.memory import Memory
from weft.checker.program import CompiledSchedule, Op, Place, ScheduleError
from weft.checker.walk import LaneState, SmStep, Walk

MOST_STATES = 20_000
"""The most states that are tried. A schedule that needs more is refused."""


def find_crowded_ranks(program: CompiledSchedule) -> frozenset[int]:
    """Return the ranks on which a kernel may fill all SMs while other lanes need some."""
    found = set()
    for rank, lanes in enumerate(program.ops):
        users = sum(any(op.needs_sms for op in ops) for ops in lanes)
        if users > 1 and any(op.fills for ops in lanes for op in ops):
            found.add(rank)
    return frozenset(found)


def check_starvation(program: CompiledSchedule, sm_steps: dict[Place, SmStep]) -> None:
    """Raise ScheduleError if some order of starts ends in a deadlock.

    sm_steps: the steps on SMs that a Walk has recorded.
    """
    contested = _find_contested(sm_steps)
    if not contested:
        return
    ops = tuple(tuple(tuple(map(_drop_accesses, lane)) for lane in lanes) for lanes in program.ops)
    program = program._replace(ops=ops)
    walk = _ControlledWalk(program)
    walk.start_while(lambda place: all(map(walk.has_ended, contested.get(place, ()))))
    if not walk.done:
        _try_orders(program, contested)


def _find_contested(sm_steps: dict[Place, SmStep]) -> dict[Place, list[Place]]:
    """Return each contested step with the kernels that may keep it out."""
    found: dict[Place, list[Place]] = {}
    for place, step in sm_steps.items():
        for other in sm_steps.values():
            if other is step or not other.op.fills or other.place[0] != place[0]:
                continue
            if not (other.before >> step.start & 1 or step.before >> other.end & 1):
                found.setdefault(place, []).append(other.place)
    return found


def _try_orders(program: CompiledSchedule, contested: dict[Place, list[Place]]) -> None:
    points = set(contested) | {kernel for kernels in contested.values() for kernel in kernels}
    orders, seen = list[tuple[Place, ...]]([()]), set[object]()
    while orders:
        order, walk = orders.pop(), _ControlledWalk(program)
        walk.start_while(lambda place: place not in points)
        for choice in order:
            walk.start_while(lambda place, choice=choice: place == choice or place not in points)  # type: ignore[misc]
        if walk.done or walk.state_key in seen:
            continue
        seen.add(walk.state_key)
        choices = walk.list_startable()
        if not choices:
            raise ScheduleError(walk.explain())
        if len(seen) > MOST_STATES:
            raise ScheduleError(f"no proof within {MOST_STATES} states that it cannot deadlock; {walk.explain()}")
        orders += [(*order, choice) for choice in choices]


class _EffectsWithoutMemory(Effects):
    """The effects of steps that access no memory, in one call. What remains is which step waits for which."""

    CALLS = 1

    def _memory(self, number: int, name: str, rank: int) -> Memory:
        return Memory(number)

    def check_outputs(self, rank: int) -> None:
        pass


def _drop_accesses(op: Op) -> Op:
    return op._replace(actions=tuple([action.within(()) for action in op.actions]))


class _ControlledWalk(Walk):
    """A walk in which the caller chooses which steps may start on SMs.

    held: by place, the lanes whose next step may not start.
    inside: by rank and lane, the step that has started and not ended.
    """

    def __init__(self, program: CompiledSchedule) -> None:
        super().__init__(program, _EffectsWithoutMemory(program))
        self.may_start: Callable[[Place], bool] = lambda place: True
        self.held: dict[Place, LaneState] = {}
        self.inside: dict[tuple[int, int], Op] = {}

    def start_while(self, may_start: Callable[[Place], bool]) -> None:
        """Run every lane until it waits. Only steps for which `may_start` is true start on SMs."""
        self.may_start = may_start
        while self.ready or any(map(may_start, self.held)):
            for place in [place for place in self.held if may_start(place)]:
                self.ready.append(self.held.pop(place))
            self.run_ready_lanes()

    def _start_step(self, lane: LaneState, op: Op) -> bool:
        place = (lane.rank, lane.index, lane.position)
        if op.needs_sms and not self.may_start(place):
            self.held[place] = lane
            return False
        self.inside[place[:2]] = op
        return True

    def _end_step(self, lane: LaneState) -> None:
        super()._end_step(lane)
        del self.inside[lane.rank, lane.index]

    def has_ended(self, place: Place) -> bool:
        lane = self.lanes[place[0]][place[1]]
        return lane.call > 0 or lane.position > place[2]

    @property
    def state_key(self) -> object:
        """Return the state of the walk: the position of each lane."""
        places = [(lane.call, lane.position, lane.part) for lanes in self.lanes for lane in lanes]
        return tuple(places), tuple(sorted(self.inside))

    def _find_filling_lanes(self) -> dict[int, LaneState]:
        """Return, by rank, the lane whose kernel fills its SMs."""
        return {rank: self.lanes[rank][index] for (rank, index), op in self.inside.items() if op.fills}

    def list_startable(self) -> list[Place]:
        """Return the held steps that could start now. Steps that fill a rank are last, and so are tried first."""
        holders = self._find_filling_lanes()
        places = sorted(place for place in self.held if place[0] not in holders)
        return sorted(places, key=lambda p: self.program.ops[p[0]][p[1]][p[2]].fills)

    def explain(self) -> str:
        """Return a sentence that names the kernel that waits and the step that it keeps out."""
        holders = self._find_filling_lanes()
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
