"""RankOrders translates the schedule of a call with splits for its kernels: the order of parts, and a word for each flag.

A flag that ShareCounts signals is a word of `notified` on its rank, at the number of the rank that signals it. A flag that a
part signals is a word of `arrived`: the n-th such flag of a rank, by name and index, is its n-th word. weft.kernels.exchange
takes a `RankOrders` for each rank.

The kernels run checked schedules within these limits. Other schedules are refused with an error that names the step.

- A rank has one lane. It first shares its counts with all ranks, and waits for the counts of all.
- A step copies from one buffer to one other buffer.
- In a dispatch the copies of a GroupedGemm come before its products, and in a combine after them.
- One step multiplies all segments of an expert, because tiles are cut from an expert's rows regardless of segments.
- A part signals the rank that receives its rows.

A dispatch multiplies a rank's own rows directly from `a`, in tiles that contain no other rows, and does not wait for their
flag, because `landing` only has a copy of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any

from weft.core.problem import RaggedProblem
from weft.core.schedule import (
    Flag,
    GroupedGemm,
    Lane,
    Schedule,
    SegmentCopies,
    SegmentCopy,
    SegmentProduct,
    ShareCounts,
    Step,
    Wait,
    places_of,
    steps_of,
    waits,
)
from weft.kernels.exchange import Orders, SegmentPart, StepParts

Moving = SegmentCopies | GroupedGemm
_MOVING: tuple[type[Moving], ...] = (SegmentCopies, GroupedGemm)


class RankOrders:
    """RankOrders is one rank's part of a schedule. Raises ValueError for a schedule that the kernels cannot run.

    steps: the number of each step that moves or multiplies rows, by position in the lane.
    waits: the words of a Wait and the Waits that follow it, by position. It is empty if an earlier Wait includes it.
    counted_from: the rank whose rows a word of `arrived` counts.
    orders: the orders that the kernels take.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        for each, lanes in enumerate(schedule.ranks):
            for where, why in _find_refusals(schedule, each, lanes):
                raise ValueError(f"schedule is {schedule.name}, but {where}: {why}")
        counted = _words(schedule)
        problem = schedule.problem
        assert isinstance(problem, RaggedProblem), f"{problem} has no segments"
        (lane,) = schedule.ranks[rank]
        first = next(steps_of(ShareCounts, [lane]))
        self.counted_from: dict[int, int] = {}
        arriving = [-1] * (problem.world_size * problem.experts)
        for part in _parts(schedule):
            if part.count is not None and part.count.rank == rank:
                src, _, expert = _target(part)
                self.counted_from[counted[part.count]] = src
                arriving[expert * problem.world_size + src] = counted[part.count]
        self.waits = dict(_words_waited_for(lane, counted))
        moving = {at: step for kind in _MOVING for _, at, step in places_of(kind, [lane])}
        self.steps = {at: number for number, at in enumerate(sorted(moving))}
        self.orders = Orders(
            shares=tuple(flag.rank for flag in first.flags),
            arriving=tuple(arriving),
            steps=tuple(_step_parts(moving[at], rank, counted) for at in sorted(moving)),
        )


def _words(schedule: Schedule) -> dict[Flag, int]:
    """Return the number of the word of each flag that a part signals, among those of its rank."""
    flags = sorted({part.count for part in _parts(schedule) if part.count}, key=lambda f: (f.rank, f.name, f.index))
    used: Counter[int] = Counter()
    words = dict[Flag, int]()
    for flag in flags:
        words[flag] = used[flag.rank]
        used[flag.rank] += 1
    return words


def _parts(schedule: Schedule) -> Iterator[SegmentCopy | SegmentProduct]:
    lanes = list(chain(*schedule.ranks))
    for kind in _MOVING:
        for step in steps_of(kind, lanes):
            yield from step.parts


def _target(part: SegmentCopy | SegmentProduct) -> tuple[int, int, int]:
    return part.ends[1].name


def _words_waited_for(lane: Lane, counted: dict[Flag, int]) -> Iterator[tuple[int, list[int]]]:
    """Yield the position of each Wait and the words of `RankOrders.waits`."""
    for waiting, steps in groupby(enumerate(lane.steps), key=lambda placed: isinstance(placed[1], Wait)):
        if waiting:
            run = list(steps)
            words = [counted[wait.flag] for _, step in run for wait in waits(step) if wait.flag in counted]
            yield from ((at, [] if number else words) for number, (at, _) in enumerate(run))


