"""Together: steps of a lane that a device runs as one kernel, where the lane runs on SMs: launched once, and counted so.

Such a lane is one of communication blocks ("blocks"), or the compute lane:

    Copy, Signal, Copy, Signal ...   each signal to the copy's receiver: one kernel of stores (weft.kernels.push), whose copies
                                     each add to the flag of their Signal, tile by tile
    Wait, Wait, Signal ...           one kernel of one warp (weft.kernels.words)

Copy lanes have streams' memory operations and copy engines, one by one. A lane's fused steps are another kernel's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.schedule import Copy, Flag, Lane, Signal, Wait


@dataclass(frozen=True, slots=True)
class Run:
    """Steps [first, last) of a lane, as copies with the flags that they raise."""

    first: int
    last: int
    copies: tuple[tuple[Copy, Flag], ...]


def runs(lane: Lane) -> Iterator[Run]:
    """The runs of copies of a lane, in order. They depend on the schedule alone, since a flag that a kernel counts grows by
    tiles, and its waiter must know."""
    position, fused = 0, dict(lane.fused)
    while lane.kind != "copy" and position < len(lane.steps):
        if position in fused:
            position = fused[position]
            continue
        copies, first = [], position
        pairs = zip(lane.steps[position::2], lane.steps[position + 1 :: 2], strict=False)
        for copy, signal in pairs:
            # A signal to anyone but the receiver may stand for more than this copy.
            if not (isinstance(copy, Copy) and isinstance(signal, Signal) and signal.flag.rank == copy.dst.rank):
                break
            copies.append((copy, signal.flag))
        position += 2 * len(copies)
        if copies:
            yield Run(first, position, tuple(copies))
        position += not copies


def riding(lane: Lane) -> frozenset[int]:
    """Positions of steps that a kernel which began earlier in the lane runs, too."""
    found = {at for low, high in lane.fused for at in range(low + 1, high)}
    if lane.kind in ("compute", "blocks"):
        pushed = {at for run in runs(lane) for at in range(run.first, run.last)}
        found |= {at for run in runs(lane) for at in range(run.first + 1, run.last)}
        words = [at not in pushed and isinstance(step, (Wait, Signal)) for at, step in enumerate(lane.steps)]
        found |= {at for at in range(1, len(words)) if words[at - 1] and words[at]}
    return frozenset(found)
