"""A short form of `faults.py`: random faults of ranks end with an error that names them, or with the right result."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import faults
import pytest
from calls import Work
from faults import FAULTS, FaultTrial, Outcome, _wrong, drawn, judged, suffer, summary
from single_process_ranks import wait_for

from weft.comm import rank_group
from weft.runtime.groups import GROUPS
from weft.runtime.host import HostProgram

pytestmark = pytest.mark.slow

PATIENT_S, IN_VAIN_S, SAYS_S, TOLD_WITHIN_S = 60.0, 2.0, 1.5, 15.0
"""A machine that is full may hold any rank up for seconds: so waits have a short bound only where they are to end in vain, and
ranks more time there to say first what they wait for."""


def _suffers(trial: FaultTrial, folder: str) -> Outcome:
    """One rank's part. A victim that is late is that until somebody has given up."""
    strike, following = faults._strike, faults._next
    os.environ["WEFT_TIMEOUT_S"] = str(PATIENT_S)

    def struck(fault: str) -> None:
        waits = GROUPS.state(faults._group(trial).group_name).rank_group
        if fault != "late":
            strike(fault)
        else:
            wait_for(lambda: waits.broken or waits.has_failed_peer(), PATIENT_S)

    def followed(*arguments: Any) -> Work:
        if trial.fault in ("stop", "late"):
            GROUPS.state(faults._group(trial).group_name).rank_group.timeout_s = IN_VAIN_S
        return following(*arguments)

    with mock.patch.multiple(faults, _strike=struck, _next=followed), mock.patch.object(rank_group, "_GRACE_S", SAYS_S):
        return suffer(trial, folder)


def _judged(trial: FaultTrial, suffers: Callable[[FaultTrial, str], Outcome] = _suffers) -> dict[str, Any]:
    """A trial's line. A rank whose wait must end in vain has a short timeout; all others have a long one."""
    bound_s, within_s = IN_VAIN_S + SAYS_S, TOLD_WITHIN_S + (IN_VAIN_S + SAYS_S) * (trial.fault in ("stop", "late"))
    with mock.patch.multiple(faults, BOUND_S=bound_s, GRACE_S=within_s - bound_s):
        line: dict[str, Any] = judged(trial, suffers)
        return line


@pytest.mark.ranks
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported(fault: str) -> None:
    for trial in drawn(2, 11, "cpu", [fault]):
        line = _judged(trial)
        assert line["verdict"] == "right", f"{trial}: {line}"


@pytest.mark.ranks
@pytest.mark.parametrize("op", ["splits", "concurrent", "hooks", "embedding_bag_all_to_all"])
def test_a_fault_is_reported_in_what_is_more_than_one_operator_and_in_lookups(op: str) -> None:
    trials = list(drawn(3, 21, "cpu", [op]))
    assert any(trial.subgroup for trial in trials)
    for trial in trials:
        line = _judged(trial)
        assert line["verdict"] == "right", f"{trial}: {line}"


def _blocks_come_late_to_their_waits(trial: FaultTrial, folder: str) -> Outcome:
    """So that the lane that waits for them is the first whose bound ends."""
    wait = HostProgram.wait

    def late(self: HostProgram, slot: int, value: int) -> None:
        _, lane, _ = self._waiter[slot]
        if lane == "blocks" and self.words[self.rank].load(slot) < value:
            time.sleep(0.2)
        wait(self, slot, value)

    HostProgram.wait = late  # type: ignore[method-assign]
    try:
        return _suffers(trial, folder)
    finally:
        HostProgram.wait = wait  # type: ignore[method-assign]


@pytest.mark.ranks
def test_a_lane_that_waits_for_one_of_its_own_rank_names_the_rank_behind_it() -> None:
    trial = FaultTrial(op="all_reduce", schedule="copy_engine:1", fault="late", victim=1, step=3, seed=3)
    line = _judged(trial, _blocks_come_late_to_their_waits)
    assert line["verdict"] == "right", line


def _trial(fault: str) -> FaultTrial:
    return FaultTrial(op="all_gather_matmul", schedule="sequential", fault=fault, victim=1, step=0, seed=0)


def _outcome(error: str = "", seconds: float = 0.1, left: tuple[str, ...] = ()) -> Outcome:
    return Outcome(error=error, seconds=seconds, again=True, left=left)


@pytest.mark.parametrize(
    ("fault", "outcomes", "wrong"),
    [
        ("kill", [_outcome("PeerLost: rank 1 (process 7) died"), None, _outcome("PeerLost: rank 1 (process 7) died")], ""),
        ("kill", [_outcome(), None, _outcome()], "rank 0 got ''"),
        ("kill", [_outcome("PeerLost: rank 2 died"), None, _outcome()], "rank 0 got 'PeerLost: rank 2 died'"),
        ("kill", [None, None, _outcome("PeerLost: rank 1 died")], "rank 0 did not answer"),
        ("late", [_outcome("WaitTimeout: rank 1 raises it"), _outcome(), _outcome("WaitTimeout: rank 0 did not arrive")], ""),
        (
            "kill",
            [_outcome("PeerLost: rank 1 died"), None, _outcome("WaitTimeout: rank 0")],
            "rank 2 got 'WaitTimeout: rank 0'",
        ),
        ("slow", [_outcome(), _outcome(), _outcome()], ""),
        ("slow", [_outcome("WaitTimeout: rank 1"), _outcome(), _outcome()], "rank 0 got 'WaitTimeout: rank 1'"),
        ("late", [_outcome(seconds=7), _outcome(), _outcome()], "rank 0 took 7.0 s"),
        ("slow", [_outcome(), _outcome(), _outcome(left=("weft-7-1-ab-data",))], "rank 2 left weft-7-1-ab-data"),
        ("differ", [_outcome("PeerLost: rank 1 died"), _outcome(), _outcome()], "rank 0 got 'PeerLost: rank 1 died'"),
    ],
)
def test_what_is_wrong_is_seen(fault: str, outcomes: list[Outcome | None], wrong: str) -> None:
    assert _wrong(_trial(fault), outcomes) == wrong


def test_what_was_right_is_counted_and_what_was_not_is_written_whole() -> None:
    right = {"fault": "kill", "ranks": 2, "device": "cpu", "verdict": "right", "op": "all_reduce", "schedule": "sequential"}
    right |= {"errors": {"0": "PeerLost"}, "slowest_s": 0.1}
    wrong = {**right, "verdict": "nobody noticed", "seed": 7}
    found = list(summary([right, wrong, {**right, "op": "all_gather", "slowest_s": 0.3}, {**right, "fault": "slow"}]))
    assert [(line["fault"], line["verdict"], line.get("trials")) for line in found] == [
        ("kill", "nobody noticed", None),
        ("kill", "right", 2),
        ("slow", "right", 1),
    ]
    assert found[0] == wrong
    assert found[1]["ops"] == {"all_gather": 1, "all_reduce": 1}
    assert (found[1]["errors_seen"], found[1]["slowest_s"]) == ({"PeerLost": 2}, 0.3)


def test_trials_are_the_same_for_the_same_seed() -> None:
    assert list(drawn(20, 3, "cpu", [])) == list(drawn(20, 3, "cpu", []))
    assert len({(trial.op, trial.schedule) for trial in drawn(200, 3, "cpu", [])}) > 40
    with pytest.raises(ValueError, match="no trial is like that"):
        list(drawn(1, 3, "cpu", ["explode"]))
