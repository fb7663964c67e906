"""The order of calls on a GPU: calls that use the same thing come one after the other, and threads enqueue one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
from single_process_ranks import FakeDriver, FakeResources, rank_groups, resources_of

from weft.core.errors import PeerLost, WaitTimeout
from weft.runtime import order as order_module
from weft.runtime.cuda import CudaProgram
from weft.runtime.order import MOST_IN_FLIGHT, Exclusive, Order, PendingCall

FIRST, SECOND = 3, 4
"""Streams."""
STREAM = 5
GROUP, _ = rank_groups()


def _order() -> tuple[Order, FakeDriver]:
    driver = FakeDriver()
    return Order(cast(Any, driver)), driver


def _call(order: Order, stream: int, *uses: Exclusive, ends: bool = False) -> PendingCall:
    """A call that is enqueued. ends: whether the device has ended it, too."""
    call = order.begin(PendingCall.of(f"a call on {stream}", lambda: "", stream), order.add(GROUP), uses)
    order.end(call)
    if ends:
        call.done.reached = True
    return call


def test_a_call_records_its_begin_and_its_end_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with events that an earlier call has used, which are reached until they are recorded again."""
    order, driver = _order()
    recorded: list[tuple[object, int]] = []
    record = driver.record_event
    monkeypatch.setattr(driver, "record_event", lambda event, stream: recorded.append((event, stream)) or record(event, stream))
    events = []
    for stream in (FIRST, SECOND):
        recorded.clear()
        pending = order.add(GROUP)
        call = order.begin(PendingCall.of("a call", lambda: "", stream), pending)
        assert (recorded, order.is_running(call)) == ([(call.begun, stream)], False)
        call.begun.reached = True
        assert order.is_running(call)
        order.end(call)
        assert recorded[1:] == [(call.done, stream)]
        assert not order.has_ended(call)
        call.done.reached = True
        assert order.drop_ended(pending)
        events.append((call.begun, call.done))
    assert events[0] == events[1]


def test_a_program_on_another_stream_waits_for_the_one_before() -> None:
    order, driver = _order()
    calls = [_call(order, stream, order.sms) for stream in (7, 7, 0, 0, 7)]
    assert driver.log == [("wait", 0, calls[1].done), ("wait", 7, calls[3].done)]


def test_a_program_waits_for_nothing_that_is_known_to_have_ended() -> None:
    """The event of such a call may belong to another one by then."""
    order, driver = _order()
    _call(order, 7, order.sms, ends=True)
    assert order.drop_ended(order.add(GROUP))
    _call(order, 0, order.sms)
    assert driver.log == []


def test_a_thread_that_cannot_enqueue_gives_the_lock_back() -> None:
    order, _ = _order()
    with pytest.raises(MemoryError), order.held(GROUP):
        raise MemoryError
    assert not order.lock.locked()


