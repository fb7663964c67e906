"""The first call of a group is bounded as all others are: who does not come is named, and the group can be used later."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from torch.distributed.distributed_c10d import PrefixStore

import weft
from weft.comm import handshake as module
from weft.comm.handshake import handshake
from weft.core.errors import PeerLost, RankMismatch, WaitTimeout
from weft.runtime.ranks import RankFailed, Ranks

BOUND_S, LATE_S = 3.0, 15.0
"""Of waits; and after it, at most, that a rank raises its error: a machine that is busy may delay it."""


class Rank:
    """A rank of a group that is only a store: it may be a thread."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self._rank, self._size = store, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def _file(tmp_path: Path, size: int) -> Any:
    return dist.FileStore(str(tmp_path / "store"), size)


def _tcp(tmp_path: Path, size: int) -> Any:
    return dist.TCPStore("127.0.0.1", 0, 1, is_master=True)


def _hash(tmp_path: Path, size: int) -> Any:
    return dist.HashStore()


Store = Callable[[Path, int], Any]


@pytest.fixture(params=[_file, _tcp, _hash], ids=["file", "tcp", "hash"])
def group(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Any]]:
    """The ranks of a group of so many."""
    monkeypatch.setattr(module, "store_of", lambda rank, name: PrefixStore(name, rank.store.clone()))

    def made(size: int) -> list[Any]:
        store = request.param(tmp_path, size)
        return [Rank(store, rank, size) for rank in range(size)]

    return made


def _say(rank: Any, mine: Any, timeout_s: float = 20.0, after_s: float = 0.0) -> list[Any] | str:
    time.sleep(after_s)
    try:
        return handshake(rank, mine, timeout_s=timeout_s)
    except (WaitTimeout, PeerLost) as error:
        return f"{type(error).__name__}: {error}"


def _all(call: Callable[[Any], Any], ranks: list[Any]) -> list[Any]:
    """What a call gives of each rank, all at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_all_get_what_all_say_by_rank_and_again(group: Callable[[int], list[Any]], size: int) -> None:
    ranks = group(size)
    for turn in range(3):
        answers = _all(lambda rank: _say(rank, [rank.rank(), "ü"]), ranks)
        assert answers == [[[rank, "ü"] for rank in range(size)]] * size, turn


def test_one_handshake_after_the_other(group: Callable[[int], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank comes again before the others have read what all said."""
    read = module._Attempt._read

    def later(self: Any, keys: Any) -> Any:
        time.sleep(random.uniform(0.0, 0.02))
        return read(self, keys)

    monkeypatch.setattr(module._Attempt, "_read", later)
    answers = _all(lambda rank: [_say(rank, [turn, rank.rank()]) for turn in range(10)], group(3))
    assert answers == [[[[turn, rank] for rank in range(3)] for turn in range(10)]] * 3


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_who_is_missing_is_named_and_all_can_come_later(group: Callable[[int], list[Any]], missing: int) -> None:
    ranks = group(3)
    came = [rank for rank in ranks if rank.rank() != missing]
    for turn in range(2):
        began = time.monotonic()
        errors = _all(lambda rank: _say(rank, "old", 0.6), came)
        assert time.monotonic() - began < LATE_S, turn
        assert all(error.startswith("WaitTimeout: within 0.6 s (WEFT_TIMEOUT_S), rank") for error in errors)
        assert sum(f"rank {missing} has not come" in error for error in errors) == 2, errors
    answers = _all(lambda rank: _say(rank, ["new", rank.rank()]), ranks)
    assert answers == [[["new", 0], ["new", 1], ["new", 2]]] * 3


