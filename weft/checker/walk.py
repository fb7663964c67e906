"""A Walk executes a compiled schedule symbolically, for a few calls, and computes its happens-before relation.

Each event (an access, a reset of a flag, the start or end of a step on SMs) is a node. Each lane has a mask: the set of all
nodes that must have happened before its next step, as an int with one bit for each node. A signal stores its lane's mask in its
flag; a wait adds the mask that the awaited signal stored. The masks are the happens-before relation that the module text of
`weft.core.schedule` describes: the steps of a lane are in order, the parts of a kernel are in no order, a call of a rank comes
after all lanes of the previous call, and the caller's reads and writes come between two calls.

Parts are executed in order, although nothing orders their accesses. A part that waits may block later parts, because it
occupies SMs, or because each part is a launch of its own.

The steps that wait for a flag lower it (weft.core.schedule, "Flags"): a Wait after it has passed, a kernel at its start for its
gates on the previous call, and a kernel at its end for its gates on this call. Each of these is a node. The signal of a later
call must happen after every node that lowers the first call's signal.

A wait depends only on signals of its own call or of earlier calls. So a lane that gets stuck does so in every order of
execution, in the first call. That is a deadlock, and its message follows who waits for whom until the cycle closes.

The n-th message that a rank sends to another is the n-th that the other receives from it, counted over all calls. A step with
messages ends once the other end of each message has begun, because NCCL may keep a sender waiting until then. It does not
always do so. So nothing of the receiver is known to happen before a sender's end. All ancestors of the sender's begin, and its
read, happen before a receiver's end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from functools import reduce
from operator import or_
from typing import NamedTuple

from weft.checker.content import Cells
from weft.checker.effects import At, Effects
from weft.checker.memory import Conflict
from weft.checker.program import Action, CompiledSchedule, Do, Op, Place, ScheduleError

LanePlace = tuple[int, int]
"""A rank and a lane."""


class StuckLane(NamedTuple):
    """The position of a stuck lane: the step, its part, and the flag that it waits for (-1 for a collective or messages)."""

    position: int
    part: int
    flag: int


def deadlock(program: CompiledSchedule, stuck: dict[LanePlace, StuckLane]) -> str:
    """Return the cycle among stuck lanes as a sentence."""
    here, path, lines = min(stuck), list[LanePlace](), list[str]()
    while here not in path:
        path.append(here)
        what, then = _awaited(program, stuck, here)
        owner = f"rank {then[0]}, lane {program.schedule.ranks[then[0]][then[1]].name}"
        lines.append(f"{program.where(*here, *stuck[here][:2])} waits for {what}, which needs {owner}")
        here = then
    return "deadlock: " + "; ".join(lines[path.index(here) :])


def _awaited(program: CompiledSchedule, stuck: dict[LanePlace, StuckLane], here: LanePlace) -> tuple[str, LanePlace]:
    """Return the text of what `here` waits for, and the lane that should let it continue.

    If that lane has ended its call, return another stuck lane of its rank.
    """
    position, part, flag = stuck[here]
    if flag >= 0:
        owner = program.owners[flag]
        assert owner is not None
        what, (rank, index) = f"a signal of {program.flags[flag]}", owner
    else:
        op = program.ops[here[0]][here[1]][position]
        if op.do is Do.MESSAGES:
            rank = op.messages[part][1]
            what = f"rank {rank} to begin its end of message {part}"
        else:
            arrived = {r for (r, i), lane in stuck.items() if program.ops[r][i][lane.position].do is Do.COLLECTIVE}
            rank = next(r for r in range(len(program.ops)) if r not in arrived)
            what = "all ranks to start it"
        index = next((i for i, ops in enumerate(program.ops[rank]) if any(one.do is op.do for one in ops)), -1)
    return what, (rank, index) if (rank, index) in stuck else min(place for place in stuck if place[0] == rank)


Pair = tuple[int, int]
"""A sender and a receiver."""


class Leg(NamedTuple):
    """One end of message `number` of a pair of ranks."""

    pair: Pair
    number: int
    sent: bool
    action: Action
    at: At


class Posted(NamedTuple):
    """A sent message: its cells, and the ancestors of the send, including the read."""

    action: Action
    cells: Cells
    behind: int


class Mail:
    """All messages of all pairs of ranks."""

    def __init__(self) -> None:
        self.posted: defaultdict[Pair, list[Posted]] = defaultdict(list)
        self.awaited: defaultdict[Pair, int] = defaultdict(int)

    def begin(self, effects: Effects, at: At, action: Action, *, sent: bool, peer: int, ancestors: int) -> Leg:
        """Begin one end of a message. A sender reads its data."""
        pair = (at[0], peer) if sent else (peer, at[0])
        number = len(self.posted[pair]) if sent else self.awaited[pair]
        if sent:
            cells, behind = effects.post(action, at, ancestors)
            self.posted[pair].append(Posted(action, cells, behind))
        else:
            self.awaited[pair] += 1
        return Leg(pair, number, sent, action, at)

    def is_complete(self, leg: Leg) -> bool:
        """Return whether the other end has begun."""
        return (self.awaited[leg.pair] if leg.sent else len(self.posted[leg.pair])) > leg.number

    def end(self, effects: Effects, leg: Leg, ancestors: int) -> int:
        """End one end of a message, and return the new ancestors of its lane. A receiver writes its data."""
        post = self.posted[leg.pair][leg.number]
        if leg.sent:
            return post.behind
        return effects.deliver(leg.action, leg.at, ancestors | post.behind, post.action, post.cells)


_WAIT, _SIGNAL, _WORK, _MESSAGES = Do.WAIT, Do.SIGNAL, Do.WORK, Do.MESSAGES


class LaneState:
    """A LaneState is the progress of a lane.

    call, position: the current call, and the next step in it.
    mask: the nodes that happen before the next step.
    part: the next part of the current kernel; -1 outside a kernel.
    parts_mask: the union of the masks of the kernel's finished parts.
    gate_flags: the flags of this call that the kernel waits for.
    legs: the lane's ends of messages in progress.
    """

    __slots__ = ("call", "gate_flags", "index", "legs", "mask", "ops", "part", "parts_mask", "position", "rank")

    def __init__(self, rank: int, index: int, ops: tuple[Op, ...]) -> None:
        self.rank, self.index, self.ops = rank, index, ops
        self.call = self.position = self.mask = self.parts_mask = 0
        self.part = -1
        self.gate_flags: list[int] = []
        self.legs: list[Leg] = []


class SmStep:
    """An SmStep records a step that needs SMs: its place, the mask before its start, and the nodes of its start and end."""

    def __init__(self, place: tuple[int, int, int], op: Op, before: int, start: int) -> None:
        self.place, self.op, self.before, self.start, self.end = place, op, before, start, -1


class Walk:
    """A Walk executes a CompiledSchedule symbolically.

    crowded: the ranks on which waiting kernels may fill all SMs. In the first call, `sm_steps` records their steps on SMs.
    unfinished_lanes: by rank, the number of lanes that have not ended the current call.
    call_masks: by rank, the union of the masks of the lanes that have ended the current call.
    signals: by flag, the mask that the signal of each call stored.
    lowering_nodes: by flag and waiting step, the node at which the step has lowered the flag's first signal.
    parked: by flag, the lanes that wait for it.
    ready: the lanes that can advance.
    """

    def __init__(self, program: CompiledSchedule, effects: Effects, crowded: frozenset[int] = frozenset()) -> None:
        self.program, self.effects, self.crowded, self.calls = program, effects, crowded, effects.CALLS
        self.sm_steps: dict[tuple[int, int, int], SmStep] = {}
        self.lanes = [[LaneState(r, i, ops) for i, ops in enumerate(lanes)] for r, lanes in enumerate(program.ops)]
        self.unfinished_lanes = [len(lanes) for lanes in self.lanes]
        self.call_masks = [0 for _ in self.lanes]
        self.signals: list[list[int]] = [[] for _ in program.flags]
        self.lowering_nodes: dict[tuple[int, Place], int] = {}
        self.parked: dict[int, list[LaneState]] = {}
        self.ready: deque[LaneState] = deque()
        self.lanes_at_collective: list[LaneState] = []
        self.mail, self.lanes_in_messages = Mail(), list[LaneState]()

        for lanes in self.lanes:
            self.ready.extend(lanes)

    def run(self) -> None:
        """Execute all calls and check them. Raises ScheduleError for a deadlock, a race or a wrong result."""
        for rank, lanes in enumerate(self.lanes):
            if not lanes:
                self.effects.check_outputs(rank)
        try:
            self.run_ready_lanes()
        except Conflict as conflict:
            raise self.effects.explain(conflict) from None
        if not self.done:
            raise ScheduleError(deadlock(self.program, self._find_stuck_lanes()))

    def run_ready_lanes(self) -> None:
        """Run every lane until it waits, or until all calls have ended."""
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
                before = self._get_signal_mask(lane, op.flag, op.on_previous_call)
                if before is None:
                    self.parked.setdefault(op.flag, []).append(lane)
                    return
                lane.mask |= before
                lane.mask |= self._record_lowering(lane, op.flag, previous=op.on_previous_call)
            elif do is _SIGNAL:
                self._signal(op.flag, lane.mask)
            elif do is _MESSAGES:
                self._begin_messages(lane, op)
                return
            elif do is not _WORK:
                self._join_collective(lane, op)
                return
            elif not self._run_parts(lane, op):
                return
            lane.position += 1
        self._end_call(lane)

    def _get_signal_mask(self, lane: LaneState, flag: int, on_previous_call: bool) -> int | None:
        """Return the mask that the signal of this call stored, or that of the previous call if on_previous_call.

        Return None if the flag has not been signalled yet.
        """
        call = lane.call - on_previous_call
        if call < 0 or self.program.owners[flag] is None:
            return 0
        masks = self.signals[flag]
        return masks[call] if len(masks) > call else None

    def _record_lowering(self, lane: LaneState, flag: int, *, previous: bool) -> int:
        """Record that the lane's step lowers a flag after its wait. Return the mask of the new node.

        Only the lowering of a flag's first signal gets a node; for later ones, return 0.

        previous: the step waited for the signal of the previous call.
        """
        if lane.call != previous:
            return 0
        place = (lane.rank, lane.index, lane.position)
        node = self.lowering_nodes[flag, place] = self.effects.add_node((*place, 0, lane.call))
        return 1 << node

    def _signal(self, flag: int, mask: int) -> None:
        if self.signals[flag]:
            self._check_lowered(flag, mask)
        self.signals[flag].append(mask)
        if flag in self.parked:
            self.ready.extend(self.parked.pop(flag))

    def _check_lowered(self, flag: int, mask: int) -> None:
        """Raise ScheduleError unless each step that waits for a flag has lowered it before the flag is raised again.

        Otherwise a signal could be lost.
        """
        for place in self.program.waiters[flag]:
            node = self.lowering_nodes.get((flag, place))
            if node is None or not mask >> node & 1:
                name, waiter = self.program.flags[flag], self.program.where(*place)
                raise ScheduleError(
                    f"{name} may be signalled again before {waiter} has passed it; its signal must wait for that"
                )

    def _wait_for_previous_call(self, lane: LaneState, op: Op) -> bool:
        """At the start of a kernel, wait for its flags of the previous call.

        Return whether all of them have been signalled. If not, park the lane.
        """
        masks = self._get_gate_masks(lane, tuple([(flag, True) for flag in op.previous])) if op.previous else []
        if masks is None:
            return False
        lane.mask = reduce(or_, masks, lane.mask)
        for flag in op.previous:
            lane.mask |= self._record_lowering(lane, flag, previous=True)
        return True

    def _run_parts(self, lane: LaneState, op: Op) -> bool:
        """Start a copy or kernel, unless it has started, and run its remaining parts until a gate blocks one.

        Return whether the step has ended.
        """
        if lane.part < 0:
            if not self._wait_for_previous_call(lane, op) or not self._start_step(lane, op):
                return False
            lane.parts_mask, lane.part = lane.mask, 0
        for part in range(lane.part, len(op.actions)):
            if not self._run_part(lane, op.actions[part], part):
                lane.part = part
                return False
        lane.part = -1
        self._end_step(lane)
        return True

    def _run_part(self, lane: LaneState, action: Action, part: int) -> bool:
        waits = action.waits
        masks = self._get_gate_masks(lane, waits) if waits else []
        if masks is None:
            return False
        gates, inner = masks[: len(action.gates)], masks[len(action.gates) :]
        at = (lane.rank, lane.index, lane.position, part, lane.call)
        before = reduce(or_, gates, lane.mask)
        if waits:
            lane.gate_flags += [flag for flag, on_previous_call in waits if not on_previous_call]
        checked = action.within(self.program.shared) if lane.call else action  # `_restrict_accesses`, inlined for speed
        mask = self.effects.act(checked, at, before, lane.mask, inner)
        lane.parts_mask |= mask
        if action.counts >= 0:
            self._signal(action.counts, mask)
        return True

    def _restrict_accesses(self, action: Action, call: int) -> Action:
        """Return an action with the accesses that the walk checks in this call.

        In calls after the first, these are the accesses to memory that peers may touch.
        """
        return action.within(self.program.shared) if call else action

    def _get_gate_masks(self, lane: LaneState, gates: tuple[tuple[int, bool], ...]) -> list[int] | None:
        """Return, for each gate, the mask that its signal stored. If one has not been signalled, park the lane, and return
        None."""
        masks = []
        for flag, on_previous_call in gates:
            before = self._get_signal_mask(lane, flag, on_previous_call)
            if before is None:
                self.parked.setdefault(flag, []).append(lane)
                return None
            masks.append(before)
        return masks

    def _start_step(self, lane: LaneState, op: Op) -> bool:
        """Start a step, and return whether it may start now. A subclass may hold a step back."""
        if op.needs_sms and lane.rank in self.crowded and lane.call == 0:
            place = (lane.rank, lane.index, lane.position)
            node = self.effects.add_node((*place, 0, 0))
            self.sm_steps[place] = SmStep(place, op, lane.mask, node)
            lane.mask |= 1 << node
        return True

    def _end_step(self, lane: LaneState) -> None:
        lane.mask = lane.parts_mask
        for flag in dict.fromkeys(lane.gate_flags):  # a kernel lowers its gates of this call at its end
            lane.mask |= self._record_lowering(lane, flag, previous=False)
        lane.gate_flags = []
        place = (lane.rank, lane.index, lane.position)
        if place in self.sm_steps and lane.call == 0:
            node = self.sm_steps[place].end = self.effects.add_node((*place, 0, 0))
            lane.mask |= 1 << node

    def _join_collective(self, lane: LaneState, op: Op) -> None:
        """Let a lane arrive at a collective. When the last rank arrives, the collective runs and all ranks continue."""
        if not self._start_step(lane, op):
            return
        self.lanes_at_collective.append(lane)
        if len(self.lanes_at_collective) < len(self.lanes):
            return
        ranks, self.lanes_at_collective = sorted(self.lanes_at_collective, key=lambda other: other.rank), []
        actions = [self._restrict_accesses(other.ops[other.position].actions[0], other.call) for other in ranks]
        ats = [(other.rank, other.index, other.position, 0, other.call) for other in ranks]
        bits = self.effects.collect(actions, ats, [other.mask for other in ranks])
        started = reduce(or_, [other.mask for other in ranks])
        for other, bit in zip(ranks, bits, strict=True):
            other.parts_mask = started | bit
            self._end_step(other)
            other.position += 1
            self.ready.append(other)

    def _begin_messages(self, lane: LaneState, op: Op) -> None:
        """Begin a lane's messages. Then end the messages of every lane whose peers have all begun theirs."""
        if not self._start_step(lane, op):
            return
        at = (lane.rank, lane.index, lane.position)
        lane.parts_mask, actions = lane.mask, [self._restrict_accesses(action, lane.call) for action in op.actions]
        lane.legs = [
            self.mail.begin(self.effects, (*at, part, lane.call), action, sent=sent, peer=peer, ancestors=lane.mask)
            for part, (action, (sent, peer)) in enumerate(zip(actions, op.messages, strict=True))
        ]
        self.lanes_in_messages.append(lane)
        for other in [other for other in self.lanes_in_messages if all(map(self.mail.is_complete, other.legs))]:
            self.lanes_in_messages.remove(other)
            for leg in other.legs:
                other.parts_mask |= self.mail.end(self.effects, leg, other.mask)
            self._end_step(other)
            other.position += 1
            self.ready.append(other)

    def _end_call(self, lane: LaneState) -> None:
        """End a lane's call. When the last lane of a rank ends, the caller reads the results, and the next call starts."""
        rank = lane.rank
        lane.call += 1
        lane.position = 0
        self.call_masks[rank] |= lane.mask
        self.unfinished_lanes[rank] -= 1
        if self.unfinished_lanes[rank]:
            return
        if lane.call == 1:
            self.effects.check_outputs(rank)
        self.call_masks[rank] = self.effects.pass_to_caller(rank, lane.call - 1, self.call_masks[rank])
        self.unfinished_lanes[rank] = len(self.lanes[rank])
        if lane.call < self.calls:
            for other in self.lanes[rank]:
                other.mask = self.call_masks[rank]
                self.ready.append(other)

    def _find_stuck_lanes(self) -> dict[tuple[int, int], StuckLane]:
        """Return, by rank and lane, where each lane is stuck, and the flag that it waits for (-1: a collective or message)."""
        found = {(lane.rank, lane.index): StuckLane(lane.position, 0, -1) for lane in self.lanes_at_collective}
        for lane in self.lanes_in_messages:
            part = next(part for part, leg in enumerate(lane.legs) if not self.mail.is_complete(leg))
            found[lane.rank, lane.index] = StuckLane(lane.position, part, -1)
        for flag, parked in self.parked.items():
            for lane in parked:
                found[lane.rank, lane.index] = StuckLane(lane.position, max(lane.part, 0), flag)
        return found
