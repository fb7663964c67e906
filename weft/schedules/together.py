"""Together: steps of a lane that a device runs as one kernel, where the lane runs on SMs: launched once, and counted so.

Such a lane is one of communication blocks ("blocks"), or the compute lane:

    Copy, Signal, Copy, Signal ...   each signal to the copy's receiver: one kernel of stores (weft.kernels.push), whose copies
                                     each add to the flag of their Signal, tile by tile
    Wait, Wait, Signal ...           one kernel of one warp (weft.kernels.words)

Nothing orders the copies of such a run: the flag of a later one may be full while an earlier one is under way, and tells of its
own copy, and of what came before the run, alone. So a run ends where an order within it is needed.

Copy lanes have streams' memory operations and copy engines, one by one. A lane's fused steps are another kernel's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.core.schedule import Copy, Flag, Lane, Region, Signal, Wait, advances


@dataclass(frozen=True, slots=True)
class Run:
    """Steps [first, last) of a lane, as copies with the flags that they raise."""

    first: int
    last: int
    copies: tuple[tuple[Copy, Flag], ...]


def runs(lane: Lane) -> Iterator[Run]:
    """The runs of copies of a lane, in order. They depend on the schedule alone, since a flag that a kernel counts grows by
    tiles, and its waiter must know."""
    if lane.kind == "copy" or not any(isinstance(step, Copy) for step in lane.steps):
        return
    position, fused = 0, dict(lane.fused)
    raised = {flag for step in lane.steps if not isinstance(step, (Copy, Wait, Signal)) for flag in advances(step)}
    while position < len(lane.steps):
        if position in fused:
            position = fused[position]
        elif isinstance(lane.steps[position], Copy):
            end = min((low for low in fused if low > position), default=len(lane.steps))
            copies = tuple(_copies(lane, position, end, raised))
            if copies:
                yield Run(position, position + 2 * len(copies), copies)
            position += 2 * len(copies) or 1
        else:
            position += 1


def _copies(lane: Lane, first: int, end: int, raised: set[Flag]) -> Iterator[tuple[Copy, Flag]]:
    """The copies from one step on that may be one kernel. raised: by kernels of the lane, and copies
    before; theirs are added to it."""
    source, taken = None, _Taken()
    for at in range(first, end - 1, 2):
        copy, signal = lane.steps[at], lane.steps[at + 1]
        # A signal to anyone but the receiver may stand for more than this copy.
        if not (isinstance(copy, Copy) and isinstance(signal, Signal) and signal.flag.rank == copy.dst.rank):
            return
        src, dst = (copy.src.buffer, copy.src.rank), (copy.dst.buffer, copy.dst.rank)
        # One without elements has no tile that counts, and a flag that two kernels raise grows by the tiles of either. The
        # kernel reads one tensor, which may lie elsewhere in each call, and writes none of it.
        if not copy.src.size or signal.flag in raised or src == dst or src != (source or src) or taken.meets(copy.dst):
            return
        source = src
        raised.add(signal.flag)
        taken.add(copy.dst)
        yield copy, signal.flag


class _Taken:
    """Where the copies of a run store. Pieces come mostly one behind the other, so that few are looked at."""

    def __init__(self) -> None:
        self._regions: dict[tuple[str, int], list[Region]] = {}
        self._ends: dict[tuple[str, int], tuple[int, int]] = {}

    def meets(self, region: Region) -> bool:
        """Whether it overlaps one of them."""
        (top, bottom), (left, right), key = region.rows, region.cols, (region.buffer, region.rank)
        below, beside = self._ends.get(key, (0, 0))
        if top >= below or left >= beside:
            return False
        return any(
            other.rows[0] < bottom and top < other.rows[1] and other.cols[0] < right and left < other.cols[1]
            for other in self._regions[key]
        )

    def add(self, region: Region) -> None:
        key = region.buffer, region.rank
        below, beside = self._ends.get(key, (0, 0))
        self._regions.setdefault(key, []).append(region)
        self._ends[key] = max(region.rows[1], below), max(region.cols[1], beside)


def riding(lane: Lane) -> frozenset[int]:
    """Positions of steps that a kernel which began earlier in the lane runs, too."""
    found = {at for low, high in lane.fused for at in range(low + 1, high)}
    if lane.kind in ("compute", "blocks"):
        pushed = {at for run in runs(lane) for at in range(run.first, run.last)}
        found |= {at for run in runs(lane) for at in range(run.first + 1, run.last)}
        words = [at not in pushed and isinstance(step, (Wait, Signal)) for at, step in enumerate(lane.steps)]
        found |= {at for at in range(1, len(words)) if words[at - 1] and words[at]}
    return frozenset(found)
