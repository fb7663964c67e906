"""The two modes: `auto` measures, and `planned` predicts; and which machine profile predicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import inductor_work
import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_work import check_gather
from torch.distributed import _functional_collectives as functional
from weft_log import logged

import weft
from weft.core import codec, machine
from weft.core.problem import Problem
from weft.planner import plan
from weft.runtime import choose
from weft.runtime.groups import GROUPS

CPU = torch.device("cpu")
PROBLEM = Problem(op="all_gather_matmul", m=8192, n=28672, k=8192, world_size=4)


def test_planned_is_what_the_planner_chooses() -> None:
    h200 = machine.load("h200x8")
    for change in ({}, {"m": 128}, {"world_size": 3}, {"b_sizes": (28671, 1, 0, 0)}):
        problem = dataclasses.replace(PROBLEM, **change)  # type: ignore[arg-type]
        assert choose.planned(problem, CPU) == plan(problem, h200).chosen.spec


def profile(path: Path, device: str, gbps: float) -> Path:
    known = machine.load("h200x8")
    made = dataclasses.replace(known, name="mine", device=device, links=dataclasses.replace(known.links, gbps=gbps))
    path.write_text(codec.dumps(made))
    return path


def test_a_profile_of_another_device_is_used_with_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert choose.profile_for(CPU) == machine.load("h200x8"), "the shipped one that is nearest"
    file = profile(tmp_path / "mine.json", "NVIDIA H200", 5.0)
    monkeypatch.setenv("WEFT_MACHINE", str(file))
    with logged() as seen:
        assert choose.profile_for(CPU).links.gbps == 5.0
    (text,) = seen
    assert "mine.json, which was measured on NVIDIA H200, but this is cpu" in text
    assert choose.planned(PROBLEM, CPU) == plan(PROBLEM, machine.load(file)).chosen.spec
    profile(file, "cpu", 6.0)
    with logged() as seen:
        assert choose.profile_for(CPU).links.gbps == 6.0
    assert not seen
    assert choose.profile_for(CPU) is choose.profile_for(CPU), "read once"
    assert choose.profile_for(CPU).digest == machine.load(file).digest != machine.load("h200x8").digest
    monkeypatch.setenv("WEFT_MACHINE", "nothing.json")
    with pytest.raises(ValueError, match=r"nothing\.json"):
        choose.profile_for(CPU)


def _measured(schedule: str) -> int:
    """How many calls are timed, by a clock that makes all schedules the same."""
    from weft.runtime import tuner

    timed = 0

    def clock(call: Callable[[], object], calls: int) -> int:
        nonlocal timed
        timed += 1
        call()
        return 1000

    timer_for, tuner.timer_for = tuner.timer_for, lambda device: clock  # type: ignore[assignment,return-value]
    weft.close()
    try:
        for seed in range(30):
            check_gather(64, 48, 32, torch.float32, schedule, seed)
        return timed
    finally:
        tuner.timer_for = timer_for
        weft.close()


@pytest.mark.ranks
def test_planned_measures_nothing(ranks: RankFixture) -> None:
    assert ranks(2).run(_measured, "planned") == [0, 0]
    few = ranks(2).run(_measured, "auto")
    assert few[0] == few[1] > 1


def _in_environment(value: str) -> int:
    """With WEFT_SCHEDULE: how many calls of "auto" are timed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_SCHEDULE", value)
        return _measured("auto")


@pytest.mark.ranks
def test_weft_schedule_says_what_auto_is(ranks: RankFixture) -> None:
    assert ranks(2).run(_in_environment, "sequential") == [0, 0]
    assert ranks(2).run(_in_environment, "planned") == [0, 0]


def _compiled_before() -> list[str]:
    """What programs run of a compiled graph that asks for "auto", without WEFT_SCHEDULE and then with it."""
    group = dist.group.WORLD
    assert group is not None
    own = torch.ones(8, 16), torch.ones(16, 12)
    overlap = weft.CompilePass()
    run = torch.compile(lambda a, b: functional.all_gather_tensor(a, 0, group) @ b, backend=inductor_work.eager(overlap))
    found = []
    for value in ("auto", "sequential"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WEFT_SCHEDULE", value)
            torch.testing.assert_close(run(*own), torch.full((8 * group.size(), 12), 16.0))
        found.append([asked for _, asked in GROUPS.state(group.group_name).schedules_and_specs()][-1])
    weft.close()
    return found


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_compiled_graphs_are_switched_off_too(ranks: RankFixture) -> None:
    assert ranks(2).run(_compiled_before) == [["auto", "sequential"]] * 2


def _by_rank() -> str:
    """The error of a call for which rank 0 alone has WEFT_SCHEDULE."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setenv("WEFT_SCHEDULE", "sequential")
        try:
            check_gather(64, 48, 32, torch.float32, "auto", 0)
        except weft.RankMismatch as error:
            return str(error)
        finally:
            weft.close()
    return ""


@pytest.mark.ranks
def test_ranks_of_which_one_has_weft_schedule_get_an_error(ranks: RankFixture) -> None:
    for text in ranks(2).run(_by_rank):
        assert "sequential" in text
        assert "auto" in text


def test_another_value_of_weft_schedule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SCHEDULE", "off")
    with pytest.raises(ValueError, match="WEFT_SCHEDULE is 'off'"):
        choose.automatic()
