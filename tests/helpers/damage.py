"""Ways to damage a schedule, each a function of (schedule, random source) -> schedule, or None where it does not apply."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from pushes import pushed

from weft.core.schedule import Copy, Flag, Gemm, Lane, Push, Reduce, Region, Schedule, Signal, Step, Wait

Place = tuple[int, int, int]
Damage = Callable[[Schedule, random.Random], Schedule | None]


def places(schedule: Schedule, wanted: Callable[[Step], bool]) -> list[Place]:
    """Rank, lane and position of the steps that are wanted."""
    return [
        (rank, index, position)
        for rank, lanes in enumerate(schedule.ranks)
        for index, lane in enumerate(lanes)
        for position, step in enumerate(lane.steps)
        if wanted(step)
    ]


def with_steps(schedule: Schedule, rank: int, index: int, steps: list[Step]) -> Schedule:
    """The schedule with other steps on one lane."""
    lanes = list(schedule.ranks[rank])
    lanes[index] = dataclasses.replace(lanes[index], steps=tuple(steps))
    return with_lanes(schedule, rank, lanes)


def with_lanes(schedule: Schedule, rank: int, lanes: list[Lane]) -> Schedule:
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(lanes)
    return dataclasses.replace(schedule, ranks=tuple(ranks))


def with_step(schedule: Schedule, place: Place, *steps: Step) -> Schedule:
    """The schedule with the step at `place` replaced."""
    rank, index, position = place
    old = list(schedule.ranks[rank][index].steps)
    return with_steps(schedule, rank, index, [*old[:position], *steps, *old[position + 1 :]])


def step_at(schedule: Schedule, place: Place) -> Any:
    return schedule.ranks[place[0]][place[1]].steps[place[2]]


def _dropper(kind: type) -> Damage:
    def drop(schedule: Schedule, rng: random.Random) -> Schedule | None:
        found = places(schedule, lambda step: isinstance(step, kind))
        return with_step(schedule, rng.choice(found)) if found else None

    return drop


def _drop_pair(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """A signal and all waits for its flag, so that nobody waits in vain."""
    found = places(schedule, lambda step: isinstance(step, Signal))
    if not found:
        return None
    flag = step_at(schedule, rng.choice(found)).flag
    return map_steps(schedule, lambda step: _without(step, flag))


def _without(step: Any, flag: Flag) -> Step | None:
    if isinstance(step, (Signal, Wait)):
        return None if step.flag == flag else step
    return map_parts(step, lambda part: _part_without(part, flag))


def _part_without(part: Any, flag: Flag) -> Any:
    gates = tuple(gate for gate in part.gates if gate.flag != flag)
    inner = tuple(each for each in getattr(part, "inner", ()) if each[1].flag != flag)
    return _with_inner(dataclasses.replace(part, gates=gates, count=None if part.count == flag else part.count), inner)


def _with_inner(part: Any, inner: tuple[tuple[int, Wait], ...]) -> Any:
    """The part with other inner gates; what cannot have any stays as it is."""
    return dataclasses.replace(part, inner=inner) if hasattr(part, "inner") else part


def map_steps(schedule: Schedule, change: Callable[[Any], Step | None]) -> Schedule:
    """Every step changed, or dropped (None)."""

    def lane(old: Lane) -> Lane:
        return dataclasses.replace(old, steps=tuple(new for step in old.steps if (new := change(step)) is not None))

    return dataclasses.replace(schedule, ranks=tuple(tuple(map(lane, lanes)) for lanes in schedule.ranks))


def map_parts(step: Any, change: Callable[[Any], Any]) -> Any:
    """A kernel with every part changed; any other step as it is."""
    if not isinstance(step, (Gemm, Reduce)):
        return step
    return dataclasses.replace(step, parts=tuple(map(change, step.parts)))


def _change_part(wanted: Callable[[Any], bool], change: Callable[[Any, random.Random], Any]) -> Damage:
    """Change, or drop (None), one part of a kernel."""

    def damage(schedule: Schedule, rng: random.Random) -> Schedule | None:
        found = [(p, i) for p in places(schedule, _is_kernel) for i, q in enumerate(step_at(schedule, p).parts) if wanted(q)]
        if not found:
            return None
        place, number = rng.choice(found)
        step = step_at(schedule, place)
        new = change(step.parts[number], rng)
        parts = (*step.parts[:number], *([new] if new else []), *step.parts[number + 1 :])
        return with_step(schedule, place, *([dataclasses.replace(step, parts=parts)] if parts else []))

    return damage


def _is_kernel(step: Step) -> bool:
    return isinstance(step, (Gemm, Reduce))


def _drop_gate(part: Any, rng: random.Random) -> Any:
    gone = rng.randrange(len(part.gates))
    return dataclasses.replace(part, gates=part.gates[:gone] + part.gates[gone + 1 :])


def _gate_on_previous_call(part: Any, rng: random.Random) -> Any:
    at = rng.randrange(len(part.gates))
    gate = dataclasses.replace(part.gates[at], on_previous_call=rng.random() < 0.5)
    return dataclasses.replace(part, gates=(*part.gates[:at], gate, *part.gates[at + 1 :]))


def _drop_inner(part: Any, rng: random.Random) -> Any:
    gone = rng.randrange(len(part.inner))
    return dataclasses.replace(part, inner=part.inner[:gone] + part.inner[gone + 1 :])


def _change_inner(part: Any, rng: random.Random) -> Any:
    """Its column, or what it waits for: one column later is too late, one earlier harms nothing if it still ascends."""
    at = rng.randrange(len(part.inner))
    column, gate = part.inner[at]
    if rng.random() < 0.7:
        column += rng.choice((-2, -1, 1, 2))
    else:
        gate = dataclasses.replace(gate, on_previous_call=rng.random() < 0.5)
    return dataclasses.replace(part, inner=(*part.inner[:at], (column, gate), *part.inner[at + 1 :]))


def _move_gate(part: Any, rng: random.Random) -> Any:
    """A gate becomes an inner one, which is too late for the first columns, or the other way round, or two change places."""
    gates, inner = list(part.gates), list(part.inner)
    if gates and inner and rng.random() < 0.3:
        column, gate = inner[0]
        gates[0], inner[0] = gate, (column, gates[0])
    elif inner and rng.random() < 0.5:
        gates.append(inner.pop(rng.randrange(len(inner)))[1])
    elif gates:
        column = rng.randrange(1, max(2, part.a.shape[1]))
        inner = sorted([*inner, (column, gates.pop(rng.randrange(len(gates))))], key=lambda each: each[0])
    return dataclasses.replace(part, gates=tuple(gates), inner=tuple(inner))


def _has_inner(part: Any) -> bool:
    return bool(getattr(part, "inner", ()))


def _region_of_part(part: Any, rng: random.Random) -> Any:
    if hasattr(part, "a"):
        if part.adds and rng.random() < 0.3:
            return dataclasses.replace(part, adds=_with_one(part.adds, rng, _changer(rng)))
        rows = rng.random() < 0.5
        change = _changer(rng, rows=True)
        if rows:
            return dataclasses.replace(part, a=change(part.a), out=change(part.out))
        name = rng.choice(("a", "out"))
        return dataclasses.replace(part, **{name: _changer(rng)(getattr(part, name))})
    change = _changer(rng)
    if rng.random() < 0.4:
        return dataclasses.replace(part, srcs=tuple(map(change, part.srcs)), out=change(part.out))
    at = rng.randrange(len(part.srcs) + 1)
    if at == len(part.srcs):
        return dataclasses.replace(part, out=change(part.out))
    return dataclasses.replace(part, srcs=(*part.srcs[:at], change(part.srcs[at]), *part.srcs[at + 1 :]))


def _with_one(regions: tuple[Region, ...], rng: random.Random, change: Callable[[Region], Region]) -> tuple[Region, ...]:
    at = rng.randrange(len(regions))
    return (*regions[:at], change(regions[at]), *regions[at + 1 :])


def _change_adds(part: Any, rng: random.Random) -> Any:
    """Leave one out, add one twice or another in its place, or (which harms nothing) add them in another order."""
    adds, at = part.adds, rng.randrange(len(part.adds))
    kind = rng.choice(("leave out", "twice", "shift", "order"))
    if kind == "leave out":
        adds = adds[:at] + adds[at + 1 :]
    elif kind == "twice":
        adds = (*adds, adds[at])
    elif kind == "shift":
        height = part.out.shape[0] * rng.choice((1, -1))
        adds = _with_one(adds, rng, lambda r: dataclasses.replace(r, rows=(r.rows[0] + height, r.rows[1] + height)))
    else:
        adds = tuple(rng.sample(adds, len(adds)))
    return dataclasses.replace(part, adds=adds)


def _changer(rng: random.Random, *, rows: bool | None = None) -> Callable[[Region], Region]:
    """Shift a region, or move one of its edges, by one."""
    low, high = rng.choice(((1, 1), (-1, -1), (1, 0), (0, -1), (0, 1), (-1, 0)))
    axis = "rows" if (rng.random() < 0.5 if rows is None else rows) else "cols"

    def change(region: Region) -> Region:
        old = getattr(region, axis)
        return dataclasses.replace(region, **{axis: (old[0] + low, old[1] + high)})

    return change


def _part_of_push(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Drop a part, exchange where two parts store, or change a region of one."""
    found = places(schedule, lambda step: isinstance(step, Push))
    if not found:
        return None
    place = rng.choice(found)
    parts = list(step_at(schedule, place).parts)
    one, two = rng.randrange(len(parts)), rng.randrange(len(parts))
    kind = rng.choice(("drop", "exchange", "change"))
    if kind == "drop":
        del parts[one]
    elif kind == "exchange":
        first, second = parts[one], parts[two]
        parts[one] = dataclasses.replace(first, dst=second.dst)
        parts[two] = dataclasses.replace(second, dst=first.dst)
    else:
        name, change = rng.choice(("src", "dst")), _changer(rng)
        parts[one] = dataclasses.replace(parts[one], **{name: change(getattr(parts[one], name))})
    return with_step(schedule, place, *([Push(tuple(parts))] if parts else []))


