"""Warm calls: what identifies a call, what a BoundCall does with the driver, when it leaves a call to the slow path, and in how
many Python frames."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from call_frames import MOST_FRAMES, frames_of
from call_walk import walked_when_warm
from single_process_ranks import FakeResources, rank_groups, resources_of

import weft
from weft.comm.control import NUMBERS
from weft.comm.rank_group import RankGroup
from weft.core.errors import PeerLost
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.ops import common, front
from weft.ops.tensor_parallel import _all_gather_matmul
from weft.runtime import bound_call
from weft.runtime.bound_call import BoundCall, Output, RememberedCall, RememberedCalls
from weft.runtime.groups import GROUPS
from weft.runtime.order import MOST_IN_FLIGHT, Exclusive, PendingCall
from weft.runtime.programs import KnownCall
from weft.runtime.replay import CapturedCall
from weft.schedules import build

STREAM, NUMBER = 3, 7


class Group:
    """What stands for a process group of two ranks."""

    group_name = "two"


class Warm:
    """A BoundCall of a program without a GPU. The tensors a and b are those of the call, and `out` is what it allocates."""

    def __init__(self, resources: FakeResources, peer: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resources, self.rank_group, self.peer = resources, resources.rank_group, peer
        self.log: list[str] = []
        self.memory_number, self.stream, self.device = 5, STREAM, 0
        self.a, self.b, self.out = torch.ones(4, 8), torch.ones(8, 3), torch.zeros(8, 3)
        self.graphs: dict[Any, CapturedCall] = {}
        replays = SimpleNamespace(of_layout=lambda layout: self.graphs, earn=lambda: self.log.append("earned"))
        self.memory = Exclusive()
        resources.driver.memory_number = (lambda attribute, address: (0, self.memory_number), 9)
        self.program: Any = SimpleNamespace(
            resources=resources,
            rank_group=self.rank_group,
            driver=resources.driver,
            replays=replays,
            uses=(self.memory,),
            replay_uses=(self.memory,),
            title="the program",
            describe_call=lambda: "a flag",
            last_used=0,
            ragged=None,
        )
        monkeypatch.setattr(bound_call, "capturing", lambda: False)
        monkeypatch.setattr(bound_call, "current_device", lambda: self.device)
        monkeypatch.setattr(bound_call, "raw_stream", lambda index: self.stream)
        monkeypatch.setattr(bound_call, "replay_graph", lambda graph: self.log.append(graph))
        self.known = KnownCall(number=NUMBER, program=self.program)
        self.bound = BoundCall(
            self.known, self.program, (0, 1), (), [Output(lambda: self.outs[0], self.out, self.out.shape, True)]
        )
        self.outs = [self.out]
        self.capture()

    def capture(self) -> None:
        """Let there be a graph for a, b and the present `out`."""
        addresses = (self.a.data_ptr(), self.b.data_ptr(), self.outs[0].data_ptr())
        self.graphs[addresses] = CapturedCall(cast(Any, "replayed"), ((self.a.data_ptr(), 5),))

    def call(self) -> list[torch.Tensor] | None:
        return self.bound([self.a, self.b])

    def replays(self) -> bool:
        """Whether a call is replayed."""
        before = self.log.count("replayed")
        made = self.call()
        assert (made is not None) == (self.log.count("replayed") == before + 1)
        return made is not None


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Warm]:
    mine, peer = rank_groups()
    resources = resources_of(mine, monkeypatch)
    yield Warm(resources, peer, monkeypatch)
    for call in resources.watchdog.pending:
        resources.ended(call)
    resources.close()


def test_a_warm_call_logs_its_number_and_is_watched(warm: Warm) -> None:
    (out,) = warm.call() or []
    assert out is warm.out
    assert warm.log == ["replayed", "earned"]
    control = warm.rank_group._control[0]
    assert (control.entered, control.number_of(1)) == (1, NUMBER)
    (call,) = warm.resources.watchdog.pending
    assert (call.what, call.stream, call.enqueued, warm.memory.last) == ("the program", STREAM, True, call)
    assert not call.begun.reached
    assert not call.done.reached
    assert warm.program.last_used == 1
    assert control.number_of(1) < 5 * NUMBERS  # type: ignore[operator]


def test_what_a_warm_call_returned_is_nan_after_a_failure(warm: Warm) -> None:
    warm.call()
    (call,) = warm.resources.watchdog.pending
    filled: list[tuple[int, int]] = []
    warm.resources.order.invalidate(call, 9, lambda address, nbytes: filled.append((address, nbytes)))
    assert filled == [(warm.out.data_ptr(), warm.out.nbytes)]
    assert warm.resources.driver.log == [("wait", 9, call.done)]


def test_a_failed_peer_is_noticed_by_the_call_that_it_may_have_spoilt(warm: Warm) -> None:
    warm.call()
    warm.peer.broken = None
    warm.resources.watchdog._stop.set()
    warm.resources.watchdog._thread.join()
    warm.peer.fail(MemoryError("planted"))
    with pytest.raises(PeerLost, match="planted"):
        warm.call()
    assert warm.rank_group._raised, "weft.close need not raise it again"
    assert not warm.replays(), "the slow path raises what a failed group raises"


@pytest.mark.parametrize(
    "changed",
    [
        lambda warm: setattr(warm, "a", torch.ones(4, 8)),
        lambda warm: setattr(warm, "memory_number", 6),
        lambda warm: setattr(warm, "device", 1),
        lambda warm: setattr(warm.rank_group, "broken", PeerLost("planted")),
        lambda warm: warm.resources.order.lock.acquire(),
        lambda warm: warm.graphs.clear(),
        lambda warm: setattr(warm.known, "forgotten", True),
    ],
    ids=[
        "other addresses",
        "other memory at an address",
        "another device",
        "a failed group",
        "a held lock",
        "closed",
        "forgotten",
    ],
)
def test_what_is_left_to_the_slow_path(warm: Warm, changed: Callable[[Warm], object]) -> None:
    assert warm.replays()
    changed(warm)
    assert not warm.replays()
    assert warm.rank_group.calls == 1, "nothing was logged"
    if warm.resources.order.lock.locked():
        warm.resources.order.lock.release()
    warm.rank_group.broken = None


class Straight:
    """What stands for the launches of a call without a graph."""

    def __init__(self, warm: Warm) -> None:
        self.warm, self.issued = warm, list[list[torch.Tensor]]()

    def issue(self, matrices: list[torch.Tensor], stream: int) -> None:
        (*_, call) = self.warm.resources.watchdog.pending
        assert (call.stream, call.enqueued, self.warm.resources.order.lock.locked()) == (stream, False, True)
        self.issued.append(matrices)


@pytest.fixture
def straight(warm: Warm) -> Straight:
    """The calls of `warm` have no graph, and none is wanted."""
    warm.graphs.clear()
    warm.program.replays.wants = lambda layout, addresses: False
    warm.bound._straight = found = cast(Any, Straight(warm))
    return cast(Straight, found)


def test_a_call_without_a_graph_is_enqueued_in_the_same_way(warm: Warm, straight: Straight) -> None:
    (out,) = warm.call() or []
    assert out is warm.out
    (matrices,) = straight.issued
    assert all(found is given for found, given in zip(matrices, (warm.a, warm.b, warm.out), strict=True))
    (call,) = warm.resources.watchdog.pending
    assert (call.enqueued, call.done.reached, warm.memory.last) == (True, False, call)
    assert (warm.rank_group.calls, warm.program.last_used, warm.log) == (1, 1, [])


@pytest.mark.usefixtures("straight")
def test_a_call_without_a_graph_on_another_stream_comes_after_the_last_one(warm: Warm) -> None:
    warm.call()
    first: PendingCall = warm.resources.watchdog.pending[0]
    warm.stream = STREAM + 1
    warm.call()
    assert warm.resources.driver.log == [("wait", STREAM + 1, first.done)]


def test_addresses_that_should_be_captured_are_left_to_the_slow_path(warm: Warm, straight: Straight) -> None:
    asked: list[Any] = []
    warm.program.replays.wants = lambda layout, addresses: asked.append(addresses) or True
    assert warm.call() is None
    assert asked == [(warm.a.data_ptr(), warm.b.data_ptr(), warm.out.data_ptr())]
    assert (straight.issued, warm.rank_group.calls) == ([], 0)


def test_a_tensor_that_is_not_aligned_is_left_to_the_slow_path(warm: Warm, straight: Straight) -> None:
    warm.a = torch.ones(33)[1:].view(4, 8)
    assert warm.call() is None
    assert (straight.issued, warm.rank_group.calls) == ([], 0)


def test_a_forgotten_call_is_not_enqueued(warm: Warm, straight: Straight) -> None:
    """Its program may have been closed, and then others have its memory."""
    warm.known.forgotten = True
    assert warm.call() is None
    assert (straight.issued, warm.rank_group.calls) == ([], 0)
    assert not warm.bound.makes(KnownCall(number=NUMBER, program=warm.program)), "the next call gets another BoundCall"


def test_a_tensor_whose_address_is_in_a_table_must_not_move(warm: Warm, straight: Straight) -> None:
    warm.bound._fixed = ((1, warm.b.data_ptr()),)
    assert warm.call() == [warm.out]
    warm.b = torch.ones(8, 3)
    assert warm.call() is None
    assert (len(straight.issued), warm.rank_group.calls) == (1, 1), "nothing was logged"


def test_calls_with_tables_at_several_addresses_are_remembered_side_by_side(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = Group()
    monkeypatch.setattr(bound_call, "LIVING_GROUPS", [group])
    table, others = RememberedCalls(), [torch.ones(8, 3), torch.ones(8, 3)]
    for b in (warm.b, others[0]):
        bound = copy(warm.bound)
        bound._fixed = ((1, b.data_ptr()),)
        table.add(("key",), [warm.a, b], RememberedCall(group, bound))
    found = [table.get(("key",), [warm.a, b]) for b in (warm.b, *others)]
    assert [one and one.bound and one.bound.fixed for one in found] == [
        [(1, warm.b.data_ptr())],
        [(1, others[0].data_ptr())],
        None,
    ]


def test_a_result_that_peers_can_write_is_left_to_the_slow_path(warm: Warm) -> None:
    """Its call has another program: without staging memory, and without a copy."""
    warm.bound._written, reached = (1,), [warm.b]
    warm.bound._place_in_symmetric_memory = lambda tensor: "there" if any(tensor is one for one in reached) else None
    assert not warm.replays()
    assert warm.rank_group.calls == 0
    reached.clear()
    assert warm.replays()


def test_an_error_that_a_call_with_splits_has_error_is_left_to_the_slow_path(warm: Warm) -> None:
    own, other = SimpleNamespace(has_error=False), SimpleNamespace(has_error=False)
    warm.bound._ragged = cast(Any, [own, other])
    assert warm.replays()
    other.has_error = True
    assert not warm.replays()
    assert warm.rank_group.calls == 1, "nothing was logged"


def test_a_graph_of_other_memory_is_captured_anew_if_that_was_earned(warm: Warm, straight: Straight) -> None:
    warm.capture()
    warm.memory_number = 6
    warm.program.replays.wants = lambda layout, addresses: True
    assert (warm.call(), straight.issued) == (None, [])
    warm.program.replays.wants = lambda layout, addresses: False
    assert warm.call() == [warm.out]
    assert (len(straight.issued), warm.log) == (1, [])


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_call_that_raises_while_it_is_enqueued_fails_the_group(
    warm: Warm, straight: Straight, monkeypatch: pytest.MonkeyPatch, replays: bool, error: type[BaseException]
) -> None:
    """Peers wait for what was not enqueued. The call has an end: its program closes only after its lanes were released."""

    def raises(*_: object) -> None:
        raise error("planted")

    warm.resources.watchdog._stop.set()
    warm.resources.watchdog._thread.join()
    straight.issue = raises  # type: ignore[method-assign]
    monkeypatch.setattr(bound_call, "replay_graph", raises)
    if replays:
        warm.capture()
    with pytest.raises(error, match="planted"):
        warm.call()
    (call,) = warm.resources.watchdog.pending
    assert (call.enqueued, call.done.reached) == (True, False)
    assert not warm.resources.order.lock.locked()
    assert isinstance(warm.rank_group.broken, error)
    assert warm.rank_group._raised
    with pytest.raises(PeerLost, match="planted"):
        warm.peer.check_peers()


def test_a_captured_call_is_left_to_the_slow_path(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_call, "capturing", lambda: True)
    assert not warm.replays()


def test_no_more_calls_are_in_flight_than_a_stream_takes(warm: Warm) -> None:
    for _ in range(MOST_IN_FLIGHT):
        assert warm.replays()
    assert not warm.replays()
    for call in warm.resources.watchdog.pending:
        warm.resources.ended(call)
    assert warm.replays()


def test_a_warm_call_on_another_stream_comes_after_the_last_one(warm: Warm) -> None:
    warm.call()
    first: PendingCall = warm.resources.watchdog.pending[0]
    warm.stream = STREAM + 1
    warm.call()
    assert warm.resources.driver.log == [("wait", STREAM + 1, first.done)]


def _remember(warm: Warm, monkeypatch: pytest.MonkeyPatch, *, compared: object = None, values: Sequence[Schedule] = ()) -> Any:
    """Let weft.all_gather_matmul(a, b) be a warm call, and return its process group.

    compared: the call's argument `schedule`, if it has one. values: the Schedule values that the first call had.
    """
    group: Any = Group()
    monkeypatch.setattr(bound_call, "LIVING_GROUPS", [group])
    function: Any = weft.all_gather_matmul
    options = {} if compared is None else {"schedule": compared}
    tensors: list[torch.Tensor] = []
    identity, _ = GROUPS.remembered.find([function.__wrapped__, 2, *options], [warm.a, warm.b, *options.values()], tensors)
    assert identity is not None
    request = front.OperatorRequest(_all_gather_matmul, ((-1, -1), [0, 1]), (), None, after=lambda results: results[0])
    GROUPS.remembered.add(identity, tensors, RememberedCall(group, warm.bound, (0,), values, request))
    return group


@pytest.fixture
def forgotten() -> Iterator[None]:
    """The calls of the group of these tests are forgotten at the end."""
    yield
    GROUPS.remembered.forget("two")


@pytest.mark.usefixtures("forgotten")
def test_a_warm_call_takes_few_frames(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    group = _remember(warm, monkeypatch)
    monkeypatch.setattr(common, "check_operands", lambda *_, **__: pytest.fail("it took the slow path"))
    found: list[torch.Tensor] = []
    frames = frames_of(lambda: found.append(weft.all_gather_matmul(warm.a, warm.b)))
    assert found == [warm.out]
    assert len(frames) <= MOST_FRAMES, frames
    named = [(file, name.partition(".<locals>")[0]) for file, name in frames if not name.endswith("<listcomp>")]
    assert named == walked_when_warm()
    assert group


@pytest.mark.usefixtures("forgotten")
def test_a_call_that_is_remembered_anew_is_one_of_the_same_group(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    group = _remember(warm, monkeypatch)
    warm.graphs.clear()
    monkeypatch.setattr(front, "_run", lambda request, *_: request.group)
    found: Any = weft.all_gather_matmul(warm.a, warm.b)
    assert found is group


@pytest.mark.usefixtures("forgotten")
def test_a_call_with_another_schedule_at_the_same_address_is_another_call(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are compared by the addresses of their Schedule values, and a new one may get the address of a dead one."""
    value = build(Problem(op="all_gather_matmul", m=8, n=3, k=8, world_size=2, dtype="float32"), "shard_p2p")
    group = _remember(warm, monkeypatch, compared=value, values=[value])
    assert weft.all_gather_matmul(warm.a, warm.b, schedule=value) is warm.out
    dead = dataclasses.replace(value)
    group = _remember(warm, monkeypatch, compared=value, values=[dead])
    del dead
    with pytest.raises(ValueError, match="group"):  # the slow path has no process group here
        weft.all_gather_matmul(warm.a, warm.b, schedule=value)
    assert warm.rank_group.calls == 1
    assert group


