"""How much `auto` measures, and which profile predicts: words and files that are alike on all ranks, or an error."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import RankFixture
from rank_work import check_gather

import weft
from weft.core import codec, machine
from weft.core.problem import Problem
from weft.planner import cache, heuristic
from weft.planner.shortlist import AT_MOST
from weft.runtime import choose

CPU = torch.device("cpu")
PROBLEM = Problem(op="all_gather_matmul", m=8192, n=28672, k=8192, world_size=4)


def test_full_effort_measures_every_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = choose.contenders(PROBLEM, CPU)
    monkeypatch.setenv("WEFT_EFFORT", "full")
    everything = choose.contenders(PROBLEM, CPU)
    assert everything[0] == listed[0] == "sequential"
    assert set(listed) <= set(everything)
    assert len(set(everything)) == len(everything) <= choose.FULL_AT_MOST
    assert len(everything) > AT_MOST >= len(listed)
    monkeypatch.setattr(choose, "FULL_AT_MOST", 10)
    assert len(choose.contenders(PROBLEM, CPU)) == 10


def test_what_was_measured_quickly_is_no_full_plan() -> None:
    assert cache.space() == cache.space("quick") != cache.space("full")


def test_an_unknown_effort_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_EFFORT", "some")
    with pytest.raises(ValueError, match="WEFT_EFFORT is 'some'; use none, quick or full"):
        choose.effort()


def profile(path: Path, device: str, gbps: float) -> Path:
    known = machine.load("h200x8")
    made = dataclasses.replace(known, name="mine", device=device, links=dataclasses.replace(known.links, gbps=gbps))
    path.write_text(codec.dumps(made))
    return path


def test_a_profile_of_another_device_is_refused_unless_forced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert choose.profile_for(CPU) == machine.load("h200x8"), "the shipped one that is nearest"
    file = profile(tmp_path / "mine.json", "NVIDIA H200", 5.0)
    monkeypatch.setenv("WEFT_MACHINE", str(file))
    with pytest.raises(ValueError, match=r"mine.json, measured on NVIDIA H200; this is cpu: calibrate this one"):
        choose.by_sizes(PROBLEM, CPU)
    monkeypatch.setenv("WEFT_MACHINE_FORCE", "1")
    assert choose.profile_for(CPU).links.gbps == 5.0
    assert choose.by_sizes(PROBLEM, CPU) == heuristic(PROBLEM, machine.load(file))
    monkeypatch.delenv("WEFT_MACHINE_FORCE")
    profile(file, "cpu", 6.0)
    assert choose.profile_for(CPU).links.gbps == 6.0
    assert choose.profile_for(CPU) is choose.profile_for(CPU), "read once"
    assert choose.profile_for(CPU).digest == machine.load(file).digest != machine.load("h200x8").digest
    monkeypatch.setenv("WEFT_MACHINE", "nothing.json")
    with pytest.raises(ValueError, match=r"nothing\.json"):
        choose.profile_for(CPU)


def _trials(effort: str) -> int:
    """How many schedules are measured at the first call, by a clock that makes all alike."""
    from weft.runtime import groups

    def clock(call: Callable[[], object], calls: int) -> int:
        call()
        return 1000

    timer_for, groups.timer_for = groups.timer_for, lambda device: clock  # type: ignore[assignment,return-value]
    os.environ["WEFT_EFFORT"] = effort
    weft.close()
    try:
        check_gather(64, 48, 32, torch.float32, "auto", 0)
        (choice,) = weft.choices()
        return len(choice.trials)
    finally:
        groups.timer_for = timer_for
        del os.environ["WEFT_EFFORT"]
        weft.close()


@pytest.mark.ranks
def test_without_effort_nothing_is_measured(ranks: RankFixture) -> None:
    assert ranks(2).run(_trials, "none") == [0, 0]
    few = ranks(2).run(_trials, "quick")
    assert few[0] == few[1] > 1
