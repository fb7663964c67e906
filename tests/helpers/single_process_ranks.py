"""Ranks of one process, for what needs no more than their words: groups without a process group, and a GPU that tests drive."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from devices import H200

from weft.comm import symmetric_heap
from weft.comm.control import ControlSegment
from weft.comm.rank_group import RankGroup
from weft.comm.shared_memory import process_start
from weft.compat.streams import Word
from weft.core.machine import load
from weft.runtime import cuda_resources
from weft.runtime.cuda_resources import CudaResources
from weft.runtime.order import Order, PendingCall


def rank_groups(world_size: int = 2, *, timeout_s: float = 20.0) -> list[RankGroup]:
    """The group of each rank, all on one node."""
    controls = [ControlSegment.private() for _ in range(world_size)]
    made = []
    for rank in range(world_size):
        rank_group = RankGroup.__new__(RankGroup)
        rank_group.timeout_s, rank_group.rank, rank_group.world_size = timeout_s, rank, world_size
        rank_group.calls = rank_group._agreements = rank_group._compared = rank_group._rounds = 0
        rank_group._agreed_texts, rank_group.unraised, rank_group._raised = {}, None, False
        rank_group.broken, rank_group._relay = None, None
        rank_group.lock, rank_group._failure_lock = threading.RLock(), threading.Lock()
        rank_group.nodes, rank_group.one_host, rank_group.ranks_on_node = (), True, range(world_size)
        rank_group.pids = [os.getpid()] * world_size
        rank_group._starts = [process_start(os.getpid()) or 0] * world_size
        rank_group._control = controls
        rank_group.topic = rank_group.name = "lone"
        rank_group.group = cast(Any, None)
        rank_group.heaps = {}
        made.append(rank_group)
    return made


class Event:
    """reached: whether the device has come to where it was recorded last."""

    def __init__(self) -> None:
        self.reached = True


class FakeDriver:
    """A device that comes to an event when a test says so. log: what was done with streams."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.lost = False

    def event(self) -> Event:
        return Event()

    def forget(self, event: Event) -> None:
        pass

    def record(self, event: Event, stream: int) -> None:
        event.reached = False

    def record_event(self, event: Event, stream: int) -> tuple[int]:
        self.record(event, stream)
        return (0,)

    def reached(self, event: Event) -> bool:
        if self.lost:
            raise RuntimeError("the device is lost")
        return event.reached

    def after(self, later: int, earlier: int, event: object) -> None:
        self.log.append(("after", later, earlier))

    def all_after(self, later: Sequence[int], earlier: int, event: object) -> None:
        for stream in later:
            self.after(stream, earlier, event)

    def wait(self, stream: int, event: Event) -> None:
        self.log.append(("wait", stream, event))

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        self.log.append(("fill", nbytes))
        ctypes.memset(address, byte, nbytes)

    def words(self, words: Sequence[Word]) -> Callable[[int], None]:
        return lambda stream: self.log.append(("words", stream))

    def relax_captures(self) -> None:
        pass

    def capture(self, stream: int) -> int:
        """Streams below 100 are in one capture, those below 200 in another one."""
        return stream // 100


class FakeStream:
    """idle: whether all that was enqueued has been done."""

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.idle = number, True

    def query(self) -> bool:
        return self.idle


class FakeResources(CudaResources):
    """The resources of a group without a GPU. Its watchdog runs."""

    driver: Any
    rescue: Any

    def begun(self, call: PendingCall) -> None:
        """The device comes to a call."""
        call.begun.reached = True

    def ended(self, call: PendingCall) -> None:
        """The device has done a call."""
        call.done.reached = True


def resources_of(rank_group: RankGroup, monkeypatch: pytest.MonkeyPatch, order: Order | None = None) -> FakeResources:
    """The resources of a group. `close` it. order: that of the GPU, by default a new one."""
    monkeypatch.setattr(cuda_resources, "Driver", FakeDriver)
    monkeypatch.setattr(cuda_resources, "current_lane_priority", lambda: -1)
    monkeypatch.setattr(cuda_resources, "comm_stream", lambda **_: FakeStream(7))
    monkeypatch.setattr(cuda_resources, "give_back", lambda stream: None)
    monkeypatch.setattr(cuda_resources, "agreed_profile", lambda group, device: load("h200x8"))
    monkeypatch.setattr(symmetric_heap, "enqueued", lambda device: lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    monkeypatch.setattr(symmetric_heap, "agree_on_launch", lambda group, device: "")
    return FakeResources(rank_group, torch.device("cuda", 0), order)


def wait_for(ready: Callable[[], object], within_s: float = 60.0) -> bool:
    """Whether something comes true in time, which is long where it should."""
    deadline = time.monotonic() + within_s
    while not ready() and time.monotonic() < deadline:
        time.sleep(1e-3)
    return bool(ready())
