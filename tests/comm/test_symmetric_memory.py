"""When symmetric memory of GPUs is allocated and freed: here on tensors of the CPU, whose memory nobody else sees."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
from single_process_ranks import rank_groups

from weft.comm.rank_group import RankGroup
from weft.comm.symmetric_heap import DeviceHeap
from weft.compat import c10d as memory
from weft.core.errors import PeerLost
from weft.runtime.cuda import CudaProgram
from weft.runtime.order import Exclusive


def test_it_stays_while_the_device_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a receive of somebody's whose sender is late, and may wait for this rank."""
    area, handle = held()
    del area
    comes = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: comes.wait(60))
    memory.free_unused(within_s=0.05)
    assert handle() is not None
    comes.set()
    memory.free_unused()
    assert handle() is None


class Handle:
    """torch's, which holds the mappings of a piece."""


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the current stream is captured; nothing is held before and after."""
    found = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found[0])
    monkeypatch.setattr(memory, "_HELD", [])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


def held() -> tuple[torch.Tensor, weakref.ref[Handle]]:
    handle = Handle()
    return memory.held(torch.zeros(64, dtype=torch.uint8), handle), weakref.ref(handle)


def test_it_stays_while_any_tensor_on_it_is_left() -> None:
    area, handle = held()
    part = area[8:16].view(torch.int32)
    del area
    memory.free_unused()
    assert handle() is not None
    part += 1
    assert part.tolist() == [1, 1]
    del part
    assert handle() is not None, "freed where its last tensor went"
    memory.free_unused()
    assert handle() is None


def test_it_is_not_freed_in_a_capture(captures: list[bool]) -> None:
    area, handle = held()
    del area
    captures[0] = True
    memory.free_unused()
    assert handle() is not None
    captures[0] = False
    memory.free_unused()
    assert handle() is None


def test_the_device_is_idle_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch waits for it with Python's lock, so that nothing could end the wait."""
    area, handle = held()
    waited = list[bool]()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(handle() is not None))
    memory.free_unused()
    assert waited == []
    del area
    memory.free_unused()
    assert waited == [True]
    assert handle() is None


def test_a_program_that_was_closed_keeps_no_result_that_peers_wrote() -> None:
    """It may live until the garbage collector comes; the group's memory is to be free before."""
    area, handle = held()
    program: Any = CudaProgram.__new__(CudaProgram)
    program.resources, program.driver = SimpleNamespace(releaser=None, wait_for_calls=lambda last, **options: True), None
    program.resources.watchdog = SimpleNamespace(captured_programs=SimpleNamespace(remove=lambda program: True))
    program.resources.order, program.replayed = SimpleNamespace(forget_results=lambda call: None), None
    program.captured, program.memory = False, Exclusive()
    program.replays = program.streams = SimpleNamespace(close=lambda: None)
    program._pieces, program._mailboxes, program._words, program._area = [], (), None, None
    program._reached = {"out": [area.view(torch.float32)]}
    del area
    program.close()
    memory.free_unused()
    assert handle() is None


def test_others_stay() -> None:
    pieces = [held() for _ in range(3)]
    pieces[1] = (pieces[0][0], pieces[1][1])
    memory.free_unused()
    assert [handle() is None for _, handle in pieces] == [False, True, False]


