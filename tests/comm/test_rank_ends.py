"""What ends a rank where no call of its peers can know: they are told the reason, and soon."""

from __future__ import annotations

import atexit
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture

import weft
from weft import collectives
from weft.comm.rank_group import RankGroup
from weft.comm.shared_memory import PREFIX, SHM
from weft.core.errors import PeerLost, WeftError
from weft.runtime.ranks import RankFailed, Ranks

pytestmark = pytest.mark.ranks
A, B = torch.ones(4, 8), torch.ones(8, 4)
SOON_S = 15.0
"""Before the bound of waits, which is 20 s here; and for as long other work on the cores may hold ranks up."""


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@contextmanager
def _interrupted_in_a_wait() -> Iterator[None]:
    """This process gets a signal once it has looked after its peers, as it does only while it waits for them."""
    looked, plain = threading.Event(), RankGroup.check_peers

    def looks(self: RankGroup, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        looked.set()

    def signals() -> None:
        looked.wait()
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, _interrupt)
    RankGroup.check_peers = looks  # type: ignore[method-assign]
    threading.Thread(target=signals, daemon=True).start()
    try:
        yield
    finally:
        RankGroup.check_peers = plain  # type: ignore[method-assign]
        signal.signal(signal.SIGALRM, before)


def _interrupted() -> tuple[str, float]:
    """Rank 0 is interrupted while it waits for rank 1, which then calls. What it is told, and after how long."""
    weft.all_gather_matmul(A, B)
    if dist.get_rank() == 0:
        with _interrupted_in_a_wait(), pytest.raises(KeyboardInterrupt):
            weft.all_gather_matmul(A, B)
        with pytest.raises(WeftError, match=r"has failed \(KeyboardInterrupt\); call weft.close"):
            weft.all_gather_matmul(A, B)
        dist.barrier()
        return "", 0.0
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        weft.all_gather_matmul(A, B)
    return str(caught.value), time.monotonic() - began


def test_peers_of_a_rank_that_was_interrupted_are_told(ranks: RankFixture) -> None:
    _, (message, seconds) = ranks(2).run(_interrupted)
    assert message == "rank 0 failed: KeyboardInterrupt"
    assert seconds < SOON_S
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
                weft.close()
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


def _interrupted_choosing() -> tuple[str, float]:
    """Rank 1 is interrupted while it looks for a schedule that rank 0 has. What each is told, and how soon."""
    from weft.runtime import programs

    plain = programs.choose
    if dist.get_rank() == 1:
        programs.choose = _interrupt  # type: ignore[assignment]
    began = time.monotonic()
    try:
        with pytest.raises((KeyboardInterrupt, PeerLost)) as caught:
            weft.all_gather_matmul(A[:, :5], B[:5], schedule="shard_p2p")
    finally:
        programs.choose = plain
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - began


def test_peers_of_a_rank_that_was_interrupted_while_it_chose_are_told(ranks: RankFixture) -> None:
    (first, seconds), (second, _) = ranks(2).run(_interrupted_choosing)
    assert (first, second) == ("PeerLost: rank 1 failed: KeyboardInterrupt", "KeyboardInterrupt: ")
    assert seconds < SOON_S
    ranks(2).run(weft.close)


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
    os.environ.pop("WEFT_SCHEDULE", None)
    if setting == "WEFT_SCHEDULE":
        weft.close()  # this one is read after the group was made, which has failed
    assert weft.all_gather_matmul(A, B).shape == (8, 4)
    return f"{type(caught.value).__name__}: {caught.value}", seconds


@pytest.mark.parametrize(("setting", "value"), [("WEFT_TIMEOUT_S", "0"), ("WEFT_RANKS_PER_NODE", "x"), ("WEFT_SCHEDULE", "x")])
def test_a_setting_that_one_rank_cannot_take_is_raised_on_all(ranks: RankFixture, setting: str, value: str) -> None:
    (first, first_s), (second, second_s) = ranks(2).run(_cannot_start, setting, value)
    assert second.startswith(f"ValueError: {setting} is '{value}'")
    assert first == second.replace("ValueError", "PeerLost: rank 1 failed")
    assert max(first_s, second_s) < SOON_S


def _no_room() -> tuple[str, float]:
    """Rank 1 finds no room for a tensor that peers can reach."""
    from weft.comm.shared_memory import SharedSegment

    weft.close()
    weft.all_gather_matmul(A, B)
    plain = SharedSegment.create
    if dist.get_rank() == 1:
        SharedSegment.create = lambda label, nbytes: plain(label, 1 << 50)  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        with pytest.raises((ValueError, PeerLost)) as caught:
            collectives.empty(64)
    finally:
        SharedSegment.create = plain  # type: ignore[method-assign]
    seconds = time.monotonic() - began
    weft.close()
    return f"{type(caught.value).__name__}: {caught.value}", seconds


def test_a_rank_without_room_for_a_segment_tells_the_others(ranks: RankFixture) -> None:
    (first, first_s), (second, _) = ranks(2).run(_no_room)
    assert second.startswith("ValueError: shared memory: 1125899906842624 bytes are needed")
    assert first == second.replace("ValueError", "PeerLost: rank 1 failed")
    assert first_s < SOON_S


