"""Changes of one thing in a schedule that its proof reads: order, gate, flag, region or lane.

Each change is a function (schedule, rank) -> the schedules that it could make, those that are most worth running first. It
changes what one rank does, and others only where they name what is changed. Most of what it makes is right, and
`weft.schedule.check` says which."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from damage import with_lanes, with_step, with_steps

from weft.core.concurrent import ConcurrentProblem
from weft.core.parts import runs_by_library
from weft.core.schedule import (
    Buffer,
    Copy,
    Flag,
    Gemm,
    GroupedGemm,
    Lane,
    LaneKind,
    Reduce,
    Region,
    Schedule,
    Segment,
    SegmentCopies,
    SegmentCopy,
    SegmentProduct,
    SendReceive,
    Signal,
    Span1D,
    Step,
    UserCall,
    Wait,
    signalled_flags,
)

Change = Callable[[Schedule, int], Iterator[Schedule]]
Place = tuple[int, int, int]
GATED = (Gemm, Reduce, GroupedGemm, SegmentCopies)
"""Kinds of step whose parts may have gates."""


def places(schedule: Schedule, rank: int) -> list[tuple[Place, Any]]:
    """(rank, lane, position) and the step, of every step of a rank."""
    lanes = enumerate(schedule.ranks[rank])
    return [((rank, index, at), step) for index, lane in lanes for at, step in enumerate(lane.steps)]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with `change` made to all that it consists of, from the inside outwards."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        new = {name: mapped(old, change) for name, old in fields.items()}
        return change(value if new == fields else replace(value, **new))  # type: ignore[type-var]
    if isinstance(value, tuple):
        return tuple(mapped(one, change) for one in value)
    return value


def everywhere(schedule: Schedule, change: Callable[[Any], Any]) -> Schedule:
    """The schedule with `change` made to all that its steps consist of."""
    return replace(schedule, ranks=mapped(schedule.ranks, change))


# Order.


def order(schedule: Schedule, rank: int) -> Iterator[Schedule]:
    """The parts of a step, neighbouring steps, or the terms of a sum, in another order. Beside a computation also the lanes,
    which are enqueued in the order in which they are listed."""
    found = places(schedule, rank)
    for place, step in found:
        if isinstance(step, GroupedGemm):  # its copies among themselves, its products among themselves
            for kind in (SegmentCopy, SegmentProduct):
                turned = iter([part for part in step.parts if isinstance(part, kind)][::-1])
                parts = tuple(next(turned) if isinstance(part, kind) else part for part in step.parts)
                if parts != step.parts:
                    yield with_step(schedule, place, replace(step, parts=parts))
        for name in ("parts", "flags", "gates", "sends", "receives"):
            for other in _orders(getattr(step, name, ())):
                yield with_step(schedule, place, replace(step, **{name: other}))
    for index, lane in enumerate(schedule.ranks[rank]):
        for at in range(len(lane.steps) - 1):
            before, one, two, after = lane.steps[:at], lane.steps[at], lane.steps[at + 1], lane.steps[at + 2 :]
            if one != two:
                yield with_steps(schedule, rank, index, [*before, two, one, *after])
    for place, step in found:
        for number, part in enumerate(getattr(step, "parts", ())):
            for name in ("srcs", "adds"):
                for other in _orders(getattr(part, name, ())):
                    yield with_step(schedule, place, _with_part(step, number, replace(part, **{name: other})))
    if isinstance(schedule.problem, ConcurrentProblem) and len(schedule.ranks[rank]) > 1:
        yield with_lanes(schedule, rank, list(schedule.ranks[rank][::-1]))
    yield from _by_experts(schedule, rank)


def _orders(values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """All the other way round; then two neighbours exchanged."""
    if len(values) > 1:
        yield values[::-1]
    if len(values) > 2:
        for at in range(len(values) - 1):
            yield (*values[:at], values[at + 1], values[at], *values[at + 2 :])


def _with_part(step: Any, number: int, *parts: Any) -> Any:
    return replace(step, parts=(*step.parts[:number], *parts, *step.parts[number + 1 :]))


# Gates.


def gate(schedule: Schedule, rank: int) -> Iterator[Schedule]:
    """A gate of a part moved before its step, or a wait before a step into its parts; else one more gate or wait."""
    found = places(schedule, rank)
    first: list[Schedule] = []
    for place, step in found:
        for number, part in enumerate(step.parts if isinstance(step, GATED) else ()):
            waits = part.waits if isinstance(step, (Gemm, Reduce)) else part.gates
            if waits:
                without = replace(part, gates=(), inner=()) if isinstance(step, Gemm) else replace(part, gates=())
                moved = with_step(schedule, place, *dict.fromkeys(waits), _with_part(step, number, without))
                if number:
                    yield moved
                else:  # step by step, a lane does the same then
                    first.append(moved)
    for (_, index, at), step in found:
        steps = list(schedule.ranks[rank][index].steps)
        following = steps[at + 1] if at + 1 < len(steps) else None
        if isinstance(step, Wait) and isinstance(following, GATED) and len(following.parts) > 1:
            parts: tuple[Any, ...] = following.parts
            for first_gated in range(len(parts) - 1, 0, -1):  # step by step, a lane does the same where it is the first part
                late = tuple(replace(part, gates=(step, *part.gates)) for part in parts[first_gated:])
                gated = replace(following, parts=(*parts[:first_gated], *late))
                yield with_steps(schedule, rank, index, [*steps[:at], gated, *steps[at + 2 :]])
    yield from (with_step(schedule, place, step, step) for place, step in found if isinstance(step, Wait))
    flags = [flag for flag in schedule.flags if flag.rank == rank]
    for flag in flags:
        for place, step in found[::-1]:
            if isinstance(step, GATED):
                for number, part in enumerate(step.parts):
                    if any(Wait(flag) in one.gates for one in step.parts[: number + 1]):
                        continue  # a step that has passed a flag does not wait for it again
                    yield with_step(schedule, place, _with_part(step, number, replace(part, gates=(*part.gates, Wait(flag)))))
            yield with_step(schedule, place, step, Wait(flag))
    for place, step in found:
        more = Flag("more", rank)
        yield with_step(schedule, place, step, Signal(more), Wait(more))
    yield from first


# Flags.


def flag(schedule: Schedule, rank: int) -> Iterator[Schedule]:
    """A flag of the rank that goes by another name and another index, for those who signal it and for those who wait. Those
    that other ranks signal come first."""
    own = {one for at, _, _, step in schedule if at == rank for one in signalled_flags(step)}
    for old in sorted((one for one in schedule.flags if one.rank == rank), key=lambda one: one in own):
        new = Flag(f"other_{old.name}", rank, old.index + 7)
        yield everywhere(schedule, lambda value, old=old, new=new: new if value == old else value)  # type: ignore[misc]


# Regions.


def region(schedule: Schedule, rank: int) -> Iterator[Schedule]:
    """A copy or a part cut in two; a buffer of the rank somewhere else; what a step reads or writes by a buffer of its own."""
    yield from _cut(schedule, rank)
    for buffer in schedule.buffers:
        if buffer.kind in ("local", "symmetric"):
            yield _elsewhere(schedule, buffer, rank)
    yield from _staged(schedule, rank)


def _halves(span: Span1D) -> tuple[Span1D, Span1D]:
    middle = sum(span) // 2
    return (span[0], middle), (middle, span[1])


def _halved(value: Any, names: tuple[str, str], axes: tuple[str, str]) -> tuple[Any, Any] | None:
    """A copy or part as two, of half the rows or columns of two of its regions; None where these are not as long."""
    one, two = (_halves(getattr(getattr(value, name), axis)) for name, axis in zip(names, axes, strict=True))
    if [high - low for low, high in one] != [high - low for low, high in two] or any(low == high for low, high in one):
        return None
    first, second = (
        replace(
            value,
            **{
                name: replace(getattr(value, name), **{axis: spans[half]})
                for name, axis, spans in zip(names, axes, (one, two), strict=True)
            },
        )
        for half in (0, 1)
    )
    return first, second


def _cut(schedule: Schedule, rank: int) -> Iterator[Schedule]:
    for place, step in places(schedule, rank):
        if isinstance(step, Copy):
            for axis in ("rows", "cols"):
                if pair := _halved(step, ("src", "dst"), (axis, axis)):
                    yield with_step(schedule, place, *pair)
        if isinstance(step, SendReceive):
            yield everywhere(schedule, _messages_cut)
        for number, part in enumerate(getattr(step, "parts", ())):
            for read in ("a", "bags"):
                # Parts that neither wait, count nor add are one matmul with their neighbours.
                plain = read == "a" and not (getattr(part, "waits", ()) or getattr(part, "adds", ()))
                if (
                    not plain
                    and isinstance(getattr(part, read, None), Region)
                    and (pair := _halved(part, (read, "out"), ("rows", "rows")))
                ):
                    first = replace(pair[0], count=None)
                    yield with_step(schedule, place, _with_part(step, number, first, pair[1]))


def _by_experts(schedule: Schedule, rank: int) -> Iterator[Schedule]:
    """A step of segments as one for each expert."""
    for place, step in places(schedule, rank):
        if isinstance(step, (GroupedGemm, SegmentCopies)):
            experts = sorted({_target(part).expert for part in step.parts})
            parts = [tuple(part for part in step.parts if _target(part).expert == one) for one in experts]
            if len(experts) > 1:
                yield with_step(schedule, place, *(replace(step, parts=some) for some in parts))


def _target(part: Any) -> Any:
    return part.dst if hasattr(part, "dst") else part.out


def _messages_cut(value: Any) -> Any:
    """Every message as two, of half the rows each."""
    if not isinstance(value, SendReceive):
        return value

    def cut(messages: tuple[Any, ...], name: str) -> tuple[Any, ...]:
        return tuple(
            replace(one, **{name: replace(getattr(one, name), rows=rows)})
            for one in messages
            for rows in _halves(getattr(one, name).rows)
            if rows[0] < rows[1]
        )

    return SendReceive(cut(value.sends, "src"), cut(value.receives, "dst"))


def _elsewhere(schedule: Schedule, buffer: Buffer, rank: int) -> Schedule:
    """What a rank has in a buffer is in another one of the same size."""
    name = f"other_{buffer.name}"

    def moved(value: Any) -> Any:
        here = isinstance(value, (Region, Segment)) and (value.buffer, value.rank) == (buffer.name, rank)
        return replace(value, buffer=name) if here else value

    return everywhere(replace(schedule, buffers=(*schedule.buffers, replace(buffer, name=name))), moved)


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Region]]:
    if isinstance(value, Region):
        yield path, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _paths(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, tuple):
        for number, one in enumerate(value):
            yield from _paths(one, (*path, number))


def _staged(schedule: Schedule, rank: int) -> Iterator[Schedule]:
    """What a step reads is copied before it, or what it writes behind it."""
    for place, step in places(schedule, rank):
        for path, old in _paths(step):
            buffer = schedule.buffer[old.buffer]
            if old.rank != rank or not old.size or buffer.float32:
                continue
            more = replace(buffer, name=f"other_{buffer.name}", kind="local")
            new = replace(old, buffer=more.name)
            changed = mapped(step, lambda value, old=old, new=new: new if value == old else value)  # type: ignore[misc]
            steps = (changed, Copy(new, old)) if path[-1] in ("out", "dst") else (Copy(old, new), changed)
            yield with_step(replace(schedule, buffers=(*schedule.buffers, more)), place, *steps)


# Lanes.


def lane(schedule: Schedule, rank: int) -> Iterator[Schedule]:
    """A step on a lane of its own, or a lane that goes by another name."""
    lanes = list(schedule.ranks[rank])
    if isinstance(schedule.problem, ConcurrentProblem):
        yield from _lanes_beside(schedule, rank)
    for (_, index, at), step in places(schedule, rank)[::-1]:
        if isinstance(step, (Wait, Signal)):
            continue
        one = lanes[index]
        less = replace(one, steps=(*one.steps[:at], *one.steps[at + 1 :]))
        kind: LaneKind = one.kind if one.kind != "compute" else "copy" if isinstance(step, Copy) else "blocks"
        alone = replace(one, name="other", kind=kind, steps=(step,))
        if less.steps or kind != one.kind:
            yield with_lanes(schedule, rank, [*lanes[:index], *[less] * bool(less.steps), *lanes[index + 1 :], alone])
    is_concurrent = isinstance(schedule.problem, ConcurrentProblem)
    for index, one in enumerate(lanes):
        # Beside a computation, lanes of kind compute and network go by their kinds, whatever they are called.
        if one.steps and not (is_concurrent and one.kind in ("compute", "network")):
            yield with_lanes(schedule, rank, [*lanes[:index], replace(one, name=f"other_{one.name}"), *lanes[index + 1 :]])


def _lanes_beside(schedule: Schedule, rank: int) -> Iterator[Schedule]:
    """Collectives of NCCL's on a lane of their own instead of the computation's, or the other way round."""
    lanes = list(schedule.ranks[rank])
    (compute,) = (one for one in lanes if one.kind == "compute")
    moved = tuple(step for step in compute.steps if isinstance(step, UserCall) and step.collective is not None)
    if moved:
        remaining = tuple(step for step in compute.steps if step not in moved)
        yield with_lanes(schedule, rank, [Lane("network", "network", moved), replace(compute, steps=remaining)])
    for network in (one for one in lanes if one.kind == "network"):
        yield with_lanes(schedule, rank, [replace(compute, steps=(*network.steps, *compute.steps))])


def _in_parts(change: Change) -> Change:
    """The change, made in the collectives that are not one call of NCCL's, and then in the lanes that call collectives."""

    def changed(schedule: Schedule, rank: int) -> Iterator[Schedule]:
        for number, part in enumerate(schedule.parts):
            if part is not None and not runs_by_library(part):
                for other in change(part, rank):
                    yield replace(schedule, parts=(*schedule.parts[:number], other, *schedule.parts[number + 1 :]))
        yield from change(schedule, rank)

    return changed


CHANGES: dict[str, Change] = {
    name: _in_parts(change)
    for name, change in (("order", order), ("gate", gate), ("flag", flag), ("region", region), ("lane", lane))
}
"""By what is changed."""


def kinds_changed(before: Schedule, after: Schedule) -> set[type[Step]]:
    """The kinds of the steps that one of two schedules has and the other has not, or that have another place in it."""
    found: set[type[Step]] = set()
    for old_part, new_part in zip(before.parts, after.parts, strict=True):
        if old_part is not None and new_part is not None:
            found |= kinds_changed(old_part, new_part)
    for old, new in zip(before.ranks, after.ranks, strict=True):
        one, two = (Counter((lane.name, lane.kind, step) for lane in lanes for step in lane.steps) for lanes in (old, new))
        found |= {type(step) for _, _, step in (one - two) + (two - one)}
        if one == two:
            there = [(lane.name, step) for lane in old for step in lane.steps]
            now = [(lane.name, step) for lane in new for step in lane.steps]
            found |= {type(step) for a, b in zip(there, now, strict=True) if a != b for _, step in (a, b)}
    return found
