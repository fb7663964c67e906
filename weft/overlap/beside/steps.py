"""Which way a training step's collectives take: blocks of steps take ways in turn, until their times tell which is fastest.

A framework starts the collectives of a step itself, one after the other, beside a computation that weft does not see. So what
is timed is whole steps, from the first collective of one to that of another, and that is what a user waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from weft.core.errors import require
from weft.core.logs import warn_once
from weft.ops.common import DTYPES, group_of
from weft.overlap.beside.blocks import Turns, in_blocks
from weft.overlap.beside.collectives import AllReduce
from weft.overlap.beside.device import Device
from weft.overlap.beside.sites import Sites, sites_of
from weft.overlap.beside.trials import Judge, Settled
from weft.planner.ways import Way, parse, possible
from weft.runtime.groups import GROUPS

WARM_UP = 2
"""Steps before the trial: libraries load, DistributedDataParallel lays its buckets out anew after the first."""
PROBE = 1024
"""Elements of the collective by which ways are rehearsed."""


def ways_of(way: str, tried: Sequence[str], *, without: Sequence[str], no_copies: str = "") -> tuple[str, ...]:
    """What `way` stands for: auto for those that are tried. without: what a framework's steps cannot have. no_copies: why copy
    engines cannot sum a model's gradients, if so; then auto does not try them, with a warning.

    Raises ValueError for a way that has what cannot be.
    """
    require("way", way, str, "use auto, or a way such as vendor+priority")
    if way == "auto":
        if no_copies:
            warn_once(f"copy_engine is not tried: {no_copies}")
        return tuple(spec for spec in tried if not (no_copies and parse(spec).transport == "copy_engine"))
    if no_copies and parse(way).transport == "copy_engine":
        raise ValueError(f"way is {way!r}, but {no_copies}; use vendor")
    for name in without:
        if getattr(parse(way), name):
            raise ValueError(f"way is {way!r}; {name} is not to be had here: use auto, or one like {', '.join(tried)}")
    return (way,)


def why_not_summed(dtypes: Iterable[torch.dtype]) -> str:
    """Why copy engines cannot sum gradients of these; empty if they can."""
    others = sorted({str(dtype) for dtype in dtypes if dtype not in DTYPES})
    return f"gradients are {', '.join(others)}; copy engines sum {', '.join(DTYPES.values())}" if others else ""


class StepTrial:
    """The way of each step: of `specs`, as far as the device has them, the fastest, once all were taken in blocks of steps; the
    first wins ties. One spec is taken without a trial. Ranks of `group` agree. Raises ValueError for one that the device
    lacks."""

    def __init__(self, key: str, specs: Sequence[str], device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.sites: Sites = sites_of(GROUPS.state(group_of(group)[0]))
        self.device: Device = self.sites.device(device)
        self.way: Way = parse(specs[0])
        self._left = WARM_UP
        self._begun = False
        self._turns: Turns | None = None
        probe = (AllReduce(torch.zeros(PROBE, device=device), group),)
        if len(specs) == 1:
            self.device.prepare(self.way, probe)
            return
        tried = [spec for spec in specs if possible(parse(spec), self.device.abilities(probe))]
        judge = Judge(key=key, rank_group=self.sites.rank_group, meet=self.sites.meet, device=self.device)
        self._turns = in_blocks(judge, judge.ready(tried, probe))

    @property
    def settled(self) -> bool:
        """Whether the way stays as it is."""
        return self._turns is None

    def turn(self) -> None:
        """A step begins. Ranks meet at two of these. Within a graph's capture the way stays as it is."""
        if self._turns is None or self.device.capturing:
            return
        if self._left:
            self._left -= 1
            return
        self.sites.rank_group.check_usable()
        with self.sites.rank_group.failing():
            try:
                self.way = parse(self._turns.send(self.device.mark()) if self._begun else next(self._turns))
            except StopIteration as end:
                self._settle(end.value)
        self._begun = True

    def _settle(self, settled: Settled) -> None:
        self.way, self._turns = parse(settled.way), None
        self.sites.record(settled)
