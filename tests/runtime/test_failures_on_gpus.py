"""How failures end on GPUs, without one: what is logged, raised, released, made invalid and given back, whatever goes wrong.

The group is that of two ranks in one process; the device is one that a test drives (tests/lone_ranks.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from single_process_ranks import FakeResources, FakeStream, rank_groups, resources_of, wait_for

from weft.comm import symmetric_heap
from weft.comm.control import NOTIFIED
from weft.comm.rank_group import RankGroup
from weft.core.errors import PeerLost, WaitTimeout, WeftError
from weft.core.problem import Problem
from weft.overlap import collectives
from weft.runtime import cuda_resources, watchdog
from weft.runtime.bound import BoundProgram
from weft.runtime.calls import PLAIN, MatmulCall
from weft.runtime.cuda import CudaProgram
from weft.runtime.cuda_resources import LaneStreams
from weft.runtime.groups import GROUPS, GroupState
from weft.runtime.launches import FlagOperations
from weft.runtime.order import MOST_IN_FLIGHT, Exclusive, PendingCall, memory_of_results
from weft.runtime.programs import KnownCall, Programs
from weft.runtime.watchdog import Watchdog
from weft.schedules import build
from weft.tools.requirements import check_environment

STREAM, LONG_S = 3, 60.0  # nobody waits for so long, unless something is wrong


class Ranks:
    """Rank 0, with a resources, and its peer."""

    def __init__(self, resources: FakeResources, peer: RankGroup) -> None:
        self.resources, self.rank_group, self.peer = resources, resources.rank_group, peer

    def call(
        self, *, begun: bool = True, stuck: str = "a flag", rehearses: bool = False, out: torch.Tensor | None = None
    ) -> PendingCall:
        """One that is enqueued, and waits on the device. out: what it returns."""
        self.resources.order.await_room(self.rank_group, lambda: stuck)
        call = self.begin(lambda: stuck, rehearses=rehearses, out=out)
        if begun:
            self.resources.begun(call)
        self.resources.order.end(call)
        self.resources.watchdog.raise_if_failed()
        return call

    def begin(self, describe: Callable[[], str], *, rehearses: bool = False, out: torch.Tensor | None = None) -> PendingCall:
        """One that is not enqueued completely yet."""
        call = PendingCall.of("a call", describe, STREAM, rehearses=rehearses)
        call.results = tuple(memory_of_results(out))
        return self.resources.order.begin(call, self.resources.watchdog.pending)

    def peer_fails(self) -> None:
        self.peer.fail(MemoryError("planted"))

    def failed(self) -> bool:
        """Whether the watch has ended what it does at a failure."""
        return wait_for(lambda: self.rank_group.broken is not None and not self.resources.watchdog.watching)

    def raised_after(self, strike: Callable[[], object], kind: type[BaseException], match: str) -> None:
        """After something has happened, the next call, and weft.synchronize, raise this."""
        strike()
        assert self.failed()
        for call in (
            self.rank_group.check_usable,
            self.resources.watchdog.synchronize,
            lambda: self.rank_group.check_peers(may_leave=True),
        ):
            with pytest.raises(kind, match=match):
                call()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(watchdog, "_NOTIFIED_S", 0.05)
    monkeypatch.setattr(watchdog, "_ASK_S", LONG_S)
    mine, peer = rank_groups()
    resources = resources_of(mine, monkeypatch)
    yield Ranks(resources, peer)
    resources.close()


@pytest.mark.parametrize("begun", [True, False])
def test_who_waits_is_told_whether_the_device_has_come_to_the_call_or_not(ranks: Ranks, begun: bool) -> None:
    """A call behind other work of the caller's would begin later, and find all flags raised: it is invalid, too."""
    out = torch.ones(4, 3)
    ranks.call(begun=begun, out=out)
    ranks.raised_after(ranks.peer_fails, PeerLost, "rank 1 failed: planted")
    assert bool(out.isnan().all())


