"""What weft asks of a GPU: its capabilities decide which tiles are candidates, how many SMs push, and what is predicted."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import devices
import pytest
import torch

from weft.compat.device import capabilities
from weft.core import hardware as known
from weft.core import machine
from weft.core.machine import codec
from weft.core.problem import Problem, Scaling
from weft.core.schedule import Gemm
from weft.ops.collective import default_sms
from weft.perf.shapes import SHAPES, push_sms, shape_of, shapes_for
from weft.planner import plan
from weft.runtime import choose
from weft.runtime.choose import nearest_profile
from weft.runtime.cuda_resources import CudaResources
from weft.schedules import build

GPU = torch.device("cuda")
ALL = (devices.H200, devices.H100, devices.A100, devices.L40S, devices.B200, devices.V100, devices.MI300X)


def found_bytes(found: Any) -> int:
    return int(getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block))


def of(found: Any) -> known.Capabilities:
    with devices.pretend(found):
        return capabilities(GPU)


@pytest.mark.parametrize("found", ALL, ids=lambda found: found.name.replace(" ", "-"))
def test_candidates_fit_the_gpu(found: Any) -> None:
    gpu = of(found)
    for blocks in shapes_for(gpu):
        assert blocks.shared_bytes(blocks.stages, tma=gpu.tma) <= gpu.shared_bytes
        assert blocks.stages >= 2


def test_small_shared_memory_takes_stages_first_and_shapes_then() -> None:
    stages = {(blocks.m, blocks.n): blocks.stages for blocks in SHAPES}
    fewer = {(blocks.m, blocks.n): blocks.stages for blocks in shapes_for(of(devices.L40S))}
    assert set(fewer) == set(stages)
    assert all(fewer[shape] < stages[shape] for shape in stages)
    assert {(blocks.m, blocks.n) for blocks in shapes_for(of(devices.MI300X))} == {(128, 128), (64, 128)}


@pytest.mark.parametrize(("found", "runs"), [(devices.H200, True), (devices.MI300X, True), (devices.V100, False)])
def test_kernels_run_where_a_tile_fits(found: Any, runs: bool) -> None:
    """A V100 has no matrix units for bfloat16: there steps run part by part, and no kernel is tried."""
    resources: Any = SimpleNamespace(capabilities=of(found), device=GPU)
    assert CudaResources.runs_kernels(resources, torch.bfloat16) is runs
    assert CudaResources.fuses(resources, torch.bfloat16) is runs
    assert not CudaResources.runs_kernels(resources, torch.float32)
    assert CudaResources.fuses(resources, torch.bfloat16, Scaling()) is (found is devices.H200)


def test_pushes_leave_an_sm_of_a_small_gpu() -> None:
    h200 = machine.load("h200x8")
    assert (push_sms(h200, 132, alone=False), push_sms(h200, 132, alone=True)) == (16, 64)
    assert (push_sms(h200, 12, alone=False), push_sms(h200, 1, alone=True)) == (11, 1)


def test_a_known_gpu_is_predicted_by_its_shipped_profile(caplog: pytest.LogCaptureFixture) -> None:
    known = {"h200x8": devices.H200, "h100x8": devices.H100, "b200x8": devices.B200, "a100x8": devices.A100}
    for name, found in (*known.items(), ("mi300x8", devices.MI300X)):
        with devices.pretend(found):
            assert nearest_profile(GPU) == machine.load(name)
    with devices.pretend(devices.H100):
        assert nearest_profile(GPU, 2) == machine.load("h100x2")
    assert nearest_profile(torch.device("cpu")) == machine.load("h200x8")
    assert not caplog.records


def test_of_several_profiles_of_a_gpu_the_smallest_with_enough_ranks_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = machine.load("h200x8")
    sizes = {"h200x2": 2, "h200x4": 4, "h200x8": 8, "a100x8": 8}
    monkeypatch.setattr(machine, "names", lambda: tuple(sizes))
    monkeypatch.setattr(choose, "_load_shipped", lambda name: dataclasses.replace(h200, world_size=sizes[name], name=name))
    wanted = {2: "h200x2", 3: "h200x4", 8: "h200x8", 16: "h200x8", None: "h200x8"}
    assert {ranks: choose.profile_named_in("NVIDIA H200", ranks) for ranks in wanted} == wanted
    assert choose.profile_named_in("NVIDIA B200", 2) is None
    with devices.pretend(devices.H200):
        assert nearest_profile(GPU, 2).name == "h200x2"


def test_an_unknown_gpu_is_predicted_by_its_own_numbers_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="weft"), devices.pretend(devices.L40S):
        found = nearest_profile(GPU)
        assert nearest_profile(GPU) == found
    (record,) = caplog.records
    assert record.name == "weft"
    assert "NVIDIA L40S" in record.getMessage()
    assert "estimated" in record.getMessage()
    assert (found.gpu.sms, found.gpu.l2_bytes) == (142, 96 << 20)
    assert found.tflops("bfloat16") == pytest.approx(312 / 2 * 142 / 108), "half of what an A100's SM does in a clock"
    assert found.gpu.hbm_gbps == pytest.approx(0.9 * 864, rel=0.01)
    assert found.sources["gpu.tflops.bfloat16"] == "estimated"
    assert codec.loads(machine.Machine, codec.dumps(found), "") == found


@pytest.mark.parametrize(
    "found",
    [devices.H200, devices.H100, devices.B200, devices.A100, devices.MI300X],
    ids=lambda found: found.name.replace(" ", "-"),
)
def test_a_shipped_profile_says_what_blocks_of_its_gpu_may_use(found: Any) -> None:
    with devices.pretend(found):
        block, said = capabilities(GPU), nearest_profile(GPU).gpu.capabilities
        assert said == dataclasses.replace(block, warp=32)


def test_plans_take_the_tiles_that_fit_the_gpu() -> None:
    """The shape of the kernel that multiplies arriving chunks, for the machines that are predicted for an A100 and an L40S. An
    L40S has 99 KiB of shared memory and no tensor descriptors: its tiles have fewer stages. With 64 KiB other tiles fit."""
    problem, taken = Problem(op="all_gather_matmul", m=8192, n=4096, k=4096, world_size=4), {}
    for found in (devices.H200, devices.A100, devices.L40S, devices.MI300X):
        with devices.pretend(found):
            profile = nearest_profile(GPU)
            block, machine_block = capabilities(GPU), profile.gpu.capabilities
        assert machine_block
        step = next(s for _, _, _, s in build(problem, "flag_gated", 4) if isinstance(s, Gemm))
        taken[found.name] = shape = shape_of(step, machine_block, profile)
        assert shape == shape_of(step, block, profile), "the kernel takes the shape that is predicted"
        assert shape.shared_bytes(shape.stages, tma=machine_block.tma) <= found_bytes(found)
        assert "flag_gated" in {spec.split(":")[0] for spec in plan(problem, profile).estimates}
    assert taken[devices.A100.name] != taken[devices.L40S.name]
    assert taken[devices.MI300X.name].m * taken[devices.MI300X.name].n < 128 * 256


def test_kernels_of_a_profile_need_its_shared_memory() -> None:
    h200 = machine.load("h200x8")
    with pytest.raises(ValueError, match=r"gpu\.shared_bytes is missing"):
        dataclasses.replace(h200.gpu, shared_bytes=None)


def test_a_newer_gpu_is_estimated_from_the_newest_profile() -> None:
    newer = devices.properties("NVIDIA B300 SXM6 AC", (10, 3), 160, 227, l2_mib=126)
    with devices.pretend(newer):
        found = nearest_profile(GPU)
    assert found.tflops("bfloat16") == pytest.approx(2250 * 160 / 148)
    assert found.copies == machine.load("b200x8").copies


def test_a_board_with_the_name_of_a_known_gpu_and_fewer_sms_is_estimated() -> None:
    with devices.pretend(devices.properties("NVIDIA H100 PCIe", (9, 0), 114, 227)):
        found = nearest_profile(GPU)
    assert (found.name, found.gpu.sms) == ("h200x8-estimated", 114)
    assert found.tflops("bfloat16") == pytest.approx(989 * 114 / 132)


def test_blocks_of_collectives_are_as_many_as_the_named_profile_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cpu, shipped = torch.device("cpu"), 2 * machine.load("h200x8").stores.sms
    assert default_sms(cpu) == shipped
    file = tmp_path / "mine.json"
    file.write_text(codec.dumps(machine.load("h200x8").what_if({"stores.sms": 5})))
    monkeypatch.setenv("WEFT_MACHINE", str(file))
    assert default_sms(cpu) == 10
    monkeypatch.setenv("WEFT_MACHINE", "nothing.json")
    assert default_sms(cpu) == shipped
    assert any("nothing.json" in record.getMessage() for record in caplog.records)
