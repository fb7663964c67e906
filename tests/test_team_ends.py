"""What ends a rank where no call of its peers can know: they are told the reason, and soon."""

from __future__ import annotations

import atexit
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture

import weft
from weft import collectives
from weft.errors import PeerLost, WeftError

pytestmark = pytest.mark.ranks
A, B = torch.ones(4, 8), torch.ones(8, 4)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _interrupted() -> tuple[str, float]:
    """Rank 0 is interrupted while it waits for rank 1, which then calls. What it is told, and after how long."""
    weft.all_gather_matmul(A, B)
    if dist.get_rank() == 0:
        before = signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            weft.all_gather_matmul(A, B)
        signal.signal(signal.SIGALRM, before)
        with pytest.raises(WeftError, match=r"broken \(KeyboardInterrupt\); call weft.close"):
            weft.all_gather_matmul(A, B)
        return "", 0.0
    time.sleep(0.8)
    began = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        weft.all_gather_matmul(A, B)
    return str(caught.value), time.monotonic() - began


def test_peers_of_a_rank_that_was_interrupted_are_told(ranks: RankFixture) -> None:
    _, (message, seconds) = ranks(2).run(_interrupted)
    assert message == "rank 0 failed: KeyboardInterrupt"
    assert seconds < 5
    ranks(2).run(weft.close)


def _forked() -> str:
    """Rank 0 forks a process, which calls, and ends as processes do, while rank 1 waits in a call. What it raised."""
    weft.all_gather_matmul(A, B)
    said = ""
    if dist.get_rank() == 0:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                weft.all_gather_matmul(A, B)
            except BaseException as error:
                os.write(writing, f"{type(error).__name__}: {error}".encode())
            finally:
                atexit._run_exitfuncs()
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        with os.fdopen(reading) as pipe:
            said = pipe.read().replace(f"process {child} ", "process C ").replace(f"process {os.getpid()},", "process P,")
        time.sleep(0.5)
    assert weft.all_gather_matmul(A, B).shape == (8, 4)
    return said


def test_a_fork_of_a_rank_leaves_its_group_alone(ranks: RankFixture) -> None:
    said, _ = ranks(2).run(_forked)
    assert said.startswith("WeftError: process C is a fork of process P, which is rank 0 of this group: call weft there")


def _cannot_start(setting: str, value: str) -> tuple[str, float]:
    """Rank 1 has a setting that cannot be. What each rank is told by its first call, and how soon."""
    weft.close()
    dist.barrier()
    if dist.get_rank() == 1:
        os.environ[setting] = value
    began = time.monotonic()
    with pytest.raises((ValueError, PeerLost)) as caught:
        weft.all_gather_matmul(A, B)
    seconds = time.monotonic() - began
    os.environ["WEFT_TIMEOUT_S"] = "20"
    os.environ.pop("WEFT_RANKS_PER_NODE", None)
    assert weft.all_gather_matmul(A, B).shape == (8, 4)
    return f"{type(caught.value).__name__}: {caught.value}", seconds


@pytest.mark.parametrize(("setting", "value"), [("WEFT_TIMEOUT_S", "0"), ("WEFT_RANKS_PER_NODE", "x")])
def test_a_setting_that_one_rank_cannot_take_is_raised_on_all(ranks: RankFixture, setting: str, value: str) -> None:
    (first, first_s), (second, second_s) = ranks(2).run(_cannot_start, setting, value)
    assert second.startswith(f"ValueError: {setting} is '{value}'")
    assert first == second.replace("ValueError", "PeerLost: rank 1 failed")
    assert max(first_s, second_s) < 5


def _no_room() -> tuple[str, float]:
    """Rank 1 finds no room for a tensor that peers can reach."""
    from weft.memory import Segment

    weft.close()
    weft.all_gather_matmul(A, B)
    plain = Segment.create
    if dist.get_rank() == 1:
        Segment.create = lambda label, nbytes: plain(label, 1 << 50)  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        with pytest.raises((ValueError, PeerLost)) as caught:
            collectives.empty(64)
    finally:
        Segment.create = plain  # type: ignore[method-assign]
    seconds = time.monotonic() - began
    weft.close()
    return f"{type(caught.value).__name__}: {caught.value}", seconds


def test_a_rank_without_room_for_a_segment_tells_the_others(ranks: RankFixture) -> None:
    (first, first_s), (second, _) = ranks(2).run(_no_room)
    assert second.startswith("ValueError: shared memory: 1125899906842624 bytes asked")
    assert first == second.replace("ValueError", "PeerLost: rank 1 failed")
    assert first_s < 5