def test_what_calls_returned_is_nan_once_and_no_memory_of_others(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of a tensor, what the caller has dropped, integers; and a call that has ended. One line is logged."""
    # On busy cores the watchdog may be held up, and then doubts the call that has ended.
    monkeypatch.setattr(Watchdog, "_find_doubtful_calls", lambda self: ())
    whole, ended, whole_numbers, dropped = torch.ones(4, 3), torch.ones(3), torch.ones(3, dtype=torch.int32), torch.ones(3)
    ranks.resources.ended(ranks.call(out=ended))
    ranks.call(out=whole[1:3])
    ranks.call(out=whole_numbers)
    ranks.call(out=dropped)
    ranks.begin(lambda: "a flag", out=ended)
    del dropped
    ranks.raised_after(ranks.peer_fails, PeerLost, "planted")
    assert whole.isnan().sum(1).tolist() == [0, 3, 3, 0]
    assert bool((ended == 1).all())
    assert bool((whole_numbers == 1).all())
    fills = [entry for entry in ranks.resources.driver.log if entry[0] in ("wait", "fill")]
    assert [entry[0] for entry in fills] == ["wait", "fill", "wait"]
    (line,) = [record for record in caplog.records if record.name == "weft"]
    assert (line.levelname, "planted; meanwhile a flag" in line.getMessage()) == ("ERROR", True)


def test_what_peers_send_is_nan_before_anything_is_released(ranks: Ranks) -> None:
    done: list[str] = []
    ranks.resources.releaser.add(0, lambda: done.append("released"), lambda stream: done.append(f"invalid on {stream}"))
    ranks.call()
    ranks.peer_fails()
    assert wait_for(lambda: "released" in done)
    assert done[0] == "invalid on 7"
    assert done.count("invalid on 7") == 1


def test_nothing_is_released_until_what_peers_send_is_nan(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    releaser, order = ranks.resources.releaser, list[str]()
    looks = iter((False, False, True))

    def written() -> bool:
        order.append("not yet" if not (found := next(looks, True)) else "NaN")
        return found

    monkeypatch.setattr(releaser, "_invalidating", SimpleNamespace(cuda_stream=7, query=written))
    monkeypatch.setattr(watchdog, "_INVALID_S", 30.0)
    releaser.invalidate(())
    assert order == ["not yet", "not yet", "NaN"]


def test_no_thread_is_interrupted(ranks: Ranks) -> None:
    """Whatever the user's thread does, it gets no error out of nowhere."""
    ranks.call()
    ranks.resources.watchdog.captured()
    ranks.peer_fails()
    assert ranks.failed()
    _nothing_for(0.1)


def test_a_process_that_is_to_end_does_so_once_peers_know(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(watchdog, "end_process", lambda: ends.append(ranks.rank_group._control[0].state))
    ranks.resources.watchdog._on_failure = "abort"
    ranks.call()
    ranks.peer_fails()
    assert wait_for(lambda: ends)
    assert ends == [NOTIFIED]


def test_what_is_to_be_done_at_a_failure_is_one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_ON_FAILURE", "ignore")
    with pytest.raises(ValueError, match="WEFT_ON_FAILURE is 'ignore'; use raise or abort"):
        check_environment()


def _nothing_for(seconds: float) -> None:
    """Whatever another thread raises in this one would be raised in here."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(1e-3)


def test_a_call_that_has_ended_is_right(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its peer did afterwards."""
    monkeypatch.setattr(watchdog, "_NOTIFIED_S", LONG_S)
    ticket = ranks.call()
    ranks.resources.ended(ticket)
    ranks.peer_fails()
    ranks.peer.await_notified(0.0)
    assert ranks.failed()
    assert ranks.rank_group.unraised is None, "weft.close has nothing to raise"


def test_a_call_that_ended_while_the_watch_was_held_up_is_in_doubt(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that was stopped: its peers let go of their streams meanwhile, and send what is no result."""
    held, look = threading.Event(), Watchdog._look
    monkeypatch.setattr(Watchdog, "_look", lambda self: held.is_set() or look(self))
    held.set()
    out = torch.ones(3)
    ticket = ranks.call(out=out)
    ranks.peer_fails()
    time.sleep(2 * watchdog._NOTIFIED_S)
    ranks.resources.ended(ticket)
    (call,) = ranks.resources.watchdog.pending
    assert ranks.resources.watchdog._ended_rightly(call, ())
    assert not ranks.resources.watchdog._ended_rightly(call, (call,))
    ranks.raised_after(held.clear, PeerLost, "planted")
    assert bool(out.isnan().all())


def test_a_call_that_is_enqueued_after_the_watch_has_looked_raises_by_itself(ranks: Ranks) -> None:
    """Also where no peer says that it has failed: it may be dead, or merely late."""
    ranks.rank_group.pids[1] = 0
    assert ranks.failed()
    assert not ranks.rank_group.has_failed_peer()
    with pytest.raises(PeerLost, match="died"):
        ranks.call()


def test_a_call_that_stays_too_long_names_what_it_waits_for(ranks: Ranks) -> None:
    ranks.rank_group.timeout_s = 0.05
    ranks.raised_after(lambda: ranks.call(stuck="arrived[1]@0"), WaitTimeout, r"arrived\[1\]@0 after 0.05 s")


def test_a_rehearsal_has_a_bound_too(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.rank_group.timeout_s = 0.05
    call = ranks.call(rehearses=True, stuck="a collective")
    ranks.resources.watchdog._hold_to_bound(call)
    assert 500 < call.deadline - time.monotonic() <= watchdog.FIRST_S
    call.deadline = time.monotonic() - 1
    with pytest.raises(WaitTimeout, match="a collective after 600 s"):
        ranks.resources.watchdog._hold_to_bound(call)


def test_ranks_settle_within_a_bound_and_watch_each_other(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    other = threading.Thread(target=lambda: ranks.peer.agree_on_call("call: settle"))
    other.start()
    ranks.resources.settle()
    other.join()
    monkeypatch.setattr(symmetric_heap, "_SETTLE_S", 0.1)
    ranks.rank_group.timeout_s = 0.05
    with pytest.raises(WaitTimeout, match=r"entered\[1\]@1.* after 0.1 s"):
        ranks.resources.settle()


def test_nccl_collectives_of_no_schedule_are_watched_too(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way home of a gradient: a peer that is lost in it is told, and the communicator is aborted."""
    aborted = threading.Event()
    monkeypatch.setattr(watchdog, "_RELEASED_S", 0.05)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(watchdog, "backend_of", lambda *_: SimpleNamespace(abort=aborted.set))
    ranks.resources.current_stream = lambda: STREAM  # type: ignore[method-assign]
    state = _state(ranks.rank_group, _resources_by_device={torch.device("cuda", 0): ranks.resources})
    assert state.watched("a gradient", "", torch.device("cuda", 0), lambda: 7) == 7
    ranks.resources.begun(ranks.resources.watchdog.pending[0])
    ranks.raised_after(ranks.peer_fails, PeerLost, "meanwhile rank 0: a gradient: perhaps not all ranks have begun it")
    assert aborted.wait(LONG_S)
    with pytest.raises(WeftError, match="has failed"):
        state.watched("a gradient", "", torch.device("cuda", 0), lambda: 7)
    with pytest.raises(WeftError, match="has failed"):
        state.watched("a gradient", "", torch.device("cpu"), lambda: 7)


def test_a_bound_that_kernels_do_not_wait_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="WEFT_TIMEOUT_S is 1800; on GPUs it can be 1000 at most"):
        resources_of(rank_groups(timeout_s=1800.0)[0], monkeypatch)


def test_what_a_collective_uses_is_kept_from_others_also_if_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lanes write on, on a stream for which the allocator of the caller's does not wait."""
    recorded: list[tuple[str, object]] = []
    a, out = (SimpleNamespace(record_stream=lambda stream, n=name: recorded.append((n, stream))) for name in ("a", "out"))
    stream = SimpleNamespace(wait_stream=lambda other: None)

    def run(group: str, call: object) -> None:
        raise PeerLost("rank 1 died")

    monkeypatch.setattr(GROUPS, "run", run)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(PeerLost):
        collectives._begin_on("world", cast(Any, SimpleNamespace(a=a, out=out, device=None)), cast(Any, stream))
    assert recorded == [("a", stream), ("out", stream)]


def test_what_waits_is_released_after_an_error_of_ones_own(ranks: Ranks) -> None:
    ranks.call()
    released = threading.Event()
    ranks.resources.releaser.add(0, released.set)
    with pytest.raises(MemoryError, match="planted"):
        raise ranks.rank_group.fail(MemoryError("planted"))
    assert wait_for(released.is_set)


def test_nothing_is_captured_once_a_peer_has_failed(ranks: Ranks) -> None:
    ranks.resources.watchdog.captured()
    ranks.peer_fails()
    with pytest.raises(PeerLost):
        ranks.resources.watchdog.captured()


def test_all_programs_are_released_at_once_and_again_when_that_is_done(ranks: Ranks) -> None:
    """Not those alone for which the stream happens to be idle."""
    passes: list[list[int]] = [[], []]

    def release(number: int) -> None:
        passes[number].append(number)
        ranks.resources.rescue.idle = False

    for number in range(2):
        ranks.resources.releaser.add(number, lambda n=number: release(n))  # type: ignore[misc]
    ranks.rank_group.fail(MemoryError("planted"))
    assert wait_for(lambda: passes[1])
    _nothing_for(0.1)
    assert passes == [[0], [1]]
    ranks.resources.rescue.idle = True
    assert wait_for(lambda: passes == [[0, 0], [1, 1]])


def test_a_call_that_does_not_end_when_it_is_released_is_logged(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a thread loads a kernel: CUDA runs nothing that would release it."""
    monkeypatch.setattr(watchdog, "_STUCK_S", 0.2)
    ticket = ranks.begin(lambda: "it waits")
    ranks.resources.begun(ticket)
    ranks.resources.order.end(ticket)
    ranks.peer_fails()
    assert ranks.failed()
    assert wait_for(lambda: "loading a kernel" in caplog.text)
    ranks.resources.ended(ticket)
    _nothing_for(0.5)
    assert caplog.text.count("loading a kernel") == 1


@pytest.mark.parametrize("lost", [True, False])
def test_whatever_goes_wrong_in_the_watch_waits_are_released(ranks: Ranks, lost: bool) -> None:
    """The device is lost, or it is unknown what a call waits for, because its program is closed."""
    released = threading.Event()

    def closed() -> str:
        raise AttributeError("_words")

    ticket = ranks.begin(closed)
    ranks.resources.begun(ticket)
    ranks.resources.order.end(ticket)
    ranks.resources.releaser.add(0, released.set)
    (partial(setattr, ranks.resources.driver, "lost", True) if lost else ranks.peer_fails)()
    assert ranks.failed()
    with pytest.raises(
        WeftError, match="the device is lost" if lost else "it is unknown what a call waits for: AttributeError"
    ):
        ranks.rank_group.check_usable()
    ranks.resources.driver.lost = False
    assert wait_for(released.is_set)
    assert ranks.rank_group.broken


def test_a_driver_that_does_not_answer_keeps_nobody_from_being_told(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a stream is full, a launch waits, and other threads' calls of the driver behind it."""
    monkeypatch.setattr(watchdog, "_ASK_S", 0.05)
    answers = threading.Event()
    ticket = ranks.begin(lambda: str(answers.wait(LONG_S)))
    ranks.resources.begun(ticket)
    ranks.raised_after(ranks.peer_fails, PeerLost, r"planted; meanwhile a call has not ended; the driver does not answer")
    answers.set()


def test_without_a_driver_that_answers_another_groups_call_is_named(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads and two groups, whose ranks make their calls in other orders: each waits behind the other's call."""
    monkeypatch.setattr(watchdog, "_ASK_S", 0.05)
    answers, other = threading.Event(), ranks.resources.order.add(rank_groups()[0])
    ranks.resources.order.end(ranks.resources.order.begin(PendingCall.of("the other's call", str, STREAM + 1), other))
    ticket = ranks.begin(lambda: str(answers.wait(LONG_S)))
    ranks.resources.begun(ticket)
    ranks.raised_after(ranks.peer_fails, PeerLost, "a call has not ended, and on the same GPU the other's call is in flight")
    answers.set()


def test_the_host_is_no_more_calls_ahead_than_a_stream_takes(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [ranks.call() for _ in range(MOST_IN_FLIGHT)]
    began = time.monotonic()
    threading.Timer(0.1, lambda: ranks.resources.ended(calls[0])).start()
    ranks.call()
    assert time.monotonic() - began > 0.05
    waited: list[object] = []
    monkeypatch.setattr(ranks.resources.driver, "wait", lambda stream, event: waited.append(event), raising=False)
    ranks.resources.order.make_stream_wait(STREAM, calls[0])
    assert waited == [], "its event is another call's by now"
    ranks.resources.order.make_stream_wait(STREAM, calls[1])
    assert len(waited) == 1
    ranks.raised_after(ranks.peer_fails, PeerLost, "planted")


def _lost_with(ranks: Ranks) -> None:
    ranks.rank_group.pids[1] = 0
    ranks.resources.driver.lost = True


def test_a_device_that_is_lost_with_a_peer_names_the_peer(ranks: Ranks) -> None:
    """What CUDA says of memory of a process that is gone tells nobody which one."""
    ranks.call()
    _lost_with(ranks)
    assert ranks.failed()
    with pytest.raises(PeerLost, match=r"rank 1 \(process 0\) died"):
        ranks.rank_group.check_usable()
    ranks.resources.driver.lost = False


def _program(resources: FakeResources, **attributes: Any) -> Any:
    """Of a schedule, no more than a test needs."""
    program = CudaProgram.__new__(CudaProgram)
    empty: dict[str, Any] = {"collectives": {}, "_pieces": [], "fused_collectives": {}, "replays": None, "_timer": None}
    empty["memory"] = memory = Exclusive()
    empty |= {"uses": (memory,), "replay_uses": (memory,)}
    empty |= {"_words": None, "_area": None, "spans": None, "streams": LaneStreams(resources, (), frozenset())}
    empty["replayed"] = PendingCall.of("the program", str, 0)
    empty |= {"captured": False, "title": "the program", "_scratch": {}, "_plans": {}}
    empty |= {
        "_rehearsing": False,
        "_loading": False,
        "times_products": True,
        "products": {},
        "schedule": SimpleNamespace(problem=None),
    }
    for name, value in {
        **empty,
        **attributes,
        "resources": resources,
        "driver": resources.driver,
        "rank_group": resources.rank_group,
    }.items():
        setattr(program, name, value)
    return program


def test_a_program_that_closes_is_released_until_its_streams_have_drained(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call waits for a peer that is lost, or was enqueued in part: nothing else would end that wait."""
    given = list[Any]()
    ranks.resources.heap = cast(Any, SimpleNamespace(free=given.append, free_cached=lambda: None))
    ticket = ranks.call()
    program = _closing(ranks.resources, ticket)
    ranks.resources.releaser.add(id(program), lambda: ranks.resources.ended(ticket))
    with pytest.raises(MemoryError):
        raise ranks.rank_group.fail(MemoryError("planted"))
    program.close()
    assert sorted(given) == ["area", "words"]
    assert ranks.resources.releaser._programs == {}


def test_a_program_whose_call_raised_while_it_was_enqueued_closes_once_that_call_is_released(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was enqueued waits for what was not. Memory that is freed before waits for all streams, for good."""
    program = _closing(ranks.resources, None, describe_call=lambda: "")
    ranks.resources.current_stream = lambda: STREAM  # type: ignore[method-assign]
    ended = list[bool]()
    ranks.resources.heap = cast(
        Any,
        SimpleNamespace(free=lambda _: ended.append(calls[0].done.reached), free_cached=lambda: None),
    )
    calls = list[PendingCall]()
    ranks.resources.releaser.add(id(program), lambda: ranks.resources.ended(calls[0]))

    def raises() -> None:
        calls.extend(ranks.resources.watchdog.pending)
        raise MemoryError("planted")

    with pytest.raises(MemoryError), ranks.rank_group.fail_group_on_error():
        program._enqueue(SimpleNamespace(replay=raises), {})
    program.close()
    assert ended == [True, True]


def _closing(resources: FakeResources, last: PendingCall | None, **attributes: Any) -> Any:
    replays = SimpleNamespace(close=lambda: None)
    program = _program(resources, replays=replays, _pieces=["words", "area"], **attributes)
    program.memory.last = last
    return program


@pytest.mark.parametrize("captured", [False, True])
def test_a_program_whose_calls_do_not_end_closes_within_a_bound_and_keeps_its_memory(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, captured: bool
) -> None:
    """Captured: a call may be in a graph that somebody replays, and the device is never idle."""
    given, never = list[Any](), threading.Event()
    ranks.resources.heap = cast(Any, SimpleNamespace(free=given.append, free_cached=lambda: None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: never.wait(LONG_S))
    monkeypatch.setattr(cuda_resources, "FIRST_S", 0.1)
    ticket = ranks.call()
    if captured:
        ranks.resources.ended(ticket)
    program = _closing(ranks.resources, ticket, captured=captured)
    program.close()
    assert given == []
    assert "the program has calls that have not ended" in caplog.text
    never.set()
    ranks.resources.ended(ticket)


def test_a_program_closes_beside_work_of_others(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive that was posted early, say: it ends when its sender comes, who may wait for this rank."""
    given = list[Any]()
    ranks.resources.heap = cast(Any, SimpleNamespace(free=given.append, free_cached=lambda: None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("it waits for all streams"))
    ticket = ranks.call()
    ranks.resources.ended(ticket)
    _closing(ranks.resources, ticket).close()
    assert sorted(given) == ["area", "words"]


def test_a_program_that_cannot_be_bound_gives_its_memory_back(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to the garbage collector, symmetric memory may be freed in a capture, which ends the process."""
    given = list[Any]()
    words = SimpleNamespace(local=torch.zeros(8), addresses=[0, 0])
    heap = SimpleNamespace(allocate=lambda nbytes, reusable: words, free=given.append, free_cached=lambda: None)
    ranks.resources.heap = cast(Any, heap)

    def refuses(program: Any, resources: Any, schedule: Any) -> None:
        program.mailbox(64)
        raise MemoryError("planted")

    monkeypatch.setattr(BoundProgram, "__init__", refuses)
    schedule = build(Problem(op="all_gather_matmul", m=8, n=8, k=8, world_size=2), "shard_p2p")
    with pytest.raises(MemoryError):
        CudaProgram(ranks.resources, schedule)
    assert given == [words, words]


@pytest.mark.parametrize("at", ["copy", "compute"])
def test_lanes_are_joined_whatever_is_raised_between(ranks: Ranks, at: str) -> None:
    """What a lane has yet to write would be other tensors' memory by then."""
    lanes: list[Any] = [SimpleNamespace(name=kind, kind=kind) for kind in ("copy", "blocks", "compute")]
    streams = {"copy": FakeStream(11), "blocks": FakeStream(12)}
    program = _program(ranks.resources, streams=LaneStreams(ranks.resources, lanes, frozenset()))
    ranks.resources._streams = cast(Any, streams)
    ranks.resources.current_stream = lambda: STREAM  # type: ignore[method-assign]

    class Raises:
        def __init__(self, kind: str) -> None:
            self._kind = kind

        def issue(self, call: object, stream: int) -> None:
            if self._kind == at:
                raise KeyError(at)

    runs = [(lane, [Raises(lane.kind)], False) for lane in lanes]
    program.plan_of = lambda bindings: SimpleNamespace(batches=runs)
    with pytest.raises(KeyError, match=at):
        program._issue(None)
    forks = [(stream.cuda_stream, STREAM) for stream in streams.values()]
    assert ranks.resources.driver.log == [*(("after", *fork) for fork in forks), *(("after", *fork[::-1]) for fork in forks)]


def test_signals_aside_follow_what_came_before_and_are_joined(ranks: Ranks) -> None:
    side = FakeStream(13)
    program = _program(ranks.resources)
    ranks.resources._aside = cast(Any, side)
    ranks.resources.current_stream = lambda: STREAM  # type: ignore[method-assign]
    issued: list[tuple[bool, int]] = []
    ranks.resources.words = lambda words, by_kernel: lambda stream: issued.append((by_kernel, stream))  # type: ignore[method-assign]
    where: Any = SimpleNamespace(lane="compute")
    items = [FlagOperations(where=where, words=(), aside=aside, submitter=program.streams) for aside in (False, True)]
    runs = [(SimpleNamespace(name="compute", kind="compute"), items, False)]
    program.plan_of = lambda bindings: SimpleNamespace(batches=runs)
    program._issue(None)
    assert issued == [(True, STREAM), (False, side.cuda_stream)]
    assert ranks.resources.driver.log == [("after", side.cuda_stream, STREAM), ("after", STREAM, side.cuda_stream)]
    runs[0] = (runs[0][0], items[:1], False)
    program._issue(None)
    assert len(ranks.resources.driver.log) == 2, "nothing to join: in a capture that stream would be foreign"


def test_a_call_that_raises_while_it_is_enqueued_is_done_once_drained(ranks: Ranks) -> None:
    program = _program(ranks.resources, describe_call=lambda: "")
    ranks.resources.current_stream = lambda: STREAM  # type: ignore[method-assign]

    def raises() -> None:
        raise KeyError("planted")

    with pytest.raises(KeyError):
        program._enqueue(SimpleNamespace(replay=raises), {})
    call = program.memory.last
    assert not ranks.resources.order.has_ended(call)
    ranks.resources.ended(call)
    assert ranks.resources.order.has_ended(call)


def _state(rank_group: RankGroup, **attributes: Any) -> GroupState:
    state = GroupState.__new__(GroupState)
    Programs.__init__(state, rank_group, {})
    empty: dict[str, Any] = {"_attached": {}, "_resources_by_device": {}, "_side": {}, "handed_out": []}
    for name, value in {**empty, **attributes}.items():
        setattr(state, name, value)
    return state


class Closes:
    def __init__(self, closed: list[Any], *, raises: bool = False) -> None:
        self._closed, self._raises = closed, raises

    def close(self) -> None:
        self._closed.append(self)
        if self._raises:
            raise RuntimeError("the device is lost")


def test_a_group_gives_back_all_it_has_whatever_is_raised(ranks: Ranks) -> None:
    closed: list[Any] = []
    attached, program, other = (Closes(closed, raises=raises) for raises in (False, True, False))
    state = _state(ranks.rank_group, _attached={int: attached})
    state.bound = lambda: [program, other]  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the device is lost"):
        state.close()
    assert closed == [attached, program, other]
    assert ranks.rank_group.broken is not None, "the group is closed, too"


@pytest.mark.parametrize("raised_before", ["", "by the call", "by the next call"])
def test_a_group_that_closes_raises_what_no_call_has(ranks: Ranks, raised_before: str) -> None:
    closed: list[Any] = []
    ranks.call()
    if raised_before == "by the call":
        with pytest.raises(MemoryError), ranks.rank_group.fail_group_on_error():
            raise MemoryError("planted")
    ranks.peer_fails()
    assert ranks.failed()
    if raised_before == "by the next call":
        with pytest.raises(PeerLost):
            ranks.rank_group.check_usable()
    ranks.resources.close = lambda: closed.append(1)  # type: ignore[method-assign]
    state = _state(ranks.rank_group, _resources_by_device={torch.device("cuda", 0): ranks.resources})
    with nullcontext() if raised_before else pytest.raises(PeerLost, match="planted; meanwhile a flag"):
        state.close()
    del ranks.resources.close
    assert closed == [1]


def test_nothing_is_captured_in_a_group_that_has_failed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replays would find all flags raised, and nobody would be told."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(MatmulCall, "key", "known")
    monkeypatch.setattr(MatmulCall, "device", torch.device("cuda", 0))
    call = MatmulCall(op="all_gather_matmul", a=torch.ones(1, 1), bs=[], rows=1, row_multiple=1, schedule="auto")
    state = _state(ranks.rank_group)
    state._known["known"] = KnownCall(number=2, program=cast(Any, None))
    ranks.rank_group.fail(PeerLost("rank 1 died"))
    with pytest.raises(WeftError, match=r"has failed \(rank 1 died\)"):
        state.make_call(call)


def test_a_rank_of_another_node_is_waited_for_too() -> None:
    """What is sent to it counts as much. Its process cannot be looked at: the same number is another one here."""
    mine, far = rank_groups()
    mine.ranks_on_node, mine._starts[1], heard = range(1), 0, []
    mine._relay = cast(Any, SimpleNamespace(publish=lambda: None, refresh=lambda: heard.append(1), silent_s=lambda peer: 0.0))
    mine.fail(MemoryError("planted"))
    began = time.monotonic()
    mine.await_notified(0.2)
    assert time.monotonic() - began >= 0.2
    assert heard
    far.fail(PeerLost("rank 0 failed"))
    far.await_notified(0.0)
    mine.await_notified(LONG_S)
    assert time.monotonic() - began < LONG_S / 2


def test_modes_are_put_back_whatever_is_raised() -> None:
    """Also where one call runs within another."""

    def modes() -> tuple[bool, bool, bool]:
        return torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with torch.autocast("cpu"), torch.inference_mode():
        with suppress(PeerLost), PLAIN:
            with suppress(KeyError), PLAIN:
                assert modes() == (False, False, False)
                raise KeyError("planted")
            assert modes() == (False, False, False)
            raise PeerLost("planted")
        assert modes()[:2] == (True, True)
    with torch.enable_grad(), suppress(PeerLost), PLAIN:
        raise PeerLost("planted")
    assert modes() == (False, False, True)


def test_a_group_that_failed_and_closes_says_that_its_calls_know(ranks: Ranks) -> None:
    ranks.peer_fails()
    began = time.monotonic()
    ranks.peer.close()
    assert ranks.rank_group._control[1].state == NOTIFIED
    ranks.rank_group.await_notified(LONG_S)
    assert time.monotonic() - began < LONG_S / 2
