"""Threads that call one group at the same time are refused: ranks tell the calls of a group apart by their order alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rank_pools import shared_ranks

import weft
from weft.core.errors import WeftError
from weft.runtime.ranks import Ranks

pytestmark = pytest.mark.ranks
plain = shared_ranks(2, {"WEFT_TIMEOUT_S": "60"})
MINE = "calls weft while a call of another thread of rank"


def request(value: float) -> bool:
    """A call with these values on every rank. Whether its result is its own."""
    out = weft.all_gather_matmul(torch.full((2, 4), value), torch.ones(4, 3))
    return bool((out == 4 * value).all())


def _in_two_threads(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What each of two threads gets, of which the second begins once the first is in its call."""
    said: dict[str, str] = {}

    def run(name: str) -> None:
        try:
            said[name] = str(calls[name]())
        except (WeftError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=(name,), name=name) for name in calls]
    for thread in threads:
        thread.start()
        time.sleep(0.5)
    for thread in threads:
        thread.join()
    return said


def _other_orders() -> tuple[dict[str, str], bool]:
    """The ranks' threads come in other orders, with calls of equal sizes. Rank 1's come when rank 0's are both there."""
    assert request(1.0)
    dist.barrier()
    calls: dict[str, Callable[[], object]] = {"A": lambda: request(2.0), "B": lambda: request(3.0)}
    if dist.get_rank() == 1:
        time.sleep(2.0)
        calls = {"B": calls["B"]}
    said = _in_two_threads(calls)
    dist.barrier()
    weft.close()
    return said, request(4.0)


def test_two_threads_in_one_group_are_refused_on_all_ranks(plain: Ranks) -> None:
    """Rank 1's call is equal to that of rank 0's first thread in everything but its rows."""
    (first, again), (second, _) = plain.run(_other_orders, timeout_s=60)
    assert first["B"].startswith("ValueError: group: thread B calls weft while a call of another thread of rank 0")
    assert MINE in first["A"]
    assert second["B"].startswith("PeerLost: rank 0 failed: ")
    assert MINE in second["B"]
    assert again


def _one_after_the_other() -> list[str]:
    """Threads take turns, in whatever threads there are."""
    said: list[str] = []
    for turn in range(6):
        thread = threading.Thread(target=lambda turn=turn: said.append(str(request(1.0 + turn))))  # type: ignore[misc]
        thread.start()
        thread.join()
    return said


def test_threads_may_take_turns(plain: Ranks) -> None:
    assert plain.run(_one_after_the_other, timeout_s=60) == [["True"] * 6] * 2


def _asks_meanwhile() -> tuple[dict[str, str], bool]:
    """A thread looks at the choices while another one waits in a call."""
    assert request(1.0)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1.5)
        return {}, request(2.0)
    said = _in_two_threads({"A": lambda: request(2.0), "B": lambda: len(weft.choices()) + len(weft.concurrent_choices())})
    return said, True


def test_a_thread_may_ask_while_another_calls(plain: Ranks) -> None:
    (said, _), (_, right) = plain.run(_asks_meanwhile, timeout_s=60)
    assert right
    assert said["A"] == "True"
    assert said["B"].isdecimal()
