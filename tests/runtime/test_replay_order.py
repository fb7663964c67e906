"""What replayed calls hold: cuBLAS's one workspace in turn, and tables of addresses for as long as a graph may hold them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from single_process_ranks import FakeResources, rank_groups, resources_of

from weft.core.problem import Problem
from weft.core.schedule import Flag, Push, Reduce
from weft.runtime import cuda_resources
from weft.runtime.bindings import Bindings, Where
from weft.runtime.cuda import CudaProgram
from weft.runtime.order import Exclusive
from weft.schedules import build

FIRST, SECOND = 3, 4
"""Streams."""


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeResources]]:
    """Of two groups on one GPU."""
    found = [resources_of(rank_groups()[0], monkeypatch) for _ in range(2)]
    yield found
    for resources in found:
        resources.close()


class Graph:
    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def replay(self) -> None:
        self._log.append("replayed")


def _replay(resources: FakeResources, stream: int, *, multiplies: bool = True) -> list[Any]:
    """What a replay puts on its stream."""
    program = CudaProgram.__new__(CudaProgram)
    program.resources, program.spans, program._rehearsing, program._timer = resources, None, False, None
    program.rank_group, program.memory = resources.rank_group, Exclusive()
    program.uses = (program.memory,)
    program.replay_uses = (program.memory, resources.captures.uses) if multiplies else program.uses
    resources.driver.log.clear()
    resources.current_stream = lambda: stream  # type: ignore[method-assign]
    program._enqueue(cast(Any, Graph(resources.driver.log)), {})
    return [entry if isinstance(entry, str) else entry[:2] for entry in resources.driver.log]


def test_replays_that_multiply_take_turns_with_the_workspace(devices: list[FakeResources]) -> None:
    """On one stream they do so anyway. Ranks may call two groups in orders of their own: none waits for another's."""
    one, other = devices
    assert _replay(one, FIRST) == ["replayed"]
    assert _replay(one, FIRST) == ["replayed"]
    assert _replay(one, SECOND) == [("wait", SECOND), "replayed"]
    assert _replay(other, FIRST) == ["replayed"]
    assert _replay(one, FIRST, multiplies=False) == ["replayed"]
    assert _replay(one, FIRST) == [("wait", FIRST), "replayed"]
    for resources in devices:
        for call in resources.watchdog.pending:
            resources.ended(call)


class Capturing:
    """A driver whose streams are in captures."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.captures = {FIRST: 7, SECOND: 7}

    def capture(self, stream: int) -> int:
        return self.captures[stream]

    def event(self) -> str:
        return "event"

    def record(self, event: str, stream: int) -> None:
        self.log.append(("record", stream))

    def wait(self, stream: int, event: str) -> None:
        self.log.append(("wait", stream))

    def forget(self, event: str) -> None:
        self.log.append("forget")


def test_branches_of_one_capture_come_one_after_the_other() -> None:
    driver: Any = Capturing()
    program = Exclusive()

    def calls(*streams: int) -> list[Any]:
        driver.log.clear()
        for stream in streams:
            capture = driver.capture(stream)
            program.come_after(driver, capture, stream)
            driver.log.append(stream)
            program.captured(driver, capture, stream)
        return driver.log

    program.close(driver)
    assert driver.log == []
    assert calls(FIRST, FIRST) == [FIRST, ("record", FIRST)] * 2
    assert calls(SECOND, FIRST) == [
        *(("wait", SECOND), SECOND, ("record", SECOND)),
        *(("wait", FIRST), FIRST, ("record", FIRST)),
    ]
    driver.captures[SECOND] = 8
    assert calls(SECOND) == [SECOND, ("record", SECOND)], "an event of another capture must not be waited for"
    program.close(driver)
    assert driver.log[-1] == "forget"


def test_tables_of_sums_have_no_tensor_of_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table would be made anew for each residual, also while a graph holds the one before. Addends are arguments of the
    kernel, and a sum that has another tensor of the caller's among its sources is none."""
    pytest.importorskip("triton", reason="Triton is not installed")
    problem = Problem(op="matmul_all_reduce", m=8, n=16, k=4, world_size=2, addends=("bias", "residual"))
    from weft.runtime.fused import FusedSum, kernel_of_sum

    given = {"a", "b", "bias", "residual"}
    for name in ("sequential", "shard_p2p", "token_split"):
        schedule = build(problem, name)
        program: Any = SimpleNamespace(schedule=schedule, device=torch.device("cpu"), buffers_of=lambda kind: given)
        summed = [Where(0, lane.name, at, step) for rank, lane, at, step in schedule if rank == 0 and isinstance(step, Reduce)]
        assert summed
        for where in summed:
            step = where.step
            assert isinstance(step, Reduce)
            kernel = kernel_of_sum(program, where, step)
            assert isinstance(kernel, FusedSum)
            assert not {src.buffer for src in kernel._srcs} & given
            first = step.parts[0]
            mixed = replace(first, srcs=(*first.srcs[-1:], *first.srcs[:-1]))
            assert kernel_of_sum(program, where, replace(step, parts=(mixed,))) is None


