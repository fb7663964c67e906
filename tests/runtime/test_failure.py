"""What happens when a rank dies, stops, sleeps or fails: every other rank ends, soon, with the culprit's name."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture, shared_memory_names
from families import TP_NAMES
from rank_work import check_both, check_gather, check_scatter
from single_process_ranks import wait_for

import weft
from weft.comm import rank_group
from weft.core.errors import PeerLost, WaitTimeout
from weft.runtime.groups import GROUPS
from weft.runtime.ranks import RankFailed, Ranks

pytestmark = pytest.mark.ranks
BOUND_S, PATIENT_S = 4.0, 60.0
"""Of waits that are to end in vain, and of all others: a machine that is full may hold a rank up for seconds."""
LATE_S = 20.0
"""After a bound, at most, that a rank says so."""


@pytest.fixture
def fresh() -> Iterator[Ranks]:
    with Ranks(3, environment={"WEFT_TIMEOUT_S": str(PATIENT_S)}) as pool:
        yield pool


def _bound_waits(seconds: float) -> None:
    """From here on, until the group is closed."""
    group = dist.group.WORLD
    assert group is not None
    GROUPS.state(group.group_name).rank_group.timeout_s = seconds


def _calls_until(
    victim: int, after_s: float, how: int, names: tuple[str, ...], bound_s: float = PATIENT_S
) -> tuple[str, float]:
    """Call operators without end; `victim` gets the signal on the way. What the others are told, and how soon after."""
    check_gather(64, 48, 32, torch.float32, "flag_gated", 0)
    _bound_waits(bound_s)
    rank_group._GRACE_S = BOUND_S  # a rank that waits for a rank that waits for the victim lets that rank report it
    dist.barrier()
    struck = time.monotonic() + after_s
    if dist.get_rank() == victim:
        threading.Timer(after_s, lambda: os.kill(os.getpid(), how)).start()
    try:
        for call in range(1_000_000):
            check_both(64, 48, 32, torch.float32, names[call % len(names)], call)
    except (PeerLost, WaitTimeout) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - struck
    raise AssertionError("the calls ended")


def test_a_rank_that_died_between_two_tasks_is_named(fresh: Ranks) -> None:
    fresh.run(os.getpid)
    os.kill(fresh.processes[1].pid or 0, signal.SIGKILL)
    fresh.processes[1].join()
    with pytest.raises(RankFailed, match="rank 1: died with exit code -9"):
        fresh.run(os.getpid)


@pytest.mark.parametrize("after_s", [0.31, 0.5])
def test_a_killed_rank_is_named_and_nothing_stays(fresh: Ranks, after_s: float) -> None:
    creators = {str(process.pid) for process in fresh.processes}
    died = rf"PeerLost: (rank \d failed: )?rank 1 \(process {fresh.processes[1].pid}\) died"
    fresh.start(_calls_until, 1, after_s, signal.SIGKILL, TP_NAMES)
    with pytest.raises(RankFailed) as caught:
        fresh.finish(timeout_s=60)
    assert [rank for rank, _ in caught.value.failures] == [1]
    assert "died with exit code -9" in str(caught.value)
    for rank, answer in enumerate(caught.value.results):
        if rank != 1:
            message, seconds = answer
            assert re.fullmatch(died, message), message
            assert seconds < LATE_S
    assert [name for name in shared_memory_names() if name.split("-")[2] in creators] == []
    with Ranks(3) as again:
        again.run(check_gather, 64, 48, 32, torch.float32, "flag_gated", 1)


def test_a_stopped_rank_is_named_at_the_bound(fresh: Ranks) -> None:
    fresh.start(_calls_until, 2, 0.3, signal.SIGSTOP, ("hetero_unfused_1d:2",), BOUND_S)
    assert all(pipe.poll(PATIENT_S) for pipe in fresh._pipes[:2])
    fresh.processes[2].kill()  # it would hear nothing else
    with pytest.raises(RankFailed) as caught:
        fresh.finish(timeout_s=10)
    for message, seconds in caught.value.results[:2]:
        assert "expected" in message
        assert "seen" in message
        assert "rank 2" in message
        assert seconds < BOUND_S + LATE_S


def _sleep_in_a_matmul(name: str, hasty: tuple[int, ...]) -> str:
    """Rank 1 sleeps in the middle of a call, once, until a hasty rank has given up, and its own other lane knows that."""
    from weft.runtime.host import HostProgram

    def slow(*arguments: object, **options: object) -> None:
        HostProgram.multiply = matmul  # type: ignore[method-assign]
        wait_for(lambda: arguments[0].rank_group.broken, PATIENT_S)  # type: ignore[attr-defined]
        matmul(*arguments, **options)  # type: ignore[arg-type]

    check_scatter(64, 48, 32, torch.float32, name, 0)
    matmul = HostProgram.multiply
    if dist.get_rank() == 1:
        HostProgram.multiply = slow  # type: ignore[method-assign, assignment]
    if dist.get_rank() in hasty:
        _bound_waits(BOUND_S)
    dist.barrier()
    try:
        check_scatter(64, 48, 32, torch.float32, name, 1)
    except (PeerLost, WaitTimeout) as error:
        message = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("a rank slept past the bound and nobody noticed")
    finally:
        HostProgram.multiply = matmul  # type: ignore[method-assign]
    dist.barrier()
    weft.close()
    check_scatter(64, 48, 32, torch.float32, name, 2)
    return message


@pytest.mark.parametrize("hasty", [(0, 2), (1,)])
def test_a_sleeping_rank_is_named_with_step_and_flag(fresh: Ranks, hasty: tuple[int, ...]) -> None:
    """Whoever gives up tells the others: another rank, or the lane of rank 1 that does not sleep."""
    messages = fresh.run(_sleep_in_a_matmul, "track_and_trigger:2", hasty)
    waited = {rank: message for rank, message in enumerate(messages) if message.startswith("WaitTimeout: ")}
    assert waited
    assert waited.keys() <= set(hasty)
    for rank, message in waited.items():
        assert f"lane {'copy' if rank == 1 else 'compute'}, step" in message
        assert ("arrived[" in message) == (rank != 1)
        assert "expected 1, seen 0" in message
        assert f"rank 1's lane {'compute' if rank == 1 else 'copy'} raises it" in message
    reasons = tuple(message.removeprefix("WaitTimeout: ") for message in waited.values())
    for rank in {0, 1, 2} - waited.keys():
        assert messages[rank].startswith("PeerLost: rank ")
        assert messages[rank].endswith(reasons)


def _raise_in_a_copy(name: str) -> str:
    """Rank 2 raises on a lane's thread; it gets its own error, the others learn whose it was."""
    from weft.runtime.host import HostProgram

    check_gather(64, 48, 32, torch.float32, name, 0)
    signal_ = HostProgram.signal
    if dist.get_rank() == 2:
        HostProgram.signal = _fail  # type: ignore[method-assign, assignment]
    try:
        check_gather(64, 48, 32, torch.float32, name, 1)
    except (MemoryError, PeerLost) as error:
        message = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("a lane failed and nobody noticed")
    finally:
        HostProgram.signal = signal_  # type: ignore[method-assign]
    with pytest.raises(weft.WeftError, match=r"has failed .* call weft.close\(group\) on every rank"):
        check_gather(64, 48, 32, torch.float32, name, 1)
    dist.barrier()
    weft.close()
    check_gather(64, 48, 32, torch.float32, name, 2)
    return message