class Buffers(Handle):
    """torch's handle of one rank's memory, for that rank alone."""

    def __init__(self, area: torch.Tensor) -> None:
        self._area, self.buffer_ptrs = area, [area.data_ptr()]

    def get_buffer(self, place: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> torch.Tensor:
        assert place == 0
        count = int(torch.tensor(shape).prod())
        return self._area.view(dtype)[offset : offset + count].view(shape)


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked for, in order; full: the next allocation fails."""
    asked: list[str] = []

    def empty(nbytes: int, **_: object) -> torch.Tensor:
        if "full" in asked:
            raise torch.OutOfMemoryError("CUDA out of memory")
        asked.append(f"{nbytes} bytes")
        return torch.ones(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(symmetric, "empty", empty)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    return asked


@pytest.fixture
def heap_of(torchs: list[str]) -> Callable[[RankGroup], DeviceHeap]:
    """A group's heap. Where ranks wait for each other is noted in `torchs`; nobody else comes."""

    def made(rank_group: RankGroup) -> DeviceHeap:
        heap: Any = DeviceHeap(rank_group, torch.device("cpu"))
        heap.settle = lambda: torchs.append("settle")

        def exchange(area: torch.Tensor) -> Buffers:
            torchs.append("rendezvous")
            return Buffers(area)

        heap._rendezvous = SimpleNamespace(exchange=exchange)
        return heap  # type: ignore[no-any-return]

    return made


def test_ranks_settle_once_each_has_its_memory(torchs: list[str], heap_of: Callable[[RankGroup], DeviceHeap]) -> None:
    """In torch's rendezvous a rank waits for the others and watches nobody."""
    piece = heap_of(rank_groups(1)[0]).allocate(2048)
    assert torchs[:4] == ["2048 bytes", "settle", "rendezvous", "settle"]
    assert torchs[-1] == "settle", "nobody writes before all memory is zeroed"
    assert piece.local.sum() == 0
    torchs.append("full")
    with pytest.raises(torch.OutOfMemoryError):
        heap_of(rank_groups(1)[0]).allocate(2048)
    assert torchs[-1] == "full"


def test_what_was_freed_is_allocated_again_zeroed_once_all_ranks_are_done(
    torchs: list[str], heap_of: Callable[[RankGroup], DeviceHeap]
) -> None:
    heap = heap_of(rank_groups(1)[0])
    first, other = heap.allocate(5000, reusable=True), heap.allocate(5000)
    first.local.fill_(7)
    address = first.local.data_ptr()
    for piece in (first, other):
        heap.free(piece)
    del torchs[:], piece, other
    again = heap.allocate(4900, reusable=True)
    assert torchs == ["settle", "settle"]
    assert again.local.data_ptr() == address
    assert again.local.sum() == 0
    assert heap.allocate(4900).local.data_ptr() != address, "what a caller may still have is not handed out again"


def test_memory_goes_with_what_was_freed(heap_of: Callable[[RankGroup], DeviceHeap]) -> None:
    heap = heap_of(rank_groups(1)[0])
    pieces = [heap.allocate(2048, reusable=reusable) for reusable in (False, True)]
    handles = [weakref.ref(piece._handle) for piece in pieces]
    while pieces:
        heap.free(pieces.pop())
    memory.free_unused()
    assert [handle() is None for handle in handles] == [True, False]
    heap.free_cached()
    memory.free_unused()
    assert handles[1]() is None


def test_a_peer_that_cannot_be_reached_is_named(
    heap_of: Callable[[RankGroup], DeviceHeap], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the driver says of it."""
    monkeypatch.setattr(Buffers, "get_buffer", lambda self, place, shape, dtype, offset: torch.zeros(shape, dtype=dtype))
    mine, other = rank_groups()
    with pytest.raises(ValueError, match="the GPUs of ranks 0 and 1 do not reach each other's memory"):
        heap_of(mine).allocate(2048)
    with pytest.raises(PeerLost, match="do not reach"):
        other.check_peers()


def test_a_tensor_is_found_in_its_piece_alone(heap_of: Callable[[RankGroup], DeviceHeap]) -> None:
    heap = heap_of(rank_groups(1)[0])
    one, two = heap.allocate(2048), heap.allocate(2048)
    part = two.local[64:96]
    assert one.find(part) is None
    found = two.find(part)
    assert found is not None
    assert (found.piece, found.offset) == (two.number, 64)
    found.by_rank[0].fill_(3)
    assert part.tolist() == [3] * 32
    assert two.find(torch.zeros(4)) is None
    assert two.find(two.local[:0]) is None


def test_a_rank_that_is_interrupted_on_the_way_ends_them_too(
    heap_of: Callable[[RankGroup], DeviceHeap], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(nbytes: int, **_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(symmetric, "empty", interrupted)
    mine, other = rank_groups()
    with pytest.raises(KeyboardInterrupt):
        heap_of(mine).allocate(2048)
    with pytest.raises(PeerLost, match=r"rank 0.*KeyboardInterrupt"):
        other.check_peers()


def test_a_rank_without_memory_ends_the_calls_of_all(torchs: list[str], heap_of: Callable[[RankGroup], DeviceHeap]) -> None:
    full, other = rank_groups()
    torchs.append("full")
    with pytest.raises(torch.OutOfMemoryError):
        heap_of(full).allocate(2048)
    assert torchs == ["full"]
    with pytest.raises(PeerLost, match=r"rank 0.*CUDA out of memory"):
        other.check_peers()
