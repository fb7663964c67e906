"""A fork of a rank's process has the rank's memory and connections, but not its threads. It is refused, and harms no call."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pools import shared_ranks

import weft
from weft import collectives
from weft.comm.rank_group import RankGroup
from weft.runtime.groups import GROUPS
from weft.runtime.ranks import Ranks

pytestmark = pytest.mark.ranks
plain = shared_ranks(2, {"WEFT_TIMEOUT_S": "60"})
on_nodes = shared_ranks(2, {"WEFT_TIMEOUT_S": "60", "WEFT_RANKS_PER_NODE": "1"})

A, B, WRONG = torch.ones(4, 8), torch.ones(8, 4), torch.ones(8, 5, dtype=torch.float64)
PUBLIC: dict[str, Callable[[], Any]] = {
    "all_gather_matmul": lambda: weft.all_gather_matmul(A, B),
    "all_to_all_matmul": lambda: weft.all_to_all_matmul(A, B),
    "matmul_all_reduce": lambda: weft.matmul_all_reduce(A, B),
    "matmul_all_to_all": lambda: weft.matmul_all_to_all(A, B),
    "matmul_reduce_scatter": lambda: weft.matmul_reduce_scatter(A, B),
    "splits": lambda: weft.all_to_all_matmul(A, B[None], splits=torch.tensor([2, 2]), max_rows=8),
    "embedding_bag_all_to_all": lambda: weft.embedding_bag_all_to_all(torch.zeros(4, dtype=torch.int64), torch.arange(4), [A]),
    "a wrong argument": lambda: weft.all_gather_matmul(A, WRONG),
    "all_gather": lambda: collectives.all_gather(A),
    "all_reduce": lambda: collectives.all_reduce(A.clone()),
    "all_reduced": lambda: collectives.all_reduced(A),
    "concurrent": lambda: weft.concurrent(lambda: A + 1, weft.AllReduce(A.clone())),
    "empty": lambda: collectives.empty(4, 8),
    "synchronize": lambda: weft.synchronize(),
    "choices": lambda: weft.choices(),
    "concurrent_choices": lambda: weft.concurrent_choices(),
    "close": lambda: weft.close(),
}
"""Calls of users."""
ASKS = {"choices", "concurrent_choices", "close"}
"""Calls that raise nothing in a fork."""
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "acquire": (None,),
    "publish_error_before_first_call": (None, ValueError("x")),
    "open_store": ("x",),
    "agree_on_call": ("x",),
    "number_agreed_text": ("x",),
    "begin_agreed_call": (2,),
    "log_agreed_call": (2,),
    "await_same_call": (2,),
    "publish_error_instead": (ValueError("x"),),
    "exchange_names": ("x",),
    "wait_until": (lambda: False, lambda: "x"),
    "fail": (ValueError("x"),),
    "await_notified": (0.1,),
}
"""The arguments of methods of a RankGroup. All others have none."""


def in_a_fork(work: Callable[[], Any]) -> str:
    """What the work raises in a fork of this process, within 20 s."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        said = ""
        try:
            work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode()[:2000])
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read() if status == 0 else f"ended with status {status}"


def called(names: list[str], first: bool) -> dict[str, str]:
    """What each call raises in a fork of rank 0, after which the ranks' own calls are right."""
    found = {}
    weft.close()
    for name in names:
        if not first:
            assert (weft.all_gather_matmul(A, B) == 8).all()
        dist.barrier()
        if dist.get_rank() == 0:
            found[name] = in_a_fork(PUBLIC[name])
        dist.barrier()
        assert (weft.all_gather_matmul(A, B) == 8).all(), name
        assert (collectives.all_reduced(A) == 2).all(), name
        if first:
            dist.barrier()
            weft.close()
    weft.close()
    return found


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_users_call_in_a_fork_is_refused_and_harms_nobody(plain: Ranks, on_nodes: Ranks, nodes: int, first: bool) -> None:
    names = [name for name in PUBLIC if nodes == 1 or name not in ("splits", "empty")]
    found = (plain if nodes == 1 else on_nodes).run(called, names, first, timeout_s=300)[0]
    for name, said in found.items():
        if name in ASKS or (first and name == "synchronize"):
            assert said == "", name
        elif name != "a wrong argument":
            assert said.startswith("WeftError: process "), (name, said)
            assert "is a fork of " in said, name


def methods_called() -> dict[str, bool]:
    """By method of a RankGroup: whether all control segments are the same after rank 0's fork has called it."""
    weft.close()
    assert (weft.all_gather_matmul(A, B) == 8).all()
    group = GROUPS.state(dist.group.WORLD.group_name).rank_group  # type: ignore[union-attr]
    dist.barrier()
    same: dict[str, bool] = {}
    if dist.get_rank() == 0:
        for name, member in vars(RankGroup).items():
            if name.startswith("_") or not isinstance(member, (FunctionType, classmethod, staticmethod)):
                continue
            arguments = tuple(dist.group.WORLD if one is None else one for one in ARGUMENTS.get(name, ()))

            def work(name: str = name, arguments: tuple[Any, ...] = arguments) -> None:
                with getattr(group, name)(*arguments):  # a context ends with an error
                    raise KeyError(name)

            before = [control.snapshot() for control in group._control]
            in_a_fork(work)
            same[name] = before == [control.snapshot() for control in group._control]
    dist.barrier()
    assert (weft.all_gather_matmul(A, B) == 8).all()
    return same


def test_no_method_of_a_rank_group_writes_from_a_fork(plain: Ranks) -> None:
    same = plain.run(methods_called, timeout_s=300)[0]
    assert all(same.values()), same
    assert {"fail", "close", "release", "wait_until", "fail_later", "mark_raised", "check_peers"} <= set(same)
    assert set(ARGUMENTS) <= set(same)


class Attached:
    def close(self) -> None:
        pass


def forked_while_a_thread_makes(first: bool) -> str:
    """What a fork gets that attaches to a group while a thread of the parent does, or makes a group's state while it does."""
    weft.close()
    assert (weft.all_gather_matmul(A, B) == 8).all()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    state, begun, ends = GROUPS.state(name), threading.Event(), threading.Event()

    def make() -> Attached:
        begun.set()
        ends.wait(60)
        return Attached()

    def hold() -> None:
        if first:
            with GROUPS._making.setdefault(name, threading.Lock()):
                make()
        else:
            state.attached(Attached, make)

    def work() -> None:
        if first:
            del GROUPS._states[name]
            GROUPS.state(name)
        else:
            state.attached(Attached, Attached)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert begun.wait(60)
        return in_a_fork(work)
    finally:
        ends.set()
        thread.join()
        dist.barrier()
        weft.close()


@pytest.mark.parametrize("first", [False, True])
def test_a_fork_does_not_wait_for_a_thread_of_its_parent(plain: Ranks, first: bool) -> None:
    for said in plain.run(forked_while_a_thread_makes, first):
        assert said.startswith("WeftError: process ") if first else said == "", said
