"""When symmetric memory of GPUs is freed: here on tensors of the CPU, whose memory nobody else sees."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
from lone_ranks import teams

from weft.comm import memory
from weft.core.errors import PeerLost
from weft.runtime.cuda import CudaProgram
from weft.runtime.reach import Reachable


class Handle:
    """torch's, which holds the mappings of a piece."""


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the current stream is captured; nothing is lent before and after."""
    found = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found[0])
    monkeypatch.setattr(memory, "_LENT", [])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


def lent() -> tuple[torch.Tensor, weakref.ref[Handle]]:
    handle = Handle()
    return memory.lent(torch.zeros(64, dtype=torch.uint8), handle), weakref.ref(handle)


def test_it_stays_while_any_tensor_on_it_is_left() -> None:
    area, handle = lent()
    part = area[8:16].view(torch.int32)
    del area
    memory.free_symmetric()
    assert handle() is not None
    part += 1
    assert part.tolist() == [1, 1]
    del part
    assert handle() is not None, "freed where its last tensor went"
    memory.free_symmetric()
    assert handle() is None


def test_it_is_not_freed_in_a_capture(captures: list[bool]) -> None:
    area, handle = lent()
    del area
    captures[0] = True
    memory.free_symmetric()
    assert handle() is not None
    captures[0] = False
    memory.free_symmetric()
    assert handle() is None


def test_the_device_is_idle_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch waits for it with Python's lock, so that nothing could end the wait."""
    area, handle = lent()
    waited = list[bool]()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(handle() is not None))
    memory.free_symmetric()
    assert waited == []
    del area
    memory.free_symmetric()
    assert waited == [True]
    assert handle() is None


def test_a_program_that_was_closed_keeps_no_result_that_peers_wrote() -> None:
    """It may live until the garbage collector comes; the group's memory is to be free before."""
    area, handle = lent()
    program: Any = CudaProgram.__new__(CudaProgram)
    program.space, program.driver = SimpleNamespace(device=None, releaser=SimpleNamespace(remove=lambda key: None)), None
    program._replays = program.streams = SimpleNamespace(close=lambda: None)
    program._pieces, program._words, program._area = [], None, None
    program._reached = {"out": [area.view(torch.float32)]}
    del area
    program.close()
    memory.free_symmetric()
    assert handle() is None


def test_others_stay() -> None:
    pieces = [lent() for _ in range(3)]
    pieces[1] = (pieces[0][0], pieces[1][1])
    memory.free_symmetric()
    assert [handle() is None for _, handle in pieces] == [False, True, False]


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's symmetric memory is asked for; full: the next allocation fails."""
    asked: list[str] = []

    def empty(nbytes: int, **_: object) -> torch.Tensor:
        if "full" in asked:
            raise torch.OutOfMemoryError("CUDA out of memory")
        asked.append(f"{nbytes} bytes")
        return torch.ones(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(symmetric, "empty", empty)
    return asked


def test_ranks_meet_once_each_has_its_memory(torchs: list[str]) -> None:
    """In torch's rendezvous a rank waits for the others and watches nobody."""
    cpu = torch.device("cpu")

    def rendezvous(area: torch.Tensor) -> Handle:
        torchs.append("rendezvous")
        return Handle()

    meetings = cast(Any, SimpleNamespace(rendezvous=rendezvous))
    area, _ = memory.gpu_symmetric(2048, meetings, cpu, meet=lambda: torchs.append("meet"))
    assert torchs == ["2048 bytes", "meet", "rendezvous"]
    assert area.sum() == 0
    torchs.append("full")
    with pytest.raises(torch.OutOfMemoryError):
        memory.gpu_symmetric(2048, meetings, cpu, meet=lambda: torchs.append("meet"))
    assert torchs[3:] == ["full"]


def test_a_rank_that_is_interrupted_on_the_way_ends_them_too(torchs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(nbytes: int, **_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(symmetric, "empty", interrupted)
    mine, other = teams()
    space: Any = SimpleNamespace(
        team=mine,
        device=torch.device("cpu"),
        held=lambda: None,
        settle=lambda: None,
        watchdog=SimpleNamespace(raise_if_failed=lambda: None),
    )
    with pytest.raises(KeyboardInterrupt):
        Reachable(0).take(space, 2048)
    with pytest.raises(PeerLost, match=r"rank 0.*KeyboardInterrupt"):
        other.check_peers()


def test_a_rank_without_memory_ends_the_calls_of_all(torchs: list[str]) -> None:
    full, other = teams()
    space: Any = SimpleNamespace(
        team=full,
        device=torch.device("cpu"),
        held=lambda: None,
        settle=lambda: torchs.append("meet"),
        watchdog=SimpleNamespace(raise_if_failed=lambda: None),
    )
    torchs.append("full")
    with pytest.raises(torch.OutOfMemoryError):
        Reachable(0).take(space, 2048)
    assert torchs == ["full"]
    with pytest.raises(PeerLost, match=r"rank 0.*CUDA out of memory"):
        other.check_peers()
