"""Calls without a graph: what a Straight enqueues, for tensors at any address, and how little it does for it."""

from __future__ import annotations

import ctypes
import gc
import inspect
import struct
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, cast

import pytest
import torch
import triton
from single_process_ranks import FakeDriver, FakeStream
from test_launch_plan import FakeProgram
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
from weft.compat import streams, triton_kernels
from weft.compat.streams import Word
from weft.core.problem import Problem, split
from weft.core.schedule import Collective, Gemm, Push, Reduce, Region, Schedule
from weft.kernels.launch import Launcher, record_launches
from weft.runtime.bindings import Bindings, CallTensors, NotPreparedError, Where
from weft.runtime.bound import BoundProgram, kernel_of
from weft.runtime.cuda import CudaProgram
from weft.runtime.cuda_resources import LaneStreams
from weft.runtime.fused import FusedSum
from weft.runtime.launch_plan import LaunchPlan
from weft.runtime.launches import FlagOperations, KernelLaunch
from weft.runtime.network import NcclCollective
from weft.runtime.products import Products
from weft.runtime.straight import Straight
from weft.schedules import build

STREAM, SIDE = 3, 9
_PACKAGE = str(Path(weft.__file__).parent)


class CopyingDriver(FakeDriver):
    """A device that copies at once, and waits for nothing."""

    def words(self, words: Any) -> Callable[[int], None]:
        return lambda stream: self.log.append(("words", stream, tuple(words)))

    def copier(self, *, rows: int, row_bytes: int, pitches: tuple[int, int]) -> Callable[[int, int, int], None]:
        def copy(dst: int, src: int, stream: int) -> None:
            self.log.append(("copy", stream))
            for row in range(rows):
                ctypes.memmove(dst + row * pitches[1], src + row * pitches[0], row_bytes)

        return copy


class Rank(FakeProgram):
    """A program of one rank, whose steps run by torch and by copies. All ranks have the same memory."""

    dtype = torch.float32
    allocates, ragged = 0, None
    _reached: ClassVar[dict[str, Any]] = {}

    def __init__(self, schedule: Schedule, rank: int, fixed: Bindings) -> None:
        super().__init__(schedule, rank)
        device = torch.device("cpu", 0)
        given = frozenset(one.name for one in self.schedule.buffers if one.kind in ("input", "output"))
        self.fixed, self.collectives = replace(fixed, rank=rank, given=given), dict[int, Any]()
        self.driver = CopyingDriver()
        self.resources = SimpleNamespace(
            device=device, driver=self.driver, stream=self._stream, aside=FakeStream(SIDE), words=self._words
        )
        lanes = self.schedule.ranks[rank]
        self.streams = LaneStreams(cast(Any, self.resources), lanes, frozenset())
        self.products = {lane.name: Products(device) for lane in lanes}
        self.plan = LaunchPlan(cast(Any, self), frozenset())

    submitter = property(lambda self: self.streams)
    own_bindings = CudaProgram.own_bindings
    copier, prepare_copy, _copies, _address_of = (
        CudaProgram.copier,
        CudaProgram.prepare_copy,
        CudaProgram._copies,
        CudaProgram._address_of,
    )
    bind = BoundProgram.bind

    def plan_of(self, bindings: Bindings) -> LaunchPlan:
        return self.plan

    def _stream(self, name: str) -> FakeStream:
        return FakeStream(11 + [lane.name for lane in self.schedule.ranks[self.rank]].index(name))

    def _words(self, words: tuple[Word, ...], *, by_kernel: bool) -> Callable[[int], None]:
        return self.driver.words(words)


