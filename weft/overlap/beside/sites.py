"""What weft keeps for `concurrent` among ranks that agree: a site for each key, with its way, or the trial that finds it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weft.comm.rank_group import RankGroup
from weft.overlap.beside.collectives import Collective
from weft.overlap.beside.device import Device
from weft.overlap.beside.host import HostDevice
from weft.overlap.beside.kernels import Kernels
from weft.overlap.beside.trials import Judge, Sample, Settled, Steps, Turn
from weft.planner.ways import SEQUENTIAL, Way, parse
from weft.runtime.groups import GroupState


class Use:
    """One use of a site: the way it takes, and the marks that tell how long that was."""

    def __init__(self, way: Way, device: Device | None) -> None:
        self.way = way
        self._device = device
        self._marks: list[object] = []
        self.mark()

    def mark(self) -> None:
        """Now; three times a use: at its begin, once its collectives are enqueued, at its end."""
        if self._device is not None:
            self._marks.append(self._device.mark())

    @property
    def sample(self) -> Sample | None:
        return Sample(*self._marks) if len(self._marks) == 3 else None


class Site:
    """Uses alike: one key, the same collectives. way: what ranks have agreed on so far, sequential until they have chosen."""

    def __init__(self, judge: Judge, kernels: Kernels) -> None:
        self.judge, self.kernels = judge, kernels
        self.settled: Settled | None = None
        self.way = SEQUENTIAL
        self._steps: Steps | None = None
        self._open = False
        self._last: Sample | None = None

    def contest(self, run: Callable[[Way], object], compute: Callable[[], object], collectives: Sequence[Collective]) -> None:
        """Choose now. Whatever ends it on this rank ends it on all."""
        with self.judge.rank_group.failing():
            self._settle(self.judge.contest(run, compute, collectives))

    @contextmanager
    def use(self, collectives: Sequence[Collective]) -> Iterator[Use]:
        """The next use. One within another of the same site, and one that is captured, take what has been agreed on so far."""
        if self.settled or self._open or self._captured():
            yield Use(self.way, None)
            return
        way = self._advance(collectives)
        self._open = True
        use = Use(way, None if self.settled else self.judge.device)
        try:
            yield use
        finally:
            use.mark()
            self._open, self._last = False, use.sample

    def _captured(self) -> bool:
        if not self.judge.device.capturing:
            return False
        warnings.warn(
            f"concurrent {self.judge.key} is captured before its trial has ended: the graph runs it as {self.way}; "
            "use it outside a graph first, or say which way",
            stacklevel=6,
        )
        return True

    def _advance(self, collectives: Sequence[Collective]) -> Way:
        """The way of the next use; the choice, where the trial ends. Ranks meet at a few of these."""
        self.judge.rank_group.check_usable()
        with self.judge.rank_group.failing():
            try:
                if self._steps is None:
                    self._steps = self.judge.rotation()
                    return parse(next(self._steps))
                return parse(self._steps.send(Turn(self._last, collectives)))
            except StopIteration as end:
                self._settle(end.value)
                return self.way

    def _settle(self, settled: Settled) -> None:
        self.settled, self.way, self._steps, self._last = settled, parse(settled.way), None, None


class Sites:
    """All sites of one group, and the devices that they run on. `close` is collective where ways have made groups. meet: ranks
    agree on a text, and exchange a number, while no other call of the group is under way on this rank."""

    def __init__(self, rank_group: RankGroup, meet: Callable[[str, int], tuple[int, ...]]) -> None:
        self.rank_group, self.meet = rank_group, meet
        self._lock = threading.RLock()
        self._sites: dict[tuple[object, ...], Site] = {}
        self._kernels: dict[tuple[object, ...], Kernels] = {}
        self._devices: dict[torch.device, Device] = {}
        self._recorded: list[Settled] = []

    def site(self, key: str, collectives: Sequence[Collective], kernels: Kernels, *, fixed: bool) -> Site:
        """The site of a key; ranks meet at its first use. Raises RankMismatch where they mean different things by it."""
        alike = (key, *(collective.alike for collective in collectives))
        with self._lock:
            found = self._sites.get(alike)
            if found is None:
                parts = (f"collective {i}: {collective.describe()}" for i, collective in enumerate(collectives))
                self.meet("\n".join([f"concurrent: {key}", *parts]), 0)
                found = self._sites[alike] = Site(self._judge(key, collectives[0].device, kernels, fixed), kernels)
            return found

    def _judge(self, key: str, device: torch.device, kernels: Kernels, fixed: bool) -> Judge:
        return Judge(
            key=key,
            rank_group=self.rank_group,
            meet=self.meet,
            device=self.device(device),
            residents=kernels.residents,
            fixed=fixed,
        )

    def kernels(self, named: Sequence[Any], caps: Sequence[int] | None) -> Kernels:
        """Of these kernels, what is launched for them. The same at each use."""
        alike = (*(id(kernel) for kernel in named), tuple(caps) if caps is not None else None)
        if alike not in self._kernels:
            self._kernels[alike] = Kernels(named, caps)
        return self._kernels[alike]

    def device(self, device: torch.device) -> Device:
        """What runs ways on a device."""
        if device not in self._devices:
            self._devices[device] = _device(device)
        return self._devices[device]

    def settled(self) -> list[Settled]:
        """What has been chosen so far."""
        return [site.settled for site in self._sites.values() if site.settled] + self._recorded

    def record(self, settled: Settled) -> None:
        """Keep a choice that was made elsewhere among those that are told."""
        self._recorded.append(settled)

    def close(self) -> None:
        for kernels in self._kernels.values():
            kernels.close()
        for device in self._devices.values():
            device.close(broken=self.rank_group.broken is not None)
        for kept in (self._sites, self._kernels, self._devices, self._recorded):
            kept.clear()


def _device(device: torch.device) -> Device:
    if device.type == "cpu":
        return HostDevice(device)
    # Imported where it is needed: the controls call the CUDA driver.
    from weft.overlap.beside.cuda import CudaDevice

    return CudaDevice(device)


def sites_of(state: GroupState) -> Sites:
    """A group's sites."""
    return state.attached(Sites, lambda: Sites(state.rank_group, state.numbers))
