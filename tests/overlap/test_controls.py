"""Streams, budgets of SMs, groups: what is asked of device and libraries, what is refused, and that all of it is restored."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from weft.compat import cublas
from weft.compat import streams as control_streams
from weft.compat.streams import current_lane_priority, priority_number
from weft.core.errors import WeftError
from weft.overlap.controls import (
    DEVICES,
    budget,
    comm_stream,
    give_back,
    lane_priority,
    launch_order,
    nccl_group,
    residency,
    sm_budget,
    sm_partition,
    this_device,
)

SMS = 132


class Stream:
    """torch's name for a stream that the driver has made."""

    def __init__(self, cuda_stream: int, device: int) -> None:
        self.cuda_stream, self.device = cuda_stream, torch.device("cuda", device)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -3


class StreamDriver:
    """The driver calls that make a stream: they need a context, and must not disturb a capture."""

    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")

    def __init__(self) -> None:
        self.mode, self.contexts = "global", list[int]()
        self.made: list[tuple[int, int]] = []

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[int, str]:
        self.mode, before = mode, self.mode
        return 0, before

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return 0, 100 + index

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        return 0, device

    def cuCtxPushCurrent(self, context: int) -> tuple[int]:
        self.contexts.append(context)
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        return 0, self.contexts.pop()

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[int, int]:
        assert (self.mode, flags) == ("relaxed", 1)
        self.made.append((self.contexts[-1], priority))
        return 0, 5000 + len(self.made)


class Blas:
    """cuBLAS: the target of one handle."""

    def __init__(self) -> None:
        self.target = 0

    def cublasGetSmCountTarget(self, handle: ctypes.c_void_p, found: Any) -> int:
        assert handle.value == 99
        found._obj.value = self.target
        return 0

    def cublasSetSmCountTarget(self, handle: ctypes.c_void_p, target: Any) -> int:
        self.target = getattr(target, "value", target)
        return 0 if self.target < 1000 else 7


@pytest.fixture
def blas(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blas]:
    """A GPU of 132 SMs, as far as torch says."""
    made = Blas()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=SMS))
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 99, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(cublas, "_library", lambda: made)
    yield made
    assert torch._C._get_sm_carveout_experimental() is None


def _targets(blas: Blas) -> tuple[int | None, int]:
    return torch._C._get_sm_carveout_experimental(), blas.target


def _fail_in(context: AbstractContextManager[None], holds: Callable[[], bool]) -> None:
    with context:
        assert holds()
        raise RuntimeError("on purpose")


def test_budgets_nest_and_are_restored_also_after_an_error(blas: Blas) -> None:
    with sm_budget(100):
        assert _targets(blas) == (32, 100)
        with pytest.raises(RuntimeError, match="on purpose"):
            _fail_in(sm_budget(16), lambda: _targets(blas) == (116, 16))
        assert _targets(blas) == (32, 100)
        with sm_budget(SMS):
            assert _targets(blas) == (0, SMS)
    assert _targets(blas) == (None, 0)


def test_budgets_of_threads_end_in_any_order(blas: Blas) -> None:
    first, second = sm_budget(100), sm_budget(16)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert _targets(blas)[0] == 116
    second.__exit__(None, None, None)
    assert _targets(blas)[0] is None


@pytest.mark.parametrize("sms", [0, SMS + 1])
def test_budgets_that_cannot_be(blas: Blas, sms: int) -> None:
    for control in (lambda: sm_budget(sms).__enter__(), lambda: sm_partition(sms)):
        with pytest.raises(ValueError, match=f"sms is {sms}; this device has 132"):
            control()
    assert _targets(blas) == (None, 0)


def test_a_budget_that_the_library_refuses_leaves_nothing_set(blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    blas.cublasSetSmCountTarget = lambda handle, target: 7  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="sms: cuBLAS refused"):
        sm_budget(8).__enter__()
    assert _targets(blas) == (None, 0)
    monkeypatch.delattr(torch._C, "_set_sm_carveout_experimental")
    with pytest.raises(ValueError, match="cannot limit the SMs of its GEMMs"):
        sm_budget(8).__enter__()


def test_without_a_gpu_controls_say_so() -> None:
    for control in (lambda: comm_stream(), lambda: sm_budget(8).__enter__(), lambda: sm_partition(8), lambda: this_device()):
        with pytest.raises(ValueError, match="no GPU here"):
            control()


@pytest.fixture
def streams(blas: Blas, monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamDriver]:
    driver = StreamDriver()
    control_streams._streams_of.cache_clear()
    monkeypatch.setattr(control_streams, "driver_api", lambda: driver)
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    yield driver
    assert (driver.mode, driver.contexts) == ("global", [])
    control_streams._streams_of.cache_clear()