class World:
    """The ranks of one schedule, with a Straight each."""

    def __init__(self, schedule: Schedule, monkeypatch: pytest.MonkeyPatch, kind: type[Rank] = Rank) -> None:
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: pytest.fail("no launch of another lane is torch's"))
        self.problem = schedule.problem
        assert isinstance(self.problem, Problem)
        fixed = Bindings(buffers={})
        probe = FakeProgram(schedule, 0)
        for buffer in probe.schedule.buffers:
            for rank in range(self.problem.world_size) if buffer.kind in ("symmetric", "local") else ():
                fixed.bind(buffer.name, rank, torch.full((buffer.rows[rank], buffer.cols[rank]), torch.nan, dtype=kind.dtype))
        fixed.buffers = probe.schedule.buffer
        self.ranks = [kind(schedule, rank, fixed) for rank in range(self.problem.world_size)]
        self.calls = [self.tensors(rank) for rank in range(len(self.ranks))]
        self.straights = [Straight(cast(Any, one), *call) for one, call in zip(self.ranks, self.calls, strict=True)]

    def tensors(self, rank: int, before: int = 0) -> tuple[dict[str, list[torch.Tensor]], dict[str, list[torch.Tensor]]]:
        """The inputs and outputs of a call. before: elements of their storages before each."""
        found: list[torch.Tensor] = []
        for name in ("a", "b", "out"):
            buffer = self.ranks[rank].schedule.buffer[name]
            rows, cols = buffer.rows[rank], buffer.cols[rank]
            found.append(torch.rand(before + rows * cols, dtype=self.ranks[rank].dtype)[before:].view(rows, cols))
        return {"a": [found[0]], "b": [found[1]]}, {"out": [found[2].fill_(torch.nan)]}

    def call(self, *, batched: bool = False) -> None:
        """A call of every rank with tensors at new addresses. batched: a and the output have three dimensions."""
        self.calls = [self.tensors(rank, 4 * (1 + rank)) for rank in range(len(self.ranks))]
        for _ in self.ranks:  # what waits for a rank that is enqueued later is right at the second time
            for rank, straight in enumerate(self.straights):
                self.ranks[rank].driver.log.clear()
                inputs, outputs = self.calls[rank]
                (a,), (b,), (out,) = inputs["a"], inputs["b"], outputs["out"]
                straight.issue([a[None], b, out[None]] if batched else [a, b, out], STREAM)

    def expect(self) -> None:
        parts = [inputs["a"][0] for inputs, _ in self.calls]
        for rank, (inputs, outputs) in enumerate(self.calls):
            if self.problem.op == "all_gather_matmul":
                expected = torch.cat(parts) @ inputs["b"][0]
            else:
                whole = cast(torch.Tensor, sum(one["a"][0] @ one["b"][0] for one, _ in self.calls))
                scatters = self.problem.op == "matmul_reduce_scatter"
                expected = whole[slice(*split(self.problem.m, len(self.ranks))[rank])] if scatters else whole
            torch.testing.assert_close(outputs["out"][0], expected)


def problem_of(op: Any) -> Problem:
    return Problem(op=op, m=24, n=8, k=12, world_size=3, dtype="float32")


CASES = [
    *(("all_gather_matmul", name) for name in ("shard_p2p", "hetero_unfused_1d", "uniform_fused_1d", "flag_gated")),
    *(("matmul_reduce_scatter", name) for name in ("shard_p2p", "hetero_fused_1d", "uniform_fused_2d", "direct_store")),
    *(("matmul_all_reduce", name) for name in ("two_shot", "one_shot")),
]


@pytest.fixture(params=CASES, ids=str)
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    op, name = request.param
    return World(build(problem_of(op), name), monkeypatch)


def test_calls_at_other_addresses_are_right(world: World) -> None:
    for _ in range(2):
        world.call()
        world.expect()


