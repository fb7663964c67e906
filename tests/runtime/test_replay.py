"""Graphs of calls: when one is captured, when it is replayed, and that none outlives the memory that its copies were given."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from weft_log import warned

from weft.compat import streams as driver_module
from weft.compat.streams import Driver
from weft.runtime import replay
from weft.runtime.bindings import Inputs, Outputs
from weft.runtime.replay import Captures, Replays, give_captures, take_captures

PAGE = 256
POOLS = count(1)
_FEW_STEPS = 10


class Memory:
    """A driver's pages of PAGE bytes, each mapped by itself and numbered; what is not in `numbers` it knows nothing of."""

    CUpointer_attribute, cuEventRecord = SimpleNamespace(CU_POINTER_ATTRIBUTE_BUFFER_ID=7), None

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.asked = 0

    def map(self, tensor: torch.Tensor) -> list[int]:
        """Fresh memory behind a tensor; its pages."""
        first, last = tensor.data_ptr() // PAGE, (tensor.data_ptr() + tensor.nbytes - 1) // PAGE
        for page in range(first, last + 1):
            self.numbers[page] = max(self.numbers.values(), default=0) + 1
        return list(range(first, last + 1))

    def cuPointerGetAttribute(self, attribute: int, address: int) -> tuple[int, int | None]:
        assert attribute == 7
        self.asked += 1
        number = self.numbers.get(address // PAGE)
        return (1, None) if number is None else (0, number)

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:
        return 0, address // PAGE * PAGE, PAGE


class Graph:
    """What stands for a captured graph."""

    def __init__(self, log: list[object] | None = None) -> None:
        self.ended, self._log = False, [] if log is None else log

    def capture_begin(self, pool: object, *, capture_error_mode: str) -> None:
        self._log += [capture_error_mode] if pool is None else [pool, capture_error_mode]

    def capture_end(self) -> None:
        self.ended = True
        self._log.append("end")


def _alone() -> torch.Tensor:
    """1000 numbers, on pages that nothing else lies on."""
    room = torch.zeros(1000 + 2 * PAGE // 4)
    first = -room.data_ptr() % PAGE // 4
    return room[first : first + 1000]


def _recorded(enqueue: Callable[[], None], *, pool: object) -> Graph:
    graph = Graph([pool])
    enqueue()
    graph.capture_end()
    return graph


def _all_but_b(inputs: Inputs, outputs: Outputs) -> list[str]:
    return [name for name in (*inputs, *outputs) if name not in replay.ANY_STRIDES]


class Calls:
    """Calls of one program, all with the same tensors: a -> out, by b."""

    def __init__(self, memory: Memory) -> None:
        self.a, self.b, self.out = (_alone() for _ in range(3))
        self.memory, self.captures = memory, 0
        self.pages = {name: memory.map(tensor) for name, tensor in (("a", self.a), ("b", self.b), ("out", self.out))}
        self.replays = Replays(cast(Any, SimpleNamespace(record=_recorded)), self._enqueue, Driver(), None, _all_but_b)

    def _enqueue(self, inputs: Inputs, outputs: Outputs) -> None:
        self.captures += 1

    def graph(self) -> Any:
        """Make a call, and return the graph that is replayed for it, or None if it is enqueued."""
        captured = self.replays.find({"a": [self.a], "b": [self.b]}, {"out": [self.out]})
        return None if captured is None else captured.graph


def private_pool() -> Any:
    """What stands for a pool of torch's allocator. Each has another handle."""
    return SimpleNamespace(id=(next(POOLS), 0))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    memory = Memory()
    monkeypatch.setattr(driver_module, "driver_api", lambda: memory)
    monkeypatch.setattr(replay, "private_pool", private_pool)
    return Calls(memory)


def test_tensors_that_come_again_are_captured_once(calls: Calls) -> None:
    assert calls.graph() is None
    found = calls.graph()
    assert found.ended
    assert [calls.graph() for _ in range(3)] == [found] * 3
    assert calls.captures == 1


@pytest.mark.parametrize("name", ["a", "out"])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_other_memory_at_the_same_address_is_captured_anew(calls: Calls, name: str, place: int) -> None:
    """Also where a part of it was mapped anew alone, as in a segment that can expand."""
    calls.graph()
    for capture in range(1, 6):
        found = calls.graph()
        assert calls.graph() is found
        assert calls.captures == capture
        page = calls.pages[name][place]
        calls.memory.numbers[page] = max(calls.memory.numbers.values()) + 1


def test_memory_that_kernels_alone_touch_is_not_asked_after(calls: Calls) -> None:
    calls.graph()
    found = calls.graph()
    calls.memory.map(calls.b)
    calls.memory.asked = 0
    assert calls.graph() is found
    assert calls.memory.asked == len(calls.pages["a"]) + len(calls.pages["out"])


def test_memory_without_a_number_is_never_replayed(calls: Calls) -> None:
    """As long as it has none."""
    del calls.memory.numbers[calls.pages["a"][1]]
    assert [calls.graph() for _ in range(4)] == [None] * 4
    assert calls.captures == 0
    calls.memory.map(calls.a)
    assert calls.graph() is not None
    del calls.memory.numbers[calls.pages["a"][0]]
    assert calls.graph() is None


def test_a_call_without_a_result_is_not_captured(calls: Calls) -> None:
    """Torch warns of a graph that holds nothing."""
    calls.out = calls.out[:0]
    assert [calls.graph() for _ in range(3)] == [None] * 3
    assert calls.captures == 0


def test_other_tensors_have_graphs_of_their_own(calls: Calls) -> None:
    calls.graph()
    first = calls.graph()
    calls.out, before = torch.zeros(1000), calls.out
    calls.memory.map(calls.out)
    assert calls.graph() is None
    assert calls.graph() is not first
    calls.out = before
    assert calls.graph() is first


class Layers:
    """A program that calls with other tensors in turn. Nothing of them is read. Memory is what a driver knows."""

    def __init__(self, memory: Memory, count: int) -> None:
        self.room = [_alone() for _ in range(count)]
        self.b, self.captures, self.replayed = _alone(), 0, 0
        for tensor in (*self.room, self.b):
            memory.map(tensor)
        self.replays = Replays(cast(Any, SimpleNamespace(record=_recorded)), self._enqueue, Driver(), None, _all_but_b)

    def _enqueue(self, inputs: Inputs, outputs: Outputs) -> None:
        self.captures += 1

    def call(self, number: int) -> None:
        """Call with the tensor of this number as `a` and as the result."""
        before = self.captures
        a = self.room[number]
        found = self.replays.find({"a": [a[:500]], "b": [self.b]}, {"out": [a[500:]]})
        self.replayed += found is not None and self.captures == before

    def most_captures(self) -> float:
        """The captures that the program has been given and has earned."""
        return replay._FIRST_CREDIT + replay._EARNED * self.replayed


def test_addresses_that_never_come_again_are_never_captured(calls: Calls) -> None:
    layers = Layers(calls.memory, 100)
    for number in range(100):
        layers.call(number)
    assert (layers.captures, layers.replayed) == (0, 0)


def test_addresses_that_come_again_now_and_then_are_captured_as_far_as_it_was_earned(calls: Calls) -> None:
    """100 steps of 12 calls, each with one of 400 sets of addresses, so that a set comes again after 33 steps or so."""
    layers, drawn = Layers(calls.memory, 400), random.Random(0)
    for _ in range(100):
        for _ in range(12):
            layers.call(drawn.randrange(400))
    assert 0 < layers.captures <= layers.most_captures()
    assert layers.captures < 1200 / 6


def test_addresses_that_come_again_once_cost_no_more_captures_than_the_first_credit(calls: Calls) -> None:
    """A captured set that is never replayed earns nothing."""
    layers = Layers(calls.memory, 120)
    for number in range(120):
        layers.call(number)
        layers.call(number)
    assert (layers.captures, layers.replayed) == (replay._FIRST_CREDIT, 0)


def test_a_model_of_80_layers_has_all_its_graphs_after_a_few_steps(calls: Calls) -> None:
    """Each layer calls with addresses of its own, which are the same in each step."""
    layers = Layers(calls.memory, 80)
    steps = 0
    while layers.captures < 80 and steps < 20:
        for number in range(80):
            layers.call(number)
        steps += 1
    assert steps <= _FEW_STEPS
    before = layers.replayed
    for number in range(80):
        layers.call(number)
    assert (layers.captures, layers.replayed - before) == (80, 80)


def test_graphs_that_are_replayed_outlive_addresses_that_do_not_come_again(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm call takes its graph without a search by Replays, so the order of their last use is not known."""
    monkeypatch.setattr(replay, "_MAX_SETS", 16)
    layers = Layers(calls.memory, 100)
    for _ in range(2):
        for number in range(4):
            layers.call(number)
    for number in range(4, 100):
        layers.call(number)
    before = layers.replayed
    for number in range(4):
        layers.call(number)
    assert (layers.captures, layers.replayed - before) == (4, 4)
    assert len(layers.replays._seen) <= 16


def test_a_program_has_no_more_graphs_than_so_many(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MAX_SETS", 16)
    layers = Layers(calls.memory, 40)
    for number in range(40):
        layers.replays.credit = 2.0
        layers.call(number)
        layers.call(number)
    assert layers.captures == 40
    assert sum(map(len, layers.replays._by_layout.values())) == 16
    before = layers.replayed
    layers.call(39)
    layers.call(0)
    assert layers.replayed - before == 1


def test_what_is_raised_in_a_capture_is_what_is_told(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that the capture could not end, which follows from it."""

    def raises(inputs: Inputs, outputs: Outputs) -> None:
        raise KeyError("planted")

    def end(graph: Graph) -> None:
        graph.ended = True
        raise RuntimeError("capture: streams are not joined")

    monkeypatch.setattr(Graph, "capture_end", end)
    calls.replays._enqueue = raises
    assert calls.graph() is None
    with pytest.raises(KeyError, match="planted"):
        calls.graph()


def test_what_calls_allocate_on_the_way_lies_in_one_pool_of_their_program(calls: Calls) -> None:
    """Each graph's own would keep 20 MiB and more."""
    other = Calls(calls.memory)
    pools = []
    for of in (calls, other):
        for _ in range(2):
            of.a = _alone()
            calls.memory.map(of.a)
            of.graph()
            pools.append(of.graph()._log[0])
    assert pools[0] == pools[1] != pools[2] == pools[3]


def test_a_lookup_in_other_tables_at_the_same_address_is_another_call(calls: Calls) -> None:
    """No schedule says how many rows tables have, how far apart these lie, and of what type indices are."""
    memory, tables = torch.zeros(4000), torch.zeros(2000, 8)
    indices = memory[:10].view(torch.int32)
    out = torch.zeros(5, 8)

    def key(tables: torch.Tensor, indices: torch.Tensor) -> object:
        inputs, outputs = {"tables": [tables], "indices": [indices]}, {"out": [out]}
        return calls.replays.layout(inputs), replay.addresses_of(inputs, outputs)

    first = key(tables[:1000], indices)
    assert first == key(tables[:1000], memory[:10].view(torch.int32))
    longer = memory[:20].view(torch.int64)
    assert (longer.data_ptr(), longer.numel()) == (indices.data_ptr(), indices.numel())
    assert len({first, key(tables, indices), key(tables[:2000:2], indices), key(tables[:1000], longer)}) == 4


def test_before_each_capture_its_workspace_is_asked_for_from_a_pool_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives workspaces away when asked to; graphs go on using them."""
    log: list[object] = []

    @contextmanager
    def within(name: str, *what: object) -> Iterator[None]:
        log.append((name, *what))
        yield
        log.append(f"no {name}")

    monkeypatch.setattr(replay, "comm_stream", lambda **_: "ours")
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: "pool", raising=False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: within("stream", stream))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: within("pool", pool, device), raising=False)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: log.append("mm"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(log))
    backend = ["native"]
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend[0])
    device = torch.device("cpu")
    captures = Captures(device)
    for loads in (False, True):
        assert captures.record(lambda: log.append("work"), loads=loads).ended  # type: ignore[attr-defined]
    graphs_own = log.copy()
    log.clear()
    captures.record(lambda: log.append("work"), pool=(7, 0))
    assert [each for each in log if each != (7, 0)] == graphs_own[: len(log) - 1]
    assert log[log.index("thread_local") - 1] == (7, 0)
    log[:] = graphs_own
    before, after = [("stream", "ours"), ("pool", "pool", device), "mm", "no pool", "no stream"], ["work", "end", "no stream"]
    stream = ("stream", "ours")
    assert log == [*before, stream, "thread_local", *after, *before, stream, "relaxed", *after]
    log.clear()
    backend[0] = "cudaMallocAsync"
    Captures(device).record(lambda: log.append("work"))
    assert log == [stream, "mm", "no stream", stream, "thread_local", *after]

    def raises() -> None:
        raise KeyError("planted")

    log.clear()
    with pytest.raises(KeyError, match="planted"):
        captures.record(raises)
    assert log == [*before, ("stream", "ours"), "thread_local", "end"]


def test_memory_that_the_allocator_keeps_for_later_is_asked_back_before_a_capture_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a capture it does not do that itself."""
    log: list[str] = []

    def full(enqueue: Callable[[], None], loads: bool, pool: object) -> Graph:
        log.append("record")
        if len(log) < tries:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Graph()

    captures = Captures(torch.device("cpu"))
    monkeypatch.setattr(captures, "_capture", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("empty"))
    tries = 3
    captures.record(lambda: None)
    assert log == ["record", "empty", "record"]
    log.clear()
    tries = 99
    with pytest.raises(torch.OutOfMemoryError):
        captures.record(lambda: None)


def test_without_memory_for_a_graph_calls_go_on_step_by_step(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    calls.graph()
    tried: list[int] = []

    def full(enqueue: Callable[[], None], *, pool: object) -> Graph:
        tried.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(calls.replays._captures, "record", full)
    with warned("no memory for another CUDA graph.*out of memory"):
        assert calls.graph() is None
    assert [calls.graph() for _ in range(3)] == [None] * 3
    assert tried == [1]


def test_groups_share_no_workspace_and_leave_theirs_to_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_IDLE", {})
    device = torch.device("cuda", 0)
    one, other = take_captures(device), take_captures(device)
    assert one is not other
    give_captures(one)
    assert take_captures(device) is one
    assert take_captures(torch.device("cuda", 1)) not in (one, other)