def _region_of_copy(schedule: Schedule, rng: random.Random) -> Schedule | None:
    found = places(schedule, lambda step: isinstance(step, Copy))
    if not found:
        return None
    place, change, kind = rng.choice(found), _changer(rng), rng.choice(("src", "dst", "both"))
    step = step_at(schedule, place)
    src = change(step.src) if kind != "dst" else step.src
    dst = change(step.dst) if kind != "src" else step.dst
    return with_step(schedule, place, Copy(src, dst))


def _swap(schedule: Schedule, rng: random.Random, *, near: bool = True) -> Schedule | None:
    """Two steps of a lane, neighbours or any two."""
    found = [p for p in places(schedule, lambda step: True) if p[2] + 1 < len(schedule.ranks[p[0]][p[1]].steps)]
    if not found:
        return None
    rank, index, at = rng.choice(found)
    steps = list(schedule.ranks[rank][index].steps)
    other = at + 1 if near else rng.randrange(len(steps))
    steps[at], steps[other] = steps[other], steps[at]
    return with_steps(schedule, rank, index, steps)


def _cross_ranks(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Swap steps on two ranks, each on its own lane."""
    once = _swap(schedule, rng, near=False)
    return _swap(once, rng, near=False) if once else None


def _reuse_flag(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Give all signals of one flag, and its waits, another flag of the same rank."""
    pairs = [(f, g) for f in schedule.flags for g in schedule.flags if f != g and f.rank == g.rank]
    if not pairs:
        return None
    old, new = rng.choice(pairs)

    def change(part: Any) -> Any:
        gates = tuple(dataclasses.replace(g, flag=new) if g.flag == old else g for g in part.gates)
        inner = tuple((c, dataclasses.replace(g, flag=new) if g.flag == old else g) for c, g in getattr(part, "inner", ()))
        return _with_inner(dataclasses.replace(part, gates=gates, count=new if part.count == old else part.count), inner)

    def step(one: Any) -> Any:
        if isinstance(one, (Signal, Wait)):
            return dataclasses.replace(one, flag=new) if one.flag == old else one
        if isinstance(one, Push):
            stores = (dataclasses.replace(part, count=new) if part.count == old else part for part in one.parts)
            return Push(tuple(stores))
        return map_parts(one, change)

    return map_steps(schedule, step)


def _swap_operands(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Exchange what two steps of a rank read: the sources of copies, or the b of GEMMs."""
    kind, name = rng.choice(((Copy, "src"), (Gemm, "b"), (Gemm, "b")))
    found = places(schedule, lambda step: isinstance(step, kind))
    pairs = [(p, q) for p in found for q in found if p < q and p[0] == q[0]]
    pairs = [(p, q) for p, q in pairs if getattr(step_at(schedule, p), name) != getattr(step_at(schedule, q), name)]
    if not pairs:
        return None
    one, two = rng.choice(pairs)
    first, second = step_at(schedule, one), step_at(schedule, two)
    changed = with_step(schedule, one, dataclasses.replace(first, **{name: getattr(second, name)}))
    return with_step(changed, two, dataclasses.replace(second, **{name: getattr(first, name)}))


def _mix_sums(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Exchange a source between two parts of a kernel that sums, each of which waits for all that either waited for."""
    found = [p for p in places(schedule, _is_kernel) if len(_summing(step_at(schedule, p))) > 1]
    if not found:
        return None
    place = rng.choice(found)
    parts = list(step_at(schedule, place).parts)
    one, two = rng.sample(_summing(step_at(schedule, place)), 2)
    name = "adds" if hasattr(parts[one], "adds") else "srcs"
    srcs = [list(getattr(parts[one], name)), list(getattr(parts[two], name))]
    at, gates = rng.randrange(len(srcs[0])), parts[one].gates + parts[two].gates
    srcs[0][at], srcs[1][at] = srcs[1][at], srcs[0][at]
    for number, sources in zip((one, two), srcs, strict=True):
        parts[number] = dataclasses.replace(parts[number], **{name: tuple(sources)}, gates=gates)
    return with_step(schedule, place, dataclasses.replace(step_at(schedule, place), parts=tuple(parts)))


def _one_row(part: Any, rng: random.Random) -> Any:
    """A row of a source in the place of the source: it is added to every row, and is right for one at most."""
    at = rng.randrange(1, len(part.srcs))
    row = rng.randrange(*part.srcs[at].rows)
    srcs = (*part.srcs[:at], dataclasses.replace(part.srcs[at], rows=(row, row + 1)), *part.srcs[at + 1 :])
    return dataclasses.replace(part, srcs=srcs)


def _sums_rows(part: Any) -> bool:
    return len(getattr(part, "srcs", ())) > 1 and part.out.shape[0] > 1


def _summing(step: Any) -> list[int]:
    """The parts that sum."""
    return [i for i, part in enumerate(step.parts) if getattr(part, "adds", True)]


def _divide(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Divide by another number."""
    found = places(schedule, _is_kernel)
    if not found:
        return None
    place = rng.choice(found)
    return with_step(schedule, place, dataclasses.replace(step_at(schedule, place), divide_by=rng.choice((1, 2, 3))))


def _reorder_parts(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """The parts of kernels in another order, on any ranks: one that waits may come before one that a peer waits for."""
    if not any(len(step_at(schedule, p).parts) > 1 for p in places(schedule, _is_kernel)):
        return None

    def step(old: Any) -> Any:
        if not _is_kernel(old) or rng.random() < 0.2:
            return old
        parts = rng.choice((rng.sample(old.parts, len(old.parts)), old.parts[::-1]))
        return dataclasses.replace(old, parts=tuple(parts))

    return map_steps(schedule, step)


def _signal_other(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Swap the flags of two signals."""
    found = places(schedule, lambda step: isinstance(step, Signal))
    if len(found) < 2:
        return None
    one, two = rng.sample(found, 2)
    first, second = step_at(schedule, one), step_at(schedule, two)
    return with_step(with_step(schedule, one, second), two, first)


def _by_stores(lane: Lane) -> Lane:
    """A lane of copies with kernels of stores instead."""
    if lane.kind != "copy":
        return lane
    return dataclasses.replace(lane, kind="blocks", steps=tuple(pushed(lane.steps)))


def _other_copy(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """With all copies by stores: drop the waits for one part of a push, and let a wait for another one stand for it, or (which
    harms nothing) wait for both there."""
    lanes = (tuple(_by_stores(lane) for lane in own) for own in schedule.ranks)
    schedule = dataclasses.replace(schedule, ranks=tuple(lanes))
    found = [[part.count for part in step.parts] for *_, step in schedule if isinstance(step, Push)]
    pairs = [(f, g) for flags in found for f in flags for g in flags if f != g and f.rank == g.rank]
    if not pairs:
        return None
    gone, kept_flag = rng.choice(pairs)
    dropped = map_steps(schedule, lambda step: step if isinstance(step, (Signal, Push)) else _without(step, gone))
    if rng.random() < 0.7:
        return dropped
    place = next((p for p in places(dropped, lambda step: isinstance(step, Wait) and step.flag == kept_flag)), None)
    return with_step(dropped, place, step_at(dropped, place), Wait(gone)) if place else None


def _on_previous_call(schedule: Schedule, rng: random.Random) -> Schedule | None:
    found = places(schedule, lambda step: isinstance(step, Wait))
    if not found:
        return None
    place = rng.choice(found)
    return with_step(schedule, place, dataclasses.replace(step_at(schedule, place), on_previous_call=rng.random() < 0.5))


def _repeat(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Do a step twice."""
    found = places(schedule, lambda step: True)
    if not found:
        return None
    place = rng.choice(found)
    step = step_at(schedule, place)
    return with_step(schedule, place, step, dataclasses.replace(step))


def _split_lane(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Put the later steps of a lane on a lane of their own, beside it."""
    found = [p for p in places(schedule, lambda step: True) if p[2] and len(schedule.ranks[p[0]]) < 4]
    if not found:
        return None
    rank, index, at = rng.choice(found)
    lanes = list(schedule.ranks[rank])
    lane = lanes[index]
    lanes[index] = dataclasses.replace(lane, steps=lane.steps[:at])
    kind = "blocks" if lane.kind == "compute" else lane.kind  # a rank has one lane of kind compute
    return with_lanes(schedule, rank, [*lanes, Lane(f"{lane.name}{len(lanes)}", kind, lane.steps[at:])])


def _split_in_order(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """The same, but the second lane waits for a flag that the first one raises at its end, or (a fault) one step early."""
    split = _split_lane(schedule, rng)
    if split is None:
        return None
    rank = next(r for r, lanes in enumerate(split.ranks) if len(lanes) > len(schedule.ranks[r]))
    lanes = list(split.ranks[rank])
    name = next(old.name for old, new in zip(schedule.ranks[rank], lanes, strict=False) if old.steps != new.steps)
    index, flag = next(i for i, lane in enumerate(lanes) if lane.name == name), Flag("split", rank)
    early = rng.choice((0, 0, 1))
    steps = list(lanes[index].steps)
    steps.insert(len(steps) - early, Signal(flag))
    lanes[index] = dataclasses.replace(lanes[index], steps=tuple(steps))
    at = rng.choice((0, 0, 1))
    late = list(lanes[-1].steps)
    late.insert(at, Wait(flag))
    lanes[-1] = dataclasses.replace(lanes[-1], steps=tuple(late))
    return with_lanes(split, rank, lanes)


DAMAGES: dict[str, Damage] = {
    "drop a wait": _dropper(Wait),
    "drop a signal": _dropper(Signal),
    "drop a signal and its waits": _drop_pair,
    "drop a copy": _dropper(Copy),
    "drop a part": _change_part(lambda part: True, lambda part, rng: None),
    "drop a gate": _change_part(lambda part: bool(part.gates), _drop_gate),
    "drop a count": _change_part(lambda part: bool(part.count), lambda part, rng: dataclasses.replace(part, count=None)),
    "change a region of a part": _change_part(lambda part: True, _region_of_part),
    "change a region of a copy": _region_of_copy,
    "change a part of a push": _part_of_push,
    "swap neighbours": _swap,
    "swap any two": lambda schedule, rng: _swap(schedule, rng, near=False),
    "swap on two ranks": _cross_ranks,
    "reuse a flag": _reuse_flag,
    "swap two operands": _swap_operands,
    "mix two sums": _mix_sums,
    "one row for all": _change_part(_sums_rows, _one_row),
    "wait for another copy": _other_copy,
    "swap two signals": _signal_other,
    "change what is added": _change_part(lambda part: bool(getattr(part, "adds", ())), _change_adds),
    "drop a late gate": _change_part(lambda part: bool(getattr(part, "adds", ()) and part.gates), _drop_gate),
    "drop an inner gate": _change_part(_has_inner, _drop_inner),
    "change an inner gate": _change_part(_has_inner, _change_inner),
    "move a gate": _change_part(lambda part: hasattr(part, "inner") and bool(part.waits), _move_gate),
    "divide by another number": _divide,
    "reorder parts": _reorder_parts,
    "change on_previous_call": _on_previous_call,
    "change a gate's on_previous_call": _change_part(lambda part: bool(part.gates), _gate_on_previous_call),
    "do a step twice": _repeat,
    "split a lane": _split_lane,
    "split a lane, in order": _split_in_order,
}