def _interrupted_in_between() -> tuple[str, float, list[str]]:
    """Rank 1 is interrupted while its part of a tensor that peers can reach is reserved. What it is told, how soon, and what
    stays of it under a name."""
    weft.close()
    weft.all_gather_matmul(A, B)
    plain = os.posix_fallocate
    if dist.get_rank() == 1:
        os.posix_fallocate = _interrupt
    began = time.monotonic()
    try:
        with pytest.raises((KeyboardInterrupt, PeerLost)) as caught:
            collectives.empty(64)
    finally:
        os.posix_fallocate = plain
    seconds = time.monotonic() - began
    dist.barrier()
    weft.close()
    left = [path.name for path in SHM.glob(f"{PREFIX}*") if path.name.split("-")[2] == str(os.getpid())]
    return f"{type(caught.value).__name__}: {caught.value}", seconds, left


def test_a_rank_that_is_interrupted_with_a_segment_leaves_none_and_tells_the_others(ranks: RankFixture) -> None:
    (first, seconds, _), (second, _, left) = ranks(2).run(_interrupted_in_between)
    assert (first, second) == ("PeerLost: rank 1 failed: KeyboardInterrupt", "KeyboardInterrupt: ")
    assert seconds < SOON_S
    assert left == []


def _raises_between_exchanges() -> tuple[str, float]:
    """Rank 0 raises on the way to rows that rank 1 waits for. What each is told, and how soon."""
    from weft.runtime.host_resources import RowsOfCall

    splits = torch.tensor([2, 2])
    weft.matmul_all_to_all(A, B, splits=splits, max_rows=8)
    if dist.get_rank() == 0:
        RowsOfCall.moved = _out_of_memory  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises((MemoryError, PeerLost)) as caught:
        weft.matmul_all_to_all(A, B, splits=splits, max_rows=8)
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - began


def _out_of_memory(*_: Any) -> Any:
    raise MemoryError("planted")


def test_with_splits_too_peers_of_a_rank_that_raises_are_told() -> None:
    with Ranks(2, environment={"WEFT_TIMEOUT_S": "20"}) as fresh:
        (first, _), (second, seconds) = fresh.run(_raises_between_exchanges, timeout_s=60)
    assert (first, second) == ("MemoryError: planted", "PeerLost: rank 0 failed: planted")
    assert seconds < SOON_S


def _raises_while_it_plans(error: Exception, victims: tuple[int, ...]) -> tuple[str, float]:
    """Some ranks raise while they look for the schedule of a first call. What this one raises, and how soon; then whether the
    group still works."""
    from weft.runtime import programs

    def raising(*_: Any) -> Any:
        raise error

    plain = programs.choose
    if dist.get_rank() in victims:
        programs.choose = raising
    began = time.monotonic()
    try:
        with pytest.raises((type(error), PeerLost)) as caught:
            weft.all_gather_matmul(A[:, :7], B[:7], schedule="shard_p2p")
    finally:
        programs.choose = plain
    seconds = time.monotonic() - began
    if len(victims) < dist.get_world_size():
        weft.close()
    assert weft.all_gather_matmul(A, B).shape == (4 * dist.get_world_size(), 4)
    return f"{type(caught.value).__name__}: {caught.value}", seconds


@pytest.mark.parametrize("error", [ValueError("planted"), RuntimeError("planted")])
def test_peers_of_a_rank_that_raises_while_it_plans_get_its_error_at_once(ranks: RankFixture, error: Exception) -> None:
    first, second, third = ranks(3).run(_raises_while_it_plans, error, (1,))
    assert second[0] == f"{type(error).__name__}: planted"
    assert first[0] == "PeerLost: rank 1 failed: planted"
    assert re.fullmatch(r"PeerLost: (rank 0 failed: )?rank 1 failed: planted", third[0])
    assert max(seconds for _, seconds in (first, second, third)) < SOON_S


def test_a_group_whose_ranks_all_refuse_a_call_works_on(ranks: RankFixture) -> None:
    reports = ranks(2).run(_raises_while_it_plans, ValueError("planted"), (0, 1))
    assert [said for said, _ in reports] == ["ValueError: planted"] * 2


def _first_call_without_a_rank() -> tuple[str, float]:
    """The last rank is killed once it has called in the default group. What the others get in the first call of another."""
    weft.all_gather_matmul(A, B)
    group = dist.new_group()
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WeftError) as caught:
        weft.all_gather_matmul(A, B, group)
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - began


def test_a_first_call_says_that_its_peer_has_died() -> None:
    with Ranks(3, environment={"WEFT_TIMEOUT_S": "20"}) as pool:
        died = pool.processes[2].pid
        with pytest.raises(RankFailed) as caught:
            pool.run(_first_call_without_a_rank, timeout_s=60)
    for message, seconds in caught.value.results[:2]:
        assert message == f"PeerLost: rank 2 (process {died}) died"
        assert seconds < SOON_S