@pytest.mark.parametrize(("priority", "number"), [("high", -3), ("normal", 0), (-2, -2)])
def test_streams_are_made_with_their_priority(streams: StreamDriver, priority: Any, number: int) -> None:
    for where in (1, torch.device("cuda", 1)):
        assert comm_stream(priority=priority, device=where).device.index == 1
    comm_stream(priority=priority)
    assert streams.made == [(101, number), (101, number), (100, number)]


def test_every_stream_has_one_user(streams: StreamDriver) -> None:
    """More than the 32 that torch has, and as many as are in use at once."""
    for _ in range(3):
        taken = [comm_stream(priority=priority) for priority in (-1, "high") for _ in range(40)]
        assert len({stream.cuda_stream for stream in taken}) == len(streams.made) == 80
        for stream in taken:
            give_back(stream)
    with pytest.raises(ValueError, match="which comm_stream has not made, or was given back"):
        give_back(taken[0])
    with pytest.raises(ValueError, match="which comm_stream has not made"):
        give_back(cast(torch.cuda.Stream, Stream(7, 0)))


def test_a_stream_that_the_driver_refuses_leaves_the_thread_as_it_was(
    streams: StreamDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "cuStreamCreateWithPriority", lambda flags, priority: (2, None))
    with pytest.raises(WeftError, match="CUDA driver: 2"):
        comm_stream()


@pytest.mark.parametrize("priority", [1, -4, "urgent", 0.5])
def test_priorities_that_the_device_lacks(blas: Blas, priority: Any) -> None:
    with pytest.raises(ValueError, match=r'priority is .*; use "normal", "high", or one of -3 \(first\) to 0 \(last\)'):
        comm_stream(priority=priority)


def test_lane_priorities_nest_and_are_restored(blas: Blas) -> None:
    assert current_lane_priority() == -1
    with lane_priority("high"):
        with pytest.raises(RuntimeError, match="on purpose"):
            _fail_in(lane_priority(-2), lambda: current_lane_priority() == -2)
        assert current_lane_priority() == -3
    assert current_lane_priority() == -1
    for priority in ("normal", 0):
        with pytest.raises(ValueError, match="need a priority above"):
            lane_priority(priority).__enter__()


def test_launch_order_is_an_event_of_the_first() -> None:
    waited: list[object] = []
    launch_order(SimpleNamespace(record_event=lambda: "event"), SimpleNamespace(wait_event=waited.append))  # type: ignore[arg-type]
    assert waited == ["event"]


class Green:
    """A driver with green contexts: parts are at least 8 SMs, in steps of 8."""

    class CUdevResourceType:
        CU_DEV_RESOURCE_TYPE_SM = 1

    class CUgreenCtxCreate_flags:
        CU_GREEN_CTX_DEFAULT_STREAM = 1

    class CUstream_flags:
        CU_STREAM_NON_BLOCKING = 1

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []
        self.unit = 8

    def _resource(self, sms: int) -> Any:
        return SimpleNamespace(sm=SimpleNamespace(smCount=sms, smCoscheduledAlignment=self.unit, minSmPartitionSize=8))

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return 0, index

    def cuDeviceGetDevResource(self, device: int, kind: int) -> tuple[int, Any]:
        return 0, self._resource(SMS)

    def cuDevSmResourceSplitByCount(self, groups: int, whole: Any, flags: int, least: int) -> tuple[Any, ...]:
        assert (groups, whole.sm.smCount, flags) == (1, SMS, 0)
        return 0, [self._resource(least)], 1, self._resource(SMS - least)

    def cuDevResourceGenerateDesc(self, resources: list[Any], count: int) -> tuple[int, int]:
        assert len(resources) == count == 1
        return 0, resources[0].sm.smCount

    def cuGreenCtxCreate(self, description: int, device: int, flags: int) -> tuple[int, int]:
        return 0, description

    def cuGreenCtxStreamCreate(self, green: int, flags: int, priority: int) -> tuple[int, int]:
        self.made.append((green, priority))
        return 0, 1000 + len(self.made)


