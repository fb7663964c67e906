"""What a call on a GPU loads before any of it is enqueued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from weft.runtime import cuda, lookups
from weft.runtime.cuda import CudaProgram
from weft.runtime.launches import FlagOperations
from weft.runtime.replay import layout_key


class Program:
    """A CudaProgram of one lane beside the caller's, without a GPU, and what it does in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, lanes: int = 1) -> None:
        self.log: list[str] = []
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        self.capturing = False
        program: Any = CudaProgram.__new__(CudaProgram)
        nothing: dict[str, Any] = {
            "_rehearsed": False,
            "uses": (),
            "rank_group": None,
            "replays": None,
            "collectives": {},
            "ragged": None,
            "_given": frozenset({"a", "out"}),
            "_invalidated": (),
            "replayed": None,
            "_loading": False,
        }
        nothing |= {
            "_loaded": set(),
            "spans": ["of a timed call"],
            "_rehearsing": False,
            "_timer": None,
            "schedule": SimpleNamespace(problem=None, buffer={"a", "out"}),
        }
        nothing |= {"streams": range(lanes), "bind": lambda inputs, outputs: None}
        resources = SimpleNamespace(device=None, current_stream=lambda: 1, captures=SimpleNamespace(record=self._recorded))
        resources.watchdog = SimpleNamespace(captured=lambda program: None)
        resources.order = SimpleNamespace(
            alone=lambda group: self._alone(),
            capture=lambda stream, group, uses, enqueue: enqueue(),
            add_results=lambda call, memory: None,
        )
        resources.allocated = lambda: 64 * self.log.count("loads")
        submitter: Any = SimpleNamespace(prepare=lambda operations: self.log.append("flag operations"))
        where: Any = SimpleNamespace(lane="compute")

        def plan(bindings: object) -> Any:
            self.log.append("plan")
            operations = FlagOperations(where=where, words=(), submitter=submitter)
            return SimpleNamespace(batches=[SimpleNamespace(launches=[operations, "kernel"])])

        nothing |= {"plan_of": plan, "_issue": self._enqueued}
        nothing |= {"kernels": {at: self._kernel(at) for at in range(2)}}
        nothing |= {"_rehearse": lambda bindings: setattr(program, "_rehearsed", True)}
        nothing |= {"_enqueue": self._submitted, "allocates": 0, "_invalidated": (), "resources": resources}
        for name, value in nothing.items():
            setattr(program, name, value)
        self.program = program

    def _submitted(self, bindings: Any, outputs: Any, *, allocates: int = 0) -> None:
        self.allocates = allocates
        self._enqueued(bindings)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.log.append("all has ended")
        yield

    def _kernel(self, at: int) -> Any:
        return SimpleNamespace(runs=lambda bindings: at == 1, lay_out=lambda bindings: self.log.append(f"kernel {at}"))

    def _recorded(self, enqueue: Any, *, loads: bool) -> None:
        assert loads
        self.log.append("record")
        enqueue()

    def _enqueued(self, bindings: None) -> None:
        self.log.append("loads" if self.program._loading else "enqueue")
        assert self.program._loading == (self.program.spans is None)

    def call(self, *tensors: torch.Tensor, loose: int = 8) -> list[str]:
        """loose: length of an input that is no matrix of the schedule."""
        self.log.clear()
        self.program.play({"a": list(tensors), "indices": [torch.zeros(loose)]}, {"out": []})
        return self.log


LOADED = ["all has ended", "plan", "kernel 1", "flag operations", "record", "loads"]
"""Tables first, of kernels that run and of words: they are copied to the GPU."""


def test_tensors_that_lie_otherwise_are_loaded_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program, room = Program(monkeypatch), torch.zeros(64, 8)
    assert program.call(room[:8]) == ["enqueue"], "the first call has been rehearsed"
    assert program.call(room[8:16]) == ["enqueue"]
    turned = room[:8].t()
    assert program.allocates == 0
    assert program.call(turned) == [*LOADED, "enqueue"]
    assert program.allocates == 64, "what this layout needs on the way lies ready for it"
    assert program.call(turned) == ["enqueue"]
    assert program.call(room[:8]) == ["enqueue"]
    shifted = torch.zeros(65)[1:].view(8, 8)
    assert program.call(shifted) == [*LOADED, "enqueue"]