class Remembered:
    """The calls of one function that a table remembers. They are of a living group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._group: Any = Group()
        monkeypatch.setattr(bound_call, "LIVING_GROUPS", [self._group])
        self._table = RememberedCalls()

    def add(self, *values: object) -> None:
        tensors: list[torch.Tensor] = []
        identity, _ = self._table.find([], [*values], tensors)
        if identity is not None:
            self._table.add(identity, tensors, RememberedCall(self._group))

    def has(self, *values: object) -> bool:
        return self._table.find([], [*values], [])[1] is not None


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> Remembered:
    return Remembered(monkeypatch)


def test_calls_are_the_same_only_if_all_that_decides_them_is(remembered: Remembered) -> None:
    a = torch.ones(4, 6)
    remembered.add(a, [torch.ones(6, 2), torch.ones(6, 2)], None, "auto", 2)
    assert remembered.has(torch.zeros(4, 6), [torch.ones(6, 2), torch.ones(6, 2)], None, "auto", 2)
    for other in (
        (torch.ones(6, 4).t(), [torch.ones(6, 2), torch.ones(6, 2)], None, "auto", 2),
        (a, [torch.ones(6, 2), torch.ones(2, 6).t()], None, "auto", 2),
        (a.half(), [torch.ones(6, 2), torch.ones(6, 2)], None, "auto", 2),
        (a, [torch.ones(6, 2), torch.ones(6, 2, dtype=torch.float64)], None, "auto", 2),
        (a.to("meta"), [torch.ones(6, 2), torch.ones(6, 2)], None, "auto", 2),
        (a, [torch.ones(6, 2, requires_grad=True), torch.ones(6, 2)], None, "auto", 2),
        (a, [torch.ones(6, 2), torch._neg_view(torch.ones(6, 2))], None, "auto", 2),
        (a, [torch.ones(6, 2)], None, "auto", 2),
        ([torch.ones(6, 2), torch.ones(6, 2)], a, None, "auto", 2),
        (a, [torch.ones(6, 2), torch.ones(6, 2)], None, "planned", 2),
        (a, [torch.ones(6, 2), torch.ones(6, 2)], None, "auto", 2.0),
        (a, [torch.ones(6, 2), torch.ones(6, 2)], 2, "auto", None),
    ):
        assert not remembered.has(*other)
    with torch.no_grad():
        assert not remembered.has(a, [torch.ones(6, 2), torch.ones(6, 2)], None, "auto", 2)
    with torch.autocast("cpu"):
        assert not remembered.has(a, [torch.ones(6, 2), torch.ones(6, 2)], None, "auto", 2)
    with torch.inference_mode():
        assert not remembered.has(a, [torch.ones(6, 2), torch.ones(6, 2)], None, "auto", 2)


def test_calls_with_values_of_enumerations_are_remembered(remembered: Remembered) -> None:
    a, scaling = torch.ones(3), torch.nn.functional.ScalingType
    for one, other in (
        (dist.ReduceOp.SUM, dist.ReduceOp.AVG),
        (scaling.RowWise, scaling.TensorWise),
    ):
        remembered.add(a, one)
        assert remembered.has(torch.zeros(3), one)
        assert not remembered.has(a, other)


def test_layouts_of_one_call_are_told_apart(remembered: Remembered) -> None:
    factors = [torch.ones(6, columns) for columns in (2, 3, 4)]
    for factor in factors[:2]:
        remembered.add(torch.ones(4, 6), factor)
    assert [remembered.has(torch.ones(4, 6), factor) for factor in factors] == [True, True, False]


def test_the_last_of_two_equal_calls_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = Group()
    monkeypatch.setattr(bound_call, "LIVING_GROUPS", [group])
    table, calls = RememberedCalls(), [RememberedCall(group) for _ in range(2)]
    for call in calls:
        table.add(("key",), [torch.ones(2)], call)
    assert table.get(("key",), [torch.zeros(2)]) is calls[1]


def test_settings_of_torch_and_of_the_environment_count(remembered: Remembered, monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.ones(4, 6)
    remembered.add(a)
    monkeypatch.setenv("WEFT_SCHEDULE", "sequential")
    assert not remembered.has(a)
    remembered.add(a)
    torch.use_deterministic_algorithms(True)
    try:
        assert not remembered.has(a)
    finally:
        torch.use_deterministic_algorithms(False)
    assert remembered.has(a)


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2)]),
        torch._neg_view(torch.ones(3)),
        {"a": 1},
        [object()],
    ],
    ids=["sparse", "nested", "negated", "a dictionary", "an object in a list"],
)
def test_what_cannot_be_compared_is_not_remembered(remembered: Remembered, value: object) -> None:
    for values in ((torch.ones(3), value), (value, torch.ones(3))):
        remembered.add(*values)
        assert not remembered.has(*values)


def test_calls_that_torch_intercepts_are_not_remembered(remembered: Remembered) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    a = torch.ones(3)
    with Mode():
        remembered.add(a)
        assert not remembered.has(a)
    remembered.add(a)
    assert remembered.has(a)
    with Mode():
        assert not remembered.has(a)
    with torch.overrides.BaseTorchFunctionMode():
        assert not remembered.has(a)
    found: list[bool] = []
    torch.func.vmap(lambda x: (found.append(remembered.has(a)), x)[1])(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        found.append(remembered.has(a))
    torch.jit.trace(lambda x: (found.append(remembered.has(a)), x + 1)[1], torch.ones(2), check_trace=False)
    assert not any(found)
    assert len(found) == 3
