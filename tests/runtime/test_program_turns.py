"""Programs that wait on SMs take turns: a stream waits for the stream of the program before, and for nothing else; threads
enqueue their programs one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
from single_process_ranks import FakeDriver, FakeResources, rank_groups, resources_of

from weft.core.errors import PeerLost, WaitTimeout
from weft.runtime import turn
from weft.runtime.cuda import CudaProgram
from weft.runtime.turn import Turn

FIRST, SECOND = 3, 4
"""Streams."""
GROUP, _ = rank_groups()


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> list[FakeDriver]:
    """Those that turns have made."""
    found: list[FakeDriver] = []

    def made() -> FakeDriver:
        found.append(FakeDriver())
        return found[-1]

    monkeypatch.setattr(turn, "Driver", made)
    return found


def test_a_program_on_another_stream_waits_for_the_one_before(drivers: list[FakeDriver]) -> None:
    one = Turn()
    for stream in (7, 7, 0, 0, 7):
        with one.taken(stream, GROUP, waits_on_sms=True):
            pass
    assert [driver.log for driver in drivers] == [[("after", 0, 7), ("after", 7, 0)]]


def test_programs_on_one_stream_need_no_driver(drivers: list[FakeDriver]) -> None:
    one = Turn()
    for _ in range(3):
        with one.taken(0, GROUP, waits_on_sms=True):
            pass
    assert drivers == []


def test_a_thread_that_cannot_enqueue_gives_its_turn_back(drivers: list[FakeDriver]) -> None:
    one = Turn()
    with pytest.raises(MemoryError), one.taken(0, GROUP, waits_on_sms=True):
        raise MemoryError
    assert not one._lock.locked()


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeResources]]:
    """Of two groups on one GPU."""
    found = [resources_of(rank_groups()[0], monkeypatch) for _ in range(2)]
    first, second = found
    second.turn = first.turn
    second.turn.add(second.tickets)
    yield found
    for resources in found:
        resources.close()


class Graph:
    def __init__(self, replay: Callable[[], object]) -> None:
        self.replay = replay


def _enqueues(resources: FakeResources, stream: int, replay: Callable[[], object]) -> CudaProgram:
    """A thread's call of a program that waits on SMs."""
    program: Any = CudaProgram.__new__(CudaProgram)
    program.resources, program.rank_group, program.spans, program._rehearsing = resources, resources.rank_group, None, False
    program._waits_on_sms, program._last_stream, program._last_ticket = True, None, 0
    program.title = f"the program on stream {stream}"
    resources.current_stream = lambda: stream  # type: ignore[method-assign]
    program._enqueue(cast(Any, Graph(replay)), {})
    return cast(CudaProgram, program)


def test_a_thread_takes_its_turn_and_enqueues_in_one_step(devices: list[FakeResources], drivers: list[FakeDriver]) -> None:
    """While one thread enqueues, another one does not come between: the order of turns is that on the GPU."""
    first, second = devices
    enqueueing, goes_on = threading.Event(), threading.Event()
    order: list[object] = []

    def slowly() -> None:
        enqueueing.set()
        goes_on.wait(60)
        order.append("first")

    one = threading.Thread(target=_enqueues, args=(first, FIRST, slowly))
    one.start()
    assert enqueueing.wait(60)
    other = threading.Thread(target=_enqueues, args=(second, SECOND, lambda: order.append(list(drivers[0].log))))
    other.start()
    other.join(0.2)
    assert order == []
    assert drivers == []
    goes_on.set()
    one.join(60)
    other.join(60)
    assert order == ["first", [("after", SECOND, FIRST)]]


def test_a_wait_for_another_thread_is_bounded_and_watches_peers() -> None:
    one, (mine, peer) = Turn(), rank_groups(timeout_s=0.1)
    with (
        one.taken(FIRST, GROUP, waits_on_sms=True),
        pytest.raises(WaitTimeout, match="rank 0: another thread"),
        one.taken(FIRST, mine, waits_on_sms=True),
    ):
        pass
    one, (mine, peer) = Turn(), rank_groups(timeout_s=60.0)
    peer._control = [*mine._control]
    mine._control[1].fail("planted")
    with (
        one.taken(FIRST, GROUP, waits_on_sms=True),
        pytest.raises(PeerLost, match="planted"),
        one.taken(FIRST, mine, waits_on_sms=True),
    ):
        pass


def test_an_error_at_the_bound_names_what_another_group_has_in_flight(
    devices: list[FakeResources], drivers: list[FakeDriver]
) -> None:
    first, second = devices

    def said() -> str:
        return first.turn.others(first.tickets, "mine")

    _enqueues(first, FIRST, lambda: None)
    _enqueues(second, SECOND, lambda: None)
    assert said().startswith("mine has not ended")
    assert f"the program on stream {SECOND}" in said()
    assert f"the program on stream {FIRST}" not in said()
    second.ended(1)
    assert said() == ""


def test_programs_that_need_no_sm_are_not_ordered(drivers: list[FakeDriver]) -> None:
    one = Turn()
    for stream, waits in ((7, True), (0, False), (7, True)):
        with one.taken(stream, GROUP, waits_on_sms=waits):
            pass
    assert drivers == []


def test_captured_programs_come_one_after_the_other_in_each_capture(drivers: list[FakeDriver]) -> None:
    """On branches that a graph joins later; another thread captures at the same time."""
    one, order = Turn(), list[int]()
    for stream in (FIRST, 100 + FIRST, SECOND, 100 + FIRST, FIRST):
        one.captured(stream, GROUP, partial(order.append, stream))
    (driver,) = drivers
    assert order == [FIRST, 100 + FIRST, SECOND, 100 + FIRST, FIRST]
    assert [(kind, stream) for kind, stream, _ in driver.log] == [("wait", SECOND), ("wait", FIRST)]


def test_a_thread_that_loads_kernels_has_the_gpu_to_itself(devices: list[FakeResources], drivers: list[FakeDriver]) -> None:
    """The calls of all groups have ended by then, and no other thread is between two launches of a call."""
    first, second = devices
    _enqueues(first, FIRST, lambda: None)
    loads, goes_on = threading.Event(), threading.Event()

    def load() -> None:
        with second.turn.alone(second.rank_group):
            loads.set()
            goes_on.wait(60)

    loading = threading.Thread(target=load)
    loading.start()
    assert not loads.wait(0.2)
    first.ended(1)
    assert loads.wait(60)
    order: list[str] = []
    other = threading.Thread(target=_enqueues, args=(first, FIRST, lambda: order.append("enqueued")))
    other.start()
    other.join(0.2)
    assert order == []
    goes_on.set()
    for thread in (loading, other):
        thread.join(60)
    assert order == ["enqueued"]
    first.ended(2)


def test_what_one_thread_loads_may_load_more() -> None:
    one = Turn()
    with one.alone(GROUP), one.alone(GROUP):
        assert one._lock.locked()
    assert not one._lock.locked()


def test_a_wait_for_calls_before_is_bounded_and_names_them(
    devices: list[FakeResources], drivers: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = devices
    monkeypatch.setattr(turn, "FIRST_S", 0.0)
    _enqueues(first, FIRST, lambda: None)
    second.rank_group.timeout_s = 0.1
    with pytest.raises(WaitTimeout, match=f"the program on stream {FIRST} has not ended"), first.turn.alone(second.rank_group):
        pass
    assert not first.turn._lock.locked()
    first.ended(1)
