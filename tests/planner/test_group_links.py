"""Kept plans of groups whose GPUs are linked otherwise are apart."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.core.problem import Problem
from weft.runtime import plan_cache as versions
from weft.runtime import tuner
from weft.runtime.autotune import Choice, Measurement
from weft.runtime.tuner import GroupPlanCache

PROBLEM = Problem(op="all_gather_matmul", m=64, n=48, k=32, world_size=2)
BRIDGED = ({0, 1}, {2, 3})
"""Pairs of four GPUs that a bridge links; all others go through the host."""


class Driver:
    """Ranks of links as cuda-bindings gives them."""

    CUdevice_P2PAttribute = SimpleNamespace(CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK=1)

    @staticmethod
    def cuDeviceGetP2PAttribute(asked: int, one: int, other: int) -> tuple[int, int]:
        return 0, 0 if {one, other} in BRIDGED else 1


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "driver_api", lambda: Driver)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} != {0, 3})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"gpu {device.index}"))


def numbers(*indices: int) -> list[int]:
    return [versions.gpu_number(torch.device("cuda", index)) for index in indices]


@pytest.mark.usefixtures("four_gpus")
def test_kinds_of_links() -> None:
    assert versions.links_between(numbers(0, 1)) == versions.links_between(numbers(3, 2)) == "rank 0 x 1"
    assert versions.links_between(numbers(0, 2)) == "rank 1 x 1"
    assert versions.links_between(numbers(0, 3)) == "none x 1"
    assert versions.links_between([*numbers(0), 12345]) == "not seen x 1"
    assert versions.links_between(numbers(2, 2)) == "the same x 1"
    assert versions.links_between(numbers(0, 1, 2, 3)) == "none x 1, rank 0 x 2, rank 1 x 3"


class RankGroupOf:
    """Rank 0 of two, on these GPUs."""

    def __init__(self, *indices: int) -> None:
        self.rank, self.world_size, self.nodes, self.ranks_on_node = 0, len(indices), (), range(len(indices))
        self._numbers = tuple(numbers(*indices))

    def agree_on_call(self, text: str, mine: int) -> tuple[int, ...]:
        return self._numbers if text == "GPUs of the group" else (mine,) * self.world_size

    def fail_group_on_error(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.usefixtures("four_gpus")
def test_a_plan_of_linked_gpus_is_not_taken_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuner, "_machine_and_versions", lambda device, world_size: ({}, {}))
    monkeypatch.setattr(tuner, "profile_for", lambda device, world_size: kept_profile())
    device, choice = (
        torch.device("cuda", 0),
        Choice(problem=PROBLEM, spec="shard_p2p", measurements=(Measurement(spec="shard_p2p", us=1.0),)),
    )

    def plans(*indices: int) -> GroupPlanCache:
        rank_group: Any = RankGroupOf(*indices)
        return GroupPlanCache(rank_group)

    first = plans(0, 1)
    assert first.find(PROBLEM, device) is None
    first.keep(choice, device)
    found = plans(2, 3).find(PROBLEM, device)
    assert found is not None
    assert (found.spec, found.from_cache) == ("shard_p2p", True)
    assert plans(0, 2).find(PROBLEM, device) is None


def kept_profile() -> Any:
    from weft.core.machine import load

    return load("h200x8")
