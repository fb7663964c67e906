"""Which way a training step's collectives take: steps take ways in turn, until their times tell which is fastest.

A framework starts the collectives of a step itself, one after the other, beside a computation that weft does not see. So what is
timed is the whole step, from the first collective of one to that of the next, and that is what a user waits for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.beside.device import Device
from weft.beside.sites import Sites, sites_of
from weft.beside.trials import Judge, Sample, Settled, Steps
from weft.execute.groups import GROUPS
from weft.ops.checks import group_of
from weft.planner.ways import Way, parse

WARM_UP = 2
"""Steps before the trial: libraries load, DistributedDataParallel lays its buckets out anew after the first."""


class StepTrial:
    """The way of each step: of `specs`, which were tried in turn, the fastest; the first wins ties. Ranks of `group` agree.

    One spec is taken without a trial.
    """

    def __init__(self, key: str, specs: Sequence[str], device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.sites: Sites = sites_of(GROUPS.state(group_of(group)[0]))
        self.device: Device = self.sites.device(device)
        self.way: Way = parse(specs[0])
        self._steps: Steps | None = None
        self._begin: object = None
        self._left = WARM_UP
        if len(specs) > 1:
            self._steps = Judge(key=key, team=self.sites.team, device=self.device).turns(specs)
        else:
            self.device.prepare(self.way, ())

    def turn(self) -> None:
        """A step begins. At the end of the trial ranks meet. Within a graph's capture the way stays as it is."""
        if self._steps is None or self.device.capturing:
            return
        if self._left:
            self._left -= 1
            return
        now = self.device.mark()
        try:
            self.way = parse(next(self._steps) if self._begin is None else self._steps.send(Sample(self._begin, None, now)))
        except StopIteration as end:
            self._settle(end.value)
        self._begin = now

    def _settle(self, settled: Settled) -> None:
        self.way, self._steps = parse(settled.way), None
        self.sites.record(settled)
