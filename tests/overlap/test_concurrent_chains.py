"""Collectives of one use that feed each other, stages whose sizes differ, and averages that fail."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture

import weft
from weft.core.errors import PeerLost
from weft.core.schedule import UserCall
from weft.overlap.concurrent.collectives import SendReceive, rehearsed
from weft.overlap.concurrent.executor import CollectivePart, Executor, Program


def _averaged_in_two_steps(repeatable: bool) -> list[float]:
    """What each use makes of 1 and 2."""
    weft.close()
    found = []
    for _ in range(3):
        gradients, shard = torch.full((2,), 1.0 + dist.get_rank()), torch.empty(1)
        chain = [weft.ReduceScatter(shard, gradients), weft.AllGather(gradients, shard)]
        if repeatable:
            weft.concurrent(lambda: torch.ones(8, 8) @ torch.ones(8, 8), chain, key="chain", repeatable=True)
        else:
            with weft.concurrent(collectives=chain, key="chain"):
                torch.ones(8, 8) @ torch.ones(8, 8)
        found += gradients.tolist()
    weft.close()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("repeatable", [False, True])
def test_a_trial_leaves_alone_what_a_later_collective_writes(ranks: RankFixture, repeatable: bool) -> None:
    assert ranks(2).run(_averaged_in_two_steps, repeatable) == [[3.0] * 6] * 2


def test_what_a_use_reads_is_kept_while_it_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Moves(weft.AllGather):
        def __post_init__(self) -> None:
            pass

    first, second, third = torch.zeros(4), torch.ones(4), torch.full((4,), 2.0)
    with rehearsed([Moves(second, first), Moves(third, second), Moves(first, third)]) as again:
        for one in again:
            one.writes[0].fill_(7.0)  # type: ignore[attr-defined]
    assert [float(one[0]) for one in (first, second, third)] == [0.0, 1.0, 2.0]


def _stages() -> bool:
    peer = 1 - dist.get_rank()
    whole, less = torch.ones(4), torch.ones(2)
    return SendReceive(send=whole, to=peer).signature == SendReceive(send=less, to=peer, receive=whole, source=peer).signature


@pytest.mark.ranks
def test_a_smaller_microbatch_is_no_key_of_its_own(ranks: RankFixture) -> None:
    """Ranks meet at a new key, and the microbatch reaches stages at different uses."""
    assert ranks(2).run(_stages) == [True] * 2


def test_gradients_that_could_not_be_averaged_raise() -> None:
    executor, under_way = Executor(torch.device("cpu")), threading.Event()

    def wait() -> None:
        under_way.wait()
        raise PeerLost("rank 1 died")

    program = Program(name="nccl", computation=UserCall("computation"), beside=(CollectivePart(0),))
    executor._start_collective = lambda collective: wait  # type: ignore[method-assign]
    given = executor.future(program, cast(Any, None), torch.ones(2))
    assert not given.done()
    under_way.set()
    with pytest.raises(RuntimeError, match="rank 1 died"):
        given.wait()
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: executor.future(program, cast(Any, None), grad) and None)
    with pytest.raises(PeerLost, match="rank 1 died"):
        x.sum().backward()