def test_tensors_of_a_call_may_have_more_dimensions_than_matrices(world: World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch resizes an output of another shape
        world.call(batched=True)
    world.expect()


def test_the_flags_of_all_launches_are_waited_for_and_raised_in_order(world: World) -> None:
    world.call()
    for one in world.ranks:
        planned = [
            (SIDE if launch.aside else STREAM if lane.kind == "compute" else one._stream(lane.name).cuda_stream, launch.words)
            for lane, launches, _ in one.plan.batches
            for launch in launches
            if isinstance(launch, FlagOperations)
        ]
        assert [entry[1:] for entry in one.driver.log if entry[0] == "words"] == planned


def test_every_stream_follows_the_callers_and_is_joined(world: World) -> None:
    """Signals on the side stream, too, also if the program has one lane: other calls may lower the same flags."""
    world.call()
    for one in world.ranks:
        after = [entry[1:] for entry in one.driver.log if entry[0] == "after"]
        lanes = {one._stream(lane.name).cuda_stream for lane in one.schedule.ranks[one.rank] if lane.kind != "compute"}
        aside = any(isinstance(launch, FlagOperations) and launch.aside for _, some, _ in one.plan.batches for launch in some)
        assert {later for later, earlier in after if earlier == STREAM} == lanes | ({SIDE} if aside else set())
        last = after[len(after) - len(lanes) - aside :]
        assert {earlier for later, earlier in last if later == STREAM} == lanes | ({SIDE} if aside else set())


def test_no_call_keeps_tensors_of_the_caller(world: World) -> None:
    world.call()
    for straight, (inputs, outputs) in zip(world.straights, world.calls, strict=True):
        for matrix in (*inputs["a"], *inputs["b"], *outputs["out"]):
            held = [one for one in straight._tensors.views if one is not None]
            assert all(one.untyped_storage().data_ptr() != matrix.untyped_storage().data_ptr() for one in held)
            assert not any(matrix is one for pairs in straight._tensors.bindings.tensors.values() for one, _ in pairs)


def frames(call: Callable[[], object]) -> list[str]:
    """The functions of weft that a call enters."""
    found: list[str] = []

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            found.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_a_call_enters_few_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each launch, and a fixed number of others."""
    world = World(build(problem_of("all_gather_matmul"), "shard_p2p"), monkeypatch)
    inputs, outputs = world.calls[0]
    matrices = [*inputs["a"], *inputs["b"], *outputs["out"]]
    found = frames(partial(world.straights[0].issue, matrices, STREAM))
    launches = sum(len(run.launches) for run in world.ranks[0].plan.batches)
    assert len(found) <= launches + 8, found


class SequentialRank(Rank):
    """A program with collectives, which `gathers` runs."""

    prepare_collective = CudaProgram.prepare_collective
    gathers: Callable[[torch.Tensor, torch.Tensor], None]

    def __init__(self, schedule: Schedule, rank: int, fixed: Bindings) -> None:
        super().__init__(schedule, rank, fixed)
        steps = [step for lane in schedule.ranks[rank] for step in lane.steps if isinstance(step, Collective)]
        found = SimpleNamespace(whole=lambda dst, src: self.gathers(dst, src))
        self.collectives = {id(step): found for step in steps}


def test_a_collective_and_a_product_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(build(problem_of("all_gather_matmul"), "sequential"), monkeypatch, SequentialRank)

    def gathers(dst: torch.Tensor, src: torch.Tensor) -> None:
        parts = [inputs["a"][0] for inputs, _ in world.calls]
        assert any(src.data_ptr() == part.data_ptr() and src.shape == part.shape for part in parts)
        torch.cat(parts, out=dst)

    monkeypatch.setattr(SequentialRank, "gathers", staticmethod(gathers), raising=False)
    for batched in (False, True):
        world.call(batched=batched)
        world.expect()
    assert not any(straight._tensors.binds for straight in world.straights)
    inputs, outputs = world.calls[0]
    found = frames(partial(world.straights[0].issue, [*inputs["a"], *inputs["b"], *outputs["out"]], STREAM))
    assert len(found) <= 7, found


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("even", [True, False])
def test_whole_collectives_write_their_first_argument(op: str, even: bool) -> None:
    collective = NcclCollective.__new__(NcclCollective)
    seen: list[Any] = []
    flat = SimpleNamespace(
        all_gather=lambda dst, src: seen.append((dst, src)),
        reduce_scatter=lambda dst, src: seen.append((dst, src)),
        all_reduce=lambda tensor: seen.append((tensor, tensor.clone())),
    )
    collective._step, collective._even, collective._flat = cast(Any, SimpleNamespace(op=op)), even, cast(Any, flat)
    dst, src = torch.zeros(2), torch.ones(2)
    if op == "all_to_all" or (op != "all_reduce" and not even):
        assert collective.whole is None
        return
    assert collective.whole is not None
    collective.whole(dst, src)
    ((written, read),) = seen
    assert written is dst
    assert read.tolist() == [1, 1]


class Recorded(NamedTuple):
    """What the C function of Triton's launcher is called with."""

    grid: tuple[int, int, int]
    stream: int
    function: str
    rest: tuple[object, ...]


def compiled_kernel(launched: list[Recorded]) -> Any:
    def launch(x: int, y: int, z: int, stream: int, function: str, *rest: object) -> None:
        given = tuple([one.base.data_ptr() if hasattr(one, "base") else one for one in rest])
        launched.append(Recorded((x, y, z), stream, function, given))

    run = SimpleNamespace(launch=launch, launch_cooperative_grid=False, launch_pdl=False)
    run.global_scratch_size = run.profile_scratch_size = 0
    return SimpleNamespace(_init_handles=lambda: None, run=run, function="code", packed_metadata=(4, 1, 0))


class Moving:
    """The tensors of a launch that move: those given, at first."""

    def __init__(self, *given: torch.Tensor) -> None:
        self.addresses, self.views = [one.data_ptr() for one in given], list[Any](given)
        self._first = list(self.addresses)

    def address(self, address: int) -> int | None:
        return self._first.index(address) if address in self._first else None

    def view(self, part: torch.Tensor) -> int:
        return self._first.index(part.data_ptr())


OPTIONS = (False, False, None, None, (4, 1, 0), None, None, None)
"""What the launcher takes between the function and the kernel's arguments."""


def test_a_prepared_kernel_is_launched_with_the_addresses_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    launched: list[Recorded] = []
    launcher = Launcher()
    launcher._compiled["key"] = compiled_kernel(launched)
    first, second, table = torch.zeros(8, 4), torch.zeros(3), torch.zeros(3)
    at = table.data_ptr()
    arguments = (first, table, None, 5, second.data_ptr(), at, (table, second, 3))
    (recorded,) = record_launches(lambda: launcher(None, 7, arguments, {"BLOCK": 16}, key="key"))
    assert launched == []
    moving = Moving(first, second)
    run = recorded.prepare(moving)
    assert run is not None
    for one, two in ((64, 128), (32, 16)):
        moving.addresses[:] = one, two
        run(STREAM)
        passed = (one, at, None, 5, two, at, (at, two, 3), 16)
        assert launched.pop() == Recorded((7, 1, 1), STREAM, "code", OPTIONS + passed)


def test_descriptors_refer_to_the_tensors_of_each_call_and_to_none_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    seen: list[Any] = []
    launcher = Launcher()
    launcher._compiled["key"] = compiled = compiled_kernel([])
    compiled.run.launch = lambda *given: seen.append([one.base for one in given[-3:]])
    moves, fixed = torch.zeros(16, 16), torch.zeros(16, 16)
    arguments = [TensorDescriptor.from_tensor(one, [16, 16]) for one in (moves, fixed)]
    (recorded,) = record_launches(lambda: launcher(None, 7, (*arguments, arguments[0]), {}, key="key"))
    moving = Moving(moves)
    run = recorded.prepare(moving)
    assert run is not None
    moving.views[:] = ["moved"]
    run(STREAM)
    assert [one if isinstance(one, str) else one.data_ptr() for one in seen.pop()] == ["moved", fixed.data_ptr(), "moved"]
    assert arguments[0].base is None


def test_another_thread_launches_while_a_launch_is_recorded() -> None:
    launched: list[int] = []
    launcher = Launcher()
    launcher._compiled["key"] = {(7, 1, 1): lambda *arguments, stream: launched.append(stream)}

    def others() -> None:
        thread = Thread(target=lambda: launcher(None, 7, (1,), {}, key="key", stream=STREAM))
        thread.start()
        thread.join()

    assert record_launches(others) == []
    assert launched == [STREAM]


def test_a_kernel_that_was_not_launched_before_is_not_prepared() -> None:
    launcher = Launcher()
    (recorded,) = record_launches(lambda: launcher(None, 7, (1,), {}, key="key"))
    assert recorded.prepare() is None


def test_hooks_of_triton_see_prepared_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    launched: list[Any] = []
    monkeypatch.setattr(triton_kernels, "relaunch", lambda compiled, blocks, arguments, stream: launched.append(arguments))
    start = triton_kernels.launcher_of(compiled_kernel([]), 1)
    hook = triton.knobs.runtime.launch_enter_hook
    monkeypatch.setattr(hook, "calls", [print])
    start(STREAM, [1, 2])
    assert launched == [[1, 2]]


def test_the_launcher_of_triton_takes_what_prepared_kernels_pass() -> None:
    """The grid, the stream, the function, two options, two scratch memories, the metadata, and the hooks."""
    if not triton.__version__.startswith(triton_kernels._PLAIN_LAUNCHER):
        pytest.skip("another version of Triton launches with its own arguments")
    from triton.backends.nvidia import driver

    assert driver._BASE_ARGS_FORMAT == "iiiKKppOOOOOO"
    names = inspect.getsource(driver.CudaLauncher)
    for name in (*triton_kernels._SCRATCH, "launch_cooperative_grid", "launch_pdl", "launch"):
        assert f"self.{name} = " in names


def test_the_drivers_memory_operations_are_laid_out_as_cuda_does(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[tuple[int, int, bytes]] = []
    monkeypatch.setattr(
        streams,
        "_submit_operations",
        lambda: lambda stream, count, batch, flags: submitted.append((stream, count, bytes(batch))),
    )
    run = streams.Driver.words(cast(Any, SimpleNamespace(api=None)), [Word("wait", 1 << 40, 3), Word("signal", 8, 1)])
    run(STREAM)
    wait = struct.pack("=IIQQIIQQ", 1, 0, 1 << 40, 3, 0, 0, 0, 0)
    write = struct.pack("=IIQQIIQQ", 2, 0, 8, 1, 0, 0, 0, 0)
    assert submitted == [(STREAM, 2, wait + write)]
    assert len(wait) == 48


def test_a_kernel_that_reads_overlapping_matrices_is_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(build(problem_of("all_gather_matmul"), "shard_p2p"), monkeypatch)
    inputs, outputs = world.tensors(0)
    whole = torch.rand(40, 12)
    inputs["a"][0], inputs["b"][0] = whole[: len(inputs["a"][0])], whole[4:16, :8]
    tensors = CallTensors(world.ranks[0].bind(inputs, outputs), inputs, outputs)
    with pytest.raises(NotPreparedError):
        tensors.address(inputs["b"][0].data_ptr())


class Loaded(dict[Any, Any]):
    """Compiled kernels for launches of every kind."""

    def __init__(self, compiled: Any) -> None:
        super().__init__()
        self._compiled = compiled

    def get(self, key: object, default: object = None) -> Any:
        return self._compiled


class KernelRank(Rank):
    """A program whose steps run as kernels where they can. launched: the launches of kernels."""

    dtype = torch.bfloat16
    sms_for_kernels = sms_for_pushes = blocks = 4
    tries = 9
    count_address, gate_need, buffers_of = BoundProgram.count_address, BoundProgram.gate_need, BoundProgram.buffers_of

    def __init__(self, schedule: Schedule, rank: int, fixed: Bindings) -> None:
        super().__init__(schedule, rank, fixed)
        self.launched: list[Recorded] = []
        for lane in self.schedule.ranks[rank]:
            for position, step in enumerate(lane.steps):
                kernel = kernel_of(cast(Any, self), Where(rank, lane.name, position, step))
                if kernel is not None and kernel.launched_by is not None:
                    kernel.launched_by._compiled = Loaded(compiled_kernel(self.launched))
                    self.kernels[lane.name, position] = kernel

    def runs_as_kernel(self, step: object) -> bool:
        return isinstance(step, (Gemm, Push, Reduce))

    def plan_of(self, bindings: Bindings) -> LaunchPlan:
        self.plan = LaunchPlan(cast(Any, self), frozenset(at for at, one in self.kernels.items() if one.runs(bindings)))
        return self.plan


def pointers_of(argument: object) -> list[int]:
    """What may be addresses in an argument of a kernel."""
    if isinstance(argument, tuple):
        return [one for part in argument for one in pointers_of(part)]
    return [argument] if isinstance(argument, int) else []


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *(("all_gather_matmul", name) for name in ("flag_gated", "direct_store", "track_and_trigger")),
        *(("matmul_reduce_scatter", name) for name in ("flag_gated", "direct_store", "track_and_trigger", "shard_p2p")),
    ],
)
def test_prepared_kernels_get_no_address_of_an_earlier_call(monkeypatch: pytest.MonkeyPatch, op: str, name: str) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    problem = Problem(op=cast(Any, op), m=64, n=64, k=64, world_size=2)
    world = World(build(problem, name), monkeypatch, KernelRank)
    old = [one for some in world.calls[0] for matrices in some.values() for one in matrices]
    inputs, outputs = world.tensors(0, 8)
    new = [*inputs["a"], *inputs["b"], *outputs["out"]]
    mine = cast(KernelRank, world.ranks[0])
    straight = world.straights[0]
    assert mine.launched == []
    straight.issue(new, STREAM)
    assert len(mine.launched) == sum(isinstance(one, KernelLaunch) for run in mine.plan.batches for one in run.launches) > 0
    assert not straight._tensors.binds
    used = {address for one in mine.launched for argument in one.rest for address in pointers_of(argument)}
    tables = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.dtype == torch.int64]
    used |= {address for table in tables for address in table.flatten().tolist()}
    within = {number for number, one in enumerate(new) for at in used if one.data_ptr() <= at < one.data_ptr() + one.nbytes}
    assert within, "the kernels read or write the call's matrices"
    assert not [at for at in used for one in old if one.data_ptr() <= at < one.data_ptr() + one.nbytes]


