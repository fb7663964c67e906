"""How long ranks wait for each other, as the environment has it."""

from __future__ import annotations

import time

import pytest
from single_process_ranks import rank_groups

from weft.comm.membership import timeout_from_environment
from weft.core.errors import WaitTimeout


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e400", "1e10", "soon", ""])
def test_what_is_no_bound_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT_S", text)
    with pytest.raises(ValueError, match=f"WEFT_TIMEOUT_S is '{text}'; it must be a number of seconds above 0, and at most"):
        timeout_from_environment()


@pytest.mark.parametrize(("text", "seconds"), [("0.5", 0.5), (" 5 ", 5.0), ("1e9", 1e9)])
def test_what_is_one_is_taken(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT_S", text)
    assert timeout_from_environment() == seconds


def test_what_came_while_this_process_was_stopped_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_group, _ = rank_groups(timeout_s=0.05)
    sleep, came = time.sleep, []

    def stopped(seconds: float) -> None:
        sleep(0.1)
        came.append(seconds)

    monkeypatch.setattr(time, "sleep", stopped)
    rank_group.wait_until(lambda: bool(came), lambda: "nothing")
    with pytest.raises(WaitTimeout, match="nothing after"):
        rank_group.wait_until(lambda: False, lambda: "nothing")
