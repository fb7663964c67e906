"""How ranks were started: what they agree on before their GPUs share memory, with GPUs that are made up."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from weft.comm import symmetric_heap
from weft.comm.symmetric_heap import BLOCKING, OVERLAPPING, agree_on_launch
from weft.core.problem import Problem
from weft.runtime.cuda_resources import refuse_lanes
from weft.schedules import build


@dataclass
class Group:
    """The ranks of one node, of which this is rank 0. others: what the other ranks give, call by call."""

    others: list[tuple[int, ...]]
    ranks_on_node: range = range(2)

    def agree_on_call(self, text: str, mine: int) -> tuple[int, ...]:
        return (mine, *self.others.pop(0))


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"gpu {device.index}"))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(symmetric_heap, "_SET_HERE", set())
    for name in (OVERLAPPING, BLOCKING, "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "")


def number(uuid: int) -> int:
    from weft.compat.device import gpu_number

    return gpu_number(torch.device("cuda", uuid))


def agreed(gpu: int, index: int, facts: int = 0) -> str:
    """Why nothing can overlap, where rank 1 has the GPU `gpu` by this index."""
    return agree_on_launch(Group([(number(gpu),), (16 * index + facts,)]), torch.device("cuda", 0))  # type: ignore[arg-type]


def test_ranks_that_see_their_own_gpu_alone_are_told_apart_by_it() -> None:
    assert not agreed(gpu=1, index=1)
    assert os.environ[OVERLAPPING] == "", "torch tells them apart by their indices"
    assert not agreed(gpu=1, index=0)
    assert os.environ[OVERLAPPING] == "1"


def test_ranks_of_one_gpu_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks 0 and 1 use the same GPU.*LOCAL_RANK"):
        agreed(gpu=0, index=0)
    with pytest.raises(ValueError, match="ranks 0 and 1"):
        agreed(gpu=0, index=0, facts=4)  # allowed by one rank alone


def test_what_weft_has_set_itself_allows_no_shared_gpu() -> None:
    assert not agreed(gpu=1, index=0)
    with pytest.raises(ValueError, match="ranks 0 and 1"):
        agreed(gpu=0, index=0, facts=4)


def test_ranks_of_one_gpu_may_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERLAPPING, "1")
    for _ in range(2):  # another group, or the same one after weft.close
        assert not agreed(gpu=0, index=0, facts=4)


@pytest.mark.parametrize(("mine", "theirs", "blocks"), [("1", 0, True), ("", 1, True), ("0", 0, False)])
def test_one_rank_whose_launches_block_is_enough(monkeypatch: pytest.MonkeyPatch, mine: str, theirs: int, blocks: bool) -> None:
    monkeypatch.setenv(BLOCKING, mine)
    assert (BLOCKING in agreed(gpu=1, index=1, facts=theirs)) is blocks


def test_an_allocator_without_pools_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cudaMallocAsync" in agreed(gpu=1, index=1, facts=2)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert "cudaMallocAsync" in agreed(gpu=1, index=1)


@pytest.mark.parametrize(
    ("mine", "theirs", "few"), [("1", 0, True), ("7", 0, True), ("", 8, True), ("8", 0, False), ("all", 0, False)]
)
def test_one_rank_with_few_hardware_queues_is_enough(
    monkeypatch: pytest.MonkeyPatch, mine: str, theirs: int, few: bool
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", mine)
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in agreed(gpu=1, index=1, facts=theirs)) == few


def test_more_lanes_than_hardware_queues_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane for each of seven peers is too much for the eight queues of the default."""
    problem = Problem(op="matmul_reduce_scatter", m=64, n=64, k=64, world_size=8)
    wide, narrow = (build(problem, "hetero_unfused_1d", fan_out=fan_out) for fan_out in (True, False))
    refuse_lanes(narrow)
    with pytest.raises(
        ValueError, match=r"schedule is hetero_unfused_1d:8, which needs 12 hardware queues, and CUDA has 8; set CUDA_DEV"
    ):
        refuse_lanes(wide)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    refuse_lanes(wide)
