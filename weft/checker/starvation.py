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
is stuck would be stuck there too. Else all orders in which contested steps can start are tried, everything else running as
soon as it can: that takes nothing from the adversary, for it only ever enables more. One call is enough, since waits look
back: a circle of waits lies within one call, and the first call has the fewest of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from weft.checker.program import CompiledSchedule, Do, Op, Place, ScheduleError
from weft.checker.walk import Occupied

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
    state = _State(program)
    state.settle(lambda place: all(state.ended(other) for other in contested.get(place, ())))
    if not state.done:
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
    states, seen = [_State(program)], set[tuple[object, ...]]()
    while states:
        state = states.pop()
        state.settle(lambda place: place not in points)
        if state.done or state.key in seen:
            continue
        seen.add(state.key)
        choices = state.startable(points)
        if not choices:
            raise ScheduleError(state.why(points))
        if len(seen) > MOST_STATES:
            raise ScheduleError(f"no proof within {MOST_STATES} states that it cannot deadlock; {state.why(points)}")
        for choice in choices:
            states.append(state.after(choice, points))


class _State:
    """One call under way: positions of lanes, the kernels and collectives that they are in, the flags."""

    def __init__(self, program: CompiledSchedule) -> None:
        self.program = program
        self.at = {(r, i): 0 for r, lanes in enumerate(program.ops) for i in range(len(lanes))}
        self.inside: dict[tuple[int, int], tuple[int, ...]] = {}
        self.flags: Counter[int] = Counter()
        self.met: Counter[int] = Counter()
        self.posted: Counter[tuple[int, int, bool]] = Counter()

    def copy(self) -> _State:
        other = _State(self.program)
        other.at, other.inside = dict(self.at), dict(self.inside)
        other.flags, other.met, other.posted = Counter(self.flags), Counter(self.met), Counter(self.posted)
        return other

    def after(self, choice: Place, points: set[Place]) -> _State:
        """The state in which that step has started, and everything has run but the other points."""
        then = self.copy()
        then.settle(lambda place: place == choice or place not in points)
        return then

    @property
    def key(self) -> tuple[object, ...]:
        return tuple(self.at.values()), tuple(sorted(self.inside.items()))

    @property
    def done(self) -> bool:
        return all(at == len(self.program.ops[rank][lane]) for (rank, lane), at in self.at.items())

    def ended(self, place: Place) -> bool:
        return self.at[place[:2]] > place[2]

    def settle(self, may_start: Callable[[Place], bool]) -> None:
        """Run every lane as far as it gets when only these steps may start on SMs."""
        moved = True
        while moved:
            moved = False
            for lane in self.at:
                while self._advance(lane, may_start):
                    moved = True

    def _op(self, lane: tuple[int, int]) -> Op | None:
        ops = self.program.ops[lane[0]][lane[1]]
        return ops[self.at[lane]] if self.at[lane] < len(ops) else None

    def _advance(self, lane: tuple[int, int], may_start: Callable[[Place], bool]) -> bool:
        """Start or end the lane's next step, or some of its parts; whether anything came of it."""
        op = self._op(lane)
        if op is None or (op.do is Do.WAIT and self.flags[op.flag] < op.at_least):
            return False
        if op.do in (Do.WAIT, Do.SIGNAL):
            self.flags[op.flag] += op.do is Do.SIGNAL
            self.at[lane] += 1
            return True
        if lane not in self.inside:
            return self._start(lane, op, may_start)
        if op.do is Do.COLLECTIVE:
            ended = self.met[self._ordinal(lane)] == len(self.program.ops)
        elif op.do is Do.MESSAGES:
            ended = all(self._begun(lane, number) for number in range(len(op.messages)))
        else:
            before = left = self.inside[lane]
            while left and self._finish(op, left[0]):
                left = left[1:]
            self.inside[lane] = left
            if left:
                return len(left) < len(before)
            ended = True
        if ended:
            del self.inside[lane]
            self.at[lane] += 1
        return ended

    def _start(self, lane: tuple[int, int], op: Op, may_start: Callable[[Place], bool]) -> bool:
        if op.needs_sms and not may_start((*lane, self.at[lane])):
            return False
        self.inside[lane] = tuple(range(len(op.actions)))
        if op.do is Do.COLLECTIVE:
            self.met[self._ordinal(lane)] += 1
        for sent, peer in op.messages:
            self.posted[lane[0], peer, sent] += 1
        return True

    def _begun(self, lane: tuple[int, int], number: int) -> bool:
        """Whether the other end of a message has."""
        ops = self.program.ops[lane[0]][lane[1]]
        sent, peer = message = ops[self.at[lane]].messages[number]
        before = [end for op in ops[: self.at[lane]] for end in op.messages] + list(ops[self.at[lane]].messages[:number])
        return self.posted[peer, lane[0], not sent] > before.count(message)

    def _finish(self, op: Op, part: int) -> bool:
        action = op.actions[part]
        if any(self.flags[flag] < at_least for flag, at_least in action.waits):
            return False
        if action.counts >= 0:
            self.flags[action.counts] += 1
        return True

    def _ordinal(self, lane: tuple[int, int]) -> int:
        """Which collective of the call the lane is at."""
        return sum(op.do is Do.COLLECTIVE for op in self.program.ops[lane[0]][lane[1]][: self.at[lane]])

    def _holders(self) -> dict[int, tuple[int, int]]:
        """By rank: the lane whose kernel fills it."""
        return {lane[0]: lane for lane in self.inside if (op := self._op(lane)) and op.fills}

    def _unstarted(self, points: set[Place]) -> list[tuple[int, int]]:
        return [lane for lane, at in self.at.items() if (*lane, at) in points and lane not in self.inside]

    def startable(self, points: set[Place]) -> list[Place]:
        """Contested steps that could start now; those that fill a rank last, to be tried first."""
        held = self._holders()
        places = [(*lane, self.at[lane]) for lane in self._unstarted(points) if lane[0] not in held]
        return sorted(places, key=lambda p: self.program.ops[p[0]][p[1]][p[2]].fills)

    def why(self, points: set[Place]) -> str:
        """The kernel that waits, and the step that it keeps out."""
        held = self._holders()
        kept = next((lane for lane in self._unstarted(points) if lane[0] in held), None)
        if kept is None:
            return "kernels with gates and other lanes share the SMs of a rank"
        kernel = held[kept[0]]
        part = self.inside[kernel][0]
        step = self.program.where(*kernel, self.at[kernel], part)
        return (
            f"possible deadlock: {step} may fill all SMs of rank {kept[0]} with waiting blocks, while "
            f"{self.program.where(*kept, self.at[kept])} has not started and needs some; order one before the other, "
            "or run it on a lane of kind blocks"
        )
