"""What methods do with streams, budgets and communicators, recorded by fakes of CUDA's streams and of the controls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from weft_log import warned

from weft.core.concurrent import ConcurrentProblem
from weft.core.problem import CollectiveProblem
from weft.core.schedule import Schedule
from weft.overlap import controls
from weft.overlap.concurrent import cuda
from weft.overlap.concurrent.calls import ShapedKernels
from weft.overlap.concurrent.collectives import ConcurrentCollective
from weft.overlap.concurrent.cuda import CudaExecutor
from weft.overlap.concurrent.executor import Program, program_of
from weft.schedules.concurrent import build

GPU = torch.device("cuda", 0)


class Log(list[str]):
    """What happened, in order, and on which stream."""

    def __init__(self) -> None:
        super().__init__()
        self.current = "main"
        self.made = 0


class Stream:
    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Group:
    group_name = "world"

    def size(self) -> int:
        return 2


class Fake:
    """A collective that says where it runs."""

    ranks = Group()

    def __init__(self, log: Log, *, fails: bool = False) -> None:
        self.log, self.fails = log, fails

    def enqueue(self, group: Any, *, async_op: bool) -> None:
        assert not async_op
        if self.fails:
            raise RuntimeError("no link")
        self.log.append(f"collective on {self.log.current}" + ("" if group is self.ranks else f", {group}"))

    def move(self, schedule: Schedule) -> None:
        self.log.append(f"{schedule.name} on {self.log.current}, {schedule.problem.sms} SMs")  # type: ignore[attr-defined]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    main = Stream(log, "main")

    def comm_stream(*, priority: str, device: object) -> Stream:
        log.made += 1
        return Stream(log, f"{priority} {log.made}")

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        before, log.current = log.current, stream.name
        yield
        log.current = before

    @contextmanager
    def sm_budget(sms: int, *, device: object) -> Iterator[None]:
        log.append(f"{sms} SMs")
        try:
            yield
        finally:
            log.append("all SMs")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(controls, "comm_stream", comm_stream)
    monkeypatch.setattr(controls, "sm_budget", sm_budget)
    monkeypatch.setattr(controls, "launch_order", lambda first, then: log.append(f"{first.name} before {then.name}"))
    monkeypatch.setattr(controls, "nccl_group", lambda group, max_ctas: f"{max_ctas} blocks")
    monkeypatch.setattr(cuda, "_can_be_made_anew", lambda group: True)
    monkeypatch.setattr(CudaExecutor, "_sms", 132)
    return log


def program(method: str) -> Program:
    """What a rank runs of an all-reduce."""
    one = CollectiveProblem(op="all_reduce", m=64, world_size=2, dtype="float32")
    return program_of(build(ConcurrentProblem(collectives=(one,), world_size=2), method), 0)


def run(log: Log, device: CudaExecutor, method: str, *, fails: bool = False) -> list[str]:
    """What one use does, and forget it."""
    fake = cast(ConcurrentCollective, Fake(log, fails=fails))
    device.prepare(program(method), [fake])
    try:
        with device.running(program(method), [fake]):
            log.append("computation")
            if fails:
                raise KeyError
    finally:
        found = list(log)
        log.clear()
    return found


def test_sequential_is_on_the_callers_stream(log: Log) -> None:
    assert run(log, CudaExecutor(GPU), "sequential") == ["collective on main", "computation"]
    assert log.made == 0


def test_a_side_stream_forks_and_joins(log: Log) -> None:
    device = CudaExecutor(GPU)
    expected = ["{0} waits for main", "{0} before main", "collective on {0}", "computation", "main waits for {0}"]
    for method, stream in (("nccl", "normal 1"), ("nccl+priority", "high 2"), ("nccl", "normal 1")):
        assert run(log, device, method) == [text.format(stream) for text in expected]


def test_late_collectives_fork_early(log: Log) -> None:
    assert run(log, CudaExecutor(GPU), "nccl+late") == [
        "normal 1 waits for main",
        "computation",
        "collective on normal 1",
        "main waits for normal 1",
    ]


def test_budgets_and_blocks(log: Log) -> None:
    device = CudaExecutor(GPU)
    found = run(log, device, "nccl+priority+ctas=16+left=24")
    assert found[0] == "108 SMs"
    assert found[-2:] == ["main waits for high 1", "all SMs"]
    assert "collective on high 1, 16 blocks" in found
    for method, sms in (("copy_engine+priority+ctas=8", 8), ("copy_engine+priority+pull", 32)):
        assert f"{method} on high 1, {sms} SMs" in run(log, device, method)
    with pytest.raises(ValueError, match="left=132; this device has 132 SMs"):
        device.prepare(program("nccl+left=132"), [])


@pytest.mark.parametrize("method", ["nccl+left=24", "nccl+late+left=24"])
def test_an_exception_restores_and_joins(log: Log, method: str) -> None:
    device = CudaExecutor(GPU)
    found: list[str] = []
    with pytest.raises(KeyError), device.running(program(method), [cast(ConcurrentCollective, Fake(log))]):
        raise KeyError
    assert sorted(log) == sorted({*log}), "nothing twice"
    assert {"collective on normal 1", "main waits for normal 1"} < set(log)
    assert log[-1] == "all SMs"
    log.clear()
    with pytest.raises(RuntimeError, match="no link"):
        found = run(log, device, "nccl", fails=True)
    assert found == []
    assert run(log, device, "nccl")[-1] == "main waits for normal 1"


def test_uses_within_uses_have_streams_of_their_own(log: Log) -> None:
    device, fake = CudaExecutor(GPU), cast(ConcurrentCollective, Fake(log))
    with device.running(program("nccl"), [fake]), device.running(program("nccl"), [fake]):
        log.append("computation")
    joins = [text for text in log if text.startswith("main waits")]
    assert joins == ["main waits for normal 2", "main waits for normal 1"]


def test_streams_go_back_at_the_end_once_each(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[str] = []
    monkeypatch.setattr(controls, "give_back", lambda stream: returned.append(stream.name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: returned.append("idle"))
    device, fake = CudaExecutor(GPU), cast(ConcurrentCollective, Fake(log))
    for method in ("nccl", "nccl+priority", "nccl"):
        with device.running(program(method), [fake]), device.running(program(method), [fake]):
            pass
    device.close(broken=True)
    assert returned == []
    device.close(broken=False)
    assert returned[0] == "idle"
    assert sorted(returned[1:]) == ["high 3", "high 4", "normal 1", "normal 2"]
    device.close(broken=False)
    assert len(returned) == 6


@pytest.mark.parametrize("broken", [False, True])
def test_communicators_of_lost_peers_are_aborted(log: Log, monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(controls, "give_back", lambda stream: None)
    monkeypatch.setattr(cuda, "_abort_process_group", lambda group: log.append(f"{group} aborted"))
    monkeypatch.setattr(cuda.dist, "destroy_process_group", lambda group: log.append(f"{group} destroyed"))
    device = CudaExecutor(GPU)
    run(log, device, "nccl+priority+ctas=16")
    device.close(broken=broken)
    assert log == ["16 blocks aborted" if broken else "16 blocks destroyed"]


def test_a_future_is_set_where_the_collective_runs(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    class Future:
        def __init__(self, devices: object) -> None:
            assert devices == [GPU]

        def set_result(self, result: object) -> None:
            log.append(f"{result} on {log.current}")

    monkeypatch.setattr(torch.futures, "Future", Future)
    device = CudaExecutor(GPU)
    for method, stream in (("sequential", "main"), ("nccl+priority+ctas=8", "high 1")):
        device.future(program(method), cast(ConcurrentCollective, Fake(log)), cast(torch.Tensor, "gradients"))
        assert log[-1] == f"gradients on {stream}"
        log.clear()


def test_a_communicator_is_made_once_and_not_in_a_capture(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    device, made = CudaExecutor(GPU), []
    monkeypatch.setattr(controls, "nccl_group", lambda group, max_ctas: made.append(max_ctas) or group)
    for _ in range(2):
        run(log, device, "nccl+ctas=8")
        run(log, device, "nccl+ctas=16")
    assert made == [8, 16]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run(log, device, "nccl+ctas=8")
    with pytest.raises(ValueError, match="ctas=24: use it once before capturing a graph"):
        run(log, device, "nccl+ctas=24")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda, "_can_be_made_anew", lambda group: False)
    with pytest.raises(ValueError, match="ctas=24, but 2 ranks of a world that is bound to devices"):
        run(log, device, "nccl+ctas=24")


class Kernel:
    """Of which so many blocks fit an SM."""

    def __init__(self, fits: int) -> None:
        self.blocks, self.cap, self.open = fits, 0, True

    def close(self) -> None:
        self.open = False


def test_named_kernels_are_capped_below_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Kernel] = []

    def shape(kernel: Kernel, *, blocks_per_sm: int) -> Kernel:
        made.append(Kernel(blocks_per_sm))
        return made[-1]

    monkeypatch.setattr(controls, "occupancy", lambda kernel: kernel)
    monkeypatch.setattr(controls, "shape", shape)
    assert ShapedKernels([Kernel(16), Kernel(8)]).residents() == (7, 4)
    assert ShapedKernels([Kernel(2)]).residents() == (1,)
    assert ShapedKernels([Kernel(1)]).residents() == ()
    assert ShapedKernels([Kernel(8)], caps=(2, 8, 6)).residents() == (6, 2)
    assert ShapedKernels().residents() == ()
    named = Kernel(8)
    kernels = ShapedKernels([named])
    assert kernels.of(0) == (named,)
    assert kernels.of(2) == kernels.of(2) == (made[0],)
    assert made[0].blocks == 2
    kernels.close()
    assert [kernel.open for kernel in made] == [False]
    assert named.open


def test_kernels_of_which_it_cannot_be_told_need_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    def occupancy(kernel: object) -> None:
        raise ValueError("kernel has 2 compiled variants")

    monkeypatch.setattr(controls, "occupancy", occupancy)
    with warned("kernels are not capped: kernel has 2 compiled variants; or pass residents"):
        assert ShapedKernels([Kernel(8)]).residents() == ()
    assert ShapedKernels([Kernel(8)], caps=(2,)).residents() == (2,)
    with pytest.raises(ValueError, match="residents has 0; at least one block"):
        ShapedKernels([Kernel(8)], caps=(0,))