def test_ended_calls_are_found_by_few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream ends its calls in order, so one query answers for all earlier calls of a stream."""
    order, driver = _order()
    calls = [_call(order, STREAM, ends=number < 50) for number in range(MOST_IN_FLIGHT)]
    asked: list[object] = []
    monkeypatch.setattr(driver, "reached", lambda event: asked.append(event) or event.reached)
    pending = order.add(GROUP)
    assert order.drop_ended(pending)
    assert list(pending) == calls[50:]
    assert len(asked) < 16
    other = _call(order, STREAM + 1, ends=True)
    assert not order.drop_ended(pending), "the oldest call has not ended"
    for call in calls[50:]:
        call.done.reached = True
    assert order.drop_ended(pending)
    assert list(pending) == []
    assert other.ended


def test_a_call_that_is_not_enqueued_yet_has_not_ended() -> None:
    order, _ = _order()
    pending = order.add(GROUP)
    call = order.begin(PendingCall.of("a call", lambda: "", STREAM), pending)
    call.done.reached = True
    assert not order.drop_ended(pending)
    order.end(call)
    call.done.reached = True
    assert order.drop_ended(pending)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeResources]]:
    """Of two groups on one GPU."""
    shared = Order(cast(Any, FakeDriver()))
    found = [resources_of(rank_groups()[0], monkeypatch, shared) for _ in range(2)]
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
    program.memory = Exclusive()
    program.uses = program.replay_uses = (program.memory, resources.order.sms)
    program.title = f"the program on stream {stream}"
    resources.current_stream = lambda: stream  # type: ignore[method-assign]
    program._enqueue(cast(Any, Graph(replay)), {})
    return cast(CudaProgram, program)


def test_a_thread_takes_its_turn_and_enqueues_in_one_step(devices: list[FakeResources]) -> None:
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
    log = first.driver.log
    other = threading.Thread(target=_enqueues, args=(second, SECOND, lambda: order.append(list(log))))
    other.start()
    other.join(0.2)
    assert order == []
    assert log == []
    goes_on.set()
    one.join(60)
    other.join(60)
    assert order[0] == "first"
    assert [(kind, stream) for kind, stream, _ in order[1]] == [("wait", SECOND)]  # type: ignore[attr-defined]


def test_a_wait_for_another_thread_is_bounded_and_watches_peers() -> None:
    (order, _), (mine, peer) = _order(), rank_groups(timeout_s=0.1)
    with order.held(GROUP), pytest.raises(WaitTimeout, match="rank 0: another thread"), order.held(mine):
        pass
    (order, _), (mine, peer) = _order(), rank_groups(timeout_s=60.0)
    peer._control = [*mine._control]
    mine._control[1].fail("planted")
    with order.held(GROUP), pytest.raises(PeerLost, match="planted"), order.held(mine):
        pass


def test_an_error_at_the_bound_names_what_another_group_has_in_flight(devices: list[FakeResources]) -> None:
    first, second = devices

    def said() -> str:
        return first.order.others(first.rank_group, "mine")

    _enqueues(first, FIRST, lambda: None)
    _enqueues(second, SECOND, lambda: None)
    assert said().startswith("mine has not ended")
    assert f"the program on stream {SECOND}" in said()
    assert f"the program on stream {FIRST}" not in said()
    second.ended(second.watchdog.pending[0])
    assert said() == ""


def test_programs_that_need_no_sm_are_not_ordered() -> None:
    order, driver = _order()
    for stream, uses in ((7, (order.sms,)), (0, ()), (7, (order.sms,))):
        _call(order, stream, *uses)
    assert driver.log == []


def test_captured_programs_come_one_after_the_other_in_each_capture() -> None:
    """On branches that a graph joins later; another thread captures at the same time."""
    (order, driver), calls = _order(), list[int]()
    program = Exclusive()
    for stream in (FIRST, 100 + FIRST, SECOND, 100 + FIRST, FIRST):
        order.capture(stream, GROUP, (order.sms, program), partial(calls.append, stream))
    assert calls == [FIRST, 100 + FIRST, SECOND, 100 + FIRST, FIRST]
    assert [(kind, stream) for kind, stream, _ in driver.log] == [("wait", SECOND)] * 2 + [("wait", FIRST)] * 2


def test_a_thread_that_loads_kernels_has_the_gpu_to_itself(devices: list[FakeResources]) -> None:
    """The calls of all groups have ended by then, and no other thread is between two launches of a call."""
    first, second = devices
    _enqueues(first, FIRST, lambda: None)
    loads, goes_on = threading.Event(), threading.Event()

    def load() -> None:
        with second.order.alone(second.rank_group):
            loads.set()
            goes_on.wait(60)

    loading = threading.Thread(target=load)
    loading.start()
    assert not loads.wait(0.2)
    first.ended(first.watchdog.pending[0])
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
    first.ended(first.watchdog.pending[-1])


def test_what_one_thread_loads_may_load_more() -> None:
    order, _ = _order()
    with order.alone(GROUP), order.alone(GROUP):
        assert order.lock.locked()
    assert not order.lock.locked()


def test_a_call_that_is_being_enqueued_may_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup may find at a later call that its indices need another kernel."""
    (order, _), (mine, _) = _order(), rank_groups(timeout_s=0.2)
    with order.held(mine):
        with order.alone(mine):
            assert (order.lock.locked(), order._loads) == (True, True), "others wait as long as for a first call"
        assert not order._loads
    assert not order.lock.locked()
    with order.alone(mine):  # the thread that holds nothing takes it again
        assert order.lock.locked()


def test_a_wait_for_calls_before_is_bounded_and_names_them(
    devices: list[FakeResources], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = devices
    monkeypatch.setattr(order_module, "FIRST_S", 0.0)
    _enqueues(first, FIRST, lambda: None)
    second.rank_group.timeout_s = 0.1
    with (
        pytest.raises(WaitTimeout, match=f"the program on stream {FIRST} has not ended"),
        first.order.alone(second.rank_group),
    ):
        pass
    assert not first.order.lock.locked()
    first.ended(first.watchdog.pending[0])
