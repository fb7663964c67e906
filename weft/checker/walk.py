"""This module executes a compiled schedule symbolically, for a few calls, and computes its happens-before relation.

Each event (an access, a signal, a reset of a flag) is a node. A lane carries the set of all nodes that must have happened
before its next step, as an int with one bit for each node. A signal stores the set of its lane in its flag; a wait adds the
set that the awaited signal stored. The sets are the happens-before relation that the module text of `weft.core.schedule`
describes: the steps of a lane are in order, the parts of a kernel are in no order, a call of a rank comes after all lanes of
the previous call, and the caller's reads and writes come between two calls.

Parts are executed in order, although nothing orders their accesses. A part that waits may block later parts, because it
occupies SMs, or because each part is a launch of its own.

The steps that wait for a flag lower it (weft.core.schedule, "Flags"): a Wait after it has passed, a kernel at its start for its
gates on the previous call, and a kernel at its end for its gates on this call. Each of these is a node. The signal of a later
call must happen after every node that lowers the first call's signal.

A wait depends only on signals of its own call or of earlier calls. So a lane that gets stuck does so in every order of
execution, in the first call. That is a deadlock, and its message follows who waits for whom until the cycle closes.
"""

from __future__ import annotations

from collections import deque
from functools import reduce
from operator import or_

from weft.checker.deadlock import StuckLane, deadlock
from weft.checker.effects import Effects
from weft.checker.mail import Leg, Mail
from weft.checker.memory import Conflict
from weft.checker.program import Action, CompiledSchedule, Do, Op, Place, ScheduleError

_WAIT, _SIGNAL, _WORK, _MESSAGES = Do.WAIT, Do.SIGNAL, Do.WORK, Do.MESSAGES


class LaneState:
    """A LaneState says where a lane is.

    part: the next part of the current kernel; -1 outside a kernel.
    joined: the union of the sets of the kernel's finished parts.
    gated: the flags of this call that the kernel waits for.
    legs: the lane's ends of messages in progress.
    """

    __slots__ = ("call", "gated", "index", "joined", "legs", "mask", "ops", "part", "position", "rank")

    def __init__(self, rank: int, index: int, ops: tuple[Op, ...]) -> None:
        self.rank, self.index, self.ops = rank, index, ops
        self.call = self.position = self.mask = self.joined = 0
        self.part = -1
        self.gated: list[int] = []
        self.legs: list[Leg] = []


class Occupied:
    """A step that needs SMs of a rank: its place, the set of nodes before its start, and the nodes of its start and end."""

    def __init__(self, place: tuple[int, int, int], op: Op, before: int, start: int) -> None:
        self.place, self.op, self.before, self.start, self.end = place, op, before, start, -1


