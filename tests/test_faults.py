"""A short form of benchmarks/faults.py: random faults of ranks end with an error that names them, or with the right result."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from faults import FAULTS, Told, Trial, _wrong, drawn, judged, suffer

from weft.execute.bound import Where
from weft.execute.host import HostProgram
from weft.schedule import Flag


@pytest.mark.ranks
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told(fault: str) -> None:
    for trial in drawn(2, 11, "cpu", [fault]):
        line = judged(trial)
        assert line["verdict"] == "right", f"{trial}: {line}"


def _blocks_come_late_to_their_waits(trial: Trial, folder: str) -> Told:
    """So that the lane that waits for them is the first whose bound ends."""
    wait = HostProgram.wait

    def late(self: HostProgram, flag: Flag, value: int, where: Where) -> None:
        if where.lane == "blocks":
            time.sleep(0.2)
        wait(self, flag, value, where)

    HostProgram.wait = late  # type: ignore[method-assign]
    try:
        return suffer(trial, folder)
    finally:
        HostProgram.wait = wait  # type: ignore[method-assign]


@pytest.mark.ranks
def test_a_lane_that_waits_for_one_of_its_own_rank_names_the_rank_behind_it() -> None:
    trial = Trial(op="all_reduce", schedule="copy_engine:1", fault="late", victim=1, step=3, seed=3)
    line = judged(trial, _blocks_come_late_to_their_waits)
    assert line["verdict"] == "right", line


def _trial(fault: str) -> Trial:
    return Trial(op="all_gather_matmul", schedule="sequential", fault=fault, victim=1, step=0, seed=0)


def _told(error: str = "", seconds: float = 0.1, left: tuple[str, ...] = ()) -> Told:
    return Told(error=error, seconds=seconds, again=True, left=left)


@pytest.mark.parametrize(
    ("fault", "told", "wrong"),
    [
        ("kill", [_told("PeerLost: rank 1 (process 7) died"), None, _told("PeerLost: rank 1 (process 7) died")], ""),
        ("kill", [_told(), None, _told()], "rank 0 was told ''"),
        ("kill", [_told("PeerLost: rank 2 died"), None, _told()], "rank 0 was told 'PeerLost: rank 2 died'"),
        ("kill", [None, None, _told("PeerLost: rank 1 died")], "rank 0 told nothing"),
        ("late", [_told("WaitTimeout: rank 1 raises it"), _told(), _told("WaitTimeout: rank 0 did not arrive")], ""),
        ("kill", [_told("PeerLost: rank 1 died"), None, _told("WaitTimeout: rank 0")], "rank 2 was told 'WaitTimeout: rank 0'"),
        ("slow", [_told(), _told(), _told()], ""),
        ("slow", [_told("WaitTimeout: rank 1"), _told(), _told()], "rank 0 was told 'WaitTimeout: rank 1'"),
        ("late", [_told(seconds=7), _told(), _told()], "rank 0 took 7.0 s"),
        ("slow", [_told(), _told(), _told(left=("weft-7-1-ab-data",))], "rank 2 left weft-7-1-ab-data"),
        ("differ", [_told("PeerLost: rank 1 died"), _told(), _told()], "rank 0 was told 'PeerLost: rank 1 died'"),
    ],
)
def test_what_is_wrong_is_seen(fault: str, told: list[Told | None], wrong: str) -> None:
    assert _wrong(_trial(fault), told) == wrong


def test_trials_are_the_same_for_the_same_seed() -> None:
    assert list(drawn(20, 3, "cpu", [])) == list(drawn(20, 3, "cpu", []))
    assert len({(trial.op, trial.schedule) for trial in drawn(200, 3, "cpu", [])}) > 40
    with pytest.raises(ValueError, match="no trial is like that"):
        list(drawn(1, 3, "cpu", ["explode"]))
