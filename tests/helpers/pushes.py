"""Copies of a lane as kernels of stores: what a schedule of copies would be on SMs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weft.core.schedule import Copy, Flag, Push, Region, Signal, Step, Store, signalled_flags


def pushed(steps: Sequence[Step]) -> list[Step]:
    """The steps with neighbouring copies, each followed by a signal to its receiver, as one Push. A Push ends where its parts
    would need an order: at another source, at a place that it has stored to, and at a flag that is signalled more than once."""
    times = Counter(flag for step in steps for flag in signalled_flags(step))
    found: list[Step] = []
    for step, following in zip(steps, [*steps[1:], None], strict=False):
        before = found[-1] if found else None
        if isinstance(step, Signal) and isinstance(before, Push) and before.parts[-1].count == step.flag:
            continue  # the part has it
        store = _store(step, following, times)
        if store is None:
            found.append(step)
        elif isinstance(before, Push) and _goes_along(before, store):
            found[-1] = Push((*before.parts, store))
        else:
            found.append(Push((store,)))
    return found


def _store(copy: Step, signal: Step | None, times: Counter[Flag]) -> Store | None:
    """A copy and the signal behind it as a part of a Push, if they can be one."""
    if not (isinstance(copy, Copy) and isinstance(signal, Signal)):
        return None
    alone = times[signal.flag] == 1 and signal.flag.rank == copy.dst.rank
    return Store(copy.src, copy.dst, signal.flag) if alone and copy.src.size else None


def _goes_along(push: Push, store: Store) -> bool:
    first = push.parts[0].src
    same = (first.buffer, first.rank) == (store.src.buffer, store.src.rank)
    return same and not any(_overlap(part.dst, store.dst) for part in push.parts)


def _overlap(one: Region, other: Region) -> bool:
    spans = ((one.rows, other.rows), (one.cols, other.cols))
    return (one.buffer, one.rank) == (other.buffer, other.rank) and all(a[0] < b[1] and b[0] < a[1] for a, b in spans)