def _step_parts(step: Moving, rank: int, counted: dict[Flag, int]) -> StepParts:
    def words(part: SegmentCopy | SegmentProduct) -> SegmentPart:
        src, dst, expert = _target(part)
        # The lane has waited for the counts of all ranks before.
        waits = tuple(counted[gate.flag] for gate in part.gates if gate.flag in counted)
        return SegmentPart(expert, dst if src == rank else src, -1 if part.count is None else counted[part.count], waits)

    copies = [part for part in step.parts if isinstance(part, SegmentCopy)]
    handed_back = bool(copies) and copies[0].dst.buffer == "received"
    products = copies if handed_back else [part for part in step.parts if isinstance(part, SegmentProduct)]
    return StepParts(copies=() if handed_back else tuple(map(words, copies)), products=tuple(map(words, products)))


def _find_refusals(schedule: Schedule, rank: int, lanes: Sequence[Lane]) -> Iterator[tuple[str, str]]:
    """Yield (where, why) for everything that the kernels cannot run."""
    problem = schedule.problem
    assert isinstance(problem, RaggedProblem), f"{problem} has no segments"
    if len(lanes) != 1:
        yield f"rank {rank} has {len(lanes)} lanes", "on GPUs, a call with splits has one"
        return
    (lane,) = lanes
    for at, step in enumerate(lane.steps):
        why = _why_not(problem, step, first=at == 0)
        if why:
            yield f"rank {rank}, lane {lane.name}, step {at} ({step})", f"on GPUs, {why}"
    if not lane.steps:
        yield f"rank {rank}, lane {lane.name}", "on GPUs, a call with splits has steps"


def _why_not(problem: RaggedProblem, step: Step, *, first: bool) -> str:
    if isinstance(step, ShareCounts) != first:
        return "a lane shares its counts once, in its first step"
    why_not = _WHY_NOT.get(type(step))
    return why_not(problem, step) if why_not else "flags are signalled by parts alone"


def _why_not_shared(problem: RaggedProblem, step: ShareCounts) -> str:
    ranks = set(range(problem.world_size))
    if len(step.flags) != len(ranks) or {flag.rank for flag in step.flags} != ranks or len(step.gates) != len(ranks):
        return "it shares its counts with each rank once, and waits for those of all"
    return ""


def _why_not_moved(problem: RaggedProblem, step: Moving) -> str:
    for part in step.parts:
        if part.count is not None and (part.count.rank != _target(part)[1] or _source_and_target(part) in _SILENT):
            return f"this part cannot signal {part.count}: {part}"
        if part.gates and _source_and_target(part) == ("a", "landing"):
            return f"a push waits for nothing: {part}"
    kinds = [_source_and_target(part) for part in step.parts]
    allowed = _ALLOWED[problem.dispatches][type(step)]
    if not kinds or list(dict.fromkeys(kinds)) not in allowed or kinds != sorted(kinds, key=kinds.index):
        return "its parts are " + ", or ".join(
            ", then ".join(f"{src} -> {dst}" for src, dst in parts) for parts in allowed if parts
        )
    cut = Counter(
        _target(part)[2] for part in step.parts if isinstance(part, SegmentProduct) or _source_and_target(part)[1] == "received"
    )
    for expert, segments in cut.items():
        if segments != problem.world_size:
            return f"it has {segments} of the {problem.world_size} segments of expert {expert}; tiles are cut from all of them"
    return ""


def _source_and_target(part: SegmentCopy | SegmentProduct) -> tuple[str, str]:
    """Return the source and the target buffer. Products of a combine have two targets, which are one here."""
    source, target = part.ends
    return source.buffer, target.buffer if isinstance(part, SegmentCopy) else "out"


_PUSH, _PULL, _BACK = ("a", "landing"), ("product", "out"), ("landing", "received")
_SILENT = (_PULL, _BACK, ("landing", "out"))
"""Parts that no step waits for."""
_ALLOWED: dict[bool, dict[type, list[list[tuple[str, str]]]]] = {
    True: {
        SegmentCopies: [[_PUSH], [_BACK]],
        GroupedGemm: [[("landing", "out")], [_PUSH, ("landing", "out")]],
    },
    False: {
        SegmentCopies: [[_PULL]],
        GroupedGemm: [[("a", "out")], [("a", "out"), _PULL]],
    },
}
"""The sources and targets that the parts of a step may have, in this order, by whether rows are dispatched and by step."""
_WHY_NOT: dict[type, Callable[[RaggedProblem, Any], str]] = {
    ShareCounts: _why_not_shared,
    Wait: lambda problem, step: "",
    SegmentCopies: _why_not_moved,
    GroupedGemm: _why_not_moved,
}
"""Functions that return why the kernels cannot run a step, or "" if they can, by type of step."""
