"""Random schedules of ranks on several nodes, and ways to damage their messages."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from damage import Damage, Place, _changer, _dropper, places, step_at, with_step, with_steps

from weft.core.problem import OPS, Problem
from weft.core.schedule import Schedule, SendReceive
from weft.schedules import build, names, unfit

NODES = ((1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1))


def random_schedule(rng: random.Random) -> Schedule:
    """A small valid one: any operator and size, mostly with messages."""
    op, nodes = rng.choice(OPS), rng.choice(NODES)
    problem = Problem(
        op=op,
        m=rng.choice((1, 2, 3, 4, 5, 6, 7)),
        n=rng.choice((1, 2, 3, 4)),
        k=rng.choice((1, 2, 3, 4)),
        world_size=sum(nodes),
        nodes=nodes,
        return_gathered=op in ("all_gather_matmul", "all_to_all_matmul") and rng.random() < 0.3,
    )
    able = [name for name in names(op) if not unfit(name, problem)]
    name = rng.choice((*able, *["node_slices"] * 4 * ("node_slices" in able)))
    return build(problem, name, rng.choice((1, 2, 2) if sum(nodes) < 4 else (1, 1, 2)), fan_out=rng.random() < 0.25)


def _messages(schedule: Schedule) -> list[Place]:
    return places(schedule, lambda step: isinstance(step, SendReceive))


def _of_one(change: Any) -> Damage:
    """Change one step's messages: (sends, receives, random source) -> both anew, or None where it does not apply."""

    def damage(schedule: Schedule, rng: random.Random) -> Schedule | None:
        found = _messages(schedule)
        if not found:
            return None
        place = rng.choice(found)
        step = step_at(schedule, place)
        new = change(list(step.sends), list(step.receives), rng)
        return with_step(schedule, place, SendReceive(*map(tuple, new))) if new else None

    return damage


def _drop_end(sends: list[Any], receives: list[Any], rng: random.Random) -> Any:
    ends = rng.choice([ends for ends in (sends, receives) if ends] or [[]])
    if ends:
        ends.pop(rng.randrange(len(ends)))
    return sends, receives


def _order(sends: list[Any], receives: list[Any], rng: random.Random) -> Any:
    return rng.sample(sends, len(sends)), rng.sample(receives, len(receives))


def _other_region(sends: list[Any], receives: list[Any], rng: random.Random) -> Any:
    """Of one end, shifted or grown by one; or of two, exchanged."""
    ends, name = (sends, "src") if sends and (not receives or rng.random() < 0.5) else (receives, "dst")
    if not ends:
        return None
    one, two = (rng.randrange(len(ends)) for _ in range(2))
    first, second = getattr(ends[one], name), getattr(ends[two], name)
    if one != two and rng.random() < 0.5:
        ends[one], ends[two] = (
            dataclasses.replace(ends[one], **{name: second}),
            dataclasses.replace(ends[two], **{name: first}),
        )
    else:
        ends[one] = dataclasses.replace(ends[one], **{name: _changer(rng)(first)})
    return sends, receives


def _drop_both(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """A message and its other end, the last ones of their ranks: nobody waits in vain, and rows are missing."""
    sent = [(p, send) for p in _messages(schedule) for send in step_at(schedule, p).sends]
    if not sent:
        return None
    (rank, *_), send = rng.choice(sent)
    last = [p for p in _messages(schedule) if p[0] == rank and any(s.to == send.to for s in step_at(schedule, p).sends)][-1]
    ends = [p for p in _messages(schedule) if p[0] == send.to]
    other = [p for p in ends if any(r.source == rank for r in step_at(schedule, p).receives)][-1]
    here, there = step_at(schedule, last), step_at(schedule, other)
    sends = [s for s in here.sends if s.to == send.to]
    receives = [r for r in there.receives if r.source == rank]
    schedule = with_step(schedule, last, dataclasses.replace(here, sends=tuple(s for s in here.sends if s is not sends[-1])))
    there = step_at(schedule, other)
    return with_step(
        schedule, other, dataclasses.replace(there, receives=tuple(r for r in there.receives if r is not receives[-1]))
    )


def _part_ways(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Sends and receives as two steps, either first, on one rank or on all: some of it deadlocks."""
    found = _messages(schedule)
    if not found:
        return None
    first, everywhere = rng.random() < 0.5, rng.random() < 0.6
    chosen = found if everywhere else [rng.choice(found)]
    for rank, index in dict.fromkeys((p[0], p[1]) for p in chosen):
        steps: list[Any] = []
        for position, step in enumerate(schedule.ranks[rank][index].steps):
            if (rank, index, position) not in chosen:
                steps.append(step)
                continue
            assert isinstance(step, SendReceive)
            ways = [SendReceive(step.sends, ()), SendReceive((), step.receives)]
            steps += [way for way in (ways if first else ways[::-1]) if way.peers]
        schedule = with_steps(schedule, rank, index, steps)
    return schedule


def _join(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Two steps of a lane that follow each other, with what stands between them before both: later, or too early."""
    pairs = [(p, q) for p in _messages(schedule) for q in _messages(schedule) if p[:2] == q[:2] and p[2] < q[2]]
    if not pairs:
        return None
    one, two = rng.choice(pairs)
    steps = list(schedule.ranks[one[0]][one[1]].steps)
    first, second = steps[one[2]], steps[two[2]]
    assert isinstance(first, SendReceive)
    assert isinstance(second, SendReceive)
    both = SendReceive(first.sends + second.sends, first.receives + second.receives)
    between = steps[one[2] + 1 : two[2]]
    new = [*between, both] if rng.random() < 0.5 else [both, *between]
    return with_steps(schedule, one[0], one[1], [*steps[: one[2]], *new, *steps[two[2] + 1 :]])


def _join_in_another_order(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Where one step has several messages for one rank, their order tells them apart."""
    joined = _join(schedule, rng)
    return _of_one(_order)(joined, rng) if joined else None


MESSAGES: dict[str, Damage] = {
    "drop a step of messages": _dropper(SendReceive),
    "drop one end": _of_one(_drop_end),
    "drop both ends": _drop_both,
    "another region": _of_one(_other_region),
    "sends and receives apart": _part_ways,
    "join two steps": _join,
    "join two steps in another order": _join_in_another_order,
}