class Words:
    """Where a program has its flags: each somewhere else."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._places: dict[Flag, int] = {}

    def count_address(self, flag: Flag) -> int:
        return 64 + 4 * self._places.setdefault(flag, len(self._places))


def test_a_push_keeps_every_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each way in which rows lie; of one row, no stride counts."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from weft.runtime import pushes

    monkeypatch.setattr(pushes, "push", lambda tables, **_: used.append(tables))
    used: list[Any] = []
    schedule = build(Problem(op="all_gather_matmul", m=8, n=16, k=77, world_size=2), "direct_store")
    steps = [(lane, at, step) for rank, lane, at, step in schedule if rank == 0 and isinstance(step, Push)]
    (lane, at, step) = steps[0]
    where = Where(0, lane.name, at, step)
    push = pushes.FusedPush(cast(Any, Words()), where, step)
    memory = torch.zeros(1 << 12, dtype=torch.bfloat16)
    memory = memory[-memory.data_ptr() // 2 % 8 :]
    targets = {(part.dst.buffer, part.dst.rank): torch.zeros(8, 77, dtype=torch.bfloat16) for part in step.parts}

    def launch(a: torch.Tensor) -> Any:
        bindings = Bindings()
        bindings.bind("a", 0, a)
        for (buffer, rank), tensor in targets.items():
            bindings.bind(buffer, rank, tensor)
        push.launch(bindings, silent=True, tries=1, sms=1)
        return used[-1]

    first, moved = memory[: 4 * 77].view(4, 77), memory[77 : 5 * 77].view(4, 77)
    assert first.data_ptr() % 16 != moved.data_ptr() % 16
    tables = launch(first)
    assert launch(moved) is not tables
    assert launch(first) is tables


def test_what_a_call_allocates_lies_ready_on_its_stream(devices: list[FakeResources], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a stream, and anew for a call that needs more; nothing where there are no pools."""
    resources, made, within = devices[0], list[int](), list[bool]()

    @contextmanager
    def pool(pool: object, device: object) -> Iterator[None]:
        within.append(True)
        yield
        within.pop()

    monkeypatch.setattr(torch.cuda, "use_mem_pool", pool, raising=False)
    monkeypatch.setattr(torch, "empty", lambda size, **_: made.append(size) if within else None)
    resources.__dict__["_private"] = "pool"
    resources.current_stream = lambda: FIRST  # type: ignore[method-assign]
    large = cuda_resources._LARGE
    for nbytes, expected in ((0, []), (100, [100 + large, 1]), (60, []), (300, [300 + large, 1])):
        made.clear()
        with resources.temporaries(nbytes):
            assert bool(within) == bool(nbytes)
        assert (made, within) == (expected, [])
    resources.current_stream = lambda: SECOND  # type: ignore[method-assign]
    with resources.temporaries(60):
        assert made == [300 + large, 1, 60 + large, 1]
    resources.__dict__["_private"] = None
    with resources.temporaries(500):
        assert not within