def test_partitions_are_rounded_down_and_made_once(blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    api = Green()
    budget._partition.cache_clear()
    monkeypatch.setattr(budget, "driver_api", lambda: api)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: (stream, device))
    assert [sm_partition(sms).sms for sms in (120, 127, 8, SMS)] == [120, 120, 8, SMS]
    assert sm_partition(120) is sm_partition(120)
    assert sm_partition(120, priority="high") is not sm_partition(120)
    assert api.made == [(120, 0), (120, 0), (8, 0), (SMS, 0), (120, -3)]
    with pytest.raises(ValueError, match="sms is 7; a part of this device has 8 SMs or more, in steps of 8"):
        sm_partition(7)
    api.unit = 0
    with pytest.raises(ValueError, match="cannot partition SMs"):
        sm_partition(64)
    budget._partition.cache_clear()


def test_the_device_is_what_the_driver_says(blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = DEVICES["H200"]
    said = {
        "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": h200.shared_bytes,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": h200.shared_block_bytes,
        "RESERVED_SHARED_MEMORY_PER_BLOCK": h200.shared_reserved_bytes,
        "MAX_THREADS_PER_MULTIPROCESSOR": h200.threads,
        "MAX_THREADS_PER_BLOCK": h200.threads_block,
        "MAX_BLOCKS_PER_MULTIPROCESSOR": h200.blocks,
        "WARP_SIZE": h200.warp,
        "MAX_REGISTERS_PER_MULTIPROCESSOR": h200.registers,
        "MAX_REGISTERS_PER_BLOCK": h200.registers_block,
    }
    attributes = SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": value for name, value in said.items()})
    api = SimpleNamespace(
        CUdevice_attribute=attributes, cuDeviceGet=lambda index: (0, index), cuDeviceGetAttribute=lambda value, _: (0, value)
    )
    monkeypatch.setattr(residency, "driver_api", lambda: api)
    properties = SimpleNamespace(name="H200", major=9, minor=0, gcnArchName="gfx90a:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    residency._device.cache_clear()
    assert this_device() == h200
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert this_device(1) == DEVICES["MI250X"]
    properties.gcnArchName = "gfx1100"
    with pytest.raises(ValueError, match="no figures of gfx1100; there are those of gfx90a"):
        this_device(2)
    monkeypatch.setattr(torch.version, "hip", None)
    properties.major = 7
    with pytest.raises(ValueError, match=r"compute capability 7\.0"):
        this_device(3)
    residency._device.cache_clear()


class Nccl:
    """torch's NCCL backend, as far as its options go."""

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace(min_ctas=-1, max_ctas=-1)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A world of four ranks; the calls that make groups."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group or [0, 1, 2, 3])
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append({"ranks": ranks} | options))
    return made


def test_a_group_with_its_own_blocks_and_priority(world: list[dict[str, Any]]) -> None:
    nccl_group(min_ctas=4, max_ctas=8, high_priority=True)
    nccl_group([1, 3], max_ctas=2)  # type: ignore[arg-type]
    nccl_group(min_ctas=16)
    whole, part, _ = world
    assert (whole["ranks"], whole["backend"], whole["use_local_synchronization"]) == (None, "nccl", False)
    assert (part["ranks"], part["use_local_synchronization"]) == ([1, 3], True)
    options = [call["pg_options"] for call in world]
    limits = [{"min_ctas": 4, "max_ctas": 8}, {"min_ctas": -1, "max_ctas": 2}, {"min_ctas": 16, "max_ctas": 64}]
    assert [vars(o.config) for o in options] == limits
    assert [o.is_high_priority_stream for o in options] == [True, False, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_ctas": 0}, "min_ctas is 0; NCCL takes 1 to 64"),
        ({"max_ctas": 65}, "max_ctas is 65; NCCL takes 1 to 64"),
        ({"min_ctas": 9, "max_ctas": 8}, "min_ctas is 9, more than max_ctas, 8"),
    ],
)
def test_groups_that_cannot_be(world: list[dict[str, Any]], arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nccl_group(**arguments)  # type: ignore[arg-type]
    assert world == []


def test_groups_where_there_is_no_nccl(world: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nccl.Options, "__init__", lambda self, is_high_priority_stream: setattr(self, "config", object()))
    with pytest.raises(ValueError, match=r"max_ctas: torch .* cannot say that to NCCL"):
        nccl_group(max_ctas=8)
    monkeypatch.delattr(dist, "ProcessGroupNCCL")
    with pytest.raises(ValueError, match="built without NCCL"):
        nccl_group()
    monkeypatch.setattr(budget.dist, "get_backend_config", lambda group: "gloo")
    with pytest.raises(ValueError, match="group has the backends gloo"):
        nccl_group()
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match="not initialized"):
        nccl_group()
    assert world == []


def test_numbers_of_priorities(blas: Blas) -> None:
    assert [priority_number(priority) for priority in ("high", "normal", 0, -3)] == [-3, 0, 0, -3]