def test_a_sum_whose_table_has_addresses_of_the_caller_is_not_prepared() -> None:
    sums = FusedSum.__new__(FusedSum)
    buffers = {"out": SimpleNamespace(kind="output"), "kept": SimpleNamespace(kind="symmetric")}
    for name, fixed in (("out", False), ("kept", True)):
        sums._fixed = [Region(name, 0, (0, 1), (0, 1))]
        assert sums.can_be_prepared(Bindings(buffers=cast(Any, buffers))) is fixed


@pytest.mark.parametrize("shape", [(4, 6), (6, 1)])
def test_tensors_of_collectives_are_viewed_as_bytes(shape: tuple[int, int]) -> None:
    """A matrix of one column is contiguous for torch whatever its last stride is, and then torch does not view it as bytes."""
    caller = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape[1], shape[0]).t().contiguous()
    if shape[1] == 1:
        caller = caller.as_strided(shape, (1, shape[0]))
    assert caller.is_contiguous()
    flat = caller.as_strided((caller.numel(),), (1,)).view(torch.uint8).view(-1, 1)
    tensors = CallTensors(Bindings(given=frozenset("a"), tensors={("a", 0): ()}), {"a": (flat,)}, {}, [caller])
    number = tensors.view(flat[4:12])
    moved = caller.clone(memory_format=torch.preserve_format) + 1
    tensors.hold([moved])
    assert tensors.addresses[0] == moved.data_ptr()
    assert torch.equal(tensors.views[number].flatten().view(torch.float32), moved.flatten()[1:3])