class Walk:
    """A Walk executes a CompiledSchedule symbolically.

    crowded: the ranks whose steps on SMs are recorded, in `occupied`, in the first call.
    """

    def __init__(self, program: CompiledSchedule, effects: Effects, crowded: frozenset[int] = frozenset()) -> None:
        self.program, self.effects, self.crowded, self.calls = program, effects, crowded, effects.CALLS
        self.occupied: dict[tuple[int, int, int], Occupied] = {}
        self.lanes = [[LaneState(r, i, ops) for i, ops in enumerate(lanes)] for r, lanes in enumerate(program.ops)]
        self.open = [len(lanes) for lanes in self.lanes]
        self.passed = [0 for _ in self.lanes]
        self.signals: list[list[int]] = [[] for _ in program.flags]
        self.passed_by: dict[tuple[int, Place], int] = {}
        """By flag and waiting step: the node at which the step has lowered the flag's first signal."""
        self.parked: dict[int, list[LaneState]] = {}
        self.ready: deque[LaneState] = deque()
        self.at_collective: list[LaneState] = []
        self.mail, self.mailing = Mail(), list[LaneState]()

        for lanes in self.lanes:
            self.ready.extend(lanes)

    def run(self) -> None:
        """Execute all calls and check them. Raises ScheduleError for a deadlock, a race or a wrong result."""
        for rank, lanes in enumerate(self.lanes):
            if not lanes:
                self.effects.check_outputs(rank)
        try:
            self.go_on()
        except Conflict as conflict:
            raise self.effects.refusal(conflict) from None
        if not self.done:
            raise ScheduleError(deadlock(self.program, self._stuck()))

    def go_on(self) -> None:
        """Run every lane as far as it gets."""
        while self.ready:
            self._advance(self.ready.popleft())

    @property
    def done(self) -> bool:
        return all(lane.call == self.calls for lanes in self.lanes for lane in lanes)

    def _advance(self, lane: LaneState) -> None:
        """Run a lane until it must wait or its call ends."""
        ops, end = lane.ops, len(lane.ops)
        while lane.position < end:
            op = ops[lane.position]
            do = op.do
            if do is _WAIT:
                before = self._left_by(lane, op.flag, op.at_least)
                if before is None:
                    self.parked.setdefault(op.flag, []).append(lane)
                    return
                lane.mask |= before
                lane.mask |= self._lower(lane, op.flag, previous=not op.at_least)
            elif do is _SIGNAL:
                self._signal(op.flag, lane.mask)
            elif do is _MESSAGES:
                self._exchange(lane, op)
                return
            elif do is not _WORK:
                self._join_collective(lane, op)
                return
            elif not self._work(lane, op):
                return
            lane.position += 1
        self._end_call(lane)

    def _left_by(self, lane: LaneState, flag: int, at_least: int) -> int | None:
        """The set that a signal of this call, or (at_least = 0) of the one before, left; None while it has not come."""
        call = lane.call - (not at_least)
        if call < 0 or self.program.owners[flag] is None:
            return 0
        done = self.signals[flag]
        return done[call] if len(done) > call else None

    def _lower(self, lane: LaneState, flag: int, *, previous: bool) -> int:
        """The lane's step has passed a flag, and lowers it: the node, as a set, if that is the flag's first signal.

        previous: it waited for the signal of the call before."""
        if lane.call != previous:
            return 0
        place = (lane.rank, lane.index, lane.position)
        node = self.passed_by[flag, place] = self.effects.node((*place, 0, lane.call))
        return 1 << node

    def _signal(self, flag: int, mask: int) -> None:
        if self.signals[flag]:
            self._check_lowered(flag, mask)
        self.signals[flag].append(mask)
        if flag in self.parked:
            self.ready.extend(self.parked.pop(flag))

    def _check_lowered(self, flag: int, mask: int) -> None:
        """Before a flag is raised again, each step that waits for it has lowered it: else a signal would be lost."""
        for place in self.program.waiters[flag]:
            node = self.passed_by.get((flag, place))
            if node is None or not mask >> node & 1:
                name, waiter = self.program.flags[flag], self.program.where(*place)
                raise ScheduleError(
                    f"{name} may be signalled again before {waiter} has passed it; its signal must wait for that"
                )

    def _pass_previous(self, lane: LaneState, op: Op) -> bool:
        """Wait for the flags of the call before where a kernel starts; False, and the lane parked, if one has not come."""
        behind = self._behind(lane, tuple([(flag, 0) for flag in op.previous])) if op.previous else []
        if behind is None:
            return False
        lane.mask = reduce(or_, behind, lane.mask)
        for flag in op.previous:
            lane.mask |= self._lower(lane, flag, previous=True)
        return True

    def _work(self, lane: LaneState, op: Op) -> bool:
        """Start a copy or kernel, unless the lane is in it, and run the parts that are left, up to one that a gate keeps;
        whether none is."""
        if lane.part < 0:
            if not self._pass_previous(lane, op) or not self._enter(lane, op):
                return False
            lane.joined, lane.part = lane.mask, 0
        for part in range(lane.part, len(op.actions)):
            if not self._run_part(lane, op.actions[part], part):
                lane.part = part
                return False
        lane.part = -1
        self._leave(lane)
        return True

    def _run_part(self, lane: LaneState, action: Action, part: int) -> bool:
        waits = action.waits
        behind = self._behind(lane, waits) if waits else []
        if behind is None:
            return False
        gates, inner = behind[: len(action.gates)], behind[len(action.gates) :]
        at = (lane.rank, lane.index, lane.position, part, lane.call)
        before = reduce(or_, gates, lane.mask)
        if waits:
            lane.gated += [flag for flag, at_least in waits if at_least]
        followed = action.within(self.program.shared) if lane.call else action
        mask = self.effects.act(followed, at, before, lane.mask, inner)
        lane.joined |= mask
        if action.counts >= 0:
            self._signal(action.counts, mask)
        return True

    def _followed(self, action: Action, call: int) -> Action:
        """In calls after the first, the accesses alone that are to memory that peers may touch."""
        return action.within(self.program.shared) if call else action

    def _behind(self, lane: LaneState, gates: tuple[tuple[int, int], ...]) -> list[int] | None:
        """By gate, the set that its signal left; None, and the lane parked, if one is closed."""
        found = []
        for flag, at_least in gates:
            before = self._left_by(lane, flag, at_least)
            if before is None:
                self.parked.setdefault(flag, []).append(lane)
                return None
            found.append(before)
        return found

    def _enter(self, lane: LaneState, op: Op) -> bool:
        """Start a step; whether it may start now. One that may not is left where it is."""
        if op.needs_sms and lane.rank in self.crowded and lane.call == 0:
            place = (lane.rank, lane.index, lane.position)
            node = self.effects.node((*place, 0, 0))
            self.occupied[place] = Occupied(place, op, lane.mask, node)
            lane.mask |= 1 << node
        return True

    def _leave(self, lane: LaneState) -> None:
        lane.mask = lane.joined
        for flag in dict.fromkeys(lane.gated):  # a kernel lowers its gates of this call at its end
            lane.mask |= self._lower(lane, flag, previous=False)
        lane.gated = []
        place = (lane.rank, lane.index, lane.position)
        if place in self.occupied and lane.call == 0:
            node = self.occupied[place].end = self.effects.node((*place, 0, 0))
            lane.mask |= 1 << node

    def _join_collective(self, lane: LaneState, op: Op) -> None:
        """Arrive at a collective; the last rank to arrive lets all go on."""
        if not self._enter(lane, op):
            return
        self.at_collective.append(lane)
        if len(self.at_collective) < len(self.lanes):
            return
        ranks, self.at_collective = sorted(self.at_collective, key=lambda other: other.rank), []
        actions = [self._followed(other.ops[other.position].actions[0], other.call) for other in ranks]
        ats = [(other.rank, other.index, other.position, 0, other.call) for other in ranks]
        bits = self.effects.collect(actions, ats, [other.mask for other in ranks])
        started = reduce(or_, [other.mask for other in ranks])
        for other, bit in zip(ranks, bits, strict=True):
            other.joined = started | bit
            self._leave(other)
            other.position += 1
            self.ready.append(other)

    def _exchange(self, lane: LaneState, op: Op) -> None:
        """Begin a lane's messages, and end those of all lanes whose other ends have all begun."""
        if not self._enter(lane, op):
            return
        at = (lane.rank, lane.index, lane.position)
        lane.joined, actions = lane.mask, [self._followed(action, lane.call) for action in op.actions]
        lane.legs = [
            self.mail.begin(self.effects, (*at, part, lane.call), action, sent=sent, peer=peer, ancestors=lane.mask)
            for part, (action, (sent, peer)) in enumerate(zip(actions, op.messages, strict=True))
        ]
        self.mailing.append(lane)
        for other in [other for other in self.mailing if all(map(self.mail.is_complete, other.legs))]:
            self.mailing.remove(other)
            for leg in other.legs:
                other.joined |= self.mail.end(self.effects, leg, other.mask)
            self._leave(other)
            other.position += 1
            self.ready.append(other)

    def _end_call(self, lane: LaneState) -> None:
        """The last lane of a rank to end lets the caller read, and starts the next call."""
        rank = lane.rank
        lane.call += 1
        lane.position = 0
        self.passed[rank] |= lane.mask
        self.open[rank] -= 1
        if self.open[rank]:
            return
        if lane.call == 1:
            self.effects.check_outputs(rank)
        self.passed[rank] = self.effects.left_to_caller(rank, lane.call - 1, self.passed[rank])
        self.open[rank] = len(self.lanes[rank])
        if lane.call < self.calls:
            for other in self.lanes[rank]:
                other.mask = self.passed[rank]
                self.ready.append(other)

    def _stuck(self) -> dict[tuple[int, int], StuckLane]:
        """By rank and lane: the position and part that cannot go on, and the flag (-1: a collective) that it waits for."""
        found = {(lane.rank, lane.index): StuckLane(lane.position, 0, -1) for lane in self.at_collective}
        for lane in self.mailing:
            part = next(part for part, leg in enumerate(lane.legs) if not self.mail.is_complete(leg))
            found[lane.rank, lane.index] = StuckLane(lane.position, part, -1)
        for flag, parked in self.parked.items():
            for lane in parked:
                found[lane.rank, lane.index] = StuckLane(lane.position, max(lane.part, 0), flag)
        return found