def _fail(*_: object) -> None:
    raise MemoryError("planted")


def test_an_error_on_one_lane_ends_every_rank(fresh: Ranks) -> None:
    messages = fresh.run(_raise_in_a_copy, "flag_gated:2")
    assert messages[2] == "MemoryError: planted"
    assert "PeerLost: rank 2 failed: planted" in messages[0] or "PeerLost: rank 1 failed: rank 2 failed: planted" in messages[0]


def _leave_early() -> str:
    check_gather(8, 6, 4, torch.float32, "flag_gated", 0)
    if dist.get_rank() == 0:
        weft.close()
        return "left"
    try:
        check_gather(8, 6, 4, torch.float32, "flag_gated", 1)
    except PeerLost as error:
        return str(error)
    raise AssertionError("a rank left and nobody noticed")


def test_a_rank_that_leaves_is_named(fresh: Ranks) -> None:
    answers = fresh.run(_leave_early)
    assert any("rank 0 has left the group" in answer for answer in answers[1:])


def _slow_to_map() -> str:
    """Rank 1 dies once its segment can be found; rank 0 sees that, and takes its own back; rank 2 is late to look for it."""
    from weft.comm.rank_group import RankGroup
    from weft.comm.shared_memory import SharedSegment

    check_gather(6, 4, 4, torch.float32, "sequential", 0)
    if dist.get_rank() == 1:
        RankGroup.await_mapped = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    if dist.get_rank() == 2:
        plain = SharedSegment.open
        SharedSegment.open = lambda name: (time.sleep(0.5), plain(name))[1]  # type: ignore[method-assign, assignment]
    with pytest.raises(PeerLost) as caught:
        check_gather(6, 4, 4, torch.float32, "shard_p2p", 0)
    return str(caught.value)


def test_a_rank_that_is_late_to_map_hears_who_was_lost(fresh: Ranks) -> None:
    with pytest.raises(RankFailed) as caught:
        fresh.run(_slow_to_map, timeout_s=60)
    first, none, second = caught.value.results
    assert none is None
    for message in (first, second):
        assert re.fullmatch(rf"(rank \d failed: )?rank 1 \(process {fresh.processes[1].pid}\) died", message), message


def test_what_a_dead_creator_left_is_reaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own: in /dev/shm groups of another run of tests reap, too, and leave what there is to reap."""
    from weft.comm import shared_memory
    from weft.comm.shared_memory import process_namespace

    monkeypatch.setattr(shared_memory, "SHM", tmp_path)
    stale = tmp_path / f"weft-{process_namespace()}-999999999-1-0123456789abcdef-data"
    others = tmp_path / "weft-123abc-999999999-1-0123456789abcdef-data"
    for path in (stale, others):
        path.write_bytes(b"x")
    assert shared_memory.remove_stale_segments() == [stale.name]
    assert not stale.exists()
    assert others.exists(), "another container's, where that process may live"


def test_a_bound_that_is_not_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.comm.membership import timeout_from_environment

    monkeypatch.setenv("WEFT_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match="WEFT_TIMEOUT_S is 'soon'"):
        timeout_from_environment()


def _blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_interrupt_from_the_terminal_is_for_the_process_that_has_the_ranks(ranks: RankFixture) -> None:
    """It reaches the whole group of processes: ranks, and the server that imports for them, would each print a traceback."""
    assert ranks(2).run(_blocked) == [True, True]
    assert not _blocked()