def test_a_late_rank_is_waited_for(
    group: Callable[[int], list[Any]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 comes once both of the others have said that they wait for it."""
    monkeypatch.setattr(module, "WARNS_AFTER_S", 0.2)

    def come(rank: Any) -> list[Any] | str:
        until = time.monotonic() + LATE_S
        while rank.rank() == 1 and len(caplog.records) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        return _say(rank, rank.rank(), 2 * LATE_S)

    with caplog.at_level(logging.WARNING, "weft"):
        answers = _all(come, group(3))
    assert answers == [[0, 1, 2]] * 3
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all("for 0.2 s rank 1 has not come" in text for text in said)


def test_one_that_gave_up_is_named_to_who_comes_too_late(group: Callable[[int], list[Any]]) -> None:
    ranks = group(2)
    assert "rank 0 has not come" in _say(ranks[1], 1, 0.3)
    assert "rank 1 has given up" in _say(ranks[0], 0, 0.3)


def test_ranks_that_give_up_and_come_again_never_get_what_an_earlier_attempt_said(
    group: Callable[[int], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds so short that ranks give up at all moments. Whoever gets a list gets one of attempts that all waited in it."""
    size, ranks = 3, group(3)
    lists: dict[str, set[int]] = {}
    ended = threading.Event()

    def life(rank: Any) -> int:
        draw, attempts = random.Random(rank.rank()), 0
        while attempts < 60 and not ended.is_set():
            attempts += 1
            found = _say(rank, f"{rank.rank()}-{attempts}", draw.uniform(0.01, 0.15))
            if not isinstance(found, list):
                assert found.startswith("WaitTimeout"), found
            else:
                assert found[rank.rank()] == f"{rank.rank()}-{attempts}"
                lists.setdefault(" ".join(found), set()).add(rank.rank())
        return attempts

    _all(lambda rank: life(rank), ranks)
    assert lists
    assert all(got == set(range(size)) for got in lists.values()), lists


def test_a_rank_gives_up_while_another_one_sees_all(group: Callable[[int], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank gets a list with it; and when it comes again, all get one."""
    end, gives_up, seen, gave_up = module._Attempt._end, threading.Event(), threading.Event(), threading.Event()

    def ends(self: Any, generation: int, how: str) -> str:
        if how == module._COMPLETE and generation == 0:
            seen.set()
            gave_up.wait(20)
        elif self.rank == 1 and generation == 0:
            gives_up.set()
            seen.wait(20)
            assert end(self, generation, how) == module._VOID
            gave_up.set()
        return end(self, generation, how)

    monkeypatch.setattr(module._Attempt, "_end", ends)

    def life(rank: Any) -> Any:
        if rank.rank() == 2:
            gives_up.wait(20)
        if rank.rank() == 1:
            assert str(_say(rank, "old", 0.5)).startswith("WaitTimeout")
            return _say(rank, "new")
        return _say(rank, rank.rank())

    assert _all(life, group(3)) == [[0, "new", 2]] * 3


def test_a_rank_whose_bound_is_over_when_all_were_seen_stays(
    group: Callable[[int], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others take it to be there."""
    end = module._Attempt._end

    def ends_late(self: Any, generation: int, how: str) -> str:
        ended = end(self, generation, how)
        time.sleep(1.0)
        return ended

    monkeypatch.setattr(module._Attempt, "_end", ends_late)
    assert _all(lambda rank: _say(rank, rank.rank(), 0.5 if rank.rank() else 20.0), group(3)) == [[0, 1, 2]] * 3


def test_a_generation_in_which_a_rank_has_said_something_before_is_passed_over(group: Callable[[int], list[Any]]) -> None:
    """A process that was killed had come; or a store has answered an attempt that had ended."""
    ranks = group(2)
    PrefixStore("weft/handshake", ranks[1].store.clone()).set("0/1", '"old"')
    assert _say(ranks[1], "new", 0.3).startswith("WaitTimeout: within 0.3 s (WEFT_TIMEOUT_S), rank 0 has not come")
    assert _all(lambda rank: _say(rank, "new"), ranks) == [["new", "new"]] * 2


def test_ranks_that_are_new_find_the_generation(group: Callable[[int], list[Any]]) -> None:
    """Their processes have seen none of those before."""
    ranks = group(2)
    for _ in range(3):
        ranks = [Rank(rank.store, rank.rank(), 2) for rank in ranks]
        assert "rank 1 has not come" in _say(ranks[0], "old", 0.1)
        assert _all(lambda rank: _say(rank, rank.rank()), ranks) == [[0, 1]] * 2


_SERVER = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
print(store.port, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_store_whose_process_is_stopped_or_killed_is_not_waited_for(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch bounds no question to a store that does not answer."""
    monkeypatch.setattr(module, "store_of", lambda rank, name: PrefixStore(name, rank.store.clone()))
    monkeypatch.setattr(module, "_ANSWER_S", 0.3)
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        rank = Rank(dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False), 1, 2)
        strike = threading.Timer(0.8, server.send_signal, [how])
        strike.start()
        began = time.monotonic()
        error = _say(rank, "mine", 2.0)
        took = time.monotonic() - began
        server.kill()
    assert took < LATE_S
    assert "rank 0 has not come" in error
    assert str(error).startswith("PeerLost: the store of the group is lost" if how == signal.SIGKILL else "WaitTimeout")


# --- operators, in processes -----------------------------------------------------------------------------------------


def _call(group: dist.ProcessGroup | None = None) -> None:
    size = dist.get_world_size(group)
    a, b = torch.full((2, 4), 1.0 + dist.get_rank(group)), torch.ones(4, 3)
    expected = torch.cat([torch.full((2, 3), 4.0 * (1 + rank)) for rank in range(size)])
    torch.testing.assert_close(weft.all_gather_matmul(a, b, group=group), expected)


def _other_operator(group: dist.ProcessGroup) -> None:
    weft.matmul_all_reduce(torch.ones(2, 4), torch.ones(4, 3), group=group)


def _error(call: Callable[[], object]) -> tuple[str, float]:
    began = time.monotonic()
    try:
        call()
    except (WaitTimeout, PeerLost, RankMismatch) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "no error", time.monotonic() - began


def _one_elsewhere(where: str) -> tuple[str, float]:
    """The last rank is elsewhere when the others make a group's first call; then all make one."""
    with pytest.MonkeyPatch.context() as patch:
        # A rank that is late is waited for: a busy machine must not make it later than the bound.
        patch.setenv("WEFT_TIMEOUT_S", str(10 * BOUND_S if where == "late" else BOUND_S))
        group = dist.new_group()
        last = dist.get_rank() == dist.get_world_size() - 1
        if where == "late":
            time.sleep(0.5 * BOUND_S * last)
            found = _error(lambda: _call(group))
        elif last and where == "operator":
            found = _error(lambda: _other_operator(group))
        elif last:
            time.sleep(1.4 * BOUND_S if where == "asleep" else 0.0)
            dist.barrier(group)
            found = "elsewhere", 0.0
        else:
            found = _error(lambda: _call(group))
            if where != "operator":
                dist.barrier(group)
        dist.barrier()
        weft.close(group)
        dist.barrier()
        _call(group)
        weft.close(group)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("where", ["barrier", "asleep", "operator", "late"])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_first_call_is_bounded_when_a_rank_is_elsewhere(ranks: RankFixture, size: int, where: str) -> None:
    *found, last = ranks(size).run(_one_elsewhere, where)
    for error, seconds in found:
        assert seconds < BOUND_S + LATE_S
        if where == "late":
            assert error == "no error"
        elif where == "operator":
            assert error.startswith(("RankMismatch", "PeerLost"))
            assert "all_gather_matmul" in error
            assert "matmul_all_reduce" in error
        else:
            assert error.startswith(f"WaitTimeout: within {BOUND_S:g} s (WEFT_TIMEOUT_S), ")
            assert f"rank {size - 1} has not come" in error
    assert where != "operator" or last[0].startswith(("RankMismatch", "PeerLost"))


def _one_dies() -> tuple[str, float]:
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(0.5)
        os._exit(1)
    return _error(_call)


@pytest.mark.ranks
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_first_call_is_bounded_when_a_rank_is_dead(size: int) -> None:
    with Ranks(size, environment={"WEFT_TIMEOUT_S": str(BOUND_S)}) as pool, pytest.raises(RankFailed) as caught:
        pool.run(_one_dies, timeout_s=30)
    for error, seconds in caught.value.results[:-1]:
        assert seconds < BOUND_S + LATE_S
        assert f"rank {size - 1} has not come" in error


def _store_ends(port: int) -> tuple[str, float]:
    """Rank 0, which hosts the store, ends before the first call of a group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    dist.barrier()  # otherwise rank 1 may still need the store for its connections
    if dist.get_rank() == 0:
        time.sleep(0.5)
        os._exit(1)
    time.sleep(1.5)
    return _error(_call)


@pytest.mark.ranks
def test_the_first_call_without_a_store_says_so_within_the_bound() -> None:
    """Without torchrun, rank 0 hosts the store."""
    bound_s = 40.0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Ranks(2, environment={"WEFT_TIMEOUT_S": str(bound_s)}) as pool, pytest.raises(RankFailed) as caught:
        pool.run(_store_ends, port, timeout_s=60)
    error, seconds = caught.value.results[1]
    assert error.startswith("PeerLost: the store of the group is lost, and with it the process that hosts it")
    assert seconds < bound_s / 2


def test_nobody_waits_longer_than_the_bound_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that does not answer at all leaves nothing to end."""
    never = threading.Event()
    monkeypatch.setattr(module, "store_of", lambda rank, name: never.wait())
    monkeypatch.setattr(module, "refusal_of_store", lambda group: "")
    monkeypatch.setattr(module, "_ANSWER_S", 20.0)
    began = time.monotonic()
    error = _say(Rank(None, 1, 2), "mine", 1.0)
    assert str(error).startswith("WaitTimeout: within 1 s")
    assert time.monotonic() - began < LATE_S
    never.set()
