"""What is predicted is what runs: schedules have copy lanes as the machine's profile has copies, whoever names them."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_work import check_both, told_with

import weft
from weft.core.machine import load
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.perf import run
from weft.planner import plan
from weft.runtime.choose import choose
from weft.runtime.groups import GROUPS
from weft.schedules import build

CPU = torch.device("cpu")
GATHER = Problem(op="all_gather_matmul", m=8192, n=28672, k=4096, world_size=8)


def copy_lanes(schedule: Schedule) -> int:
    return sum(lane.kind == "copy" for lane in schedule.ranks[0])


def test_what_runs_is_what_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_MACHINE", "mi300x8")
    machine = load("mi300x8")
    found = plan(GATHER, machine)
    chosen = choose(GATHER, "planned", CPU, {})
    assert run(chosen, machine).total_us == found.chosen.predicted_us
    assert choose(GATHER, found.chosen.spec, CPU, {}) == chosen, "a kept plan's name, or the caller's"
    assert copy_lanes(chosen) == 7


def test_one_copy_engine_has_one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 x H200, and whatever is nearest to a CPU."""
    monkeypatch.delenv("WEFT_MACHINE", raising=False)
    assert not load("h200x8").fans_out
    assert choose(GATHER, "flag_gated:2", CPU, {}) == build(GATHER, "flag_gated", 2)


def test_a_schedule_that_is_named_needs_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine in ("nothing.json", "h200x8"):  # the second one is of another device
        monkeypatch.setenv("WEFT_MACHINE", machine)
        assert choose(GATHER, "flag_gated:2", CPU, {}) == build(GATHER, "flag_gated", 2)


SPECS = ("flag_gated:2", "hetero_unfused_1d:2", "shard_p2p", "track_and_trigger:2")


def _fanned_out() -> list[int]:
    """Copy lanes of what ran."""
    lanes = []
    with mock.patch.dict(os.environ, {"WEFT_MACHINE": "mi300x8"}):
        weft.close()
        for spec in SPECS:
            for seed in range(2):
                check_both(24, 12, 16, torch.float32, spec, seed)
        group = dist.group.WORLD
        assert group is not None
        lanes = [copy_lanes(schedule) for schedule in GROUPS.state(group.group_name).schedules()]
        weft.close()
    return lanes


@pytest.mark.ranks
def test_a_copy_lane_for_each_peer_runs_right(ranks: RankFixture) -> None:
    for lanes in ranks(3).run(_fanned_out):
        assert max(lanes) >= 2


def _profiles_differ() -> list[str]:
    """Rank 1 has a machine with a lane for each peer; then the group goes on."""
    machines = ("h200x8", "mi300x8")[dist.get_rank()], "mi300x8"
    return told_with([{"WEFT_MACHINE": machine} for machine in machines], "planned")


@pytest.mark.ranks
def test_ranks_agree_on_copy_lanes(ranks: RankFixture) -> None:
    for first, then in ranks(2).run(_profiles_differ):
        assert all(named in first for named in ("rank 0", "rank 1", "copies.engines", "WEFT_MACHINE"))
        assert then == "right"
