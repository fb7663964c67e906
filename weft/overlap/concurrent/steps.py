"""Which schedule a training step's collectives run: blocks of steps try some, until their times tell which is fastest.

A framework starts the collectives of a step itself, one after the other, beside a computation that weft does not see. So what
is timed is whole steps, from the first collective of one to that of another, and that is what a user waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.core.errors import require
from weft.core.logs import warn_once
from weft.core.schedule import Schedule
from weft.ops.common import DTYPES, group_of
from weft.overlap.concurrent.calls import Calls, calls_of
from weft.overlap.concurrent.collectives import AllReduce, Collective
from weft.overlap.concurrent.executor import Executor
from weft.overlap.concurrent.tuning import STEPS, ConcurrentChoice, Sample, Turns, UseTurn, in_blocks
from weft.runtime.choose import automatic
from weft.runtime.groups import GROUPS
from weft.schedules.concurrent import PLAIN, Method, parse

WARM_UP = 2
"""Steps before the trial: libraries load, DistributedDataParallel lays its buckets out anew after the first."""
PROBE = 1024
"""Elements of the collective by which schedules are rehearsed."""


def most_steps(schedules: int) -> int:
    """Steps that trying so many schedules takes at most, after those of WARM_UP.

    >>> most_steps(6)
    94
    """
    return STEPS.most(schedules)


def specs_of(way: str, tried: Sequence[str], *, without: Sequence[str], no_copies: str = "") -> tuple[str, ...]:
    """What `way` stands for: auto for those that are tried, or for what PyTorch does by itself (vendor) where WEFT_SCHEDULE is
    sequential. without: what a framework's steps cannot have. no_copies: why copy
    engines cannot sum a model's gradients, if so; then auto does not try them, with a warning.

    Raises ValueError for a way that has what cannot be.
    """
    require("way", way, str, "use auto, or a way such as vendor+priority")
    if way == "auto" and automatic() == "sequential":
        return (str(PLAIN),)
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


class StepTuner:
    """What each step runs: of `specs`, as far as the device has them, the fastest, once all were taken in blocks of steps; the
    first wins ties. One spec is taken without measuring. Ranks of `group` agree. way: what the name says that steps run now.
    Raises ValueError for a spec that the device lacks."""

    def __init__(self, key: str, specs: Sequence[str], device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.calls: Calls = calls_of(GROUPS.state(group_of(group)[0]))
        self.executor: Executor = self.calls.executor(device)
        self.way: Method = parse(specs[0])
        self._choice = ConcurrentChoice(key=key, way=specs[0], note="it was given")
        self._taken = 0
        self._last: Any = None
        self._turns: Turns | None = None
        probe = (AllReduce(torch.zeros(PROBE, device=device), group),)
        self._tried: tuple[str, ...] = tuple(specs)
        if len(specs) == 1:
            self.executor.prepare(self.way, probe)
        else:
            able = self.executor.abilities(probe)
            tuner = self.calls.tuner(key, device)
            self._tried = tuner.ready([spec for spec in specs if able.allow(parse(spec))], probe)
            self._turns = in_blocks(tuner, STEPS, self._tried)
        self.calls.add_hook(lambda: self.choice)

    @property
    def settled(self) -> bool:
        """Whether the way stays as it is."""
        return self._turns is None

    @property
    def choice(self) -> ConcurrentChoice:
        """What steps run, and why; before the choice how far the measuring has come."""
        if self.settled:
            return self._choice
        most = WARM_UP + most_steps(len(self._tried))
        note = f"step {self._taken} of at most {most} in which {len(self._tried)} ways are tried"
        return ConcurrentChoice(key=self._choice.key, way=str(self.way), note=note)

    def schedule(self, *collectives: Collective) -> Schedule:
        """The schedule by which collectives of a step run now."""
        return self.calls.schedule(str(self.way), collectives)

    def turn(self) -> None:
        """A step begins. Ranks meet at two of these. Within a graph's capture the way stays as it is."""
        if self._turns is None or self.executor.capturing:
            return
        self._taken += 1
        if self._taken <= WARM_UP:
            return
        self.calls.rank_group.check_usable()
        with self.calls.rank_group.failing():
            try:
                if self._taken == WARM_UP + 1:
                    self.way = parse(next(self._turns))
                    self._last = self.executor.mark()
                else:
                    begin, self._last = self._last, self.executor.mark()
                    self.way = parse(self._turns.send(UseTurn(Sample(begin, begin, self._last), ())))
            except StopIteration as end:
                self._choice, self._turns = end.value, None
                self.way = parse(self._choice.way)

    def __repr__(self) -> str:
        return f"{self.choice.key}: {self.way} ({self.choice.why})"