def test_bags_of_other_lengths_need_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups load for themselves what their indices need, and indices are others in each call."""
    program, a = Program(monkeypatch), torch.zeros(8, 8)
    assert all(program.call(a, loose=length) == ["enqueue"] for length in range(1, 50))
    assert len(program.program._loaded) == 1


def test_no_more_ways_are_remembered_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_LAYOUTS", 3)
    program, room = Program(monkeypatch), torch.zeros(8, 100)
    for width in range(1, 9):
        program.call(room[:, :width])
        assert len(program.program._loaded) <= 3
    assert program.call(room[:, :8]) == ["enqueue"]


def test_one_lane_waits_for_nothing_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(monkeypatch, lanes=0)
    program.call(torch.zeros(8, 8))
    assert program.call(torch.zeros(8, 8).t()[1:]) == ["plan", "enqueue"]


def test_a_capture_of_the_callers_loads_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(monkeypatch)
    program.call(torch.zeros(8, 8))
    program.capturing = True
    program.program.spans = ["of a timed call"]
    assert program.call(torch.zeros(8, 8).t()) == ["enqueue"]


def test_what_is_raised_while_it_loads_leaves_the_program_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(monkeypatch)
    program.call(torch.zeros(8, 8))

    def raises(enqueue: Any, *, loads: bool) -> None:
        raise RuntimeError("out of memory")

    program.program.resources.captures.record = raises
    with pytest.raises(RuntimeError, match="out of memory"):
        program.call(torch.zeros(8, 8).t())
    assert (program.program._loading, program.program.spans) == (False, ["of a timed call"])
    program.program.resources.captures.record = program._recorded
    assert program.call(torch.zeros(8, 8).t()) == [*LOADED, "enqueue"]


def test_how_tensors_lie() -> None:
    room = torch.zeros(64, 8)
    ways = [room[:4], room[:4].t(), room[:8], room[:4].half(), torch.zeros(40)[1:33].view(4, 8), room[:, :4][:4]]
    assert len({layout_key({"a": [way]}, {"out": []}) for way in ways}) == len(ways)
    assert layout_key({"a": [room[:4]]}, {}) == layout_key({"a": [room[4:8]]}, {})


def test_lookups_load_their_variants_once_all_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(lookups, "variant", lambda plan, indices, *_, mean: indices.dtype)
    kernel: Any = lookups.FusedLookup.__new__(lookups.FusedLookup)
    loading = lambda: log.append("all has ended") or nullcontext()  # noqa: E731
    kernel._columns, kernel._problem = 1, SimpleNamespace(mode="sum")
    kernel.site = SimpleNamespace(device=torch.device("cuda", 0), loading=loading)
    kernel._loaded, kernel._out = set(), lambda bindings: None
    kernel.tables = SimpleNamespace(of=lambda bindings: None)
    kernel._launch = lambda plan, bindings, *, load_only: log.append("load")

    def call(dtype: torch.dtype) -> list[str]:
        log.clear()
        indices = torch.zeros(3, dtype=dtype)
        assert kernel.runs(SimpleNamespace(loose={"indices": [indices], "offsets": [indices]}))
        return log

    assert call(torch.int64) == ["all has ended", "load"]
    assert call(torch.int64) == []
    capturing[0] = True
    assert call(torch.int32) == ["load"]


@pytest.mark.parametrize(("lanes", "counted"), [(0, 0), (1, 512)])
def test_temporaries_are_counted_if_several_lanes_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, lanes: int, counted: int
) -> None:
    """A memory pool of temporaries takes host time in each call, and a call with one lane may wait for the allocator."""
    one = Program(monkeypatch, lanes=lanes)
    program, resources = one.program, one.program.resources
    allocated = [0]
    resources.allocated = lambda: allocated[0]
    resources.captures.prepare = resources.settle = lambda: None
    program._prepare_tables = lambda bindings: None
    program._enqueue = lambda bindings, outputs: allocated.__setitem__(0, 512)
    CudaProgram._rehearse(program, cast(Any, None))
    assert program.allocates == counted


def test_tables_that_a_rehearsal_makes_are_no_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call would enter a memory pool for them, in which nothing is allocated."""
    one = Program(monkeypatch)
    program, resources = one.program, one.program.resources
    (run,) = program.plan_of(None).batches
    program.plan_of = lambda bindings: SimpleNamespace(batches=[run])
    made: list[str] = []
    run.launches[0].submitter = SimpleNamespace(prepare=lambda operations: made.append("table") or print)
    resources.allocated = lambda: 2048 * len(made)
    resources.captures.prepare = resources.settle = lambda: None
    program._enqueue = lambda bindings, outputs: run.launches[0].load()
    CudaProgram._rehearse(program, cast(Any, None))
    assert (made, program.allocates) == (["table"], 0)
