"""Flags as edges: words that a signal raises and the waiter lowers, for executors whose flags cannot grow.

A schedule's flag grows from call to call. A CUDA graph replays the same constants, so there each step that waits for a flag
has a word of its own, raised by the signal and lowered by the waiter once past. That is the same thing if

    - the flag is signalled once a call, and
    - it is not signalled again before each of its waiters has lowered its word: else the second signal would be lost.

`Edges` assigns the words and proves both, on the happens-before graph of two calls in a row.
"""

from __future__ import annotations

from collections import defaultdict, deque

from weft.core.schedule import Collective, Flag, Gemm, Lookup, Push, Reduce, Schedule, Signal, Step, Wait, advances, waits

Place = tuple[int, str, int]
"""Rank, lane, position."""
Node = tuple[object, ...]


class Edges:
    """Words of a schedule's flags. slot: by (flag, lane, position of the waiting step), its word on the flag's rank; those of
    one step lie together, gates on previous calls last. slots: by flag, all its words. words: of the rank that has most.

    Raises ValueError, naming the flag, if the schedule's flags cannot be edges.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.slot: dict[tuple[Flag, str, int], int] = {}
        self.slots: dict[Flag, tuple[int, ...]] = dict.fromkeys(schedule.flags, ())
        self._signals = schedule.signals_per_call
        used = [0] * len(schedule.ranks)
        for rank, lane, position, step in schedule:
            for wait in sorted(waits(step), key=lambda w: w.at_least == 0):
                key = (wait.flag, lane.name, position)
                if key not in self.slot:
                    self.slot[key] = used[rank]
                    self.slots[wait.flag] += (used[rank],)
                    used[rank] += 1
        self.words = max(used, default=0)
        self._check_counts(schedule)
        _check_reuse(schedule)

    def raised(self, flag: Flag) -> bool:
        """Whether anything signals it."""
        return self._signals[flag] > 0

    def _check_counts(self, schedule: Schedule) -> None:
        for flag, times in self._signals.items():
            if times > 1 and self.slots[flag]:
                raise ValueError(
                    f"schedule {schedule.name}: {flag} is signalled {times} times a call; on GPUs, signal each flag once"
                )
        for _, _, _, step in schedule:
            counted = advances(step) if isinstance(step, (Push, Gemm, Reduce, Lookup)) else ()
            shared = next((flag for flag in counted if len(self.slots[flag]) > 1), None)
            if shared:
                raise ValueError(
                    f"schedule {schedule.name}: {shared} is counted by a kernel and has several waiters; give each its own"
                )


def _check_reuse(schedule: Schedule) -> None:
    """Every signal of the second call comes after the flag's waiters of the first have lowered their words."""
    before = _Before(_graph(schedule))
    for rank, lane, position, step in schedule:
        for wait in waits(step):
            # What a call signals, the same call lowers, or the next one if the wait is for previous calls.
            lowered = _lowered((rank, lane.name, position), step, wait, 0 if wait.at_least else 1)
            again = ("signal", wait.flag, 1)
            if schedule.signals_per_call[wait.flag] and not before.holds(lowered, again):
                raise ValueError(
                    f"schedule {schedule.name}: {wait.flag} may be signalled again before rank {rank}, lane {lane.name}, "
                    f"step {position} ({step}) has passed it; on GPUs its signal must wait for that"
                )


def _lowered(place: Place, step: Step, wait: Wait, call: int) -> Node:
    """When a waiter lowers its word: a kernel's gates of this call at its end, all others as soon as they are passed."""
    in_kernel = isinstance(step, (Gemm, Reduce)) and wait.at_least > 0
    return ("end" if in_kernel else "start", place, call)


def _graph(schedule: Schedule) -> dict[Node, list[Node]]:
    """Happens-before of two calls: each node's direct predecessors. A node ends in its call."""
    graph: dict[Node, list[Node]] = defaultdict(list)
    for call in (0, 1):
        for rank, lanes in enumerate(schedule.ranks):
            graph["join", rank, call] += [("join", rank, call - 1)] if call else []
            for lane in lanes:
                last: Node = ("join", rank, call)
                for position, step in enumerate(lane.steps):
                    last = _add_step(graph, (rank, lane.name, position), step, last, call)
                graph["join", rank, call + 1].append(last)
        _add_collectives(graph, schedule, call)
    return graph


def _add_step(graph: dict[Node, list[Node]], place: Place, step: Step, last: Node, call: int) -> Node:
    start, end = ("start", place, call), ("end", place, call)
    graph[start].append(last)
    graph[end].append(start)
    if isinstance(step, Signal):
        graph["signal", step.flag, call].append(start)
    elif isinstance(step, Wait):
        graph[start] += _met_by(step, call)
    elif isinstance(step, (Gemm, Reduce)):
        for part in step.parts:
            met = [node for gate in part.waits for node in _met_by(gate, call)]
            graph[start] += [node for gate in part.waits if not gate.at_least for node in _met_by(gate, call)]
            graph[end] += met
            if part.count:
                graph["signal", part.count, call] += [start, *met]
    elif isinstance(step, (Push, Lookup)):
        for flag in advances(step):
            graph["signal", flag, call].append(start)
    return end


def _met_by(wait: Wait, call: int) -> list[Node]:
    met = call if wait.at_least else call - 1
    return [("signal", wait.flag, met)] if met >= 0 else []


def _add_collectives(graph: dict[Node, list[Node]], schedule: Schedule, call: int) -> None:
    """The n-th collective ends on every rank after it has started on all."""
    by_rank = [
        [(r, lane.name, i) for r, lane, i, s in schedule if r == rank and isinstance(s, Collective)]
        for rank in range(len(schedule.ranks))
    ]
    for places in zip(*by_rank, strict=True):
        for place in places:
            graph["end", place, call] += [("start", other, call) for other in places]


class _Before:
    """All that comes before each node, as an int with a bit a node."""

    def __init__(self, graph: dict[Node, list[Node]]) -> None:
        nodes = list(dict.fromkeys([*graph, *(n for before in graph.values() for n in before)]))
        self._number = {node: i for i, node in enumerate(nodes)}
        self._masks = [0] * len(nodes)
        after: dict[int, list[int]] = defaultdict(list)
        missing = [0] * len(nodes)
        for node, before in graph.items():
            for other in before:
                after[self._number[other]].append(self._number[node])
                missing[self._number[node]] += 1
        ready = deque(i for i, count in enumerate(missing) if not count)
        while ready:
            one = ready.popleft()
            mask = self._masks[one] | 1 << one
            for late in after[one]:
                self._masks[late] |= mask
                missing[late] -= 1
                if not missing[late]:
                    ready.append(late)

    def holds(self, first: Node, then: Node) -> bool:
        """Whether `first` comes before `then` in every run."""
        return bool(self._masks[self._number[then]] >> self._number[first] & 1)
